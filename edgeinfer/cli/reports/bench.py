"""Report of `edgeinfer bench`: its JSON object, and the same as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...errors import printable
from ...quant import WeightType
from ..output import print_table, table
from . import streaming

if TYPE_CHECKING:
    from ...bench import Measurement, OperationTime, Profile, Row, SpeculationBench

MAX_OPERATIONS = 16
"""Lines of a profile on the screen; JSON has all."""


def bench_object(report: dict[str, Any], measured: Measurement) -> dict[str, Any]:
    """Return the JSON object of a run."""
    out = {
        **report, "rows": [row_object(row, measured, not report["device_bytes"]) for row in measured.rows],
        "bandwidth_gbs": measured.bandwidth_gbs, "bandwidth_low_gbs": min(measured.bandwidth),
        "bandwidth_high_gbs": max(measured.bandwidth), "bandwidth_readings": len(measured.bandwidth),
        "int8_peak_gops": measured.int8_peak_gops,
    }
    if measured.profiles:
        out["profile"] = [profile_object(profile, measured) for profile in measured.profiles]
    return out


def row_object(row: Row, measured: Measurement, here: bool = True) -> dict[str, Any]:
    """Return the JSON object of one test; it has shares of this machine's bandwidth where its memory was read."""
    shares = {"mbu": measured.mbu(row), "mbu_paired": row.mbu_paired} if here else {"mbu": None, "mbu_paired": None}
    return {
        "test": row.case.name, "t_per_s": row.t_per_s, "stddev": row.stddev, "samples": list(row.samples),
        "bytes_per_token": round(row.bytes_per_token), **shares,
        "bandwidth_gbs": statistics.median(row.bandwidth), "operations_per_token": round(row.operations_per_token),
        "int8_share": row.int8_share,
    }


def profile_object(profile: Profile, measured: Measurement) -> dict[str, Any]:
    """Return one test's profile; times are per token for tg and per prompt for pp."""
    return {
        "test": profile.test, "ms": 1000 * profile.seconds,
        "operations": [_operation_object(item, profile, measured) for item in profile.operations],
        "records": [_operation_object(item, profile, measured) for item in profile.instructions],
    }


def _operation_object(item: OperationTime, profile: Profile, measured: Measurement) -> dict[str, Any]:
    gbs = item.bytes_read / item.seconds / 1e9 if item.seconds else 0.0
    gops = item.operations / item.seconds / 1e9 if item.seconds else 0.0
    return {
        "operation": item.operation, "kernel": item.kernel, "records": item.instructions, "ms": 1000 * item.seconds,
        "share": item.seconds / profile.seconds if profile.seconds else 0.0, "bytes_read": round(item.bytes_read),
        "gbs": gbs, "bandwidth_share": gbs / measured.bandwidth_gbs, "gops": gops,
        "int8_share": gops / measured.int8_peak_gops,
    }


def speculation_object(found: SpeculationBench) -> dict[str, Any]:
    """Return the JSON object of forward passes over several tokens."""
    passes = {str(n): 1000 * seconds for n, seconds in found.seconds.items()}
    return {"walks": passes, "ratios": {n: ms / passes["1"] for n, ms in passes.items()},
            "draft_ms": found.draft_seconds and 1000 * found.draft_seconds,
            "self_ms": found.self_seconds and 1000 * found.self_seconds,
            "mtp_ms": found.mtp_seconds and 1000 * found.mtp_seconds, "pays_from": found.pays_from,
            "stated": found.stated}


def _speculation_lines(out: dict[str, Any] | None) -> Iterator[str]:
    """Yield the cost of several tokens, and the acceptance from which draft tokens pay; nothing unless asked for."""
    if out is None:
        return
    yield "\ntokens of a forward pass, its time, and that of one"
    rows = [(n, f"{ms:.2f} ms", f"{out['ratios'][n]:.2f}") for n, ms in out["walks"].items()]
    yield from table(rows, right=[0, 1, 2])
    for drafter, least in out["pays_from"].items():
        cost = "" if drafter == "lookup" else f", at {out[f'{drafter}_ms']:.2f} ms a draft token"
        yield (f"{drafter}: no acceptance pays{cost}" if least is None else
               f"{drafter}: pays from an acceptance of {least:.2f} on{cost}")
    if stated := out["stated"]:
        yield (f"at an acceptance of {stated['accept']:.2f}: {stated['t_per_s']:.2f} tokens/s, "
               f"{stated['plain_t_per_s']:.2f} without draft tokens: {stated['gain']:.2f}x "
               f"({stated['predicted']:.2f}x by "
               f"the times above), {stated['tokens_per_walk']:.1f} tokens a pass")


