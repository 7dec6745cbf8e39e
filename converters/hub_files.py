"""One GGUF file of a repository on the Hugging Face hub, by the type of its weights."""

from __future__ import annotations

import re
from pathlib import Path

from edgeinfer.errors import ModelNotFoundError

from .hub import ATTEMPT_SECONDS, Progress, asking, reporter

_FILE = re.compile(r"(.*?)(?:-([0-9]{5})-of-([0-9]{5}))?\.gguf", re.IGNORECASE | re.DOTALL)
NO_MODELS = re.compile(r"(^|[-_./])(mmproj|imatrix)([-_.]|$)", re.IGNORECASE)
"""Names of files beside models: image encoders and importance matrices."""


def cached_gguf(name: str) -> Path:
    """Return the file that `fetch_gguf` downloaded before; nothing is asked of the hub.

    Raises `ModelNotFoundError` where it did not.
    """
    repo_id, _, kind = name.partition(":")
    names = _cached_names(repo_id)
    if not names:
        raise ModelNotFoundError(f"hf:{name} was not downloaded yet, and its plan needs the file's header: edgeinfer "
                                 f"convert hf:{name} DST downloads it.")
    return _snapshots(repo_id)[0] / chosen(names, repo_id, kind)[0]


def fetch_gguf(name: str, progress: Progress | None = None) -> Path:
    """Download the GGUF file ``OWNER/REPO:TYPE`` into the hub's cache, all parts of a split one, or find it there.

    Parameters
    ----------
    name : str
        The repository, and the type as the file's name has it, such as ``Q8_0``; without one the only model there is.
    progress : callable, optional
        Called with (done_bytes, total_bytes, repository).

    Returns
    -------
    Path
        The first part.

    Raises
    ------
    ModelNotFoundError
        There is no such repository, or no such file in it; the message has the types that are there.
    CheckpointError
        The hub cannot be reached, and its cache lacks the file.
    """
    import huggingface_hub

    repo_id, _, kind = name.partition(":")
    with asking(repo_id, None) as cached:
        names = _cached_names(repo_id) if cached else [
            file.rfilename for file in huggingface_hub.HfApi().model_info(repo_id).siblings or []]
        bar = reporter(progress, repo_id)
        paths = [Path(huggingface_hub.hf_hub_download(repo_id, part, local_files_only=cached,
                                                      etag_timeout=ATTEMPT_SECONDS, tqdm_class=bar))
                 for part in chosen(names, repo_id, kind)]
    return paths[0]


def chosen(names: list[str], repo_id: str, kind: str) -> list[str]:
    """The parts of the one model of a type among the files of a repository.

    Raises `ModelNotFoundError` where there is none, or more than one.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if (match := _FILE.fullmatch(name)) and not NO_MODELS.search(name):
            models.setdefault(match[1], []).append(name)
    if not models:
        raise ModelNotFoundError(f"{repo_id} has no GGUF file with a model; as a checkpoint it is called {repo_id}, "
                                 "without hf:.")
    word = re.compile(rf"(^|[-./]){re.escape(kind)}([-./]|$)", re.IGNORECASE)
    fitting = [stem for stem in models if not kind or word.search(stem)]
    if len(fitting) != 1:
        said = ", ".join(stem.rpartition("/")[2] for stem in (fitting or models))
        what = f"{len(fitting)} of the type {kind}" if kind else f"{len(fitting)}"
        raise ModelNotFoundError(f"{repo_id} has {what if fitting else f'no model of the type {kind}'}: {said}; choose "
                                 f"one with hf:{repo_id}:TYPE, TYPE being what tells its name from the others'.")
    return models[fitting[0]]


def _cached_names(repo_id: str) -> list[str]:
    """Files of a repository in the hub's cache, of its newest snapshot there."""
    snapshots = _snapshots(repo_id)
    return [path.relative_to(snapshots[0]).as_posix() for path in snapshots[0].rglob("*.gguf")] if snapshots else []


def _snapshots(repo_id: str) -> list[Path]:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}" / "snapshots"
    return sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
