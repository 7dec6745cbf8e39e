"""Inputs of matrices over a text, and conversions that round by them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgeinfer.bundle import Bundle
from edgeinfer.calibration import inputs
from edgeinfer.calibration.hooks import open_plain
from edgeinfer.calibration.inputs import MatrixInput, capture_inputs, matrix_inputs
from edgeinfer.calibration.statistics import Covariance, capture
from edgeinfer.converters import CALIBRATION_FILE, Checkpoint, by_imatrix, convert, write_random_bundle
from edgeinfer.errors import DestinationError, RequestError, UsageError
from edgeinfer.graph import ExpertsConfig
from edgeinfer.models import calibrated
from edgeinfer.models.calibrated import BUILT_IN, GPTQ, IMPORTANCE, by_text, calibration_text
from edgeinfer.models.comparison import check_text, compare
from edgeinfer.quant import InputStatistics
from edgeinfer.runner import PROMPT
from edgeinfer.text import Tokenizer
from tests.helpers.checkpoints import SENTENCES, make_checkpoint
from tests.helpers.sessions import TINY, tokens

MOE = replace(TINY, model_type="qwen3_moe", experts=ExpertsConfig(5, 2, 40))
DATA = Path(__file__).parents[1] / "data"
IDS = tokens(100)
TEXT = "\n".join(SENTENCES * 60)
Found = dict[str, list[InputStatistics]]


def captured(path: Path, *, threads: int = 2, chunk: int = 40, limit: int = inputs.MEMORY_BYTES,
             ids: list[int] = IDS, window: int = 64) -> tuple[Found, list[MatrixInput]]:
    opened, found = open_plain(path, window, threads, kv="f32", outputs=chunk, chunk=chunk), Found()
    try:
        capture_inputs(opened, ids, lambda one, all_of: found.update({name: list(all_of) for name in one.weights}),
                       limit=limit)
        return found, matrix_inputs(opened.graph)
    finally:
        opened.close()


def bits(found: Found) -> dict[str, bytes]:
    return {name: b"".join(one.mean_square.tobytes() + np.asarray(one.covariance).tobytes() for one in pieces)
            for name, pieces in found.items()}


@pytest.mark.parametrize("model", [TINY, pytest.param(MOE, marks=pytest.mark.slow)], ids=["dense", "experts"])
def test_inputs_are_the_same_bits_for_any_groups_and_threads(tmp_path: Path, model) -> None:  # type: ignore[no-untyped-def]
    write_random_bundle(model, tmp_path / "m", weights="f32")
    found, listed = captured(tmp_path / "m")
    assert {name for one in listed for name in one.weights} == found.keys()
    assert {"layers.0.qkv", "layers.1.o"} <= found.keys() and not any("router" in name for name in found)
    assert found.keys() & {"head", "embed"}
    assert bits(captured(tmp_path / "m", threads=1, limit=0)[0]) == bits(found)
    for some in (2, 3):  # groups that begin and end within layers
        limit = 4 * len(IDS) * model.hidden_size + some * max(one.nbytes for one in listed)
        assert bits(captured(tmp_path / "m", limit=limit)[0]) == bits(found), some


def test_inputs_are_those_of_the_hooks(tmp_path: Path) -> None:
    write_random_bundle(TINY, tmp_path / "m", weights="f32")
    found, listed = captured(tmp_path / "m", limit=0)
    opened = open_plain(tmp_path / "m", 64, kv="f32", chunk=40)
    wanted = {one.weights[0]: (one.op, Covariance(one.op.x)) for one in listed if one.op.layer is not None}
    capture(opened, IDS, {op: [one] for op, one in wanted.values()}, role=PROMPT)
    opened.close()
    for name, (_, one) in wanted.items():
        assert found[name][0].tokens == len(IDS)
        np.testing.assert_allclose(found[name][0].covariance, one.mean, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_experts_see_the_tokens_that_chose_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PRIOR", 1e30)  # none: their own tokens alone
    write_random_bundle(MOE, tmp_path / "m", weights="f32")
    rows, add = [], inputs._add

    def note(view, here, one, sums) -> None:  # type: ignore[no-untyped-def]
        if one.weights == ("layers.1.experts_gate_up",):
            rows.append(view.floats(one.op.source).copy())
        add(view, here, one, sums)

    monkeypatch.setattr(inputs, "_add", note)
    found, _ = captured(tmp_path / "m")
    x, experts = np.concatenate(rows).astype(np.float64), found["layers.1.experts_gate_up"]
    assert len(x) == len(IDS)
    assert [len(found[f"layers.1.experts_{which}"]) for which in ("gate_up", "down")] == [5, 5]
    assert sum(one.tokens for one in experts) == 2 * len(IDS) and len({one.tokens for one in experts}) > 1
    total = sum(one.tokens * one.covariance for one in experts if one.covariance is not None)
    np.testing.assert_allclose(total, 2 * x.T @ x, rtol=1e-3, atol=1e-3)


def test_activations_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", tensors={"model.layers.1.input_layernorm.weight":
                                                       np.full(48, 3e38, np.float32)})
    convert(source, tmp_path / "m", weights="f32")
    with pytest.raises(RequestError, match=r"An input of layers.1.qkv is NaN or infinite in the text"):
        captured(tmp_path / "m", ids=[5, 6, 7, 8])


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return make_checkpoint(tmp_path / "hf")


def rounded(source: Path, name: str, method: str = GPTQ, **options):  # type: ignore[no-untyped-def]
    text = calibration_text(source, source.parent / "text.txt", 2048)
    return convert(source, source.parent / name, calibration=by_text(source, text.stream, lambda *_: None, method),
                   **options)


def weights_of(path: Path) -> bytes:
    return (path / "weights.bin").read_bytes()


def test_a_calibrated_bundle_says_so_and_its_outputs_are_nearer(source: Path) -> None:
    plain = convert(source, source.parent / "plain")
    report = rounded(source, "gptq")
    assert not (source.parent / "plain" / CALIBRATION_FILE).exists() and not plain.calibrated
    record = json.loads((source.parent / "gptq" / CALIBRATION_FILE).read_text())
    assert record["method"] == "gptq" and record["text"] == "text.txt" and record["tokens"] == 2048
    assert {"layers.0.qkv", "layers.1.down", "head"} <= record["tensors"].keys()
    assert record["output_error"] < 0.7 * record["output_error_plain"] and report.output_gain > 0.3
    weighted = rounded(source, "importance", IMPORTANCE)
    assert weighted.output_gain > 0
    assert len({weights_of(source.parent / name) for name in ("plain", "gptq", "importance")}) == 3
    for name in ("plain", "gptq"):
        with Bundle.open(source.parent / name) as bundle:
            bundle.verify()
            assert bundle.header.weights_bytes == len(weights_of(source.parent / "plain"))


def test_the_second_time_nothing_is_run(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded(source, "first")
    left = sorted(path.name for path in (source.parent / "cache" / "calibration").iterdir())
    assert len(left) == 1 and not left[0].startswith(".")  # no weights in f16
    monkeypatch.setattr(calibrated, "in_floats", None)
    rounded(source, "second")
    assert weights_of(source.parent / "first") == weights_of(source.parent / "second")


def test_importance_takes_squares_alone(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded(source, "squares", IMPORTANCE)
    kept = source.parent / "cache" / "calibration"
    assert [path.name.rpartition("-")[2] for path in kept.iterdir() if path.is_dir()] == ["squares"]
    few = sum(file.stat().st_size for path in kept.iterdir() if path.is_dir() for file in path.iterdir())
    rounded(source, "gptq")
    assert few < sum(file.stat().st_size for path in kept.iterdir() if path.is_dir() for file in path.iterdir()) / 4
    for path in kept.glob("*-squares"):
        rmtree(path)
    monkeypatch.setattr(calibrated, "in_floats", None)  # those with covariances have squares, too
    rounded(source, "again", IMPORTANCE)
    assert weights_of(source.parent / "squares") == weights_of(source.parent / "again")
    assert weights_of(source.parent / "squares") != weights_of(source.parent / "gptq")


def test_the_oldest_statistics_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "KEPT_BYTES", 250)
    for i, name in enumerate(("first", "second", "third")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.bin").write_bytes(bytes(100))
        os.utime(tmp_path / name, (i, i))
    calibrated._forget(tmp_path / "third")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["second", "third"]
    monkeypatch.setattr(calibrated, "KEPT_BYTES", 50)
    calibrated._forget(tmp_path / "third")
    assert [path.name for path in tmp_path.iterdir()] == ["third"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, DestinationError("The disk is full.")])
def test_what_is_interrupted_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch, error) -> None:  # type: ignore[no-untyped-def]
    def interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(inputs, "_add", interrupted)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        rounded(source, "gptq")
    assert not (source.parent / "gptq").exists()
    assert not [path for path in (source.parent / "cache" / "calibration").iterdir() if path.is_dir()]


def test_weights_that_stay_as_they_are_are_not_calibrated(source: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing to round: all \d+ matrices of .* are stored as they are \(f16\); "
                                         "give --weights q4"):
        rounded(source, "f16", weights="f16")
    with pytest.raises(UsageError, match="--ffn-layout neuron stores neurons one by one"):
        rounded(source, "neuron", ffn_layout="neuron", weights="int8")
    convert(source, source.parent / "bundle")
    with pytest.raises(UsageError, match="is a bundle, whose weights are rounded already"):
        calibration_text(source.parent / "bundle", BUILT_IN)


@pytest.mark.parametrize("text, said", [
    ("", r"has 0 tokens, too few to calibrate with; give 2048 at least"),
    ("A single line.\n", r"has \d+ tokens, too few"),
    ("no text\0" * 3000, "is not a text: it has null bytes"),
    ("the " * 3000, r"repeats \d tokens, and says nothing of others; give a text of 32 different"),
])
def test_texts_that_say_too_little_are_refused(source: Path, text: str, said: str) -> None:
    (source.parent / "text.txt").write_text(text)
    with pytest.raises(RequestError, match=said):
        rounded(source, "gptq")


def test_matrices_that_saw_too_little_are_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "MIN_TOKENS", 50)
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    zeros = make_checkpoint(source.parent / "zeros", tensors={"model.embed_tokens.weight": np.zeros_like(embedding)})
    stream = calibration_text(zeros, source.parent / "text.txt", 50).stream
    said = {method: convert(zeros, source.parent / method, calibration=by_text(zeros, stream, lambda *_: None, method)
                            ).remarks for method in (GPTQ, IMPORTANCE)}
    assert said == {IMPORTANCE: (), GPTQ: (
        "The text has 50 tokens, fewer than the 84 columns of the widest matrix; 84 or more make its rounding better.",
        "The second moments of the inputs of model.layers.0.self_attn.q_proj.weight, "
        "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight and of 8 other matrices are "
        "not positive definite, so codes there are the nearest ones.")}


def test_too_few_tokens_are_no_calibration(source: Path) -> None:
    with pytest.raises(UsageError, match="--calibrate-tokens is 100; it must be 2048 or more"):
        calibration_text(source, BUILT_IN, 100)


def test_a_text_to_compare_on_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(RequestError, match="is empty; give one that the bundle can be measured on"):
        check_text(tmp_path / "empty.txt")


def test_a_text_in_unknown_characters_is_refused(source: Path) -> None:
    settings = json.loads((source / "tokenizer.json").read_text())
    settings["pre_tokenizer"], settings["decoder"] = {"type": "Whitespace"}, {"type": "Fuse"}
    settings["model"] = {"type": "WordLevel", "unk_token": "<unk>",
                         "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "the": 4}}
    (source / "tokenizer.json").write_text(json.dumps(settings))
    (source.parent / "text.txt").write_text("xylophone the " * 3000)
    with pytest.raises(RequestError, match=r"does not know \d+% of the characters of text.txt"):
        rounded(source, "gptq")


def test_a_checkpoint_without_a_tokenizer_takes_no_text(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match=r"has no tokenizer, so no text can be run; give an importance matrix"):
        rounded(source, "gptq")


@pytest.mark.slow
def test_the_comparison_has_the_reference_and_all_methods(source: Path) -> None:
    rounded(source, "gptq")
    text = calibration_text(source, source.parent / "text.txt", 2048)
    ways = {"plain": None, IMPORTANCE: by_text(source, text.stream, lambda *_: None, IMPORTANCE)}
    others = [(name, lambda path, way=way: convert(source, path, calibration=way)) for name, way in ways.items()]  # type: ignore[misc]
    rows = compare(source, source.parent / "text.txt", (GPTQ, source.parent / "gptq"), others, lambda *_: None)
    assert [row.method for row in rows] == ["f16", "plain", "importance", "gptq"]
    assert rows[0].divergence is None and all(row.divergence and row.divergence.kld_mean > 0 for row in rows[1:])
    assert rows[1].bits == rows[3].bits and rows[1].nbytes == rows[3].nbytes and rows[0].bits > rows[1].bits
    first, last = rows[1].divergence, rows[3].divergence
    assert first and last and last.kld_mean < first.kld_mean


@pytest.mark.slow
def test_inputs_are_those_that_llama_imatrix_saw(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    """It saw the same windows, each with another first token."""
    source = shared_data("models/fables-draft")
    convert(source, tmp_path / "m", weights="f32")
    text = (DATA / "box_of_robbers.txt").read_text(encoding="utf-8")
    ids = Tokenizer.open(tmp_path / "m").encode(text)[:4096]
    found, listed = captured(tmp_path / "m", chunk=64, ids=ids, window=512)
    with Checkpoint.open(source) as checkpoint:
        theirs = by_imatrix(DATA / "fables-draft-imatrix.gguf")(checkpoint)
    weights = [one.op.weight for one in listed if one.op.layer is not None]
    assert len(weights) == 12 and not theirs.remarks
    for weight in weights:
        pieces = theirs.of(weight)
        assert pieces and pieces[0].tokens == 4096
        ratio = pieces[0].mean_square / found[weight.name][0].mean_square
        assert abs(np.median(ratio) - 1) < 0.01 and np.quantile(np.abs(ratio - 1), 0.75) < 0.1, weight.name


def test_the_built_in_text_is_long_enough_and_utf_8(source: Path) -> None:
    assert 40_000 < BUILT_IN.stat().st_size < 300_000
    found = calibration_text(source, BUILT_IN)
    assert len(found.stream.ids) == calibrated.TOKENS[GPTQ] and not found.changed
