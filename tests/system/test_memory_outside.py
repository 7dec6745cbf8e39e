"""Memory as another process sees it: peaks beside the plan, runs under limits, weights that may not be locked."""

from __future__ import annotations

import ctypes
import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import memory as memory_benchmark
from benchmarks.memory import Case, Limited, Row, pairs, report
from benchmarks.outside import control_group, watch
from edgeinfer.base.cache_dir import cache_root
from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime import memory
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import PYTHON, environment
from tests.helpers.sessions import session, tokens, write_model

MB = 1_000_000
if not Path("/proc/self/status").exists():
    pytest.skip("/proc says what a process holds", allow_module_level=True)


def python(code: str, **options: Any) -> Any:
    return watch([sys.executable, "-c", code], environment(), **options)


def test_the_peak_of_a_process_is_seen() -> None:
    small = python("print('done', end='')")
    large = python("x = bytearray(200_000_000); del x; print('done', end='')")
    assert small.out == large.out == "done" and small.code == 0
    assert 190 * MB < large.vm_hwm_bytes - small.vm_hwm_bytes < 210 * MB
    assert python("import sys; sys.exit(7)").code == 7
    assert python("import time; time.sleep(60)", timeout_s=0.3).code == -9


def test_a_control_group_limits() -> None:
    with control_group(120 * MB) as group:
        if group is None:
            pytest.skip("no control group with a memory controller can be made here")
        assert python("x = bytearray(50_000_000)", group=group).code == 0
        assert python("x = bytearray(200_000_000)", group=group).code == -9
        peak = group.peak_bytes()
        assert peak is None or 50 * MB < peak <= 121 * MB
        where = group.path
    assert not where.exists()


def run_demo(*options: str, group: Any = None) -> Any:
    command = [*PYTHON, "run", "demo", "Once", "-n", "8", "--json", *options]
    return watch(command, environment(), group)


def test_the_plan_is_what_is_measured() -> None:
    done = run_demo()
    planned, reported = (json.loads(done.out)[field] for field in ("planned_bytes", "peak_rss_bytes"))
    assert abs(done.vm_hwm_bytes - planned) < 24 * MB
    assert abs(done.vm_hwm_bytes - reported) < 4 * MB


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("memory", ["1MB", "200MB"])
def test_a_pool_takes_its_own_size(memory: str) -> None:
    """Smaller and larger than the context that it has without."""
    done, usual = run_demo("--kv-memory", memory), run_demo()
    planned = [json.loads(run.out)["planned_bytes"] for run in (done, usual)]
    assert abs(done.vm_hwm_bytes - planned[0]) < 24 * MB
    assert abs(done.vm_hwm_bytes - usual.vm_hwm_bytes - (planned[0] - planned[1])) < 4 * MB


@pytest.mark.slow
def test_beams_take_what_they_were_planned_to_take() -> None:
    """Beside a single text: tails of their own, and no second prompt."""
    common = ("--kv", "f32", "-c", "1000", "-n", "100", "--temp", "0")
    alone, beams = run_demo(*common), run_demo(*common, "--beams", "16")
    planned = [json.loads(done.out)["planned_bytes"] for done in (alone, beams)]
    more = planned[1] - planned[0]
    assert 4 * MB < more < 12 * MB  # 16 contexts would be 77 MB
    assert abs(beams.vm_hwm_bytes - alone.vm_hwm_bytes - more) < 4 * MB
    assert abs(beams.vm_hwm_bytes - planned[1]) < 24 * MB


@pytest.mark.slow
def test_a_run_lives_within_what_was_planned() -> None:
    """Also without an explicit budget: the limit of the group is then the budget, and it is just enough."""
    planned = json.loads(run_demo().out)["planned_bytes"]
    for options in ([], ["--budget", "64GiB"]):
        with control_group(planned) as group:
            if group is None:
                pytest.skip("no control group with a memory controller can be made here")
            done = run_demo(*options, group=group)
        assert done.code == 0 and json.loads(done.out)["completion_tokens"] == 8, done.err


@pytest.mark.slow
def test_a_run_that_converts_first_takes_no_more(tmp_path: Path) -> None:
    """The conversion's memory is that of another process, and gone before the model runs."""
    source = make_checkpoint(tmp_path / "hf", hidden_size=512, intermediate_size=2048, num_attention_heads=8)
    command, peaks = [*PYTHON, "run", str(source), "Once", "-n", "8", "--json"], []
    variables = environment(EDGEINFER_CACHE=str(linked_cache(tmp_path)))
    for _ in range(2):
        done = watch(command, variables)
        assert done.code == 0, done.err
        peaks.append(done.vm_hwm_bytes)
        assert abs(done.vm_hwm_bytes - json.loads(done.out)["planned_bytes"]) < 24 * MB
    assert peaks[0] - peaks[1] < 8 * MB


def linked_cache(tmp_path: Path) -> Path:
    """A cache of one's own for bundles, with the kernels that are there."""
    cache = tmp_path / "cache"
    cache.mkdir()
    kernels = cache_root() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(kernels)
    return cache


