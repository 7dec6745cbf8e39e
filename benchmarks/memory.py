"""Planned against measured peak memory, seen from outside; and runs in control groups that allow no more than planned.

    python benchmarks/memory.py [--shapes ...] [--weights ...] [--contexts ...] [--kv ...] [--beams ...] [--draft SHAPE]
                                [--out FILE]

Each run is `edgeinfer run` on random weights of a known shape. Its peak is VmHWM of /proc/PID/status, read by this
process, and the most memory of a control group made for it. Where a row says `filled`, the prompt fills the context; in
all others it is short, which makes no difference to the peak: all memory is taken and touched before the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import machine
from benchmarks.outside import control_group, evict, watch
from edgeinfer.base.cache_dir import cache_root
from edgeinfer.bundle import FORMAT_VERSION
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.memory_planner import available_bytes
from edgeinfer.quant import WeightType

SHARE, BYTES = 0.03, 24_000_000
"""A measured peak may differ from the plan by the larger of these."""
LONGEST = 1 << 17
GENERATED, SEARCHED = 8, 128
LONGEST_FILLED = 2048
"""Longer contexts are not filled: their prompts take minutes."""
TIMEOUT_S = 3600
ENOUGH = 0.9
"""Share of the memory there is that a run may take; cases that need more are left out, and named."""


@dataclass(frozen=True)
class Case:
    """One run."""

    shape: str
    weights: str
    ctx: int
    kv: str
    filled: bool = False
    cold: bool = False
    """The page cache holds nothing of the weights."""
    beams: int = 1
    draft: Path | None = None
    """A smaller model that drafts."""
    """Number of beams of a search; each has `SEARCHED` tokens of its own."""

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return GENERATED if self.beams == 1 else SEARCHED


@dataclass(frozen=True)
class Row:
    """Result of a run."""

    case: Case
    planned: int
    measured: int
    """VmHWM, from outside."""
    group: int | None
    """The control group's peak."""

    @property
    def difference(self) -> int:
        return self.measured - self.planned

    @property
    def good(self) -> bool:
        return abs(self.difference) <= max(SHARE * self.planned, BYTES)


def bundle_of(shape: str, weights: str, target: str = "") -> tuple[Path, bool]:
    """Random weights of a shape, and whether they were in the cache already; a draft has its target's vocabulary."""
    stored = WeightType.of(weights).suffix.replace("_", "-")
    name, vocab_size = f"{shape}-for-{target}" if target else shape, SHAPES[target or shape].vocab_size
    path = cache_root() / "bundles" / f"random-{name}-{stored}-v{FORMAT_VERSION}"
    there = path.exists()
    if not there:
        print(f"writing {path.name}", file=sys.stderr, flush=True)
        config = replace(SHAPES[shape], max_position_embeddings=LONGEST, vocab_size=vocab_size)
        write_random_bundle(config, path, weights)
    return path, there


def command(path: Path, case: Case) -> list[str]:
    return [sys.executable, "-m", "edgeinfer", "run", str(path), "-", "--raw", "--json", "--temp", "0", "--no-stats",
            "-n", str(case.tokens), "-c", str(case.ctx), "--kv", case.kv, "--beams", str(case.beams),
            *(["--draft", str(case.draft), "--speculate", "draft"] if case.draft else [])]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGEINFER_")}
    return kept | {"EDGEINFER_CACHE": str(cache_root()), "PYTHONPATH": str(ROOT)}


def measure(path: Path, case: Case) -> Row:
    """Run a case in a control group of its own."""
    prompt = b"a" * (case.ctx - case.tokens - 1 if case.filled else 40)
    if case.cold:
        evict(path / "weights.bin")
    with control_group() as group:
        done = watch(command(path, case), environment(), group, prompt, TIMEOUT_S)
        peak = group.peak_bytes() if group else None
    if done.code:
        raise SystemExit(f"{case}: exit code {done.code}: {done.err}")
    report = json.loads(done.out)
    if case.filled and report["prompt_tokens"] + case.tokens != case.ctx:
        raise SystemExit(f"{case}: the prompt has {report['prompt_tokens']} tokens and does not fill the context.")
    return Row(case, report["planned_bytes"], done.vm_hwm_bytes, peak)


@dataclass(frozen=True)
class Limited:
    """Runs in groups that allow no more than planned, and much less."""

    case: Case
    planned: int
    code: int
    """Exit code with the plan's total as the limit."""
    half: int
    half_code: int
    """Exit code with half of the plan's resident memory: the limit must bite there."""

    @property
    def good(self) -> bool:
        return self.code == 0 and self.half_code == -9


