"""The screened output head in a run: greedy text is exact, bounds hold, and whoever looks at all logits gets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, BundleWriter, HeadScreen, read_screen, weights_identity
from edgeinfer.config import MAX_KLD, GenerationConfig, Recipe, RuntimeConfig
from edgeinfer.engine import Sampler
from edgeinfer.errors import BundleError, UnsupportedModelError, UsageError
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.kernels import reference
from edgeinfer.llm.api import LLM
from edgeinfer.llm.strategy import Strategy, choose
from edgeinfer.models import demo_path
from edgeinfer.quality.evaluate import Stream
from edgeinfer.quality.gate import find, judge
from edgeinfer.quality.measurements import Setting, read_quality
from edgeinfer.registry import recipe_with
from edgeinfer.runner import DECODE, PROMPT, Segment
from edgeinfer.runtime import Session
from edgeinfer.sparse import screen_head
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.screened import write_screened_demo
from tests.helpers.sessions import session, write_model
from tests.models.test_sparse_predict import with_predictor

SCREENED = recipe_with(head="screened")
PROMPT_TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The demo model with a screen of its head, and the report of the command that made it."""
    root = tmp_path_factory.mktemp("screened")
    with LLM("demo") as llm:
        text = "\f".join(llm.generate(PROMPT_TEXT, max_tokens=300, seed=i, ignore_eos=True) for i in range(9))
    (root / "text.txt").write_text(text, encoding="utf-8")
    done = edgeinfer("sparsify", "demo", root / "m", "--head", "--text", root / "text.txt", "--json")
    assert done.code == 0, done.err
    return root / "m", done.json


