"""Checks when a model is opened: damage anywhere, checked once per state of a file, and files of other kinds."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.base.files import open_plain
from edgeinfer.bundle import HEADER_FILE, Bundle, BundleWriter, Quantisation, checksums, reader
from edgeinfer.errors import BundleError
from edgeinfer.llm.api import LLM
from edgeinfer.models import demo_path, resolve
from edgeinfer.quant import WeightType
from tests.helpers.bundles import CONFIG, write_bundle
from tests.helpers.checkpoints import make_checkpoint

DAMAGED = r"^Cannot (open|use) the bundle .*: the (tensor|file) '\S+' is damaged: its checksum does not match; convert"
GAP = r"|^Cannot use the bundle .*: the gap at byte \d+ of weights.bin is not zero; convert or copy"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "m")
    time.sleep(2 * checksums.SETTLED_NS / 1e9)
    return tmp_path / "m"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes are compared from now on."""
    names: list[str] = []

    def compare(pieces: list[checksums.Piece], *rest: object) -> None:
        names.extend(sorted({piece.path.name for piece in pieces}))
        checksums.compare(pieces, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "compare", compare)
    return names


@pytest.fixture
def at_once() -> Iterator[None]:
    """Whatever waits for two seconds has failed."""
    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def opened(path: Path) -> None:
    with Bundle.open(path) as bundle:
        bundle.check_contents()


def test_damage_anywhere_is_refused(path: Path) -> None:
    rng = np.random.default_rng(0)
    opened(path)
    for name, n in ((HEADER_FILE, 40), ("tokenizer.json", 12), ("weights.bin", 60)):
        good = (path / name).read_bytes()
        for place in rng.integers(0, len(good), n):
            bad = bytearray(good)
            bad[place] ^= 1 << int(rng.integers(8))
            (path / name).write_bytes(bad)
            with pytest.raises(BundleError, match=DAMAGED + GAP if name != HEADER_FILE else "Cannot open the bundle"):
                opened(path)
        (path / name).write_bytes(good)
    opened(path)


def test_a_damaged_model_does_not_run(tmp_path: Path) -> None:
    shutil.copytree(demo_path(), tmp_path / "demo")
    with open(tmp_path / "demo" / "weights.bin", "r+b") as file:
        file.seek(100_001)
        byte = file.read(1)[0]
        file.seek(100_001)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(BundleError, match=DAMAGED):
        LLM(tmp_path / "demo")


def test_files_are_compared_once_per_state(path: Path, compared: list[str]) -> None:
    opened(path)
    assert compared == ["tokenizer.json", "weights.bin"]
    opened(path)
    assert len(compared) == 2
    weights = path / "weights.bin"
    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns - 10**9))
    opened(path)
    assert compared[2:] == ["weights.bin"]
    data = weights.read_bytes()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    weights.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # damage that looks as what passed
    assert weights.stat().st_mtime_ns == before.st_mtime_ns and weights.stat().st_ino == before.st_ino
    with pytest.raises(BundleError, match=DAMAGED):
        opened(path)
    shutil.copytree(path, path.with_name("copy"))  # another file
    with pytest.raises(BundleError, match=DAMAGED):
        opened(path.with_name("copy"))


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, compared: list[str]) -> None:
    """A second change within the clock's tick would leave its times as they are."""
    write_bundle(tmp_path / "m")
    now = time.time_ns() + 10**9
    for name in ("weights.bin", "tokenizer.json"):
        os.utime(tmp_path / "m" / name, ns=(now, now))
    opened(tmp_path / "m")
    opened(tmp_path / "m")
    assert compared == ["tokenizer.json", "weights.bin"] * 2


def test_a_check_is_forgotten_in_time(path: Path, cache: Path, compared: list[str]) -> None:
    opened(path)
    passed = sorted((cache / "checks" / "passed").iterdir())
    assert len(passed) == 2 and not any(file.stat().st_size for file in passed)
    for file in passed:
        os.utime(file, (0, 0))
    opened(path)
    assert compared == ["tokenizer.json", "weights.bin"] * 2
    os.utime(passed[0], (0, 0))
    (path / "tokenizer.json").touch()
    time.sleep(2 * checksums.SETTLED_NS / 1e9)
    opened(path)
    assert not passed[0].exists() or passed[0].stat().st_mtime > 0


def test_without_a_cache_every_opening_compares(path: Path, cache: Path, compared: list[str]) -> None:
    cache.write_text("a file stands where the directory should")
    for _ in range(2):
        opened(path)
    assert compared == ["tokenizer.json", "weights.bin"] * 2


