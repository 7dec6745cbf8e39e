"""Conversion: every weight lands where the graph says, rounded as asked; what comes along; how much memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import Checkpoint, convert
from edgeinfer.graph import Graph, Weight, build_graph, expected_types
from edgeinfer.quant import layouts
from tests.helpers.bundles import tensor_bytes
from tests.helpers.checkpoints import make_checkpoint, read_tensors, save_tensors, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"q4": 0.1, "int8": 0.006, "f16": 5e-4, "f32": 0.0}
"""Relative error (root of squared error / squared norm) of a tensor of normal weights."""


def stored_tiles(sources: list[np.ndarray], combine: str) -> np.ndarray:
    """Rows in stored order, tile by tile in loops."""
    if combine == "concat":
        return np.concatenate(sources)
    rows = []
    for tile in range(0, len(sources[0]), 16):
        for source in sources:
            part = source[tile : tile + 16]
            rows += [*part, *np.zeros((16 - len(part), *source.shape[1:]), np.float32)]
    return np.stack(rows)


def graph_of(bundle: Bundle) -> Graph:
    graph = build_graph(bundle.config, expected_types(bundle.types))
    bundle.check_graph(graph)
    return graph


def loaded(bundle: Bundle, weight: Weight) -> np.ndarray:
    stored = bundle.types[weight.name]
    data = tensor_bytes(bundle, weight.name)
    if stored.layout == "plain":
        return data.view("<f4")
    return layouts.unpack_tile16(data, stored.dtype, stored.group_size, weight.shape, stored.levels)


@pytest.mark.parametrize("weights", ["q4k", "q5k", "tableq", "tableq3"])
def test_a_type_that_few_models_have_is_made_of_floats(tmp_path: Path, weights: str) -> None:
    """Each weight in its place; the tiny model's rows are no blocks of 256 columns, which is said."""
    source = make_checkpoint(tmp_path / "hf", "llama")
    tensors = read_tensors(source)
    report = convert(source, tmp_path / "bundle", weights=weights)
    with Bundle.open(tmp_path / "bundle") as bundle:
        bundle.verify()
        for weight in graph_of(bundle).weights:
            want = stored_tiles([tensors[source.name] for source in weight.sources], weight.combine)
            stored = bundle.types[weight.name]
            error = np.linalg.norm(loaded(bundle, weight) - want) / np.linalg.norm(want)
            assert error <= {3: 0.16, 4: 0.08, 5: 0.04}.get(stored.storage.bits, 0.01), weight.name
            assert bool(stored.levels) == (stored.dtype == weights and "tableq" in weights)
    said = f"and {weights} needs a multiple of 256: they are stored as"
    assert sum(said in remark for remark in report.remarks) == ("k" in weights)


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("weights", ["q4", "int8", "f16", "f32"])
def test_every_weight_in_its_place(tmp_path: Path, model_type: str, weights: str) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if model_type == "llama" else {}
    source = make_checkpoint(tmp_path / "hf", model_type, **biases)
    tensors = read_tensors(source)
    report = convert(source, tmp_path / "bundle", weights=weights, group_size=32)
    bundle = Bundle.open(tmp_path / "bundle")
    bundle.verify()
    for weight in graph_of(bundle).weights:
        want = stored_tiles([tensors[source.name] for source in weight.sources], weight.combine)
        have = loaded(bundle, weight)
        assert have.shape == want.shape == weight.shape, weight.name
        dtype = bundle.types[weight.name].dtype
        error = np.linalg.norm(have - want) / np.linalg.norm(want)
        assert error <= TOLERANCE[dtype], weight.name
        if dtype == "f16":
            np.testing.assert_array_equal(have, want.astype(np.float16).astype(np.float32))
        reported = next(t for t in report.tensors if t.name == weight.name)
        if dtype != "f32":
            np.testing.assert_allclose(reported.relative_error, error**2, rtol=1e-2)
    assert report.worst is None if weights == "f32" else report.worst in report.tensors
    assert report.bundle_bytes == sum(t.nbytes for t in report.tensors)


