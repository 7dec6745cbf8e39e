"""A checkpoint of Hugging Face whose weights are quantised: codes are kept if a storage type holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Quantisation, own_weights
from edgeinfer.errors import CheckpointError, UnsupportedModelError, UsageError
from edgeinfer.graph import (
    ORDER,
    ROUTER,
    ModelConfig,
    Source,
    TypeOf,
    Weight,
    build_draft_head,
    build_graph,
    expected_types,
    read_config,
    requested_types,
)
from edgeinfer.quant import WeightType, quantise

from ..checkpoint.directory import Checkpoint, checkpoint_fields, text_model
from ..checkpoint.expert_names import with_experts
from ..checkpoint.shards import open_shards
from ..parts_by_type import name_of_part, parts_by_type
from .config import take_scheme
from .gather import gathered
from .kinds import F32, PLAIN, PackedKind
from .moved_codes import moved
from .orders import is_ordered, order_of, refuse_unread
from .tensor import PackedTensor

SPARE_GROUP = 32
"""Group size in a header whose weights are all floats."""
Kinds = Mapping[str, PackedKind | str]
"""Kind of each tensor: a kind of quantised tensors, or the name of a float type."""


@dataclass
class PackedCheckpoint(Checkpoint):
    """An open checkpoint with quantised weights; use `PackedCheckpoint.open`. A context manager."""

    packed: dict[str, PackedTensor] = field(default_factory=dict)
    """The quantised tensors, by the names that they have in the model."""
    kinds: dict[str, PackedKind | str] = field(default_factory=dict)
    """Kind of each tensor of the text model, by the architecture's names."""
    no_weights: frozenset[str] = frozenset()
    """Names of tensors that belong to no weight: biases of zeros, scales of activations."""

    @classmethod
    def open(cls, path: str | Path) -> PackedCheckpoint:
        """Read config, headers, and the order of columns; raises as `Checkpoint.open`."""
        path = Path(path)
        fields, generation = checkpoint_fields(path)
        fields, scheme = take_scheme(fields)
        config = read_config(fields, generation)
        if scheme is None:
            raise CheckpointError(f"The config of {path} does not say that its weights are quantised.")
        files, aliases = open_shards(path)
        try:
            every, packed, no_weights = gathered(files, scheme)
            config, names = text_model(fields, config, every)
            own = {name: alias for alias, name in names.aliases.items()}
            kinds = {own.get(name, name): packed[name].kind if name in packed else file.tensors[name].dtype
                     for name, file in every.items() if name not in names.pictures}
            packed |= {alias: packed[name] for name, alias in own.items() if name in packed}
            return cls(path, config, every, {**names.aliases, **aliases}, names.pictures, packed=packed, kinds=kinds,
                       no_weights=no_weights)
        except BaseException:
            for file in set(files.values()):
                file.close()
            raise

    @property
    def ignored(self) -> frozenset[str]:
        """Tensors that are not weights."""
        return super().ignored | self.no_weights

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on tensors that were left out."""
        scales = sum(name.endswith("scale") for name in self.no_weights)
        said = f"{scales} scales of activations, K or V are left out: edgeinfer computes its own, by group and token."
        return (*super().remarks, said) if scales else super().remarks

    @property
    def quantised(self) -> Collection[str]:
        """Names of quantised tensors."""
        return self.packed

    def file_types(self, weight: Weight) -> tuple[str, ...]:
        """Names of the types of a weight's tensors, each once."""
        return tuple(dict.fromkeys(self.tensor(source.name).dtype for source in weight.sources))

    def moved(self, weight: Weight, stored: WeightType, count: Callable[[str, int], None],
              sums: list[quantise.ErrorSums]) -> Iterator[NDArray[np.uint8]] | None:
        """The stored bytes of a weight whose codes can be moved as they are."""
        return moved(self.packed, weight, stored, count, sums)

    def storage(self, weights: str | None, group_size: int | None, embedding: str | None, head: str | None,
                ffn_layout: str) -> tuple[TypeOf, Quantisation]:
        """Choose types: those of the checkpoint where nothing is requested; `weights` asks for all matrices.

        Raises `UnsupportedModelError` if no storage type holds a tensor unchanged, and nothing was requested.
        """
        if weights is not None:
            return super().storage(weights, group_size, embedding, head, ffn_layout)
        if group_size is not None or ffn_layout != "tile16":
            raise UsageError("A quantised checkpoint is taken as it is; for --group-size or --ffn-layout also say with "
                             "--weights how its weights are to be requantised.")
        refuse_dear(self.kinds, str(self.path))
        return storage_of(self.config, self.kinds, embedding, head)


