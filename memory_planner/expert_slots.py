"""Where experts go that are read when a token wants them: slots, and the tables that say which expert is where."""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.dataclass import dataclass
from edgeinfer.graph import Graph, OnDemand
from edgeinfer.kernels import abi, routes
from edgeinfer.sizes import round_up

PAGE_BYTES, READ_BYTES = 4096, 1 << 20
"""Direct I/O reads whole pages of a file to whole pages of memory; what is read at a time (docs/streaming.md)."""
READERS = 8
"""Threads that read experts and neurons: a disk answers faster where it has several reads at a time."""
LEAST_READ_BYTES, MOST_READ_BYTES = 256 << 10, 4 << 20
"""Of experts: those wanted are as many reads as keep all readers busy, within these limits (docs/experts.md)."""


@dataclass(frozen=True)
class ExpertsOfLayer:
    """The matrices of a layer's experts, which lie expert by expert in the file: gates and ups, then columns."""

    layer: int
    offset: int
    """Where the first expert begins."""
    gate_up_bytes: int
    """Of one expert."""
    down_bytes: int

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        return self.gate_up_bytes + self.down_bytes


@dataclass(frozen=True)
class ExpertsPlan:
    """The cache of all experts."""

    layers: tuple[ExpertsOfLayer, ...]
    experts: int
    """Of a layer."""
    active: int
    """Experts that a token goes through in a layer."""
    slots: int
    """Experts that the cache holds: at least all of a layer, which a prompt goes through."""

    @classmethod
    def of(cls, graph: Graph, offsets: Mapping[str, int], slots: int) -> ExpertsPlan:
        """Return the plan for a graph of a mixture."""
        found = mixtures(graph)
        layers = tuple(ExpertsOfLayer(gate_up.layer, offsets[gate_up.weight.name], gate_up.nbytes, down.nbytes)
                       for gate_up, down in found)
        return cls(layers, found[0][0].pieces, found[0][0].active, slots)

    @property
    def slot_bytes(self) -> int:
        """Of a slot: whole pages as far as an expert reaches in the file."""
        return max(_pages(layer.offset, layer.nbytes) for layer in self.layers)

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return len(self.layers) * self.experts

    @property
    def stored_bytes(self) -> int:
        """Of all experts."""
        return self.experts * sum(layer.nbytes for layer in self.layers)

    @property
    def expert_bytes(self) -> float:
        """Of an expert, on average over layers."""
        return self.stored_bytes / self.total

    @property
    def span(self) -> int:
        """Experts of a part."""
        return -(-self.experts // routes.EXPERT_PARTS)

    def number(self, layer: int) -> int:
        """Which of the layers with experts a layer is."""
        return next(i for i, own in enumerate(self.layers) if own.layer == layer)

    # -- the region ----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> int:
        """Where the places of experts lie in the region, PLACE_BYTES each, layer by layer, behind the slots."""
        return round_up(self.slots * self.slot_bytes, 64)

    @property
    def table_words(self) -> int:
        """Their int32."""
        return self.total * routes.PLACE_BYTES // 4

    @property
    def counts(self) -> int:
        """Where the counts of experts lie, 4 bytes each, layer by layer."""
        return self.table + round_up(4 * self.table_words, 64)

    @property
    def owners(self) -> int:
        """Where the experts in slots lie, 4 bytes each."""
        return self.counts + round_up(4 * self.total, 64)

    @property
    def stamps(self) -> int:
        """Where the stamps of slots lie, 8 bytes each."""
        return self.owners + round_up(4 * self.slots, 64)

    @property
    def cleared(self) -> int:
        """From where on, up to `words`, there are zeros in an empty cache."""
        return self.stamps

    @property
    def words(self) -> int:
        """Where COLD_* lie."""
        return self.stamps + round_up(8 * self.slots, 64)

    @property
    def wanted(self) -> int:
        """Where there is a word for each expert of a layer."""
        return self.words + abi.COLD_BYTES

    @property
    def nbytes(self) -> int:
        """Of the region."""
        return self.wanted + round_up(4 * self.experts, 64) + 64

    # -- what readers are told -----------------------------------------------------------------------------------------

    @property
    def tickets(self) -> int:
        """Of all layers."""
        return 2 * routes.EXPERT_PARTS * len(self.layers)

    @property
    def pieces(self) -> int:
        """Reads that may be under way: those of all experts of a layer."""
        return self.experts * (2 + -(-self.slot_bytes // LEAST_READ_BYTES))

    @property
    def queue_bytes(self) -> int:
        """Of pieces, tickets' parts, and records."""
        records = (1 + 2 * routes.EXPERT_PARTS) * len(self.layers) * abi.RECORD_BYTES
        return abi.PIECE_BYTES * self.pieces + abi.PART_BYTES * self.tickets + records


def mixtures(graph: Graph) -> list[tuple[OnDemand, OnDemand]]:
    """The layers' experts, in the order of the layers: gate and up, then down."""
    found = graph.on_demand("experts")
    return list(zip(found[0::2], found[1::2], strict=True))


def _pages(offset: int, nbytes: int) -> int:
    """Bytes of the pages around any of the experts, the first of which begins at `offset`."""
    whole = offset % PAGE_BYTES == nbytes % PAGE_BYTES == 0
    return nbytes if whole else round_up(nbytes + PAGE_BYTES - routes.LINE, PAGE_BYTES)
