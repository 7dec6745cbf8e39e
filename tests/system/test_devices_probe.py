"""The probe: memory, arithmetic and storage on small sizes, and the whole once."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.bench import (
    CHUNK_SIZES,
    Lengths,
    MachineProbe,
    ProbeRequest,
    Shape,
    StorageProbe,
    probe_machine,
    thread_counts,
)
from edgeinfer.bench import machine as machine_module
from edgeinfer.bench import storage as storage_module
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.devices import (
    DENSE_SHARE,
    GATES_SHARE,
    MASKED_SHARE,
    PER_MILLE,
    TYPES,
    WIDEST,
    constants_of,
    load_profile,
    save_profile,
)
from edgeinfer.errors import BudgetError, DestinationError, UsageError

SMALL = replace(SHAPES["tinyllama-1.1b"], hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=320,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, windows=(0, 0))
MIB = 1 << 20


# -- memory and arithmetic ---------------------------------------------------------------------------------------------


def test_numbers_of_threads() -> None:
    assert [thread_counts(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_sizes_of_pieces() -> None:
    assert CHUNK_SIZES[0] == 64 and CHUNK_SIZES[-1] == MIB and len(CHUNK_SIZES) == 15


def test_memory_and_arithmetic() -> None:
    with MachineProbe(2, 16 * MIB + 5) as probe:
        assert probe.read_bytes == 16 * MIB
        assert probe.read_gbs(1) > 0 and probe.read_gbs(2) > 0
        assert probe.int8_gops(2) > 0 and probe.f32_gflops(1) > 0
        for size in (64, 2048, MIB):
            assert 0 < probe.random_share(size, seconds=0) < math.inf  # of one reading, which may be disturbed
        probe.small_pages()
        assert probe.read_gbs(2) > 0 and probe.random_share(64, seconds=0, threads=1) > 0


def test_the_probe_reads_scattered_pieces_within_its_memory() -> None:
    """Sizes that do not divide the number of pieces, with more threads than pieces."""
    with MachineProbe(5, 16 * MIB) as probe:
        assert probe.random_share(MIB, seconds=0) > 0
        assert probe.random_share(192, seconds=0, threads=3) > 0


def test_too_little_memory_to_measure(tmp_path: Path) -> None:
    request = replace(small_request(tmp_path, quick=True), read_bytes=MIB)
    with pytest.raises(BudgetError, match="A probe that reads 1 MB would measure the caches; it needs at least 17 MB"):
        probe_machine(request, list, lambda *call: None)


def test_the_probe_refuses_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with pytest.raises(UsageError,
                       match="EDGEINFER_CHECK=1 compares every instruction in Python, so timings mean nothing"):
        MachineProbe(1, 16 * MIB)


def test_share_of_huge_pages() -> None:
    assert 0 <= machine_module.huge_pages_share(1 << 20) <= 1


# -- storage -----------------------------------------------------------------------------------------------------------


def test_storage(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    with StorageProbe(tmp_path / "deep", 8 * MIB, seconds=0) as probe:
        assert probe.file_bytes == 8 * MIB
        speed = probe.measure(lambda *call: told.append(call))
    assert speed.sequential_gbs > 0 and set(speed.random_gbs) == {1, 8}
    for points in speed.random_gbs.values():
        assert [size for size, _ in points] == [4096, 16384, 65536, 262144, MIB, 4 * MIB]
        assert all(gbs > 0 for _, gbs in points)
    assert [call[:2] for call in told] == [(i, 12) for i in range(12)] and told[0][2] == "4.1 kB, queue of 1"
    assert not list((tmp_path / "deep").iterdir())


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct I/O on this system")
def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with StorageProbe(tmp_path, 8 * MIB, seconds=0) as probe:
        speed = probe.measure()
    assert not speed.direct and speed.sequential_gbs > 0
    assert "through the page cache, which was asked to forget it: the file system refuses direct I/O" in \
        machine_module._how_read(speed)
    assert "with direct I/O" in machine_module._how_read(replace(speed, direct=True))


def test_a_disk_that_fills_up_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DestinationError, match=r"is too full for the probe's file of 8.4 MB .*leave storage out with"):
        StorageProbe(tmp_path, 8 * MIB)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = storage_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(storage_module.shutil, "disk_usage", lambda path: usage._replace(free=300 * MIB))
    with pytest.raises(DestinationError, match="is too full for the probe's file of 537 MB"):
        StorageProbe(tmp_path, 512 * MIB)
    monkeypatch.setattr(storage_module.shutil, "disk_usage", lambda path: usage._replace(free=350 * MIB))
    assert storage_module._fitting(tmp_path, 512 * MIB) == 92 * MIB


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError, match=r"The probe's file cannot be written into .*EDGEINFER_CACHE moves"):
        StorageProbe(tmp_path / "file" / "x", 8 * MIB)


@pytest.mark.parametrize("step", ["_fill", "_read"])
def test_ctrl_c_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def interrupt(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage_module, "_fill" if step == "_fill" else "_open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        StorageProbe(tmp_path, 8 * MIB)
    assert not list(tmp_path.iterdir())


def test_storage_that_fails_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with StorageProbe(tmp_path, 8 * MIB, seconds=0) as probe:
        monkeypatch.setattr(storage_module, "_read", fail)
        with pytest.raises(DestinationError, match=r"Reading the probe's file .* failed: Input/output error"):
            probe.read_gbs(4096, 2)


# -- constants ---------------------------------------------------------------------------------------------------------

# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration is believed, however busy this machine is."""
    monkeypatch.setattr(machine_module, "_doubts", lambda runs: [])
    monkeypatch.setattr(machine_module, "believable", lambda runs: runs)


