"""From what a user calls a model to a bundle on disk: a directory, a GGUF file, a known name, a model of the hub."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import cache
from .bundle import FORMAT_VERSION, Bundle, is_bundle
from .dataclass import dataclass
from .errors import BundleError, CheckpointError, DestinationError, ModelNotFoundError, UsageError
from .lock import DestinationLock
from .process import say

if TYPE_CHECKING:
    from .graph import Shape

Progress = Callable[[str, int, int, str], None]
"""Called with (stage, done, total, item); the stages are download, convert, compile and load."""

DEMO = "demo"
KNOWN_NAMES = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
"""Short names of models on the hub."""
OLLAMA, HUB_FILE = "ollama:", "hf:"
"""Beginnings of the names of GGUF files that lie in ollama's store, and on the hub."""
LISTING, SHOWN_NAMES = "edgeinfer plan --list", 4
"""The command that lists all names, and how many a message has."""
WEIGHTS, GROUP_SIZE = "q4", 32
"""How a checkpoint is stored when it is converted on the way; `edgeinfer convert` offers the others."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)


def demo_path() -> Path:
    """Return the bundle that is embedded in the package."""
    return Path(__file__).parent / "demo" / "bundle"


@dataclass(frozen=True)
class Storage:
    """How weights are to be stored where something is converted on the way."""

    weights: str | None = None
    """Type of the matrices; None leaves those of a GGUF file as they are, and is q4 for others."""
    group_size: int | None = None
    """Weights per scale; by default 32."""
    budget_bytes: int | None = None
    """Most memory of the run, by which one of several files of a model on the hub is chosen; None: what there is."""

    @property
    def of_checkpoint(self) -> tuple[str, int]:
        """Type and group size of a checkpoint's weights."""
        return self.weights or WEIGHTS, self.group_size or GROUP_SIZE

    @property
    def asked(self) -> bool:
        """Whether anything is said."""
        return self.weights is not None or self.group_size is not None

    @property
    def words(self) -> tuple[str, ...]:
        """What is asked for."""
        groups = f"groups of {self.group_size}" if self.group_size else ""
        return tuple(filter(None, (self.weights or "", groups)))


AS_IT_IS = Storage()


def resolve(model: str | Path, progress: Progress | None = None, convert: bool = True, storage: Storage = AS_IT_IS
            ) -> Path:
    """Return the bundle that a user means.

    A directory goes before a known name if it holds a model, and a known name before the hub. A checkpoint is
    converted once into the user's cache and again when its files change; a model of the hub is downloaded and
    converted once.

    Parameters
    ----------
    model : a bundle directory, a checkpoint directory, a GGUF file (also ``ollama:NAME[:TAG]`` and
        ``hf:OWNER/REPO[:TYPE]``), a known name (``demo``), or an id on the hub (``owner/name``)
    progress : told of downloads and conversions
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
        from .graph import requested_types

        requested_types(*storage.of_checkpoint)  # or it is refused
    if file := gguf_path(name, progress, download=convert, storage=storage):
        return _from_gguf(file, name, progress, convert, storage)
    path = Path(name).expanduser()
    known = name == DEMO or name in KNOWN_NAMES
    if path.exists() and not (known and not _is_model(path)):
        return _from_path(path, progress, convert, storage)
    if name == DEMO:
        return _stored_so(demo_path(), storage)
    if known:
        return _from_hub(KNOWN_NAMES[name], progress, convert, storage)
    if is_hub_id(name):
        return _from_hub(name, progress, convert, storage)
    raise ModelNotFoundError(_unknown(name))


def checkpoint_path(source: str | Path, progress: Progress | None = None, storage: Storage = AS_IT_IS) -> Path:
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
    if path.exists() and not (name in KNOWN_NAMES and not _is_model(path)):
        return path
    if name not in KNOWN_NAMES and not is_hub_id(name):
        raise ModelNotFoundError(_unknown(name))
    from .converters import fetch

    return fetch(repo_id, progress=progress and partial(progress, "download"))


def gguf_path(name: str, progress: Progress | None = None, download: bool = True, storage: Storage = AS_IT_IS
              ) -> Path | None:
    """Return the GGUF file that a name in a store stands for; None where the name means something else.

    ``ollama:NAME[:TAG]`` is found where ollama keeps it, ``hf:OWNER/REPO[:TYPE]`` is downloaded once, if it may be;
    without a type the best one that fits is taken, and said.

    Raises
    ------
    ModelNotFoundError, CheckpointError
        The store has no such model, or it cannot be read or downloaded.
    """
    if Path(name).exists() or not name.startswith((OLLAMA, HUB_FILE)):
        return None
    from .converters import cached_gguf, fetch_gguf, ollama_file

    if name.startswith(OLLAMA):
        return ollama_file(name[len(OLLAMA) :])
    from .memory_planner import process_budget

    room, asked = storage.budget_bytes or process_budget(), name[len(HUB_FILE) :]
    if not download:
        return cached_gguf(asked, room, anew=storage.weights is not None)
    return fetch_gguf(asked, progress and partial(progress, "download"), room, anew=storage.weights is not None)


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a name means, in a store or as a path; None where it means something else.

    Nothing is downloaded; raises as `gguf_path`.
    """
    from .converters import is_gguf

    if file := gguf_path(name, download=False):
        return file
    path = Path(name).expanduser()
    return path if path.is_file() and is_gguf(path) else None


