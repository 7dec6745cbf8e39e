"""Description of a model and its demands on a machine, without its weights: sizes, bytes per token, operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.dataclass import dataclass
from ..base.units import format_size
from ..bundle import Quantisation
from ..config import KV_TYPES, Recipe, RuntimeConfig
from ..graph import Graph, KvAccess, ModelConfig, Read, TypeOf, build_graph, expected_types, parameters
from ..quant import KV_TYPES as STORED_KV
from ..quant import TYPES
from ..registry import with_techniques

if TYPE_CHECKING:
    from edgeinfer.devices import Traffic
    from edgeinfer.memory_planner import Planner

    from ..runtime import SparseFfn


@dataclass(frozen=True)
class ModelDescription:
    """A model as far as plans and estimates need it. All sizes are exact, as converting would write them."""

    name: str
    """Name that was requested."""
    source: str
    """Origin of the description, for people."""
    config: ModelConfig
    quantisation: Quantisation
    """Storage that was requested, or that the bundle has."""
    graph: Graph
    """Forward pass of the model."""
    weight_bytes: int
    """Length of weights.bin."""
    recipe: Recipe = field(default_factory=Recipe)
    """The passes that made the graph."""
    sparse: SparseFfn | None = None
    """Modes of a bundle's sparse FFNs; None for other models."""
    bundle: Path | None = None
    """Path of a bundle that is described as stored."""
    path: Path | None = None
    """Bundle, checkpoint or GGUF file whose files are on this machine; None for a shape, a lone config.json and a model
    of the hub."""
    file_types: dict[str, int] = field(default_factory=dict)
    """Bytes of the tensors of a GGUF file or a quantised checkpoint, by type."""
    file_says: str = ""
    """Treatment of the quantised weights, as the end of a sentence."""
    file_refused: str = ""
    """Why converting refuses the checkpoint as it is; empty if it does not."""

    @cached_property
    def planner(self) -> Planner:
        """Plans runs of the model alone, for any number of devices: common parts are computed once."""
        from edgeinfer.memory_planner import Planner

        return Planner(self.graph, self.weight_bytes)

    @property
    def file_note(self) -> str:
        """Explain the contents of a GGUF file or a quantised checkpoint and the meaning of its figures; empty for
        others."""
        if not self.file_types:
            return f"The weights are quantised; {self.file_says}." if self.file_says else ""
        types = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in self.file_types.items())
        return (f"The file holds {format_size(sum(self.file_types.values()))} of tensors ({types}); {self.file_says}: "
                f"a bundle of {format_size(self.weight_bytes)}.")

    @property
    def parameters(self) -> int:
        """Weights of the model, without padding; tied matrices count once."""
        return self.graph.weight_count

    @property
    def active_parameters(self) -> float:
        """Parameters that one token uses: all, but of a mixture of experts only the active ones."""
        return self.parameters - sum(parameters(read.weight) * (1 - read.token / read.batch) for read in self._reads())

    @property
    def layers(self) -> int:
        """Transformer layers, of which a recipe may leave out the last."""
        return len({op.layer for op in self.graph.ops} - {None})

    @property
    def bytes_per_token(self) -> float:
        """Bytes of weights with their scales that one token reads: all but the table of embeddings."""
        return sum(read.token for read in self._reads())

    @property
    def all_bytes_per_pass(self) -> int:
        """Bytes that a forward pass over many tokens reads, all experts included."""
        return sum(read.batch for read in self._reads())

    @property
    def ffn_bytes(self) -> float:
        """Part of `bytes_per_token` that belongs to feed-forward networks."""
        ffn = (read for op in self.graph.ops if op.ffn for read in op.reads(self.graph.types))
        return sum(read.token for read in ffn if read.weight.kind != "vector")

    @property
    def operations_per_token(self) -> float:
        """Multiplications and additions of all matrices for one token, head included."""
        return sum(op.operations() for op in self.graph.ops)

    @property
    def head_operations(self) -> int:
        """Part of `operations_per_token` that belongs to the head."""
        return int(sum(op.operations() for op in self.graph.ops if op.out.rows == "outputs"))

    @property
    def kv_bytes_per_position(self) -> dict[str, int]:
        """Bytes of K and V with their scales that a position takes in all layers, by KV type."""
        return {kv: sum(access.position_bytes(kv) for access in self._kv(stores=True)) for kv in KV_TYPES}

    @property
    def kv_bytes_unshared(self) -> dict[str, int]:
        """Return `kv_bytes_per_position` of the same model with K and V of its own in each layer."""
        return {kv: sum(access.position_bytes(kv) for access in self._kv(stores=False)) for kv in KV_TYPES}

    @property
    def kv_values_per_position(self) -> int:
        """Elements of K and V of a position: 2 x layers x width; the pure figure with one byte each."""
        return sum(access.values for access in self._kv(stores=True))

    def pure_weight_bytes(self, bits: float = 4) -> float:
        """Bytes of all weights at this many bits each, without scales, as in rules of thumb."""
        return self.parameters * bits / 8

    def rebuild(self, type_of: TypeOf) -> Graph:
        """Give the graph with weights stored in another way."""
        return build_graph(self.config, type_of, self.recipe)

    @property
    def as_stored(self) -> Graph:
        """The graph without passes, as devices of onnxruntime take it."""
        plain = Recipe(())
        return self.graph if self.recipe == plain else build_graph(self.config, expected_types(self.graph.types), plain)

    @cached_property
    def _traffic_by_kv(self) -> dict[str, Traffic]:
        """Inputs of the estimator that were made, by KV type: estimates of hundreds of devices share them."""
        return {}

    def traffic(self, kv: str = RuntimeConfig.kv) -> Traffic:
        """Return the input of the estimator."""
        if kv not in self._traffic_by_kv:
            self._traffic_by_kv[kv] = self._make_traffic(kv)
        return self._traffic_by_kv[kv]

    def _make_traffic(self, kv: str) -> Traffic:
        from edgeinfer.devices import Traffic

        reads = list(self._kv(stores=False))
        chosen = [access for access in reads if access.topn]
        full, windowed = ([access for access in reads if bool(access.window) == w] for w in (False, True))
        found = Traffic(
            weight_bytes=self.bytes_per_token,
            layers=-(-self.layers // 2) if self.config.mixers else self.layers,  # blocks of a mixer or an FFN: halves
            operations=self.operations_per_token,
            head_operations=self.head_operations,
            kv_bytes=sum(access.position_bytes(kv) for access in full),
            window_kv_bytes=sum(access.position_bytes(kv) for access in windowed),
            state_bytes=sum(op.state_traffic for op in self.graph.ops),
            window=max((access.window for access in windowed), default=0),
            attention_operations=sum(access.operations for access in full),
            window_attention_operations=sum(access.operations for access in windowed),
            prefill_weight_bytes=self.all_bytes_per_pass,
            value_bytes=sum(access.position_bytes(kv) for access in chosen) / 2,
            topn=chosen[0].topn if chosen else None,
            score_bytes=sum(2 * access.operations / access.head_dim for access in chosen),
            activation_values=self.graph.activation_values,
            parameters=self.active_parameters,
            types=self.graph.type_shares,
            pure_bits=TYPES[self.quantisation.weights].bits,
            kv_values=self.kv_values_per_position,
            pure_kv_bits=STORED_KV[kv].bits,
            ffn_bytes=self.ffn_bytes,
        )
        return with_techniques(found, self, self.recipe)

    def _kv(self, stores: bool) -> Iterator[KvAccess]:
        return (op.kv for op in self.graph.ops if op.kv and op.kv.stores == stores)

    def _reads(self) -> Iterator[Read]:
        return (read for op in self.graph.ops for read in op.reads(self.graph.types))
