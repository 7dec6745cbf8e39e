"""A writer that leaves a complete bundle or nothing, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle import Bundle, BundleWriter, Quantisation
from edgeinfer.errors import BundleError, CheckpointError, DestinationError
from edgeinfer.quant import WeightType
from tests.helpers.bundles import CONFIG, write_bundle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "m")
    return tmp_path / "m"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_an_existing_destination_is_kept(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match=r"choose another name, or overwrite it \(--overwrite\)\."):
        write_bundle(path)
    (tmp_path / "notes").mkdir()
    with pytest.raises(DestinationError, match=r"notes exists and is not a bundle, so it is not overwritten; remove"):
        write_bundle(tmp_path / "notes", overwrite=True)
    assert names(tmp_path) == ["m", "notes"]


def test_overwriting_replaces_a_bundle_that_is_in_use(path: Path, tmp_path: Path) -> None:
    old = Bundle.open(path)
    before = old.weights.tobytes()
    with BundleWriter(path, CONFIG, Quantisation(), overwrite=True) as writer:
        writer.add("norm", WeightType("f32", 0, "plain"), (24,), bytes(96))
    assert list(Bundle.open(path).tensors) == ["norm"]
    assert old.weights.tobytes() == before
    assert names(tmp_path) == ["m"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted() -> Any:
        yield bytes(10)
        raise error

    with pytest.raises(error), BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer:
        writer.add("norm", WeightType("f32", 0, "plain"), (24,), interrupted())
    assert names(tmp_path) == []


def test_a_failed_overwrite_keeps_the_old_bundle(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source).name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(DestinationError, match=r"^Cannot write .*m: Input/output error\.$"):
        write_bundle(path, overwrite=True)
    assert names(tmp_path) == ["m"]
    Bundle.open(path).verify()


def test_wrong_amount_of_data(tmp_path: Path) -> None:
    with (
        pytest.raises(BundleError, match=r"tensor 'norm' was given 95 bytes; its shape and type need 96\."),
        BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer,
    ):
        writer.add("norm", WeightType("f32", 0, "plain"), (24,), bytes(95))
    with pytest.raises(BundleError, match="m is not open for writing"):
        writer.add("norm", WeightType("f32", 0, "plain"), (24,), bytes(96))
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["a/b", "weights.bin", "bundle.json", "twice"])
def test_names_of_further_files(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(BundleError, match=f"'{name}' cannot be the name of a further file in the bundle"),
        BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer,
    ):
        writer.add_file("twice", b"1")
        writer.add_file(name, b"2")
    assert names(tmp_path) == []


def test_a_file_to_copy_that_is_missing(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"^Cannot read .*absent\.json: No such file or directory\.$"),
        BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer,
    ):
        writer.copy_file(tmp_path / "absent.json")
    assert names(tmp_path) == []


def test_a_destination_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError, match=r"^Cannot write .*file/m: File exists\.$"):
        write_bundle(tmp_path / "file" / "m")


def test_no_room_on_the_disk(tmp_path: Path) -> None:
    with (
        pytest.raises(DestinationError, match=r"m needs 1000000\.00 TB, but its disk has only .* free; free"),
        BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer,
    ):
        writer.reserve(10**18)
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of one megabyte; skips where it cannot be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root on Linux")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


FULL = r"^The disk is full: .*m could not be written; free some space and try again\. Nothing was left behind\.$"


def test_the_disk_gets_full(small_disk: Path) -> None:
    with pytest.raises(DestinationError, match=FULL):
        write_bundle(small_disk / "m")
    assert names(small_disk) == []


def test_the_disk_gets_full_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DestinationError, match=FULL):
        write_bundle(tmp_path / "m")
    assert names(tmp_path) == []


def test_what_the_disk_refuses_while_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes go to the disk in a thread of their own, whose error is told once, and not again by the last fsync."""
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("edgeinfer.bundle.write_back.STEP_BYTES", 64)
    monkeypatch.setattr("edgeinfer.bundle.write_back._sync", full)
    with pytest.raises(DestinationError, match=FULL):
        write_bundle(tmp_path / "m")
    assert names(tmp_path) == []


