"""Errors of the estimator on published speeds; fits the constants of classes of devices.

    python benchmarks/estimator_fit.py [--output docs/measurements/estimator.md] [--list]
    python benchmarks/estimator_fit.py --rows FILE      judge rows that no constant was fitted to

Rows are in benchmarks/published/speeds.tsv, each with its public source. Each device is predicted with constants that
are fitted to the other devices of its group, and with nothing that was ever measured on it. Beside the estimator stand
a model with one constant (a share of the bandwidth), a formula of the number of parameters alone, and the estimator
without some of its parts. --list prints every row. The exit code is 1 if a group is over its bound.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import replace_section, row, table
from benchmarks.published import prompts
from benchmarks.published.fit import (
    Prediction,
    Values,
    error_of_known,
    fit,
    held,
    leave_one_device_out,
    mean_miss,
    parameters_only,
    shipped,
)
from benchmarks.published.groups import GROUPS, SERVERS, Group
from benchmarks.published.others import judge_file
from benchmarks.published.rows import Row, read_rows, usable
from edgeinfer.devices import classes, constants_of
from edgeinfer.errors import UsageError

SECTION = "published"
WORST = 5
"""Rows of a group that the document shows."""
PROMPTS = {
    "GPUs, llama.cpp": ("apple", "nvidia", "nvidia-2024", "amd", "intel", "igpu"), "processors": ("edge",),
    "neural units": ("npu",), "GPUs, LocalScore": ("localscore-nvidia", "localscore-apple", "localscore-amd"),
}
PROMPTS_BOUND = {"GPUs, llama.cpp": 0.25, "processors": 0.25}


@dataclass(frozen=True)
class Judged:
    """A group's predictions, each without its device, and the constants that all its rows give."""

    group: Group
    title: str
    predictions: list[Prediction]
    bound: float | None
    fitted: Values = field(default_factory=dict)
    simpler: dict[str, float] = field(default_factory=dict)
    """Mean absolute errors of the estimator without some of its parts."""

    @property
    def error(self) -> float:
        """Mean absolute error."""
        return mean_miss(item.miss for item in self.predictions)

    @property
    def over(self) -> bool:
        """True if it misses its bound."""
        return self.bound is not None and self.error > self.bound


def judge(rows: Sequence[Row], groups: Iterable[Group] = GROUPS, ablations: bool = True) -> list[Judged]:
    """Fit and predict every group; servers are apart from the group that they are fitted with."""
    found = []
    for group in groups:
        own = [row for row in rows if group.takes(row)]
        if not group.priors:
            found.append(Judged(group, group.title, shipped(own), group.bound))
            continue
        fitted = fit(own, group.priors)
        apart, rest = _apart(group, leave_one_device_out(own, group.priors, fitted))
        simpler = {title: _simpler(group, own, at) for title, at in group.ablations.items()} if ablations else {}
        found.append(Judged(group, group.title, apart, group.bound, fitted, simpler))
        if rest:
            found.append(Judged(group, f"The same, {group.rest}", rest, None, fitted))
    return found


def _apart(group: Group, predictions: Sequence[Prediction]) -> tuple[list[Prediction], list[Prediction]]:
    rest = [item for item in predictions if group.rest and item.row.profile.device_class in SERVERS]
    return [item for item in predictions if item not in rest], rest


def _simpler(group: Group, rows: Sequence[Row], at: Values) -> float:
    """Mean absolute error of a simpler model, each device left out."""
    priors, start = held(group.priors, at)
    apart, _ = _apart(group, leave_one_device_out(rows, priors, fit(rows, priors, start)))
    return mean_miss(item.miss for item in apart)


def band(misses: Iterable[float]) -> float:
    """Half-width that holds at least 80 % of the misses."""
    sizes = sorted(abs(miss) for miss in misses)
    return sizes[math.ceil(0.8 * len(sizes)) - 1]


def inside(predictions: Sequence[Prediction]) -> float:
    """Share of the rows that lie within the bands of their classes."""
    return statistics.fmean(
        abs(item.miss) <= constants_of(item.row.profile, experts=item.row.experts).error for item in predictions)


def markdown(judged: Sequence[Judged], rows: Sequence[Row], day: str) -> str:
    """The section of the document."""
    used = usable(list(rows))
    lines = ["## Against published speeds", "", *_paragraph(
        f"`python benchmarks/estimator_fit.py` made this section on {day} from benchmarks/published/speeds.tsv: "
        f"{len(rows)} rows of {len({row.known.name for row in rows})} devices, each with its source; "
        f"{len(rows) - len(used)} are marked as doubtful, with the reason, and not used. Each device is predicted from "
        "its vendor's figures with constants fitted to the other devices of the group: nothing measured on it is used. "
        "Errors are mean absolute errors of tokens per second of decoding; *within* is the share of rows inside the "
        "bands that `estimate` gives."), "",
        table("group | rows | devices | target | estimator | median | 80 % within | within | one constant | "
              "parameters only", (_line(item) for item in judged)), "", *_paragraph(
        "*One constant*: tokens/s = share x bandwidth / bytes, the share fitted to the other devices. *Parameters "
        "only*: llmfit's formula, tokens/s = K / 1e9 parameters x factor of the quantisation; it knows no bandwidth."),
        ""]
    for item in judged:
        lines += _group_lines(item)
    return "\n".join([*lines, *_prompt_lines(judge_prompts(used))])


