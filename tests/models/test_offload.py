"""Hot and cold neurons: what stays in memory, and the same bits for every budget."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import COLD_FILE, Bundle, BundleWriter, Statistics, read_cold, read_statistics
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.converters.synthetic.random_neurons import Sparsity
from edgeinfer.errors import BudgetError, BundleError, EdgeInferError
from edgeinfer.kernels import abi, reference
from edgeinfer.memory_planner import ColdPlan
from edgeinfer.offload import Heat, choose, predict
from edgeinfer.registry import placer
from edgeinfer.runner import DECODE, PROMPT, Segment
from edgeinfer.runtime import Session
from tests.helpers.command_line import edgeinfer
from tests.helpers.offloaded import COLD, CONFIG, HOT, IDS, MIXED, OPTIONS, WIDE, made, offloaded, resident
from tests.helpers.sessions import logits_of, session, tokens
from tests.helpers.streamed import watched


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("cold") / "m")


@pytest.fixture(scope="module", params=[("int8", CONFIG), ("q4", replace(WIDE, hidden_size=1408)), ("int8", WIDE)],
                ids=["int8", "q4-wide", "int8-wide"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights, config = request.param
    config = replace(config, num_attention_heads=config.hidden_size // 32)
    return made(tmp_path_factory.mktemp("cold") / "m", config, weights)


# -- what stays --------------------------------------------------------------------------------------------------------


def test_the_choice_is_the_best_there_is() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        n_layers, n_blocks = rng.integers(2, 4), rng.integers(2, 5)
        heat = Heat(tuple(np.sort(rng.random(n_blocks) ** 3)[::-1] * 8 for _ in range(n_layers)), np.full(n_blocks, 8))
        most = int(rng.integers(0, 8 * n_blocks * n_layers + 9))
        counts = product(range(n_blocks + 1), repeat=int(n_layers))
        best = min(heat.cold([8 * n for n in count]) for count in counts if 8 * sum(count) <= most)
        hot = choose(heat, most)
        assert sum(hot) <= most and heat.cold(hot) == pytest.approx(best, abs=1e-12)


def test_heat_comes_from_statistics(q4: Path) -> None:
    with Bundle.open(q4) as bundle, session(q4, **OPTIONS) as opened:
        statistics = read_statistics(bundle)
        heat = Heat.of(statistics, ColdPlan.of(opened.graph, COLD, 1))
    assert statistics and heat.sizes.tolist() == [64] * 5 + [8]
    fired = statistics.fired[1] / statistics.tokens
    assert heat.cold((328, 128, 328, 328)) == pytest.approx(fired[128:].sum(), rel=1e-3)
    assert heat.blocks[0][0] == pytest.approx(statistics.fired[0][:64].sum() / statistics.tokens)
    assert Heat.of(None, ColdPlan.of(opened.graph, COLD, 1)).cold(COLD) == 4 * 328


@pytest.mark.parametrize("slots", [1000, 200, 60])
def test_what_a_placement_is_said_to_read_is_what_chance_reads(slots: int) -> None:
    """Against tokens sampled with the rates of the statistics, each on its own; 60 slots hold less than one wants."""
    rng = np.random.default_rng(2)
    rates = [np.sort(rng.beta(0.5, 5, 328))[::-1] for _ in range(8)]
    statistics = Statistics(10**6, tuple((rate * 10**6).astype(np.int64) for rate in rates), (), ())
    plan = ColdPlan((64, 0, 128, 328) * 2, 328, 4000, slots)
    cache = reference.Cache(*(np.full(n, -1, np.int32) for n in (8 * 328, slots)), np.zeros(slots, np.int32),
                            np.zeros(slots, np.int64), np.zeros(8, np.int64))
    wanted = missed = 0
    for step in range(150):
        for layer, hot in enumerate(plan.hot):
            clusters = hot + np.flatnonzero(rng.random(328 - hot) < rates[layer][hot:]) + 328 * layer
            missing = reference.resolve(cache, clusters)
            if step >= 50:
                wanted, missed = wanted + len(clusters), missed + len(missing)
    found = predict(plan, statistics, 0.01, lambda nbytes: 0.5)
    assert found.wanted == pytest.approx(wanted / 100, rel=0.05)
    assert found.hit_rate == pytest.approx(1 - missed / wanted, abs=0.07)
    assert (found.hit_rate > 0.5) == (slots == 1000) and (found.hit_rate == 0) == (slots == 60)
    assert found.flash_bytes == pytest.approx(found.wanted * (1 - found.hit_rate) * plan.cluster_bytes)
    assert found.seconds == pytest.approx(0.01 + found.flash_bytes / 0.5e9)
    empty = predict(plan, statistics, 0.01, lambda nbytes: 0.5, hit_rate=0.0)
    assert empty.flash_bytes == found.wanted * plan.cluster_bytes
    assert predict(replace(plan, slots=1800), statistics, 0.01, lambda nbytes: 0.5) == (found.wanted, 1.0, 0.0, 0.01)
    several = replace(plan, neuron_bytes=1000)  # four neurons a cluster, so fewer clusters are wanted
    assert found.wanted / 4 < predict(several, statistics, 0.01, lambda nbytes: 0.5).wanted < found.wanted


def test_plans_keep_to_their_budgets_and_hold_more_the_more_there_is(q4: Path) -> None:
    want = resident(q4)
    with session(q4, **OPTIONS) as opened:
        needs = opened.plan.total_bytes
    with Bundle.open(q4) as bundle:
        least, before = 0, -1
        for less in (195_000, 150_000, 100_000, 50_000):
            config = RuntimeConfig(threads=1, budget_bytes=needs - less, **OPTIONS)
            opened = Session(Bundle.open(q4), config, placer=placer(bundle.config, bundle))
            plan = opened.plan
            assert plan.cold and needs - less - 60_000 < plan.total_bytes <= needs - less
            assert plan.cold.slots >= plan.cold.least_slots and sum(plan.cold.hot) > before
            assert all(n % 64 == 0 or n == 328 for n in plan.cold.hot)
            assert opened.smaller_alternative is None or "ctx" in opened.smaller_alternative.options
            assert (watched(lambda o=opened: logits_of(o, IDS, 12)) == want).all()
            before, least = sum(plan.cold.hot), min(least or plan.total_bytes, plan.total_bytes)
            opened.close()
        with pytest.raises(BudgetError, match="The run needs"):  # the fixed part alone exceeds it
            Session(Bundle.open(q4), RuntimeConfig(threads=1, budget_bytes=needs // 2, **OPTIONS),
                    placer=placer(bundle.config, bundle))
        config = RuntimeConfig(threads=1, budget_bytes=needs - 150_000, **{**OPTIONS, "recipe": Recipe()})
        opened = Session(Bundle.open(q4), config, placer=placer(bundle.config, bundle))
        assert opened.plan.cold is None and opened.plan.parts  # without masks layers are streamed
        opened.close()


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_budget_changes_a_bit(q4: Path, threads: int) -> None:
    want = resident(q4, threads=threads)
    for hot, more in product((COLD, MIXED, HOT), (0, 30)):
        with offloaded(q4, hot, more, threads=threads) as opened:
            for _ in range(2):
                assert (watched(lambda o=opened: logits_of(o, IDS, 12)) == want).all()
            tokens_seen, hits, misses = opened.executor.stream.hits
            assert tokens_seen == 24 and hits + misses > 0
            assert (hot == HOT or misses > 0) and (more == 0 or hot == COLD or hits > 0)


@pytest.mark.slow(keep=1)
def test_wide_neurons_and_other_types(other: Path) -> None:
    want = resident(other, threads=2)
    with Bundle.open(other) as bundle:
        layers = bundle.config.num_hidden_layers
        cold = read_cold(bundle)
        assert cold and cold.neurons == (1 if bundle.config.hidden_size > 128 else 4)
    for hot in (COLD[:layers], (64, 192, 328, 0)[:layers]):
        with offloaded(other, hot, threads=2) as opened:
            assert (watched(lambda o=opened: logits_of(o, IDS, 12)) == want).all()


def test_tokens_that_run_together(q4: Path) -> None:
    """Several decoded tokens, and a prompt beside them: cold columns are added up by outputs then."""
    def run_pass(opened: Session) -> np.ndarray:
        one, two = opened.new_sequence(), opened.new_sequence()
        rows = [opened.forward([Segment(one, IDS[:9], tuple(range(9)), DECODE)]).copy()]
        rows.append(opened.forward([Segment(one, IDS[9:14], tuple(range(5)), DECODE),
                                 Segment(two, IDS[:20], (19,), PROMPT)]).copy())
        return np.concatenate(rows)

    more = {"outputs": 12, "max_sequences": 2, "threads": 2}
    with session(q4, **OPTIONS, **more) as opened:
        want = run_pass(opened)
    for hot in (COLD, MIXED):
        with offloaded(q4, hot, **more) as opened:
            assert (watched(lambda o=opened: run_pass(o)) == want).all()


def test_instructions_agree_with_their_references(q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with offloaded(q4, MIXED, 0) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, IDS[:10])
        for token in IDS[10:14]:
            watched(lambda token=token: opened.decode([sequence], [token]))
        opened.forward([Segment(sequence, IDS[14:17], (2,), DECODE)])


def test_the_clock_keeps_what_is_wanted_often() -> None:
    cache = reference.Cache(*(np.full(n, -1, np.int32) for n in (100, 8)), np.zeros(8, np.int32), np.zeros(8, np.int64),
                            np.zeros(8, np.int64))
    often, seldom, read = [3, 5], iter(range(20, 100)), []
    for step in range(30):
        wanted = np.array([*often, next(seldom), next(seldom)])
        missing = reference.resolve(cache, wanted)
        slots = cache.table[wanted]
        assert (cache.owners[slots] == wanted).all() and (cache.stamps[slots] == step + 1).all()
        read += [n for n in missing if n in often]
        held = cache.owners[cache.owners >= 0]
        assert len(set(held)) == len(held) and (cache.table[held] == np.flatnonzero(cache.owners >= 0)).all()
    assert read == often


def test_ranges_of_instructions_begin_before_what_they_need(q4: Path) -> None:
    want = resident(q4)
    with offloaded(q4, MIXED) as opened:
        n, sequence = len(opened.program.instructions), opened.new_sequence()
        found = next(i for i, instruction in enumerate(opened.program.instructions)
                     if instruction.label.startswith("find"))
        opened.reserve(sequence, 40)
        segment = Segment(sequence, IDS[:40])
        opened.forward_range(segment, 0, found + 2)
        opened.forward_range(segment, found + 2, n)
        opened.append(sequence, IDS[:40])
        opened.prefill(sequence, IDS[40:58])
        got = [opened.decode([sequence], [token])[0].copy() for token in IDS[58:]]
        assert (np.stack(got) == want[1:]).all()
        opened.reserve(sequence, 1)
        with pytest.raises(EdgeInferError, match=f"Instruction {found + 1} computes with weights that an earlier one"):
            opened.forward_range(Segment(sequence, IDS[:1]), found + 1, n)


def test_a_prompt_asks_for_a_layers_neurons_before_its_attention(q4: Path) -> None:
    """Forward passes may end after such an instruction: the next one starts over, or goes on there."""
    want = resident(q4)
    with offloaded(q4, MIXED, 0) as opened:
        n, sequence, reading = len(opened.program.instructions), opened.new_sequence(), opened.executor.stream
        early = [i for i, instruction in enumerate(opened.program.instructions)
                 if instruction.label.startswith("ask for")]
        cold = [sum(1 for instruction in opened.program.instructions if instruction.event is not None
                    and instruction.op.layer == layer)
                for layer in range(4)]
        assert len(early) == 3 and cold == [3, 3, 4, 0]  # a layer's cold blocks in at most four instructions
        opened.reserve(sequence, 40)
        segment = Segment(sequence, IDS[:40])
        for stop in early:
            before = reading.bytes_read
            watched(lambda stop=stop: opened.forward_range(segment, 0, stop + 1))
            watched(lambda: opened.forward_range(segment, 0, 0))  # waits for what is under way
            assert reading.bytes_read > before
        watched(lambda: opened.forward_range(segment, 0, early[-1] + 1))
        watched(lambda: opened.forward_range(segment, early[-1] + 1, n))
        opened.append(sequence, IDS[:40])
        opened.prefill(sequence, IDS[40:58])
        got = [watched(lambda token=token: opened.decode([sequence], [token])[0].copy()) for token in IDS[58:]]
        assert (np.stack(got) == want[1:]).all()


def test_a_prompt_takes_slots_in_their_order() -> None:
    """So what follows in the file follows in memory, and is read together, however the slots were used before."""
    cache = reference.Cache(*(np.full(n, -1, np.int32) for n in (60, 20)), np.zeros(20, np.int32),
                            np.zeros(20, np.int64), np.zeros(8, np.int64))
    for wanted in (range(20, 40), [22, 25, 31], [25]):
        reference.resolve(cache, np.array(wanted))
    assert reference.resolve(cache, np.arange(40, 60), prompt=True) == list(range(40, 60))
    assert (np.diff(cache.table[40:60]) % 20 == 1).all()


def test_run_says_what_it_reads(tmp_path: Path) -> None:
    path = made(tmp_path / "m", replace(CONFIG, vocab_size=300))
    with session(path, **OPTIONS) as opened:
        needs = opened.plan.total_bytes
    arguments = ["run", path, "--sparse", "predict", "--ctx", "256", "--threads", "1", "--max-tokens", "9",
                 "--prefill-chunk", "48", "--speculate", "off", "--seed", "1", "--json"]
    done = edgeinfer(*arguments, "--budget", f"{needs - 150_000}B", "abc")
    assert done.code == 0, done.err
    found = done.json["offload"]
    assert found["decision"] == "sparse from flash" and 0 < found["hot_share"] < 1 and 0 <= found["hit_rate"] < 1
    assert 0 < found["flash_bytes_per_token"] <= found["flash_bytes"] and found["walks"] >= 8
    assert "of the FFNs' neurons are in memory; the others are read from storage on demand" in done.err
    said = edgeinfer(*arguments[:-1], "--budget", f"{needs - 150_000}B", "abc").err
    assert re.search(r"sparse from flash: .* from storage per token, hit rate \d+% \(.* in \d+ forward passes\), .* "
                     r"spent", said)


# -- the part ----------------------------------------------------------------------------------------------------------


def test_the_file_holds_each_neuron_together(q4: Path) -> None:
    with Bundle.open(q4) as bundle:
        bundle.verify()
        cold, entry = read_cold(bundle), bundle.tensors["layers.1.ffn"]
        part = entry.type.part_bytes(128)
        ffn = bundle.weights[entry.offset :][: entry.nbytes].reshape(328 * 3, part)
        assert cold and cold.neurons * 3 * part <= cold.nbytes == abi.STREAM_UNIT
        for neuron in (0, 7, 8, 200, 327):
            offset = cold.offsets[1] + neuron // cold.neurons * cold.nbytes + neuron % cold.neurons * 3 * part
            with open(cold.path, "rb") as file:
                file.seek(offset)
                got = np.frombuffer(file.read(3 * part), np.uint8).reshape(3, part)
            assert (got[0] == ffn[neuron]).all() and (got[1:] == ffn[328:].reshape(328, 2, part)[neuron]).all()


def test_the_file_of_other_weights_is_refused(q4: Path, tmp_path: Path) -> None:
    write_random_bundle(CONFIG, tmp_path / "other", "q4", seed=5, ffn_layout="neuron",
                        sparsity=Sparsity(0.3, 0.8, "sign"))
    with Bundle.open(q4) as bundle, BundleWriter(tmp_path / "m", bundle.config, bundle.quantisation) as writer:
        for entry in bundle.header.tensors:
            writer.add(entry.name, entry.type, entry.shape, bundle.weights[entry.offset :][: entry.nbytes])
        writer.copy_file(tmp_path / "other" / COLD_FILE, part="cold")
    with Bundle.open(tmp_path / "m") as bundle, \
            pytest.raises(BundleError, match=r"cold cold\.bin was made for other weights"):
        read_cold(bundle)


@pytest.mark.parametrize("lazy", ["keep=0.5,0.2", "keep=1,1"])
def test_a_prompt_in_stages_asks_for_its_neurons(q4: Path, lazy: str) -> None:
    with session(q4, **OPTIONS, lazy=lazy) as opened:
        expected = logits_of(opened, tokens(120), 3)
    with offloaded(q4, lazy=lazy) as opened:
        np.testing.assert_array_equal(logits_of(opened, tokens(120), 3), expected)
        assert opened.prefill_strategy.last.tokens[0] == 117
