"""Predicted beside measured, for each test of `edgeinfer bench`; and updates of the profile."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from .prediction import MAX_SPREAD, MIN_TOKENS, Predictor, beside

if TYPE_CHECKING:
    from ...bench import Measurement, Row


def bench_estimate(predictor: Predictor | None, measured: Measurement) -> dict[str, Any] | None:
    """Return predicted beside measured of every test; None without a prediction.

    `t_per_s` is the prediction of the profile beforehand; `at_the_moment` the same with the bandwidth, or the peak, of
    the test.
    """
    if predictor is None:
        return None
    return {**predictor.basis, "rows": [_bench_row(predictor, row) for row in measured.rows]}


def _bench_row(predictor: Predictor, row: Row) -> dict[str, Any]:
    case, speed = row.case, statistics.median(row.samples)
    before: dict[str, Any] | None
    now: dict[str, Any] | None
    if case.kind == "tg":
        depth = case.depth + case.tokens // 2
        before = predictor.decode(depth)
        now = None if predictor.on_gpu else predictor.decode(depth, statistics.median(row.bandwidth))
    else:
        peak = statistics.median(row.int8_peak) if row.int8_peak else None
        before = predictor.prompt(case.depth, case.tokens)
        now = None if predictor.on_gpu else predictor.prompt(case.depth, case.tokens, peak)
    found = beside(before, speed) or {"t_per_s": None}
    return {"test": case.name, **found, "measured": speed, "at_the_moment": now and now["t_per_s"]}


def learn_from_bench(predictor: Predictor | None, measured: Measurement) -> None:
    """Let the local profile learn from the tests whose repetitions agree, with the readings beside them."""
    if predictor is None or not predictor.teaches:
        return
    from edgeinfer.devices import learn

    decodes, prompts = [], []
    for row in measured.rows:
        case, speed = row.case, statistics.median(row.samples)
        if row.stddev > MAX_SPREAD * row.t_per_s or case.tokens < MIN_TOKENS:
            continue
        if case.kind == "tg":
            seen = case.depth + case.tokens / 2
            decodes.append(predictor.decode_run(seen, 1 / speed, statistics.median(row.bandwidth)))
        elif row.int8_peak:
            peak = statistics.median(row.int8_peak)
            run = predictor.prompt_run(case.depth, case.tokens, case.tokens / speed, peak)
            prompts += [run] if run else []
    learn(decodes, prompts)
