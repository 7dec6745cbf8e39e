"""Conversions in a process of their own: what they tell, how they end, and what happens when either process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert_apart
from edgeinfer.converters import subprocess as apart
from edgeinfer.errors import CheckpointError, EdgeInferError, TokenizerError, UnsupportedModelError
from tests.helpers.checkpoints import make_checkpoint, tiny_config
from tests.helpers.command_line import ROOT, environment


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "hf")


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock"))


def test_progress_and_outcome(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[str, int, int, str]] = []
    for _ in range(2):  # the second one replaces the first
        convert_apart(source, tmp_path / "bundle", "int8", 64, progress=lambda *step: told.append(step))
    assert Bundle.open(tmp_path / "bundle").quantisation.weights == "int8"
    assert {stage for stage, *_ in told} == {"convert"} and told[-1][1] == told[-1][2]
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("to a bundle of") == said.err.count("\n")


def test_the_working_directory_is_not_searched(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no such switch")
    (source / "json.py").write_text("raise SystemExit(7)")
    (source / "edgeinfer.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(source)
    convert_apart(source, tmp_path / "bundle", "q4", 32)
    assert (tmp_path / "bundle").is_dir()


@pytest.mark.slow
def test_errors_keep_their_class_and_sentence(source: Path, tmp_path: Path) -> None:
    import json

    for change, kind, sentence in (
        (lambda: (source / "tokenizer.json").write_text("{"), TokenizerError, r"hf/tokenizer\.json is not a usable"),
        (lambda: (source / "config.json").write_text(json.dumps(tiny_config("mamba"))), UnsupportedModelError, "mamba"),
        (lambda: (source / "config.json").write_text("{"), CheckpointError, "is not valid JSON"),
    ):
        change()
        with pytest.raises(kind, match=sentence) as caught:
            convert_apart(source, tmp_path / "bundle", "q4", 32)
        assert type(caught.value) is kind and left(tmp_path) == ["hf"]


def test_a_bug_keeps_its_traceback(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [sys.executable, "-c", "print('[\"bug\", \"Traceback: why\"]')"]
    monkeypatch.setattr(apart, "_start", lambda: start(answer))
    with pytest.raises(RuntimeError, match=r"hf failed:\nTraceback: why"):
        convert_apart(source, tmp_path / "bundle", "q4", 32)


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_an_interrupted_parent_stops_the_child(source: Path, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_apart(source, tmp_path / "bundle", "q4", 32, progress=interrupt)
    assert left(tmp_path) in (["hf"], ["bundle", "hf"])  # it may have been ready by then


def test_a_killed_child_is_told_of(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_start", lambda: start([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]))
    with pytest.raises(EdgeInferError, match=r"hf was killed \(exit code -?\d+\); the system may have"):
        convert_apart(source, tmp_path / "bundle", "q4", 32)


SLOWLY = """
import os, sys, time
from edgeinfer.converters import packing
from edgeinfer.converters import subprocess as apart

convert = packing._packed
if sys.argv[1:]:
    from edgeinfer.converters import convert_apart
    start = apart.subprocess.Popen
    apart.subprocess.Popen = lambda command, **options: start([sys.executable, sys.argv[3]], **options)
    convert_apart(sys.argv[1], sys.argv[2], "q4", 32, progress=lambda *_: print(_, flush=True))
else:
    def packed(*given):
        for _ in range(1 if len(calls) < 3 else 3000):
            time.sleep(0.2)
        calls.append(given)
        yield from convert(*given)
    calls = []
    packing._packed = packed
    sys.exit(apart.main())
"""


@pytest.mark.slow(keep=1)
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_its_parent(source: Path, tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "slowly.py"
    script.write_text(SLOWLY)
    command = [sys.executable, str(script), str(source), str(tmp_path / "bundle"), str(script)]
    parent = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert parent.stdout is not None and parent.stdout.readline()
    (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.send_signal(how)
    parent.communicate(timeout=600)
    for _ in range(30_000):
        try:
            os.kill(int(child), 0)
        except ProcessLookupError:
            break
        if "Z" in Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            break  # ended; nobody in this container asks for its exit code
        time.sleep(0.02)
    else:
        pytest.fail("the child runs on")
    if how == signal.SIGINT:
        assert left(tmp_path) == ["hf", "slowly.py"]
    else:
        convert_apart(source, tmp_path / "bundle", "q4", 32)
        assert left(tmp_path) == ["bundle", "hf", "slowly.py"]


def test_a_child_ends_well_while_its_parent_listens(source: Path, tmp_path: Path) -> None:
    child = apart._start()
    assert child.stdin and child.stdout
    request = {"source": str(source), "destination": str(tmp_path / "b"), "hub": False, "weights": "q4",
               "group_size": 32, "origin": ""}
    child.stdin.write(json.dumps(request).encode() + b"\n")
    child.stdin.flush()
    *_, last = child.stdout.readlines()
    assert json.loads(last) == ["done", []] and child.wait(600) == 0
    child.stdin.close()
    child.stdout.close()
