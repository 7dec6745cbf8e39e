"""Convert a checkpoint to a bundle, tensor by tensor and block by block: memory does not grow with the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.process import say
from edgeinfer.base.progress import OnStageProgress
from edgeinfer.base.units import format_size
from edgeinfer.bundle import DRAFT_HEAD_FILE, BundleWriter, pack_draft_head, weights_file_bytes, weights_identity
from edgeinfer.errors import CheckpointError, TokenizerError
from edgeinfer.graph import Graph, Weight, is_quantised, requested_types
from edgeinfer.quant import WeightType, layouts, quantise
from edgeinfer.rules import CONVERSION, plain
from edgeinfer.text import ChatTemplate, Tokenizer

from .assembly import assembled
from .checkpoint.directory import Checkpoint, checkpoint_fields
from .checkpoint.json_file import CONFIG_FILE
from .checkpoint.sources import BLOCK_WEIGHTS, SourceReader
from .gguf.checkpoint import GgufCheckpoint
from .gguf.file import is_gguf
from .quantized.checkpoint import PackedCheckpoint
from .report import ConversionReport, TensorReport

F16_MAX = 65504.0
MOVED_BYTES_PER_S, QUANTISED_PER_S, ROUNDED_PER_S = 250e6, 9e6, 40e6
"""Speeds at which weights are copied, quantised with a search for scales, and rounded or widened."""
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
        Type of the layers' matrices, one of `edgeinfer.config.WEIGHT_TYPES`. By default q4, but of a GGUF file and of
        a quantised checkpoint each weight as it is, with its codes and scales; a type asks to quantise what is not
        stored so.
    group_size : int, optional
        Columns that share one scale (quantised types); by default 32.
    embedding, head : str, optional
        Type of the embedding and of the output head; by default int8, or as `weights` if that is f16 or f32.
    ffn_layout : {'tile16', 'neuron'}
        How FFNs are stored: as matrices, or neuron by neuron (quantised types), so that dead neurons are not read.
    overwrite : bool
        Replace an existing bundle.
    origin : str
        What the bundle says that it was made of, beside the model's own name; by default that name alone.
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
    with open_checkpoint(source) as checkpoint:
        type_of, asked = checkpoint.storage(*types)
        graph, drafts = checkpoint.graph(type_of), checkpoint.draft_head(type_of)
        remarks = [*checkpoint.check(graph), *checkpoint.remarks]
        checkpoint.check_travelling_files()
        files, made = checkpoint.travelling_files, checkpoint.made_files
        both = graph if drafts is None else replace(
            graph, weights=(*graph.weights, *drafts.weights), types={**graph.types, **drafts.types})
        reading = _Reading(checkpoint, both, progress)
        tensors: list[TensorReport] = []
        with BundleWriter(destination, checkpoint.config, asked, overwrite=overwrite,
                          source=_named(checkpoint, origin), waiting=_say_once(destination)) as writer:
            nbytes = bundle_bytes(graph, list(files.values())) + sum(map(len, made.values()))
            nbytes += graph_bytes(drafts) if drafts else 0
            writer.reserve(nbytes)
            if announce:
                announce(_outlook(origin or source, destination, reading.total, nbytes, _seconds(checkpoint, both)))
            for name, path in files.items():
                writer.copy_file(path, name)
            for name, content in made.items():
                writer.add_file(name, content)
            if not open_texts(writer.folder, {**dict.fromkeys(made, checkpoint.path), **files}, checkpoint):
                remarks.append(f"{source} has no tokenizer, so the bundle takes token ids only.")
            strides, entries = graph.strides, []
            for weight in graph.weights:
                data, report = _stored(reading, weight, graph.types[weight.name])
                entries.append(writer.add(weight.name, graph.types[weight.name], weight.shape, data, weight.pieces,
                                          strides.get(weight.name, 0)))
                tensors.append(report())
            if drafts:
                tensors += _write_draft_head(writer, reading, drafts, weights_identity(entries))
    return ConversionReport(
        Path(destination), reading.total, sum(t.nbytes for t in tensors), time.perf_counter() - began,
        tuple(tensors), tuple(remarks),
    )


def _stored(reading: _Reading, weight: Weight, stored: WeightType
            ) -> tuple[Iterator[NDArray[np.uint8]], Callable[[], TensorReport]]:
    """Return the stored bytes of a weight, block by block, and the report of it once they were read."""
    checkpoint, sums = reading.checkpoint, list[quantise.ErrorSums]()
    moved = checkpoint.moved(weight, stored, reading.count, sums)

    def report() -> TensorReport:
        errors = sum(sums, quantise.ErrorSums())
        return TensorReport(weight.name, stored.dtype, stored.nbytes(weight.shape), errors,
                            checkpoint.file_types(weight), not errors.squared_error, moved is not None)

    return moved or packed(reading, weight, stored, sums), report


def _write_draft_head(writer: BundleWriter, reading: _Reading, head: Graph, identity: str) -> list[TensorReport]:
    """Write the head that drafts further tokens, a part of its own."""
    each = {weight.name: _stored(reading, weight, head.types[weight.name]) for weight in head.weights}
    content = pack_draft_head(head, {name: data for name, (data, _) in each.items()}, identity)
    writer.add_file(DRAFT_HEAD_FILE, content, "draft_head")
    return [report() for _, report in each.values()]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model in a foreign format: a directory, or a GGUF file; raises as `Checkpoint.open`."""
    path = Path(path)
    if path.is_file() and is_gguf(path):
        return GgufCheckpoint.open(path)
    fields, _ = checkpoint_fields(path)
    return (PackedCheckpoint if is_quantised(fields) else Checkpoint).open(path)


