"""The models on this machine: which of them run, which not and why, and which fit; headers alone are read."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer import converters
from edgeinfer.memory_planner import (
    MemoryPlan,
    Placer,
    Planner,
    default_ctx,
    default_threads,
    fitting,
    process_budget,
    to_request,
)

from ..base.cache_dir import cache_root
from ..base.dataclass import dataclass
from ..base.progress import OnProgress
from ..base.units import format_size
from ..bundle import Bundle
from ..config import DEFAULT_DRAFT_TOKENS, RuntimeConfig
from ..errors import EdgeInferError
from ..registry import placer
from .names import DEMO, demo_path

if TYPE_CHECKING:
    from edgeinfer.converters import Found

    from ..graph import Graph, ModelConfig
    from .description import ModelDescription

OWN = "edgeinfer"
"""The store of the embedded model and of converted models in the cache."""


@dataclass(frozen=True)
class LocalModel:
    """Something on this machine that is a model, or looks like one."""

    name: str
    """Name that `run` accepts."""
    store: str
    """Owner of its folder: edgeinfer, ollama, lmstudio, llama.cpp, hub, or folder for one that was given."""
    path: Path
    format: str
    """bundle, checkpoint or gguf; empty for others."""
    kind: str
    """model, or the kind of another file, in words."""
    nbytes: int
    """Bytes of its files."""
    holds: str
    """Types of its weights, the largest first."""
    source: str
    """Source that a bundle was converted from."""
    runs: bool
    reason: str
    """Why it does not; a sentence, as `run` gives it."""
    remedy: str
    """An option with which it runs though it does not as it is; empty if there is none."""
    fits: bool | None
    """True if the plan of a run with default settings is within `budget_bytes`; None if there is no plan."""
    planned_bytes: int | None
    mode: str | None
    """Residency of its weights in that plan: ``resident``, or read from storage, as `plan` names it."""


def list_models(folders: Iterable[Path] = (), stores: bool = True, progress: OnProgress | None = None
                ) -> Iterator[LocalModel]:
    """Look at all models of this machine, store by store.

    Parameters
    ----------
    folders : iterable of Path
        Further folders, which are looked through with all within them.
    stores : bool
        Whether the embedded model, the cache and the stores of other programs are looked at.
    progress : callable, optional
        Called with (stage, done, total, item).

    Returns
    -------
    iterator of LocalModel
        Of a file that is in several folders the first; ollama may call one by several names.
    """
    found = [*own_models(), *converters.find_models()] if stores else []
    for folder in folders:
        found += converters.models_below(folder, "folder")
    judge, seen = _Judge(), set()
    for number, item in enumerate(found):
        if progress:
            progress("look", number, len(found), item.path.name)
        key = (item.name if item.store == "ollama" else "", os.path.realpath(item.path), item.problem)
        if key not in seen:
            seen.add(key)
            yield judge.judged(item)


def look_at_gguf(name: str, path: Path) -> LocalModel:
    """Look at one GGUF file, which is called `name`; raises `CheckpointError` if its header cannot be read."""
    nbytes = sum(header.size for header in converters.read_headers(path))
    return _Judge().judged(converters.Found("folder", "gguf", path, name, nbytes))


def own_models() -> Iterator[Found]:
    """Find the embedded model, and bundles in the cache."""
    for found in converters.models_below(demo_path(), OWN):
        yield replace(found, name=DEMO)
    bundles: list[Path] = []
    with suppress(OSError):  # there are none, or the cache is cleared just now
        bundles = sorted((cache_root() / "bundles").iterdir())
    for path in bundles:
        if os.path.isdir(path) and not path.name.startswith("."):
            yield from converters.models_below(path, OWN)


class _Judge:
    """Decides for one model after another whether it runs; results are reused for the next."""

    def __init__(self) -> None:
        self.budget, self.threads = process_budget(), default_threads()
        self._passed: converters.PassedOver = converters.PassedOver()
        self._known: dict[Hashable, tuple[ModelDescription, MemoryPlan]] = {}

    def judged(self, found: Found) -> LocalModel:
        """Say whether it runs."""
        if found.problem:
            return self._refused(found, found.problem)
        try:
            if found.format == "bundle":
                return self._bundle(found)
            return self._checkpoint(found) if found.format == "checkpoint" else self._gguf(found)
        except EdgeInferError as error:
            return self._refused(found, str(error))
        except OSError as error:
            return self._refused(found, f"Cannot read {error.filename or found.path}: {error.strerror or error}.")

    def _refused(self, found: Found, why: str, kind: str = "model", holds: str = "") -> LocalModel:
        return LocalModel(found.name, found.store, found.path, found.format, kind, found.nbytes, holds, "", False, why,
                          "", None, None, None)

    def _judged(self, found: Found, planned: MemoryPlan, holds: str, reason: str = "", remedy: str = "",
                source: str = "") -> LocalModel:
        return LocalModel(found.name, found.store, found.path, found.format, "model", found.nbytes, holds, source,
                          not reason, reason, remedy, planned.total_bytes <= self.budget, planned.total_bytes,
                          planned.mode)

    def _planned(self, model: ModelConfig, graph: Graph, weight_bytes: int, place: Placer | None = None) -> MemoryPlan:
        """Return the plan of a run with default settings, with weights read from storage where it only fits so."""
        config = RuntimeConfig(default_ctx(model), threads=self.threads, draft_tokens=DEFAULT_DRAFT_TOKENS)
        planner, place = Planner(graph, weight_bytes), place or placer(model)
        return fitting(planner, config, self.budget, place) or planner.plan(to_request(config))

    def _bundle(self, found: Found) -> LocalModel:
        from ..graph import build_graph, expected_types

        with Bundle.open(found.path, compare=False) as bundle:
            graph = build_graph(bundle.config, expected_types(bundle.types))
            bundle.check_graph(graph)
            planned = self._planned(bundle.config, graph, bundle.weights_bytes, placer(bundle.config, bundle))
            return self._judged(found, planned, bundle.quantisation.weights, source=bundle.header.source)

    def _gguf(self, found: Found) -> LocalModel:
        from .describe import describe_gguf_file

        headers = converters.read_headers(found.path, self._passed)
        if purpose := converters.gguf_purpose(headers[0]):
            return self._refused(found, f"{found.path} is {purpose}, not a language model.", purpose)
        sizes: dict[str, int] = {}
        for header in headers:
            for tensor in header.tensors.values():
                sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.nbytes
        holds = ", ".join(sorted(sizes, key=lambda kind: -sizes[kind])[:3])
        try:
            for header in headers:
                header.check_data()
            key = converters.gguf_structure(headers)
            if key not in self._known:
                model = describe_gguf_file(found.name, found.path, headers=headers)
                self._known[key] = model, self._planned(model.config, model.graph, model.weight_bytes)
            converters.check_tokenizer(headers[0])
        except EdgeInferError as error:
            return self._refused(found, str(error), holds=holds)
        model, planned = self._known[key]
        return self._judged(found, planned, holds)

    def _checkpoint(self, found: Found) -> LocalModel:
        from .describe import describe

        model = describe(found.path)
        reason = holds = ""
        try:
            with converters.open_checkpoint(found.path) as checkpoint:
                checkpoint.check(checkpoint.graph(checkpoint.storage(None, None, None, None, "tile16")[0]), False)
                holds = ", ".join(dict.fromkeys(checkpoint.tensor(name).dtype for name in checkpoint.files))
        except EdgeInferError as error:
            reason = str(error)
        planned = self._planned(model.config, model.graph, model.weight_bytes)
        return self._judged(found, planned, holds, reason, "--weights" if model.file_refused else "")


def summary(models: list[LocalModel]) -> str:
    """Return a sentence with the number of models, and of those that run and fit."""
    whole = [model for model in models if model.kind == "model" and model.format]
    runs = [model for model in whole if model.runs]
    fits = sum(bool(model.fits) for model in runs)
    nbytes = {model.path: model.nbytes for model in models}
    size = f"{format_size(sum(nbytes.values()))} on disk."
    if len(whole) == 1:
        what = "does not run" if not runs else "runs and fits" if fits else "runs but does not fit"
        return f"1 model, which {what}; {size}"
    if whole and fits == len(whole):
        return f"{len(whole)} models, all of which run and fit; {size}"
    return (f"{len(whole)} models, of which {len(runs)} run{'s' * (len(runs) == 1)} and {fits} "
            f"fit{'s' * (fits == 1)}; {size}")
