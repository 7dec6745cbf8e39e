"""Regions get their pages and weights are read in before tokens need them, with progress for large ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from edgeinfer.cli import progress
from edgeinfer.llm.api import LLM
from edgeinfer.runtime import memory
from tests.helpers.command_line import edgeinfer, environment
from tests.helpers.sessions import own_threads

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page counts are read as Linux gives them")


def resident() -> int:
    return psutil.Process().memory_info().rss


@linux
@pytest.mark.parametrize("nbytes", [64, 4097, (2 << 20) + 1, pytest.param((150 << 20) + 5, marks=pytest.mark.slow)])
def test_a_prefaulter_makes_a_region_resident_and_changes_nothing(nbytes: int) -> None:
    region = memory.allocate(nbytes, touched=False)
    before = resident()
    prefaulter = memory.Prefaulter(region)
    region[-1] = 7  # in use from now on
    prefaulter.wait()
    assert resident() - before >= nbytes - (1 << 20)
    assert region[-1] == 7 and not region[:-1].any()


@linux
def test_untouched_memory_is_not_resident() -> None:
    before = resident()
    region = memory.allocate(64 << 20, touched=False)
    assert region.size == 64 << 20 and resident() - before < 4 << 20


def test_without_the_system_call_pages_are_touched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_populate", lambda region, advice: False)
    threads = own_threads()
    region = memory.allocate(40 << 20, touched=False)
    before = resident()
    prefaulter = memory.Prefaulter(region)
    assert resident() - before >= 39 << 20 and own_threads() == threads
    prefaulter.close()


def test_closing_stops_a_prefaulter(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    may_go_on = threading.Event()

    def slowly(region: np.ndarray, advice: int) -> bool:
        parts.append(region.nbytes)
        if len(parts) > 1:
            may_go_on.wait(600)
        return True

    monkeypatch.setattr(memory, "_populate", slowly)
    prefaulter = memory.Prefaulter(np.zeros(8 * memory.PREFAULT_BYTES, np.uint8))
    while len(parts) < 2:
        time.sleep(0.001)
    prefaulter._stop.set()
    may_go_on.set()
    prefaulter.close()
    assert parts == [memory.PREFAULT_BYTES] * 2


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, Path]:
    """A mapped file of 10 MiB and a bit, of which 4 MiB are read at a time."""
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * 41000)
    monkeypatch.setattr(memory, "READ_BYTES", 4 << 20)
    return np.memmap(path, np.uint8, "r"), path


@pytest.mark.parametrize("bulk", [True, False])
def test_progress_of_reading_is_told_from_a_gigabyte_on(
    weights: tuple[np.ndarray, Path], monkeypatch: pytest.MonkeyPatch, bulk: bool
) -> None:
    if not bulk:
        monkeypatch.setattr(memory, "_populate", lambda region, advice: False)
    seen: list[tuple[int, int, str]] = []

    def tell(done: int, total: int, name: str) -> None:
        seen.append((done, total, name))

    memory.read_in(*weights, tell)
    assert memory.PROGRESS_BYTES == 10**9 and seen == []
    monkeypatch.setattr(memory, "PROGRESS_BYTES", 10_496_000)
    memory.read_in(*weights, tell)
    assert [done for done, *_ in seen] == [0, 4 << 20, 8 << 20, 10_496_000]
    assert {(total, name) for _, total, name in seen} == {(10_496_000, "weights.bin")}


@linux
def test_reading_in_maps_every_page(weights: tuple[np.ndarray, Path]) -> None:
    before = resident()
    memory.read_in(*weights)
    assert resident() - before >= 10_000_000


def test_without_the_system_call_the_file_is_read_through(
    weights: tuple[np.ndarray, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    real = memory._read_through

    def spy(file, at: int, n: int, buffer: bytearray) -> None:
        real(file, at, n, buffer)
        read.append((at, file.tell() - at))

    monkeypatch.setattr(memory, "_populate", lambda region, advice: False)
    monkeypatch.setattr(memory, "_read_through", spy)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)  # as on macOS and Windows
    memory.read_in(*weights)
    assert read == [(0, 4 << 20), (4 << 20, 4 << 20), (8 << 20, 10_496_000 - (8 << 20))]


# -- what users see of it ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_api_and_the_command_line_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROGRESS_BYTES", 1)
    monkeypatch.setattr(progress, "TOLD_SECONDS", 0.0)
    seen: list[tuple[str, int, int, str]] = []
    with LLM("demo", threads=1, progress=lambda *told: seen.append(told)) as llm:
        size = llm.session.bundle.weights_bytes
    assert [told for told in seen if told[0] == "load"][-1] == ("load", size, size, "weights.bin")
    for command in (["run", "demo", "Once", "-n", 1, "--no-stats", "-t", 1],
                    ["bench", "demo", "-p", 0, "-n", 1, "-r", 1, "--no-startup", "-t", 1]):
        done = edgeinfer(*command)
        assert done.code == 0
        lines = done.err.splitlines()
        assert "edgeinfer: loading weights ..." in lines
        assert any(re.fullmatch(r"edgeinfer: loading weights took \d+\.\d s", line) for line in lines), lines


def test_small_models_load_without_a_word() -> None:
    assert edgeinfer("run", "demo", "Once", "-n", 1, "--no-stats", "-t", 1).err == ""


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_a_terminal_sees_the_share() -> None:
    import pty

    code = (
        "from edgeinfer.runtime import memory\nmemory.PROGRESS_BYTES, memory.READ_BYTES = 1, 1 << 18\n"
        "from edgeinfer.cli import main\nmain(['run', 'demo', 'Once', '-n', '1', '-t', '1', '--no-stats'])"
    )
    master, slave = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment(TERM="xterm", COLUMNS="100"),
                             stderr=slave, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # the end of a terminal's last program
        pass
    os.close(master)
    assert child.wait(600) == 0
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"loading weights \S* +0 % of [\d.]+ [MG]B", text), text
    assert re.search(r"loading weights \S* +100 % of [\d.]+ [MG]B", text), text