def is_hub_id(name: str) -> bool:
    """Return whether this can only mean a model of the hub: a path into a directory that is there does not."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).parent.is_dir()


def _is_model(path: Path) -> bool:
    """Whether the directory looks like a bundle or a checkpoint."""
    return is_bundle(path) or (path / "config.json").is_file()


def _stored_so(bundle: Path, storage: Storage) -> Path:
    """Return a bundle; raises `UsageError` where its weights are stored otherwise than was asked for."""
    if storage.asked:
        with Bundle.open(bundle) as opened:
            own = opened.quantisation
        if (storage.weights or own.weights, storage.group_size or own.group_size) != (own.weights, own.group_size):
            raise UsageError(
                f"{bundle} is a bundle with weights in {own.weights}, groups of {own.group_size}, and runs as it is "
                f"stored, not in {' with '.join(storage.words)}; convert the "
                "checkpoint or GGUF file that it was made of anew, or leave the type out.")
    return bundle


def _from_path(path: Path, progress: Progress | None, convert: bool, storage: Storage) -> Path:
    if path.is_file():
        from .converters import is_gguf

        if is_gguf(path):
            return _from_gguf(path, str(path), progress, convert, storage)
    if not path.is_dir():
        from .files import refuse_special

        what = "a file"
        try:
            refuse_special(path, path.stat())
        except OSError as error:
            what = str(error.strerror).removeprefix("it is ")
        raise ModelNotFoundError(f"{path} is {what}; MODEL is the directory of a bundle or of a checkpoint, or a GGUF "
                                 "file.")
    if is_bundle(path):
        return _stored_so(path, storage)
    if not _is_model(path):
        raise ModelNotFoundError(
            f"{path} is neither a bundle (it has no bundle.json) nor a checkpoint (it has no config.json)."
        )
    path = path.resolve()
    if not convert:  # what cannot be converted is said here, for there is nothing to find
        from .converters import open_checkpoint

        open_checkpoint(path).close()
    stored = _stored_as(storage, anew=storage.asked and _is_quantised(path))
    origin, stamps = _digest(str(path), *stored), _digest(*_file_stamps(path))
    of_format_1, name = _digest(str(path), *stored, "1"), _plain_name(path.name)
    changed = [f"*-{origin}-*-v{version}" for version in range(1, FORMAT_VERSION + 1)] + [f"*-{of_format_1}-*"]
    return cached_bundle(str(path), f"{name}-{origin}-{stamps}",
                         lambda target: _convert(path, target, progress, storage, str(path)), convert,
                         f"{name}-{of_format_1}-{stamps}", changed, progress)


def _from_gguf(path: Path, model: str, progress: Progress | None, convert: bool, storage: Storage) -> Path:
    """Find or make the bundle of a GGUF file, in which each weight is as the file has it unless a type is asked for."""
    from .converters import gguf_origin, gguf_parts, open_checkpoint

    path, label = gguf_origin(path), model.rpartition("/")[2].removesuffix(".gguf")
    parts = [(part, part.stat()) for part in gguf_parts(path) if part.exists()]
    asked: tuple[str | None, int | None] = storage.of_checkpoint if storage.weights else (None, storage.group_size)
    origin = _digest(str(path), "gguf", *(str(value) for value in asked if storage.asked))
    stamps = _digest(*(f"{p.name}:{s.st_size}:{s.st_mtime_ns}" for p, s in parts))

    if not convert:  # what cannot be converted is said here, for there is nothing to find
        open_checkpoint(path).close()
    said = model if Path(model).exists() else f"{model} ({path})"
    return cached_bundle(model, f"{_plain_name(label)}-{origin}-{stamps}",
                         lambda target: _convert(path, target, progress, storage, said), convert,
                         changed=[f"*-{origin}-*-v{version}" for version in range(1, FORMAT_VERSION + 1)],
                         progress=progress)


def _from_hub(repo_id: str, progress: Progress | None, convert: bool, storage: Storage) -> Path:
    """Find or make the bundle of a hub model; one that is there is used without asking the hub for news."""
    name = f"{_plain_name(repo_id)}-{_digest(repo_id, *_stored_as(storage, anew=storage.asked))}"
    return cached_bundle(repo_id, name, lambda target: _convert(repo_id, target, progress, storage, repo_id, hub=True),
                         convert, format_1=name, progress=progress)


def _stored_as(storage: Storage, anew: bool) -> tuple[str, ...]:
    """What the name of a checkpoint's bundle says of its types; `anew`: maybe not those that the checkpoint has."""
    weights, group_size = storage.of_checkpoint
    own = [] if storage.weights else ["own"]  # of which a quantised checkpoint refuses a group size
    return weights, str(group_size), *(["anew", *own] if anew else [])


