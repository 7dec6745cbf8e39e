"""Estimate what several users of one model can expect, each of whom asks again as soon as an answer is complete."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.devices import Estimate

FIELD = ("with --users: `users`, `prompt`, `answer` (tokens), `ttft_ms`, `tpot_ms`, `e2el_ms` of a request, "
         "`output_throughput` (tokens per second of all), `step_ms` of a step without prompts; else null")
MOST_USERS = 64


def check_users(users: int | None, answer: int) -> None:
    """Raise `UsageError` for numbers out of range."""
    if users is not None and not 1 <= users <= MOST_USERS:
        raise UsageError(f"--users is {users}; it must be from 1 to {MOST_USERS}, the most sequences of an engine.")
    if not 1 <= answer < 1 << 24:
        raise UsageError(f"--answer is {answer}; it must be 1 or more tokens.")


def users_object(estimate: Callable[[int, int], Estimate], users: int | None, prompt: int, answer: int
                 ) -> dict[str, Any] | None:
    """Return the JSON object of this many users; None without users, or where the time of prompts is not known.

    A step gives each user a token: it takes as long as reading the weights once and all keys and values, or as the
    arithmetic of as many tokens of a prompt, whichever is longer; near the border both show, so that their squares are
    added. Prompts of others stretch the time between two tokens by their share.

    Parameters
    ----------
    estimate : returns the estimate at a depth, of this many sequences that decode together
    users : of requests with the same lengths
    prompt, answer : tokens of a request
    """
    if users is None:
        return None
    found = estimate(prompt + answer // 2, users)
    if found.ttft_ms is None:
        return None
    reading = 1000 * users / found.decode_tok_per_s
    arithmetic = users * found.ttft_ms / found.prompt if users > 1 else 0.0
    step = math.hypot(reading, arithmetic)
    whole = users * found.ttft_ms + answer * step
    ttft = found.ttft_ms + (step if users > 1 else 0.0)
    tpot = (whole - ttft) / max(answer - 1, 1)
    return {"users": users, "prompt": prompt, "answer": answer, "ttft_ms": ttft, "tpot_ms": tpot, "e2el_ms": whole,
            "output_throughput": 1000 * users * answer / whole, "step_ms": step}


def users_row(out: dict[str, Any]) -> tuple[str, str]:
    """Return the row of the report for people."""
    return (f"{out['users']} users", f"{out['output_throughput']:.1f} tokens/s together; first token after "
            f"{out['ttft_ms']:.0f} ms, then {out['tpot_ms']:.0f} ms per token ({out['prompt']} + {out['answer']} "
            "tokens)")
