"""Convert a checkpoint to a bundle, tensor by tensor and block by block: memory does not grow with the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from edgeinfer.base.process import say
from edgeinfer.base.progress import OnStageProgress
from edgeinfer.bundle import (
    DRAFT_HEAD_FILE,
    BundleWriter,
    Quantisation,
    pack_draft_head,
    weights_file_bytes,
    weights_identity,
)
from edgeinfer.errors import TokenizerError
from edgeinfer.graph import Graph, is_quantised, requested_types
from edgeinfer.quant import SUPER_COLUMNS, TYPES
from edgeinfer.registry import CONVERSION, plain
from edgeinfer.text import ChatTemplate, Tokenizer

from .bit_budget import BitBudget
from .calibration import CALIBRATION_FILE, Calibration, check_something_is_rounded, is_free, record
from .checkpoint.directory import Checkpoint, checkpoint_fields
from .checkpoint.json_file import CONFIG_FILE
from .chosen_types import ChosenTypes, mixed_quantisation
from .gguf.checkpoint import GgufCheckpoint
from .gguf.file import is_gguf
from .outlook import outlook, seconds
from .packing import WeightReader, apart, stored_bytes, with_levels
from .quantized.checkpoint import PackedCheckpoint
from .report import ConversionReport, TensorReport, not_definite
from .scaling import find_scaling
from .unfinished import unfinished_of

Choose = Callable[[WeightReader, Graph, Calibration | None], ChosenTypes]
"""Chooses types that differ from matrix to matrix."""
ENTRY_BYTES = 1024
"""Room requested per tensor and file, for its line in the header and the rest of its last block on the disk."""


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    weights: str | None = None,
    group_size: int | None = None,
    embedding: str | None = None,
    head: str | None = None,
    ffn_layout: str = "tile16",
    overwrite: bool = False,
    origin: str = "",
    calibration: Callable[[Checkpoint], Calibration] | None = None,
    chooser: Choose | None = None,
    announce: Callable[[str], None] | None = None,
    progress: OnStageProgress | None = None,
) -> ConversionReport:
    """Convert a Hugging Face checkpoint directory, or a GGUF file, to a bundle.

    Peak memory does not depend on the model's size (60 to 100 MB with the interpreter, by the tokenizer's; a few MB
    more for each core with a GGUF file; and up to three tensors of a checkpoint packed along its inputs, as GPTQ does).

    Parameters
    ----------
    source : str or Path
        Directory with config.json, safetensors and tokenizer files; or a GGUF file, of a split one the first.
    destination : str or Path
        The bundle to make; nothing is left there if the conversion fails or is interrupted.
    weights : str, optional
        Type of the layers' matrices, one of `edgeinfer.config.WEIGHT_TYPES`. By default q4, but of a GGUF file and of a
        quantised checkpoint each weight as it is, with its codes and scales; a type requests quantising weights that
        are not stored so.
    group_size : int, optional
        Columns that share one scale (quantised types); by default 32.
    embedding, head : str, optional
        Type of the embedding and of the output head; by default int8, or as `weights` if that is f16 or f32.
    ffn_layout : {'tile16', 'neuron'}
        How FFNs are stored: as matrices, or neuron by neuron (quantised types), so that dead neurons are not read.
    overwrite : bool
        Replace an existing bundle.
    origin : str
        Source that the bundle records, beside the model's own name; by default that name alone.
    calibration : callable, optional
        Called with the checkpoint, once it is known that a bundle can be made of it; returns the statistics by which
        matrices are rounded.
    chooser : callable, optional
        Called with the reader of weights, the graph and the calibration or None; returns the type of each matrix, such
        as `BitBudget`. The options of types above then are left out.
    announce : callable, optional
        Called with a sentence on the size of the bundle and the time it takes, once the disk is known to have space.
    progress : callable, optional
        Called with (done_bytes, total_bytes, name of the tensor) as the checkpoint is read.

    Returns
    -------
    ConversionReport

    Raises
    ------
    CheckpointError, UnsupportedModelError
        If the checkpoint cannot be read or its model is not supported.
    TokenizerError
        If running could not open its tokenizer or chat template.
    DestinationError
        If the destination exists, or its disk is full. One that another process writes is waited for.
    UsageError
        An option is of a wrong type or out of its range.
    """
    given, began = plain(locals(), CONVERSION), time.perf_counter()
    types = given["weights"], given["group_size"], given["embedding"], given["head"], given["ffn_layout"] or "tile16"
    requested_types(types[0] or "q4", types[1] or 32, *types[2:])  # or it is refused
    types = ("q4", *types[1:]) if chooser else types  # of weights without a choice
    with open_checkpoint(source) as checkpoint:
        type_of, asked = checkpoint.storage(*types)
        graph, drafts = checkpoint.graph(type_of), checkpoint.draft_head(type_of)
        remarks = [*checkpoint.check(graph), *checkpoint.remarks, *_instead(graph, asked)]
        checkpoint.check_travelling_files()
        files, made = checkpoint.travelling_files, checkpoint.made_files
        if calibration and not chooser:
            check_something_is_rounded(checkpoint, graph, getattr(calibration, "option", "--calibrate"))
        both = _joined(graph, drafts)
        reading = WeightReader(checkpoint, both, progress)
        if isinstance(chooser, BitBudget) and not getattr(calibration, "outliers", False):
            chooser.check(reading.uncounted(), graph)
        with BundleWriter(destination, checkpoint.config, asked, overwrite=overwrite,
                          source=_named(checkpoint, origin), waiting=_say_once(destination)) as writer:
            beside = sum(map(len, made.values())) + (graph_bytes(drafts) if drafts else 0)

            def reserve(graph: Graph, said: bool) -> None:
                nbytes = bundle_bytes(graph, list(files.values())) + beside
                writer.reserve(nbytes)
                if announce and said:
                    announce(outlook(origin or source, destination, reading.total, nbytes,
                                     None if calibration else seconds(checkpoint, both)))

            reserve(graph, said=chooser is None)  # else the choice says how large it becomes
            if not _write_texts(writer, checkpoint, files, made):
                remarks.append(f"{source} has no tokenizer, so the bundle takes token ids only.")
            found = calibration(checkpoint) if calibration else None
            reading.unfinished = unfinished_of(found, graph_bytes(graph))
            if found and found.outliers:
                found, graph = apart(found, reading, graph, type_of)
                reserve(graph, said=False)
            mixed = chooser(reading, graph, found) if chooser else None
            if mixed:
                graph = checkpoint.graph(reading.outliers.types(mixed.type_of()))
                writer.quantisation = mixed_quantisation(graph)
                reserve(graph, said=True)
            if found and not found.outliers:
                found = scaled(found, reading, graph)
            tensors = _write_weights(writer, reading, graph, drafts, found)
            if found or mixed:
                writer.add_file(CALIBRATION_FILE, record(found, tensors, mixed))
            remarks += [*(found.remarks if found else ()), *not_definite(tensors)]
        if reading.unfinished:
            remarks += reading.unfinished.end()
    return ConversionReport(
        Path(destination), reading.total, sum(t.nbytes for t in tensors), time.perf_counter() - began,
        tuple(tensors), tuple(remarks), mixed,
    )


def _joined(graph: Graph, drafts: Graph | None) -> Graph:
    """Return a graph with the weights of a draft head after its own."""
    return graph if drafts is None else replace(
        graph, weights=(*graph.weights, *drafts.weights), types={**graph.types, **drafts.types})


def scaled(calibration: Calibration, reading: WeightReader, graph: Graph) -> Calibration:
    """Return a calibration whose inputs are divided by factors that weights then are read with, where that helps."""
    scaling = find_scaling(graph, partial(is_free, reading.checkpoint, graph), calibration.of,
                           reading.uncounted().blocks) if calibration.scale else None
    if scaling is None:
        return calibration
    reading.scaling = scaling
    return replace(calibration, of=scaling.of(calibration.of), scaled=tuple(scaling.columns))


def _write_texts(writer: BundleWriter, checkpoint: Checkpoint, files: Mapping[str, Path],
                 made: Mapping[str, bytes]) -> bool:
    """Write tokenizer, chat templates and licences; False without a tokenizer."""
    for name, path in files.items():
        writer.copy_file(path, name)
    for name, content in made.items():
        writer.add_file(name, content)
    return open_texts(writer.folder, {**dict.fromkeys(made, checkpoint.path), **files}, checkpoint)


def _write_weights(writer: BundleWriter, reading: WeightReader, graph: Graph, head: Graph | None,
                   calibration: Calibration | None = None) -> list[TensorReport]:
    """Write the weights, and those of a head that drafts further tokens, a part of its own."""
    strides, entries, tensors = graph.strides, [], []
    for weight in graph.weights:
        stored = with_levels(reading, weight, graph.types[weight.name])
        data, report = stored_bytes(reading, weight, stored, *(
            [reading.outliers.of(calibration.of)] if calibration else []))
        entries.append(writer.add(weight.name, stored, weight.shape, data, weight.pieces,
                                  strides.get(weight.name, 0)))
        tensors.append(report())
    if head is None:
        return tensors
    types = {weight.name: with_levels(reading, weight, head.types[weight.name]) for weight in head.weights}
    head = replace(head, types={**head.types, **types})
    each = {weight.name: stored_bytes(reading, weight, types[weight.name]) for weight in head.weights}
    content = pack_draft_head(head, {name: data for name, (data, _) in each.items()}, weights_identity(entries))
    writer.add_file(DRAFT_HEAD_FILE, content, "draft_head")
    return [*tensors, *(report() for _, report in each.values())]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model in a foreign format: a directory, or a GGUF file; raises as `Checkpoint.open`."""
    path = Path(path)
    if path.is_file() and is_gguf(path):
        return GgufCheckpoint.open(path)
    fields, _ = checkpoint_fields(path)
    return (PackedCheckpoint if is_quantised(fields) else Checkpoint).open(path)


