"""Layers that fall back: which way of an FFN by neuron is predicted to be fastest, and that a run does just that."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bench import Case, bytes_per_token
from edgeinfer.bundle import Bundle, read_statistics
from edgeinfer.cli.reports.neurons import neurons_object
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.converters import SHAPES, Sparsity, write_random_bundle
from edgeinfer.devices import (
    DENSE_SHARE,
    GATES_SHARE,
    MASKED_SHARE,
    Curve,
    DeviceProfile,
    Traffic,
    break_even_density,
    estimate,
    fastest,
    local_path,
    relative_time,
    save_profile,
)
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.memory_planner import Planner, Request, masked
from edgeinfer.models.describe import describe
from edgeinfer.quality.measurements import Setting
from edgeinfer.registry import placer, recipe_with
from edgeinfer.runtime import Session, decide, everywhere, plan_run
from edgeinfer.runtime import sparse_fallback as fallback_module
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import session, tokens
from tests.models.test_sparse_predict import decoded, with_predictor

SMALL = replace(SHAPES["tinyllama-1.1b"], hidden_size=256, intermediate_size=700, num_hidden_layers=3, vocab_size=300,
                num_attention_heads=4, num_key_value_heads=2, head_dim=64, windows=(0, 0, 0))
PLAIN = DeviceProfile("plain", "Plain", "local", 1 << 34, 40.0, None, 2, "generic")


def measured(masked: float, gates: float, dense: float) -> DeviceProfile:
    """A device on which each way has one speed at all densities."""
    return replace(PLAIN, curves={MASKED_SHARE: Curve(((20, masked), (1000, masked))),
                                  GATES_SHARE: Curve(((20, gates), (1000, gates)))}, figures={DENSE_SHARE: dense})


def test_times_are_bytes_over_speeds() -> None:
    device = measured(0.5, 0.8, 0.9)
    assert relative_time(device, "off", 0.1) == pytest.approx(1 / 0.9)
    assert relative_time(device, "exact", 0.1) == pytest.approx(1.2 / 3 / 0.8)
    assert relative_time(device, "predict", 0.1, 0.07) == pytest.approx(0.1 / 0.5 + 0.07)
    with pytest.raises(UsageError, match=r"A density of 1.5 is impossible"):
        relative_time(device, "exact", 1.5)


def test_break_even_solves_for_the_density() -> None:
    device = measured(0.5, 0.8, 0.9)
    assert break_even_density(device, "exact") == pytest.approx((3 * 0.8 / 0.9 - 1) / 2, abs=1e-4)
    assert break_even_density(device, "predict", 0.1) == pytest.approx((1 / 0.9 - 0.1) * 0.5, abs=1e-4)
    assert break_even_density(device, "predict", 2.0) == 0 and break_even_density(measured(1, 1, 0.5), "exact") == 1


def test_a_profile_without_curves_takes_the_default() -> None:
    assert [relative_time(PLAIN, mode, 0.3) for mode in ("off", "exact", "predict")] == \
        [relative_time(None, mode, 0.3) for mode in ("off", "exact", "predict")]
    assert fastest(None, ("predict", "exact", "off"), {"exact": 0.1, "predict": 0.1}, 0.07) == "predict"
    assert fastest(None, ("exact", "off"), {"exact": 0.99}, 0.0) == "off"


def test_the_estimator_adds_up_layers() -> None:
    device, traffic = measured(0.5, 0.8, 0.9), Traffic(3e9, 2, ffn_bytes=2e9, neuron_layers=(("predict", 0.1),
                                                                                             ("off", 0.7)))
    dense = estimate(device, replace(traffic, neuron_layers=())).terms["weights"]
    terms = estimate(device, traffic).terms
    assert terms["weights"] == pytest.approx(dense / 3)
    assert terms["sparse_ffn"] == pytest.approx(dense / 3 * (0.1 / 0.5 + 1 / 0.9))
    assert estimate(device, traffic).bytes_per_token == pytest.approx(1e9 + 1e9 * (0.1 + 1))


def test_a_damaged_profile_is_said_and_the_default_decides(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    local_path().parent.mkdir(parents=True)
    local_path().write_text("title = 3")
    with Bundle.open(model) as bundle:
        _, found = decide(recipe_with(sparse="exact"), bundle)
    assert found and found.runs == ("exact",) * 3 and "default curves" in found.basis
    said = capsys.readouterr().err
    assert "this machine's profile cannot be used" in said and said.count("\n") == 1


# -- in a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the neurons fire, and a mask names as many."""
    path = tmp_path_factory.mktemp("fallback") / "m"
    write_random_bundle(SMALL, path, ffn_layout="neuron", sparsity=Sparsity(0.5, 0.7, "lowrank", 64))
    return path