@pytest.mark.slow
def test_a_probe_that_contradicts_itself_is_repeated_then_falls_back_to_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def doubts(runs: object) -> list[str]:
        asked.append(runs)
        return ["prompts reached up to 1.44 of the int8 peak that was read beside them"]

    monkeypatch.setattr(machine_module, "_doubts", doubts)
    told: list[str] = []
    profile = probe_machine(small_request(tmp_path, quick=True), bundles_in(tmp_path), lambda *c: told.append(c[3]))
    assert len(asked) == 2 and any(item.startswith("again, for prompts reached up to 1.44") for item in told)
    assert not profile.constants and profile.effective_gbs is None and profile.bandwidth_gbs > 0
    save_profile(profile, tmp_path / "saved.toml")
    found = constants_of(load_profile(tmp_path / "saved.toml"))
    assert found.basis == "class local" and found.error == found.prefill_error == WIDEST
    assert "the probe contradicted itself 2 times (prompts reached up to 1.44 of" in found.error_source


@pytest.mark.slow
def test_a_second_try_that_agrees_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [["a doubt"], []]
    monkeypatch.setattr(machine_module, "_doubts", lambda runs: answers.pop(0))
    monkeypatch.setattr(machine_module, "believable", lambda runs: runs)
    profile = probe_machine(small_request(tmp_path, quick=True), bundles_in(tmp_path), lambda *call: None)
    assert profile.constants and not answers and "constants" not in profile.sources


@pytest.mark.slow
def test_the_peak_is_the_best_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, believed: None) -> None:
    readings: list[float] = []

    def read(probe: MachineProbe, threads: int | None = None) -> float:
        readings.append(100.0 + 37 * len(readings) % 50)
        return readings[-1]

    monkeypatch.setattr(MachineProbe, "int8_gops", read)
    profile = probe_machine(small_request(tmp_path, quick=True), bundles_in(tmp_path), lambda *call: None)
    assert profile.int8_peak_gops == max(readings)


def small_request(directory: Path, quick: bool = False) -> ProbeRequest:
    lengths = Lengths(depth=64, prompt=32, generated=2, repetitions=2)
    return ProbeRequest(2, directory, read_bytes=16 * MIB, seconds=0, storage_bytes=8 * MIB, storage_seconds=0,
                        load_seconds=0, lengths=lengths, quick=quick)


