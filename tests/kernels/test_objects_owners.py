"""A cache of kernels that others could change: it is not used, or compiled again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeinfer.errors import DestinationError
from edgeinfer.kernels import Kernels, find_set
from tests.helpers.kernel_builds import ISA, NAMES, Builds, cached, flip_a_bit, refused

posix = pytest.mark.skipif(os.name == "nt", reason="files have no such owners")
as_root = pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="giving files away needs root")


def open_file(directory: Path) -> str:
    (directory / "quantize.o").chmod(0o666)
    return "quantize.o can be written by others"


def given_file(directory: Path) -> str:
    os.chown(directory / "quantize.o", 12345, 12345)
    return "quantize.o belongs to another user (12345)"


def link_in_place_of_a_file(directory: Path) -> str:
    (directory / "quantize.o").rename(directory / "elsewhere")
    (directory / "quantize.o").symlink_to("elsewhere")
    return "Too many levels of symbolic links: quantize.o"


@posix
@pytest.mark.parametrize("spoil", [open_file, pytest.param(given_file, marks=as_root), link_in_place_of_a_file])
def test_an_object_that_others_could_change_is_compiled_again(
    builds: Builds, tmp_path: Path, spoil: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    Kernels(ISA).addresses(NAMES)
    started, why = builds.started, spoil(cached(tmp_path))
    Kernels(ISA).addresses(NAMES)
    assert builds.started > started
    assert capsys.readouterr().err == f"edgeinfer: kernels in {cached(tmp_path)} cannot be used ({why}); they are " \
        "compiled again.\n"
    status = (cached(tmp_path) / "quantize.o").lstat()
    assert (status.st_uid, status.st_mode) == (os.geteuid(), 0o100600)


def open_set(directory: Path) -> str:
    directory.chmod(0o777)
    return f"{directory} can be written by others"


def open_directory_above(directory: Path) -> str:
    directory.parents[1].chmod(0o757)
    return f"{directory.parents[1]} can be written by others"


def given_directory(directory: Path) -> str:
    os.chown(directory.parent, 12345, 12345)
    return f"{directory.parent} belongs to another user (12345)"


def link_of_another(directory: Path) -> str:
    directory.rename(directory.parent / "elsewhere")
    directory.symlink_to("elsewhere")
    os.chown(directory, 12345, 12345, follow_symlinks=False)
    return f"{directory} belongs to another user (12345)"


def link_into_an_open_directory(directory: Path) -> str:
    (open_one := directory.parents[2] / "open").mkdir()
    open_one.chmod(0o777)
    directory.rename(open_one / "set")
    directory.symlink_to(open_one / "set")
    return f"{open_one} can be written by others"


@pytest.mark.slow(keep=3)
@posix
@pytest.mark.parametrize("spoil", [
    open_set, open_directory_above, pytest.param(given_directory, marks=as_root),
    pytest.param(link_of_another, marks=as_root), link_into_an_open_directory,
])
def test_a_cache_that_others_could_change_is_not_used(
    builds: Builds, tmp_path: Path, spoil: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    Kernels(ISA).addresses(NAMES)
    directory = cached(tmp_path)
    started, why = builds.started, spoil(directory)
    flip_a_bit(directory / "quantize.o")  # nobody looks
    assert Kernels(ISA).addresses(NAMES) and builds.started > started
    assert capsys.readouterr().err == refused(f"{why}, and they are code")
    with pytest.raises(DestinationError, match=re.escape(why)):
        find_set(ISA)


@posix
def test_links_and_sticky_directories_of_our_own_are_fine(builds: Builds, tmp_path: Path) -> None:
    Kernels(ISA).addresses(NAMES)
    directory, started = cached(tmp_path), builds.started
    (sticky := tmp_path / "sticky").mkdir()
    sticky.chmod(0o1777)
    directory.rename(sticky / "set")
    directory.symlink_to("../../sticky/set")
    Kernels(ISA).addresses(NAMES)
    assert builds.started == started
