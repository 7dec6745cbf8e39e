"""Estimate the service that several users of one model get, each of whom asks again as soon as an answer is complete.

Times are medians over the requests of a load, as in ``bench --concurrency``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ...base.dataclass import dataclass
from ...base.units import format_size
from ...errors import UsageError
from .queueing import Served, StepMs, plays

if TYPE_CHECKING:
    from edgeinfer.devices import Estimate, MixedSteps

FIELD = ("with --users, as `bench --concurrency` would measure them: `users`, `prompt`, `answer` (tokens), the medians "
         "`ttft_ms`, `tpot_ms`, `e2el_ms` of a request, `first_ttft_ms` of those who ask at once at the beginning "
         "(`mean`, `last`), `output_throughput` (tokens per second of all), `tok_per_s_each`, `requests_per_s`, "
         "`step_ms` of a step without prompts; `knee`, the users from which on arithmetic takes longer than reading; "
         "`memory_bytes` of all contexts and the weights, `budget_bytes`, and `most_users` that it holds; with "
         "--goodput `goodput`: `bounds`, `met` by the medians, `requests_per_s` of these users within them, `one` (the "
         "figures of a single user), and `users`, the most whose medians meet them, null if none does; "
         "with --html `by_users`, the same figures of other numbers of users; else null")
MAX_USERS = 64


@dataclass(frozen=True)
class Memory:
    """Memory of a run by the number of its sequences."""

    of: Callable[[int], float]
    """Returns the bytes of this many sequences with whole contexts, weights included."""
    budget_bytes: int

    @property
    def most_users(self) -> int:
        """Sequences that the budget holds, up to the most of an engine."""
        return next((users - 1 for users in range(1, MAX_USERS + 1) if self.of(users) > self.budget_bytes), MAX_USERS)


def check_users(users: int | None) -> None:
    """Raise `UsageError` for a number out of range."""
    if users is not None and not 1 <= users <= MAX_USERS:
        raise UsageError(f"--users is {users}; it must be from 1 to {MAX_USERS}, the most sequences of an engine.")


def users_asked(users: int | None, steps: MixedSteps, estimate: Callable[[int], Estimate], prompt: int, answer: int,
                memory: Memory, bounds: tuple[tuple[str, float], ...], plots: bool = False) -> dict[str, Any] | None:
    """Return the JSON object of this many users, as `users_object`; `estimate` is of sequences that decode together."""
    @cache
    def decoding_ms(users: int) -> float:
        return 1000 * users / estimate(users).decode_tok_per_s

    def step_ms(decoding: int, tokens: int, before: int) -> float:
        return steps.milliseconds(decoding, tokens, before) if tokens else decoding_ms(decoding)

    return users_object(steps, step_ms, users, prompt, answer, memory, bounds, plots)


def users_object(steps: MixedSteps, step_ms: StepMs, users: int | None, prompt: int, answer: int,
                 memory: Memory | None = None, bounds: tuple[tuple[str, float], ...] = (), plots: bool = False
                 ) -> dict[str, Any] | None:
    """Return the JSON object of this many users; None without users, or where the time of prompts is not known.

    Parameters
    ----------
    steps : of the model on the device
    step_ms : time of a step, drafting included
    users : of requests with the same lengths
    prompt, answer : tokens of a request
    memory : of the run; by default it is left out
    bounds : of `parse_goodput`
    plots : whether the figures of fewer and more users are wanted too
    """
    if users is None or not steps.has_prompts:
        return None
    served = plays(step_ms, users, prompt, answer)
    found = _row(served, users, prompt, answer) | {"step_ms": step_ms(users, 0, 0)}
    if memory is None:
        return found
    knee = next((n for n in range(2, MAX_USERS + 1) if steps.limited_by_arithmetic(n)), None)
    others = partial(plays, step_ms, prompt=prompt, answer=answer)
    good = _goodput(lambda n: served if n == users else others(n), users, prompt, answer, memory, bounds) \
        if bounds else None
    return {**found, "knee": knee, "memory_bytes": round(memory.of(users)), "budget_bytes": memory.budget_bytes,
            "most_users": memory.most_users, "goodput": good,
            "by_users": [_row(others(n), n, prompt, answer) for n in _around(users)] if plots else None}


def _around(users: int) -> list[int]:
    """Return the numbers of users in a plot: powers of two up to twice these users, at least 8, and these."""
    powers = [2**n for n in range(7)]
    return sorted({users, *(n for n in powers if n <= max(8, 2 * users))})


def _row(served: list[list[Served]], users: int, prompt: int, answer: int) -> dict[str, Any]:
    """Return the figures of a load: medians over its plays."""
    per_second = len(served[0]) / median(map(_seconds, served))
    first = [[one.ttft for one in play if not one.arrived] for play in served]
    times = [{metric: median(values) for metric, values in _times(play, answer).items()} for play in served]
    middle = {metric: median(play[metric] for play in times) for metric in times[0]}
    return {"users": users, "prompt": prompt, "answer": answer,
            **{f"{metric}_ms": ms for metric, ms in middle.items()},
            "first_ttft_ms": {"mean": median(map(fmean, first)), "last": median(map(max, first))},
            "output_throughput": answer * per_second,
            "tok_per_s_each": 1000 / middle["tpot"] if answer > 1 else 1000 / middle["e2el"],
            "requests_per_s": per_second}


def _seconds(served: list[Served]) -> float:
    """Return the duration of a play."""
    return max(one.arrived + one.e2el for one in served) / 1000


def _times(served: list[Served], answer: int) -> dict[str, list[float]]:
    """Return the milliseconds of each request by metric."""
    return {"ttft": [one.ttft for one in served], "tpot": [one.tpot(answer) for one in served],
            "e2el": [one.e2el for one in served]}


def _goodput(play: Callable[[int], list[list[Served]]], asked: int, prompt: int, answer: int, memory: Memory,
             bounds: tuple[tuple[str, float], ...]) -> dict[str, Any]:
    """Return whether the users are within the bounds, and the most that the memory holds and that are."""
    def row(users: int) -> dict[str, Any]:
        return _row(play(users), users, prompt, answer)

    def met(users: int) -> bool:
        found = row(users)
        return all(found[f"{metric}_ms"] <= most for metric, most in bounds)

    low, high = 0, memory.most_users + 1  # more users wait longer, so that halving finds the most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if met(middle) else (low, middle)
    one, good = row(1), []
    for served in play(asked):
        times = _times(served, answer)
        within = sum(all(times[metric][i] <= most for metric, most in bounds) for i in range(len(served)))
        good.append(within / _seconds(served))
    return {"bounds": dict(bounds), "one": {metric: one[f"{metric}_ms"] for metric, _ in bounds}, "met": met(asked),
            "users": low or None, "requests_per_s": median(good)}


def users_rows(out: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the report for people."""
    lacks = "" if out["memory_bytes"] <= out["budget_bytes"] else (
        f"memory holds {_count(out['most_users'])}, so lower --users to that" if out["most_users"] else
        "memory holds not even one, so choose a smaller model, -p or -n") + "; with enough of it "
    last = out["first_ttft_ms"]["last"]
    together = f" (all at once: up to {last:.0f} ms)" if out["users"] > 1 else ""
    rows = [(_count(out["users"]), f"{lacks}{out['tok_per_s_each']:.1f} tokens/s each, "
             f"{out['output_throughput']:.1f} together, {out['requests_per_s']:.2g} requests/s; first token after "
             f"{out['ttft_ms']:.0f} ms{together}, then {out['tpot_ms']:.0f} ms per token ({out['prompt']} + "
             f"{out['answer']} tokens)")]
    knee = f"from {_count(out['knee'])} on arithmetic is the limit, more users gain little" if out["knee"] else \
        "reading is the limit up to 64 users"
    fits = "" if out["memory_bytes"] <= out["budget_bytes"] else ", which does not fit"
    rows.append(("", f"{format_size(out['memory_bytes'])} of {format_size(out['budget_bytes'])}{fits}; it holds "
                     f"{_count(out['most_users'])}; {knee}"))
    if good := out["goodput"]:
        said = _bounds(good["bounds"])
        most = f"up to {_count(good['users'])} {'do' if good['users'] > 1 else 'does'}" if good["users"] else \
            f"not even one user does; alone it is {_bounds(good['one'])}: allow that, or choose a smaller model"
        rows.append(("goodput", f"{_count(out['users'])} {_verb(out['users'], good['met'])} {said}, with "
                                f"{good['requests_per_s']:.2g} requests/s within them; {most}"))
    return rows


def _count(users: int) -> str:
    return "1 user" if users == 1 else f"{users} users"


def _verb(users: int, met: bool) -> str:
    return ("meets" if users == 1 else "meet") if met else f"{'does' if users == 1 else 'do'} not meet"


def _bounds(times: dict[str, float]) -> str:
    """Return times by metric as a sentence has them."""
    return ", ".join(f"{metric.upper()} {ms:.4g} ms" for metric, ms in times.items())