def test_a_damaged_conversion_in_the_cache_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "tiny")
    path = resolve(source)
    data = (path / "weights.bin").read_bytes()
    (path / "weights.bin").write_bytes(data[:900] + bytes([data[900] ^ 1]) + data[901:])
    assert resolve(source, convert=False) == path and capsys.readouterr().err == ""  # nobody runs it
    assert resolve(source) == path
    said = capsys.readouterr().err
    assert "has an unusable bundle (Cannot use the bundle" in said and said.endswith("; converting it again.\n")
    assert (path / "weights.bin").read_bytes() == data


# -- how files are read ------------------------------------------------------------------------------------------------


def large(path: Path, nbytes: int) -> tuple[Path, list[checksums.Piece]]:
    """A file of zeros in four pieces."""
    with open(path, "wb") as file:
        file.truncate(nbytes)
    step = nbytes // 4
    digest = hashlib.sha256(bytes(step)).hexdigest()
    return path, [checksums.Piece(path, f"piece {i}", step, digest, i * step) for i in range(4)]


@pytest.mark.parametrize("threads", [1, 3, None])
def test_all_threads_find_what_one_finds(tmp_path: Path, threads: int | None) -> None:
    path, pieces = large(tmp_path / "file", 16 << 20)
    calls: list[tuple[int, int, str]] = []
    checksums.compare(pieces, threads, lambda *call: calls.append(call))
    assert calls[-1] == (16 << 20, 16 << 20, "file")
    with open(path, "r+b") as file:
        file.seek(13 << 20)
        file.write(b"x")
    with pytest.raises(BundleError, match=r"^the piece 3 is damaged"):
        checksums.compare(pieces, threads)
    os.truncate(path, 9 << 20)
    with pytest.raises(BundleError, match=r"^file ends before byte (12582912|16777216); convert or copy"):
        checksums.compare(pieces, threads)


def test_no_thread_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    path, pieces = large(tmp_path / "file", 16 << 20)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    checksums.compare(pieces)
    path.write_bytes(b"x" * (16 << 20))
    with pytest.raises(BundleError, match="is damaged"):
        checksums.compare(pieces)


def test_an_interruption_ends_all_threads(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    _, pieces = large(tmp_path / "file", 256 << 20)
    with pytest.raises(KeyboardInterrupt):
        checksums.compare(pieces, 2, interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name == "edgeinfer-check"]


def test_comparing_takes_no_memory(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer:
        for i in range(4):
            writer.add(f"t{i}", WeightType("f32", 0, "plain"), (2 << 20,), bytes(8 << 20))
    code = ("import sys; from edgeinfer.bundle import Bundle; from edgeinfer.base.process import peak_rss_bytes\n"
            "bundle = Bundle.open(sys.argv[1]); bundle.weights; before = peak_rss_bytes()  # NumPy is there\n"
            "bundle.check_contents(8); print(peak_rss_bytes() - before)")
    out = subprocess.run([sys.executable, "-c", code, tmp_path / "m"], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 8 << 20


# -- files that are none -----------------------------------------------------------------------------------------------


def put(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
        finally:
            os.chdir(here)


WORDS = {"fifo": "it is a fifo, not a plain file", "directory": "Is a directory", "socket": "it is a socket, not a",
         "device": "it is a device, not a plain file"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no fifos here")
@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("name", [HEADER_FILE, "weights.bin", "tokenizer.json"])
def test_special_files_in_a_bundle(path: Path, name: str, kind: str, at_once: None) -> None:
    put(path / name, kind)
    with pytest.raises(BundleError, match=f"^Cannot open the bundle .*{name}: {WORDS[kind]}"):
        opened(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no fifos here")
@pytest.mark.parametrize("kind", WORDS)
def test_special_files_are_not_opened(tmp_path: Path, kind: str, at_once: None) -> None:
    put(tmp_path / "file", kind)
    with pytest.raises(OSError, match=WORDS[kind]):
        open_plain(tmp_path / "file")


def test_a_thread_that_fails_in_its_own_way_passes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "m")

    def short_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("edgeinfer.bundle.checksums._Work._compare", short_of_memory)
    with pytest.raises(BundleError, match=r"could not be compared \(MemoryError\)"):
        Bundle.open(tmp_path / "m").check_contents()


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_the_cache_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    write_bundle(tmp_path / "m")
    time.sleep(0.1)  # files as young as this are not remembered
    before = os.umask(0)
    try:
        with Bundle.open(tmp_path / "m") as bundle:
            bundle.check_contents()
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "cache", *(tmp_path / "cache").rglob("*")) if path.is_dir()]
    assert made and all(path.stat().st_mode & 0o077 == 0 for path in made)