def decided_on(path: Path, mode: str, profile: DeviceProfile) -> tuple[str, ...]:
    with Bundle.open(path) as bundle:
        recipe, found = decide(recipe_with(sparse=mode), bundle, profile)
        assert found and decide(recipe_with(sparse=mode), bundle, profile) == (recipe, found)  # the same each time
        return found.runs


def test_the_curves_decide(model: Path) -> None:
    assert decided_on(model, "predict", measured(0.9, 0.9, 0.5)) == ("predict",) * 3
    assert decided_on(model, "predict", measured(0.1, 0.9, 0.9)) == ("exact",) * 3
    assert decided_on(model, "predict", measured(0.1, 0.3, 0.9)) == ("off",) * 3
    assert decided_on(model, "exact", measured(0.9, 0.3, 0.9)) == ("off",) * 3
    assert decided_on(model, "exact", measured(0.1, 0.9, 0.9)) == ("exact",) * 3


def test_thresholds_read_the_gates_of_all_neurons(tmp_path: Path) -> None:
    """So their times and their break-even are those of exact runs with as many neurons."""
    path = with_predictor(tmp_path, "threshold", 0.3, activation="silu")
    found = describe(path, recipe=recipe_with(sparse="predict")).sparse
    assert found and found.runs[0] == "predict" and set(found.layers()) == {("exact", 1.0)}
    object_ = neurons_object(describe(path, recipe=recipe_with(sparse="predict")), None)
    assert object_ and object_["break_even_density"]["predict"] == object_["break_even_density"]["exact"] < 0.95


def test_statistics_say_how_much_masks_choose(model: Path) -> None:
    with Bundle.open(model) as bundle:
        found = read_statistics(bundle)
        assert found is not None and found.densities(True) == pytest.approx([0.5] * 3, abs=0.01)
        assert replace(found, chosen=()).densities(True) == found.densities(False)


@pytest.mark.parametrize("mode", ["off", "exact", "predict"])
def test_bench_counts_the_bytes_that_the_estimator_counts(model: Path, mode: str) -> None:
    recipe = recipe_with(sparse=mode)
    with session(model, ctx=64, recipe=recipe) as opened:
        counted = bytes_per_token(opened, Case("tg", 1, 0))
        whole = opened.program.bytes_read
    traffic = describe(model, recipe=recipe).traffic("int8")
    assert counted == pytest.approx(estimate(PLAIN, traffic, 1).bytes_per_token, rel=0.01)
    assert (counted < 0.9 * whole) == (mode != "off")


def opened(path: Path, recipe: Recipe, profile: DeviceProfile,
           monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Session]:
    monkeypatch.setattr(fallback_module, "_local", lambda: profile)
    return session(path, ctx=64, recipe=recipe)


def test_layers_that_fall_back_have_no_mask_and_the_same_bits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, slow, quick = tokens(5, 300), measured(0.1, 0.3, 0.9), measured(0.9, 0.9, 0.5)
    with opened(model, recipe_with(sparse="off"), quick, monkeypatch) as all_neurons:
        want = decoded(all_neurons, ids)
    for mode, profile in (("exact", slow), ("exact", quick), ("predict", slow)):
        with opened(model, recipe_with(sparse=mode), profile, monkeypatch) as own:
            assert np.array_equal(decoded(own, ids), want), mode
            kernels = [instruction.kernel for instruction in own.program.instructions]
            assert "neuron_mask_scores" not in kernels and own.sparse is not None
            assert (profile is slow) == ("dense (densities 0.50 to 0.5" in own.sparse.sentence())
    with opened(model, recipe_with(sparse="predict"), quick, monkeypatch) as own:
        assert not np.array_equal(decoded(own, ids), want) and own.sparse and not own.sparse.sentence()


