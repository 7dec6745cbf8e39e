"""Types of the matrices of llama.cpp's files, as llama-quantize chose them for a model of 22 layers and one of 5."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.converters import convert
from edgeinfer.graph import build_graph, read_config
from edgeinfer.models.file_types import mixed_types, types_of_file
from edgeinfer.quant import WeightType
from tests.helpers.checkpoints import make_checkpoint, tiny_config
from tests.helpers.command_line import environment

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 32}


@pytest.mark.parametrize("name, kind", [("Q4_K_M", "q4k"), ("Q5_K_M", "q5k")])
@pytest.mark.parametrize("layers, larger", [(22, [0, 1, 4, 7, 10, 13, 16, 19, 20, 21]), (5, [2, 4])])
def test_types_are_those_of_llama_quantize(name: str, kind: str, layers: int, larger: list[int]) -> None:
    config = read_config(tiny_config(**SIZES, num_hidden_layers=layers, tie_word_embeddings=layers == 5))
    graph = build_graph(config, types_of_file(name, layers, layers == 5, values=True))
    found = {weight.name: graph.types[weight.name].dtype for weight in graph.weights
             if graph.types[weight.name].layout != "plain"}
    wanted = {"embed": "q6" if layers == 5 else kind} | ({} if layers == 5 else {"head": "q6"})
    for i in range(layers):
        wanted |= {f"layers.{i}.o": kind, f"layers.{i}.gate_up": kind,
                   f"layers.{i}.down": "q6" if i in larger else kind}
        wanted |= {f"layers.{i}.qkv.0": kind, f"layers.{i}.qkv.2": "q6"} if i in larger else {f"layers.{i}.qkv": kind}
    assert found == wanted


def test_rows_of_other_lengths_have_the_types_of_llama_quantize() -> None:
    config = read_config(tiny_config(hidden_size=64, intermediate_size=172, head_dim=16))
    graph = build_graph(config, types_of_file("Q4_K_M", 2, False, values=True))
    assert {graph.types[name].dtype for name in ("layers.0.o", "layers.0.gate_up")} == {"q5"}
    assert graph.types["layers.1.down"] == WeightType.of("int8", 32)


def test_of_types_that_equally_many_matrices_have_the_first_names_the_file() -> None:
    """Rows of 1152 are no whole blocks of Q6_K, so half of the matrices are int8; sets have another order each time."""
    code = "from edgeinfer.models.describe import describe; print(describe('gemma-3-1b Q6_K').quantisation.weights)"
    said = {subprocess.run([sys.executable, "-c", code], env={**environment(), "PYTHONHASHSEED": str(seed)}, check=True,
                           capture_output=True, text=True).stdout.strip() for seed in range(5)}
    assert said == {"int8"}


def test_a_checkpoint_is_converted_so(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", **SIZES)
    report = convert(source, tmp_path / "made", chooser=lambda reading, *_: mixed_types("q4_k_m", reading.checkpoint))
    types = {one.name: one.dtype for one in report.tensors if one.weights}
    assert types["layers.1.qkv.2"] == types["layers.1.down"] == types["head"] == "q6"
    assert types["embed"] == types["layers.0.o"] == "q4k" and report.chosen and report.chosen.gap is None
