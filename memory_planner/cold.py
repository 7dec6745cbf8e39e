"""Slots for clusters of cold neurons, and the tables that map clusters to slots."""

from __future__ import annotations

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.units import round_up
from edgeinfer.bundle import cluster_shape
from edgeinfer.graph import Graph, OnDemand
from edgeinfer.kernels import abi


@dataclass(frozen=True)
class ColdPlan:
    """Split of neurons into resident ones and a cache of the others."""

    hot: tuple[int, ...]
    """Resident neurons of each layer, the first ones: whole blocks, or all, as of layers in tiles."""
    neurons: int
    """Neurons of a layer."""
    neuron_bytes: int
    slots: int
    """Clusters that the cache holds: at least all cold ones of any layer."""

    @classmethod
    def of(cls, graph: Graph, hot: tuple[int, ...], slots: int) -> ColdPlan:
        """Return the plan for a graph whose FFNs have masks."""
        ffn = masked(graph)[0]
        return cls(hot, ffn.pieces, ffn.nbytes, slots)

    @property
    def block(self) -> int:
        """Neurons of a block: resident and cold ones are whole blocks, so that sums are the same."""
        return abi.neuron_block(self.neurons)

    @property
    def shift(self) -> int:
        """A cluster holds 1 << shift neurons."""
        return cluster_shape(self.neuron_bytes)[0].bit_length() - 1

    @property
    def cluster_bytes(self) -> int:
        """Bytes of a slot."""
        return cluster_shape(self.neuron_bytes)[1]

    @property
    def clusters(self) -> int:
        """Clusters of a layer, resident neurons included."""
        return -(-self.neurons // (1 << self.shift))

    def cold_clusters(self, layer: int) -> int:
        """Clusters of a layer that have a cold neuron."""
        hot = self.hot[layer]
        return self.clusters - (hot >> self.shift) if hot < self.neurons else 0

    def part_neurons(self, layer: int) -> int:
        """Cold neurons of a part of a layer, which are computed by an instruction of their own: whole blocks."""
        blocks = -(-(self.neurons - self.hot[layer]) // self.block)
        return max(1, -(-blocks // abi.COLD_PARTS)) * self.block

    @property
    def least_slots(self) -> int:
        """Fewest slots: a prompt, which computes all neurons of a layer, could not be run with fewer."""
        return max(self.cold_clusters(layer) for layer in range(len(self.hot)))

    @property
    def cold_bytes(self) -> int:
        """Bytes of neurons that are not resident."""
        return sum(self.neurons - hot for hot in self.hot) * self.neuron_bytes

    @property
    def table(self) -> int:
        """Offset of the clusters' slot numbers in the region, 4 bytes each, layer by layer, after the slots themselves.
        """
        return round_up(self.slots * self.cluster_bytes, 64)

    @property
    def owners(self) -> int:
        """Offset of the slots' cluster numbers, 4 bytes each."""
        return self.table + round_up(4 * self.table_words, 64)

    @property
    def uses(self) -> int:
        """Offset of the slots' use counts, 4 bytes each."""
        return self.owners + round_up(4 * self.slots, 64)

    @property
    def cleared(self) -> int:
        """Offset of the area, up to `words`, that is zero in an empty cache."""
        return self.uses

    @property
    def stamps(self) -> int:
        """Offset of the slots' stamps, 8 bytes each."""
        return self.uses + round_up(4 * self.slots, 64)

    @property
    def words(self) -> int:
        """Offset of COLD_*."""
        return self.stamps + round_up(8 * self.slots, 64)

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.words + abi.COLD_BYTES + 64

    @property
    def table_words(self) -> int:
        """Slots of clusters."""
        return len(self.hot) * self.clusters

    @property
    def slot_bytes(self) -> int:
        """A cluster's."""
        return self.cluster_bytes

    @property
    def events(self) -> int:
        """Completion events of all layers."""
        return abi.COLD_PARTS * len(self.hot)

    @property
    def pieces(self) -> int:
        """Reads that may be under way."""
        return self.slots

    @property
    def queue_bytes(self) -> int:
        """Size of the read queue: pieces, no more of them than there are slots, and parts."""
        return abi.PIECE_BYTES * self.pieces + abi.PART_BYTES * self.events


def masked(graph: Graph) -> list[OnDemand]:
    """The FFNs whose decoded tokens compute some neurons only, in the order of their layers."""
    return [ffn for ffn in graph.on_demand("neurons") if ffn.chosen]