def _is_quantised(path: Path) -> bool:
    """Whether the config of a checkpoint says that its weights are quantised."""
    from .converters import read_json
    from .graph import is_quantised

    return is_quantised(read_json(path / "config.json"))


def cached_bundle(
    model: str, name: str, make: Callable[[Path], None], may_make: bool = True, format_1: str = "",
    changed: Iterable[str] = (), progress: Progress | None = None,
) -> Path:
    """Return a bundle in the user's cache; make it where it is absent or this version cannot open it.

    Of several processes that need it at once, one makes it and the others wait for it.

    Parameters
    ----------
    model : what it is a bundle of, for people
    name : the directory's name, to which the version of the format is added
    make : writes a bundle to a path, over one that is there
    may_make : False finds what can be opened, of an older format too
    format_1 : the directory's name in format 1, where that was another
    changed : patterns of the names of bundles that a new one replaces, for they were made of other files
    progress : told while another process makes it

    Raises
    ------
    ModelNotFoundError
        There is none that can be opened, and none may be made.
    """
    directory = cache.cache_root() / "bundles"
    target, *older = (directory / f"{name}-v{version}" for version in range(FORMAT_VERSION, 0, -1))
    older += [directory / format_1] if format_1 else []
    usable, _ = _usable((target, *older), 1 if may_make else len(older) + 1, progress)
    if usable:
        return usable
    if not may_make:
        raise ModelNotFoundError(f"{model} is a checkpoint that was not converted yet; use edgeinfer convert or run.")
    turn = DestinationLock(directory / f"{target.name}.making")
    try:
        cache.make_directories(directory)
        turn.acquire(_Waiting(model, progress))
    except OSError as error:
        raise DestinationError(
            f"The cache {directory} cannot be written ({error.strerror or error}); set EDGEINFER_CACHE to another "
            "directory, or convert the checkpoint with edgeinfer convert."
        ) from error
    try:
        usable, reason = _usable((target, *older), 1, progress)  # another process may have made it meanwhile
        if usable:
            return usable
        if reason:
            say(f"{model} {reason}; it is converted again.")
        make(target)
        for path in {*older, *(path for pattern in changed for path in directory.glob(pattern))} - {target}:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        turn.release()
    return target


