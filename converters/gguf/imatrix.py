"""Importance matrices of llama.cpp: mean squares of matrices' inputs, in a GGUF file or in the older binary form.

A GGUF file has, of each matrix, the tensors NAME.in_sum2 (sums of squares, a row of each expert) and NAME.counts
(tokens of each). The older form is a count of entries and, of each, the length of its name, the name, a number of calls
n, a count of values, and n times the mean squares; then perhaps a number of chunks and the name of the text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.errors import CheckpointError, UsageError
from edgeinfer.graph import Columns, Graph, HeadOrder, Transposed, Weight, build_graph, requested_types
from edgeinfer.quant import InputStatistics

from ..calibration import ByOption, Calibration, Statistics
from ..checkpoint.directory import Checkpoint
from .file import read_header
from .header import MAGIC
from .names import with_gguf_names
from .tensors import GgufFile

SUMS, COUNTS = ".in_sum2", ".counts"
MAX_ENTRIES, MAX_NAME, MAX_BYTES = 1 << 16, 1 << 10, 2 << 30


@dataclass(frozen=True)
class Entry:
    """Mean squares of the inputs of a matrix, or of those of all experts."""

    mean_square: NDArray[np.float32]
    """Mean squares of inputs, of shape (matrices, columns)."""
    counts: NDArray[np.float32]
    """Tokens that each was counted over; calls in the older form."""


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix."""

    path: Path
    entries: dict[str, Entry]
    """Entries by the name of the matrix in GGUF files."""
    text: str
    """Name of its text, empty if it is not known."""
    sha256: str
    """Hash of the file."""


def read_imatrix(path: Path) -> Imatrix:
    """Read an importance matrix in either form.

    Raises
    ------
    CheckpointError
        It cannot be read, is cut short, holds values that are not mean squares, or is no importance matrix.
    """
    with os_errors(CheckpointError, f"The importance matrix {path} cannot be read"), open_plain(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_BYTES >> 30} GiB, which no importance matrix has.")
    entries, text = _of_gguf(path) if data[:4] == MAGIC else _of_bytes(data, path)
    if not entries:
        raise CheckpointError(f"{path} is not an importance matrix: it has no sums of squares; make one with "
                              "llama-imatrix.")
    for name, entry in entries.items():
        if not np.isfinite(entry.mean_square).all() or (entry.mean_square < 0).any():
            raise CheckpointError(f"The entry {name:.80} of {path} has values that are no mean squares; make the "
                                  "importance matrix again.")
    return Imatrix(path, entries, text, hashlib.sha256(data).hexdigest())


def _of_gguf(path: Path) -> tuple[dict[str, Entry], str]:
    header = read_header(path)
    file, entries = GgufFile(header), {}
    try:
        for name, tensor in header.tensors.items():
            stem = name.removesuffix(SUMS)
            if stem == name or stem + COUNTS not in header.tensors:
                continue
            matrices = int(np.prod(tensor.shape[:-1]))
            if header.tensors[stem + COUNTS].shape[0] != matrices or tensor.kind.name != "F32":
                raise CheckpointError(f"The entry {stem:.80} of {path} has {matrices} rows of sums and "
                                      f"{header.tensors[stem + COUNTS].shape[0]} counts; make the importance matrix "
                                      "again.")
            sums = file.read(name, [0], matrices * tensor.shape[-1]).reshape(matrices, -1)
            counts = file.read(stem + COUNTS, [0], matrices).reshape(-1)
            means = np.asarray(sums / np.maximum(counts, 1)[:, None], np.float32)
            entries[stem] = Entry(means, counts)
    finally:
        file.close()
    texts = header.fields.get("imatrix.datasets")
    return entries, str(texts[0]) if isinstance(texts, list) and texts else ""