def bundles_in(directory: Path) -> Callable[[tuple[Shape, ...]], list[Path]]:
    """Make a small model in each type of the shapes."""
    def make(shapes: tuple[Shape, ...]) -> list[Path]:
        types = {directory / ("a" if one.weights == "q4" else one.weights): one.weights for one in shapes}
        for path, dtype in types.items():
            write_random_bundle(SMALL, path, dtype, overwrite=True)
        return list(types)

    return make


def steps(stages: list[str]) -> list[str]:
    """Stages in their order, without the compilation of kernels where this is the first run."""
    return [stage for stage in dict.fromkeys(stages) if stage != "compile"]


@pytest.mark.slow
def test_the_whole_probe(tmp_path: Path, believed: None) -> None:
    stages: list[str] = []
    profile = probe_machine(small_request(tmp_path), bundles_in(tmp_path), lambda stage, *rest: stages.append(stage))
    assert steps(stages) == ["storage", "arithmetic", "memory", "neurons", "types", "calibration", "full load"]
    assert profile.name == "local" and profile.device_class == "local" and profile.measured and profile.machine
    assert profile.bandwidth_gbs > 0 and profile.int8_peak_gops and profile.f32_peak_gflops and profile.cores == 2
    assert profile.memory_random and [x for x, _ in profile.memory_random.points] == list(CHUNK_SIZES)
    assert profile.storage_random and profile.storage_sequential_gbs
    assert all(value <= profile.bandwidth_gbs * 1.001 for _, value in profile.memory_random.points)
    fitted = [profile.sources[name] for name in profile.constants]  # which ones is chance: the model fits the caches
    assert fitted and set(fitted) <= {
        "fitted to 4 runs of decoding and 2 prompts of 32 tokens on 1 random models, depths 0 to 64",
        "fitted to 10 passes over a few tokens"}
    assert {f"unpacked_gbs_{dtype}" for dtype in TYPES} <= set(profile.figures)
    assert set(profile.curves) == {
        "int8_gops_by_threads", "f32_gflops_by_threads", "read_gbs_by_threads", "storage_random_gbs_queue_1",
        "storage_random_gbs_queue_8", "int8_gops_under_load", "neuron_masked_share", "neuron_gates_share",
    }
    for name in (MASKED_SHARE, GATES_SHARE):
        assert [x for x, _ in profile.curves[name].points] == list(PER_MILLE)
    assert profile.figures[DENSE_SHARE] > 0
    assert {"frequency_share", "huge_pages_share", "huge_pages_gain_64_bytes", "decode_error"} <= set(profile.figures)
    save_profile(profile, tmp_path / "saved.toml")
    assert replace(load_profile(tmp_path / "saved.toml"), name="local") == profile


@pytest.mark.slow
def test_a_quick_probe_leaves_storage_and_load_out(tmp_path: Path, believed: None) -> None:
    stages: list[str] = []
    request = small_request(tmp_path / "no" / "such", quick=True)
    profile = probe_machine(request, bundles_in(tmp_path), lambda stage, *rest: stages.append(stage))
    assert steps(stages) == ["arithmetic", "memory", "neurons", "types", "calibration"]
    assert profile.storage_random is None and "frequency_share" not in profile.figures and profile.constants
    assert not (tmp_path / "no").exists()


@pytest.mark.timing
def test_the_calibration_stops_filling_when_time_is_up(tmp_path: Path, believed: None) -> None:
    request = small_request(tmp_path, quick=True)
    lengths = replace(request.lengths or Lengths(), seconds=0.0)
    told: list[str] = []
    profile = probe_machine(replace(request, lengths=lengths), bundles_in(tmp_path), lambda *call: told.append(call[3]))
    fitted = [profile.sources[name] for name in profile.constants if name not in ("few_rows", "unhidden")]
    assert fitted and all("and 1 prompts of 32 tokens" in said for said in fitted)
    assert "a, decoding" in told and "a, prompts" in told


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions")
def test_no_memory_is_left_behind() -> None:
    """The probe's gigabyte goes back before models are opened."""
    import psutil

    before = psutil.Process().memory_info().rss
    with MachineProbe(1, 64 * MIB) as probe:
        probe.read_gbs(1)
        assert psutil.Process().memory_info().rss > before + 60 * MIB
    assert psutil.Process().memory_info().rss < before + 60 * MIB