def test_types_by_default_and_by_request(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    types = {}
    asked = {"weights": "int8", "embedding": "q4", "head": "f32", "group_size": 64}
    for name, options in {"default": {}, "f16": {"weights": "f16"}, "asked": asked}.items():
        convert(source, tmp_path / name, **options)  # type: ignore[arg-type]
        bundle = Bundle.open(tmp_path / name)
        types[name] = [bundle.types[w].dtype for w in ("layers.0.qkv", "embed", "head", "norm")]
        assert [bundle.quantisation.weights, bundle.quantisation.embedding, bundle.quantisation.head] == types[name][:3]
    assert types == {
        "default": ["q4", "int8", "int8", "f32"],
        "f16": ["f16", "f16", "f16", "f32"],
        "asked": ["int8", "q4", "f32", "f32"],
    }
    assert Bundle.open(tmp_path / "asked").quantisation.group_size == 64
    assert Bundle.open(tmp_path / "asked").types["embed"].group_size == 64


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_source_types_and_shards(tmp_path: Path, dtype: str, shards: int) -> None:
    exact = {f"model.layers.{i}.mlp.{p}_proj.weight": np.random.default_rng(i).integers(-8, 8, s).astype(np.float32)
             for i in (0, 1) for p, s in (("gate", (84, 48)), ("up", (84, 48)), ("down", (48, 84)))}
    source = make_checkpoint(tmp_path / "hf", dtype=dtype, shards=shards, tensors=exact)
    assert len(list(source.glob("*.safetensors"))) == shards
    convert(source, tmp_path / "bundle", weights="f32")
    bundle = Bundle.open(tmp_path / "bundle")
    for weight in graph_of(bundle).weights:
        if weight.sources[0].name in exact:  # small integers are exact in every type
            want = stored_tiles([exact[source.name] for source in weight.sources], weight.combine)
            np.testing.assert_array_equal(loaded(bundle, weight), want)


def test_blocks_of_rows_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "hf")
    convert(source, tmp_path / "whole")
    monkeypatch.setattr("edgeinfer.converters.packing.BLOCK_WEIGHTS", 1)
    convert(source, tmp_path / "pieces")
    whole, pieces = Bundle.open(tmp_path / "whole"), Bundle.open(tmp_path / "pieces")
    assert whole.header.tensors == pieces.header.tensors


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    report = convert(source, tmp_path / "bundle")
    assert "head" not in Bundle.open(tmp_path / "bundle").tensors
    assert report.remarks == ()


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_embedding(tmp_path: Path, same: bool) -> None:
    source = make_checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    tensors = read_tensors(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if same else 1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
    save_tensors(source, tensors)
    remarks = convert(source, tmp_path / "bundle").remarks
    said = "lm_head.weight differs from model.embed_tokens.weight and is left out: tie_word_embeddings is true."
    assert remarks == (() if same else (said,))


def test_files_that_travel(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    wanted = ("chat_template.jinja", "LICENSE", "LICENSE.txt", "README.md", "merges.txt")
    for name in (*wanted, "modeling.py", "pytorch_model.bin", "x.pt", "training_args.json"):
        (source / name).write_text(name)
    convert(source, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    assert sorted(bundle.files) == [
        "LICENSE", "LICENSE.txt", "README.md", "chat_template.jinja", "generation_config.json", "merges.txt",
        "tokenizer.json", "tokenizer_config.json",
    ]
    for name in bundle.files:
        assert (bundle.path / name).read_bytes() == (source / name).read_bytes()
    assert sorted(p.name for p in bundle.path.iterdir()) == sorted([*bundle.files, "bundle.json", "weights.bin"])
    assert bundle.header.source == "hf"


def test_end_tokens_of_the_generation_config(tmp_path: Path) -> None:
    convert(make_checkpoint(tmp_path / "hf"), tmp_path / "bundle")
    assert Bundle.open(tmp_path / "bundle").config.eos_token_ids == (2, 3)


def test_a_checkpoint_without_tokenizer(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", tokenizer=False)
    assert convert(source, tmp_path / "bundle").remarks == (
        f"{source} has no tokenizer, so the bundle takes token ids only.",
    )


def test_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    source = make_checkpoint(tmp_path / "hf")
    report = convert(source, tmp_path / "bundle", progress=lambda *call: calls.append(call))
    sizes = [values.nbytes for values in read_tensors(source).values()]
    assert calls[-1][:2] == (sum(sizes), sum(sizes)) == (report.source_bytes, report.source_bytes)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert {call[2] for call in calls} == set(read_tensors(source))


def test_report(tmp_path: Path) -> None:
    report = convert(make_checkpoint(tmp_path / "hf"), tmp_path / "bundle")
    assert report.destination == tmp_path / "bundle" and report.seconds > 0
    assert 0.05 < report.gain < 0.2
    assert report.worst is not None and report.worst.dtype == "q4" and 0.05 < report.worst.gain < 0.2
    assert 0 < report.mean_relative_error < report.worst.relative_error < 0.01


def test_inspecting_a_checkpoint(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    with Checkpoint.open(source) as checkpoint:
        assert checkpoint.config.hidden_size == 48
        assert checkpoint.tensor("lm_head.weight").shape == (300, 48)


def test_real_models(tmp_path: Path, shared_data) -> None:
    source = shared_data("models/stories260K-hf")  # ffn 172 and head_dim 8: padding everywhere
    tensors = read_tensors(source)
    report = convert(source, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    for weight in graph_of(bundle).weights:
        want = stored_tiles([tensors[source.name] for source in weight.sources], weight.combine)
        error = np.linalg.norm(loaded(bundle, weight) - want) / np.linalg.norm(want)
        assert error <= TOLERANCE[bundle.types[weight.name].dtype]
    assert bundle.file("tokenizer.model") is not None
    assert report.gain > 0.1


MEASURE = """
import sys
from edgeinfer.converters import convert

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

convert(sys.argv[1], sys.argv[2], weights=sys.argv[3])
print(peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is read from /proc")
@pytest.mark.parametrize("weights", ["q4", "f32"])
def test_memory_does_not_grow_with_the_tensors(tmp_path: Path, weights: str) -> None:
    """The largest tensor has 200 MB; the limit of the contract is twice that and 300 MB, we stay far below."""
    vocab_size, hidden = 100_000, 512
    table = np.random.default_rng(0).standard_normal((vocab_size, hidden), np.float32)
    source = make_checkpoint(tmp_path / "hf", vocab_size=vocab_size, hidden_size=hidden, head_dim=128,
                             tie_word_embeddings=True, tensors={"model.embed_tokens.weight": table})
    assert table.nbytes > 200e6
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "bundle"), weights]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300e6


def test_a_tokenizer_for_tests(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    assert len(model["vocab"]) == 300
