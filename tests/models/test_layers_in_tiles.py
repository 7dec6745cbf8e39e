"""Sparse bundles with layers in tiles: those of which too many neurons fire run as they do in the dense bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, read_cold, read_predictor, read_statistics
from edgeinfer.config import Recipe
from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import GatedLinear, NeuronGated
from edgeinfer.memory_planner import Planner, Request
from edgeinfer.registry import placer, recipe_with
from edgeinfer.runtime import SparseFfn, decide, dense_layers, predicted_time
from edgeinfer.sparse import sparsify
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import TINY, logits_of, session, tokens
from tests.models.test_offload import OPTIONS, offloaded
from tests.models.test_sparse_fallback import measured
from tests.models.test_sparsify import STREAM

MODEL = replace(TINY, hidden_size=128, vocab_size=300, hidden_act="relu", intermediate_size=328, num_hidden_layers=4,
                num_attention_heads=4, num_key_value_heads=2, head_dim=32)
DENSE = [0, 2]
PREDICT = recipe_with(sparse="predict")
IDS = tokens(40)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sparse bundles by both ways: of one in tiles, and of one by neuron whose tiles lie beside."""
    root = tmp_path_factory.mktemp("mixed")
    for layout in ("tile16", "neuron"):
        write_random_bundle(MODEL, root / layout, ffn_layout=layout)
    with pytest.MonkeyPatch.context() as patch, Bundle.open(root / "tile16") as tiles, \
            Bundle.open(root / "neuron") as neurons:
        patch.setattr("edgeinfer.sparse.making.dense_layers", lambda *_, **__: (DENSE, "these curves"))
        report = sparsify(tiles, root / "sparse", STREAM, threads=1, max_kld=0.5)
        assert report.dense == tuple(DENSE)
        assert report.layers[0].read_share == 1 and report.layers[1].read_share < 1
        assert report.against_source.divergence and report.read_share > 0.5 and report.time[0] > 0.5
        other = sparsify(neurons, root / "converted", STREAM, threads=1, kind="sign", in_tiles=lambda: tiles)
        assert other.dense == tuple(DENSE) and other.down_error == 0
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse", "converted"])
def test_these_layers_have_the_bytes_of_the_bundle_in_tiles(made: Path, name: str) -> None:
    with Bundle.open(made / "tile16") as source, Bundle.open(made / name) as bundle:
        bundle.verify()
        for layer in range(4):
            for part in ("gate_up", "down"):
                tensor = f"layers.{layer}.{part}"
                assert (tensor in bundle.tensors) is (layer in DENSE)
                if layer in DENSE:
                    a, b = (one.weights[one.tensors[tensor].offset :][: one.tensors[tensor].nbytes]
                            for one in (source, bundle))
                    assert np.array_equal(a, b)
        predictor, statistics, cold = read_predictor(bundle), read_statistics(bundle), read_cold(bundle)
        assert predictor and statistics and cold
        assert [bool(array.size) for array in predictor.thresholds] == [False, True, False, True]
        assert [bool(array.size) for array in cold.checksums] == [False, True, False, True]
        for layer in DENSE:
            assert np.array_equal(statistics.order[layer], np.arange(328))
            assert 0.3 < statistics.densities(False)[layer] < 0.7 and statistics.densities(True)[layer] == 1


@pytest.mark.slow
def test_a_run_has_no_predictor_there_and_the_commands_name_them(made: Path) -> None:
    with session(made / "sparse", recipe=PREDICT) as opened:
        kinds = [(type(op), getattr(op, "mask", None) is not None) for op in opened.graph.ops
                 if isinstance(op, GatedLinear | NeuronGated)]
        assert kinds == [(GatedLinear, False), (NeuronGated, True)] * 2
        assert opened.sparse and opened.sparse.runs[0] == opened.sparse.runs[2] == "tiles"
    said = edgeinfer("info", made / "sparse", "--sparse", "predict", "--json")
    assert [layer["runs"] == "tiles" for layer in said.json["sparse"]["layers"]] == [True, False, True, False]
    assert "layers 0, 2 lie in tiles, dense (densities 0." in said.json["sparse"]["said"]
    estimated = edgeinfer("estimate", made / "sparse", "--sparse", "exact", "--machine", "rpi5")
    assert "layers 0, 2 lie in tiles" in estimated.out


@pytest.mark.slow
def test_exact_has_the_bits_of_dense_and_a_step_names_layers(made: Path) -> None:
    rows = []
    for recipe in (recipe_with(sparse="off"), recipe_with(sparse="exact"), Recipe.parse("sparse:mode=exact,dense=1")):
        with session(made / "sparse", recipe=recipe) as opened:
            rows.append(logits_of(opened, IDS, 8))
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


@pytest.mark.slow
def test_cold_neurons_are_those_of_the_other_layers(made: Path) -> None:
    options = {**OPTIONS, "recipe": Recipe.parse("sparse:mode=predict,dense=none")}
    with session(made / "sparse", **options) as opened:
        want, graph = logits_of(opened, IDS, 8), opened.graph
    with offloaded(made / "sparse", (328, 64, 328, 0), recipe=options["recipe"]) as opened:
        assert np.array_equal(logits_of(opened, IDS, 8), want)
        assert opened.executor.stream is not None and opened.executor.stream.hits.misses > 0
    with Bundle.open(made / "sparse") as bundle:
        place, planner = placer(bundle.config, bundle), Planner(graph, bundle.weights_bytes)
    request = Request(256, "int8", 1, 48, 1, 1)
    needs = planner.plan(replace(request, residency=(("*", "resident"),))).total_bytes
    plans = [plan for budget in range(needs, needs - 100_000, -10_000)
             if place and (plan := place(planner, request, budget)) and plan.total_bytes <= budget]
    assert plans and all(plan.cold and [plan.cold.hot[i] for i in DENSE] == [328, 328] and min(plan.cold.hot) < 328
                         for plan in plans)


def test_curves_say_which_layers_are_dense() -> None:
    densities = [0.1, 0.5, 0.9]
    assert dense_layers(densities, 0.06, measured(0.5, 0.5, 0.9))[0] == [1, 2]
    assert dense_layers(densities, 0.06, measured(0.9, 0.3, 0.9))[0] == [2]
    assert dense_layers(densities, 0.95, measured(0.9, 0.3, 0.9))[0] == [0, 1, 2]
    found, basis = dense_layers(densities, 0.06, measured(0.3, 0.99, 0.9))
    assert found == [] and basis == "the curves measured on plain"


def test_time_is_that_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.sparse_fallback._local", lambda: measured(0.5, 0.8, 0.9))
    assert predicted_time("lowrank", [0.1, 1.0], 0.06, {1})[0] == pytest.approx((0.1 / 0.5 + 0.06 + 1) / 2)
    assert predicted_time("threshold", [0.6], 0.0, ())[0] == pytest.approx((1 + 2 * 0.6) / 3 / 0.8)
    gates = SparseFfn("predict", ("predict", "tiles"), ((1.0, 0.6), (1.0, 1.0)), 0.0, "these curves", "threshold")
    assert gates.layers() == (("exact", 0.6), ("tiles", 1.0))  # a threshold reads all gates


@pytest.mark.slow
def test_decisions_leave_these_layers_alone(made: Path) -> None:
    with Bundle.open(made / "sparse") as bundle:
        recipe, found = decide(PREDICT, bundle, measured(0.1, 0.3, 0.9))
        assert found and found.runs == ("tiles", "off", "tiles", "off")
        assert dict(recipe.steps[-1].settings)["dense"] == "1/3"
