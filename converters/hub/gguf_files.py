"""One GGUF file of a repository on the Hugging Face hub, by the type of its weights, or the best that fits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from edgeinfer.base.process import say
from edgeinfer.base.progress import OnStageProgress
from edgeinfer.base.units import format_size
from edgeinfer.errors import ModelNotFoundError

from ..gguf.types import EXACT, GGUF_TYPES, OWN_ERROR
from .download import ATTEMPT_SECONDS, asking, reporter

_FILE = re.compile(r"(.*?)(?:-([0-9]{5})-of-([0-9]{5}))?\.gguf", re.IGNORECASE | re.DOTALL)
_TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q[1-9](?:_[0-9A-Z]+)+|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32))(?=[-.]|$)",
                   re.IGNORECASE)
NO_MODELS = re.compile(r"(^|[-_./])(mmproj|imatrix)([-_.]|$)", re.IGNORECASE)
"""Names of files beside models: image encoders and importance matrices."""
SMALL_LOSS = ("Q8_0", "F16", "BF16", "F32")
"""Types whose texts are indistinguishable, those first that read the fewest bytes as we store them."""
SPARE_SHARE, SPARE_BYTES = 1.1, 256_000_000
"""Assumed memory of a run beside its weights, as a share of the file and for the program, until there is a plan."""


def cached_gguf(name: str, room: int | None = None, anew: bool = False) -> Path:
    """Return the file that `fetch_gguf` with the same arguments downloaded before; nothing is asked of the hub.

    Raises `ModelNotFoundError` if it did not.
    """
    repo_id, _, kind = name.partition(":")
    sizes = _cached(repo_id)
    if not sizes:
        raise ModelNotFoundError(f"hf:{name} was not downloaded yet, and its plan needs the file's header: edgeinfer "
                                 f"convert hf:{name} DST downloads it.")
    return snapshots(_folder(repo_id))[0] / chosen(sizes, repo_id, kind, room, anew)[0]


def fetch_gguf(name: str, progress: OnStageProgress | None = None, room: int | None = None, anew: bool = False) -> Path:
    """Download the GGUF file ``OWNER/REPO:TYPE`` into the hub's cache, all parts of a split one, or find it there.

    Parameters
    ----------
    name : str
        The repository, and the type as the file's name has it, such as ``Q8_0``. Without one the best that fits is
        taken, and said.
    progress : callable, optional
        Called with (done_bytes, total_bytes, repository).
    room : int, optional
        Bytes of memory that a run may take.
    anew : bool
        Whether its weights are requantised, so that any type will do.

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
        sizes = _known(repo_id, kind) if cached else {
            file.rfilename: file.size or 0
            for file in huggingface_hub.HfApi().model_info(repo_id, files_metadata=True).siblings or []}
        bar = reporter(progress, repo_id)
        paths = [Path(huggingface_hub.hf_hub_download(repo_id, part, local_files_only=cached,
                                                      etag_timeout=ATTEMPT_SECONDS, tqdm_class=bar))
                 for part in chosen(sizes, repo_id, kind, room, anew)]
    return paths[0]


def _known(repo_id: str, kind: str) -> dict[str, int]:
    """List the files of a repository in the hub's cache; raises the client's error for a file that is not there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    sizes = _cached(repo_id)
    if not any(_FILE.fullmatch(name) and kind.lower() in name.lower() for name in sizes):
        raise LocalEntryNotFoundError(f"{repo_id}:{kind} has no GGUF file in the cache")
    return sizes


def chosen(sizes: Mapping[str, int], repo_id: str, kind: str, room: int | None = None, anew: bool = False) -> list[str]:
    """The parts of the one model of a type among the files of a repository, whose sizes are given by name.

    If no type is given and the files hold one model in several, it is the best that fits. Raises
    `ModelNotFoundError` if there is none of the type, or more than one model.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(sizes):
        if (match := _FILE.fullmatch(name)) and not NO_MODELS.search(name):
            models.setdefault(match[1], []).append(name)
    if not models:
        raise ModelNotFoundError(f"{repo_id} has no GGUF file with a model; as a checkpoint it is called {repo_id}, "
                                 "without hf:.")
    word = re.compile(rf"(^|[-./]){re.escape(kind)}([-./]|$)", re.IGNORECASE)
    fitting = [stem for stem in models if not kind or word.search(stem)]
    if not kind and len(fitting) > 1 and len({_without_type(stem) for stem in fitting}) == 1:
        return models[_best({stem: sum(sizes[name] for name in models[stem]) for stem in fitting}, repo_id, room, anew)]
    if len(fitting) != 1:
        said = ", ".join(stem.rpartition("/")[2] for stem in (fitting or models))
        what = f"{len(fitting)} of the type {kind}" if kind else f"{len(fitting)} models"
        raise ModelNotFoundError(f"{repo_id} has {what if fitting else f'no model of the type {kind}'}: {said}; choose "
                                 f"one with hf:{repo_id}:TYPE, where TYPE is a part of its name alone.")
    return models[fitting[0]]