@pytest.fixture(scope="module")
def measured(made: tuple[Path, dict[str, Any]]) -> Path:
    return made[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a screen that nothing was measured with."""
    return write_screened_demo(tmp_path_factory.mktemp("fitted"))


def sampler(opened: Session, **options: Any) -> Sampler:
    return Sampler(GenerationConfig(**{"temperature": 0.0, **options}), opened.model.vocab_size, 1)


def decoded(opened: Session, ids: list[int], **options: Any) -> np.ndarray:
    """Logits of each token, decoded one by one, each with a sample."""
    chain, sequence = sampler(opened, **options), opened.new_sequence()
    return np.concatenate([opened.decode([sequence], [i], None, [chain.address]).copy() for i in ids])


def ids_of(path: Path, n: int = 60) -> list[int]:
    with LLM(path, max_kld=0) as llm:
        return list(llm.complete(PROMPT_TEXT, max_tokens=n, temperature=1, seed=3, ignore_eos=True).token_ids)


@pytest.mark.slow
def test_most_rows_are_left_out_and_the_largest_logit_is_exact(made: tuple[Path, dict[str, Any]]) -> None:
    path, report = made
    ids = ids_of(path)
    with session(path, ctx=128) as opened:
        want = decoded(opened, ids)
    rows = []
    for threads in (1, 2, 3):
        with session(path, ctx=128, threads=threads, recipe=SCREENED) as opened:
            rows.append(decoded(opened, ids))
    assert all(np.array_equal(row, rows[0]) for row in rows)
    have = rows[0]
    assert np.array_equal(have.argmax(axis=1), want.argmax(axis=1))
    assert np.array_equal(have.max(axis=1), want.max(axis=1))
    computed = (have == want).reshape(len(ids), -1, 16).all(axis=2).mean()
    assert computed < 0.4 and abs(computed - report["screen"]["share"]) < 0.1
    assert 0 < np.abs(have - want).max() < 4


@pytest.mark.slow
def test_beams_look_at_all_logits(path: Path) -> None:
    with LLM(path, ctx=128, beams=4, head="screened", threads=1) as screened, LLM(path, ctx=128, beams=4, max_kld=0,
                                                                                  threads=1) as exact:
        have, want = (llm.complete(PROMPT_TEXT, beams=4, n=4, max_tokens=20) for llm in (screened, exact))
    assert [(one.token_ids, one.score) for one in have.choices] == [(one.token_ids, one.score) for one in want.choices]


def test_no_estimate_is_off_by_more_than_its_bound(path: Path) -> None:
    ids = ids_of(path, 24)
    with Bundle.open(path) as bundle:
        screen = read_screen(bundle)
        assert screen is not None
        bounds = screen.bounds.copy()
    with session(path, ctx=128, recipe=SCREENED) as opened, session(path, ctx=128) as exact:
        chain, own, other = sampler(opened), opened.new_sequence(), exact.new_sequence()
        (head,) = [n for n, instruction in enumerate(opened.program.instructions)
                   if instruction.kernel.startswith("head_")]
        for i in ids:
            opened.reserve(own, 1)
            opened.forward_range(Segment(own, [i], (0,), DECODE, None, (chain.address,)), 0, head)
            opened.append(own, [i])
            want = exact.decode([other], [i])[0].astype(np.float64)
            low, estimates = (tensor(opened, name) for name in ("screen_low", "estimates"))
            reach = reference.reach(low, screen.rank)
            off = np.abs(estimates - want)
            assert (off <= bounds * reach).all()
            assert (off.max() > 0.05 * bounds * reach).any()  # they are not idle figures


def tensor(opened: Session, name: str) -> np.ndarray:
    """The first row of an activation."""
    place = opened.plan.allocations[name]
    (width,) = {t.width for op in opened.graph.ops for t in (*op.inputs, op.out) if t.name == name}
    return opened.executor.regions[place.region][place.offset :][: 4 * width].view(np.float32).astype(np.float64)


def test_a_token_has_the_same_bits_in_any_batch(path: Path) -> None:
    ids = ids_of(path, 20)
    with session(path, ctx=128, recipe=SCREENED, outputs=20, max_sequences=3) as opened:
        alone, chain = decoded(opened, ids), sampler(opened)
        every = tuple(range(len(ids)))
        sample_specs = (chain.address,) * len(ids)
        together = opened.forward([Segment(opened.new_sequence(), ids, every, DECODE, None, sample_specs)]).copy()
        assert np.array_equal(together, alone)
        with session(path, ctx=128, outputs=20, max_sequences=3) as exact:
            want = exact.forward([Segment(exact.new_sequence(), ids, every)]).copy()
        mixed = opened.forward([Segment(opened.new_sequence(), ids[:9], every[:9], DECODE, None, sample_specs[:9]),
                             Segment(opened.new_sequence(), ids[:7], every[:7], PROMPT, None, sample_specs[:7])]).copy()
        assert np.array_equal(mixed[:9], alone[:9]) and np.array_equal(mixed[9:], want[:7])
        # nobody samples
        assert np.array_equal(opened.forward([Segment(opened.new_sequence(), ids, every, DECODE)]), want)


def test_a_masked_row_has_all_its_logits(path: Path) -> None:
    """Beside a row of estimates, in one pass."""
    ids = ids_of(path, 3)
    with session(path, ctx=128, max_sequences=2) as exact:
        want = exact.forward([Segment(exact.new_sequence(), ids, (2,))])[0].copy()
    with session(path, ctx=128, max_sequences=2, recipe=SCREENED) as opened:
        masked, plain = sampler(opened), sampler(opened)
        forbidden = int(want.argmax())
        words = np.full(-(-len(want) // 32), 2**32 - 1, np.uint32)
        words[forbidden // 32] ^= np.uint32(1 << forbidden % 32)
        masked.set_mask(words)
        rows = opened.forward([Segment(opened.new_sequence(), ids, (2,), DECODE, None, (chain.address,))
                               for chain in (masked, plain)])
        assert np.array_equal(rows[0], want) and not np.array_equal(rows[1], want)
        assert masked.sample(rows[0]).token_id == np.argsort(-want, kind="stable")[1]
        assert plain.sample(rows[1]).token_id == forbidden


def test_every_kernel_agrees_with_its_reference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(path, 6)
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with session(path, ctx=64, recipe=SCREENED) as opened:
        assert decoded(opened, ids).shape[0] == 6


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("options", [
    {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 5, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {7: 4.0, 300: 9.0}}, {"temperature": 0.9, "seed": 1, "frequency_penalty": 0.5},
])
def test_greedy_text_and_whatever_looks_at_other_logits_are_exact(path: Path, options: dict[str, Any]) -> None:
    found = []
    for head in ("exact", "screened"):
        with LLM(path, head=head) as llm:
            found.append(llm.complete(PROMPT_TEXT, max_tokens=80, ignore_eos=True, **options))
    assert found[0].token_ids == found[1].token_ids and found[0].logprobs == found[1].logprobs


def test_it_is_planned_printed_and_counted(path: Path) -> None:
    with session(path, ctx=64, recipe=SCREENED) as opened, session(path, ctx=64) as exact, Bundle.open(path) as bundle:
        screen = read_screen(bundle)
        assert screen is not None
        assert opened.plan.region("resident").nbytes >= screen.nbytes
        assert opened.plan.total_bytes > exact.plan.total_bytes + screen.nbytes
    asked = ("--head", "screened", "--json")
    program = edgeinfer("info", path, "--program", *asked).json
    kernels = [entry["kernel"] for entry in program["program"]]
    assert "screen_maxima" in kernels and any(kernel.startswith("head_int8") for kernel in kernels)
    assert program["screen"] == {"rank": screen.rank, "share": screen.share, "bytes": screen.nbytes}
    exact_plan = edgeinfer("plan", path, "--head", "exact", "--json").json
    assert edgeinfer("plan", path, *asked).json["total_bytes"] > exact_plan["total_bytes"]
    estimates = [edgeinfer("estimate", path, *some, "--machine", "rpi5", "--json").json for some in ((), asked[:2])]
    assert estimates[1]["bytes_per_token"] < estimates[0]["bytes_per_token"]


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgeinfer.quality.measurements.cache_root", lambda: tmp_path / "cache")


@pytest.mark.slow
def test_a_run_uses_what_was_measured_within_the_bound(made: tuple[Path, dict[str, Any]], own_cache: None) -> None:
    path, report = made
    (measured,) = report["measured"]
    assert measured["enabled"] and measured["kld_mean"] < MAX_KLD and measured["same_top"] == 1
    asked = ("run", path, PROMPT_TEXT, "-n", 3, "--temp", 0, "-t", 1)
    by_itself = edgeinfer(*asked, "--json").json["quality"]
    assert by_itself["by_itself"] and by_itself["setting"] == measured["setting"]
    assert by_itself["kld_mean"] == measured["kld_mean"]
    said = edgeinfer(*asked).err
    assert "Approximate, kv=int8 passes=head:mode=screened: KLD" in said
    assert "; enabled because it is within --max-kld 0.02.\n" in said
    for exact in (("--max-kld", 0), ("--max-kld", measured["kld_mean"] / 2), ("--head", "exact"), ("--kv", "f16"),
                  ("--recipe", "none")):
        assert edgeinfer(*asked, *exact, "--json").json["quality"] is None, exact
    forced = edgeinfer(*asked, "--kv", "f16", "--head", "screened")
    assert "Approximate, kv=f16 passes=head:mode=screened: not measured.\n" in forced.err
    assert not edgeinfer(*asked, "--head", "screened", "--json").json["quality"]["by_itself"]
    said = edgeinfer(*asked, "--max-kld", -1).sentence
    assert said == "--max-kld is -1.0; it must be a finite number, 0 or more."


@pytest.mark.slow
def test_all_techniques_together_need_a_measurement_of_their_own(measured: Path, own_cache: None) -> None:
    with Bundle.open(measured) as bundle:
        config = RuntimeConfig()
        assert [one.recipe for one in judge(bundle, config).enabled] == [SCREENED]
        assert not judge(bundle, config, 0).enabled
        narrow = replace(config, recipe=Recipe.parse("fuse_input+tests.helpers.narrow_attention.narrow:window=6"))
        assert not judge(bundle, narrow).enabled
        *_, known = read_quality(bundle)  # after what was known of the demo already
        assert find([known], known.setting, bundle) == known and known.weights != ""


def ways_of(bundle: Bundle, max_kld: float) -> list[Strategy]:
    """All that may run, in the order of their recipes."""
    found = choose(bundle, RuntimeConfig(), max_kld)
    return sorted((found.strategy, *found.others), key=lambda way: (Recipe(), SCREENED).index(way.config.recipe)
                  if way.config.recipe in (Recipe(), SCREENED) else -1)


def test_a_screen_beside_a_predictor_is_measured_with_it(tmp_path: Path, own_cache: None) -> None:
    stream = Stream(tuple(range(3, 99)) * 24, (True,) * 2304, 2304)
    with Bundle.open(with_predictor(tmp_path, "lowrank", 0.0)) as source:
        made = screen_head(source, tmp_path / "both", stream, rank=32, threads=1, max_kld=1e9)
    alone, both = (result.divergence.kld_mean for _, result in made.results if result.divergence)
    assert [dict(setting.values)["passes"] for setting, _ in made.results] == [
        "head:mode=screened", "sparse:mode=predict+head:mode=screened"]
    assert 0 <= alone < both and made.reasons[1].endswith("is within 1e+09; enabled")
    with Bundle.open(tmp_path / "both") as bundle:
        bundle.verify()
        together = recipe_with(sparse="predict", head="screened")
        assert [one.recipe for one in judge(bundle, RuntimeConfig(), both).enabled] == [together, SCREENED]
        assert [one.recipe for one in judge(bundle, RuntimeConfig(), (alone + both) / 2).enabled] == [SCREENED]
        asked = recipe_with(sparse="exact")
        (found,) = judge(bundle, RuntimeConfig(recipe=asked), both).enabled
        assert found.recipe == recipe_with(asked, head="screened")
        (other,) = judge(bundle, RuntimeConfig(recipe=SCREENED), both).enabled  # the order of naming them is none
        assert Setting.of_run(other) == Setting.of_run(RuntimeConfig(recipe=together))
        assert [way.config.recipe for way in ways_of(bundle, both)] == [together, Recipe(), SCREENED]


@pytest.mark.slow
def test_where_the_screen_does_not_fit_the_run_is_exact(measured: Path, own_cache: None) -> None:
    with LLM(measured, ctx=64) as llm, LLM(measured, ctx=64, head="exact") as exact:
        assert llm.approximated and not exact.approximated
        between = (llm.plan.total_bytes + exact.plan.total_bytes) // 2
    with LLM(measured, ctx=64, budget=between) as llm:
        assert not llm.approximated and llm.session.config.recipe == Recipe()


@pytest.mark.slow
def test_eval_measures_it_as_a_run_decodes(made: tuple[Path, dict[str, Any]], own_cache: None) -> None:
    path, _ = made
    found = edgeinfer("eval", path, "--text", path.parent / "text.txt", "--decode", 8, "-c", 64, "--tokens", 200,
                      "--head", "screened", "--json").json
    assert 0 < found["kld_mean"] < 0.1 and found["same_top"] == 1
    assert found["setting"]["passes"] == "head:mode=screened"


def with_screen(plain: Path, path: Path, change: Callable[[HeadScreen], HeadScreen], weights: str = "") -> Path:
    """The demo bundle with a screen that is all zeros but for what changes."""
    with Bundle.open(plain) as bundle, BundleWriter(path, bundle.config, bundle.header.quantisation) as writer:
        for entry in bundle.header.tensors:
            writer.add(entry.name, entry.type, entry.shape, bundle.weights[entry.offset :][: entry.nbytes])
        with Bundle.open(path.parent / "good") as good:
            screen = read_screen(good)
            assert screen is not None
            own = replace(screen, inner=screen.inner.copy(), outer=screen.outer.copy(), bounds=screen.bounds.copy())
        content = b"".join(change(own).pack(weights or weights_identity(bundle.header.tensors)))
        writer.add_file("screen.bin", content, "screen")
    return path


def _damaged(array: np.ndarray, value: float) -> np.ndarray:
    out = array.copy()
    out[-1] = value
    return out


def _scale(matrix: np.ndarray) -> np.ndarray:
    matrix[-64:].view(np.float16)[0] = np.inf
    return matrix


BAD: dict[str, tuple[Callable[[HeadScreen], HeadScreen], str]] = {
    "rank": (lambda s: replace(s, rank=10**6), "has the rank 1000000, which no screen of this model has"),
    "share": (lambda s: replace(s, share=1.5), "a share of 1.5 is computed; shares are from 0 to 1"),
    "nan": (lambda s: replace(s, bounds=_damaged(s.bounds, np.nan)), "bounds has values that are not finite numbers"),
    "below": (lambda s: replace(s, bounds=_damaged(s.bounds, -1)), "has bounds below 0; make it again"),
    "short": (lambda s: replace(s, bounds=s.bounds[1:]), r"bounds has shape \[\d+\] of float32; the model needs"),
    "scale": (lambda s: replace(s, outer=_scale(s.outer)), "outer has values that are not finite numbers"),
}


def test_a_screen_that_does_not_belong_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "good").symlink_to(path)
    for name, (change, message) in BAD.items():
        bad = with_screen(demo_path(), tmp_path / name, change)
        with pytest.raises(BundleError, match=message), Bundle.open(bad) as bundle:
            read_screen(bundle)
        assert edgeinfer("verify", bad).code == 1
        assert edgeinfer("run", bad, "Once", "--head", "screened").code == 1
    other = with_screen(demo_path(), tmp_path / "other", lambda s: s, "0" * 64)
    with pytest.raises(BundleError, match="was made for other weights; make it again"), Bundle.open(other) as bundle:
        read_screen(bundle)


def test_a_checkpoint_keeps_its_ffns_in_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, layouts = tmp_path / "text.txt", []

    def look(bundle: Bundle, *_: Any, **__: Any) -> None:
        layouts.append({kind.layout for kind in bundle.types.values()})
        raise UsageError("Seen.")

    text.write_text("a crow sat on the tree", encoding="utf-8")
    monkeypatch.setattr("edgeinfer.sparse.screen_head", look)
    monkeypatch.setattr("edgeinfer.sparse.sparsify", look)
    for more in (["--head"], []):
        assert edgeinfer("sparsify", make_checkpoint(tmp_path / "source"), tmp_path / "m", "--text", text,
                         *more).sentence == "Seen."
    assert layouts == [{"tile16", "plain"}, {"tile16", "plain", "neuron"}]


@pytest.mark.slow
def test_what_cannot_be_screened_is_refused(measured: Path, tmp_path: Path) -> None:
    text = measured.parent / "text.txt"
    assert edgeinfer("sparsify", measured, tmp_path / "again", "--head", "--text", text).sentence.endswith(
        "is screened already; give the bundle that it was made of.")
    said = edgeinfer("sparsify", "demo", tmp_path / "m", "--head", "--predictor", "sign", "--text", text).sentence
    assert said == "--head leaves FFNs as they are, and --predictor sign is for them; give one of the two."
    assert "rank is 1000; it must be from 1 to hidden_size" in edgeinfer(
        "sparsify", "demo", tmp_path / "m", "--head", "--rank", 1000, "--text", text).sentence
    assert not (tmp_path / "m").exists()
    assert "but the model has no screen" in edgeinfer("run", "demo", "Once", "--head", "screened").sentence
    said = edgeinfer("run", "demo", "Once", "--head", "fast").sentence
    assert "head is 'fast'; choose one of exact, screened" in said
    with Bundle.open(write_model(tmp_path, weights="f32")) as bundle, \
            pytest.raises(UnsupportedModelError, match="only one in int8 or q4 can be screened"):
        build_graph(bundle.config, expected_types(bundle.types), Recipe.parse("head:mode=screened,rank=8,share=0.5"))
    with pytest.raises(UsageError, match=r"but the screen of .* is none; leave share and rank out"), \
            session(demo_path(), recipe=Recipe.parse("head:mode=screened,rank=8")):
        pass
    twice = Recipe.parse("head:mode=screened+head:mode=screened")
    with pytest.raises(UsageError, match="has the pass head twice; name it once"), session(measured, recipe=twice):
        pass
