"""The probe: memory, arithmetic, storage, calibration; each piece on small sizes, and the whole once."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.bench import CHUNK_SIZES, Lengths, MachineProbe, ProbeRequest, StorageProbe, probe_machine, thread_counts
from edgeinfer.bench import SHAPES as CALIBRATION_SHAPES
from edgeinfer.bench import machine as machine_module
from edgeinfer.bench import storage as storage_module
from edgeinfer.bench.calibration import Runs, lengths_for
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.devices import (
    DENSE_SHARE,
    GATES_SHARE,
    MASKED_SHARE,
    PER_MILLE,
    WIDEST,
    Constants,
    DecodeRun,
    PromptRun,
    Traffic,
    believable,
    constants_of,
    contradictions,
    estimate,
    load_profile,
    parse_profile,
    save_profile,
    solve_constants,
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
            assert 0 < probe.random_share(size, seconds=0) < 100
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


def runs(noise: Callable[[int], float] = lambda i: 1.0) -> tuple[list[DecodeRun], list[PromptRun]]:
    """Runs of a machine with f_w 0.9, f_kv 0.6, t0 1.6 ms, mfu 0.7, mfu_attention 0.2."""
    decodes, prompts = [], []
    shapes = [(30, 90e6, 46e6, 0.27e9), (5, 110e6, 10e6, 0.47e9), (2, 250e6, 35e6, 0.88e9)]
    for i, (layers, weights, kv, operations) in enumerate(4 * shapes):
        bandwidth, peak = 30.0 + i, 900.0 + 10 * i
        for cached in (0.0, kv):
            seconds = 1.6e-3 * layers / 32 + weights / (0.9 * bandwidth * 1e9) + cached / (0.6 * bandwidth * 1e9)
            decodes.append(DecodeRun(layers, weights, cached, seconds * noise(i), bandwidth))
            attention = cached * 40
            seconds = 1.6e-3 * layers / 32 + operations * 512 / (0.7 * peak * 1e9) + attention / (0.2 * peak * 1e9)
            prompts.append(PromptRun(layers, operations * 512, attention, seconds * noise(i), peak))
    return decodes, prompts


def test_constants_are_recovered() -> None:
    want = {"f_w": 0.9, "f_kv": 0.6, "t0_ms": 1.6, "mfu": 0.7, "mfu_attention": 0.2}
    assert solve_constants(*runs()) == pytest.approx(want, rel=1e-6)
    disturbed = solve_constants(*runs(lambda i: 3.0 if i == 5 else 1.0))  # another process took the core once
    assert disturbed == pytest.approx(want, rel=0.02)


def test_the_cost_of_values_between_matrices_is_recovered() -> None:
    decodes, prompts = runs()
    prompts = [replace(run, values=1e9 * run.layers, seconds=run.seconds + 300 * run.layers / run.int8_peak_gops)
               for run in prompts]
    found = solve_constants(decodes, prompts)
    assert found["activation_cost"] == pytest.approx(300, rel=1e-4)
    assert found["mfu"] == pytest.approx(0.7, rel=1e-4)


def test_the_time_of_multiplying_beside_reading_the_cache_is_recovered() -> None:
    decodes, _ = runs()
    operations = [run.kv_bytes * share for run, share in zip(decodes, 4 * (6, 6, 16, 16, 2, 2), strict=True)]
    decodes = [replace(run, attention_operations=n, seconds=run.seconds + 5.0 * n / 1e12)
               for run, n in zip(decodes, operations, strict=True)]
    found = solve_constants(decodes, [])
    assert found["attention_ms"] == pytest.approx(5.0, rel=1e-4)
    assert found["f_kv"] == pytest.approx(0.6, rel=1e-4)
    disturbed = [replace(run, attention_operations=n / 1e4) for run, n in zip(decodes, operations, strict=True)]
    assert solve_constants(disturbed, [])["attention_ms"] == 1e4  # of 5e4: the most that a profile holds


def test_one_kind_of_model_cannot_tell_multiplying_from_reading() -> None:
    decodes, _ = runs()
    alike = [replace(run, attention_operations=16 * run.kv_bytes) for run in decodes]
    found = solve_constants(alike, [])
    assert "attention_ms" not in found and found["f_kv"] == pytest.approx(0.6, rel=1e-6)


def test_constants_that_the_runs_do_not_show_are_left_out() -> None:
    decodes, _ = runs()
    without = [run for run in decodes if not run.kv_bytes]
    assert set(solve_constants(without, [])) == {"t0_ms", "f_w"}
    with pytest.raises(UsageError, match="Constants cannot be solved from no runs; measure at least one model"):
        solve_constants([], [])


def test_models_in_the_caches_show_nothing_of_decoding() -> None:
    cached = [DecodeRun(layers, nbytes, 0.0, layers * 1e-5, 30.0) for layers, nbytes in ((4, 9e3), (8, 1e3), (12, 3e3))]
    assert set(solve_constants(cached, runs()[1])) == {"mfu", "mfu_attention"}


def test_no_constant_is_negative_or_beyond_belief() -> None:
    odd = [DecodeRun(30, 90e6, 0.0, 1e-3, 30.0), DecodeRun(2, 250e6, 0.0, 1e-4, 30.0),
           DecodeRun(2, 250e6, 9e6, 1e-4, 30.0)]
    found = solve_constants(odd, [PromptRun(2, 1e9, 1e8, 1e-9, 900.0)])
    assert found.get("t0_ms", 0.0) >= 0 and all(0 < found[name] <= 1 for name in found if not name.endswith("_ms"))


def test_a_fixed_time_per_token_is_told_from_one_per_layer() -> None:
    """Python's time for a token does not grow with the layers; it is a good part of a small model's time."""
    decodes, prompts = runs()
    found = solve_constants([replace(run, seconds=run.seconds + 0.4e-3) for run in decodes], prompts)
    assert found["token_ms"] == pytest.approx(0.4, rel=1e-3) and found["t0_ms"] == pytest.approx(1.6, rel=1e-3)
    constants = Constants(**found)
    small = Traffic(1e6, layers=4)
    profile = parse_profile("local", {"title": "t", "device_class": "local", "memory_bytes": 1, "bandwidth_gbs": 30.0,
                                      "cores": 2, "isa": "avx2", "constants": found}, "here")
    assert constants_of(profile).token_ms == constants.token_ms
    assert estimate(profile, small).terms["overhead"] == pytest.approx(0.4 + 1.6 * 4 / 32, rel=1e-3)


def test_calm_runs_contradict_nothing() -> None:
    decodes, prompts = runs()
    assert contradictions(decodes, prompts) == []
    assert believable(decodes) == decodes and believable(prompts) == prompts


def test_disturbed_readings_are_found_out() -> None:
    """Others took the processor while the limits were read and not while models ran: shares above 1."""
    decodes, prompts = runs()
    slow = [replace(run, int8_peak_gops=run.int8_peak_gops / 2) for run in prompts]
    assert max(run.share for run in slow) > 1.2
    assert any("of the int8 peak that was read beside them" in said for said in contradictions(decodes, slow))
    mixed = [replace(run, int8_peak_gops=run.int8_peak_gops / 3) if i % 3 else run for i, run in enumerate(prompts)]
    assert any(said.startswith("the int8 peak was read as ") for said in contradictions(decodes, mixed))
    starved = [replace(run, bandwidth_gbs=run.bandwidth_gbs / 2) for run in decodes]
    assert any(said.startswith("tokens reached up to 1.") for said in contradictions(starved, prompts))
    one = [replace(prompts[0], int8_peak_gops=prompts[0].int8_peak_gops / 2), *prompts[1:]]
    assert contradictions(decodes, one) == [] and believable(one) == one[1:]  # one in many is left out


def test_no_share_above_1_is_ever_solved() -> None:
    decodes, prompts = runs()
    found = solve_constants([replace(run, seconds=run.seconds / 2) for run in decodes],
                            [replace(run, seconds=run.seconds / 2) for run in prompts])
    assert all(found[name] <= 1 for name in ("f_w", "f_kv", "mfu", "mfu_attention") if name in found)


def test_slow_machines_get_short_prompts() -> None:
    assert lengths_for(900.0) == Lengths() and lengths_for(50.0).prompt == 128


def test_the_calibrations_shapes_can_be_made() -> None:
    assert {shape.name for shape in CALIBRATION_SHAPES} <= set(SHAPES)
    assert all(Lengths().depth % lengths_for(peak).prompt == 0 for peak in (10.0, 1000.0))


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


def test_who_has_little_of_the_processor_is_not_believed() -> None:
    decodes, prompts = runs()
    said = machine_module._doubts(Runs(decodes, prompts, [0.2, 0.3, 0.9]))
    assert said == ["other programs had 70% of the processor"]
    assert machine_module._doubts(Runs(decodes, prompts, [0.9, 1.0, 0.2])) == []


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


def bundles_in(directory: Path) -> Callable[[], list[Path]]:
    def make() -> list[Path]:
        write_random_bundle(SMALL, directory / "a", overwrite=True)
        return [directory / "a"]

    return make


def steps(stages: list[str]) -> list[str]:
    """Stages in their order, without the compilation of kernels where this is the first run."""
    return [stage for stage in dict.fromkeys(stages) if stage != "compile"]


@pytest.mark.slow
def test_the_whole_probe(tmp_path: Path, believed: None) -> None:
    stages: list[str] = []
    profile = probe_machine(small_request(tmp_path), bundles_in(tmp_path), lambda stage, *rest: stages.append(stage))
    assert steps(stages) == ["storage", "arithmetic", "memory", "neurons", "calibration", "full load"]
    assert profile.name == "local" and profile.device_class == "local" and profile.measured and profile.machine
    assert profile.bandwidth_gbs > 0 and profile.int8_peak_gops and profile.f32_peak_gflops and profile.cores == 2
    assert profile.memory_random and [x for x, _ in profile.memory_random.points] == list(CHUNK_SIZES)
    assert profile.storage_random and profile.storage_sequential_gbs
    assert all(value <= profile.bandwidth_gbs * 1.001 for _, value in profile.memory_random.points)
    fitted = [profile.sources[name] for name in profile.constants]  # which ones is chance: the model fits the caches
    assert fitted and set(fitted) == {
        "fitted to 4 runs of decoding and 2 prompts of 32 tokens on 1 random models, depths 0 to 64"}
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
    assert steps(stages) == ["arithmetic", "memory", "neurons", "calibration"]
    assert profile.storage_random is None and "frequency_share" not in profile.figures and profile.constants
    assert not (tmp_path / "no").exists()


@pytest.mark.timing
def test_the_calibration_stops_filling_when_time_is_up(tmp_path: Path, believed: None) -> None:
    request = small_request(tmp_path, quick=True)
    lengths = replace(request.lengths or Lengths(), seconds=0.0)
    told: list[str] = []
    profile = probe_machine(replace(request, lengths=lengths), bundles_in(tmp_path), lambda *call: told.append(call[3]))
    fitted = [profile.sources[name] for name in profile.constants]
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
