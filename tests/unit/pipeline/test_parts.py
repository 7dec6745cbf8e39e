"""Division of a forward pass into parts."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.pipeline.parts import PartCounts, divide, most_parts
from edgeinfer.runner import DECODE, PROMPT, Segment, Sequence


def test_a_pass_that_stays_whole_is_one_part() -> None:
    segments = [Segment(Sequence(), range(5), (4,)), Segment(Sequence(), [7], (0,), DECODE)]
    (part,) = divide(segments, [3, 8], 1)
    assert part.begins == [(3, 5), (8, 1)] and part.offset == 0 and part.n_tokens == 6
    assert [(one.number, one.ids, one.outputs, one.role) for one in part.segments] == [
        (3, [0, 1, 2, 3, 4], [4], PROMPT), (8, [7], [0], DECODE)]


def test_prompts_are_cut_and_outputs_stay_with_their_tokens_and_their_samples() -> None:
    prepared = lambda: None  # noqa: E731
    segment = Segment(Sequence(), list(range(10)), (1, 4, 9), PROMPT, None, (11, 12, 13), prepared)
    parts = divide([segment], [1], 3)
    assert [part.offset for part in parts] == [0, 4, 8]
    assert [part.begins for part in parts] == [[(1, 10)], (), ()]
    pieces = [part.segments[0] for part in parts]
    assert [one.ids for one in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [one.outputs for one in pieces] == [[1], [0], [1]]
    assert [one.sample_specs for one in pieces] == [(11,), (12,), (13,)]
    assert [one.prepare for one in pieces] == [prepared, None, None], "once, before the first sample"


def test_prepare_is_called_with_the_last_piece_where_no_logits_are_wanted() -> None:
    prepared = lambda: None  # noqa: E731
    parts = divide([Segment(Sequence(), list(range(6)), prepare=prepared)], [1], 2)
    assert [part.segments[0].prepare for part in parts] == [None, prepared]


@pytest.mark.parametrize("n_parts", [2, 3, 5])
def test_rows_of_logits_keep_their_order_and_each_token_runs_once(n_parts: int) -> None:
    rng = np.random.default_rng(n_parts)
    for _ in range(50):
        segments, numbers = [], []
        for number in range(int(rng.integers(1, 6))):
            n = int(rng.integers(1, 40))
            tree = [-1] * n if n < 8 and rng.random() < 0.5 else None
            outputs = sorted({int(i) for i in rng.integers(0, n, 2)})
            segments.append(Segment(Sequence(), [100 * number + i for i in range(n)], outputs, PROMPT, tree))
            numbers.append(number)
        parts = divide(segments, numbers, n_parts)
        ran = [one for part in parts for one in part.segments]
        assert [token for one in ran for token in one.ids] == [token for one in segments for token in one.ids]
        assert [one.ids[i] for one in ran for i in one.outputs] == [one.ids[i] for one in segments for i in one.outputs]
        assert len(parts) <= most_parts(segments)
        for part in parts:
            assert len(part.segments) == 1 or part.offset == 0
            assert all(one.ids[0] % 100 == part.offset for one in part.segments)
        assert all(one.parents is None or len(one.ids) == len(one.parents) for one in ran), "a tree was cut"


def test_decoded_chains_are_not_cut() -> None:
    parts = divide([Segment(Sequence(), list(range(8)), (7,), DECODE)], [1], 4)
    assert len(parts) == 1


def test_one_stage_leaves_passes_whole_and_several_try_other_numbers_before_they_choose() -> None:
    assert PartCounts(1).choices(512, 512, True) == [1]
    counts = PartCounts(2)
    assert counts.choices(512, 512, True) == [8, 4, 2, 1]
    assert counts.choices(48, 48, True) == [1], "parts of a prompt have 32 tokens at least"
    assert counts.choices(4, 4, False) == [1, 2, 4]
    assert counts.choices(4, 1, False) == [1]
    seen = []
    for _ in range(6):
        with counts.timed(256, 256, True) as n:
            seen.append(n)
    assert set(seen) == {8, 4, 2}


def test_the_fastest_number_is_used_and_a_failed_pass_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("edgeinfer.pipeline.parts.time.perf_counter", lambda: now[0])
    counts, used = PartCounts(2), []
    for _ in range(100):
        with counts.timed(256, 256, True) as n:
            used.append(n)
            now[0] += {8: 3.0, 4: 1.0, 2: 2.0, 1: 4.0}[n]
    assert used.count(4) > 80
    fails = PartCounts(2)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), fails.timed(256, 256, True) as n:
            assert n == 8
            raise ZeroDivisionError
