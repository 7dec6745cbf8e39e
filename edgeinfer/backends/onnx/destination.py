"""Where an export goes: written into a hidden folder beside it, put into place when it is complete, or not at all.

The data of DST.onnx have a name of their own, with a part of their identity: the model that names them appears in one
step, whether or not another one was there, and never beside data that are not its own.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgeinfer.errors import DestinationError
from edgeinfer.files import sync_directory
from edgeinfer.lock import DestinationLock

CONFIG_FILE = "genai_config.json"
MODEL_FILE = "model.onnx"
"""In a folder for onnxruntime-genai."""
DIGITS = 12
"""Of the data's identity in their name."""


def data_name(model: str, identity: str) -> str:
    """Return the name of the data that belong to a model: ``tiny.0123456789ab.data`` beside ``tiny.onnx``."""
    return f"{Path(model).stem}.{identity[:DIGITS]}.data"


class Destination:
    """A file DST.onnx with its data, or a folder for onnxruntime-genai; a context manager.

    Raises
    ------
    DestinationError
        On entering: it exists and `overwrite` is not asked for, is no export, or another process writes it. Later: it
        cannot be written.
    """

    def __init__(self, path: Path, folder: bool, overwrite: bool):
        self.path = Path(os.path.realpath(path)) if overwrite else Path(os.path.abspath(path))
        self.is_folder, self._overwrite = folder, overwrite
        self._lock = DestinationLock(self.path)
        self.partial = self._beside("partial")
        """Where files are to be written, under their final names."""

    def __enter__(self) -> Destination:
        self._check()
        try:
            with self.writing():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self._lock.acquire():
                    self._clear_remains()
                self._refuse_existing()
                self.partial.mkdir()
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                with self.writing():
                    self._commit()
        finally:
            self._abandon()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say in one sentence why the destination cannot be written."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DestinationError(f"The disk is full: {self.path} could not be written; free some space and try "
                                       "again. Nothing was left behind.") from None
            raise DestinationError(f"Cannot write {self.path}: {error.strerror or error}.") from None

    def reserve(self, nbytes: int) -> None:
        """Refuse to start where the disk has no room for this many bytes."""
        free = shutil.disk_usage(self.partial).free
        if free < nbytes:
            raise DestinationError(f"{self.path} needs {nbytes / 1e6:.0f} MB, but its disk has only {free / 1e6:.0f} "
                                   "MB free; free some space or choose another place.")

    def _check(self) -> None:
        if not self.is_folder and (self.path.suffix != ".onnx" or not self.path.stem):
            raise DestinationError(f"{self.path} is no name for a model; it must end in .onnx.")
        if self.is_folder and self.path.suffix == ".onnx":
            raise DestinationError(f"{self.path} is the name of a file; with --for genai name a folder that is to be "
                                   "made.")
        self._refuse_existing()

    def _refuse_existing(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not self._overwrite:
            raise DestinationError(f"{self.path} already exists; choose another name, or use --overwrite.")
        if not self.is_folder and not self.path.is_file():
            raise DestinationError(f"{self.path} exists and is no file, so it is not overwritten; remove it first.")
        if self.is_folder and not (self.path / CONFIG_FILE).is_file():
            raise DestinationError(f"{self.path} exists and has no {CONFIG_FILE}, so it is not overwritten; remove it "
                                   "first.")
        if self.is_folder and (inner := [path.name for path in self.path.iterdir() if path.is_dir()]):
            raise DestinationError(f"{self.path} also holds the folder {inner[0]}, which is no part of an export, so "
                                   "it is not overwritten; move that elsewhere first.")

    def _commit(self) -> None:
        """Put what is complete into its place, the name that people know last."""
        for path in self.partial.iterdir():
            _sync(path)
        if self.is_folder:
            sync_directory(self.partial)
            self._replace_folder()
            sync_directory(self.path.parent)
            return
        model = self.partial / self.path.name
        data = [path for path in self.partial.iterdir() if path != model]
        for path in data:
            os.replace(path, self.path.with_name(path.name))
        sync_directory(self.path.parent)  # the model never without its data, even if power fails
        os.replace(model, self.path)
        sync_directory(self.path.parent)
        self._clear_data(keep={path.name for path in data})

    def _replace_folder(self) -> None:
        if not self.path.exists():
            os.rename(self.partial, self.path)
            return
        old = self._beside("old")
        os.rename(self.path, old)
        try:
            os.rename(self.partial, self.path)
        except BaseException:
            os.rename(old, self.path)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _clear_data(self, keep: set[str]) -> None:
        """Remove data of models that were at this place before."""
        ours = re.compile(rf"{re.escape(self.path.stem)}\.[0-9a-f]{{{DIGITS}}}\.data")
        for path in self.path.parent.iterdir():
            if ours.fullmatch(path.name) and path.name not in keep:
                with suppress(OSError):
                    path.unlink()

    def _clear_remains(self) -> None:
        """Remove what killed processes left; a folder that one of them was about to replace goes back."""
        ours = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{16}}\.(partial|old)")
        for path in sorted(self.path.parent.iterdir()):
            if ours.fullmatch(path.name):
                if path.suffix == ".old" and (path / CONFIG_FILE).is_file() and not os.path.lexists(self.path):
                    os.rename(path, self.path)
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def _beside(self, kind: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.{kind}")

    def _abandon(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        self._lock.release()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
