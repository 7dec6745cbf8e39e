"""A weights file that another program cuts or overwrites while it is mapped: one sentence, whoever reads it."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.bundle import Bundle, check_state, watch
from edgeinfer.bundle.mapping import MappedFile
from edgeinfer.errors import BundleError
from edgeinfer.llm.api import LLM as Model
from edgeinfer.models import demo_path

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the handler is for Linux")
CHANGED = r"weights\.bin was changed while it was in use; convert or copy the model again, and leave its files alone"
PROGRAM = """
import faulthandler, hashlib, mmap, os, signal, sys
from edgeinfer.base import process
%s
print("open", flush=True)
sys.stdin.readline()
%s
print("alive", flush=True)
"""
MAP = "from edgeinfer.bundle import Bundle; weights = Bundle.open(sys.argv[1]).weights"
LLM = "from edgeinfer import LLM; llm = LLM(sys.argv[1], threads=2, ctx=256)"


def run(path: Path, opens: str, reads: str, cut: bool = True) -> subprocess.CompletedProcess[str]:
    """Open the model in a process, cut its weights, and let it read."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM % (opens, reads), str(path)], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == "open\n"
        if cut:
            os.truncate(path / "weights.bin", 0)
        out, err = child.communicate("\n", timeout=600)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(demo_path(), tmp_path / "demo")
    return tmp_path / "demo"


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("opens", "reads"),
    [
        (LLM, "llm.generate('Once', max_tokens=4)"),  # in threads of ours
        (MAP, "weights[5000:].sum()"),  # holding the GIL
        (MAP, "hashlib.sha256(weights).digest()"),  # without it
    ],
)
def test_a_cut_file_is_a_sentence(model: Path, opens: str, reads: str) -> None:
    done = run(model, opens, reads)
    assert (done.returncode, done.stdout) == (1, "")
    file = re.escape(str(model / "weights.bin"))
    assert re.fullmatch(rf"edgeinfer: {file} can no longer be read at byte \d+: another program cut it short, or its "
                        r"disk failed; convert or copy the model again\.\n", done.stderr)


def test_the_sentence_is_an_object_where_the_answer_is_one(model: Path) -> None:
    done = run(model, MAP + "; process.reports_json = True", "weights.sum()")
    assert done.returncode == 1 and done.stderr.startswith("edgeinfer: ")
    assert json.loads(done.stdout) == {"error": {"code": "invalid_bundle", "message": done.stderr[11:].strip()}}


@pytest.mark.parametrize(
    "fault",
    [
        "f = open(__import__('tempfile').mkstemp()[1], 'r+b'); f.truncate(9); os.unlink(f.name); "
        "m = mmap.mmap(f.fileno(), 0); f.truncate(0); m[3]",
        "os.kill(os.getpid(), signal.SIGBUS)",
    ],
)
def test_other_faults_are_left_to_others(model: Path, fault: str) -> None:
    done = run(model, "faulthandler.enable(); " + MAP, fault, cut=False)
    assert done.returncode == -signal.SIGBUS  # one that was sent may reach another thread, a line later
    assert "edgeinfer:" not in done.stderr and "Fatal Python error: Bus error" in done.stderr


def test_a_file_that_is_cut_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(8192))
    fstat = os.fstat

    def cut_behind(handle: int) -> os.stat_result:
        status = fstat(handle)
        os.truncate(tmp_path / "weights.bin", 4096)
        return status

    monkeypatch.setattr("edgeinfer.bundle.mapping.os.fstat", cut_behind)
    with pytest.raises(BundleError, match=r"^weights.bin is truncated: 4096 bytes instead of 8192\.$"):
        MappedFile(tmp_path / "weights.bin", 8192)


def overwrite(path: Path) -> None:
    """Put another byte in the middle of a file, later than all that happened to it by the clock of its file system."""
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        with open(path, "r+b") as file:
            file.seek(100_000)
            file.write(b"x")


def test_a_file_that_is_overwritten_while_a_model_runs(model: Path) -> None:
    with Model(model, threads=1, ctx=256) as llm:
        assert llm.generate("Once", max_tokens=2, temperature=0)
        stream = llm.stream("Once", max_tokens=200, temperature=0, ignore_eos=True)
        next(stream)
        overwrite(model / "weights.bin")
        with pytest.raises(BundleError, match=CHANGED):
            list(stream)
        with pytest.raises(BundleError, match=CHANGED):
            llm.generate("Once", max_tokens=2)


def test_a_file_whose_name_goes_to_another_is_used_to_the_end(model: Path) -> None:
    with Model(model, threads=1, ctx=256) as llm:
        want = llm.generate("Once", max_tokens=8, temperature=0)
        shutil.copy(model / "weights.bin", model / "new")
        overwrite(model / "new")
        (model / "new").rename(model / "weights.bin")
        assert llm.generate("Once", max_tokens=8, temperature=0) == want


def test_files_are_closed_with_their_mappings(model: Path) -> None:
    def handles() -> int:
        links = (Path(entry) for entry in glob.glob("/proc/self/fd/*"))
        return sum(os.path.realpath(link) == str(model / "weights.bin") for link in links)

    with Bundle.open(model) as bundle:
        watch(bundle.weights)()
        assert handles()
        with pytest.raises(BundleError, match=r"weights.bin can no longer be read: Bad file descriptor"):
            check_state(model / "weights.bin", -1, bundle.weights_state)
    del bundle
    assert not handles()
