"""Prompts in stages: exact where all tokens go on, the same text however it is computed, and sequences with holes."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bench.results import PROMPT as PROMPT_TEST
from edgeinfer.bench.results import Case
from edgeinfer.bench.traffic import record_bytes, record_operations
from edgeinfer.config import Recipe
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import BundleError, CancelledError, ClosedError, RequestError, UsageError
from edgeinfer.graph import ModelConfig, Product
from edgeinfer.pruning import Schedule
from edgeinfer.runner import Cancellation, Segment, Sequence
from edgeinfer.runtime import Session
from tests.sessions import TINY, WINDOWED, free_blocks, session, tokens

MODEL = replace(TINY, num_hidden_layers=5)
HALF = Schedule((0.5, 0.25), (2, 4))
ALL = Schedule((1.0, 1.0, 1.0), (1, 2, 4))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("model"), MODEL)


def _write(root: Path, config: ModelConfig, **how: str) -> Path:
    write_random_bundle(config, root / "bundle", **how)
    return root / "bundle"


def kv_rows(opened: Session, sequence: Sequence) -> bytes:
    """What the sequence's whole blocks hold, in all layers."""
    whole = sequence.blocks[: len(sequence) // 16]
    return b"".join(layer[block].tobytes() for layer in opened.kv._layers for block in whole)


def answer(opened: Session, sequence: Sequence, n: int = 4) -> bytes:
    """Logits of tokens decoded behind a sequence, whose fork is given back."""
    fork = opened.fork(sequence)
    rows = [opened.decode([fork], [token])[0].tobytes() for token in tokens(n, seed=9)]
    opened.release(fork)
    return b"".join(rows)


def run(path: Path, ids: list[int], **options: object) -> tuple[bytes, bytes, bytes]:
    """Logits behind a prompt in two parts, its KV, and logits of what is decoded then."""
    with session(path, ctx=640, max_sequences=2, **options) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids[:21])
        logits = opened.prefill(sequence, ids[21:]).tobytes()
        return logits, kv_rows(opened, sequence), answer(opened, sequence)


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_where_all_tokens_go_on_the_bits_are_those_of_the_plain_prompt(model: Path, kv: str) -> None:
    ids = tokens(540)
    plain = run(model, ids, kv=kv, prefill_chunk=64)
    for chunk, threads in ((512, 1), (64, 2), (7, 3)):
        assert run(model, ids, kv=kv, prefill_chunk=chunk, threads=threads, lazy=ALL) == plain
    assert run(model, ids[:120], kv=kv, prefill_chunk=1, lazy=ALL) == run(model, ids[:120], kv=kv)


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_a_pruned_prompt_has_the_same_bits_for_any_threads_and_chunk(model: Path, kv: str) -> None:
    ids = tokens(540)
    first = run(model, ids, kv=kv, prefill_chunk=64, lazy=HALF)
    assert first[0] != run(model, ids, kv=kv, prefill_chunk=64)[0]
    for chunk, threads in ((512, 1), (33, 2), (7, 3)):
        assert run(model, ids, kv=kv, prefill_chunk=chunk, threads=threads, lazy=HALF) == first


@pytest.mark.parametrize(("config", "layout"), [
    (MODEL, "neuron"), (replace(WINDOWED, num_hidden_layers=5, windows=(0, 300, 40, 0, 40)), "tile16"),
    (replace(MODEL, model_type="qwen3", hidden_act="relu2", tie_word_embeddings=True), "tile16"),
    (replace(MODEL, model_type="qwen2", hidden_act="gelu", attention_bias=True), "tile16")])
def test_architectures_and_layouts_go_through_in_stages(config: ModelConfig, layout: str, tmp_path: Path) -> None:
    path, ids = _write(tmp_path, config, ffn_layout=layout), tokens(330)
    assert run(path, ids, lazy=ALL) == run(path, ids)
    assert run(path, ids, lazy=HALF, prefill_chunk=50) == run(path, ids, lazy=HALF)


