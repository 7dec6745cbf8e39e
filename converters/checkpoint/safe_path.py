"""Files of a checkpoint directory: plain ones, and links only if they stay inside the checkpoint."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edgeinfer.errors import CheckpointError

_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def checkpoint_file(directory: Path, name: str, *, anywhere: bool = False) -> Path | None:
    """Return the path of a checkpoint's file, or None.

    A checkpoint may come from a stranger, and its tokenizer, licence and card are copied as they are: a link among them
    could put any file of this user into a bundle that is then passed on. So links must end within the checkpoint, or
    in the hub's cache, of which all files are links, among the blobs of the model or those that its models share.

    Parameters
    ----------
    directory : Path
    name : str
        A name without folders.
    anywhere : bool
        A link may lead anywhere: people keep large weights on another disk. Of those nothing is copied but the numbers
        of tensors whose names and shapes are the model's, in a file that is safetensors from first to last byte.

    Raises
    ------
    CheckpointError
        A link leads elsewhere or nowhere, or this is not a plain file: a pipe would be waited for, a device has no end.
    """
    path = directory / name
    if not os.path.lexists(path):
        return None
    try:
        target = path.resolve(strict=True)
        kind = stat.S_IFMT(target.stat().st_mode)
        roots = _roots(directory.resolve(strict=True))
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        why = getattr(error, "strerror", None) or "links that lead in a circle"
        raise CheckpointError(f"Cannot read {path}: {why}; copy the file again.") from None
    if kind != stat.S_IFREG:
        raise CheckpointError(f"{path} is {_KINDS.get(kind, 'something')} instead of a plain file; remove it, or put "
                              "the checkpoint's file there.")
    if not anywhere and not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{path} is a link to {target}, which lies outside the checkpoint; if it belongs there, "
                              "copy the file itself.")
    return path


def _roots(directory: Path) -> list[Path]:
    """Return where links of a directory may end; its own links are resolved, those of the roots are not."""
    repository = directory.parent.parent  # of the hub's cache: models--owner--name/snapshots/COMMIT
    if directory.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return [directory]
    return [directory, repository / "blobs", repository.parent / "blobs"]
