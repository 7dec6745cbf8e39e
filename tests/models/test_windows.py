"""Layers with a window keep what it sees: the bits of layers that keep all, less memory, and never a wrong cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig, Recipe, RuntimeConfig
from edgeinfer.engine import BeamSearch, DraftModel, Engine, Generation, Request, SelfDraft
from edgeinfer.errors import BundleError, RequestError
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import MARGIN_TOKENS, Planner, Windowed, to_request
from edgeinfer.models.describe import describe
from edgeinfer.runner import DECODE, GONE, PROMPT, Segment, Sequence
from edgeinfer.runtime import SelfDraftPlan, Session
from tests.helpers.drafts import Written
from tests.helpers.sessions import TINY, session, tokens, write_model
from tests.models.test_kv_prompt_cache import DAMAGED, rewrite_header

WINDOW = 40
MODEL = replace(TINY, model_type="mistral", num_hidden_layers=3, windows=(WINDOW, 0, 17))
"""Windows of two widths beside a layer that sees all."""
CTX, CHUNK = 640, 32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("windows"), MODEL)


@contextmanager
def keeping_all(path: Path, **options: Any) -> Iterator[Session]:
    """A session of which all layers keep the K and V of all tokens."""
    with mock.patch.object(Windowed, "of", return_value=None), session(path, **options) as opened:
        assert opened.plan.windowed is None
        yield opened


def check_pools(opened: Session, alive: list[Sequence]) -> None:
    """Check that block counts are right and that no sequence holds more than its limit."""
    kv, recent = opened.kv, opened.kv.recent
    assert recent
    windowed = recent.windowed
    for pool, lists in ((kv.pool, [s.blocks for s in alive]), (recent.pool, [s.recent.blocks for s in alive])):
        held = np.bincount([b for blocks in lists for b in blocks if b != GONE], minlength=pool.n_blocks)
        assert pool._holders == held.tolist() and pool.n_free == (held == 0).sum()
    for one in alive:
        blocks = one.recent.blocks
        assert len(blocks) == len(one.blocks) == -(-len(one) // abi.BLOCK_TOKENS)
        assert [block == GONE for block in blocks] == [i < one.recent.gone for i in range(len(blocks))]
        assert len(blocks) - one.recent.gone <= windowed.sequence_blocks


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("kv", ["int8", "f32"])
@pytest.mark.parametrize(("chunk", "threads"), [(1, 2), (7, 1), (64, 2), (512, 1)])
def test_logits_have_the_bits_of_layers_that_keep_all(path: Path, kv: str, chunk: int, threads: int) -> None:
    ids, options = tokens(900, seed=3), {"ctx": 1024, "kv": kv, "outputs": 5}
    with keeping_all(path, prefill_chunk=64, **options) as whole:
        sequence = whole.new_sequence()
        expected = [whole.prefill(sequence, ids).tobytes()]
        expected += [whole.decode([sequence], [token])[0].tobytes() for token in ids[:20]]
        expected.append(whole.forward([Segment(sequence, ids[20:25], (2, 3, 4), DECODE)]).tobytes())
    with session(path, prefill_chunk=chunk, threads=threads, **options) as opened:
        assert opened.plan.windowed and opened.plan.windowed.layers == (0, 2)
        sequence = opened.new_sequence()
        found = [opened.prefill(sequence, ids).tobytes()]
        found += [opened.decode([sequence], [token])[0].tobytes() for token in ids[:20]]
        found.append(opened.forward([Segment(sequence, ids[20:25], (2, 3, 4), DECODE)]).tobytes())
        assert sequence.recent and sequence.recent.gone
        check_pools(opened, [sequence])
    assert found == expected


class _Pair:
    """One sequence in a session that gives back and in one that keeps all."""

    def __init__(self, opened: Session, whole: Session, pair: tuple[Sequence, Sequence] | None = None):
        self.opened, self.whole = opened, whole
        self.one, self.other = pair or (opened.new_sequence(), whole.new_sequence())
        self.longest = 0
        """Tokens that it had at most since it was empty."""

    def forward(self, ids: list[int], role: int, parents: list[int] | None = None) -> None:
        last = (0, len(ids) - 1) if len(ids) > 1 else (0,)
        a, b = (runner.forward([Segment(sequence, ids, last, role, parents)]).tobytes()
                for runner, sequence in ((self.opened, self.one), (self.whole, self.other)))
        assert a == b
        self.longest = max(self.longest, len(self.one))

    def fork(self) -> _Pair:
        copy = _Pair(self.opened, self.whole, (self.opened.fork(self.one), self.whole.fork(self.other)))
        copy.longest = self.longest
        return copy

    def cut(self, n: int) -> bool:
        """Cut both, where the one can be; says whether it was refused."""
        if not self.opened.can_truncate(self.one, n) and n:
            with pytest.raises(RequestError, match=r"^A sequence of \d+ tokens cannot be cut to \d+: layers with a "):
                self.opened.truncate(self.one, n)
            self.opened.rollback(self.one, n)
            refused = True
        else:
            self.opened.truncate(self.one, n)
            refused = False
        self.whole.truncate(self.other, n)
        self.longest = n if refused or not n else self.longest
        return refused

    def keep(self, n_before: int, path: list[int]) -> None:
        self.opened.accept(self.one, n_before, path)
        self.whole.accept(self.other, n_before, path)

    def release(self) -> None:
        self.opened.release(self.one)
        self.whole.release(self.other)

    def reload(self, file: Path) -> None:
        self.opened.save(self.one, file)
        self.opened.release(self.one)
        self.one = self.opened.load(file)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_operations_has_the_same_bits(path: Path, tmp_path: Path, seed: int) -> None:
    """Four sequences in a pool for three, so that what need not be kept is asked back."""
    rng, counts = np.random.default_rng(seed), {"refused": 0, "gone": 0, "full": 0}
    options: dict[str, Any] = {"ctx": CTX, "prefill_chunk": CHUNK, "max_sequences": 3, "outputs": 4}
    with session(path, **options) as opened, keeping_all(path, **options) as whole:
        alive = [_Pair(opened, whole)]
        for step in range(300):
            pair = alive[rng.integers(len(alive))]
            n = len(pair.one)
            try:
                match rng.integers(-6, 10):
                    case -6 | -5 | -4 | -3 | -2 | -1 | 0 | 1 | 2 if n + CHUNK <= CTX:
                        pair.forward(tokens(int(rng.integers(CHUNK // 2, CHUNK + 1)), seed=step), PROMPT)
                    case 3 | 4 if n + 5 <= CTX:
                        pair.forward(tokens(int(rng.integers(1, 6)), seed=step), DECODE)
                    case 5 if n + 6 <= CTX:
                        pair.forward(tokens(6, seed=step), DECODE, [-1, 0, 0, 1, 2, 4])
                        pair.keep(n, [[0, 2, 4], [0, 1], [0, 2, 4, 5], []][rng.integers(4)])
                    case 6 if len(alive) < 4:
                        alive.insert(rng.integers(len(alive) + 1), pair.fork())
                    case 7:
                        back = int(rng.choice([1, 5, 15, 16, MARGIN_TOKENS, 130, 220]))
                        counts["refused"] += pair.cut(max(0, n - back))
                    case 8 if n:
                        pair.reload(tmp_path / "cache")
                    case 9 if len(alive) > 1 and rng.integers(2):
                        alive.remove(pair)
                        pair.release()
            except RequestError as error:
                assert "KV blocks of 16 tokens are in use" in str(error)
                counts["full"] += 1
                pair.cut(0)  # of a forward pass that fails for want of blocks nothing is left
            check_pools(opened, [each.one for each in alive])
            for each in alive:
                most = min(len(each.one), max(0, each.longest - MARGIN_TOKENS))
                assert opened.can_truncate(each.one, most) == most
            assert [each.one.tokens for each in alive] == [each.other.tokens for each in alive]
            counts["gone"] += sum(each.one.recent.gone for each in alive)
    assert counts["gone"] > 100 and counts["refused"] and counts["full"] < 20, counts


BOOKS = ("window_blocks.py", "block_tables.py", "prefix_cache.py", "blocks.py")


# -- what is interrupted, kept on disk, or begins like something else -------------------------------------------------


def interrupted(line: int, run: Callable[[], object]) -> bool:
    """Run something, with Ctrl-C before some line of what keeps the books; says whether it came to that line."""
    seen = 0

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal seen
        if Path(frame.f_code.co_filename).name not in BOOKS:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("what", ["pass", "fork", "cut", "release"])
def test_an_interruption_never_frees_what_a_table_names(path: Path, what: str) -> None:
    """Ctrl-C at every line: later requests have the right bits, and in the end no block is missing."""
    ids, line, reached = tokens(270, seed=9), 0, True
    with session(path, ctx=CTX, prefill_chunk=CHUNK, max_sequences=2) as opened:
        expected, recent = None, opened.kv.recent
        assert recent
        while reached:
            one = opened.new_sequence()
            opened.prefill(one, ids)
            other = opened.fork(one)
            new: list[Sequence] = []
            line += 1 if line < 25 else 7  # of loops not every turn
            reached = interrupted(line, {
                "pass": lambda one=one: opened.forward([Segment(one, ids[:CHUNK])]),
                "fork": lambda one=one, new=new: new.append(opened.fork(one)),
                "cut": lambda one=one: opened.truncate(one, 250),
                "release": lambda one=one: opened.release(one)}[what])
            alive = [*opened.kv._living]
            named = [block for each in alive for block in each.recent.blocks if block != GONE]
            assert (np.array(recent.pool._holders) >= np.bincount(named, minlength=recent.pool.n_blocks)).all()
            found = opened.decode([other], [5])[0].tobytes()
            expected = expected or found
            assert found == expected
            if len(one) > 240:
                opened.rollback(one, 240)
                opened.forward([Segment(one, ids[240:])])
                assert opened.decode([one], [5])[0].tobytes() == expected
            for sequence in (one, other, *new):
                opened.release(sequence)
            del alive
        assert line > 10
        everything = [opened.new_sequence() for _ in range(2)]
        for sequence in everything:
            opened.prefill(sequence, tokens(CTX))


def test_a_prompt_cache_holds_what_there_is(path: Path, tmp_path: Path) -> None:
    """From a run that keeps all, and from one that keeps more, to one that keeps less; not to one that needs all."""
    ids = tokens(900, seed=4)
    with session(path, ctx=1024, prefill_chunk=512) as wide:
        sequence = wide.new_sequence()
        wide.prefill(sequence, ids)
        assert sequence.recent and sequence.recent.gone
        wide.save(sequence, tmp_path / "wide")
        expected = wide.decode([sequence], [7])[0].tobytes()
    with keeping_all(path, ctx=1024) as whole:
        sequence = whole.new_sequence()
        whole.prefill(sequence, ids)
        whole.save(sequence, tmp_path / "whole")
        with pytest.raises(BundleError, match=r"^The prompt cache \S+ has only the rows inside the windows"):
            whole.load(tmp_path / "wide")
    assert (tmp_path / "wide").stat().st_size < (tmp_path / "whole").stat().st_size
    with session(path, ctx=1024, prefill_chunk=CHUNK) as narrow:
        for name in ("wide", "whole"):
            loaded = narrow.load(tmp_path / name)
            assert loaded.recent and loaded.recent.gone == 57 - narrow.kv.recent.windowed.sequence_blocks
            check_pools(narrow, [loaded])
            narrow.truncate(loaded, 899)
            narrow.forward([Segment(loaded, ids[899:])])
            assert narrow.decode([loaded], [7])[0].tobytes() == expected
            narrow.release(loaded)
        for gone in (55, "3", 0, -1):
            rewrite_header(tmp_path / "wide", lambda header, gone=gone: header.update(gone=gone))
            with pytest.raises(BundleError, match=DAMAGED):
                narrow.load(tmp_path / "wide")
        check_pools(narrow, [])


class FirstRow(Generation):
    """A request that keeps the logits after its prompt."""

    row = b""

    def take(self, ran: list[Any]) -> str:
        self.row = self.row or b"".join(row.tobytes() for one in ran for row in one.rows)
        return super().take(ran)


def test_a_request_goes_on_from_what_its_beginning_still_has(path: Path, tmp_path: Path) -> None:
    """A common beginning that windows have left is run again, also of a prompt cache, which is then replaced."""
    ids, cache = tokens(500, seed=6), tmp_path / "cache"
    early, late, options = [*ids[:100], 1, 2, 3], [*ids[:460], 1, 2, 3], {"ctx": CTX, "prefill_chunk": CHUNK}
    with keeping_all(path, **options) as whole:
        expected = [whole.prefill(whole.new_sequence(), prompt).tobytes() for prompt in (early, late)]
    with session(path, **options) as opened:
        engine = Engine(opened)

        def turn(prompt: list[int], from_cache: bool = False) -> tuple[int, bytes]:
            task = FirstRow(opened, None, prompt, GenerationConfig(max_tokens=1, seed=1))
            done = Request(engine, task, not from_cache, cache if from_cache else None).finish()
            return done.cached_tokens, task.row

        for prompt, kept, row in ((late, 460, expected[1]), (early, 0, expected[0])):
            cache.unlink(missing_ok=True)
            turn(ids, True)
            assert turn(prompt, True) == (kept, row)
            assert opened.load(cache).tokens == prompt
        turn(ids)
        assert turn(late) == (448, expected[1])  # whole blocks
        assert turn(early)[1] == expected[0]
        engine.close()


def test_draft_tokens_of_models_with_windows_are_those_of_models_that_keep_all(path: Path) -> None:
    """A draft model whose kept text the next leaves early; and a part of the model, in the model's own sequences."""
    ids, options = tokens(500, seed=8), {"ctx": CTX, "prefill_chunk": CHUNK, "outputs": 8, "max_sequences": 2}
    texts = [ids, [*ids[:100], *tokens(250, seed=9)], [*ids[:340], 1, 2, 3]]

    def proposals(opened: Session) -> list[Any]:
        drafter, found = DraftModel(opened, TINY.vocab_size), []
        for prompt in texts:
            text = Written(opened, prompt)
            for right in (9, 3, 0):
                found.append(drafter.propose([text], 9)[0])
                text.take(found[-1][:right])
                text.write(1)
            drafter.release([text])
            opened.release(text.sequence)
        self_draft = SelfDraftPlan.of_bundle(opened.bundle, opened.config.recipe,
                                             Recipe.parse("fuse_input+early_exit:layers=2"))
        ahead = self_draft.open(opened)
        text = Written(opened, ids)
        for _ in range(12):
            found.append(SelfDraft(opened, ahead).propose([text], 7))
            text.write(3)
        ahead.close()
        return [*found, text.tokens]

    with keeping_all(path, **options) as whole:
        expected = proposals(whole)
    with session(path, **options) as opened:
        assert opened.plan.windowed
        assert proposals(opened) == expected