def _instead(graph: Graph, asked: Quantisation) -> Iterator[str]:
    """Yield a sentence on matrices whose rows the requested type does not fit."""
    for kinds, name in ((("matrix", "experts"), asked.weights), (("embedding",), asked.embedding),
                        (("head",), asked.head)):
        some = [weight for weight in graph.weights if weight.kind in kinds and TYPES[name].nested
                and weight.shape[-1] % SUPER_COLUMNS and graph.types[weight.name].dtype != name]
        if some:
            stored = sorted({graph.types[weight.name].dtype for weight in some})
            yield (f"{len(some)} matrices have rows of {some[0].shape[-1]} columns, and {name} needs a multiple of "
                   f"{SUPER_COLUMNS}: they are stored as {', '.join(stored)}.")


def _named(checkpoint: Checkpoint, origin: str) -> str:
    """Return the source that a bundle records: the model's own name, and where it was found."""
    own = checkpoint.label
    both = origin and own not in origin and checkpoint.config_source != CONFIG_FILE
    return f"{own}, from {origin}" if both else origin or own


def _say_once(destination: str | Path) -> Callable[[], None]:
    """Return a callback for while another process writes the destination; it reports that once."""
    said: list[str] = []

    def waiting() -> None:
        if not said:
            said.append(f"Another process is writing {destination}; waiting for it.")
            say(said[0])

    return waiting


def graph_bytes(graph: Graph) -> int:
    """Bytes of all weights as stored."""
    return sum(graph.types[weight.name].nbytes(weight.shape) for weight in graph.weights)


def bundle_bytes(graph: Graph, files: Sequence[Path]) -> int:
    """Bytes on the disk of a bundle with these files, gaps and header included; a little more than less."""
    weights = weights_file_bytes(graph)
    return weights + sum(path.stat().st_size for path in files) + ENTRY_BYTES * (len(graph.weights) + 4 * len(files))


def open_texts(folder: Path, files: Mapping[str, Path], checkpoint: Checkpoint) -> bool:
    """Open copied tokenizer and chat template as a run does, so that a converted model also runs; False without one.

    Raises
    ------
    TokenizerError
        Running could not open them; the message names the file of the checkpoint.
    """
    try:
        found = Tokenizer.of_model(folder, files, checkpoint.config) is not None
        if template := ChatTemplate.open(folder):
            template.check()
    except TokenizerError as error:
        message = str(error)
        for name, path in files.items():
            message = message.replace(str(folder / name), str(path))
        raise TokenizerError(message.replace(str(folder), str(checkpoint.path))) from None
    return found
