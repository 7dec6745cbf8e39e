"""The whole probe: everything that a device profile holds, measured on this machine."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.base.progress import OnStageProgress

from ..base.dataclass import dataclass
from ..base.progress import OnProgress
from ..base.units import format_size
from ..devices import (
    BANDWIDTH_MOVED,
    DENSE_SHARE,
    GATES_SHARE,
    MASKED_SHARE,
    NO_CONSTANTS,
    DeviceProfile,
    believable,
    contradictions,
    drawn_gbs,
    fit_errors,
    machine_name,
    parse_profile,
    solve_constants,
    solve_rows,
)
from ..errors import BudgetError
from ..memory_planner import available_bytes
from .calibration import SHAPES, Lengths, Runs, Shape, calibrate, lengths_for
from .neurons import neuron_speed
from .probe import CHUNK_SIZES, MachineProbe, huge_pages_share, repeated, thread_counts
from .storage import StorageProbe, StorageSpeed
from .type_costs import TYPED, measure_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..devices import DecodeRun, PromptRun

MakeBundles = Callable[[tuple[Shape, ...]], list[Path]]
READ_BYTES = 1 << 30
"""Memory to read; a quarter of the free memory if that is less."""
MIN_READ_BYTES = 16 << 20
"""Many times the caches of one core."""
STORAGE_BYTES = 512 << 20
LOAD_SECONDS, LOAD_STEP = 20.0, 0.5
END_SHARE = 0.15
"""Part of the load whose speed counts as that of the start, and as that of the end."""
CALIBRATIONS, MIN_SHARE = 2, 0.5
"""Number of attempts if the runs contradict each other, and the share of the processors that they need."""
SMALL_PAGE_SIZES = (64, 1024, 4096)


@dataclass(frozen=True)
class ProbeRequest:
    """Measurements to make and their duration; the defaults are those of ``edgeinfer devices --probe``."""

    threads: int
    directory: Path
    """Directory for the file of the storage test."""
    read_bytes: int | None = None
    seconds: float = 0.15
    """Seconds of each measurement of memory and arithmetic."""
    storage_bytes: int = STORAGE_BYTES
    storage_seconds: float = 0.3
    load_seconds: float = LOAD_SECONDS
    lengths: Lengths | None = None
    """Lengths of the calibration's runs; None chooses them by the int8 peak."""
    quick: bool = False
    """Leave the load and storage out."""


@dataclass
class _Findings:
    """Fields of the profile as they come in."""

    fields: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    shares: list[tuple[int, float]] = field(default_factory=list)
    """(size of a scattered piece, share of the bandwidth)."""

    def add(self, name: str, value: object, source: str) -> None:
        self.fields[name], self.sources[name] = value, f"probe: {source}"


