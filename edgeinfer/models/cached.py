"""Bundles in the user's cache: found, made by one process at a time, and made again where they cannot be opened."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from ..base import cache_dir
from ..base.lock import DestinationLock
from ..base.process import say
from ..base.progress import OnProgress
from ..bundle import FORMAT_VERSION, Bundle, is_bundle
from ..errors import BundleError, ModelNotFoundError
from .storage import Storage


def cached_bundle(
    model: str, name: str, make: Callable[[Path], None], may_make: bool = True, format_1: str = "",
    changed: Iterable[str] = (), progress: OnProgress | None = None, ending: str = "",
) -> Path:
    """Return a bundle in the user's cache; make it where it is absent or this version cannot open it.

    Of several processes that need it at once, one makes it and the others wait for it.

    Parameters
    ----------
    model : source of the bundle, for messages
    name : the directory's name, to which the version of the format is added
    make : writes a bundle to a path, over one that is there
    may_make : False finds a bundle that can be opened, of an older format too
    format_1 : the directory's name in format 1, if that was another
    changed : patterns of the names of bundles that a new one replaces, because they were made of other files
    progress : called while another process makes it
    ending : with which the names of all bundles of the same files end, `name` among them; one of them is as good

    Raises
    ------
    ModelNotFoundError
        There is none that can be opened, and none may be made.
    """
    directory = cache_dir.cache_root() / "bundles"
    target, *older = (directory / f"{name}-v{version}" for version in range(FORMAT_VERSION, 0, -1))
    made, target = target, _of_same_files(directory, ending) or target
    older += [directory / format_1] if format_1 else []
    usable, _ = _usable((target, *older), 1 if may_make else len(older) + 1, progress)
    if usable:
        return usable
    if not may_make:
        raise ModelNotFoundError(f"{model} has not been converted yet; 'edgeinfer run' or 'edgeinfer convert' does it.")
    turn = DestinationLock(directory / f"{ending or target.name}.making")
    with cache_dir.cache_errors(directory):
        cache_dir.make_directories(directory)
        turn.acquire(_Waiting(model, progress))
    try:
        target = _of_same_files(directory, ending) or made  # another process may have made it meanwhile
        usable, reason = _usable((target, *older), 1, progress)
        if usable:
            return usable
        if reason:
            say(f"{model} {reason}; converting it again.")
        make(target)
        for path in {*older, *(path for pattern in changed for path in directory.glob(pattern))} - {target}:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        turn.release()
    return target


def _of_same_files(directory: Path, ending: str) -> Path | None:
    """Return a bundle that was made of the same files, perhaps under another name."""
    return next(directory.glob(f"*-{ending}-v{FORMAT_VERSION}"), None) if ending else None


def _usable(paths: tuple[Path, ...], n_allowed: int, progress: OnProgress | None = None) -> tuple[Path | None, str]:
    """Return the first bundle if it can be opened and is among the first n, and otherwise why it is not taken."""
    for number, path in enumerate(paths):
        if not is_bundle(path):
            continue
        try:
            with Bundle.open(path) as bundle:
                if number < n_allowed:
                    if n_allowed == 1:
                        bundle.check_contents(progress=progress and partial(progress, "load"))  # or convert again
                    return path, ""
                return None, f"was converted by {bundle.header.made_by} to bundle format {bundle.header.version}"
        except BundleError as error:
            reason = f"has an unusable bundle ({str(error).rstrip('.')})"
            if n_allowed == 1:
                return None, reason
    return None, ""


class _Waiting:
    """Reports that another process is converting the model: a sentence once, then progress."""

    def __init__(self, model: str, progress: OnProgress | None):
        self._model, self._progress, self._said = model, progress, False

    def __call__(self) -> None:
        if not self._said:
            say(f"Another process is converting {self._model}; waiting for it.")
            self._said = True
        if self._progress:
            self._progress("wait", 0, 0, "")


def convert_into(source: str | Path, target: Path, progress: OnProgress | None, storage: Storage, origin: str,
                 hub: bool = False) -> None:
    """Convert into the cache, as `edgeinfer convert` does, and report the same."""
    from ..converters import convert_apart

    for remark in convert_apart(source, target, storage.weights, storage.group_size, hub=hub, origin=origin,
                                progress=progress):
        say(remark)
