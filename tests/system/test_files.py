"""Replacing a file: whole or not at all, whoever is killed or writes at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.base import files
from edgeinfer.base.files import PART, replacement, working_directory

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="open files are named and removed otherwise there")

WRITER = """
import os, signal, sys
from edgeinfer.base.files import replacement
with replacement(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(path: Path, content: bytes) -> None:
    """Replace a file."""
    with replacement(path) as file:
        file.write(content)


def names(directory: Path) -> list[str]:
    """Return the names of the files in a directory."""
    return sorted(path.name for path in directory.iterdir())


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    write(path, b"old")
    done = subprocess.run([sys.executable, "-c", WRITER, str(path)], check=False)
    assert done.returncode < 0 and len(names(tmp_path)) == 2
    assert path.read_bytes() == b"old"
    write(path, b"new")
    assert names(tmp_path) == ["cache"] and path.read_bytes() == b"new"


def test_a_concurrent_writer_keeps_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with replacement(path) as first:
        first.write(b"first")
        write(path, b"second")
        assert len(names(tmp_path)) == 2 and path.read_bytes() == b"second"
    assert names(tmp_path) == ["cache"] and path.read_bytes() == b"first"


def test_files_of_others_stay(tmp_path: Path) -> None:
    others = [".cache.settings", ".cache.partial", f"cache.x{PART}", f".other.x{PART}"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    write(tmp_path / "cache", b"new")
    assert names(tmp_path) == sorted([*others, "cache"])


def test_what_was_tidied_away_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, met = files._ours, []

    def tidied_once(handle: int) -> bool:
        if not met:
            met.extend(names(tmp_path))
            os.unlink(tmp_path / met[0])
        return ours(handle)

    monkeypatch.setattr(files, "_ours", tidied_once)
    write(tmp_path / "cache", b"new")
    assert met and names(tmp_path) == ["cache"] and (tmp_path / "cache").read_bytes() == b"new"


def test_an_error_leaves_the_older_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    write(path, b"old")
    with pytest.raises(KeyboardInterrupt), replacement(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["cache"] and path.read_bytes() == b"old"


@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_what_is_no_plain_file_is_not_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    with pytest.raises(OSError, match="directory" if kind == "directory" else "it is a fifo"), replacement(path):
        pass
    assert names(tmp_path) == ["cache"]


def test_directories_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    (tmp_path / ".f16-dead" / "m").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    with working_directory(tmp_path, ".f16-") as one:
        (one / "file").touch()
        with working_directory(tmp_path, ".f16-") as other:
            assert {path.name for path in tmp_path.iterdir()} == {"kept", one.name, other.name}
        assert (one / "file").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
