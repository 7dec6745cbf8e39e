"""Destination of an export: a model with its data beside it, or a folder for onnxruntime-genai.

The data of DST.onnx have a file name of their own that contains a part of their identity: the model that names them
appears in one step, whether or not an older one existed, and never beside data that are not its own.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from edgeinfer.base.atomic_write import Destination
from edgeinfer.base.files import sync_directory
from edgeinfer.errors import DestinationError

CONFIG_FILE = "genai_config.json"
MODEL_FILE = "model.onnx"
"""Name of the model in a folder for onnxruntime-genai."""
DIGITS = 12
"""Digits of the data's identity in the file's name."""


def data_name(model: str, identity: str) -> str:
    """Return the name of the data that belong to a model: ``tiny.0123456789ab.data`` beside ``tiny.onnx``."""
    return f"{Path(model).stem}.{identity[:DIGITS]}.data"


class ExportDestination(Destination):
    """A file DST.onnx with its data, or a folder; files are written into `folder` under their final names.

    Raises
    ------
    DestinationError
        Its name is none for a model or folder. Later, as every `Destination`.
    """

    kind, mark, permission = "an export", CONFIG_FILE, "use --overwrite"

    def __init__(self, path: str | Path, folder: bool, overwrite: bool):
        super().__init__(path, overwrite)
        self.is_folder = folder
        if not folder and (self.path.suffix != ".onnx" or not self.path.stem):
            raise DestinationError(f"{self.path} is not a valid name for a model; it must end in .onnx.")
        if not folder and any("\ud800" <= character <= "\udfff" for character in self.path.stem):
            raise DestinationError(f"{self.path} has a name that is not UTF-8, which a model needs to name its data; "
                                   "choose another name.")
        if folder and self.path.suffix == ".onnx":
            raise DestinationError(f"{self.path} is the name of a file; with --for genai name a folder that is to be "
                                   "made.")

    def _objection(self) -> str | None:
        if not self.is_folder:
            if self.path.is_file():
                return None
            return "exists and is not a file, so it is not overwritten; remove it first."
        if not (self.path / CONFIG_FILE).is_file():
            return f"exists and has no {CONFIG_FILE}, so it is not overwritten; remove it first."
        if inner := [path.name for path in self.path.iterdir() if path.is_dir()]:
            return (f"also holds the folder {inner[0]}, which is not part of an export, so it is not overwritten; move "
                    "that elsewhere first.")
        return None

    def _commit(self) -> None:
        for path in self.folder.iterdir():
            _sync(path)
        if self.is_folder:
            self._replace()
            return
        model = self.folder / self.path.name
        data = [path for path in self.folder.iterdir() if path != model]
        for path in data:
            os.replace(path, self.path.with_name(path.name))
        sync_directory(self.path.parent)  # the model never without its data, even if power fails
        os.replace(model, self.path)
        sync_directory(self.path.parent)
        self._clear_data(keep={path.name for path in data})

    def _clear_data(self, keep: set[str]) -> None:
        """Remove data of models that were written here before."""
        ours = re.compile(rf"{re.escape(self.path.stem)}\.[0-9a-f]{{{DIGITS}}}\.data")
        for path in self.path.parent.iterdir():
            if ours.fullmatch(path.name) and path.name not in keep:
                with suppress(OSError):
                    path.unlink()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
