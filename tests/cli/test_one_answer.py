"""One answer: plan, estimate and run agree on who runs a model, whether it fits and which way, and on refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.backends import PROVIDERS, device_planner, fit_device
from edgeinfer.backends.onnx import fitting
from edgeinfer.bundle import Bundle, Quantisation, weights_file_bytes
from edgeinfer.cli.reports.estimate import estimate_object
from edgeinfer.cli.reports.on_gpu import Cards
from edgeinfer.cli.reports.plan_device import planned_on
from edgeinfer.config import CUDA, DEFAULT_DRAFT_TOKENS, Recipe, RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.devices import profiles, served
from edgeinfer.errors import BudgetError, UnsupportedModelError
from edgeinfer.graph import build_graph, builtin_shapes, expected_types
from edgeinfer.llm.api import LLM
from edgeinfer.llm.executors import executor_of
from edgeinfer.models.describe import ModelDescription, describe
from edgeinfer.quant import TYPES, WeightType
from edgeinfer.runtime import plan_run
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import TINY
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
    """Compare what is said of a card with what a run on it decides."""
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
    for combination in random.Random(1).sample(COMBINATIONS, 12):
        agree(*combination, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("shape", builtin_shapes())
def test_all_shapes_types_and_cards(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind, card in COMBINATIONS:
        if name == shape:
            agree(name, kind, card, monkeypatch)


# -- our own kernels ---------------------------------------------------------------------------------------------------

MODELS = {
    "plain": TINY, "deep": replace(TINY, num_hidden_layers=9, hidden_size=128, intermediate_size=2048),
    "wide": replace(TINY, num_hidden_layers=6, hidden_size=256, intermediate_size=4096),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in MODELS.items():
        for kind in ("q4", "f16"):
            found[f"{name}-{kind}"] = path = tmp_path_factory.mktemp("one") / name
            windows = (0,) * config.num_hidden_layers
            write_random_bundle(replace(config, windows=windows), path, kind, 32)
    return found


def asked(bundles: dict[str, Path], n: int, seed: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Random models, options and budgets, of which most lie where the answer changes."""
    chance = random.Random(seed)
    for _ in range(n):
        path = bundles[chance.choice(sorted(bundles))]
        options = {"ctx": chance.choice([16, 64, 100, 256]), "kv": chance.choice(["int8", "f16", "f32"]),
                   "threads": chance.choice([1, 2, 3]), "prefill_chunk": chance.choice([8, 64, 256]),
                   "max_sequences": chance.choice([1, 1, 2, 5]), "mmap": chance.random() < 0.7}
        with Bundle.open(path) as bundle:
            most = min(options["ctx"], bundle.config.max_position_embeddings)
            options["ctx"] = most
            whole = plan_run(bundle, RuntimeConfig(**options, draft_tokens=DEFAULT_DRAFT_TOKENS,
                                                   budget_bytes=1 << 40)).plan
        spread = max(100_000, 2 * whole.region("weights" if options["mmap"] else "resident").nbytes)
        yield path, {**options, "budget": whole.total_bytes + chance.randint(-spread, spread // 8)}


def compare(path: Path, options: dict[str, Any], opened: bool) -> str:
    """Compare what plan says of a run on this machine with what the run decides."""
    flags = [word for name, flag in (("ctx", "-c"), ("kv", "--kv"), ("threads", "-t"), ("budget", "--budget"),
                                     ("prefill_chunk", "--prefill-chunk"), ("max_sequences", "--samples"))
             for word in (flag, options[name])] + ([] if options["mmap"] else ["--no-mmap"])
    report = edgeinfer("plan", path, *flags, "--json")
    assert (report.code == 0) == report.json["fits"], report
    budget = options["budget"]
    try:
        if opened:
            with LLM(path, **options) as llm:
                plan, applied = llm.plan, llm.session.budget_bytes
        else:
            config = RuntimeConfig(**{name: value for name, value in options.items() if name != "budget"},
                                   budget_bytes=budget, draft_tokens=DEFAULT_DRAFT_TOKENS)
            with Bundle.open(path) as bundle:
                run = plan_run(bundle, config)
                plan, applied = run.plan, run.budget_bytes
        ran = True, plan.mode, plan.total_bytes, applied, None
    except BudgetError as error:
        refused: Any = error.plan
        ran = False, "refused", refused.total_bytes, error.budget_bytes, str(error)
    said = report.json
    assert (said["fits"], said["mode"], said["total_bytes"], said["budget_bytes"],
            said.get("error", {}).get("message")) == ran, (path, options)
    return said["mode"]


def test_plan_and_run_agree(bundles: dict[str, Path]) -> None:
    modes = [compare(path, options, False) for path, options in asked(bundles, 14, 7)]
    assert set(modes) == {"resident", "streamed", "refused"}


@pytest.mark.slow
def test_plan_and_open_models_agree(bundles: dict[str, Path]) -> None:
    """5,000 cases take some twenty minutes, so only EDGEINFER_TEST_ALL=1 asks for all of them."""
    for number, (path, options) in enumerate(asked(bundles, 5000 if everything() else 200, 11)):
        compare(path, options, number % 10 == 0)