def probe_machine(request: ProbeRequest, bundles: MakeBundles, progress: OnProgress) -> DeviceProfile:
    """Measure this machine.

    Parameters
    ----------
    request : ProbeRequest
    bundles : callable
        Makes random models of some shapes and returns their paths; called when it is their turn.
    progress : callable

    Raises
    ------
    BudgetError
        The memory is too little to leave the caches.
    DestinationError
        The storage's file cannot be written.
    """
    found = _Findings()
    read_bytes = request.read_bytes or min(READ_BYTES, available_bytes() // 4)
    if read_bytes < MIN_READ_BYTES:
        raise BudgetError(f"A probe that reads {read_bytes / 1e6:.0f} MB would measure the caches; it needs "
                          f"at least {MIN_READ_BYTES / 1e6:.0f} MB. Close other programs.")
    if not request.quick:  # first, because a full disk is known at once
        _storage(found, request, partial(progress, "storage"))
    with MachineProbe(request.threads, read_bytes, partial(progress, "compile")) as probe:
        found.fields["isa"] = probe.isa
        _arithmetic(found, probe, request.seconds, partial(progress, "arithmetic"))
        _memory(found, probe, request.seconds, partial(progress, "memory"))
    _neurons(found, request.threads, read_bytes, partial(progress, "neurons"))
    _types(found, request.threads, read_bytes, bundles, partial(progress, "types"))
    _calibration(found, request, read_bytes, bundles, partial(progress, "calibration"))
    if not request.quick:
        with MachineProbe(request.threads, MIN_READ_BYTES) as probe:
            _load(found, probe, request, partial(progress, "full load"))
    return _profile(found, request)


def _arithmetic(found: _Findings, probe: MachineProbe, seconds: float, tell: OnStageProgress) -> None:
    threads, counts = probe.threads, thread_counts(probe.threads)
    for done, count in enumerate(counts):
        tell(done, len(counts), f"{count} threads")
        for name, read in (("int8_gops_by_threads", probe.int8_gops), ("f32_gflops_by_threads", probe.f32_gflops)):
            best = max(repeated(partial(read, count), seconds))
            found.curves.setdefault(name, []).append((count, best))
    for name, curve in (("int8_peak_gops", "int8_gops_by_threads"), ("f32_peak_gflops", "f32_gflops_by_threads")):
        found.add(name, found.curves[curve][-1][1], f"{threads} threads, products from registers")


def _memory(found: _Findings, probe: MachineProbe, seconds: float, tell: OnStageProgress) -> None:
    """Read in order by threads, scattered pieces by size, and both again on small pages."""
    def in_order(count: int) -> float:
        return statistics.median(repeated(partial(probe.read_gbs, count), seconds))

    threads, counts = probe.threads, thread_counts(probe.threads)
    total = len(counts) + len(CHUNK_SIZES) + 1 + len(SMALL_PAGE_SIZES)
    for done, count in enumerate(counts):
        tell(done, total, f"{count} threads")
        found.curves.setdefault("read_gbs_by_threads", []).append((count, in_order(count)))
    bandwidth = found.curves["read_gbs_by_threads"][-1][1]
    found.add("bandwidth_gbs", bandwidth, f"{threads} threads read {format_size(probe.read_bytes)} in order")
    for done, size in enumerate(CHUNK_SIZES, len(counts)):
        tell(done, total, f"pieces of {format_size(size)}")
        found.shares.append((size, min(probe.random_share(size, seconds), 1.0)))
    found.figures["huge_pages_share"] = huge_pages_share(probe.read_bytes)
    probe.small_pages()
    tell(total - 1 - len(SMALL_PAGE_SIZES), total, "small pages")
    found.figures["huge_pages_gain_in_order"] = bandwidth / in_order(threads)
    for done, size in enumerate(SMALL_PAGE_SIZES, total - len(SMALL_PAGE_SIZES)):
        tell(done, total, f"small pages, pieces of {format_size(size)}")
        share = probe.random_share(size, seconds)
        found.figures[f"huge_pages_gain_{size}_bytes"] = dict(found.shares)[size] / share


def _neurons(found: _Findings, threads: int, read_bytes: int, tell: OnStageProgress) -> None:
    """FFNs by neuron against tiles, by density: whether leaving out neurons pays is decided by these curves."""
    speed = neuron_speed(threads, read_bytes, tell)
    found.curves[MASKED_SHARE], found.curves[GATES_SHARE] = speed.masked, speed.gates
    found.figures[DENSE_SHARE] = speed.dense


def _storage(found: _Findings, request: ProbeRequest, tell: OnStageProgress) -> None:
    tell(0, 1, f"writing a file of {format_size(request.storage_bytes)} in {request.directory}")
    with StorageProbe(request.directory, request.storage_bytes, request.storage_seconds) as probe:
        speed = probe.measure(tell)
    deepest = max(speed.random_gbs)
    how = _how_read(speed)
    found.figures["storage_direct"] = float(speed.direct)
    found.add("storage_sequential_gbs", speed.sequential_gbs, f"pieces of 4 MiB, {how}")
    found.add("storage_random", speed.random_gbs[deepest], f"{deepest} reads at a time, {how}")
    for depth, points in speed.random_gbs.items():
        found.curves[f"storage_random_gbs_queue_{depth}"] = list(points)


def _how_read(speed: StorageSpeed) -> str:
    """Say how the file was read, in words."""
    if speed.direct:
        return f"a file of {format_size(speed.file_bytes)} with direct I/O"
    return (f"a file of {format_size(speed.file_bytes)} through the page cache, which was asked to forget it: the file "
            "system refuses direct I/O")


def _types(found: _Findings, threads: int, read_bytes: int, bundles: MakeBundles, tell: OnStageProgress) -> None:
    """Measure how fast each type of weights is unpacked: with one thread, as many times as all multiply faster."""
    by_threads = found.curves["int8_gops_by_threads"]
    with MachineProbe(threads, read_bytes) as probe:
        found.figures |= measure_types(bundles(TYPED), probe, by_threads[-1][1] / by_threads[0][1], tell)


def _calibration(found: _Findings, request: ProbeRequest, read_bytes: int, bundles: MakeBundles,
                 tell: OnStageProgress) -> None:
    """Find the constants of our own kernels; the bandwidth and the peak of these minutes become the profile's."""
    lengths = request.lengths or lengths_for(found.fields["int8_peak_gops"])
    paths = bundles(SHAPES)
    for attempt in range(CALIBRATIONS):
        with MachineProbe(request.threads, read_bytes) as probe:
            runs = calibrate(paths, probe, lengths, tell, found.figures)
        said = _doubts(runs)
        if not said:
            break
        if attempt + 1 < CALIBRATIONS:
            tell(0, len(paths), f"again, for {said[0]}")
    decodes, prompts = believable(runs.decodes), believable(runs.prompts)
    found.figures["processor_share"] = statistics.median(runs.shares)
    if said or not decodes:
        why = "; ".join(said) or "no run can be believed"
        found.sources[NO_CONSTANTS] = (f"for the probe contradicted itself {CALIBRATIONS} times ({why}); those of the "
                                       "class are taken")
    else:
        _constants(found, decodes, prompts, f"{len(paths)} random models, depths 0 to {lengths.depth}", lengths)
        found.fields["constants"] |= (rows := solve_rows(runs.rows, found.fields["constants"]))
        found.sources.update(dict.fromkeys(rows, f"fitted to {len(runs.rows)} passes over a few tokens"))
    bandwidth = statistics.median(run.bandwidth_gbs for run in runs.decodes)
    found.figures[BANDWIDTH_MOVED] = round(abs(found.fields["bandwidth_gbs"] / bandwidth - 1), 4)
    found.add("bandwidth_gbs", bandwidth, f"{request.threads} threads read {format_size(read_bytes)} in order; median "
                                          f"beside {len(runs.decodes)} runs")
    peak = max([found.fields["int8_peak_gops"], *(run.int8_peak_gops for run in runs.prompts)])
    found.add("int8_peak_gops", peak, f"{request.threads} threads, products from registers; the best reading")
    share = found.fields.get("constants", {}).get("f_w")
    if share is not None:
        found.add("effective_gbs", drawn_gbs(found.figures, bandwidth, share), "what decoding of q4 reaches of it")


def _constants(
    found: _Findings, decodes: list[DecodeRun], prompts: list[PromptRun], what: str, lengths: Lengths
) -> None:
    found.fields["constants"] = solve_constants(decodes, prompts)
    text = f"fitted to {len(decodes)} runs of decoding and {len(prompts)} prompts of {lengths.prompt} tokens on {what}"
    found.sources.update(dict.fromkeys(found.fields["constants"], text))
    if prompts:
        found.figures |= fit_errors(found.fields["constants"], decodes, prompts)


def _doubts(runs: Runs) -> list[str]:
    """Return why the runs of a calibration are not to be believed; empty if they are."""
    said = contradictions(runs.decodes, runs.prompts)
    share = statistics.median(runs.shares)
    return [*said, f"other programs had {1 - share:.0%} of the processor"] if share < MIN_SHARE else said


def _load(found: _Findings, probe: MachineProbe, request: ProbeRequest, tell: OnStageProgress) -> None:
    """Let all threads multiply for a while: how much slower they are in the end."""
    began = time.perf_counter()
    speeds: list[float] = []
    while len(speeds) < 2 or time.perf_counter() - began < request.load_seconds:
        tell(int(time.perf_counter() - began), int(request.load_seconds), "seconds")
        speeds.append(max(repeated(probe.int8_gops, min(LOAD_STEP, request.load_seconds))))
    some = max(1, round(END_SHARE * len(speeds)))
    # The best of each end: on a shared machine others take away some moments, but heat takes all of them.
    found.figures["load_seconds"] = time.perf_counter() - began
    found.figures["frequency_share"] = max(speeds[-some:]) / max(speeds[:some])
    found.curves["int8_gops_under_load"] = list(enumerate(speeds, 1))


def _profile(found: _Findings, request: ProbeRequest) -> DeviceProfile:
    import psutil

    bandwidth = found.fields["bandwidth_gbs"]
    found.add("memory_random", [(size, share * bandwidth) for size, share in found.shares],
              f"{request.threads} threads, prefetching along the list; shares of the bandwidth beside each pass")
    found.add("memory_bytes", int(psutil.virtual_memory().total), "physical memory")
    found.add("cores", request.threads, "threads that were used")
    table = {
        "title": f"This machine: {machine_name()}", "device_class": "local", "machine": machine_name(),
        "measured": datetime.datetime.now().isoformat(timespec="seconds"), "figures": found.figures,
        "sources": found.sources, "curves": {name: _pairs(points) for name, points in found.curves.items()},
        **found.fields,
    }
    for name in ("memory_random", "storage_random"):
        if name in table:
            table[name] = _pairs(table[name])
    return parse_profile("local", table, "the probe")


def _pairs(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Return points as TOML holds them, with as many digits as mean anything."""
    return [[size, float(f"{value:.4g}")] for size, value in points]
