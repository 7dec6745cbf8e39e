"""Random bundles: complete, reproducible, and with a tokenizer that can say every byte and every id."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.errors import DestinationError
from edgeinfer.graph import build_graph, builtin_shapes, expected_types, requested_types
from edgeinfer.quant import layouts, requestable
from tests.helpers.bundles import tensor_bytes

ROOT = Path(__file__).resolve().parents[2]
SMALL = replace(SHAPES["tinyllama-1.1b"], hidden_size=72, intermediate_size=100, num_hidden_layers=2, vocab_size=300,
                num_attention_heads=4, num_key_value_heads=2, head_dim=18, attention_bias=True)


@pytest.mark.parametrize("weights", requestable())
def test_every_tensor_keeps_the_size_of_its_input(tmp_path: Path, weights: str) -> None:
    write_random_bundle(SMALL, tmp_path / "m", weights=weights, group_size=32)
    bundle = Bundle.open(tmp_path / "m")
    bundle.verify()
    assert bundle.config == SMALL and bundle.quantisation.weights == weights
    graph = build_graph(bundle.config, expected_types(bundle.types))
    bundle.check_graph(graph)
    for weight in graph.weights:
        stored = bundle.types[weight.name]
        if stored.layout == "plain":
            values = tensor_bytes(bundle, weight.name).view("<f4")
            assert abs(values.mean() - (0 if weight.name.endswith("_bias") else 1)) < 0.02
        else:
            data = tensor_bytes(bundle, weight.name)
            values = layouts.unpack_tile16(data, stored.dtype, stored.group_size, weight.shape, stored.levels)
            assert np.isfinite(values).all()
            assert 0.9 < values.std() * np.sqrt(weight.shape[1]) < 1.2, weight.name
            assert abs(values.mean()) * np.sqrt(weight.shape[1]) < 0.1


def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_bundle(SMALL, tmp_path / name, seed=seed)
    a, b, c = (Bundle.open(tmp_path / name).weights.tobytes() for name in "abc")
    assert a == b != c


def test_progress_and_destination(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    write_random_bundle(SMALL, tmp_path / "m", progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] == sum(t.nbytes for t in Bundle.open(tmp_path / "m").tensors.values())
    with pytest.raises(DestinationError, match="m already exists"):
        write_random_bundle(SMALL, tmp_path / "m")
    write_random_bundle(SMALL, tmp_path / "m", weights="int8", overwrite=True)


def test_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_random_bundle(SMALL, tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL.vocab_size
    for text in ("Once upon a time, there\n", "\u00e9\u4f60\U0001f600 \x00\x7f"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == 1 and len(ids) == 1 + len(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([299]) == " w299"
    write_random_bundle(replace(SMALL, vocab_size=100), tmp_path / "small")
    assert Bundle.open(tmp_path / "small").files == {}


ALIKE = sorted(name for name, c in SHAPES.items() if not (c.latent or c.ffn_sizes or c.head_dims))
"""Shapes whose layers are alike, and of which keys and values are heads."""
UNGATED = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "mpt", "nemotron_h", "opt", "phi",
           "starcoder2")
"""Families whose FFN has two matrices, some with a table of positions, too."""


@pytest.mark.parametrize("name", ALIKE)
def test_shapes(name: str) -> None:
    c = SHAPES[name]
    ungated = builtin_shapes()[name].config["model_type"] in UNGATED
    if ungated or c.recurrent or (c.experts and c.experts.dense_layers):  # whose layers have no one formula
        assert build_graph(c, requested_types("q4", 32)).weight_count == builtin_shapes()[name].parameters
        return
    inner = c.experts.total * c.experts.intermediate_size + c.experts.shared_size if c.experts else c.intermediate_size
    parameters = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2) + c.num_hidden_layers * (
        c.hidden_size * (2 * c.query_width + 2 * c.kv_width + 3 * inner)
    )
    assert parameters == pytest.approx(builtin_shapes()[name].parameters, rel=0.001)  # norms and biases are left out


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    module, shape = "edgeinfer.converters.synthetic.random_bundle", "smollm2-135m"
    command = [sys.executable, "-m", module, "--shape", shape, str(tmp_path / "m")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert Bundle.open(tmp_path / "m").config == SHAPES[shape]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("m already exists; choose another name, or overwrite it (--overwrite).")


def test_the_error_names_the_missing_name() -> None:
    import edgeinfer.converters

    with pytest.raises(AttributeError, match=r"module 'edgeinfer\.converters' has no attribute 'magic'"):
        _ = edgeinfer.converters.magic
    assert callable(edgeinfer.converters.convert)