def _usable(paths: tuple[Path, ...], n_allowed: int, progress: Progress | None = None) -> tuple[Path | None, str]:
    """Return the first bundle if it can be opened and is among the first n, and otherwise why it is not taken."""
    for number, path in enumerate(paths):
        if not is_bundle(path):
            continue
        try:
            with Bundle.open(path) as bundle:
                if number < n_allowed:
                    if n_allowed == 1:
                        bundle.check_contents(progress=progress and partial(progress, "load"))  # to be mended, not told
                    return path, ""
                return None, f"was converted by {bundle.header.made_by}, to bundle format {bundle.header.version}"
        except BundleError as error:
            reason = f"was converted before, but: {str(error).rstrip('.')}"
            if n_allowed == 1:
                return None, reason
    return None, ""


class _Waiting:
    """Tells that another process makes what this one needs: a sentence once, then progress."""

    def __init__(self, model: str, progress: Progress | None):
        self._model, self._progress, self._told = model, progress, False

    def __call__(self) -> None:
        if not self._told:
            say(f"Another process makes the bundle of {self._model}; this one waits for it.")
            self._told = True
        if self._progress:
            self._progress("wait", 0, 0, "")


def _convert(source: str | Path, target: Path, progress: Progress | None, storage: Storage, origin: str,
             hub: bool = False) -> None:
    """Convert into the cache, as `edgeinfer convert` does; what is to be told of it is."""
    from .converters import convert_apart

    for remark in convert_apart(source, target, storage.weights, storage.group_size, hub=hub, origin=origin,
                                progress=progress):
        say(remark)


def _file_stamps(directory: Path) -> list[str]:
    """Return what changes when a file of the checkpoint does: name, size and time."""
    from .text import FOLDER

    stamps = []
    for path in (*sorted(directory.iterdir()), *sorted(directory.glob(f"{FOLDER}/*.jinja"))):
        if path.is_file():
            status = path.stat()
            stamps.append(f"{path.name}:{status.st_size}:{status.st_mtime_ns}")
    return stamps


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _plain_name(name: str) -> str:
    """Return a name that every file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "--", name).strip(".-")[:80] or "model"


def _unknown(name: str) -> str:
    from .graph import builtin_shapes

    shapes = builtin_shapes()
    if shape := shapes.get(name.lower()):
        return _shape_only(name, shape)
    path = Path(name).expanduser()
    candidates = {known: known for known in (DEMO, *KNOWN_NAMES)}
    if path.parent.is_dir():
        candidates |= {other: str(path.parent / other) for other in _model_directories(path.parent)}
    by_lower = {key.lower(): value for key, value in candidates.items()}
    typed = path.name.lower()
    near = difflib.get_close_matches(typed, by_lower, n=3, cutoff=0.7) or difflib.get_close_matches(
        typed, [*by_lower, *shapes], n=3, cutoff=0.5)
    return unknown_model(name, "directory", [by_lower.get(key, key) for key in near], (DEMO, *KNOWN_NAMES),
                         "the directory of a bundle or checkpoint, or an id on the hub such as owner/name")


def unknown_model(name: str, kind: str, near: Sequence[str], known: Sequence[str], what: str) -> str:
    """Return what to say of a name that means no model: the nearest names, or a few and where all are."""
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        hint = f"known are {', '.join(known[:SHOWN_NAMES])} and others, which '{LISTING}' lists; or give {what}."
    return f"Unknown model {name!r}: no such {kind} and no known name; {hint}"


def _shape_only(name: str, shape: Shape) -> str:
    """Return what to say of a model of which only the shape is known, where its weights are wanted."""
    return (f"Of {name!r} only the shape is known here, without weights: 'edgeinfer plan {name}' and 'edgeinfer "
            f"estimate {name}' work. To run it, give its checkpoint's directory, or its id on the hub, {shape.source}.")


def _model_directories(parent: Path) -> list[str]:
    """Return the names of bundles and checkpoints in a directory."""
    try:
        entries = [path for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []
    return [path.name for path in entries if _is_model(path)]