def _of_bytes(data: bytes, path: Path) -> tuple[dict[str, Entry], str]:
    """Read the older form, which does not record the number of experts of an entry."""
    at = 0

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    def take(n: int) -> bytes:
        nonlocal at
        if n < 0 or at + n > len(data):
            raise CheckpointError(f"{path} is not an importance matrix, or is cut short at its {len(data)} bytes.")
        at += n
        return data[at - n : at]

    entries: dict[str, Entry] = {}
    count = number()
    if not 0 < count <= MAX_ENTRIES:
        raise CheckpointError(f"{path} is not an importance matrix: its first number is {count}, not a count of "
                              "entries.")
    for _ in range(count):
        length = number()
        name = take(length if 0 < length <= MAX_NAME else -1).decode("utf-8", "replace")
        calls, n = number(), number()
        values = np.frombuffer(take(4 * n), np.float32)
        if calls > 0 and n:
            entries[name] = Entry((values / np.float32(calls)).reshape(1, -1), np.array([calls], np.float32))
    text = ""
    if at + 8 <= len(data):
        number()
        text = take(number()).decode("utf-8", "replace")
    return entries, text


def by_imatrix(path: Path) -> Callable[[Checkpoint], Calibration]:
    """Return the function by which `convert` gets statistics from an importance matrix.

    Raises
    ------
    CheckpointError
        As `read_imatrix`.
    """
    imatrix = read_imatrix(path)

    def calibration(checkpoint: Checkpoint) -> Calibration:
        graph = with_gguf_names(build_graph(checkpoint.config, requested_types("f32")), checkpoint.config,
                                imatrix.entries)
        found = dict(_found(imatrix, graph))
        remarks = _remarks(imatrix, graph, found)
        tokens = max(int(entry.counts.max()) for entry in imatrix.entries.values())
        return Calibration("importance", imatrix.text or path.name, imatrix.sha256, tokens,
                           lambda weight: found.get(weight.name) or found.get(weight.name.rpartition(".")[0]), remarks)

    return ByOption(calibration, "--imatrix")


def _found(imatrix: Imatrix, graph: Graph) -> Iterator[tuple[str, Statistics]]:
    """Yield the name and the statistics of each weight that an entry is of."""
    found = 0
    for weight in graph.weights:
        if weight.kind == "vector" or not (names := [source.name for source in weight.sources
                                                     if source.name in imatrix.entries]):
            continue
        found += 1
        if not any(isinstance(step, Columns | HeadOrder | Transposed) for step in weight.sources[0].steps):
            yield weight.name, _of_entry(imatrix, names[0], weight)
    if not found:
        name = next(iter(imatrix.entries))
        raise UsageError(f"{imatrix.path} is the importance matrix of another model: none of its "
                         f"{len(imatrix.entries)} entries, such as {name:.80}, is a matrix of this one.")


def _of_entry(imatrix: Imatrix, name: str, weight: Weight) -> Statistics:
    entry, cols, pieces = imatrix.entries[name], weight.shape[-1], weight.pieces or 1
    squares, counts = entry.mean_square, entry.counts
    if len(squares) == 1 and squares.size == pieces * cols:
        squares, counts = squares.reshape(pieces, cols), np.repeat(counts, pieces)
    if squares.shape != (pieces, cols):
        raise UsageError(f"{imatrix.path} is the importance matrix of another model: its entry {name} is of "
                         f"{len(squares)} x {squares.shape[1]} inputs, and the matrix has {pieces} x {cols}.")
    seen = (counts > 0) & (squares.max(axis=1) > 0)
    if not seen.any():
        return None
    usual = squares[seen].mean(axis=0)  # of experts that no token chose
    return [InputStatistics(int(n), np.ascontiguousarray(row if there else usual), None, None)
            for row, n, there in zip(squares, counts, seen, strict=True)]


def _remarks(imatrix: Imatrix, graph: Graph, found: dict[str, Statistics]) -> tuple[str, ...]:
    """Say which matrices have no entry."""
    missing = [weight.name for weight in graph.weights if weight.kind in ("matrix", "experts") and not
               found.get(weight.name)]
    if not missing:
        return ()
    return (f"{imatrix.path} says nothing of the inputs of {len(missing)} matrices, such as {missing[0]}, which are "
            "rounded plainly.",)
