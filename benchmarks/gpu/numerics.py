"""Logits of the device beside those of onnxruntime's CPU provider in f32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runner import Runner

from .models import Golden, bundle_of, difference, followed, golden, opened
from .rows import Check

F16, CUDA_F16, ROUNDING = 5e-3, 1e-2, 2.5
"""Wanted, of the largest logit: this, or so many times the error that f16 alone has on the CPU provider. CUDA's kernels
for single rows add up in f16, where the CPU's add up in f32."""
CLOSE = 0.05
"""Of the two largest logits: a token is only compared if they differ by more than this share of the largest."""


def numerics(check: Check, names: list[str]) -> None:
    """Check every model in f16, prompts and steps."""
    for name in names:
        check.case(f"{name}: logits", lambda name=name: logits_of(check, name))  # type: ignore[misc]


def logits_of(check: Check, name: str) -> None:
    """Compare the logits of one model."""
    path = bundle_of(name)
    answer = golden(name, path)
    with opened(path, check.provider, ctx=64, max_sequences=2) as runner:
        compare(check, name, runner, answer)


def compare(check: Check, what: str, runner: Runner, answer: Golden) -> None:
    """Add rows for the logits along a golden answer, and for its tokens."""
    found = followed(runner, answer.ids)
    worst, most = difference(found, answer.logits), bound(check, answer)
    check.add(f"{what}: f16 logits beside f32 on the CPU", f"{worst:.1e}", f"{most:.1e}", worst <= most)
    sure = unambiguous(answer.logits)
    equal = found.argmax(-1) == answer.logits.argmax(-1)
    check.add(f"{what}: greedy tokens", f"{int(equal[sure].sum())} of {int(sure.sum())} that are not close",
              "all", bool(equal[sure].all()))


def bound(check: Check, answer: Golden) -> float:
    """Return the difference that f16 may have."""
    return max(CUDA_F16 if check.cuda else F16, ROUNDING * answer.rounding)


def unambiguous(logits: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which rows have one token that rounding does not change."""
    best = np.sort(logits, -1)[:, -2:]
    return np.asarray(best[:, 1] - best[:, 0] > CLOSE * np.abs(logits).max(-1))
