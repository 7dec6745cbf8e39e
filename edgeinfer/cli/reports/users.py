"""Estimate the service that several users of one model get, each of whom asks again as soon as an answer is
complete."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...base.dataclass import dataclass
from ...base.units import format_size
from ...errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.devices import Estimate

FIELD = ("with --users: `users`, `prompt`, `answer` (tokens), `ttft_ms`, `tpot_ms`, `e2el_ms` of a request, "
         "`output_throughput` (tokens per second of all), `tok_per_s_each`, `requests_per_s`, `step_ms` of a step "
         "without prompts; `knee`, the users from which on arithmetic takes longer than reading; `memory_bytes` of all "
         "contexts and the weights, `budget_bytes`, and `most_users` that it holds; with --goodput `goodput`: `bounds`"
         ", `met`, `one` (the figures of a single user), and `users` and `requests_per_s` at the most users that meet "
         "them, null if none does; else null")
MAX_USERS = 64


@dataclass(frozen=True)
class Memory:
    """Memory of a run by the number of its sequences."""

    one_bytes: float
    """Memory of a run with one sequence, weights included."""
    sequence_bytes: float
    """Memory of each further sequence with a whole context."""
    budget_bytes: int

    def of(self, users: int) -> float:
        """Return the bytes of this many sequences."""
        return self.one_bytes + (users - 1) * self.sequence_bytes

    @property
    def most_users(self) -> int:
        """Sequences that the budget holds, up to the most of an engine."""
        if self.one_bytes > self.budget_bytes:
            return 0
        return min(MAX_USERS, 1 + int((self.budget_bytes - self.one_bytes) / max(self.sequence_bytes, 1)))


def check_users(users: int | None, answer: int) -> None:
    """Raise `UsageError` for numbers out of range."""
    if users is not None and not 1 <= users <= MAX_USERS:
        raise UsageError(f"--users is {users}; it must be from 1 to {MAX_USERS}, the most sequences of an engine.")
    if not 1 <= answer < 1 << 24:
        raise UsageError(f"--answer is {answer}; it must be 1 or more tokens.")


def users_object(estimate: Callable[[int, int], Estimate], users: int | None, prompt: int, answer: int,
                 memory: Memory | None = None, bounds: tuple[tuple[str, float], ...] = ()) -> dict[str, Any] | None:
    """Return the JSON object of this many users; None without users, or where the time of prompts is not known.

    A step gives each user a token: it takes as long as reading the weights once and all keys and values, or as the
    arithmetic of as many tokens of a prompt, whichever is longer; near the border both show, so that their squares are
    added. Prompts of others stretch the time between two tokens by their share.

    Parameters
    ----------
    estimate : returns the estimate at a depth, of this many sequences that decode together
    users : of requests with the same lengths
    prompt, answer : tokens of a request
    memory : of the run; by default it is left out
    bounds : of `parse_goodput`
    """
    if users is None or (found := _of(estimate, users, prompt, answer)) is None:
        return None
    if memory is None:
        return found
    return {**found, "knee": _knee(estimate, prompt, answer), "memory_bytes": round(memory.of(users)),
            "budget_bytes": memory.budget_bytes, "most_users": memory.most_users,
            "goodput": _goodput(estimate, prompt, answer, memory, bounds, users) if bounds else None}


def _of(estimate: Callable[[int, int], Estimate], users: int, prompt: int, answer: int) -> dict[str, Any] | None:
    found = estimate(prompt + answer // 2, users)
    if found.ttft_ms is None:
        return None
    reading, arithmetic = _step(found, users)
    step = math.hypot(reading, arithmetic)
    whole = users * found.ttft_ms + answer * step
    ttft = found.ttft_ms + (step if users > 1 else 0.0)
    tpot = (whole - ttft) / max(answer - 1, 1)
    return {"users": users, "prompt": prompt, "answer": answer, "ttft_ms": ttft, "tpot_ms": tpot, "e2el_ms": whole,
            "output_throughput": 1000 * users * answer / whole, "tok_per_s_each": 1000 / tpot,
            "requests_per_s": 1000 * users / whole, "step_ms": step}


def _step(found: Estimate, users: int) -> tuple[float, float]:
    """Return the milliseconds of a step: reading, and arithmetic."""
    assert found.ttft_ms is not None
    return 1000 * users / found.decode_tok_per_s, users * found.ttft_ms / found.prompt if users > 1 else 0.0


def _knee(estimate: Callable[[int, int], Estimate], prompt: int, answer: int) -> int | None:
    """Return the users from which on arithmetic takes longer than reading; None if it does for none."""
    for users in range(2, MAX_USERS + 1):
        reading, arithmetic = _step(estimate(prompt + answer // 2, users), users)
        if arithmetic >= reading:
            return users
    return None


def _goodput(estimate: Callable[[int, int], Estimate], prompt: int, answer: int, memory: Memory,
             bounds: tuple[tuple[str, float], ...], asked: int) -> dict[str, Any]:
    """Return whether the users are within the bounds, and the most that the memory holds and that are."""
    def met(users: int) -> dict[str, Any] | None:
        row = _of(estimate, users, prompt, answer)
        return row if row and all(row[f"{metric}_ms"] <= most for metric, most in bounds) else None

    good = [row for users in range(1, memory.most_users + 1) if (row := met(users))]
    last, one = good[-1] if good else None, _of(estimate, 1, prompt, answer)
    return {"bounds": dict(bounds), "one": {metric: one[f"{metric}_ms"] for metric, _ in bounds} if one else {},
            "met": met(asked) is not None, "users": last and last["users"],
            "requests_per_s": last and last["requests_per_s"]}


def users_rows(out: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the report for people."""
    lacks = "" if out["memory_bytes"] <= out["budget_bytes"] else (
        f"memory holds {out['most_users']} users, so lower --users to that" if out["most_users"] else
        "memory holds not even one, so choose a smaller model, -p or -n") + "; with enough of it "
    rows = [(f"{out['users']} users", f"{lacks}{out['tok_per_s_each']:.1f} tokens/s each, "
             f"{out['output_throughput']:.1f} together, {out['requests_per_s']:.2g} requests/s; first token after "
             f"{out['ttft_ms']:.0f} ms, then {out['tpot_ms']:.0f} ms per token ({out['prompt']} + "
             f"{out['answer']} tokens)")]
    knee = f"from {out['knee']} users on arithmetic is the limit, more users gain little" if out["knee"] else \
        "reading is the limit up to 64 users"
    fits = "" if out["memory_bytes"] <= out["budget_bytes"] else ", which does not fit"
    rows.append(("", f"{format_size(out['memory_bytes'])} of {format_size(out['budget_bytes'])}{fits}; it holds "
                     f"{out['most_users']} users; {knee}"))
    if good := out["goodput"]:
        said = _bounds(good["bounds"])
        most = f"up to {good['users']} users do, {good['requests_per_s']:.2g} requests/s" if good["users"] else \
            f"not even one user does; alone it is {_bounds(good['one'])}: allow that, or choose a smaller model"
        rows.append(("goodput", f"{out['users']} users {'meet' if good['met'] else 'do not meet'} {said}; {most}"))
    return rows


def _bounds(times: dict[str, float]) -> str:
    """Return times by metric as a sentence has them."""
    return ", ".join(f"{metric.upper()} {ms:.4g} ms" for metric, ms in times.items())
