"""Estimates for several users: the parts of a request add up, and more users wait longer."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.cli.reports.queueing import PLAYS, ROUNDS, play, plays
from edgeinfer.cli.reports.users import Memory, check_users, users_object, users_rows
from edgeinfer.errors import UsageError


def step_ms(decoding: int, tokens: int = 0, before: int = 0) -> float:
    """A step takes 50 ms for its weights, 1 ms for each user's keys and values, and 2 ms for a token of a prompt, which
    hide the reading of the weights."""
    return max(50.0 if decoding else 0.0, 2.0 * tokens) + decoding


STEPS: Any = SimpleNamespace(has_prompts=True, limited_by_arithmetic=lambda users: users >= 50)


def row(users: int, **further: Any) -> dict[str, Any]:
    found = users_object(STEPS, step_ms, users, 200, 101, **further)
    assert found is not None
    return found


def test_one_user_gets_what_is_predicted_for_one() -> None:
    found = row(1)
    assert found["ttft_ms"] == 400 and found["step_ms"] == 51 and found["first_ttft_ms"] == {"mean": 400, "last": 400}
    assert found["tpot_ms"] == pytest.approx(51) and found["e2el_ms"] == pytest.approx(400 + 100 * 51)
    assert found["requests_per_s"] == pytest.approx(1000 / 5500)


def test_more_users_get_more_together_and_wait_longer() -> None:
    rows = [row(users) for users in (1, 2, 4, 8)]
    for key in ("output_throughput", "ttft_ms", "tpot_ms"):
        assert [one[key] for one in rows] == sorted(one[key] for one in rows)
    assert users_object(STEPS, step_ms, None, 200, 101) is None
    assert users_object(SimpleNamespace(has_prompts=False), step_ms, 4, 200, 101) is None  # type: ignore[arg-type]


def test_users_who_ask_at_once_wait_for_the_prompts_before_theirs() -> None:
    """A prompt of 200 tokens takes 400 ms alone, and three steps beside others, which last 200 ms at most."""
    served = play(step_ms, 4, 200, 101, rounds=1)
    first = sorted(one.ttft for one in served)
    assert first[0] == 400 and all(after - before > 200 for before, after in pairwise(first))
    assert max(first) <= 4 * 400 * 1.2, "decoding beside prompts costs little"
    later = [one.ttft for one in play(step_ms, 4, 200, 101) if one.arrived]
    assert max(later) < 4 * 400, "answers end one after the other, so that later prompts seldom meet"


def test_steps_deviate_by_as_much_to_either_side() -> None:
    """Several users' figures are medians over plays whose steps take a little more or less time; always the same."""
    several = plays(step_ms, 4, 200, 101)
    ends = [max(one.arrived + one.e2el for one in served) for served in several]
    plain = max(one.arrived + one.e2el for one in play(step_ms, 4, 200, 101))
    assert len(several) == PLAYS == len(set(ends)) and several == plays(step_ms, 4, 200, 101)
    assert fmean(ends) == pytest.approx(plain, rel=0.03)
    assert row(4)["tpot_ms"] == median(median(one.tpot(101) for one in served) for served in several)
    assert plays(step_ms, 1, 200, 101) == [play(step_ms, 1, 200, 101)]


def test_every_request_is_answered_whole() -> None:
    for users, prompt, answer in ((1, 1, 1), (3, 5000, 1), (64, 300, 7), (8, 40, 400)):
        served = play(step_ms, users, prompt, answer)
        assert len(served) == users * ROUNDS
        assert all(one.ttft >= 2 * prompt * 0.99 for one in served)
        assert all(one.e2el - one.ttft >= 51 * (answer - 1) for one in served)


def test_memory_knee_and_goodput() -> None:
    memory = Memory(lambda users: 9e8 + users * 1e8, round(2.05e9))
    found = row(4, memory=memory, bounds=(("ttft", 600.0), ("tpot", 100.0)))
    assert found["memory_bytes"] == 1.3e9 and found["most_users"] == 11 and found["knee"] == 50
    assert found["tok_per_s_each"] == pytest.approx(1000 / found["tpot_ms"])
    good = found["goodput"]
    within = [one["users"] for one in map(row, range(1, 12)) if one["ttft_ms"] <= 600 and one["tpot_ms"] <= 100]
    assert good["users"] == max(within) < 11 and good["met"] == (4 in within)
    assert good["requests_per_s"] <= found["requests_per_s"]
    said = dict(users_rows(found))["goodput"]
    assert f"with {good['requests_per_s']:.2g} requests/s within them; up to {good['users']} users do" in said
    none = row(4, memory=memory, bounds=(("ttft", 1.0),))
    assert none["goodput"]["users"] is None and not none["goodput"]["met"] and not none["goodput"]["requests_per_s"]
    assert "not even one user does" in dict(users_rows(none))["goodput"]
    assert Memory(lambda users: 3e9, 2 << 30).most_users == 0
    assert Memory(lambda users: 3e9, 3 << 30).most_users == 64


def test_one_user_is_singular() -> None:
    memory = Memory(lambda users: users * 1e9, round(1.5e9))
    rows = [text for _, text in users_rows(row(2, memory=memory, bounds=(("ttft", 1e6),)))]
    assert rows[0].startswith("memory holds 1 user, so lower") and "it holds 1 user;" in rows[1]
    assert rows[2].startswith("2 users meet TTFT") and "up to 1 user does" in rows[2]
    (name, _), _, (_, good) = users_rows(row(1, memory=memory, bounds=(("ttft", 1.0),)))
    assert name == "1 user" and good.startswith("1 user does not meet TTFT 1 ms")


def test_numbers_out_of_range() -> None:
    check_users(None)
    for users, sentence in ((0, "--users is 0; it must be from 1 to 64"), (65, "--users is 65")):
        with pytest.raises(UsageError, match=sentence):
            check_users(users)
