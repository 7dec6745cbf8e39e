"""FFNs stored neuron by neuron, from the converter to the tokens: the same model, the same bits for any chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, BundleWriter
from edgeinfer.converters import convert, write_random_bundle
from edgeinfer.errors import CheckpointError, UsageError
from edgeinfer.graph import build_graph, expected_types, read_config, requested_types
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import Planner, Request
from edgeinfer.models.describe import describe
from edgeinfer.quant import layouts
from edgeinfer.registry import recipe_with
from tests.helpers.bundles import tensor_bytes
from tests.helpers.checkpoints import make_checkpoint, random_tensors, read_tensors, tiny_config
from tests.helpers.command_line import edgeinfer
from tests.helpers.reference import forward
from tests.helpers.sessions import TINY, logits_of, scored, session, tokens

PASSES = ((1, 64), (2, 64), (3, 64), (1, 1), (2, 3), (3, 7), (2, 100))
"""Threads and tokens of a prompt's chunks."""


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("activation", ["relu", "silu", "relu2", "gelu"])
@pytest.mark.parametrize(("weights", "group"), [
    ("q4", 32), ("q4", 128), ("int8", 128), pytest.param("int8", 64, marks=pytest.mark.slow)])
def test_no_chunk_and_no_thread_changes_a_bit(weights: str, group: int, activation: str, tmp_path: Path) -> None:
    config = replace(TINY, hidden_act=activation, mlp_bias=activation == "gelu")
    write_random_bundle(config, tmp_path / "m", weights, group, ffn_layout="neuron")
    ids, rows = tokens(70), []
    for threads, chunk in PASSES:
        with session(tmp_path / "m", ctx=128, threads=threads, prefill_chunk=chunk) as opened:
            rows.append(logits_of(opened, ids, n_decoded=5))
    assert all((row == rows[0]).all() for row in rows)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("weights", "group", "shape"), [
    ("q4", 32, {}), ("int8", 128, {"intermediate_size": 333}),
    ("q4", 128, {"hidden_size": 132, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 66})])
def test_dead_neurons_change_no_bit(weights: str, group: int, shape: dict[str, int], tmp_path: Path) -> None:
    config = replace(TINY, hidden_act="relu", **shape)
    write_random_bundle(config, tmp_path / "m", weights, group, ffn_layout="neuron")
    ids, rows = tokens(70), {}
    for mode in ("off", "exact"):
        for threads, chunk in PASSES:
            with session(tmp_path / "m", ctx=128, threads=threads, prefill_chunk=chunk,
                         recipe=recipe_with(sparse=mode)) as opened:
                instructions = [instruction for instruction in opened.program.instructions
                                if instruction.kernel.startswith("neuron")]
                flags = {instruction.flags & abi.FLAG_DENSE for instruction in instructions}
                assert flags == {abi.FLAG_DENSE if mode == "off" else 0}
                rows[mode, threads, chunk] = logits_of(opened, ids, n_decoded=5)
    first = rows["off", 1, 64]
    assert first.any() and all((row == first).all() for row in rows.values())


@pytest.mark.slow
def test_sparse_is_an_option_of_every_command_that_has_passes(tmp_path: Path) -> None:
    bundle, text = tmp_path / "m", tmp_path / "text"
    write_random_bundle(replace(TINY, hidden_act="relu"), bundle, ffn_layout="neuron")
    text.write_text("a b c d e f " * 20)
    dense = edgeinfer("info", bundle, "--program", "--json", "--sparse", "off").json["program"]
    assert dense != edgeinfer("info", bundle, "--program", "--json", "--sparse", "exact").json["program"]
    for command in (("run", bundle, "a", "--raw"), ("bench", bundle), ("eval", bundle, "--text", text),
                    ("plan", bundle), ("estimate", bundle, "--machine", "m4"), ("info", bundle)):
        wrong = edgeinfer(*command, "--sparse", "some")
        assert (wrong.code, wrong.sentence) == (2, "--sparse is 'some'; choose one of off, exact, predict.")
        wrong = edgeinfer(*command, "--sparse", "predict")
        assert (wrong.code, wrong.sentence) == (
            2, "sparse is 'predict', but the model has no predictor of its neurons; choose off or exact, or "
               "make one with `edgeinfer sparsify`.")
    run = ("run", "demo", "a", "-n", "4", "--temp", "0", "--sparse")
    said = [edgeinfer(*run, mode) for mode in ("off", "exact")]
    assert said[0].code == 0 and said[0].out == said[1].out


