"""Whether the tensors of a checkpoint are those that a graph needs: all there, of these shapes, and none left over."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from edgeinfer.errors import CheckpointError
from edgeinfer.graph import Graph, Source, Weight

from .coverage import Use, check_uses
from .text_tensors import said_by

if TYPE_CHECKING:
    from .directory import Checkpoint

HEAD = "lm_head.weight"
COMPARED = 1 << 20
"""Elements of two tensors that are compared at a time."""


def check_tensors(checkpoint: Checkpoint, graph: Graph, compare: bool = True) -> list[str]:
    """Compare the tensors with those that the graph needs.

    Parameters
    ----------
    checkpoint : Checkpoint
        If head and embedding are one matrix under the head's name, its `aliases` are extended.
    graph : Graph
    compare : bool
        Whether a head that should be the embedding is compared with it, element by element.

    Returns
    -------
    list of str
        Remarks about tensors that are rightly left out.

    Raises
    ------
    CheckpointError
        If a tensor is missing or has another shape, if it or a part of it belongs to no part of the model, or a
        part to two that do not say so.
    """
    _follow_tie(checkpoint, graph)
    config = checkpoint.config
    uses: dict[str, list[Use]] = {}
    for weight in graph.weights:
        for source in weight.sources:
            for part in source.parts:
                _check_shape(checkpoint, weight, part)
                uses.setdefault(part.name, []).append((weight.name, part, part.shared or part is not source))
    for name, found in uses.items():
        check_uses(found, checkpoint.files[checkpoint.stored(name)].path, config.model_type)
    remarks = []
    for name in sorted(set(checkpoint.files) - set(map(checkpoint.stored, uses)) - checkpoint.ignored):
        if name == checkpoint.stored(HEAD) and config.tie_word_embeddings:
            embedding = next(weight.sources[0].name for weight in graph.weights if weight.kind == "embedding")
            if compare and not _same(checkpoint, HEAD, embedding):
                remarks.append(f"{HEAD} differs from {embedding} and is left out: tie_word_embeddings is true.")
            continue
        raise CheckpointError(
            f"The tensor {name} in {checkpoint.files[name].path} is not part of a {config.model_type} model; "
            f"{checkpoint.config_source} and the weights do not fit together."
        )
    return remarks


def misfit(checkpoint: Checkpoint, graph: Graph) -> str:
    """Say which tensor of a graph's weights a checkpoint lacks, or has in another shape; empty if it has all."""
    for part in (part for weight in graph.weights for source in weight.sources for part in source.parts):
        name = checkpoint.stored(part.name)
        if name not in checkpoint.files:
            return f"there is no tensor {said_by(part.name, checkpoint.config, checkpoint.files)}"
        if (have := checkpoint.tensor(name).shape) != part.stored:
            return f"the tensor {name} has shape {list(have)}, but {checkpoint.config_source} needs {list(part.stored)}"
    return ""


def _follow_tie(checkpoint: Checkpoint, graph: Graph) -> None:
    """Accept a checkpoint that stores a tied head and embedding under the head's name alone."""
    embedding = next((weight.sources[0].name for weight in graph.weights if weight.kind == "embedding"), HEAD)
    files = checkpoint.files
    if checkpoint.config.tie_word_embeddings and checkpoint.stored(embedding) not in files and HEAD in files:
        checkpoint.aliases[embedding] = HEAD


def _check_shape(checkpoint: Checkpoint, weight: Weight, source: Source) -> None:
    name, shape = source.name, source.stored
    if checkpoint.stored(name) not in checkpoint.files:
        tie = name == HEAD and ("; if the head is the embedding, set tie_word_embeddings to true in "
                                f"{checkpoint.config_source}")
        why = _missing_alias(checkpoint, name) or tie or ""
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {name}{why}.")
    have, file = checkpoint.tensor(name).shape, checkpoint.files[checkpoint.stored(name)]
    if have == shape:
        return
    if weight.kind in ("embedding", "head") and len(have) == 2 and have[1] == shape[1]:
        raise CheckpointError(
            f"{checkpoint.config_source} says vocab_size {shape[0]}, but {name} in {file.path} has {have[0]} rows; "
            "they must agree."
        )
    raise CheckpointError(
        f"The tensor {name} in {file.path} has shape {list(have)}, but {checkpoint.config_source} needs {list(shape)}."
    )


def _missing_alias(checkpoint: Checkpoint, name: str) -> str:
    """Describe which other tensor a missing one is an alias of, according to the files; empty if they name none."""
    for file in checkpoint.files.values():
        if other := file.aliases.get(name):
            return f", which {file.path} calls another name of {other:.80}, and that is not stored there"
    return ""


def _same(checkpoint: Checkpoint, a: str, b: str) -> bool:
    if checkpoint.tensor(a).shape != checkpoint.tensor(b).shape:
        return False
    rows, step = checkpoint.tensor(a).shape[0], max(1, COMPARED // prod(checkpoint.tensor(a).shape[1:]))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if not np.array_equal(checkpoint.read_rows(a, start, stop), checkpoint.read_rows(b, start, stop)):
            return False
    return True
