"""Export: a bundle becomes a file that onnxruntime opens, or a folder for onnxruntime-genai."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from edgeinfer import __version__
from edgeinfer.base.units import format_size
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe
from edgeinfer.graph import build_graph, expected_types

from ...base.progress import OnStageProgress
from .data import Data, data_bytes, write_data
from .destination import MODEL_FILE, ExportDestination, data_name
from .flavour import Flavour
from .genai import check_tokenizer, write_beside
from .lower_graph import lower_graph
from .lowering import Lowering
from .model import model_proto
from .packages import import_onnx
from .weights import Reader

MODEL_BYTES = 16 << 20
"""Room requested beside the data: the graph, and the tokenizer's files."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


class ExportReport(NamedTuple):
    """Report on an export."""

    destination: Path
    model: Path
    data: Path
    data_bytes: int
    bundle_bytes: int
    """Bytes of the weights that it was made from."""
    nodes: int
    tensors: int
    seconds: float
    remarks: tuple[str, ...]
    """Sentences on parts that were changed or left out."""


def lowered(bundle: Bundle, flavour: Flavour) -> Lowering:
    """Lower a bundle's graph, exactly: no pass, no part of the bundle that approximates.

    Parameters
    ----------
    bundle : Bundle
    flavour : Flavour
        As `Flavour.checked` returns it.

    Raises
    ------
    UnsupportedModelError
        As `lower_graph`.
    """
    return lower_graph(build_graph(bundle.config, expected_types(bundle.types), Recipe(())), flavour)


def export(bundle: Bundle, destination: str | Path, flavour: Flavour | None = None, *, overwrite: bool = False,
           progress: OnStageProgress | None = None) -> ExportReport:
    """Write an ONNX model and its external data.

    Peak memory is below twice the largest tensor plus 300 MB.

    Parameters
    ----------
    bundle : Bundle
        Open; its checksums are compared first.
    destination : str or Path
        A file DST.onnx, beside which its data are written; for target genai a folder.
    flavour : Flavour, optional
    overwrite : bool
        Replace an earlier export.
    progress : callable, optional
        Called with (bytes done, bytes in all, name of the tensor).

    Raises
    ------
    UsageError
        Unknown options, or the package onnx is not installed.
    DestinationError
        The destination exists, is being written, is not a place for an export, or its disk is full.
    BundleError, TokenizerError, UnsupportedModelError
        The bundle is damaged, or cannot be expressed.
    """
    began = time.perf_counter()
    import_onnx()
    flavour = (flavour or Flavour()).checked(bundle.config)
    genai = flavour.target == "genai"
    target = ExportDestination(destination, genai, overwrite)
    with target:
        if genai:
            check_tokenizer(bundle)
        bundle.check_contents()
        graph = lowered(bundle, flavour)
        target.reserve(data_bytes(graph.stored.values()) + MODEL_BYTES)
        name = MODEL_FILE if genai else target.path.name
        beside = {}
        if genai:
            with target.writing():
                beside = write_beside(bundle, flavour, target.folder)
        data, data_file = _write(bundle, graph, target, name, beside, progress)
    folder, seconds = target.path if genai else target.path.parent, time.perf_counter() - began
    return ExportReport(target.path, folder / name, folder / data_file, data.nbytes, bundle.weights_bytes,
                        len(graph.nodes), len(graph.stored), seconds, tuple(_remarks(bundle, graph)))


def _write(bundle: Bundle, graph: Lowering, target: ExportDestination, name: str, beside: dict[str, str],
           progress: OnStageProgress | None) -> tuple[Data, str]:
    """Write the data, whose name follows from their checksum, and the model that names them and has the checksums of
    the files beside them.
    """
    read = Reader(bundle)
    try:
        with target.writing():
            unnamed = target.folder / "data"
            with open(unnamed, "wb") as file:
                data = write_data(graph.stored.values(), read, file, progress)
            data_file = data_name(name, data.identity)
            unnamed.rename(unnamed.with_name(data_file))
            model = model_proto(graph, data_file, data.tensors, about(bundle, graph.flavour, data, beside))
            (target.folder / name).write_bytes(model.SerializeToString(deterministic=True))
    finally:
        read.close()
    return data, data_file


def about(bundle: Bundle, flavour: Flavour, data: Data, beside: dict[str, str]) -> dict[str, str]:
    """Return the metadata of a model: its source, maker and purpose, and the checksums of its data and of the
    files beside them.
    """
    tokenizers = [bundle.files[name].sha256 for name in TOKENIZERS if name in bundle.files]
    return {
        "version": __version__, "bundle": bundle.identity, "source": bundle.header.source,
        "architecture": bundle.config.model_type, "tokenizer_sha256": tokenizers[0] if tokenizers else "",
        "target": flavour.target, "dtype": flavour.dtype, "attention": flavour.attention, "ctx": str(flavour.ctx),
        "qk_norm": flavour.qk_norm, "top_k": str(flavour.top_k), "data_bytes": str(data.nbytes),
        "data_identity": data.identity, "files": json.dumps(beside),
        "tensors": json.dumps({name: entry.sha256 for name, entry in data.tensors.items()}),
    }


def _remarks(bundle: Bundle, graph: Lowering) -> list[str]:
    found = []
    for reason, matrices in graph.remarks.items():
        before, now = (sum(found) for found in zip(*matrices, strict=True))
        found.append(f"{len(matrices)} matrices {reason.format(dtype=graph.dtype)}: {format_size(now)} instead of "
                     f"{format_size(before)}.")
    found += graph.notes
    wide = {stored.storage.name for stored in graph.graph.types.values()
            if stored.layout == "tile16" and not stored.quantised}
    if graph.dtype == "f16" and "f32" in wide:
        found.append("The matrices of type f32 were rounded to f16; --dtype f32 keeps them.")
    if parts := sorted({entry.part for entry in bundle.header.files if entry.part}):
        found.append(f"Left out, for the model is exported as it is without approximations: {', '.join(parts)}.")
    return found
