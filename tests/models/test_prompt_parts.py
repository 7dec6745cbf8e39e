"""Prompts whose KV blocks another process has computed: parts, their order, and room for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import LLM
from edgeinfer.errors import BundleError, ClosedError, RequestError
from edgeinfer.runner import Runner, Sequence, prompt_parts
from tests.helpers.sessions import HYBRID, TINY, WINDOWED, session, tokens, write_model


def parts_of(runner: Runner, ids: list[int], chunk: int) -> list[bytes]:
    """Return the parts of a prompt that is run in chunks."""
    sequence, found, sent = runner.new_sequence(), list[bytes](), 0
    for start in range(0, len(ids), chunk):
        runner.prefill(sequence, ids[start : start + chunk])
        found += runner.read_blocks(sequence, sent, start + chunk >= len(ids))
        sent = len(sequence) // runner.block_tokens
    runner.release(sequence)
    return found


def written(runner: Runner, parts: list[bytes], ids: list[int]) -> Sequence:
    """Return a sequence of parts."""
    sequence = runner.new_sequence()
    for part in parts:
        assert not sequence.tokens
        list(runner.write_blocks(sequence, part, ids))
    return sequence


@pytest.mark.parametrize("config", [TINY, WINDOWED, HYBRID], ids=["plain", "windowed", "recurrent"])
@pytest.mark.parametrize("n", [448, 450])
def test_a_sequence_of_parts_goes_on_with_the_same_bits(config: Any, n: int, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_parts, "PART_BYTES", 5000)
    path, ids = write_model(tmp_path, config), tokens(n, vocab_size=config.vocab_size)
    with session(path, ctx=640) as first, session(path, ctx=640) as second:
        assert first.plan.windowed is None or config is WINDOWED
        parts = parts_of(first, ids, 64)
        state = first.plan.state.slot_bytes if first.plan.state else 0  # which is one part
        assert len(parts) > n // 64 and max(map(len, parts)) < max(5000 + 6000, state + 500)
        right = first.new_sequence()
        first.prefill(right, ids)
        sequence = written(second, parts, ids)
        assert sequence.tokens == ids
        for token in (5, 6, 7):
            assert (first.decode([right], [token])[0] == second.decode([sequence], [token])[0]).all()
        second.release(sequence)
        assert second.free_blocks == second.n_blocks


def test_what_is_no_part_or_another_models_is_refused(tmp_path: Path) -> None:
    path, ids = write_model(tmp_path), tokens(90)
    with session(path) as first, session(path, kv="f16") as other:
        parts = parts_of(first, ids, 64)
        assert len(parts) == 2
        for wrong in (b"", parts[0][:-1], parts[0][:5], parts[0] + b"x",
                      parts[0].replace(b'"first": 0', b'"first": 9')):
            with pytest.raises(BundleError, match="damaged or in the wrong order"):
                written(first, [wrong], ids)
        with pytest.raises(BundleError, match="damaged or in the wrong order"):
            written(first, [parts[1]], ids)
        with pytest.raises(BundleError, match="another model or version"):
            written(other, parts, ids)


def receive(request: Any, part: bytes | None) -> Any:
    told = threading.Event()
    request.receive(part, told.set)
    assert told.wait(60)
    return request.remote_prompt.error


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[LLM, LLM]]:
    with ExitStack() as held:
        path = write_model(tmp_path)
        yield (held.enter_context(LLM(path, ctx=256, threads=1, prefill_chunk=64)),
               held.enter_context(LLM(path, ctx=256, threads=1, max_sequences=2, kv_tokens=256)))


OPTIONS: dict[str, Any] = dict(max_tokens=20, temperature=0.7, seed=4, ignore_eos=True)


def test_a_request_begins_with_what_came_while_others_run(pair: tuple[LLM, LLM]) -> None:
    first, second = pair
    ids = tokens(100)
    other = second.request(tokens(9, 1), OPTIONS | {"max_tokens": 120})
    other.start()
    request = second.request(ids, OPTIONS)
    for part in parts_of(first.runner, ids[:-1], 64):
        assert receive(request, part) is None
    assert request.finish().token_ids == first.complete(ids, **OPTIONS).token_ids
    assert request.task.cached_tokens == 99
    assert other.finish().token_ids == first.complete(tokens(9, 1), **OPTIONS | {"max_tokens": 120}).token_ids
    assert second.state().kv_usage == 0


def test_requests_that_run_get_the_blocks_of_one_that_has_not_begun(pair: tuple[LLM, LLM]) -> None:
    first, second = pair
    ids = tokens(150)
    request = second.request(ids, OPTIONS)
    for part in parts_of(first.runner, ids[:-1], 64):
        receive(request, part)
    long = OPTIONS | {"max_tokens": 200}
    assert second.complete(tokens(9, 1), **long).token_ids == first.complete(tokens(9, 1), **long).token_ids
    assert isinstance(request.remote_prompt.error, RequestError)
    assert request.finish().token_ids == first.complete(ids, **OPTIONS).token_ids
    assert request.task.cached_tokens == 0 and second.state().kv_usage == 0


def test_what_came_waits_for_room_with_its_request(pair: tuple[LLM, LLM]) -> None:
    first, second = pair
    ids = tokens(100)
    others = [second.request(tokens(9, i), OPTIONS | {"max_tokens": 60}) for i in range(2)]
    for one in others:
        one.start()
    request = second.request(ids, OPTIONS)
    for part in parts_of(first.runner, ids[:-1], 64):
        if refused := receive(request, part):  # those that run have come so far that they need the room: it is computed
            assert str(refused) == "Requests that run needed its KV blocks."
            break
    request.start()
    assert request.finish().token_ids == first.complete(ids, **OPTIONS).token_ids
    for one in others:
        one.finish()
    assert second.state().kv_usage == 0


def test_what_does_not_come_whole_is_given_back(pair: tuple[LLM, LLM]) -> None:
    first, second = pair
    ids = tokens(150)
    parts = parts_of(first.runner, ids[:-1], 64)
    request = second.request(ids, OPTIONS)
    assert receive(request, parts[0]) is None and second.state().kv_usage > 0
    assert receive(request, parts[2]) is not None and second.state().kv_usage == 0
    assert receive(request, parts[1]) is not None
    assert request.finish().token_ids == first.complete(ids, **OPTIONS).token_ids
    request = second.request(ids, OPTIONS)
    receive(request, parts[0])
    assert receive(request, None) is not None and second.state().kv_usage == 0
    second.close()
    with pytest.raises(ClosedError):
        request.receive(parts[0], lambda: None)
