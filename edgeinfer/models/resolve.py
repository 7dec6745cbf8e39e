"""From a name to a bundle or a checkpoint: a directory, a GGUF file, a known name, a model of the hub."""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial
from pathlib import Path

from edgeinfer import converters

from ..base.progress import OnProgress
from ..bundle import FORMAT_VERSION, is_bundle
from ..errors import CheckpointError, ModelNotFoundError
from .cached import cached_bundle, convert_into
from .names import DEMO, HUB_FILE, KNOWN_NAMES, OLLAMA, demo_path, is_hub_id, is_model, unknown_name
from .storage import AS_IT_IS, Storage, stored_so
from .stores import in_stores


def resolve(model: str | Path, progress: OnProgress | None = None, convert: bool = True, storage: Storage = AS_IT_IS
            ) -> Path:
    """Return the bundle that a user means.

    A directory goes before a known name if it holds a model, and a known name before the hub. A checkpoint is converted
    once into the user's cache and again when its files change; a model of the hub is downloaded and converted once.

    Parameters
    ----------
    model : a bundle directory, a checkpoint directory, a GGUF file (also ``ollama:NAME[:TAG]`` and
        ``hf:OWNER/REPO[:TYPE]``), a known name (``demo``), or an id on the hub (``owner/name``)
    progress : called during downloads and conversions
    convert : whether a checkpoint may be converted now; False finds bundles and earlier conversions only
    storage : how a checkpoint is stored when it is converted; a bundle that is stored otherwise is refused

    Raises
    ------
    ModelNotFoundError
        There is no such model; the message has the nearest names.
    CheckpointError, DestinationError
        A checkpoint cannot be converted.
    UsageError
        For an unknown type or group size, or a bundle that is stored otherwise.
    """
    name = os.fspath(model)
    if storage.asked:
        from ..graph import requested_types

        requested_types(*storage.of_checkpoint)  # or it is refused
    if file := gguf_path(name, progress, download=convert, storage=storage):
        return _from_gguf(file, name, progress, convert, storage)
    path = Path(name).expanduser()
    known = name == DEMO or name in KNOWN_NAMES
    if path.exists() and not (known and not is_model(path)):
        return _from_path(path, progress, convert, storage)
    if name == DEMO:
        return stored_so(demo_path(), storage)
    if known:
        return _from_hub(KNOWN_NAMES[name], progress, convert, storage)
    if is_hub_id(name):
        return _from_hub(name, progress, convert, storage)
    raise ModelNotFoundError(unknown_name(name))


def checkpoint_path(source: str | Path, progress: OnProgress | None = None, storage: Storage = AS_IT_IS) -> Path:
    """Return the checkpoint that a user means: a directory, a GGUF file, a known name, or a model of the hub.

    Raises
    ------
    ModelNotFoundError, CheckpointError
        There is no such checkpoint, or it cannot be downloaded.
    """
    name = os.fspath(source)
    if file := gguf_path(name, progress, storage=storage):
        return file
    path = Path(name).expanduser()
    repo_id = KNOWN_NAMES.get(name, name)
    if name == DEMO and not path.exists():
        raise CheckpointError(f"{DEMO} is a bundle already, embedded in the package: run it, or copy {demo_path()}.")
    if path.exists() and not (name in KNOWN_NAMES and not is_model(path)):
        return path
    if name not in KNOWN_NAMES and not is_hub_id(name):
        raise ModelNotFoundError(unknown_name(name))
    return converters.fetch(repo_id, progress=progress and partial(progress, "download"))