def print_report(out: dict[str, Any], measured: Measurement) -> None:
    """Print the report for people."""
    stored = WeightType.of(out["weights"], out["group_size"]).words
    print(f"{printable(out['model'])}: {stored}, {format_size(out['weights_bytes'])}; KV {out['kv']}; "
          f"{out['isa']}, {out['threads']} threads\n")
    rows = [("test", "tokens/s", "bytes/token", "of read bandwidth", "of int8 peak")]
    for row in out["rows"]:
        share = "" if row["int8_share"] is None or not row["test"].startswith("pp") else f"{row['int8_share']:.0%}"
        rows.append((row["test"], f"{row['t_per_s']:.2f} ± {row['stddev']:.2f}", format_size(row["bytes_per_token"]),
                     "" if row["mbu_paired"] is None else f"{row['mbu_paired']:.0%}", share))
    print_table(rows, right=[1, 2, 3, 4])
    print()
    print_table(_figures(out))
    if read := streaming.line(out.get("offload")):
        print(read)
    for line in _estimate_lines(out.get("estimate")):
        print(line)
    for line in _speculation_lines(out.get("speculation")):
        print(line)
    for profile in out.get("profile", []):
        _print_profile(profile)


def _estimate_lines(estimate: dict[str, Any] | None) -> Iterator[str]:
    """Yield predicted beside measured; nothing without a prediction."""
    if estimate is None:
        return
    rows = [("test", "estimated", "80 % band", "measured", "miss", "with the bandwidth or peak of the moment")]
    for row in estimate["rows"]:
        if row["t_per_s"] is not None:
            moment = row["at_the_moment"]
            rows.append((row["test"], f"{row['t_per_s']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}",
                         f"{row['measured']:.2f}", f"{row['miss']:+.0%}", "" if moment is None else f"{moment:.2f}"))
    yield f"\nestimated before ({estimate['basis']}, ±{estimate['error']:.0%}: {estimate['error_source']})"
    yield from table(rows, right=[1, 3, 4, 5])


def _figures(out: dict[str, Any]) -> list[tuple[str, str]]:
    low, high, n = out["bandwidth_low_gbs"], out["bandwidth_high_gbs"], out["bandwidth_readings"]
    first = out["ttft_process_ms"]
    peak = "not known here" if out["peak_rss_bytes"] is None else format_size(out["peak_rss_bytes"])
    return [
        ("read bandwidth", f"{out['bandwidth_gbs']:.1f} GB/s ({low:.1f} to {high:.1f}, {n} readings of "
                           f"{format_size(out['probe_bytes'])})"),
        ("int8 peak", f"{out['int8_peak_gops']:.0f} GOPS"),
        ("loading", f"{out['load_ms']:.0f} ms"),
        ("first token", "not measured" if first is None else f"{first:.0f} ms after the start of a process"),
        ("peak memory", f"{peak} of {format_size(out['planned_bytes'])} planned"),
    ]


def _print_profile(profile: dict[str, Any]) -> None:
    """Print where a test's time goes."""
    per = "prompt" if profile["test"].startswith("pp") else "token"
    print(f"\n{profile['test']}: {profile['ms']:.3f} ms per {per} in the program's instructions\n")
    rows = [("operation", "kernel", "calls", "ms", "share", "GB/s", "of bandwidth", "of int8 peak")]
    for item in profile["operations"][:MAX_OPERATIONS]:
        rows.append((item["operation"], item["kernel"], f"{item['records']}", f"{item['ms']:.3f}",
                     f"{item['share']:.1%}",
                     f"{item['gbs']:.1f}" if item["bytes_read"] else "",
                     f"{item['bandwidth_share']:.0%}" if item["bytes_read"] else "",
                     f"{item['int8_share']:.0%}" if item["gops"] and per == "prompt" else ""))
    print_table(rows, right=[2, 3, 4, 5, 6, 7])
