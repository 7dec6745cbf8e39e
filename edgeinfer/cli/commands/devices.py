"""`edgeinfer devices`: the devices that are known, and the probe that measures this one."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...base.cache_dir import make_directories
from ...base.files import os_errors
from ...base.units import format_size
from ...errors import DestinationError, UsageError
from ..options import Json, Threads, source
from ..output import print_json, say
from ..progress import ProgressLine
from ..reports.devices import device_object, list_object, print_device, print_list, profile_chart
from ..reports.plot import check_plot, save_plot

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

    from ...bench import Shape

MODELS = ".calibration-"
"""Prefix of the directories of the calibration's models."""
OLD_SECONDS = 3600
"""Age from which on they are remains of a probe that was killed."""
JSON_FIELDS = {
    "devices": {
        "devices": "without NAME and --probe: per device `name`, `title` and the fields below that are known",
        "local": "this machine's profile, likewise; null before --probe",
        "executors": "without NAME and --probe: per value of --device why it does not work here, empty if it does",
        "name": "with NAME or --probe: name for --machine",
        "device_class": "class of the estimator",
        "memory_bytes": "smallest common capacity; of this machine, physical memory",
        "bandwidth_gbs": "vendor's peak of the memory; of this machine, the measured bandwidth of all threads",
        "effective_gbs": "measured bandwidth of decoding",
        "cores": "processor cores or a GPU's multiprocessors; of this machine, threads that were used",
        "isa": "instruction set, or programming interface of the device",
        "int8_peak_gops": "int8 operations, 1e9 a second; likewise `f32_peak_gflops`, `f16_peak_gflops`",
        "storage_sequential_gbs": "large reads in order",
        "storage_random": "pairs of bytes and GB/s: scattered reads at the deepest queue",
        "memory_random": "pairs of bytes and GB/s: scattered pieces of memory, all threads",
        "constants": "of the estimator, where they differ from the class's",
        "curves": "further curves of the probe, pairs of threads, seconds or bytes and a value",
        "figures": "further figures of the probe",
        "sources": "per field, where it is from",
        "measured": "date and time of the probe",
        "path": "with --probe: where the profile was saved",
        "seconds": "with --probe: how long it took",
    },
}
"""Fields of the JSON object, by command."""


def devices(
    command: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Device to show: a name, 'local', or a TOML file.", show_default=False),
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure this machine and save its profile.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --probe: skip storage and the full load.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Plot the device's curves: .svg, .png or .pdf.")
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """List the known devices, show one, or measure this machine.

    The probe takes about a minute and a half and uses all cores. It multiplies from registers, reads memory
    sequentially and in scattered pieces, reads a temporary file of 512 MiB in the cache past the page cache, runs small
    random models, and works at full load for 20 seconds.

    \b
    Examples:
      edgeinfer devices
      edgeinfer devices rpi5
      edgeinfer devices --probe --plot curves.svg
    """
    from edgeinfer.devices import load_profile, local_profile, profiles

    if not probe and source(command, "threads") == "ENVIRONMENT":
        threads = None
    check_request(name, probe, quick, plot, threads)
    if name is None and not probe and plot is None:
        known, local = list(profiles().values()), local_profile()
        if json:
            print_json(list_object(known, local))
        else:
            print_list(known, local)
        return
    extra: dict[str, object] = {}
    if probe:
        began = time.perf_counter()
        profile, path = probe_and_save(threads, quick)
        extra = {"path": str(path), "seconds": time.perf_counter() - began}
    else:
        profile = load_profile("local" if name is None else name)
    if plot is not None:
        save_plot(profile_chart(profile), plot)
    if json:
        print_json({**device_object(profile), **extra})
        return
    print_device(profile)
    if probe:
        print(f"\nMeasured in {extra['seconds']:.0f} s; saved as {extra['path']}.")


def check_request(name: str | None, probe: bool, quick: bool, plot: Path | None, threads: int | None) -> None:
    """Refuse wrong values before anything is measured."""
    if probe and name is not None:
        raise UsageError(f"--probe measures this machine; leave {name!r} out.")
    if quick and not probe:
        raise UsageError("--quick requires --probe.")
    if threads is not None and not probe:
        raise UsageError("--threads requires --probe.")
    if threads is not None and not 1 <= threads <= 256:
        raise UsageError(f"--threads {threads} is out of range; it must be from 1 to 256.")
    if plot is None:
        return
    check_plot(plot)
    if not os.path.isdir(plot.absolute().parent):
        raise DestinationError(f"{plot} cannot be written: there is no directory {plot.absolute().parent}.")
    with suppress(FileNotFoundError):
        os.lstat(plot)  # a name that the file system refuses: before a minute of measurements, not after


def probe_and_save(threads: int | None, quick: bool) -> tuple[DeviceProfile, Path]:
    """Measure this machine; returns the profile and where it was saved."""
    from edgeinfer.devices import NO_CONSTANTS, load_profile, local_path, save_profile
    from edgeinfer.memory_planner import default_threads

    from ...bench import CALM_SHARE, ProbeRequest, probe_machine

    path = local_path()
    check_writable(path.parent)
    remove_remains(path.parent)
    with ProgressLine() as progress, ExitStack() as stack:
        def bundles(shapes: tuple[Shape, ...]) -> list[Path]:
            directory = stack.enter_context(tempfile.TemporaryDirectory(dir=path.parent, prefix=MODELS))
            return random_bundles(shapes, Path(directory), progress)

        request = ProbeRequest(threads or default_threads(), path.parent, quick=quick)
        if not quick:
            say(f"The probe writes a temporary file of {format_size(request.storage_bytes)} into {path.parent} and "
                "takes about a minute and a half.")
        save_profile(probe_machine(request, bundles, progress), path)
    profile = load_profile("local")
    if profile.figures.get("storage_direct") == 0:
        say(f"The file system of {path.parent} refuses direct I/O: storage was read through the page cache, which was "
            "asked to forget the file, and may look faster than it is.")
    if NO_CONSTANTS in profile.sources:
        say(f"No constants of this machine were saved, {profile.sources[NO_CONSTANTS]}, with their wide band. Probe "
            "again while the machine is idle.")
    elif profile.figures.get("processor_share", 1.0) < CALM_SHARE:
        say("Other programs used the processor while models ran, so the constants are less accurate; probe again "
            "while the machine is idle.")
    return profile, path


def random_bundles(wanted: tuple[Shape, ...], directory: Path, progress: ProgressLine) -> list[Path]:
    """Write models for the probe."""
    from edgeinfer.converters import SHAPES, write_random_bundle

    paths = []
    for shape in wanted:
        config = replace(SHAPES[shape.name], num_hidden_layers=shape.layers, vocab_size=shape.vocab_size,
                         windows=SHAPES[shape.name].windows[: shape.layers], max_position_embeddings=1 << 17)
        paths.append(directory / f"{shape.name}-{shape.weights}")
        write_random_bundle(config, paths[-1], shape.weights, progress=partial(progress, "write"))
    return paths


def check_writable(directory: Path) -> None:
    """Refuse a cache that cannot hold the profile, before a minute of measurements."""
    with os_errors(DestinationError, f"The profile cannot be saved in {directory}",
                   ". EDGEINFER_CACHE moves the directory."):
        make_directories(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass


def remove_remains(directory: Path) -> None:
    """Delete models that a killed probe left behind."""
    for path in directory.glob(f"{MODELS}*"):
        if time.time() - path.stat().st_mtime > OLD_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
