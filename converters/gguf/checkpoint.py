"""A GGUF file, or the parts of a split one, as a checkpoint: config from metadata, tensors by the file's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Quantisation, own_weights
from edgeinfer.errors import CheckpointError, UnsupportedModelError, UsageError
from edgeinfer.graph import (
    ORDER,
    ROUTER,
    Columns,
    Graph,
    HeadOrder,
    ModelConfig,
    Source,
    Transposed,
    TypeOf,
    Weight,
    build_draft_head,
    build_graph,
    expected_types,
    requested_types,
)
from edgeinfer.quant import GROUP_SIZES, WeightType, quantise

from ..checkpoint.directory import Checkpoint
from ..checkpoint.safetensors_file import SourceTensor
from ..parts_by_type import name_of_part, parts_by_type
from .config import LONG, ROPE_FACTORS, SHORT, read_gguf_model
from .file import read_headers
from .header import GgufHeader, GgufTensor
from .moved_blocks import moved
from .names import CONVOLUTIONS, SHARED_GATE, VECTORS, with_gguf_names
from .tensors import GgufFile
from .tokenizer import GgufTokenizer, read_gguf_tokenizer
from .types import EXACT, INEXACT, REQUANTISED, REQUANTISED_ERROR, REQUANTISED_KLD, smallest

SPARE_GROUP = 32
"""Group size in a header whose types of weights leave no choice."""
FACTORS = (ROPE_FACTORS, LONG, SHORT)
MAX_FACTORS = 1 << 16
"""Most factors of a rotation: more than any head has, less than a file can hold."""
Kinds = dict[str, str]
"""Names of the types of tensors, by the tensors' names."""


