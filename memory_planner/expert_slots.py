"""Slots for experts that are read when a token needs them, and the tables that map experts to slots."""

from __future__ import annotations

from collections.abc import Mapping

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.units import round_up
from edgeinfer.graph import Graph, OnDemand
from edgeinfer.kernels import abi, routes

PAGE_BYTES, READ_BYTES = 4096, 1 << 20
"""Direct I/O reads whole pages of a file to whole pages of memory; the unit of a read
(docs/explanation/streaming.md)."""
READERS = 8
"""Threads that read experts and neurons: a disk answers faster with several reads at a time."""
MIN_READ_BYTES, MAX_READ_BYTES = 256 << 10, 4 << 20
"""Limits of a read of experts: those that a pass needs are as many reads as keep all readers busy
(docs/explanation/experts.md)."""


@dataclass(frozen=True)
class ExpertsOfLayer:
    """The matrices of a layer's experts, which are expert by expert in the file: gates and ups, then columns."""

    layer: int
    offset: int
    """Offset of the first expert."""
    gate_up_bytes: int
    """Bytes of gate and up of one expert."""
    down_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return self.gate_up_bytes + self.down_bytes


@dataclass(frozen=True)
class ExpertsPlan:
    """The cache of all experts."""

    layers: tuple[ExpertsOfLayer, ...]
    experts: int
    """Experts of a layer."""
    active: int
    """Experts that a token goes through in a layer."""
    slots: int
    """Experts that the cache holds: at least all of a layer, which a prompt goes through."""

    @classmethod
    def of(cls, graph: Graph, offsets: Mapping[str, int], slots: int) -> ExpertsPlan:
        """Return the plan for a graph of an MoE model."""
        found = moes(graph)
        layers = tuple(ExpertsOfLayer(gate_up.layer, offsets[gate_up.weight.name], gate_up.nbytes, down.nbytes)
                       for gate_up, down in found)
        return cls(layers, found[0][0].pieces, found[0][0].active, slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: whole pages as far as an expert reaches in the file."""
        return max(_pages(layer.offset, layer.nbytes) for layer in self.layers)

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return len(self.layers) * self.experts

    @property
    def stored_bytes(self) -> int:
        """Bytes of all experts."""
        return self.experts * sum(layer.nbytes for layer in self.layers)

    @property
    def expert_bytes(self) -> float:
        """Bytes of an expert, on average over layers."""
        return self.stored_bytes / self.total

    @property
    def span(self) -> int:
        """Experts of a part."""
        return -(-self.experts // routes.EXPERT_PARTS)

    def number(self, layer: int) -> int:
        """Return the index of a layer among the layers with experts."""
        return next(i for i, own in enumerate(self.layers) if own.layer == layer)

    # -- the region ----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> int:
        """Offset of the experts' addresses in the region, LOCATION_BYTES each, layer by layer, after the slots."""
        return round_up(self.slots * self.slot_bytes, 64)

    @property
    def table_words(self) -> int:
        """Number of int32 in these addresses."""
        return self.total * routes.LOCATION_BYTES // 4

    @property
    def counts(self) -> int:
        """Offset of the experts' counts, 4 bytes each, layer by layer."""
        return self.table + round_up(4 * self.table_words, 64)

    @property
    def owners(self) -> int:
        """Offset of the slots' expert numbers, 4 bytes each."""
        return self.counts + round_up(4 * self.total, 64)

    @property
    def stamps(self) -> int:
        """Offset of the slots' stamps, 8 bytes each."""
        return self.owners + round_up(4 * self.slots, 64)

    @property
    def cleared(self) -> int:
        """Offset of the area, up to `words`, that is zero in an empty cache."""
        return self.stamps

    @property
    def words(self) -> int:
        """Offset of COLD_*."""
        return self.stamps + round_up(8 * self.slots, 64)

    @property
    def wanted(self) -> int:
        """Offset of the words for each expert of a layer."""
        return self.words + abi.COLD_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.wanted + round_up(4 * self.experts, 64) + 64

    # -- the read queue ------------------------------------------------------------------------------------------------

    @property
    def events(self) -> int:
        """Completion events of all layers."""
        return 2 * routes.EXPERT_PARTS * len(self.layers)

    @property
    def pieces(self) -> int:
        """Reads that may be under way: those of all experts of a layer."""
        return self.experts * (2 + -(-self.slot_bytes // MIN_READ_BYTES))

    @property
    def queue_bytes(self) -> int:
        """Bytes of pieces, completion events' parts, and instructions."""
        instructions = (1 + 2 * routes.EXPERT_PARTS) * len(self.layers) * abi.INSTRUCTION_BYTES
        return abi.PIECE_BYTES * self.pieces + abi.PART_BYTES * self.events + instructions


def moes(graph: Graph) -> list[tuple[OnDemand, OnDemand]]:
    """The layers' experts, in the order of the layers: gate and up, then down."""
    found = graph.on_demand("experts")
    return list(zip(found[0::2], found[1::2], strict=True))


def _pages(offset: int, nbytes: int) -> int:
    """Return the bytes of the pages around any expert, if the first begins at `offset`."""
    whole = offset % PAGE_BYTES == nbytes % PAGE_BYTES == 0
    return nbytes if whole else round_up(nbytes + PAGE_BYTES - routes.LINE, PAGE_BYTES)
