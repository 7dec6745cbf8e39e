"""Reference of the instruction that finds slots for the cold neurons of a forward pass: which cluster is where after
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import abi
from ...parameters import NEURON_RESOLVE
from ..expected import Expected
from ..view import InstructionView, memory


class Cache(NamedTuple):
    """State that `resolve` reads and changes."""

    table: NDArray[np.int32]
    """The slot of each cluster of all layers, -1 if it is not there."""
    owners: NDArray[np.int32]
    """The cluster in each slot, -1 if there is none."""
    uses: NDArray[np.int32]
    stamps: NDArray[np.int64]
    words: NDArray[np.int64]
    """COLD_*, one after the other."""


def resolve(cache: Cache, wanted: NDArray[np.int64], prompt: bool = False, held: bool = False) -> list[int]:
    """Give wanted clusters slots by the clock's rule; return those that have to be read, in order.

    A `prompt` takes slots in order. If an early instruction has `held` the completion events, its epoch continues.
    """
    hand, epoch = int(cache.words[abi.COLD_HAND // 8]), int(cache.words[abi.COLD_EPOCH // 8]) + (not held)
    there = cache.table[wanted][cache.table[wanted] >= 0]
    cache.stamps[there] = epoch
    cache.uses[there] = np.minimum(cache.uses[there] + 1, abi.COLD_USES)
    missing = [int(cluster) for cluster in wanted if cache.table[cluster] < 0]
    for cluster in missing:
        while True:
            slot, hand = hand, (hand + 1) % len(cache.owners)
            if cache.stamps[slot] < epoch:
                left = 0 if prompt else cache.uses[slot]
                cache.uses[slot] = max(left - 1, 0)
                if left == 0:
                    break
        if cache.owners[slot] >= 0:
            cache.table[cache.owners[slot]] = -1
        cache.table[cluster], cache.owners[slot], cache.uses[slot], cache.stamps[slot] = slot, cluster, 0, epoch
    cache.words[abi.COLD_HAND // 8], cache.words[abi.COLD_EPOCH // 8] = hand, epoch
    return missing


def wanted_clusters(view: InstructionView, p: Any) -> NDArray[np.int64]:
    """Clusters of the layer that have a cold neuron which one of the tokens computes; a prompt's compute all."""
    tokens = view.count(p.rows)
    chosen: NDArray[np.bool_] = np.ones(p.neurons, bool)
    if view.count(abi.COUNT_DECODED) == tokens:
        masks = view.array(0, np.uint8, (tokens, -(-p.neurons // 8)), (p.mask_stride, 1))
        chosen[:] = np.unpackbits(masks, axis=1, bitorder="little")[:, : p.neurons].any(axis=0)
    chosen[: p.hot] = False
    found: NDArray[np.int64] = np.unique(np.flatnonzero(chosen) >> p.shift)
    return found


def resolve_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``neuron_resolve``: readers change nothing that it compares."""
    p = view.parameters(NEURON_RESOLVE)
    early, decoded = bool(view.flags & abi.FLAG_EARLY), view.count(abi.COUNT_DECODED) == view.count(p.rows)
    if early and decoded:
        return []
    owners = view.array(3, np.int32, (p.slots,))
    clusters = -(-p.neurons // (1 << p.shift))
    live = Cache(view.array(1, np.int32, (clusters,)), owners, view.array(4, np.int32, (p.slots,)),
                 view.array(5, np.int64, (p.slots,)), view.array(6, np.int64, (abi.COLD_BYTES // 8,)))
    held_slots = owners[owners >= 0] - p.base  # other layers' clusters may lose their slots
    first, last = min(0, int(held_slots.min(initial=0))), max(clusters, int(held_slots.max(initial=0)) + 1)
    table = memory(view.address(1) + 4 * first, np.int32, (last - first,))
    at = p.base + first
    cache = Cache(table.copy(), np.where(live.owners < 0, -1, live.owners - at).astype(np.int32), live.uses.copy(),
                  live.stamps.copy(), live.words.copy())
    wanted, words = wanted_clusters(view, p) - first, cache.words
    missing = resolve(cache, wanted, not decoded, int(words[abi.COLD_EARLY // 8]) == p.part + 1)
    words[abi.COLD_EARLY // 8] = p.part + 1 if early else 0
    if decoded:
        words[abi.COLD_HITS // 8] += len(wanted) - len(missing)
        words[abi.COLD_MISSES // 8] += len(missing)
    cache.owners[cache.owners >= 0] += at
    return [Expected("table", table, cache.table), Expected("owners", live.owners, cache.owners),
            Expected("uses", live.uses, cache.uses), Expected("stamps", live.stamps, cache.stamps),
            Expected("words", live.words, words)]