@dataclass
class GgufCheckpoint(Checkpoint):
    """An open GGUF model; use `GgufCheckpoint.open`. A context manager."""

    headers: tuple[GgufHeader, ...] = ()
    parts: dict[str, GgufFile] = field(default_factory=dict)
    """`files` by role."""
    tokenizer: GgufTokenizer | None = None
    config_source: ClassVar[str] = "its metadata"

    @classmethod
    def open(cls, path: str | Path, data: bool = True, headers: list[GgufHeader] | None = None) -> GgufCheckpoint:
        """Read the headers of all parts; of the tensors only the factors of the rotation.

        Parameters
        ----------
        path : str or Path
            The file, of a split model the first.
        data : bool
            Refuse a file without all bytes of its tensors; else the header is enough, and the factors are passed over
            where they are missing.
        headers : list of GgufHeader, optional
            Of all parts, where they were read before.

        Raises
        ------
        CheckpointError
            If a part is missing, foreign or damaged.
        UnsupportedModelError
            If the model's mathematics is not implemented.
        """
        path = Path(path)
        headers = headers or read_headers(path)
        files: dict[str, GgufFile] = {}
        try:
            for header in headers:
                file = GgufFile(header, data)
                if twice := next((name for name in file.tensors if name in files), None):
                    file.close()
                    raise CheckpointError(f"The tensor {twice:.60} is both in {files[twice].path} and in {file.path}.")
                files |= dict.fromkeys(file.tensors, file)
            if not files:
                raise CheckpointError(f"{path} has no tensors: it is a vocabulary, not a model; give the model's file.")
            config = read_gguf_model(headers[0], all_tensors(headers), _rope_factors(files, data))
            tokenizer = read_gguf_tokenizer(headers[0].fields, str(path)) if data else None
            if tokenizer:
                config = replace(config, bos_token_id=tokenizer.bos_id, eos_token_ids=tokenizer.end_ids)
            return cls(path, config, dict(files), {}, headers=tuple(headers), parts=files, tokenizer=tokenizer)
        except BaseException:
            for file in set(files.values()):
                file.close()
            raise

    @property
    def travelling_files(self) -> dict[str, Path]:
        """A GGUF file has no files of its own next to it."""
        return {}

    @property
    def label(self) -> str:
        """Return the model's own name, if it has one: the name of a file in ollama's store is a checksum."""
        name = self.headers[0].fields.get("general.name")
        return name[:200] if isinstance(name, str) and name.isprintable() and name else super().label

    @property
    def made_files(self) -> dict[str, bytes]:
        """The tokenizer's files."""
        return self.tokenizer.files if self.tokenizer else {}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Assumptions about the tokenizer, and omissions."""
        return (*(self.tokenizer.remarks if self.tokenizer else ()), *self._left_out, *self._unread_remarks)

    @property
    def ignored(self) -> frozenset[str]:
        """Ignore the factors of rotations, which are in the config, K and V that no layer reads, and drafts."""
        return frozenset(FACTORS) | self._unread | self.predicted

    def tensor(self, name: str) -> SourceTensor:
        """Type and shape of one tensor."""
        found = super().tensor(name)
        if name.endswith(SHARED_GATE) and len(found.shape) == 1:
            return replace(found, shape=(1, *found.shape))
        if name.endswith(VECTORS) and len(found.shape) > 1:
            return replace(found, shape=(prod(found.shape),))
        if CONVOLUTIONS.fullmatch(name):
            return replace(found, shape=(prod(found.shape[:-1]), found.shape[-1]))
        return found

    def kind(self, name: str) -> str:
        """Name of a tensor's type in the file."""
        return self.tensor(name).dtype

    def file_types(self, weight: Weight) -> tuple[str, ...]:
        """Names of the types of a weight's tensors, each once."""
        return tuple(dict.fromkeys(self.kind(source.name) for source in weight.sources))

    def moved(self, weight: Weight, stored: WeightType, count: Callable[[str, int], None],
              sums: list[quantise.ErrorSums]) -> Iterator[NDArray[np.uint8]] | None:
        """The stored bytes of a weight whose codes can be moved as they are."""
        return moved(self.parts, weight, stored, count)

    def named(self, graph: Graph) -> Graph:
        """Return a graph whose weights' sources have the file's names."""
        return with_gguf_names(graph, self.config, self.files)

    def storage(self, weights: str | None, group_size: int | None, embedding: str | None, head: str | None,
                ffn_layout: str) -> tuple[TypeOf, Quantisation]:
        """Choose types: those of the file unless a type is requested, except types whose levels no edgeinfer type has.

        `weights` asks for all of them. Raises `UnsupportedModelError` if a tensor is of no type that weights have.
        """
        if weights is not None:
            return super().storage(weights, group_size, embedding, head, ffn_layout)
        if group_size is not None or embedding or head or ffn_layout != "tile16":
            raise UsageError("A GGUF file is taken as it is, type by type; for --group-size, --embedding, --head or "
                             "--ffn-layout also say with --weights how its weights are to be requantised.")
        kinds = {name: self.kind(name) for name in self.files}
        _refuse_unknown(kinds, self.path)
        return storage_of_file(self.config, kinds)


def _rope_factors(files: dict[str, GgufFile], data: bool) -> dict[str, list[float]]:
    """The factors of the rotation, by tensor; without `data` those that the file does not end before."""
    found: dict[str, list[float]] = {}
    for name in FACTORS:
        file = files.get(name)
        if not file or not (data or file.has(name)):
            continue
        n = prod(file.tensors[name].shape)
        if n > MAX_FACTORS:
            raise CheckpointError(f"{name} in {file.path} has {n} values, more than any head needs; download it again.")
        found[name] = file.read(name, [0], n)[0].tolist()
    return found


def all_tensors(headers: list[GgufHeader]) -> dict[str, GgufTensor]:
    """Tensors of all parts by name."""
    return {name: tensor for header in headers for name, tensor in header.tensors.items()}


def _refuse_unknown(kinds: Kinds, path: Path) -> None:
    """Refuse a file with types that weights do not have; raises `UnsupportedModelError`, which names them."""
    counts = Counter(kind for kind in kinds.values() if kind not in EXACT and kind not in INEXACT)
    if counts:
        said = ", ".join(f"{n} of {kind}" for kind, n in counts.most_common())
        raise UnsupportedModelError(f"{path} has tensors of types that weights do not have ({said}); edgeinfer takes "
                                    f"{', '.join((*EXACT, *INEXACT))}: convert the file again from the original model.")


