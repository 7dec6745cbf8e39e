"""Experts that are not in memory: find those that a forward pass needs, assign slots, and read the missing ones.

`experts_resolve` follows `route`. It looks up the experts of the pass's tokens, takes a slot for each missing one, and
posts the reads; the instructions between the router and the experts (attention, if the router precedes it) run
meanwhile. An expert is one stretch of the file and of its slot. Experts are computed by EXPERT_PARTS instructions for
each of the two matmuls, which wait for events of their own, so that the first are computed while the last are read. It
runs on one thread: a layer has a hundred or so experts.

Replacement is by frequency: each expert, in memory or not, has a count of its selections, which is halved every COUNTED
tokens, and the least selected expert is replaced; among equals the least recently used. A prompt counts as COUNTED
tokens. This also protects the experts of decoded tokens from a prompt, which goes through nearly all experts, layer by
layer: rarely selected experts replace each other, whereas the oldest would always be the next one to be used
(docs/explanation/experts.md has hit rates).

neuron_ffn/neuron_resolve.py explains for neurons why nothing is computed with missing data and nothing is overwritten
while it is used; here there are no early instructions: a slot that carries the epoch of this instruction is not taken,
and the next epoch begins in the next layer, after the last instruction that uses it.

Operands: 0 rows of `route`; 1 LOCATION_* of each of the layer's experts; 2 slots; 3 the expert in each slot, or -1; 4
counts of the layer's experts; 5 stamps of slots; 6 words COLD_*, of which COLD_HAND counts tokens; 7 room for a word
for each expert. Parameters: parameters.EXPERTS_RESOLVE. Reference: reference/experts/experts_resolve.py.
"""

from __future__ import annotations

from ...abi import COLD_EPOCH, COLD_HAND, COLD_HITS, COLD_MISSES, COUNT_DECODED, CTX_STREAM, STREAM_GATE
from ...parameters import EXPERTS_RESOLVE
from ...registry import kernel
from ...routes import (
    EXPERT_PARTS,
    LINE,
    LOCATION_BYTES,
    LOCATION_DOWN,
    LOCATION_GATE_UP,
    LOCATION_SLOT,
    ROUTE_BYTES,
    ROUTE_EXPERT,
)
from ...vector.instruction import count, inline, operand, outlined, parameter
from ...vector.memory import load_i32, load_i64, store_i32, store_i64
from ...vector.scalars import div_i64
from ...vector.targets import atomic_load
from ..forward import change
from ..slots import hold, let_go, post_piece

NO_SLOT = 3
"""Status of an instruction that finds no slot: the plan has fewer than a layer has experts."""
PAGE = 4096
COUNTED, STEP = 64, 256
"""Decoded forward passes after which counts halve; increment of a count per choice."""
MOST = 1 << 26
"""Largest count: 36 bits are left for the stamp after it."""
MISSING = -1
"""Value in place of the number of tokens that want an expert, if it has to be read."""


@outlined
def halve(inst, ctx):
    """Halve the counts of all experts when due; checked by the instruction of the first layer."""
    words, all_counts = operand(inst, ctx, 6), operand(inst, ctx, 4)
    passes = load_i64(words + COLD_HAND) + 1
    if passes == COUNTED:
        for e in range(parameter(inst, EXPERTS_RESOLVE.total)):
            store_i32(all_counts + 4 * e, load_i32(all_counts + 4 * e) >> 1)
        passes = 0
    store_i64(words + COLD_HAND, passes)


@outlined
def pin(inst, ctx, decoded, epoch):
    """Count the experts that are needed and stamp the slots of those present; return how many are present and missing.
    """
    locations, wanted, experts = operand(inst, ctx, 1), operand(inst, ctx, 7), parameter(inst, EXPERTS_RESOLVE.experts)
    counts, stamps = operand(inst, ctx, 4), operand(inst, ctx, 5)
    routes, stride = operand(inst, ctx, 0), parameter(inst, EXPERTS_RESOLVE.in_stride)
    tokens, hits, missing = count(ctx, parameter(inst, EXPERTS_RESOLVE.rows)), 0, 0
    for e in range(experts):
        store_i32(wanted + 4 * e, 0)
    for t in range(tokens):
        for k in range(parameter(inst, EXPERTS_RESOLVE.active)):
            at = wanted + 4 * load_i32(routes + t * stride + ROUTE_BYTES * k + ROUTE_EXPERT)
            store_i32(at, load_i32(at) + 1)
    for e in range(experts):
        n, before = load_i32(wanted + 4 * e), load_i32(counts + 4 * e)
        after = before + STEP * n if decoded else (before >> 1) + div_i64(COUNTED * STEP * n, tokens)
        store_i32(counts + 4 * e, min(after, MOST))
        if n:
            slot = load_i32(locations + LOCATION_BYTES * e + LOCATION_SLOT)
            if slot < 0:
                missing += 1
            else:
                hits += 1
                store_i64(stamps + 8 * slot, epoch)
    return hits, missing


@inline
def victim(inst, ctx, epoch):
    """Return an empty slot, or the one whose expert was chosen least; -1 if all are stamped with this epoch."""
    owners, counts, stamps = operand(inst, ctx, 3), operand(inst, ctx, 4), operand(inst, ctx, 5)
    base, slot, found, least = parameter(inst, EXPERTS_RESOLVE.base), 0, -1, 0
    while slot < parameter(inst, EXPERTS_RESOLVE.slots):
        owner, stamp = load_i32(owners + 4 * slot), load_i64(stamps + 8 * slot)
        if owner < 0:
            return slot
        key = (load_i32(counts + 4 * (owner - base)) << 36) + stamp
        if stamp < epoch and (found < 0 or key < least):
            found, least = slot, key
        slot += 1
    return found