def gguf_type(name: str) -> str:
    """Return the type of the weights that a file's name states, empty if it states none."""
    found = _TYPE.findall(name.rpartition("/")[2])
    return str(found[-1]) if found else ""


def _best(sizes: dict[str, int], repo_id: str, room: int | None, anew: bool) -> str:
    """Choose among the types of one model, and say which and why."""
    usable = {stem: size for stem, size in sizes.items() if anew or _exact(gguf_type(stem))} or sizes
    fits = {stem: size for stem, size in usable.items() if room is None or _needed(stem, size) <= room}
    if fits:
        taken = min(fits, key=lambda stem: (_rank(gguf_type(stem)), -fits[stem]))
    else:
        taken = min(usable, key=lambda stem: usable[stem])
    kind, memory = gguf_type(taken), "" if room is None else f" in {format_size(room)} of memory"
    why = f"the best that fits{memory}" if fits else f"the smallest: none fits{memory}"
    if len(usable) < len(sizes):
        why += ", of those that can be held without loss"
    others = ", ".join(gguf_type(stem) or stem.rpartition("/")[2] for stem in sizes if stem != taken)
    say(f"{repo_id} has {len(sizes)} types; using {kind} ({format_size(sizes[taken])}), {why}. The others are "
        f"{others}: hf:{repo_id}:TYPE.")
    return taken


def _base(kind: str) -> str:
    """Return the type of most tensors of a file; its name may say more: Q4_K of Q4_K_M."""
    kind = kind.upper().removeprefix("UD-")
    return max((row.name for row in GGUF_TYPES.values() if kind == row.name or kind.startswith(f"{row.name}_")),
               key=len, default="")


def _exact(kind: str) -> bool:
    """Return whether a file of this type can surely be held without loss: most quantised ones have some tensors in
    Q6_K."""
    base = _base(kind)
    return base in EXACT and (base in SMALL_LOSS or "Q6_K" in EXACT)


def _rank(kind: str) -> float:
    """Smaller is better."""
    base = _base(kind)
    return SMALL_LOSS.index(base) - len(SMALL_LOSS) if base in SMALL_LOSS else OWN_ERROR.get(base, float("inf"))


def _needed(stem: str, size: int) -> float:
    """Bytes that a run takes, about; BF16 is stored as f32."""
    return size * (2 if _base(gguf_type(stem)) == "BF16" else 1) * SPARE_SHARE + SPARE_BYTES


def _without_type(stem: str) -> str:
    """Return a file name without its type, which identifies the model; folders are named by types too."""
    name = stem.rpartition("/")[2]
    kind = gguf_type(name)
    return name.replace(kind, "") if kind else name


def _cached(repo_id: str) -> dict[str, int]:
    """Sizes of the files of a repository in the hub's cache, of its newest snapshot there."""
    newest = next(iter(snapshots(_folder(repo_id))), None)
    found = newest.rglob("*.gguf") if newest else ()
    return {path.relative_to(newest).as_posix(): path.stat().st_size for path in found if path.exists() and newest}


def _folder(repo_id: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"


def snapshots(folder: Path) -> list[Path]:
    """Return the snapshots of a repository in the hub's cache, the newest first."""
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return sorted(found, key=os.path.getmtime, reverse=True)