def limited(path: Path, case: Case) -> Limited | None:
    """Run a case under limits; None if no control group can be made. The program's own check is out of the way."""
    plan = [sys.executable, "-m", "edgeinfer", "plan", str(path), "--json", "-c", str(case.ctx), "--kv", case.kv]
    planned = json.loads(watch(plan, environment()).out)
    codes = []
    for nbytes in (planned["total_bytes"], planned["resident_bytes"] // 2):
        evict(path / "weights.bin")
        with control_group(nbytes) as group:
            if group is None:
                return None
            run = [*command(path, case), "--budget", f"{4 * planned['total_bytes']}B"]
            codes.append(watch(run, environment(), group, b"a" * 40, TIMEOUT_S).code)
    return Limited(case, planned["total_bytes"], codes[0], planned["resident_bytes"] // 2, codes[1])


def cases(shape: str, weights: str, given: argparse.Namespace, draft: Path | None) -> Iterator[Case]:
    for ctx in given.contexts:
        for kv in given.kv:
            fill = shape in given.filled and weights == "q4" and ctx <= LONGEST_FILLED
            for beams in given.beams:
                cold = (ctx, kv, beams) == (given.contexts[0], given.kv[0], given.beams[0])
                yield Case(shape, weights, ctx, kv, fill, cold, beams, draft)


def megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:,.1f}"


def table(rows: list[Row]) -> Iterator[str]:
    yield "| shape | weights | context | KV | run | planned MB | measured MB | difference MB | % | group MB | within |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        case = row.case
        said = (("filled", case.filled), ("cold cache", case.cold), (f"{case.beams} beams", case.beams > 1),
                (f"beside {case.draft.name.split('-for-')[0]}" if case.draft else "", case.draft))
        how = ", ".join(word for word, true in said if true)
        yield (f"| {case.shape} | {case.weights} | {case.ctx} | {case.kv} | {how} | {megabytes(row.planned)} "
               f"| {megabytes(row.measured)} | {row.difference / 1e6:+.1f} | {100 * row.difference / row.planned:+.1f} "
               f"| {megabytes(row.group) if case.cold else ''} | {'yes' if row.good else '**no**'} |")


def limited_table(rows: list[Limited]) -> Iterator[str]:
    yield "| shape | weights | context | KV | limit = plan MB | run | limit = half MB | run |"
    yield "|---|---|---|---|---|---|---|---|"
    names = {0: "ends well", -9: "killed"}
    for row in rows:
        case = row.case
        yield (f"| {case.shape} | {case.weights} | {case.ctx} | {case.kv} | {megabytes(row.planned)} "
               f"| {names.get(row.code, row.code)} | {megabytes(row.half)} "
               f"| {names.get(row.half_code, row.half_code)} |")


def too_large(path: Path, case: Case) -> bool:
    """Return whether this machine has too little memory for a case."""
    c = SHAPES[case.shape]
    kv = case.ctx * 2 * c.num_hidden_layers * c.kv_width * {"int8": 1, "f16": 2, "f32": 4}[case.kv]
    return (path / "weights.bin").stat().st_size + kv > ENOUGH * available_bytes()


def pairs(shapes: list[str], kinds: list[str]) -> Iterator[tuple[str, str]]:
    """Shapes with types of weights: those of `NAME:TYPE` alone, else all."""
    for text in shapes:
        shape, _, only = text.partition(":")
        yield from ((shape, weights) for weights in ([only] if only else kinds))


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit code is 1 if a plan was wrong or a run within its plan died."""
    parser = argparse.ArgumentParser(description="Planned against measured peak memory.")
    parser.add_argument("--shapes", nargs="+",
                        default=["smollm2-135m", "tinyllama-1.1b", "qwen3-0.6b", "llama-2-7b:q4"],
                        help="names, each with :TYPE where it is to have this type of weights only")
    parser.add_argument("--weights", nargs="+", default=["q4", "int8", "f16"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048, 8192, 16384])
    parser.add_argument("--kv", nargs="+", default=["int8", "f16", "f32"])
    parser.add_argument("--beams", nargs="+", type=int, default=[1], help="of a search; 1 is none")
    parser.add_argument("--draft", metavar="SHAPE", help="shape of a draft model beside each, with weights alike")
    parser.add_argument("--filled", nargs="*", default=["smollm2-135m"],
                        help="shapes whose prompts fill the context, with q4 weights")
    parser.add_argument("--out", type=Path, help="write the tables to this file instead of printing them")
    given = parser.parse_args(arguments)
    rows, limits, left_out = [], [], []
    for shape, weights in pairs(given.shapes, given.weights):
        path, there = bundle_of(shape, weights)
        draft, kept = bundle_of(given.draft, weights, shape) if given.draft else (None, True)
        for case in cases(shape, weights, given, draft):
            if too_large(path, case):
                left_out.append(case)
                continue
            rows.append(measure(path, case))
            print(*table(rows[-1:]), sep="\n", file=sys.stderr, flush=True)
        limits.append(limited(path, Case(shape, weights, given.contexts[-1], given.kv[0], cold=True)))
        for made in [path] * (not there) + [draft] * (not kept):
            shutil.rmtree(made)
    tried = [row for row in limits if row]
    text = "\n".join(report(rows, tried, left_out)) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0 if all(row.good for row in (*rows, *tried)) else 1


def report(rows: list[Row], limits: list[Limited], left_out: list[Case]) -> Iterator[str]:
    """The page's part that is measured."""
    worst = max(rows, key=lambda row: abs(row.difference))
    good = sum(row.good for row in rows)
    yield f"Measured on {machine()}.\n"
    yield (f"{good} of {len(rows)} runs within the larger of {SHARE:.0%} and {BYTES / 1e6:.0f} MB; differences from "
           f"{min(row.difference for row in rows) / 1e6:+.1f} to {max(row.difference for row in rows) / 1e6:+.1f} MB "
           f"(the largest: {worst.case.shape} {worst.case.weights}, context {worst.case.ctx}, KV {worst.case.kv}).\n")
    yield from table(rows)
    if left_out:
        names = "; ".join(f"{case.shape} {case.weights} {case.ctx} {case.kv}" for case in left_out)
        yield f"\nLeft out, because this machine has too little memory: {names}."
    yield "\n### Control groups that allow no more than planned\n"
    if limits:
        yield from limited_table(limits)
    else:
        yield "Not tried: no control group could be made here."


if __name__ == "__main__":
    sys.exit(main())