def _line(item: Judged) -> str:
    misses = [found.miss for found in item.predictions]
    rows = [found.row for found in item.predictions]
    return row(
        item.title, len(rows), len({of.known.name for of in rows}), item.group.target if item.bound else "",
        f"{item.error:.1%}", f"{statistics.median(map(abs, misses)):.1%}", f"±{band(misses):.0%}",
        f"{inside(item.predictions):.0%}",
        f"{mean_miss(found.one_constant / found.row.tok_per_s - 1 for found in item.predictions):.0%}",
        f"{mean_miss(parameters_only(of) / of.tok_per_s - 1 for of in rows):.0%}")


def _group_lines(item: Judged) -> list[str]:
    """One group: its constants, simpler models, and the rows that it misses most."""
    said = item.group.note if item.bound or not item.fitted else ""
    if item.fitted and said:
        said = "Fitted: " + ", ".join(f"{key} = {value:.3g}" for key, value in item.fitted.items()) + f". {said}"
    for title, error in item.simpler.items():
        said += f" If {title}: {error:.1%}."
    if item.group.name == "edge" and item.bound:
        known = [abs(error_of_known(found.row)) for found in item.predictions if not found.row.threads]
        said += (" With all that is known of a device, `edgeinfer estimate --machine` misses the rows whose threads "
                 f"are not limited by {statistics.fmean(known):.1%} in the mean, {statistics.median(known):.1%} in the "
                 "median.")
    worst = sorted(item.predictions, key=lambda found: -abs(found.miss))[:WORST]
    return [f"### {item.title}", "", *_paragraph(said), *([""] if said else []),
            f"The {WORST} rows that it misses most:", "",
            table("device | model | program | measured, t/s | estimated | miss | source", map(_cells, worst)), ""]


def _cells(found: Prediction) -> str:
    of = found.row
    return row(of.device, f"{of.model} {of.type}", of.program, f"{of.tok_per_s:.4g}", f"{found.tok_per_s:.1f}",
               f"{found.miss:+.0%}", of.source)


def judge_prompts(rows: Sequence[Row]) -> dict[str, list[prompts.Prompt]]:
    """Predict the prompts of every device with the shares of the others, by kind."""
    known = prompts.with_peak(rows)
    return {title: prompts.leave_one_device_out([row for row in known if row.group in groups])
            for title, groups in PROMPTS.items()}


def _prompt_lines(found: dict[str, list[prompts.Prompt]]) -> list[str]:
    """Prompts, which are known less well."""
    cells = []
    for title, items in found.items():
        misses = [item.miss for item in items]
        held_by = statistics.fmean(
            abs(item.miss) <= classes()[item.row.profile.device_class]["prefill_error"] for item in items)
        cells.append(row(title, len(items), len({item.row.known.name for item in items}),
                         f"{PROMPTS_BOUND[title]:.0%}" if title in PROMPTS_BOUND else "", f"{mean_miss(misses):.1%}",
                         f"{statistics.median(map(abs, misses)):.1%}", f"±{band(misses):.0%}", f"{held_by:.0%}"))
    return ["### Prompts", "", *_paragraph(
        "The share of the peak that matrices reach is the median of the other devices: of the same generation, or of "
        "processors with the same instructions, where there are two. Peaks follow from units, clocks and instructions. "
        "Processors are judged with integer codes."), "",
        table("kind | rows | devices | target | estimator | median | 80 % within | within", cells)]


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text.strip(), 120, break_long_words=False, break_on_hyphens=False)


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
    parser.add_argument("--list", action="store_true", help="print every row beside its prediction")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="judge the rows of another file, and write nothing")
    given = parser.parse_args()
    if given.rows is not None:
        return print_others(given.rows)
    rows = read_rows()
    judged = judge(usable(rows))
    replace_section(given.output, SECTION, markdown(judged, rows, date.today().isoformat()))
    for item in judged:
        over = f"over its bound of {item.bound:.0%}" if item.over else ""
        constants = {key: round(value, 3) for key, value in item.fitted.items()}
        print(f"{item.group.name}: {item.error:.1%}, 80 % within {band(found.miss for found in item.predictions):.1%} "
              f"{constants} {over}")
        for found in item.predictions if given.list else ():
            print("   ", _cells(found))
    return int(any(item.over for item in judged))


if __name__ == "__main__":
    sys.exit(main())
