"""Estimates for several users: the parts of a request add up, and more users wait longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.cli.reports.users import Memory, check_users, users_object, users_rows
from edgeinfer.errors import UsageError


def estimate(depth: int, users: int, ttft_ms: float | None = 400.0) -> Any:
    """A step takes 50 ms for its weights and 1 ms for each user's keys and values."""
    return SimpleNamespace(prompt=200, ttft_ms=ttft_ms, decode_tok_per_s=1000 * users / (50 + users))


def test_one_user_gets_what_is_predicted_for_one() -> None:
    found = users_object(estimate, 1, 200, 101)
    assert found is not None
    assert found["ttft_ms"] == 400 and found["step_ms"] == pytest.approx(51)
    assert found["tpot_ms"] == pytest.approx(51 * 101 / 100) and found["e2el_ms"] == pytest.approx(400 + 101 * 51)


def test_more_users_get_more_together_and_less_each() -> None:
    rows = [users_object(estimate, users, 200, 101) for users in (1, 2, 4, 8)]
    assert [row["output_throughput"] for row in rows if row] == sorted(row["output_throughput"] for row in rows if row)
    for row in rows:
        assert row is not None
        assert row["ttft_ms"] + 100 * row["tpot_ms"] == pytest.approx(row["e2el_ms"])
        assert row["step_ms"] <= 50 + row["users"] + 2 * row["users"]
    assert users_object(estimate, None, 200, 101) is None
    assert users_object(lambda depth, users: estimate(depth, users, None), 4, 200, 101) is None


def test_memory_knee_and_goodput() -> None:
    memory = Memory(1e9, 1e8, round(2.05e9))
    found = users_object(estimate, 4, 200, 101, memory, (("ttft", 500.0), ("tpot", 100.0)))
    assert found is not None
    assert found["memory_bytes"] == 1.3e9 and found["most_users"] == 11
    assert found["knee"] == 50  # 2 ms of arithmetic and 1 ms of keys and values for each user: 2 n = 50 + n
    assert found["tok_per_s_each"] == pytest.approx(1000 / found["tpot_ms"])
    good = found["goodput"]
    each = [users_object(estimate, users, 200, 101) for users in range(1, 12)]
    within = [row["users"] for row in each if row and row["ttft_ms"] <= 500 and row["tpot_ms"] <= 100]
    assert good["users"] == max(within) < 11 and good["met"] == (4 in within)
    assert "up to" in dict(users_rows(found))["goodput"]
    none = users_object(estimate, 4, 200, 101, memory, (("ttft", 1.0),))
    assert none is not None and none["goodput"]["users"] is None and not none["goodput"]["met"]
    assert "not even one user does" in dict(users_rows(none))["goodput"]
    assert Memory(3e9, 1e8, 2 << 30).most_users == 0


def test_numbers_out_of_range() -> None:
    check_users(None, 1)
    for users, answer, sentence in ((0, 1, "--users is 0; it must be from 1 to 64"), (65, 1, "--users is 65"),
                                    (1, 0, "--answer is 0; it must be 1 or more tokens")):
        with pytest.raises(UsageError, match=sentence):
            check_users(users, answer)