def test_two_writers_at_once(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer:
        with pytest.raises(DestinationError, match=r"m is being written by another process; wait until it has"):
            write_bundle(tmp_path / "m")
        writer.add("norm", WeightType("f32", 0, "plain"), (24,), bytes(96))
    assert names(tmp_path) == ["m"]
    Bundle.open(tmp_path / "m").verify()


@pytest.mark.parametrize("text", ["", "999999999 1.00", f"{os.getpid()} 1.00", "nonsense"],
                         ids=["none", "other", "own", "nonsense"])
def test_the_lock_file_of_a_dead_process_is_no_obstacle(tmp_path: Path, text: str) -> None:
    (tmp_path / ".m.lock").write_text(text)
    for remains in (".m.partial", ".m.0123456789abcdef.partial", ".m.0123456789abcdef.old"):
        (tmp_path / remains).mkdir()
        (tmp_path / remains / "weights.bin").write_text("half")
    (tmp_path / ".m.x.0123456789abcdef.partial").mkdir()  # of another destination, m.x
    write_bundle(tmp_path / "m", overwrite=True)
    assert names(tmp_path) == [".m.x.0123456789abcdef.partial", "m"]
    Bundle.open(tmp_path / "m").verify()


def test_a_bundle_whose_replacement_was_killed_half_way_goes_back(path: Path, tmp_path: Path) -> None:
    path.rename(tmp_path / ".m.0123456789abcdef.old")
    with pytest.raises(DestinationError, match="m already exists"):
        write_bundle(path)
    assert names(tmp_path) == ["m"]
    Bundle.open(path).verify()


def test_writers_do_not_share_temporary_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without locks, as on some network file systems: two write at once, and the bundle is one of theirs, whole."""
    from edgeinfer.base import lock

    def none(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", none)
    said: list[str] = []
    monkeypatch.setattr(lock, "say", said.append)
    with BundleWriter(tmp_path / "m", CONFIG, Quantisation(), overwrite=True) as first:
        with BundleWriter(tmp_path / "m", CONFIG, Quantisation(), overwrite=True) as second:
            first.add("norm", WeightType("f32", 0, "plain"), (24,), bytes(96))
            second.add("norm", WeightType("f32", 0, "plain"), (24,), bytes([1]) * 96)
        assert Bundle.open(tmp_path / "m").weights[:96].tobytes() == bytes([1]) * 96
    bundle = Bundle.open(tmp_path / "m")
    bundle.verify()
    assert bundle.weights[:96].tobytes() == bytes(96)
    assert [name for name in names(tmp_path) if name != ".m.lock"] == ["m"]
    assert len(said) == 2 and said[0].startswith(f"The file system of {tmp_path} has no locks: other processes are not")


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / ".m.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(DestinationError, match=r"Cannot write .*m: Too many levels of symbolic links\."):
        write_bundle(tmp_path / "m")
    assert (tmp_path / "victim").read_text() == "kept"


def test_the_header_is_read_again_before_renaming(tmp_path: Path) -> None:
    with (
        pytest.raises(BundleError, match=r"config\.vocab_size is 0"),
        BundleWriter(tmp_path / "m", type(CONFIG)(**{**CONFIG.__dict__, "vocab_size": 0}), Quantisation()) as writer,
    ):
        writer.add("norm", WeightType("f32", 0, "plain"), (24,), bytes(96))
    assert names(tmp_path) == []


@pytest.mark.slow
def test_many_processes_and_one_stale_lock(tmp_path: Path) -> None:
    """However the processes meet, each writes the bundle as a whole or is told that another one does."""
    (tmp_path / ".m.lock").write_text("999999999 1.00")
    program = """
import sys
from pathlib import Path
from edgeinfer.errors import DestinationError
from tests.helpers.bundles import write_bundle

print("ready", flush=True)
sys.stdin.read()
for _ in range(20):
    try:
        write_bundle(Path(sys.argv[1]), overwrite=True)
    except DestinationError as error:
        assert "is being written by another process" in str(error), error
"""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", program, str(tmp_path / "m")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, cwd=root, text=True, **pipes) for _ in range(3)]
    for process in running:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.close()  # all at once
        process.stdin = None
    results = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], results
    assert names(tmp_path) == ["m"]
    Bundle.open(tmp_path / "m").verify()


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_no_part_of_a_bundle_is_not_deleted_with_it(tmp_path: Path, damaged: bool) -> None:
    write_bundle(tmp_path / "m")
    stray = tmp_path / "m" / ("inner" if damaged else "notes.txt")
    if damaged:
        (tmp_path / "m" / "bundle.json").write_text("{")
        stray.mkdir()
    else:
        stray.write_text("mine")
    with pytest.raises(DestinationError, match=f"also holds {stray.name}, which is not part of the bundle"):
        write_bundle(tmp_path / "m", overwrite=True)
    stray.rmdir() if damaged else stray.unlink()
    write_bundle(tmp_path / "m", overwrite=True)


def test_the_root_is_no_place() -> None:
    with pytest.raises(DestinationError, match="is not a place for a bundle"):
        write_bundle(Path("/"), overwrite=True)


@pytest.mark.skipif(sys.platform == "win32", reason="making links needs rights there")
def test_overwriting_a_link_replaces_what_it_leads_to(path: Path, tmp_path: Path) -> None:
    before = path.stat().st_ino
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(path)
    with pytest.raises(DestinationError, match="link already exists"):
        write_bundle(link)
    write_bundle(link, overwrite=True)
    assert link.is_symlink() and link.resolve() == path and path.stat().st_ino != before
    assert names(link.parent) == ["link"], "what is being written does not lie beside the link"
    (dangling := tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(DestinationError, match="dangling exists and is not a bundle"):
        write_bundle(dangling, overwrite=True)
    assert dangling.is_symlink() and not dangling.exists()
