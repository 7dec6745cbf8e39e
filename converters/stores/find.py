"""Folders in which programs keep models on this machine: ollama, LM Studio, llama.cpp, the Hugging Face cache.

Only names are read, and the small files in which these programs record the locations of their folders. Nothing is
written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.base.files import open_plain
from edgeinfer.base.strict_json import parse_json
from edgeinfer.errors import EdgeInferError, ModelNotFoundError

from ..hub.gguf_files import chosen, gguf_type, snapshots
from .ollama import OLLAMA, ollama_file, pulled, store
from .scan import Found, files_of, is_folder, models_below, special

MAX_SETTINGS = 1 << 20
"""Bytes of another program's settings that are read."""


def find_models() -> Iterator[Found]:
    """Find files and folders that look like models in the stores of other programs."""
    yield from ollama_models()
    for folder in lm_studio_folders():
        yield from models_below(folder, "lmstudio")
    if is_folder(folder := llama_cpp_folder()):
        yield from models_below(folder, "llama.cpp")
    yield from hub_models()


def ollama_models() -> Iterator[Found]:
    """Find the models that ollama has pulled, by the names that it gives them."""
    root = store()
    if not is_folder(root):
        return
    for name in pulled(root):
        called = f"{OLLAMA}{name}"
        try:
            path = ollama_file(name)
            yield Found("ollama", "gguf", path, called, path.stat().st_size)
        except EdgeInferError as error:
            yield Found("ollama", "", root, called, 0, str(error))
        except OSError as error:
            yield Found("ollama", "", root, called, 0, f"Cannot read {name}: {error.strerror or error}.")
    for folder in (root / "manifests", root / "blobs"):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Found("ollama", "", folder, str(folder), 0, f"Cannot read {folder}: {error.strerror or error}.")
            continue
        for name in sorted(names):
            if name.endswith("-partial"):
                yield Found("ollama", "", folder / name, str(folder / name), os.path.getsize(folder / name),
                            "A download of ollama is not complete; pull the model again.")


def lm_studio_folders() -> list[Path]:
    """Return LM Studio's folders of models: those of its homes, and those that its settings name instead."""
    user = Path.home()
    pointed = _text(user / ".lmstudio-home-pointer").strip()
    residency = [*([Path(pointed)] if pointed else []), user / ".lmstudio", user / ".cache" / "lm-studio"]
    settings = [*residency, _application_data() / "LM Studio"]
    named = [Path(folder) for directory in settings if (folder := _downloads(directory / "settings.json"))]
    found = {os.path.realpath(folder): folder for folder in [*named, *(home / "models" for home in residency)]
             if folder.is_absolute() and is_folder(folder)}
    return list(found.values())


def llama_cpp_folder() -> Path:
    """Return where llama.cpp keeps downloads of the time before it used the hub's cache."""
    if given := os.environ.get("LLAMA_CACHE"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llama.cpp"
    variable, default = ("LOCALAPPDATA", ("AppData", "Local")) if sys.platform == "win32" else (
        "XDG_CACHE_HOME", (".cache",))
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home().joinpath(*default)) / "llama.cpp"


def hub_models() -> Iterator[Found]:
    """Find the models in the hub's cache, as `run` would take them from there."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return
    except OSError as error:
        yield Found("hub", "", root, str(root), 0, f"Cannot read {root}: {error.strerror or error}.")
        return
    for name in names:
        if name.startswith("models--") and is_folder(root / name):
            owner, dashes, rest = name[len("models--"):].partition("--")
            try:
                yield from _repository(root / name, f"{owner}/{rest}" if dashes else owner)
            except OSError as error:
                yield Found("hub", "", root / name, name, 0, f"Cannot read {root / name}: {error.strerror or error}.")


def _repository(folder: Path, repo_id: str) -> Iterator[Found]:
    newest = next(iter(snapshots(folder)), None)
    if newest is not None:
        inside = {where: sorted(names) for where, _, names in os.walk(newest)}
        files = [(Path(where) / name).relative_to(newest).as_posix() for where in inside for name in inside[where]]
        for where, names in inside.items():
            for found in files_of(Path(where), names, "hub", repo_id if Path(where) == newest else ""):
                yield _hub_gguf(found, repo_id, newest, files) if found.format == "gguf" else found
    unfinished = [path for path in sorted((folder / "blobs").glob("*.incomplete")) if not special(path)]
    if unfinished:
        yield Found("hub", "", folder, repo_id, sum(path.stat().st_size for path in unfinished),
                    f"A download of {repo_id} is not complete; running or converting it continues the download.")


def _hub_gguf(found: Found, repo_id: str, snapshot: Path, files: list[str]) -> Found:
    """Return a GGUF file's model under the shortest name that identifies it on the hub, else under its path."""
    kind, file = gguf_type(found.path.name), found.path.relative_to(snapshot).as_posix()
    try:
        if kind and chosen(dict.fromkeys(files, 0), repo_id, kind)[0] == file:
            return Found("hub", "gguf", found.path, f"hf:{repo_id}:{kind}", found.nbytes, found.problem)
    except ModelNotFoundError:
        pass
    return found


def _application_data() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("APPDATA")
        return Path(base) if base else Path.home() / "AppData" / "Roaming"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    base = os.environ.get("XDG_CONFIG_HOME")
    return Path(base) if base else Path.home() / ".config"


def _downloads(settings: Path) -> str:
    """Return the folder of models that LM Studio's settings name; empty if they name none."""
    try:
        found = parse_json(_text(settings) or "{}")
    except ValueError:
        return ""
    folder = found.get("downloadsFolder") if isinstance(found, dict) else None
    return folder if isinstance(folder, str) and "\0" not in folder else ""


def _text(path: Path) -> str:
    """Return the contents of a small file; empty if it cannot be read."""
    try:
        with open_plain(path) as file:
            return file.read(MAX_SETTINGS).decode("utf-8", "replace").replace("\0", "")
    except OSError:
        return ""