def test_a_long_prompt_takes_no_more_than_a_short_one(tmp_path: Path) -> None:
    """All pages are there before the first token: filling the context, forking and saving add nothing to speak of."""
    import psutil

    process, path = psutil.Process(), write_model(tmp_path)

    def growth() -> int:
        with session(path, ctx=1024, kv="f32", max_sequences=8, outputs=8) as opened:
            opened.prefill(opened.new_sequence(), tokens(2))
            opened.settle()
            before = process.memory_info().rss
            sequence = opened.new_sequence()
            opened.prefill(sequence, tokens(900))
            samples = [sequence, *(opened.fork(sequence) for _ in range(7))]
            for _ in range(100):
                opened.decode(samples, [1] * 8)
            opened.save(sequence, tmp_path / "cache")
            for one in samples:
                opened.release(one)
            assert len(opened.load(tmp_path / "cache")) == 1000
            return process.memory_info().rss - before

    assert any(growth() < 2 * MB for _ in range(2))  # now and then the system moves pages of its own accord


# -- locking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "says"),
    [(65536, r"\(Cannot allocate memory\): RLIMIT_MEMLOCK allows 0\.0655 MB; raise it \(ulimit -l 2000\), or run with"),
     (-1, r"\(Cannot allocate memory\), or run without --mlock\.")],
)
def test_a_refused_lock_says_what_to_do(monkeypatch: pytest.MonkeyPatch, limit: int, says: str) -> None:
    import resource

    def refuse(address: int, size: int) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(mlock=refuse))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(EdgeInferError, match=r"The system refuses to lock 2\.05 MB of weights " + says):
        memory.lock(np.zeros(2000 * 1024, np.uint8))


def test_copied_weights_are_locked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[np.ndarray] = []
    monkeypatch.setattr("edgeinfer.runtime.weights.loading.lock", locked.append)
    for mmap in (True, False):
        with session(write_model(tmp_path), mlock=True, mmap=mmap) as opened:
            whole, (found,) = opened.executor.regions["weights" if mmap else "resident"], locked
            assert (found.ctypes.data, found.nbytes) == (whole.ctypes.data, whole.nbytes)
            locked.clear()


def test_windows_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "win32")
    with pytest.raises(EdgeInferError, match="cannot be locked into memory on Windows; run without --mlock"):
        memory.lock(np.zeros(1, np.uint8))


@pytest.mark.parametrize(("number", "calls"), [(errno.EINTR, 3), (errno.EAGAIN, 3), (errno.EINVAL, 1)])
def test_an_interrupted_population_is_repeated(monkeypatch: pytest.MonkeyPatch, number: int, calls: int) -> None:
    made = []

    def madvise(address: int, size: int, advice: int) -> int:
        made.append(advice)
        ctypes.set_errno(number)
        return 0 if len(made) == 3 else -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=madvise))
    assert memory._populate(np.zeros(4096, np.uint8), 23) == (calls == 3)
    assert len(made) == calls


# -- the report --------------------------------------------------------------------------------------------------------

CASE = Case("smollm2-135m", "q4", 512, "int8")


def test_rows_are_judged_by_the_larger_bound() -> None:
    assert Row(CASE, 100 * MB, 123 * MB, None).good and not Row(CASE, 100 * MB, 125 * MB, None).good
    assert Row(CASE, 2000 * MB, 1941 * MB, None).good and not Row(CASE, 2000 * MB, 1939 * MB, None).good
    assert Limited(CASE, 1, 0, 1, -9).good
    assert not Limited(CASE, 1, -9, 1, -9).good and not Limited(CASE, 1, 0, 1, 0).good


def test_the_report_shows_misses() -> None:
    rows = [Row(CASE, 100 * MB, 99 * MB, 50 * MB), Row(CASE, 100 * MB, 130 * MB, None)]
    text = "\n".join(report(rows, [Limited(CASE, 100 * MB, -9, 50 * MB, 0)], [CASE]))
    assert "1 of 2 runs within the larger of 3% and 24 MB; differences from -1.0 to +30.0 MB" in text
    assert "| 100.0 | 130.0 | +30.0 | +30.0 |  | **no** |" in text
    assert "too little memory: smollm2-135m q4 512 int8." in text
    assert "| 100.0 | killed | 50.0 | ends well |" in text
    assert "no control group could be made here" in "\n".join(report(rows, [], []))
    assert list(pairs(["a", "b:q4"], ["q4", "f16"])) == [("a", "q4"), ("a", "f16"), ("b", "q4")]


def test_what_the_machine_cannot_hold_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(1000))
    monkeypatch.setattr(memory_benchmark, "available_bytes", lambda: 10**9)
    assert not memory_benchmark.too_large(tmp_path, Case("llama-2-7b", "q4", 1024, "int8"))
    assert memory_benchmark.too_large(tmp_path, Case("llama-2-7b", "q4", 4096, "int8"))
