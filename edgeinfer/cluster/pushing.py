"""Bundles that a node does not see: sent once, in pieces, and kept in its cache under their identity."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ..base.cache_dir import cache_root, make_directories
from ..base.files import PART
from ..base.units import format_size
from ..errors import DestinationError, EdgeInferError

PIECE_BYTES = 16 << 20
"""Bytes that go at a time."""
REMAINS_SECONDS = 3600.0
"""Age at which files of an interrupted push are deleted: each piece of an ongoing push renews it."""


async def pushed(ask: Callable[..., Awaitable[Any]], bundle: Path, say: Callable[[str], object]) -> str:
    """Return where a node has a bundle of this machine, which goes there unless it did before.

    Parameters
    ----------
    ask : runs a function on the node, with these arguments
    bundle : its directory here
    say : gets a sentence if it goes

    Raises
    ------
    EdgeInferError
        The node has no room for it, is lost, or has got other bytes; nothing is left there.
    """
    from ..bundle import HEADER_FILE, Bundle

    with Bundle.open(bundle) as opened:
        header, identity = (bundle / HEADER_FILE).read_bytes(), opened.identity
        sizes = {opened.weights_path.name: opened.weights_bytes,
                 **{name: entry.nbytes for name, entry in opened.files.items()}}
    if (there := await ask(kept, identity)) is not None:
        return str(there)
    say(format_size(nbytes := sum(sizes.values())))
    folder = await ask(begin, identity, header, nbytes)
    try:
        for name in sizes:
            for offset, data in _pieces(bundle / name):
                await ask(write, folder, name, offset, data)
        return str(await ask(finish, folder, identity))
    except BaseException:
        with contextlib.suppress(EdgeInferError):  # the node is lost
            await ask(drop, folder)
        raise


def _pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield offsets and bytes of a file; an empty one has one piece."""
    with open(path, "rb") as file:
        yield 0, file.read(PIECE_BYTES)
        while data := file.read(PIECE_BYTES):
            yield file.tell() - len(data), data


# -- on the node -----------------------------------------------------------------------------------------------------


def seen(source: str) -> bool:
    """Return whether a path is there."""
    return os.path.exists(source)


def kept(identity: str) -> str | None:
    """Return where a bundle is that was sent before."""
    from ..bundle import is_bundle

    return str(path) if is_bundle(path := _folder() / f"sent-{identity}") else None


def begin(identity: str, header: bytes, nbytes: int) -> str:
    """Make a hidden folder for a bundle with its header, and return its path; raises `DestinationError`."""
    from ..bundle import HEADER_FILE

    try:
        make_directories(folder := _folder())
        for old in folder.glob(f".sent-*{PART}"):
            if time.time() - old.stat().st_mtime > REMAINS_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        if (free := shutil.disk_usage(folder).free) < nbytes:
            raise DestinationError(f"The bundle has {format_size(nbytes)}, and {folder} has room for "
                                   f"{format_size(free)}; free some, or put the model at the same path there.")
        path = Path(tempfile.mkdtemp(PART, f".sent-{identity}.", folder))
        (path / HEADER_FILE).write_bytes(header)
    except OSError as error:
        raise _unwritten(error) from None
    return str(path)


def write(folder: str, name: str, offset: int, data: bytes) -> None:
    """Write a piece of a file; raises `DestinationError`."""
    try:
        with open(Path(folder, name), "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)
        os.utime(folder)
    except OSError as error:
        raise _unwritten(error) from None


def finish(folder: str, identity: str) -> str:
    """Compare a bundle with its checksums, and give it its name; raises `BundleError` for another one."""
    from ..bundle import Bundle
    from ..errors import BundleError

    with Bundle.open(folder) as bundle:
        bundle.verify()
        if bundle.identity != identity:
            raise BundleError("Another bundle came than was sent; start again.")
    target = _folder() / f"sent-{identity}"
    try:
        os.rename(folder, target)
    except OSError as error:
        drop(folder)
        if kept(identity) is None:  # or another push was faster
            raise _unwritten(error) from None
    return str(target)


def drop(folder: str) -> None:
    """Delete the received files."""
    shutil.rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    return cache_root() / "bundles"


def _unwritten(error: OSError) -> DestinationError:
    return DestinationError(f"The bundle cannot be kept in {_folder()}: {error.strerror or error}.")