def kept(kinds: Kinds) -> str:
    """Describe how a file's tensors are stored by default, as the end of a sentence."""
    if not (requantised := [kind for kind in INEXACT if kind in kinds.values()]):
        return "codes and scales are kept"
    return (f"codes and scales are kept, except {', '.join(requantised)}, which no type of edgeinfer's holds exactly: "
            f"requantised to {REQUANTISED.dtype} (squared error, measured on small models: "
            f"{_requantised_errors(requantised)})")


def _requantised_errors(kinds: list[str]) -> str:
    """Return the errors of types requantised beside those of the types themselves, for a sentence."""
    def both(own: float, requantised: float, form: str) -> str:
        return f"{own:{form}}, as {REQUANTISED.dtype} {requantised:{form}}, {requantised / own - 1:+.0%}"

    return "; ".join(f"{kind} itself {both(*REQUANTISED_ERROR[kind], '.1e')}"
                     + (f", its KL divergence {both(*REQUANTISED_KLD[kind], '.3f')}" if kind in REQUANTISED_KLD else "")
                     for kind in kinds)


UNLIKE = WeightType("int8", 32)
"""Type of gate and up, which are stored as one, in types of the file that no quantised type holds together: f32 would,
at nearly four times the bytes. It adds a hundredth of the error of types of 4 bits."""


def storage_of_file(config: ModelConfig, kinds: Kinds) -> tuple[TypeOf, Quantisation]:
    """Return the smallest exact type of each weight or of its parts, and one word for a bundle's header."""
    graph = with_gguf_names(build_graph(config, requested_types("f32")), config, kinds)
    table: dict[str, WeightType] = {}
    sizes: Counter[WeightType] = Counter()
    for weight in (*graph.weights, *_of_drafts(config, kinds)):
        if weight.kind == "vector":
            continue
        if weight.kind == "router":
            table[weight.name] = ROUTER
            continue
        parts = parts_by_type(weight, lambda sources: _stored(sources, kinds),
                              lambda source: kinds.get(source.name) in INEXACT)
        for first, part in parts.items():
            name, stored = name_of_part(weight, first), _stored(part, kinds)
            apart = [_stored([source], kinds).quantised for source in part]
            if not stored.quantised and weight.combine != "concat" and all(apart):
                stored = UNLIKE
            table[name] = stored
            if stored.quantised and _has_column_order(part):
                table[replace(weight, name=name).order_name] = ORDER
            if weight.kind in ("matrix", "experts"):
                sizes[stored] += sum(prod(source.shape) for source in part)
    most_common = sizes.most_common(1)[0][0]
    head = table.get("head", table["embed"])
    group = most_common.group_size if most_common.group_size in GROUP_SIZES else SPARE_GROUP
    return expected_types(table), Quantisation(most_common.dtype, group, table["embed"].dtype, head.dtype)


def _of_drafts(config: ModelConfig, kinds: Kinds) -> tuple[Weight, ...]:
    """The weights of the head for further tokens, if the file has one."""
    head = build_draft_head(config, requested_types("f32"))
    weights = with_gguf_names(replace(head, weights=own_weights(head)), config, kinds).weights if head else ()
    return weights if all(source.name in kinds for weight in weights for source in weight.sources) else ()


def _has_column_order(sources: list[Source]) -> bool:
    """Return whether columns of a file's matrices are in another order; codes stay where they are, and inputs are
    moved."""
    return any(isinstance(step, HeadOrder) and step.axis == "columns" for source in sources for step in source.steps)


def _stored(sources: list[Source], kinds: Kinds) -> WeightType:
    """Return the common type of tensors; a missing one is reported later, by name. Some columns, or a transposed one,
    have no blocks."""
    found = {kinds[source.name] for source in sources if source.name in kinds}
    stored = (smallest(found) if found else None) or WeightType("f32")
    turned = any(isinstance(step, Columns | Transposed) for source in sources for step in source.steps)
    return WeightType("f32") if turned and stored.quantised else stored