@inline
def offset_of(inst, e):
    """Return the offset of expert e in the file."""
    return parameter(inst, EXPERTS_RESOLVE.unit) * LINE + e * parameter(inst, EXPERTS_RESOLVE.expert_bytes)


@inline
def replace(inst, ctx, e, slot, epoch):
    """Give a missing expert a slot, which another one may lose."""
    locations, owners, base = operand(inst, ctx, 1), operand(inst, ctx, 3), parameter(inst, EXPERTS_RESOLVE.base)
    owner = load_i32(owners + 4 * slot)
    if owner >= 0:
        store_i32(locations + LOCATION_BYTES * (owner - base) + LOCATION_SLOT, -1)  # in whichever layer
    store_i32(owners + 4 * slot, base + e)
    store_i64(operand(inst, ctx, 5) + 8 * slot, epoch)
    location, within = locations + LOCATION_BYTES * e, offset_of(inst, e) & (PAGE - 1)
    at = slot * parameter(inst, EXPERTS_RESOLVE.slot_bytes) + within
    store_i32(location + LOCATION_SLOT, slot)
    store_i32(location + LOCATION_GATE_UP, div_i64(at, LINE))
    store_i32(location + LOCATION_DOWN, div_i64(at + parameter(inst, EXPERTS_RESOLVE.gate_up_bytes), LINE))


@outlined
def assign_missing(inst, ctx, epoch):
    """Give all missing experts slots and mark them; return whether there were enough."""
    wanted, locations = operand(inst, ctx, 7), operand(inst, ctx, 1)
    for e in range(parameter(inst, EXPERTS_RESOLVE.experts)):
        if load_i32(wanted + 4 * e) and load_i32(locations + LOCATION_BYTES * e + LOCATION_SLOT) < 0:
            slot = victim(inst, ctx, epoch)
            if slot < 0:
                return False
            replace(inst, ctx, e, slot, epoch)
            store_i32(wanted + 4 * e, MISSING)
    return True


@inline
def post(inst, stream, to, e, begin, end, columns, most):
    """Let readers bring bytes begin .. end of the pages around expert e, whose columns alone are from `columns` on."""
    part = parameter(inst, EXPERTS_RESOLVE.event) + div_i64(e, parameter(inst, EXPERTS_RESOLVE.span))
    offset = offset_of(inst, e) & -PAGE
    while begin < end:
        least = min(end - begin, most)
        post_piece(stream, part if begin < columns else part + EXPERT_PARTS, offset + begin,
                   (least + PAGE - 1) & -PAGE, least, to + begin)
        begin += least


@outlined
def post_missing(inst, ctx, stream, decoded, missing):
    """Post the reads of all experts that have just been given slots: each one read, or as many as keep readers busy.

    A prompt, which goes through most experts, gets gates and ups of all first, then the columns.
    """
    wanted, locations, slots = operand(inst, ctx, 7), operand(inst, ctx, 1), operand(inst, ctx, 2)
    share = div_i64(missing * parameter(inst, EXPERTS_RESOLVE.expert_bytes), parameter(inst, EXPERTS_RESOLVE.readers))
    most = min(max((share + 2 * PAGE - 1) & -PAGE, parameter(inst, EXPERTS_RESOLVE.least)),
               parameter(inst, EXPERTS_RESOLVE.most))
    for turn in range(1 if decoded else 2):
        for e in range(parameter(inst, EXPERTS_RESOLVE.experts)):
            if load_i32(wanted + 4 * e) == MISSING:
                slot, within = load_i32(locations + LOCATION_BYTES * e + LOCATION_SLOT), offset_of(inst, e) & (PAGE - 1)
                columns = (within + parameter(inst, EXPERTS_RESOLVE.gate_up_bytes) + PAGE - 1) & -PAGE
                end = within + parameter(inst, EXPERTS_RESOLVE.expert_bytes)
                post(inst, stream, slots + slot * parameter(inst, EXPERTS_RESOLVE.slot_bytes), e,
                     columns if turn else 0, end if decoded or turn else min(end, columns), columns, most)


@kernel("experts_resolve")
def experts_resolve(inst, ctx, tid, n_threads):
    """Find the experts that this forward pass needs of a layer, and have those read that are missing."""
    if tid:
        return 0
    decoded = count(ctx, COUNT_DECODED) == count(ctx, parameter(inst, EXPERTS_RESOLVE.rows))
    words, stream = operand(inst, ctx, 6), load_i64(ctx + CTX_STREAM)
    first, status = parameter(inst, EXPERTS_RESOLVE.event), 0
    epoch = load_i64(words + COLD_EPOCH) + 1
    store_i64(words + COLD_EPOCH, epoch)
    hold(stream, first, 2 * EXPERT_PARTS)
    if first == 0 and decoded:
        halve(inst, ctx)
    hits, missing = pin(inst, ctx, decoded, epoch)
    if missing:
        status = 0 if assign_missing(inst, ctx, epoch) else NO_SLOT
        post_missing(inst, ctx, stream, decoded, missing)
        change(ctx, stream + STREAM_GATE, atomic_load(stream + STREAM_GATE) + 1)
    if decoded:
        store_i64(words + COLD_HITS, load_i64(words + COLD_HITS) + hits)
        store_i64(words + COLD_MISSES, load_i64(words + COLD_MISSES) + missing)
    let_go(ctx, stream, first, 2 * EXPERT_PARTS)
    return status