def gguf_path(name: str, progress: OnProgress | None = None, download: bool = True, storage: Storage = AS_IT_IS
              ) -> Path | None:
    """Return the GGUF file that a name in a store stands for; None if the name means something else.

    A bare name that is not one of edgeinfer's is looked up in the stores of ollama and LM Studio, and which has it is
    said. ``ollama:NAME[:TAG]`` is found where ollama keeps it, ``hf:OWNER/REPO[:TYPE]`` is downloaded once, if it may
    be; without a type the best one that fits is taken, and said.

    Raises
    ------
    ModelNotFoundError, CheckpointError
        The store has no such model, or it cannot be read or downloaded.
    """
    if Path(name).expanduser().exists():
        return None
    if not name.startswith((OLLAMA, HUB_FILE)):
        return None if name == DEMO or name in KNOWN_NAMES else in_stores(name)
    if name.startswith(OLLAMA):
        return converters.ollama_file(name[len(OLLAMA) :])
    from edgeinfer.memory_planner import process_budget

    room, asked = storage.budget_bytes or process_budget(), name[len(HUB_FILE) :]
    if not download:
        return converters.cached_gguf(asked, room, anew=storage.weights is not None)
    return converters.fetch_gguf(asked, progress and partial(progress, "download"), room,
                                 anew=storage.weights is not None)


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a name means, in a store or as a path; None if it means something else.

    Nothing is downloaded; raises as `gguf_path`.
    """
    if file := gguf_path(name, download=False):
        return file
    path = Path(name).expanduser()
    return path if path.is_file() and converters.is_gguf(path) else None


def _from_path(path: Path, progress: OnProgress | None, convert: bool, storage: Storage) -> Path:
    if path.is_file():
        from edgeinfer.converters import is_gguf

        if is_gguf(path):
            return _from_gguf(path, str(path), progress, convert, storage)
    if not path.is_dir():
        from ..base.files import refuse_special

        what = "a file"
        try:
            refuse_special(path, path.stat())
        except OSError as error:
            what = str(error.strerror).removeprefix("it is ")
        raise ModelNotFoundError(f"{path} is {what}; MODEL is the directory of a bundle or of a checkpoint, or a GGUF "
                                 "file.")
    if is_bundle(path):
        return stored_so(path, storage)
    if not is_model(path):
        raise ModelNotFoundError(
            f"{path} is neither a bundle (it has no bundle.json) nor a checkpoint (it has no config.json)."
        )
    path = path.resolve()
    if not convert:  # reports here why it cannot be converted, because there is nothing to find
        from edgeinfer.converters import open_checkpoint

        open_checkpoint(path).close()
    stored = _stored_as(storage, anew=storage.asked and _is_quantised(path))
    origin, stamps = _digest(str(path), *stored), _digest(*_file_stamps(path))
    of_format_1, name = _digest(str(path), *stored, "1"), _plain_name(path.name)
    changed = [f"*-{origin}-*-v{version}" for version in range(1, FORMAT_VERSION + 1)] + [f"*-{of_format_1}-*"]
    return cached_bundle(str(path), f"{name}-{origin}-{stamps}",
                         lambda target: convert_into(path, target, progress, storage, str(path)), convert,
                         f"{name}-{of_format_1}-{stamps}", changed, progress)


def _from_gguf(path: Path, model: str, progress: OnProgress | None, convert: bool, storage: Storage) -> Path:
    """Find or make the bundle of a GGUF file, in which each weight is as the file has it unless a type is requested."""
    path, label = converters.gguf_origin(path), model.rpartition("/")[2].removesuffix(".gguf")
    parts = [(part, part.stat()) for part in converters.gguf_parts(path) if part.exists()]
    asked: tuple[str | None, int | None] = storage.of_checkpoint if storage.weights else (None, storage.group_size)
    origin = _digest(str(path), "gguf", *(str(value) for value in asked if storage.asked))
    stamps = _digest(*(f"{p.name}:{s.st_size}:{s.st_mtime_ns}" for p, s in parts))
    if not convert:  # reports here why it cannot be converted, because there is nothing to find
        converters.open_checkpoint(path).close()
    said = model if Path(model).exists() else f"{model} ({path})"
    return cached_bundle(model, f"{_plain_name(label)}-{origin}-{stamps}",
                         lambda target: convert_into(path, target, progress, storage, said), convert,
                         changed=[f"*-{origin}-*-v{version}" for version in range(1, FORMAT_VERSION + 1)],
                         progress=progress, ending=f"{origin}-{stamps}")


def _from_hub(repo_id: str, progress: OnProgress | None, convert: bool, storage: Storage) -> Path:
    """Find or make the bundle of a hub model; one that is there is used without asking the hub for news."""
    name = f"{_plain_name(repo_id)}-{_digest(repo_id, *_stored_as(storage, anew=storage.asked))}"
    return cached_bundle(repo_id, name,
                         lambda target: convert_into(repo_id, target, progress, storage, repo_id, hub=True), convert,
                         format_1=name, progress=progress)


def _stored_as(storage: Storage, anew: bool) -> tuple[str, ...]:
    """Return the types as they appear in the name of a checkpoint's bundle; `anew`: possibly not those of the
    checkpoint.
    """
    weights, group_size = storage.of_checkpoint
    own = [] if storage.weights else ["own"]  # of which a quantised checkpoint refuses a group size
    return weights, str(group_size), *(["anew", *own] if anew else [])


def _is_quantised(path: Path) -> bool:
    """Return whether the config of a checkpoint says that its weights are quantised."""
    from ..graph import is_quantised

    return is_quantised(converters.read_json(path / "config.json"))


def _file_stamps(directory: Path) -> list[str]:
    """Return the name, size and time of the checkpoint's files, which change when a file does."""
    from ..text import FOLDER

    stamps = []
    for path in (*sorted(directory.iterdir()), *sorted(directory.glob(f"{FOLDER}/*.jinja"))):
        if path.is_file():
            status = path.stat()
            stamps.append(f"{path.name}:{status.st_size}:{status.st_mtime_ns}")
    return stamps


def stamped_name(checkpoint: Path) -> str:
    """Return a name for the conversion of a checkpoint or GGUF file, which changes when its files do."""
    path = checkpoint.resolve()
    if path.is_dir():
        stamps = _file_stamps(path)
    else:
        from edgeinfer.converters import gguf_parts

        stamps = [f"{part.name}:{part.stat().st_size}:{part.stat().st_mtime_ns}" for part in gguf_parts(path)]
    return f"{_plain_name(path.name.removesuffix('.gguf'))}-{_digest(str(path))}-{_digest(*stamps)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _plain_name(name: str) -> str:
    """Return a name that every file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "--", name).strip(".-")[:80] or "model"
