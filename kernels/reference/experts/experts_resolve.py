"""Reference of the instruction that finds slots for the experts of a forward pass: which expert is where after it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import abi
from ...parameters import EXPERTS_RESOLVE
from ...routes import LINE, LOCATION_BYTES, ROUTE_BYTES
from ..expected import Expected
from ..view import InstructionView, memory

PAGE = 4096
COUNTED, STEP, MOST = 64, 256, 1 << 26
"""Constants of ops/experts/experts_resolve.py: tokens until counts halve, increment per choice, the largest count."""


class Cache(NamedTuple):
    """State that `resolve` reads and changes."""

    table: NDArray[np.int32]
    """The slot of each expert of all layers, -1 if it is not there."""
    counts: NDArray[np.int32]
    owners: NDArray[np.int32]
    """The expert in each slot, -1 if there is none."""
    stamps: NDArray[np.int64]
    words: NDArray[np.int64]
    """COLD_*, one after the other."""


def resolve(cache: Cache, wanted: NDArray[np.int64], epoch: int) -> list[int]:
    """Give wanted experts slots, those of the experts that were chosen least; return those that have to be read."""
    there = cache.table[wanted]
    cache.stamps[there[there >= 0]] = epoch
    missing = [int(e) for e in wanted if cache.table[e] < 0]
    for e in missing:
        empty = np.flatnonzero(cache.owners < 0)
        free = np.flatnonzero(cache.stamps < epoch)
        order = np.lexsort((cache.stamps[free], cache.counts[cache.owners[free]]))
        slot = empty[0] if len(empty) else free[order[0]]
        if cache.owners[slot] >= 0:
            cache.table[cache.owners[slot]] = -1
        cache.table[e], cache.owners[slot], cache.stamps[slot] = slot, e, epoch
    return missing


def count_choices(cache: Cache, chosen: NDArray[np.int64], own: slice, first: bool, decoded: bool) -> None:
    """Add to the counts of a layer's experts how many tokens go through each; those of all halve now and then."""
    if first and decoded:
        cache.words[abi.COLD_HAND // 8] = (cache.words[abi.COLD_HAND // 8] + 1) % COUNTED
        if cache.words[abi.COLD_HAND // 8] == 0:
            cache.counts[:] >>= 1
    before = cache.counts[own].astype(np.int64)
    tokens = np.bincount(chosen.reshape(-1), minlength=len(before))
    after = before + STEP * tokens if decoded else before // 2 + COUNTED * STEP * tokens // max(len(chosen), 1)
    cache.counts[own] = np.minimum(after, MOST)


def _locations(p: Any, slots: NDArray[np.int32], chosen: NDArray[np.int64], before: NDArray[np.int32]) -> NDArray[Any]:
    """Rows of LOCATION_* of the layer's experts, of which the `chosen` ones have new locations."""
    rows = before.copy()
    rows[:, 0] = slots
    at = slots[chosen].astype(np.int64) * p.slot_bytes + (LINE * p.unit + chosen * p.expert_bytes) % PAGE
    rows[chosen, 1], rows[chosen, 2] = at // LINE, (at + p.gate_up_bytes) // LINE
    return rows


def experts_resolve_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``experts_resolve``: readers change nothing that it compares."""
    p = view.parameters(EXPERTS_RESOLVE)
    tokens = view.count(p.rows)
    routes = view.array(0, np.int32, (tokens, p.active), (p.in_stride, ROUTE_BYTES)).astype(np.int64)
    rows = memory(view.address(1) - LOCATION_BYTES * p.base, np.int32, (p.total, LOCATION_BYTES // 4))  # of all layers
    live = Cache(rows[:, 0], memory(view.address(4) - 4 * p.base, np.int32, (p.total,)),
                 view.array(3, np.int32, (p.slots,)), view.array(5, np.int64, (p.slots,)),
                 view.array(6, np.int64, (abi.COLD_BYTES // 8,)))
    cache = Cache(live.table.copy(), live.counts.copy(), live.owners.copy(), live.stamps.copy(), live.words.copy())
    own, decoded = slice(p.base, p.base + p.experts), view.count(abi.COUNT_DECODED) == tokens
    count_choices(cache, routes, own, p.event == 0, decoded)
    wanted = np.unique(routes) + p.base
    cache.words[abi.COLD_EPOCH // 8] += 1
    missing = resolve(cache, wanted, int(cache.words[abi.COLD_EPOCH // 8]))
    if decoded:
        cache.words[abi.COLD_HITS // 8] += len(wanted) - len(missing)
        cache.words[abi.COLD_MISSES // 8] += len(missing)
    locations = rows.copy()
    locations[:, 0] = cache.table
    locations[own] = _locations(p, cache.table[own], np.array(missing, np.int64) - p.base, rows[own])
    return [Expected("locations", rows, locations), Expected("counts", live.counts, cache.counts),
            Expected("owners", live.owners, cache.owners), Expected("stamps", live.stamps, cache.stamps),
            Expected("words", live.words, cache.words)]
