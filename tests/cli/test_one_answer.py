"""One answer: plan, estimate and run agree on who runs a model, whether it fits and which way, and on refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from edgeinfer.backends import PROVIDERS, device_planner, fit_device
from edgeinfer.backends.onnx import fitting
from edgeinfer.bundle import Quantisation, weights_file_bytes
from edgeinfer.cli.reports.estimate_object import estimate_object
from edgeinfer.cli.reports.on_gpu import Cards
from edgeinfer.cli.reports.plan_device import planned_on
from edgeinfer.config import CUDA, DEFAULT_DRAFT_TOKENS, Recipe, RuntimeConfig
from edgeinfer.devices import profiles, served
from edgeinfer.errors import BudgetError, UnsupportedModelError
from edgeinfer.graph import build_graph, builtin_shapes, expected_types
from edgeinfer.llm.executors import executor_of
from edgeinfer.models.describe import describe
from edgeinfer.models.description import ModelDescription
from edgeinfer.quant import TYPES, WeightType
from tests.kernel_selection import everything

KINDS = [name for name, row in TYPES.items() if "tile16" in row.layouts]
CARDS = [name for name, profile in profiles().items() if served(profile)]
COMBINATIONS = [(shape, kind, card) for shape in builtin_shapes() for kind in KINDS for card in CARDS]


@cache
def stored(shape: str, kind: str) -> ModelDescription:
    """A built-in shape with matrices of a type that files may have."""
    model = describe(shape, recipe=Recipe(()))
    matrix = WeightType.of(kind)
    odd = {weight.name for weight in model.graph.weights if weight.shape[-1:] and weight.shape[-1] % 256}
    types = {name: matrix if own.quantised and not (matrix.storage.nested and name in odd) else own
             for name, own in model.graph.types.items()}  # as llama.cpp keeps rows that are not whole blocks otherwise
    graph = build_graph(model.config, expected_types(types), Recipe(()))
    return replace(model, graph=graph, weight_bytes=weights_file_bytes(graph),
                   quantisation=Quantisation(kind, matrix.group_size, kind, kind))


def agree(shape: str, kind: str, card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a plan for a card with the decision of a run on it."""
    model, profile = stored(shape, kind), profiles()[card]
    ctx = min(4096, model.config.max_position_embeddings)
    config = RuntimeConfig(ctx, threads=1, draft_tokens=DEFAULT_DRAFT_TOKENS)
    cards = Cards(lambda: model, config, None)
    told = estimate_object(model, profile, ctx, 16, "int8", (1.0, None), config, cards=cards)
    found = executor_of(profile, model.graph, config)
    try:  # as OnnxRunner opens a model
        planner, taken = device_planner(model.graph, config, PROVIDERS[CUDA])
    except UnsupportedModelError as why:
        assert found.refused == str(why) and str(why) in told["remark"] and told["program"] == "llama.cpp"
        return
    planned = planned_on(found, model)
    monkeypatch.setattr(fitting, "gpu_free_bytes", lambda: profile.memory_bytes)
    try:
        run = fit_device(planner, replace(taken, budget_bytes=1 << 60))
        sizes, fits = (run.total_bytes, run.device_bytes), True
    except BudgetError as error:
        plan: Any = error.plan
        sizes, fits = (plan.total_bytes, plan.device_bytes), False
        assert planned["error"]["message"] == str(error)
    for said in (told, planned):
        assert (said["fits"], said["total_bytes"], said["device_bytes"]) == (fits, *sizes)
    assert told["program"] == planned["estimate"]["program"] == "edgeinfer with onnxruntime"
    assert told["decode_tok_per_s"] == pytest.approx(planned["estimate"]["decode_tok_per_s"])


def test_every_card_has_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for combination in random.Random(1).sample(COMBINATIONS, 6):
        agree(*combination, monkeypatch)


@pytest.mark.parametrize("layout", ["pages", "slots"])
def test_what_a_server_takes_of_a_card(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth is left to others, and a plan for a card says so as a run on it does."""
    model, profile = stored("llama-2-7b", "q4"), profiles()["rtx4090"]
    config = RuntimeConfig(4096, threads=1, max_sequences=16, fill_budget=True, kv_layout=layout)
    planned = planned_on(executor_of(profile, model.graph, config), model)
    planner, taken = device_planner(model.graph, config, PROVIDERS[CUDA])
    monkeypatch.setattr(fitting, "gpu_free_bytes", lambda: profile.memory_bytes)
    run = fit_device(planner, replace(taken, budget_bytes=1 << 60))
    assert planned["fits"] and planned["device_bytes"] == run.device_bytes
    assert planned["device_budget_bytes"] == profile.memory_bytes * 9 // 10 >= run.device_bytes
    assert planned["device_budget_source"] == "nine tenths of the memory of GeForce RTX 4090"


@pytest.mark.slow
@pytest.mark.parametrize("shape", builtin_shapes())
def test_all_shapes_types_and_cards(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All combinations take ten minutes of processor time; others than EDGEINFER_TEST_ALL=1 get one for each shape."""
    found = [combination for combination in COMBINATIONS if combination[0] == shape]
    for combination in found if everything() else random.Random(shape).sample(found, 1):
        agree(*combination, monkeypatch)