def _named(checkpoint: Checkpoint, origin: str) -> str:
    """Return the source that a bundle records: the model's own name, and where it was found."""
    own = checkpoint.label
    return f"{own}, from {origin}" if origin and own not in origin and checkpoint.says != CONFIG_FILE else origin or own


def _outlook(source: str | Path, destination: str | Path, read_bytes: int, nbytes: int, seconds: float) -> str:
    """Say how large a bundle will be, and how long it takes to make."""
    return (f"Converting {source} ({format_size(read_bytes)}) to a bundle of {format_size(nbytes)} in {destination}; "
            f"this takes about {max(1, round(seconds))} s.")


def _seconds(checkpoint: Checkpoint, graph: Graph) -> float:
    """Estimate the duration of a conversion, from one on two shared cores of Zen 3."""
    seconds = 0.0
    for weight in graph.weights:
        stored = graph.types[weight.name]
        if checkpoint.moved(weight, stored, lambda *_: None, []):
            seconds += stored.nbytes(weight.shape) / MOVED_BYTES_PER_S
        else:
            seconds += prod(weight.shape) / (QUANTISED_PER_S if stored.quantised else ROUNDED_PER_S)
    return seconds


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
    """Open copied tokenizer and chat template as running does, so that what converts also runs; False without one.

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


class _Reading(SourceReader):
    """Reads the sources of stored weights in stored order."""

    def blocks(self, weight: Weight) -> Iterator[NDArray[np.float32]]:
        """The stored rows as float32 (rows, cols), in blocks whose rows are a multiple of 16 up to the last one."""
        cols = prod(weight.shape[1:])
        return assembled(weight, cols, np.float32, self.rows, BLOCK_WEIGHTS)

    def parts(self, weight: Weight) -> Iterator[NDArray[np.float32]]:
        """Blocks (parts, hidden_size) of an FFN by neuron: all gate rows, then up row, down column, up row, ...

        Without a gate: all rows, then all columns.
        """
        gate, *up, down = weight.sources
        total, _, hidden = weight.shape
        step = max(1, 2 * BLOCK_WEIGHTS // hidden)  # columns are read piece by piece, this many at a time
        for start in range(0, total, step):
            yield self.rows(gate, start, min(start + step, total))
        for start in range(0, total, step):
            stop = min(start + step, total)
            block = np.empty((stop - start, 1 + len(up), hidden), np.float32)
            for i, source in enumerate(up):
                block[:, i] = self.rows(source, start, stop)
            block[:, -1] = self.columns(down, start, stop).T
            yield block.reshape(-1, hidden)


def packed(
    reading: _Reading, weight: Weight, stored: WeightType, sums: list[quantise.ErrorSums]
) -> Iterator[NDArray[np.uint8]]:
    """The stored bytes of a weight, block by block; errors of its quantisation are appended to `sums`."""
    name = ", ".join(dict.fromkeys(reading.checkpoint.stored(source.name) for source in weight.sources))
    if stored.layout == "neuron":
        for parts in reading.parts(weight):
            codes, scales, errors = quantise.quantise(parts, stored.dtype, stored.group_size, name)
            sums.append(errors)
            yield layouts.pack_parts(codes, stored.dtype, stored.group_size, scales)
        return
    for block in reading.blocks(weight):
        if stored.layout == "plain":
            yield np.ascontiguousarray(block, "<f4").reshape(-1).view(np.uint8)
        elif stored.quantised:
            codes, scales, errors = quantise.quantise(block, stored.dtype, stored.group_size, name)
            sums.append(errors)
            yield layouts.pack_tile16(codes, stored.dtype, stored.group_size, scales)
        else:
            values: NDArray[np.float16 | np.float32] = block
            if stored.dtype == "f16":
                values, errors = halves_of(block, name)
                sums.append(errors)
            yield layouts.pack_tile16(values, stored.dtype)


def halves_of(block: NDArray[np.float32], name: str) -> tuple[NDArray[np.float16], quantise.ErrorSums]:
    """Weights in fp16, which must be able to hold them, and the squared error of rounding."""
    largest = float(np.abs(block).max())
    if largest > F16_MAX:
        raise CheckpointError(
            f"The tensor {name} has the value {largest:.3g}, too large for f16; convert with weights f32."
        )
    halves, rounded = quantise.to_halves(np.ascontiguousarray(block))
    difference = block - rounded
    error = float(np.einsum("rc,rc->", difference, difference))
    return halves, quantise.ErrorSums(error, error, float(np.einsum("rc,rc->", block, block)))