def test_what_layers_with_a_window_have_no_room_for_is_said(path: Path) -> None:
    with session(path, ctx=CTX, prefill_chunk=CHUNK, max_sequences=4, own_tokens=16) as opened:
        with pytest.raises(RequestError, match=r"^200 tokens at once are more than the 80 that layers"):
            opened.reserve(opened.new_sequence(), 200)
        with pytest.raises(RequestError, match=r"^4 beams of up to 120 tokens after a prompt of 16 may need 45 KV"):
            BeamSearch(opened, None, tokens(16), GenerationConfig(beams=4, max_tokens=120))
        BeamSearch(opened, None, tokens(500), GenerationConfig(beams=4, max_tokens=16))


# -- memory ------------------------------------------------------------------------------------------------------------


def plan_of(name: str, ctx: int, **options: Any) -> Any:
    model = describe(name)
    return Planner(model.graph, model.weight_bytes).plan(to_request(RuntimeConfig(ctx=ctx, threads=1, **options)))


def test_a_plan_shrinks_by_what_windows_do_not_see() -> None:
    plan = plan_of("gemma-3-4b", 32768)
    assert plan.windowed and len(plan.windowed.layers) == 29 and plan.windowed.window == 1024
    stride = plan.kv_layers[0].stride
    assert plan.windowed.blocks == plan.windowed.sequence_blocks == (1024 + 256 + MARGIN_TOKENS) // 16 + 1
    assert plan.region("kv").nbytes == stride * (5 * 2048 + 29 * plan.windowed.blocks) + 64
    kept = plan.windowed.positions
    assert plan.context_kv_bytes == (stride // 16 * (5 * 32768 + 29 * kept), stride // 16 * 34 * 32768)
