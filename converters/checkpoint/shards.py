"""Files of a checkpoint that hold its tensors: one, or several that an index names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError

from .json_file import read_json
from .safe_path import checkpoint_file
from .safetensors_file import SafetensorsFile, SourceTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class TensorFile(Protocol):
    """A file with tensors, of whichever format."""

    path: Path
    tensors: dict[str, SourceTensor]
    aliases: dict[str, str]
    """Further names of its tensors."""

    def read(self, name: str, starts: Sequence[int], count: int) -> NDArray[np.float32]:
        """Read `count` elements from each of the elements `starts` on, as float32 of shape (len(starts), count)."""

    def close(self) -> None:
        """Close the file."""


def open_shards(path: Path) -> tuple[dict[str, TensorFile], dict[str, str]]:
    """Open model.safetensors, or all files that the index names; each tensor's file by name, and further names."""
    if checkpoint_file(path, INDEX_FILE):
        index = shard_index(path)
        names = sorted(set(index.values()))
    elif checkpoint_file(path, SINGLE_FILE, anywhere=True):
        index, names = {}, [SINGLE_FILE]
    else:
        raise no_weights(path)
    if missing := [name for name in names if checkpoint_file(path, name, anywhere=True) is None]:
        raise CheckpointError(f"{path / INDEX_FILE} names the file {missing[0]}, which is missing; download it again.")
    files: dict[str, TensorFile] = {}
    opened: list[SafetensorsFile] = []
    try:
        for name in names:
            opened.append(SafetensorsFile(path / name))
            for tensor in opened[-1].tensors:
                if tensor in files:
                    raise CheckpointError(f"The tensor {tensor} is both in {files[tensor].path} and in {path / name}.")
                files[tensor] = opened[-1]
        for tensor, name in index.items():
            shared = any(file.aliases.get(tensor) in files for file in opened)
            if files[tensor].path != path / name if tensor in files else not shared:
                raise CheckpointError(
                    f"{path / INDEX_FILE} says that {name} holds the tensor {tensor}, but it does not."
                )
        return files, further_names(files)
    except BaseException:
        for file in opened:
            file.close()
        raise


def further_names(files: dict[str, TensorFile]) -> dict[str, str]:
    """Names that the files' metadata give to stored tensors; one that is stored itself keeps its own elements.

    Tensors that share their elements are saved once, and the metadata say which name stands for which
    (``safetensors.torch.save_model``). Everything else in there is left alone.

    Raises
    ------
    CheckpointError
        Two files disagree.
    """
    aliases: dict[str, str] = {}
    for file in dict.fromkeys(files.values()):
        for name, other in file.aliases.items():
            if name not in files and other in files and aliases.setdefault(name, other) != other:
                raise CheckpointError(f"{file.path} calls {name:.80} another name of {other:.80}, but another file of "
                                      f"the checkpoint one of {aliases[name]:.80}; download it again.")
    return aliases


def shard_index(path: Path) -> dict[str, str]:
    """The index's map from tensor to file name; names with folders in them are refused."""
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX_FILE} has no weight_map.")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors", name):
            raise CheckpointError(
                f"{path / INDEX_FILE} names the file {name!r:.80}, which is not a plain safetensors file name."
            )
    return weight_map


def no_weights(path: Path) -> CheckpointError:
    """Return the error for a directory without safetensors, with the remedy if there are pickles."""
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        return CheckpointError(
            f"{path} has its weights only as a pickle ({pickles[0]}), which could run any code when it is loaded; "
            "save the model again with safetensors (transformers' save_pretrained does so) or download that version."
        )
    return CheckpointError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there.")