def test_what_was_left_behind_is_as_if_it_had_never_been_there(model: Path) -> None:
    """Beside a walk of the same records over the tokens that are left alone, at their own places."""
    ids = tokens(200)
    with session(model, ctx=256, kv="f32", max_sequences=2, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        lacking = opened.kv.lacking(sequence, 200)
        assert [int(n) for n in (~lacking).sum(axis=1)] == [100, 50] == list(opened.stages.last.tokens[1:])
        assert (lacking[0] <= lacking[1]).all() and not lacking[:, [0, *range(184, 200)]].any()
        expected = answer(opened, sequence)
        for layer, stage in ((2, 0), (4, 1)):  # garbage where nothing is: no result may notice
            plane = opened.kv._layers[layer]
            for row in np.flatnonzero(lacking[stage]):
                assert not opened.kv.keys(sequence, layer, 0)[row].any()
                lines = plane[sequence.blocks[row // 16]].view(np.float32).reshape(2, 2, -1)
                lines[:, 0].reshape(2, -1, 16)[..., row % 16] = 7.0
        assert answer(opened, sequence) == expected


def test_importance_is_the_attention_of_the_last_tokens(model: Path) -> None:
    """Beside the softmax of their scores in float64, from the queries and keys that the layer has."""
    from edgeinfer.runtime.stages import importance

    with session(model, ctx=256, kv="f32", lazy=HALF) as opened:
        sequence = opened.new_sequence()
        seen = []
        opened.stages.choose = lambda weight, rows, most: seen.append((weight, rows, most)) or rows[-most:]
        opened.prefill(sequence, tokens(128))
        (first, _, most), (second, rows, _) = seen
        assert most == 64 and np.isinf(first[[0, *range(112, 128)]]).all() and np.isfinite(first[1:112]).all()
        assert rows.tolist() == list(range(64, 128)) and not np.isinf(second[0])
        op = opened.stages._stages[1].attention
        q = np.random.default_rng(0).standard_normal((2, 36)).astype(np.float32)
        got = importance(opened, sequence, op, 1, q, 128)
        k = [opened.kv.keys(sequence, op.layer, head)[:128].astype(np.float64) for head in range(2)]
        scores = np.array([[k[head // 3] @ row[6 * head :][:6] for head in range(6)] for row in q]) / np.sqrt(6)
        scores[:, :, :64] = scores[0, :, 127] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        mean = (weights / weights.sum(axis=2, keepdims=True)).mean(axis=(0, 1))
        expected = [mean[max(i - 2, 0) : i + 3].max() for i in range(128)]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-8)


def test_keys_are_read_as_they_are_stored(model: Path) -> None:
    """Those of the first layer, which sees the same rows whatever is stored."""
    found = {}
    for kv in ("f32", "f16", "int8"):
        with session(model, ctx=96, kv=kv) as opened:
            sequence = opened.new_sequence()
            opened.walk([Segment(sequence, tokens(50))])
            found[kv] = [opened.kv.keys(sequence, 0, head)[:50] for head in range(2)]
    for kv, share in (("f16", 1e-3), ("int8", 1e-2)):
        for mine, exact in zip(found[kv], found["f32"], strict=True):
            assert np.abs(mine - exact).max() <= share * np.abs(exact).max() and exact.std() > 0


def test_records_agree_with_their_twins_behind_a_pruned_prompt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts and decoding: what the program says of holes is what the flags say."""
    expected = None
    for check in ("0", "1"):
        monkeypatch.setenv("EDGEINFER_CHECK", check)
        with session(model, ctx=320, prefill_chunk=80, max_sequences=2, lazy=HALF) as opened:
            assert opened.executor.check == (check == "1")
            sequence = opened.new_sequence()
            opened.prefill(sequence, tokens(270))
            found = answer(opened, sequence, 2)
            assert expected in (None, found)
            expected = found


def test_a_prompt_that_is_no_list_of_tokens_is_refused(model: Path) -> None:
    with session(model, ctx=128, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        for ids in (None, 5, [1.5] * 100):
            with pytest.raises(RequestError, match="they must be integers"):
                opened.prefill(sequence, ids)  # type: ignore[arg-type]
        assert opened.prefill(sequence, iter(tokens(70))).any()  # type: ignore[arg-type]


def test_ties_go_to_the_earlier_place() -> None:
    from edgeinfer.runtime.stages import most_important

    rows = np.array([3, 5, 8, 9, 12])
    weight = np.array([1, 2, 1, np.inf, 1], np.float32)
    assert most_important(weight, rows, 3).tolist() == [3, 5, 9]
    assert most_important(weight, rows, 9).tolist() == rows.tolist()


def test_forks_copies_and_truncation_know_what_is_there(model: Path) -> None:
    ids = tokens(150)
    with session(model, ctx=256, max_sequences=3, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids)
        expected, lacking = answer(opened, sequence), opened.kv.lacking(sequence, 150)
        fork = opened.fork(sequence)
        opened.decode([fork], [5])  # copies the last block, flags too
        assert fork.blocks[-1] != sequence.blocks[-1]
        assert (opened.kv.lacking(fork, 150) == lacking).all()
        opened.release(fork)
        together = [opened.fork(sequence) for _ in range(2)]
        rows = [opened.decode(together, [token] * 2).copy() for token in tokens(4, seed=9)]
        assert b"".join(row[0].tobytes() for row in rows) == b"".join(row[1].tobytes() for row in rows) == expected
        for one in together:
            opened.release(one)
        # what stands where a pruned token stood before is there
        opened.truncate(sequence, 75)
        assert lacking[:, 75:80].any()
        opened.walk([Segment(sequence, tokens(10, seed=3))])
        assert (opened.kv.lacking(sequence, 85)[:, :75] == lacking[:, :75]).all()
        assert not opened.kv.lacking(sequence, 85)[:, 75:].any()
        opened.release(sequence)
        other, plain = opened.new_sequence(), None
        opened.walk([Segment(other, ids[:60])])
        assert not opened.kv.lacking(other, 60).any()
        plain = answer(opened, other)
    with session(model, ctx=256, max_sequences=3) as opened:
        other = opened.new_sequence()
        opened.walk([Segment(other, ids[:60])])
        assert answer(opened, other) == plain


def test_a_conversation_goes_on_and_short_parts_are_dense(model: Path) -> None:
    def turns(opened: Session) -> Sequence:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(100))
        opened.decode([sequence], [3])
        opened.prefill(sequence, tokens(20, seed=1))
        return sequence

    with session(model, ctx=512, max_sequences=2, lazy=HALF) as opened:
        sequence = turns(opened)
        assert opened.stages.last.tokens == (20,)
        assert str(opened.stages.last).startswith("New prompt tokens: 20, fewer than 64, so all of them went through")
        assert str(opened.stages.last._replace(tokens=(1,))).startswith("New prompt tokens: 1, fewer than 64")
        before = opened.kv.lacking(sequence, 121)
        assert before[:, :100].any() and not before[:, 100:].any()
        opened.prefill(sequence, tokens(80, seed=2))
        assert opened.stages.last.tokens == (80, 40, 20)
        after = opened.kv.lacking(sequence, 201)
        assert (after[:, :121] == before).all() and after[1, 121:].sum() == 60
        expected = answer(opened, sequence)
    with session(model, ctx=512, max_sequences=2, lazy=HALF, prefill_chunk=11, threads=2) as opened:
        sequence = turns(opened)
        opened.prefill(sequence, tokens(80, seed=2))
        assert answer(opened, sequence) == expected


@pytest.mark.parametrize("number", [0, 4, 6, 7, 10, 13])
def test_a_cancelled_prompt_leaves_the_sequence_as_it_was(model: Path, number: int) -> None:
    """In any walk of any stage: five chunks, of which the last two stop where they choose, three chunks, ..."""
    with session(model, ctx=256, max_sequences=2, prefill_chunk=32, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(70))
        expected, free = answer(opened, sequence), free_blocks(opened)
        walk, wish, calls = opened.walk_range, Cancellation(), itertools.count()

        def cancelled(*arguments: Any) -> Any:
            if next(calls) == number:
                wish.cancel()
            return walk(*arguments)

        opened.walk_range = cancelled
        with pytest.raises(CancelledError):
            opened.prefill(sequence, tokens(130, seed=1), wish)
        assert len(sequence) == 70 and free_blocks(opened) == free
        assert answer(opened, sequence) == expected
        opened.prefill(sequence, tokens(130, seed=1))
        assert next(calls) == number + 1 + 14


def test_a_wish_to_end_is_heard_while_it_is_chosen_who_goes_on(model: Path) -> None:
    with session(model, ctx=256, lazy=HALF) as opened:
        sequence, wish, keys, calls = opened.new_sequence(), Cancellation(), opened.kv.keys, itertools.count()

        def cancelled(*arguments: Any) -> Any:
            next(calls)
            wish.cancel()
            return keys(*arguments)

        opened.kv.keys = cancelled
        with pytest.raises(CancelledError):
            opened.prefill(sequence, tokens(130), wish)
        assert next(calls) == 1 and not len(sequence)  # of two heads


def test_a_model_that_is_closed_while_it_is_chosen_who_goes_on_says_so(model: Path) -> None:
    with session(model, ctx=256, lazy=HALF) as opened:
        closer, choose = threading.Thread(target=opened.close), opened.stages.choose

        def closed(*arguments: Any) -> Any:
            closer.start()
            while not opened.executor.ended(None):
                time.sleep(0.001)
            closer.join(0.1)
            return choose(*arguments)

        opened.stages.choose = closed
        with pytest.raises(ClosedError):
            opened.prefill(opened.new_sequence(), tokens(130))
        closer.join()


def test_a_pool_without_room_refuses_the_prompt_and_goes_on(model: Path) -> None:
    with session(model, ctx=160, max_sequences=2, own_tokens=16, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(100))
        other = opened.new_sequence()
        with pytest.raises(RequestError, match="KV blocks of 16 tokens are in use"):
            opened.prefill(other, tokens(120, seed=1))
        assert not len(other)
        opened.release(sequence)
        opened.prefill(other, tokens(120, seed=1))


def saved(opened: Session, path: Path, n: int = 150) -> bytes:
    """Save a prompt; gives what is decoded behind it."""
    sequence = opened.new_sequence()
    opened.prefill(sequence, tokens(n))
    opened.save(sequence, path)
    return answer(opened, sequence)


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_a_saved_prompt_goes_on_with_what_is_there(model: Path, tmp_path: Path, kv: str) -> None:
    with session(model, ctx=256, kv=kv, max_sequences=2, lazy=HALF) as opened:
        expected = saved(opened, tmp_path / "cache")
    with session(model, ctx=200, kv=kv, max_sequences=2, lazy=HALF, threads=2) as opened:
        stale = opened.new_sequence()
        opened.prefill(stale, tokens(180, seed=5))
        opened.release(stale)
        sequence = opened.load(tmp_path / "cache")
        assert answer(opened, sequence) == expected
        n = len(sequence)
        opened.truncate(sequence, n - 1)
        last = opened.prefill(sequence, tokens(n)[-1:]).tobytes()
        whole = opened.new_sequence()
        assert opened.prefill(whole, tokens(n)).tobytes() == last


def test_a_prompt_cache_is_refused_where_something_is_missing(model: Path, tmp_path: Path) -> None:
    with session(model, ctx=256, max_sequences=2, lazy=HALF) as opened:
        saved(opened, tmp_path / "pruned")
        expected = saved(opened, tmp_path / "dense", n=50)
    for lazy in (None, ALL, Schedule((0.5, 0.25), (1, 4))):
        with session(model, ctx=256, max_sequences=2, lazy=lazy) as opened:
            free = free_blocks(opened)
            with pytest.raises(BundleError, match=r"was saved with 'keep=0.5,0.25 after layers 2,4' as --lazy, and la"):
                opened.load(tmp_path / "pruned")
            assert free_blocks(opened) == free
            assert answer(opened, opened.load(tmp_path / "dense")) == expected  # where all is there


def _rewrite(path: Path, change: Callable[[dict[str, Any], bytearray], object]) -> None:
    """Change a cache's header and blocks, and let the checksum be right."""
    data = path.read_bytes()
    end = 16 + struct.unpack("<Q", data[8:16])[0]
    header, blocks = json.loads(data[16:end]), bytearray(data[end:])
    change(header, blocks)
    del header["sha256"]
    header["sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode() + blocks).hexdigest()
    text = json.dumps(header).encode()
    path.write_bytes(data[:8] + struct.pack("<Q", len(text)) + text + blocks)


FLAGS = 2 * 10 * 16
"""Bytes of a cache of 150 tokens that say what is there, at its end."""
CHANGES: dict[str, Callable[[dict[str, Any], bytearray], object]] = {
    "cut short": lambda header, blocks: blocks.pop(),
    "one more is there": lambda header, blocks: header["present"].__setitem__(0, 76),
    "none is said to be there": lambda header, blocks: header.pop("present"),
    "all are": lambda header, blocks: blocks.__setitem__(slice(-FLAGS, None), bytes(FLAGS)),
    "a flag turned": lambda header, blocks: blocks.__setitem__(-FLAGS + 3, 1 - blocks[-FLAGS + 3]),
    "more in the later stage": lambda header, blocks: (
        header["present"].reverse(), blocks.extend(blocks[-FLAGS : -FLAGS // 2]), blocks.__delitem__(
            slice(len(blocks) - FLAGS - FLAGS // 2, len(blocks) - FLAGS))),
    "no schedule": lambda header, blocks: header.pop("lazy"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_flags_that_do_not_fit_their_blocks_are_refused(model: Path, tmp_path: Path, change: str) -> None:
    with session(model, ctx=256, max_sequences=2, lazy=HALF) as opened:
        expected, free = saved(opened, tmp_path / "cache"), free_blocks(opened)
        _rewrite(tmp_path / "cache", lambda header, blocks: None)
        one = opened.load(tmp_path / "cache")
        assert answer(opened, one) == expected
        opened.release(one)
        _rewrite(tmp_path / "cache", CHANGES[change])
        with pytest.raises(BundleError, match="is damaged or cut short; give another file"):
            opened.load(tmp_path / "cache")
        assert free_blocks(opened) == free
        other = opened.new_sequence()
        opened.walk([Segment(other, tokens(60))])
        assert not opened.kv.lacking(other, 60).any()


def test_a_token_goes_through_each_layer_once_at_most(model: Path) -> None:
    """So a pruned prompt computes what is said to be computed, and never more than the plain one."""
    with session(model, ctx=256, prefill_chunk=32, lazy=HALF) as opened:
        sequence, walk = opened.new_sequence(), opened.walk_range
        done = np.zeros((len(opened.program.records), 130), int)

        def counted(segment: Segment, first: int, stop: int, offset: int, cancel: Any, rows: Any) -> Any:
            done[first:stop, rows] += 1
            return walk(segment, first, stop, offset, cancel, rows)

        opened.walk_range = counted
        opened.prefill(sequence, tokens(130))
        layers = [record.op.layer for record in opened.program.records]
        work = [done[layers.index(layer)].sum() for layer in range(5)]
        assert done.max() == 1 and work == [130, 130, 65, 65, 33]
        assert opened.stages.last.tokens == (130, 65, 33) and opened.stages.last.share == sum(work) / (5 * 130)


def test_rows_of_a_range_are_checked(model: Path) -> None:
    with session(model, ctx=160) as opened:
        sequence = opened.new_sequence()
        opened.reserve(sequence, 40)
        for rows in ([3, 2], [-1, 2], [1], [2, 2]):
            with pytest.raises(RequestError, match="cannot be those of 2 tokens"):
                opened.walk_range(Segment(sequence, [1, 2]), 0, 3, rows=np.array(rows))
        with pytest.raises(RequestError, match="reserve more"):
            opened.walk_range(Segment(sequence, [1, 2]), 0, 3, rows=np.array([3, 40]))


def test_boundaries_behind_an_early_exit_are_refused(model: Path) -> None:
    recipe = Recipe.parse("fuse_input+early_exit:layers=3")
    with session(model, ctx=128, recipe=recipe, lazy=Schedule((0.5,), (2,))) as opened:
        opened.prefill(opened.new_sequence(), tokens(100))
        assert opened.stages.last.tokens == (100, 50) and opened.stages.last.share == pytest.approx(250 / 300)
    with pytest.raises(UsageError, match=r"^The boundary after layer 4 has no layer behind it; the model has 3\.$"), \
            session(model, ctx=128, recipe=recipe, lazy=HALF):
        pass


def test_benchmarks_count_what_went_through(model: Path) -> None:
    case = Case(PROMPT_TEST, 128, 0)
    with session(model, ctx=256) as plain, session(model, ctx=256, lazy=HALF) as opened:
        opened.prefill(opened.new_sequence(), tokens(128))
        for layer, share in enumerate((1, 1, 0.5, 0.5, 0.25)):
            work, read = ([sum(count(each, case, record) for record in each.program.records
                               if isinstance(record.op, Product) and record.op.layer == layer)
                           for each in (opened, plain)] for count in (record_operations, record_bytes))
            assert work[0] == share * work[1] > 0
            assert read[0] == read[1] / (1 if share == 1 else 2) > 0  # chunks of 64


def test_the_plan_names_what_pruning_takes(model: Path) -> None:
    with session(model, ctx=256) as plain, session(model, ctx=256, lazy=HALF) as opened:
        names = {region.name: region for region in opened.plan.regions}
        assert "aux" not in {region.name for region in plain.plan.regions}
        assert opened.stages._aux.base.nbytes == 256 * 4 * MODEL.hidden_size  # the rest is for what choosing takes
        assert names["aux"].nbytes > 256 * 4 * MODEL.hidden_size and str(HALF) in names["aux"].reason
        flags = 2 * 16 * opened.plan.kv_blocks
        assert names["kv"].nbytes == plain.plan.region("kv").nbytes + flags and f"{flags} bytes" in names["kv"].reason




@pytest.mark.parametrize("kv", ["int8", "f32"])
def test_decoding_with_chosen_rows_of_v_behind_a_pruned_prompt(model: Path, kv: str) -> None:
    """What is not there is not chosen, and no mean counts it. With int8 KV a weight has 7 bits and a scale for a few of
    the blocks that are read, and these are others where blocks are left out."""
    ids, share = tokens(400), 0.03 if kv == "int8" else 1e-5
    plain = np.frombuffer(run(model, ids, kv=kv, lazy=HALF)[2], np.float32)
    above, most = (run(model, ids, kv=kv, lazy=HALF, recipe=Recipe().attention(all_)) for all_ in ("eps:0", "top:640"))
    assert above == most
    np.testing.assert_allclose(np.frombuffer(most[2], np.float32), plain, atol=share * np.abs(plain).max())
    few = Recipe().attention("top:16")
    first = run(model, ids, kv=kv, lazy=HALF, recipe=few)
    assert first[2] != plain.tobytes()
    assert run(model, ids, kv=kv, lazy=HALF, recipe=few, threads=3, prefill_chunk=33) == first
