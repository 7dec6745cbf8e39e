"""Errors of the estimator on published speeds; fits the constants of classes of devices.

    python benchmarks/estimator_fit.py [--output docs/measurements/estimator.md]
    python benchmarks/estimator_fit.py --rows FILE      judge rows that no constant was fitted to

Rows are in benchmarks/published/speeds.tsv, each with its public source. If a group has at least three devices, each
device is predicted with constants fitted to the others; elsewhere the constants of devices/classes.toml are judged by
the rows that they come from, which is said. Beside them stand a model with one constant (a share of the bandwidth) and
a formula of the number of parameters alone. The exit code is 1 if a group is over its bound.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import replace_section, row, table
from benchmarks.published.fit import (
    Prediction,
    fit,
    in_sample,
    leave_one_device_out,
    mean_miss,
    predict_with_profile,
    prediction,
)
from benchmarks.published.others import judge_file
from benchmarks.published.prompts import Prompt, read_prompts
from benchmarks.published.rows import Row, read_rows
from edgeinfer.devices import classes
from edgeinfer.errors import UsageError

SECTION = "published"
OVERHEAD = ("t0_ms",)


@dataclass(frozen=True)
class Group:
    """Rows that are judged together."""

    name: str
    title: str
    base: str
    """The class whose constants start the fit, and which gets the result."""
    free: tuple[str, ...] = ()
    """Constants that are fitted; none: the class's are judged in-sample."""
    bound: float | None = None
    """Largest mean absolute error that passes."""
    note: str = ""
    predictions: list[Prediction] = field(default_factory=list)
    fitted: dict[str, float] = field(default_factory=dict)


GROUPS = (
    Group("apple", "Apple GPUs, llama.cpp on Metal", "apple-gpu", ("f_w", "t0_ms"), 0.06,
          "t0 is the time of a token at a GPU clock of 1.4 GHz and shrinks with the clock."),
    Group("cuda-2024", "NVIDIA GPUs, llama.cpp of 2024", "cuda-datacentre", ("f_w", "t0_ms", "issue_bytes_per_clock"),
          0.10, "The A100's memory delivers more than its multiprocessors ask for: f_w is limited to so many bytes per "
          "multiprocessor and clock. The L40S loses a sixteenth of its bandwidth to inline error correction."),
    Group("cuda-2025", "NVIDIA GPUs, llama.cpp of 2025", "cuda-consumer", OVERHEAD, 0.10,
          "f_w and the bytes per clock are those of 2024: the memory did not change, the fixed time of a token did."),
    Group("radeon", "AMD RDNA 3 GPUs, llama.cpp", "radeon", OVERHEAD, 0.10,
          "One row per device fits one constant; f_w is that of the class."),
    Group("edge", "Boards, laptops, phones and the rest, many programs", "", (), 0.20,
          "In-sample: the constants of the classes come from these rows. They stand alone here, although the profiles "
          "of known devices carry figures of their own: cores limit the Raspberry Pi 4 and the Orion O6, not memory."),
    Group("apple-2024", "Apple GPUs, llama.cpp of 2024, K-quants", "apple-gpu", (), None,
          "An older program, kept apart, predicted with the constants above: its 4-bit K-quants were limited by "
          "computation on the M1."),
)


def judge(rows: Sequence[Row]) -> list[Group]:
    """Fit and predict every group."""
    groups = {group.name: group for group in GROUPS}
    for group in GROUPS:
        own = [row for row in rows if row.group == group.name]
        if group.free:
            base = dict(classes()[group.base])
            if group.name == "cuda-2025":
                base |= {key: groups["cuda-2024"].fitted[key] for key in ("f_w", "issue_bytes_per_clock")}
            group.predictions[:] = leave_one_device_out(own, base, group.free)
            table = fit(own, base, group.free)
            group.fitted.update({key: value for key, value in table.items() if isinstance(value, float | int)})
        elif group.name == "apple-2024":
            table = {**classes()[group.base], **groups["apple"].fitted}
            group.predictions[:] = [prediction(row, table, math.nan) for row in own]
        else:
            group.predictions[:] = in_sample(own)
    return list(GROUPS)


def band(predictions: Iterable[Prediction]) -> float:
    """Half-width that holds at least 80 % of the misses."""
    misses = sorted(abs(item.miss) for item in predictions)
    return misses[math.ceil(0.8 * len(misses)) - 1]