def refuse_dear(kinds: Kinds, path: str) -> None:
    """Refuse weights that only f32 would hold; raises `UnsupportedModelError`, which names them."""
    counts = Counter(kind.name for kind in kinds.values() if isinstance(kind, PackedKind) and kind.choices == (F32,))
    if counts:
        said = ", ".join(f"{n} of {kind}" for kind, n in counts.most_common())
        raise UnsupportedModelError(
            f"{path} has quantised tensors that edgeinfer cannot keep as they are yet ({said}). To requantise "
            f"all weights and report the error: edgeinfer run {path} --weights q4 (or int8, f16), or convert.")


def storage_of(config: ModelConfig, kinds: Kinds, embedding: str | None = None, head: str | None = None
               ) -> tuple[TypeOf, Quantisation]:
    """Return the smallest type that holds each weight, and one word for a bundle's header."""
    asked = {kind: WeightType.of(name) for kind, name in (("embedding", embedding), ("head", head)) if name}
    requested_types("f32", embedding=embedding, head=head)  # or it is refused
    packed = {name for name, kind in kinds.items() if isinstance(kind, PackedKind)}
    graph = with_experts(build_graph(config, requested_types("f32")), kinds, packed)
    table: dict[str, WeightType] = {}
    sizes: Counter[WeightType] = Counter()
    for weight in (*graph.weights, *_of_drafts(config, kinds, packed)):
        if weight.kind == "vector":
            continue
        if weight.kind == "router" or weight.kind in asked:  # routers are floats whatever they were
            table[weight.name] = ROUTER if weight.kind == "router" else asked[weight.kind]
            continue
        parts = parts_by_type(weight, lambda sources: _stored(sources, kinds), partial(order_of, kinds))
        for first, part in parts.items():
            name, stored = name_of_part(weight, first), _stored(part, kinds)
            table[name] = stored
            if is_ordered(weight, part, kinds, stored):
                table[replace(weight, name=name).order_name] = ORDER
            if stored.quantised and weight.combine == "folded16":
                raise UnsupportedModelError(
                    f"{part[0].name} is a quantised table of which a token reads a row, whose codes are not taken as "
                    "they are yet. To requantise all weights and report the error, add --weights q4 (or int8, f16).")
            if weight.kind in ("matrix", "experts"):
                sizes[stored] += sum(prod(source.shape) for source in part)
    most_common = sizes.most_common(1)[0][0]
    if ORDER in table.values():
        refuse_unread(build_graph(config, expected_types(table)), table)
    group = most_common.group_size or SPARE_GROUP
    return expected_types(table), Quantisation(most_common.dtype, group, table["embed"].dtype,
                                               table.get("head", table["embed"]).dtype)


def _of_drafts(config: ModelConfig, kinds: Kinds, packed: Collection[str]) -> tuple[Weight, ...]:
    """The weights of the head for further tokens, if the checkpoint has one."""
    head = build_draft_head(config, requested_types("f32"))
    weights = with_experts(replace(head, weights=own_weights(head)), kinds, packed).weights if head else ()
    return weights if all(source.name in kinds for weight in weights for source in weight.sources) else ()


def _stored(sources: Sequence[Source], kinds: Kinds) -> WeightType:
    """Return the common type of tensors; a missing one is reported later, by name."""
    found = [kinds[source.name] for source in sources if source.name in kinds]
    choices = [kind.choices if isinstance(kind, PackedKind) else PLAIN.get(kind, (F32,)) for kind in found]
    common = set(choices[0]).intersection(*choices[1:]) if choices else {F32}
    if len({order_of(kinds, source) for source in sources}) > 1:  # no codes beside codes in another order
        common = {stored for stored in common if not stored.quantised}
    return min(common, key=lambda stored: stored.bits_per_weight)
