"""A bundle that is sent to a node: whole and once, or not at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec")
from edgeinfer.base.files import PART
from edgeinfer.bundle import Bundle
from edgeinfer.cluster import pushing
from edgeinfer.errors import BundleError, DestinationError
from edgeinfer.models import demo_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(pushing, "PIECE_BYTES", 1 << 20)
    return tmp_path / "bundles"


class Node:
    """Runs calls in this process, and may change them before."""

    def __init__(self, change: Callable[[Any, list[Any]], None] = lambda function, arguments: None):
        self.change, self.asked = change, list[str]()

    async def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.asked.append(function.__name__)
        self.change(function, changed := list(arguments))
        return function(*changed)

    def push(self) -> str:
        said = list[str]()
        found = asyncio.run(pushing.pushed(self.ask, demo_path(), said.append))
        assert len(said) == ("begin" in self.asked)
        return found


def test_it_goes_once_in_pieces(cache: Path) -> None:
    node = Node()
    path = node.push()
    with Bundle.open(demo_path()) as bundle:
        assert path == str(cache / f"sent-{bundle.identity}")
        pieces = [-(-size // (1 << 20)) for size in (bundle.weights_bytes, *(e.nbytes for e in bundle.files.values()))]
        assert node.asked.count("write") == sum(pieces) > len(pieces)
    assert {name: (demo_path() / name).read_bytes() for name in os.listdir(path)} == \
        {name: (Path(path) / name).read_bytes() for name in os.listdir(path)}
    again = Node()
    assert again.push() == path and again.asked == ["kept"]
    assert os.listdir(cache) == [Path(path).name]


def test_a_piece_that_changes_on_the_way_is_refused(cache: Path) -> None:
    def flip(function: Any, arguments: list[Any]) -> None:
        if function is pushing.write and arguments[2] == 1 << 20:
            arguments[3] = bytes([arguments[3][0] ^ 1]) + arguments[3][1:]

    with pytest.raises(BundleError, match=r"checksum|order"):
        Node(flip).push()
    assert not os.listdir(cache)


def test_a_push_that_breaks_off_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(function: Any, arguments: list[Any]) -> None:
        if function is pushing.write and arguments[2]:
            raise pushing._unwritten(OSError(28, "No space left on device"))

    with pytest.raises(DestinationError, match=r"cannot be kept in .*: No space left on device"):
        Node(full).push()
    assert not os.listdir(cache)
    monkeypatch.setattr(pushing.shutil, "disk_usage", lambda path: SimpleNamespace(free=9))
    with pytest.raises(DestinationError, match="has room for 9 B; free some"):
        Node().push()
    assert not os.listdir(cache)


def test_what_a_killed_front_left_is_deleted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Bundle.open(demo_path()) as bundle:
        identity, header = bundle.identity, (demo_path() / "bundle.json").read_bytes()
    old, new = (pushing.begin(identity, header, 0) for _ in range(2))
    os.utime(old, (1, 1))
    path = Node().push()
    assert sorted(os.listdir(cache)) == sorted((Path(new).name, Path(path).name)) and new.endswith(PART)
    with pytest.raises(BundleError, match="Another bundle came than was sent"):
        pushing.finish(path, "0" * 64)
