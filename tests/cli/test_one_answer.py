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
from edgeinfer.graph import ModelConfig, build_graph, builtin_shapes, expected_types, read_config
from edgeinfer.llm.api import LLM
from edgeinfer.llm.executors import executor_of
from edgeinfer.llm.open import choice
from edgeinfer.models import resolve
from edgeinfer.models.describe import ModelDescription, describe
from edgeinfer.quant import TYPES, WeightType
from edgeinfer.registry import placer
from edgeinfer.runtime import plan_run
from tests.helpers import golden_cases
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import OF_256, write_gguf
from tests.helpers.offloaded import CONFIG, made
from tests.helpers.sessions import TINY, WINDOWED, config_of
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

PLAIN = {
    "plain": TINY, "deep": replace(TINY, num_hidden_layers=9, hidden_size=128, intermediate_size=2048),
    "wide": replace(TINY, num_hidden_layers=6, hidden_size=256, intermediate_size=4096),
}


def of_family(name: str, **sizes: object) -> ModelConfig:
    """The config of a golden case, with other sizes."""
    return read_config({**golden_cases.load(name).config, **sizes})


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose weights stay in memory or are streamed by layers."""
    folder, found = tmp_path_factory.mktemp("one"), {}
    for name, config in PLAIN.items():
        for kind in ("q4", "f16"):
            found[f"{name}-{kind}"] = path = folder / f"{name}-{kind}"
            windows = (0,) * config.num_hidden_layers
            write_random_bundle(replace(config, windows=windows), path, kind, 32)
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Mixtures, of which experts are read, windows, shared and latent KV, sparse FFNs, and files of GGUF."""
    folder = tmp_path_factory.mktemp("others")
    found = {name: folder / name for name in ("experts", "windows", "shared", "latent", "sparse")}
    write_random_bundle(of_family("qwen3-moe", hidden_size=128, moe_intermediate_size=256, num_hidden_layers=6,
                                  num_experts=16), found["experts"])
    write_random_bundle(replace(WINDOWED, intermediate_size=1024), found["windows"])
    write_random_bundle(of_family("gemma4"), found["shared"])
    write_random_bundle(of_family("deepseek-v2"), found["latent"])
    made(found["sparse"], replace(CONFIG, vocab_size=300))
    source = make_checkpoint(folder / "source", **OF_256 | {"num_hidden_layers": 5})
    for kind in ("Q4_K", "Q6_K", "Q2_K"):
        found[kind] = folder / f"{kind}.gguf"
        write_gguf(found[kind], source, {"blk": kind, "token_embd": "Q8_0", "output": "F16"})
    return found


def asked(models: dict[str, Path], n: int, seed: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Random models, options and budgets, of which most lie where the answer changes."""
    chance = random.Random(seed)
    for _ in range(n):
        path = models[name := chance.choice(sorted(models))]
        options = {"ctx": chance.choice([16, 64, 100, 256]), "kv": chance.choice(["int8", "f16", "f32"]),
                   "threads": chance.choice([1, 2, 3]), "prefill_chunk": chance.choice([8, 64, 256]),
                   "max_sequences": chance.choice([1, 1, 2, 5]), "mmap": chance.random() < 0.7,
                   **({"sparse": chance.choice(["exact", "predict", "off"])} if name == "sparse" else {})}
        with Bundle.open(resolve(path)) as bundle:
            options["ctx"] = min(options["ctx"], bundle.config.max_position_embeddings)
            whole = planned(bundle, {**options, "budget": 1 << 40}).plan
        spread = max(100_000, 2 * whole.region("weights" if options["mmap"] else "resident").nbytes)
        yield path, {**options, "budget": whole.total_bytes + chance.randint(-spread, spread // 8)}


def planned(bundle: Bundle, options: dict[str, Any]) -> Any:
    """Plan a run as `LLM` does with these options."""
    names = {"budget": "budget_bytes"}
    config = config_of(**{names.get(name, name): value for name, value in options.items()},
                       draft_tokens=DEFAULT_DRAFT_TOKENS)
    chosen = choice(bundle, config, None, None)
    return plan_run(bundle, chosen.strategy.config if chosen else config, placer(bundle.config, bundle))


FLAGS = {"ctx": "-c", "kv": "--kv", "threads": "-t", "budget": "--budget", "prefill_chunk": "--prefill-chunk",
         "max_sequences": "--samples", "sparse": "--sparse"}


def compare(path: Path, options: dict[str, Any], opened: bool) -> str:
    """Compare what plan says of a run on this machine with what the run decides."""
    flags = [word for name, value in options.items() if name in FLAGS for word in (FLAGS[name], value)]
    report = edgeinfer("plan", path, *flags, *([] if options["mmap"] else ["--no-mmap"]), "--json")
    assert (report.code == 0) == report.json["fits"], report
    try:
        if opened:
            with LLM(path, **options) as llm:
                plan, applied = llm.plan, llm.session.budget_bytes
        else:
            with Bundle.open(resolve(path)) as bundle:
                run = planned(bundle, options)
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
def test_plan_and_open_models_agree(bundles: dict[str, Path], others: dict[str, Path]) -> None:
    """5,000 cases take some twenty minutes, so only EDGEINFER_TEST_ALL=1 asks for all of them."""
    modes = set()
    for number, (path, options) in enumerate(asked({**bundles, **others}, 5000 if everything() else 200, 11)):
        modes.add(compare(path, options, number % 10 == 0))
    assert modes == {"resident", "streamed", "refused", "sparse from flash", "experts from flash"}