def test_some_layers_fall_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.parse("fuse_input+sparse:mode=predict,dense=0,exact=2")
    with opened(model, recipe, PLAIN, monkeypatch) as own:
        kernels = [instruction.kernel for instruction in own.program.instructions]
        assert own.sparse and own.sparse.runs == ("off", "predict", "exact")
        assert kernels.count("neuron_mask_scores") == 1
        assert own.sparse.sentence().startswith("sparse predict: by the recipe it is faster to run layer 0 dense")
    for wrong in ("dense=3", "exact=0/x", "dense=1.5"):
        with pytest.raises(UsageError, match="name layers from 0 to 2, joined by slashes, or none"), \
                session(model, ctx=64, recipe=Recipe.parse(f"sparse:mode=exact,{wrong}")):
            pass


def test_quality_is_measured_of_all_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the stored figure bounds that of a run in which layers fall back."""
    recipe = recipe_with(sparse="predict")
    with opened(model, everywhere(recipe), measured(0.1, 0.3, 0.9), monkeypatch) as own:
        assert own.sparse and own.sparse.runs == ("predict",) * 3
    with opened(model, recipe, measured(0.1, 0.3, 0.9), monkeypatch) as own:
        assert own.sparse and own.sparse.runs == ("off",) * 3
        assert dict(Setting.of_run(own.config).values)["passes"] == "sparse:mode=predict"


def test_nothing_falls_back_where_neurons_are_placed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hot and cold neurons are placed by masks, so every layer has them once not all weights fit.

    The refusal then tries the run without its approximations, to offer it.
    """
    asked: list[bool] = []

    def place(planner: Planner, request: Request, budget: int) -> None:
        asked.append(len(masked(planner.graph)) == 3)

    monkeypatch.setattr(fallback_module, "_local", lambda: measured(0.1, 0.3, 0.9))
    config = RuntimeConfig(ctx=64, threads=1, prefill_chunk=64, recipe=recipe_with(sparse="predict"))
    with Bundle.open(model) as bundle, pytest.raises(BudgetError):
        Session(bundle, replace(config, budget_bytes=1 << 20), placer=place)
    assert asked == [True, False]
    with Bundle.open(model) as bundle:
        opened = Session(bundle, config, placer=place)
        assert asked == [True, False] and opened.sparse and opened.sparse.runs == ("off",) * 3
        opened.close()


def test_layers_of_exact_runs_fall_back_where_they_are_streamed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is placed by masks there."""
    monkeypatch.setattr(fallback_module, "_local", lambda: measured(0.1, 0.3, 0.9))
    config = RuntimeConfig(ctx=64, threads=1, prefill_chunk=64, recipe=recipe_with(sparse="exact"))
    with Bundle.open(model) as bundle:
        full = plan_run(bundle, config, placer(bundle.config, bundle)).plan.total_bytes
        tight = plan_run(bundle, replace(config, budget_bytes=full - 100_000), placer(bundle.config, bundle))
    assert tight.plan.streamed_bytes and tight.sparse and tight.sparse.runs == ("off",) * 3


def test_it_is_printed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "slow.toml"
    save_profile(measured(0.1, 0.3, 0.9), device)
    described = describe(model, recipe=recipe_with(sparse="exact"), profile=measured(0.1, 0.3, 0.9))
    assert described.traffic().neuron_layers[0] == ("off", pytest.approx(0.5, abs=0.01))
    said = "faster to run layers 0, 1, 2 dense"
    assert said in " ".join(edgeinfer("estimate", str(model), "--device", str(device), "--sparse", "exact").out.split())
    assert said in " ".join(edgeinfer("plan", str(model), "--device", str(device), "--sparse", "exact").out.split())
    found = edgeinfer("estimate", str(model), "--device", str(device), "--sparse", "predict", "--json").json["neurons"]
    assert found["break_even_density"] == {"exact": pytest.approx(0, abs=1e-3), "predict": pytest.approx(0.1, abs=0.1)}
