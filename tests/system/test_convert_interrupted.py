"""Conversions that are interrupted, doubled or run out of disk: nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.converters import convert
from edgeinfer.errors import DestinationError
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import listening
from tests.helpers.tasks import within

ROOT = Path(__file__).resolve().parents[2]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "hf")


SLOWLY = """
import os, sys, time
from edgeinfer.converters import convert

def wait(done, total, name):
    print(name, flush=True)
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.02)

try:
    convert(sys.argv[1], sys.argv[2], progress=wait)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def slow_conversion(source: Path, tmp_path: Path) -> Any:
    """A conversion in another process that has begun to write, and goes on once there is a file `hf/go_on`."""
    command = [sys.executable, "-c", SLOWLY, str(source), str(tmp_path / "bundle"), str(source / "go_on")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=listening)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == EMBEDDING
    yield process
    process.kill()
    process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT cannot be sent to one process")
def test_ctrl_c_leaves_nothing(slow_conversion: subprocess.Popen[str], tmp_path: Path) -> None:
    assert len(list(tmp_path.glob(".bundle.*.partial"))) == 1
    slow_conversion.send_signal(signal.SIGINT)
    assert slow_conversion.wait(600) == 130
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.slow
def test_the_second_of_two_conversions_to_one_destination_waits(
    slow_conversion: subprocess.Popen[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(convert, source, tmp_path / "bundle")
        assert within(120, lambda: said.append(capsys.readouterr().err) or "waiting" in said[-1])
        (source / "go_on").touch()
        with pytest.raises(DestinationError, match="bundle already exists"):
            second.result()
    assert "".join(said) == f"edgeinfer: Another process is writing {tmp_path / 'bundle'}; waiting for it.\n"
    assert slow_conversion.wait(600) == 0  # it was let finish


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_conversion_does_not_bar_the_next(
    slow_conversion: subprocess.Popen[str], source: Path, tmp_path: Path
) -> None:
    slow_conversion.kill()
    slow_conversion.wait(600)
    time.sleep(0.05)
    assert len(list(tmp_path.glob(".bundle.*"))) == 2  # the lock's file and half a bundle
    convert(source, tmp_path / "bundle")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "hf"]


def test_an_existing_destination(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "bundle")
    with pytest.raises(DestinationError, match="bundle already exists"):
        convert(source, tmp_path / "bundle")
    convert(source, tmp_path / "bundle", weights="int8", overwrite=True)


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(DestinationError, match=r"bundle needs \d+ kB, but its disk has only 1.0 kB free; free"):
        convert(source, tmp_path / "bundle")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a system without /proc")
def test_a_place_where_no_file_can_be_made_is_refused(source: Path) -> None:
    """The lock's file cannot be made there, which is not to be taken for another process that has it."""
    with pytest.raises(DestinationError, match="Cannot write /proc/edgeinfer: No such file or directory"):
        convert(source, Path("/proc/edgeinfer"))
