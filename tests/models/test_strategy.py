"""Strategy of a sparse model: the fastest of the measured ones that fit; slower ones are switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.devices import MASKED_SHARE, Curve, estimate, load_profile
from edgeinfer.errors import BudgetError
from edgeinfer.llm.api import LLM
from edgeinfer.llm.strategy import Choice, choose, learn
from edgeinfer.models.describe import describe
from edgeinfer.quality.gate import of_run
from edgeinfer.quality.measurements import Measurement, Setting, measured_identity, remember
from edgeinfer.registry import placer, recipe_with
from edgeinfer.runtime import plan_run
from tests.helpers.command_line import edgeinfer
from tests.helpers.offloaded import CONFIG, made

WIDE = replace(CONFIG, vocab_size=300, intermediate_size=4096)
LOOSE = RuntimeConfig(ctx=256, threads=1, prefill_chunk=48)
PREDICT = replace(LOOSE, recipe=recipe_with(sparse="predict"))
Chosen = Callable[..., Choice]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("choice") / "m", WIDE)


@pytest.fixture
def bundle(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bundle]:
    """The bundle, with a cache of its own and no profile of this machine."""
    monkeypatch.setattr("edgeinfer.quality.measurements.cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr("edgeinfer.llm.strategy.cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr("edgeinfer.devices.local_profile", lambda: None)
    with Bundle.open(path) as opened:
        yield opened


def measure(bundle: Bundle, kld: float = 0.001, n_tokens: int = 100, text: str = "") -> None:
    """Let the cache hold a measured divergence of the predictor."""
    remember(bundle, Measurement(Setting.of_run(PREDICT), kld, 0.01, 0.99, 12.0, 12.0, n_tokens, "decode",
                                 f"{text:0>64}", measured_identity(bundle), "generic", text=text))


def needed(bundle: Bundle, config: RuntimeConfig = PREDICT) -> int:
    return plan_run(bundle, config, placer(bundle.config, bundle)).plan.total_bytes


def test_only_what_was_measured_is_used_by_itself(bundle: Bundle) -> None:
    assert choose(bundle, LOOSE).strategy[:2] == ("resident", LOOSE) and not choose(bundle, LOOSE).others
    measure(bundle)
    found = choose(bundle, LOOSE)
    assert found.strategy[:2] == ("sparse", PREDICT) and [strategy.name for strategy in found.others] == ["resident"]
    assert found.strategy.tok_per_s > found.others[0].tok_per_s
    for bound in (0.0, 0.0005):
        assert choose(bundle, LOOSE, bound).strategy.name == "resident"
    assert choose(bundle, replace(LOOSE, kv="f16")).strategy.name == "resident"
    assert choose(bundle, replace(LOOSE, recipe=recipe_with(sparse="off"))).strategy.name == "resident"
    assert choose(bundle, PREDICT, 0.0).strategy.name == "sparse"  # asked for


def test_a_measurement_of_a_few_tokens_enables_nothing(bundle: Bundle) -> None:
    measure(bundle, n_tokens=99)
    assert choose(bundle, LOOSE).strategy.name == "resident"
    measure(bundle, kld=0.5)
    measure(bundle, n_tokens=3, text="few.txt")  # and does not take the place of one that says something
    measure(bundle, text="other.txt")  # nor does a better one of another text
    found = choose(bundle, LOOSE)
    assert found.strategy.name == "resident"
    assert "Rejected: --sparse predict (KLD 0.5000 over 100 tokens is above --max-kld 0.02)" in found.sentence()
    said = of_run(bundle, PREDICT)
    assert said and said["kld_mean"] == 0.5
    measure(bundle)  # the same text again
    assert choose(bundle, LOOSE).strategy.name == "sparse"


def test_the_default_run_is_predicted_with_the_statistics_of_the_bundle(bundle: Bundle, path: Path) -> None:
    """It is the program of --sparse exact."""
    own, exact = (describe(path, recipe=recipe) for recipe in (Recipe(), recipe_with(sparse="exact")))
    assert own.sparse and exact.sparse and own.sparse.densities == exact.sparse.densities != ()
    assert own.sparse.layers() == exact.sparse.layers() and own.recipe == Recipe()
    speeds = [estimate(load_profile("rpi5"), one.traffic()).decode_tok_per_s for one in (own, exact)]
    assert speeds[0] == speeds[1]


def test_by_budget(bundle: Bundle) -> None:
    """From everything in memory to nothing that fits."""
    measure(bundle)
    full = needed(bundle)
    tight = replace(LOOSE, budget_bytes=full - 400_000)
    found = choose(bundle, tight)
    assert found.strategy.name == "sparse from flash" and [strategy.name for strategy in found.others] == ["streamed"]
    assert 0 < found.strategy.read_bytes < found.others[0].read_bytes
    assert "Running sparse from flash (about" in found.sentence() and "; next best: streamed (about" in found.sentence()
    assert "by assumed speeds (20 GB/s of memory" in found.sentence()
    assert choose(bundle, tight, 0.0).strategy.name == "streamed"
    with pytest.raises(BudgetError):
        choose(bundle, replace(LOOSE, budget_bytes=1 << 20))


def test_what_was_slower_is_switched_off(bundle: Bundle) -> None:
    measure(bundle)
    found = choose(bundle, LOOSE)
    slow = found.others[0].tok_per_s * 0.9
    assert learn(bundle, found, slow, 16) is None  # predictions of a machine that was not probed
    probed = found._replace(probed=True)
    assert learn(bundle, probed, found.others[0].tok_per_s * 1.1, 16) is None
    assert choose(bundle, LOOSE).strategy.name == "sparse"
    said = learn(bundle, probed, slow, 16)
    assert said and said.endswith(" predicted for resident; it is no longer used automatically.")
    again = choose(bundle, LOOSE)
    assert again.strategy.name == "resident" and "--sparse predict uses it again" in again.sentence()
    assert choose(bundle, PREDICT).strategy.name == "sparse"
    assert choose(bundle, replace(LOOSE, threads=2)).strategy.name == "sparse"  # another run
    assert learn(bundle, again._replace(probed=True), 0.001, 16) is None  # nothing approximates


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("text", ["", "[", "[1]", '{"KEY": "y"}', '{"KEY": 1' + "0" * 400 + "}", '{"KEY": -1}',
                                  '{"KEY": 1e999}', "\udcff"], ids=range(8))
def test_a_damaged_memory_counts_as_none(bundle: Bundle, tmp_path: Path, text: str) -> None:
    measure(bundle)
    found = choose(bundle, LOOSE)
    text = text.replace("KEY", found.strategy.key)
    assert learn(bundle, found._replace(probed=True), 1e-9, 16)
    (kept,) = (tmp_path / "cache").rglob("slower.json")
    kept.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert choose(bundle, LOOSE).strategy.name == "sparse"


@pytest.mark.slow
def test_llm_and_run_say_it(bundle: Bundle, path: Path) -> None:
    measure(bundle)
    budget = needed(bundle) - 400_000
    with LLM(path, ctx=256, threads=1, prefill_chunk=48, budget=budget) as llm:
        assert llm.choice and llm.choice.strategy.name == "sparse from flash" and llm.approximated
        assert llm.session.plan.cold is not None
        ids = llm.complete([5, 6, 7], temperature=0, max_tokens=8).token_ids
    with LLM(path, ctx=256, threads=1, sparse="predict") as llm:
        assert llm.complete([5, 6, 7], temperature=0, max_tokens=8).token_ids == ids
    asked = ("run", path, "abc", "-c", 256, "-t", 1, "-n", 4, "--prefill-chunk", 48, "--budget", f"{budget}B")
    report = edgeinfer(*asked, "--json").json["decision"]
    assert report["name"] == "sparse from flash" and report["others"][0]["name"] == "streamed"
    assert "edgeinfer: Running sparse from flash (about" in edgeinfer(*asked).err
    planned = ("plan", path, "-c", 256, "-t", 1, "--prefill-chunk", 48, "--budget", f"{budget}B")
    assert edgeinfer(*planned, "--json").json["decision"]["name"] == "sparse from flash"
    assert "Running sparse from flash (about" in " ".join(edgeinfer(*planned).out.split())
    assert edgeinfer(*planned, "--machine", "rpi5", "--json").json["decision"] is None


def test_a_model_without_parts_leaves_no_choice() -> None:
    with LLM("demo", threads=1) as llm:
        assert llm.choice is None


# -- every command tells the same --------------------------------------------------------------------------------------


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("less, asked", [
    (None, ()), (None, ("--max-kld", 0)), (400_000, ()), (400_000, ("--sparse", "predict")), (1 << 40, ())], ids=str)
def test_all_commands_tell_the_same_decision(
    bundle: Bundle, path: Path, asked: tuple[object, ...], less: int | None
) -> None:
    measure(bundle)
    full = needed(bundle, replace(PREDICT, prefill_chunk=256))
    budget = () if less is None else ("--budget", f"{max(full - less, 1 << 20)}B")
    common = (path, "-c", 256, "-t", 1, *asked, *budget)
    want = edgeinfer("info", *common, "--json").json["decision"]
    planned, shown = edgeinfer("plan", *common, "--json"), " ".join(edgeinfer("plan", *common).out.split())
    fits = planned.json
    assert fits["decision"] == want and planned.code == (0 if fits["fits"] else 3)
    ran = edgeinfer("run", path, "abc", *common[1:], "-n", 1, "--json")
    if want["name"] == "refused":
        assert ran.code == 3 and want["said"] in ran.err and less == 1 << 40
        assert "run The run needs" not in shown
        return
    assert ran.json["decision"] == want
    assert shown.count(want["said"]) == 1
    assert want["said"] in " ".join(edgeinfer("info", *common).out.split())
    if want["name"] in ("resident", "sparse"):
        assert fits["total_bytes"] == ran.json["planned_bytes"]
    others = [want["name"], *(other["name"] for other in want["others"])]
    if not fits["fits"]:
        assert ("cold_neurons" in [item["change"] for item in fits["alternatives"]]) == ("sparse from flash" in others)


def test_bench_measures_what_run_would_do(
    bundle: Bundle, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer.cli.commands.bench_run.READ_BYTES", 8 << 20)
    started: list[str] = []
    monkeypatch.setattr("edgeinfer.bench.startup._first_ms", lambda command, path: started.extend(command) or 7.0)
    measure(bundle)
    asked = ("bench", path, "-t", 1, "-p", 0, "-n", 2, "-r", 1, "--json")
    found = edgeinfer(*asked)
    assert str(PREDICT.recipe) in started and "--budget" not in started
    assert found.json["decision"]["name"] == "sparse" and found.json["quality"]["by_itself"]
    assert "edgeinfer: Running sparse (about" in found.err and "Approximate, kv=int8 passes=sparse" in found.err
    budget = needed(bundle, replace(PREDICT, ctx=found.json["ctx"], prefill_chunk=256)) - 400_000
    tight = edgeinfer(*asked, "--budget", f"{budget}B").json
    assert tight["decision"]["name"] == "sparse from flash" and tight["cold_bytes"] > 0 == tight["streamed_bytes"]
    assert started[started.index("--budget") + 1] == f"{budget}B"  # the process of the first token runs likewise
    exact = edgeinfer(*asked, "--no-startup", "--max-kld", 0, "--budget", f"{budget}B").json
    assert exact["decision"]["name"] == "streamed" and exact["quality"] is None
    refused = edgeinfer(*asked, "--budget", "1MB")
    assert refused.code == 3 and refused.sentence.startswith("The run needs ")


def test_estimate_is_of_what_run_would_do(bundle: Bundle, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(bundle)
    here = replace(load_profile("rpi5"), name="local")
    monkeypatch.setattr("edgeinfer.devices.load_profile", lambda name: here)
    own = edgeinfer("estimate", path, "--json").json
    assert own["decision"]["name"] == "sparse" and own["neurons"]["mode"] == "predict"
    assert "run: Running sparse (about" in " ".join(edgeinfer("estimate", path).out.split())
    exact = edgeinfer("estimate", path, "--max-kld", 0, "--json").json
    assert exact["neurons"]["mode"] == "exact" and exact["decode_tok_per_s"] < own["decode_tok_per_s"]
    assert edgeinfer("estimate", path, "--machine", "rpi5", "--json").json["decision"] is None


def test_the_speed_that_switches_off_is_that_at_the_depth_of_the_run(bundle: Bundle) -> None:
    """A long context slows all ways down; it is not a fault of the predictor."""
    measure(bundle)
    found = choose(bundle, LOOSE)._replace(probed=True)
    deep = found.others[0].at_depth(1000)
    assert deep < found.others[0].tok_per_s
    assert learn(bundle, found, (deep + found.others[0].tok_per_s) / 2, 1000) is None
    assert learn(bundle, found, deep * 0.9, 1000)


def test_what_reads_from_storage_is_remembered_with_its_budget(bundle: Bundle) -> None:
    measure(bundle)
    full = needed(bundle)
    tight = replace(LOOSE, budget_bytes=full - 400_000)
    assert learn(bundle, choose(bundle, tight)._replace(probed=True), 1e-9, 16)
    assert choose(bundle, tight).strategy.name == "streamed"
    assert choose(bundle, replace(tight, budget_bytes=full - 410_000)).strategy.name == "sparse from flash"


def test_what_was_slow_runs_where_nothing_else_fits(bundle: Bundle) -> None:
    measure(bundle)
    tight = replace(LOOSE, budget_bytes=needed(bundle) - 3_900_000)
    with pytest.raises(BudgetError):
        choose(bundle, tight, 0.0)
    found = choose(bundle, tight)
    assert found.strategy.name == "sparse from flash"
    assert learn(bundle, found._replace(probed=True, others=choose(bundle, LOOSE).others), 1e-9, 16)
    again = choose(bundle, tight)
    assert again.strategy.name == "sparse from flash" and "when it was last used" not in again.sentence()


def test_a_context_that_run_refuses_is_planned_and_described(path: Path) -> None:
    refused = edgeinfer("run", path, "abc", "-c", 5000).sentence
    planned = edgeinfer("plan", path, "-c", 5000, "--json").json
    assert planned["fits"] and any("run refuses it" in note for note in planned["notes"])
    described = edgeinfer("info", path, "-c", 5000, "--json").json
    assert planned["decision"] == described["decision"]
    assert described["decision"]["name"] == "refused" and described["decision"]["said"] == refused


def test_plan_knows_that_no_layer_falls_back_where_neurons_are_cold(
    bundle: Bundle, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(load_profile("rpi5"), curves={MASKED_SHARE: Curve(((20, 0.01), (1000, 0.01)))})
    monkeypatch.setattr("edgeinfer.runtime.sparse_fallback._local", lambda: slow)
    asked = ("plan", path, "-c", 256, "-t", 1, "--sparse", "predict", "--json")
    falls_back = edgeinfer(*asked).json
    assert falls_back["neurons"]["layers"][0]["runs"] == "exact" and "faster to run layers" in str(falls_back["notes"])
    budget = needed(bundle, replace(PREDICT, prefill_chunk=256)) - 800_000
    tight = edgeinfer(*asked, "--budget", f"{budget}B").json
    assert tight["decision"]["name"] == "sparse from flash" and "faster to run layers" not in str(tight["notes"])
    assert "no layer falls back to dense or exact" in str(tight["notes"])


def test_plan_names_the_break_even_density(path: Path) -> None:
    assert "exact is faster than dense where at most" in " ".join(edgeinfer("plan", path).out.split())
    neurons = edgeinfer("plan", path, "--json").json["neurons"]
    assert 0 < neurons["break_even_density"]["predict"] < 1