@pytest.mark.parametrize("weights", ["q4", "int8"])
@pytest.mark.parametrize("bias", [False, True])
def test_every_instruction_agrees_with_its_reference(
    weights: str, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    write_random_bundle(replace(TINY, hidden_act="relu", mlp_bias=bias), tmp_path / "m", weights, ffn_layout="neuron")
    with session(tmp_path / "m", ctx=64) as opened:
        assert {f"neuron_gated_{weights}", f"neuron_down_{weights}"} <= set(opened.program.kernels)
        logits_of(opened, tokens(9), n_decoded=2)


@pytest.mark.parametrize("options", [{}, {"mlp_bias": True, "hidden_act": "relu"}])
def test_the_oracle(options: dict[str, object], tmp_path: Path) -> None:
    """int8 is close enough to the float model to tell a wrong row or column from rounding."""
    config = read_config(tiny_config("llama", **options))
    convert(make_checkpoint(tmp_path / "hf", "llama", **options), tmp_path / "m", weights="int8", ffn_layout="neuron")
    ids = tokens(20, vocab_size=config.vocab_size)
    for layout in ("tile16", "neuron"):
        graph = build_graph(config, requested_types("int8", ffn_layout=layout))
        expected = forward(graph, random_tensors(config), ids)
        with session(tmp_path / "m", kv="f32", ctx=64, outputs=4) as opened:
            assert np.abs(scored(opened, ids) - expected).max() < 0.06 * np.abs(expected).max()


@pytest.mark.parametrize("weights", ["q4", "int8"])
def test_conversion_puts_rows_and_columns_of_a_neuron_together(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "hf", dtype="F16")
    tensors = read_tensors(source)
    report = convert(source, tmp_path / "m", weights=weights, ffn_layout="neuron")
    bundle = Bundle.open(tmp_path / "m")
    bundle.verify()
    ffn = bundle.types["layers.1.ffn"]
    assert (ffn.dtype, ffn.layout) == (weights, "neuron") and not any("gate_up" in name for name in bundle.tensors)
    gate, up, down = (tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    want = np.stack([gate, up, down.T], axis=1)
    got = layouts.unpack_neuron(tensor_bytes(bundle, "layers.1.ffn"), weights, ffn.group_size, want.shape)
    assert ((got - want) ** 2).sum() < {"q4": 0.01, "int8": 4e-5}[weights] * (want**2).sum()
    assert [t.name for t in report.tensors].count("layers.1.ffn") == 1
    monkeypatch.setattr("edgeinfer.converters.packing.BLOCK_WEIGHTS", 1000)
    convert(source, tmp_path / "blocks", weights=weights, ffn_layout="neuron")
    assert Bundle.open(tmp_path / "blocks").weights.tobytes() == bundle.weights.tobytes()


def test_a_column_that_is_not_finite_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    shape = read_tensors(make_checkpoint(tmp_path / "good"))[name].shape
    damaged = np.zeros(shape, np.float32)
    damaged[3, 50] = np.inf
    monkeypatch.setattr("edgeinfer.converters.packing.BLOCK_WEIGHTS", 1000)
    with pytest.raises(CheckpointError, match=rf"The tensor {name} has the value inf at \[3, 50\]"):
        convert(make_checkpoint(tmp_path / "bad", tensors={name: damaged}), tmp_path / "m", ffn_layout="neuron")


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="ffn_layout is 'rows'; choose one of tile16, neuron"):
        requested_types(ffn_layout="rows")
    with pytest.raises(UsageError, match="ffn_layout neuron holds q4, int8, q2, but weights is f16; choose one"):
        requested_types("f16", ffn_layout="neuron")


def test_graph_and_plan() -> None:
    config = replace(TINY, hidden_act="relu", mlp_bias=True)
    graph = build_graph(config, requested_types(ffn_layout="neuron"))
    assert "activation=relu(h.1[tokens x 36 q8g32], x.1[tokens x 36 f32], layers.0.ffn 72x3x36 q4g32 by neuron, " \
        "layers.0.gate_up_bias 144 f32, layers.0.ffn_norm 36 f32)" in graph.describe()
    assert "x.2[tokens x 36 f32] = neuron_down layer=0 activation=relu(f.0[tokens x 72 f32], " in graph.describe()
    tiles = build_graph(config, requested_types())
    assert graph.weight_count == tiles.weight_count
    assert build_graph(config, expected_types(graph.types)) == graph
    assert build_graph(config, expected_types(tiles.types)) == tiles
    plan = Planner(graph, 1 << 20).plan(Request(64, "int8", 3, 8, 1, 1))
    sums = abi.neuron_sums_bytes(72, 36, 32, "q4")
    assert sums == 2 * 4 * 128  # two blocks of at most 64 neurons, each with a line of columns
    assert plan.region("scratch").bytes >= plan.shared_scratch_offset + sums
    assert plan.thread_scratch_bytes >= abi.neuron_down_scratch_bytes()


def test_the_command_line_says_what_is_inside(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    assert edgeinfer("convert", source, tmp_path / "m", "--ffn-layout", "neuron").code == 0
    said = edgeinfer("info", tmp_path / "m", "--tensors").out
    assert "FFN neuron" in said and "layers.0.ffn" in said
    assert edgeinfer("info", tmp_path / "m", "--json").json["ffn_layout"] == "neuron"
    wrong = edgeinfer("convert", source, tmp_path / "n", "--ffn-layout", "rows")
    assert wrong.code == 2 and wrong.sentence == "ffn_layout is 'rows'; choose one of tile16, neuron."


@pytest.mark.slow
def test_a_model_with_relu_says_the_same_from_both_layouts(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    source = shared_data("models/fables-5m-relu")
    rows = []
    for layout in ("tile16", "neuron"):
        convert(source, tmp_path / layout, weights="int8", ffn_layout=layout)
        with session(tmp_path / layout, ctx=256, outputs=32) as opened:
            rows.append(scored(opened, tokens(200, vocab_size=4096)))
    difference = np.abs(rows[0] - rows[1]).max() / np.abs(rows[0]).max()
    assert 0 < difference < 0.02
    assert (rows[0].argmax(-1) == rows[1].argmax(-1)).mean() > 0.95


def test_estimates_count_an_ffn_once(tmp_path: Path) -> None:
    config = replace(TINY, intermediate_size=80, hidden_size=64, num_attention_heads=4)
    descriptions = []
    for layout in ("tile16", "neuron"):
        write_random_bundle(config, tmp_path / layout, "q4", 32, ffn_layout=layout)
        descriptions.append(describe(tmp_path / layout))
    tiles, neurons = descriptions
    assert neurons.operations_per_token == tiles.operations_per_token
    assert neurons.graph.activation_values == tiles.graph.activation_values
    ffn = 2 * 80 * 3 * 64  # two layers, parts of 36 bytes padded to 64
    assert neurons.ffn_bytes == ffn
    assert neurons.bytes_per_token - neurons.ffn_bytes == tiles.bytes_per_token - tiles.ffn_bytes
    assert edgeinfer("verify", tmp_path / "neuron").code == 0


def test_a_bundle_may_end_with_neurons(tmp_path: Path) -> None:
    """Kernels read a little after a tensor in layout neuron; there lie zeros."""
    write_random_bundle(TINY, tmp_path / "m", ffn_layout="neuron")
    bundle = Bundle.open(tmp_path / "m")
    names = [*(name for name in bundle.tensors if name != "layers.1.ffn"), "layers.1.ffn"]
    with BundleWriter(tmp_path / "turned", bundle.config, bundle.quantisation) as writer:
        for name in names:
            writer.add(name, bundle.types[name], bundle.tensors[name].shape, tensor_bytes(bundle, name))
    last = Bundle.open(tmp_path / "turned").tensors["layers.1.ffn"]
    assert not Bundle.open(tmp_path / "turned").weights[last.offset + last.nbytes :].any()
    assert Bundle.open(tmp_path / "turned").weights_bytes == last.offset + last.nbytes + 64
    rows = []
    for name in ("m", "turned"):
        with session(tmp_path / name, ctx=64, outputs=8) as opened:
            rows.append(scored(opened, tokens(8)))
    np.testing.assert_array_equal(*rows)