def markdown(groups: Sequence[Group]) -> str:
    """The section of the document."""
    lines = ["## Against published speeds", "", *_paragraph(
        "Mean absolute error of decoding speeds. `python benchmarks/estimator_fit.py` makes this section from "
        "benchmarks/published/speeds.tsv, which names the source of every row."), "",
        table("group | judged | rows | devices | estimator | worst | one constant | parameters only", ())]
    for group in groups:
        found = group.predictions
        ones = [item.one_constant / item.row.tok_per_s - 1 for item in found]
        judged = "leave one device out" if group.free else "in-sample" if group.bound else "constants of newer programs"
        cells = (
            group.title, judged, len(found), len({item.row.device for item in found}),
            f"{mean_miss(item.miss for item in found):.1%}",
            f"{max((item.miss for item in found), key=abs):+.0%}",
            "" if math.isnan(ones[0]) else f"{mean_miss(ones):.1%}",
            f"{mean_miss(item.parameters_only / item.row.tok_per_s - 1 for item in found):.0%}",
        )
        lines.append(row(*cells))
    lines += ["", *_paragraph(
        "*One constant*: tokens/s = share x bandwidth / bytes, the share fitted to the same rows (leave-one-out where "
        "the estimator is, by class for the mixed rows). *Parameters only*: llmfit's formula, tokens/s = K / 1e9 "
        "parameters x factor of the quantisation; it knows no bandwidth."), ""]
    for group in groups:
        lines += _group_lines(group)
    return "\n".join([*lines, *_prompt_lines(read_prompts())])


def _prompt_lines(prompts: Sequence[Prompt]) -> list[str]:
    """Prompts, which are known less well."""
    held = sum(abs(item.miss) <= item.band for item in prompts)
    lines = ["### Prompts", "", *_paragraph(
        f"In-sample: mfu of a class is the middle of such rows, which are few. Mean absolute error "
        f"{mean_miss(item.miss for item in prompts):.0%}; {held} of {len(prompts)} lie within their bands. mfu of "
        "NVIDIA's classes is an assumption."), "",
        table("device | model | tokens | measured, t/s | estimated | miss | band | source",
              (row(item.device, item.model, item.tokens, f"{item.tok_per_s:.4g}", f"{item.estimated:.1f}",
                   f"{item.miss:+.0%}", f"±{item.band:.0%}", item.source) for item in prompts))]
    return lines


def _group_lines(group: Group) -> list[str]:
    """One group: its constants and all its rows."""
    said = group.note
    if group.free:
        values = ", ".join(f"{key} = {group.fitted[key]:.3g}" for key in group.free)
        said = f"Fitted to all rows: {values}. 80 % of the misses are within {band(group.predictions):.0%}. {said}"
    own = {item.row: predict_with_profile(item.row) for item in group.predictions} if group.name == "edge" else {}
    known = [speed / of.tok_per_s - 1 for of, speed in own.items() if speed is not None]
    if known:
        said += (f" *Its profile* is what `edgeinfer estimate --machine` says, in-sample too: {mean_miss(known):.1%} "
                 f"over {len(known)} rows.")
    lines = [f"### {group.title}", "", *_paragraph(said), "",
             table("device | model | class | measured, t/s | estimated | miss | its profile | one constant | "
                   "parameters only | source", ())]
    for item in group.predictions:
        of, profile, one = item.row, own.get(item.row), item.one_constant
        lines.append(row(
            of.device, of.model, of.device_class, f"{of.tok_per_s:.4g}", f"{item.tok_per_s:.1f}",
            f"{item.miss:+.1%}", "" if profile is None else f"{profile:.1f}", "" if math.isnan(one) else f"{one:.1f}",
            f"{item.parameters_only:.1f}", of.source,
        ))
    return [*lines, ""]


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def print_others(path: Path) -> int:
    """Print the rows of a file beside their estimates; returns the exit code."""
    try:
        others = judge_file(path)
    except (UsageError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for item in others:
        print(f"{item.device} | {item.model} | {item.tok_per_s:.4g} | {item.estimated:.1f} | {item.miss:+.1%} "
              f"| {item.how}")
    print(f"{len(others)} rows: mean absolute error {mean_miss(item.miss for item in others):.1%}")
    return 0


def main() -> int:
    """Judge all groups, write the section, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "measurements" / "estimator.md")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="judge the rows of another file, and write nothing")
    given = parser.parse_args()
    if given.rows is not None:
        return print_others(given.rows)
    groups = judge(read_rows())
    replace_section(given.output, SECTION, markdown(groups))
    failed = 0
    for group in groups:
        error = mean_miss(item.miss for item in group.predictions)
        good = group.bound is None or error <= group.bound
        failed |= not good
        constants = {key: round(group.fitted[key], 3) for key in group.free}
        over = "" if good else f"over its bound of {group.bound:.0%}"
        print(f"{group.name}: {error:.1%}, 80 % within {band(group.predictions):.1%} {constants} {over}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
