"""Neurons that are not resident: find those that a forward pass computes, assign slots, and read the missing ones.

`neuron_resolve` follows a layer's mask. It looks up the cluster of each cold neuron that one of the pass's tokens
computes (a prompt's tokens compute all), takes a slot for each missing one, and posts the reads; the layer's resident
neurons are computed meanwhile. The cold ones are computed by COLD_PARTS instructions, each of which waits for its
part's event, so that the first parts are computed while the last are read. It runs on one thread: there are a hundred
or so clusters.

With FLAG_EARLY it precedes the layer's attention and posts a prompt's reads, which are all that are missing. The two
instructions share an epoch and the hold on the completion events; the later one decides which neurons are computed.

Replacement is a clock: its hand passes over slots, takes 1 from the count of uses of each, and takes the first slot
that had none left. A new cluster begins with none, so that one used once gives way to one used often. Prompts take
slots in order, whatever their uses: layer by layer they need nearly all, and reads stay large.

Nothing is computed with a missing neuron, and none is overwritten while it is used, because:

* A slot that this instruction has stamped with its epoch is not taken in the same epoch; the next one begins in the
  next layer, when all threads have passed the barrier after this one's last instruction. There are slots for all cold
  clusters of a layer.
* PART_LEFT counts a part's reads under way, and 1 more while they are posted, from the early instruction (COLD_EARLY)
  to the end of the other: so no reader redeems an event before the last read was posted, and a cluster that the early
  instruction has posted is waited for like any other. A event becomes 0 only when no read of its part is under way:
  the instruction that waited for it has run, or `Slots.begin` (edgeinfer/runtime/weights/slots.py) has waited, which
  also ends the hold of a forward pass that ended between the two instructions.
* After a failed read every pending event says so; this instruction checks that after its own event, so that one of
  the two sees the other. `begin` then forgets all slots.

Clusters that follow each other in the file and in slots are read together, up to a limit: a prompt reads a layer in
large pieces.

Operands: 0 masks; 1 the slot of each of the layer's clusters, or -1; 2 slots; 3 the cluster in each slot, or -1; 4 its
uses; 5 its stamp; 6 words COLD_*. Parameters: parameters.NEURON_RESOLVE. Reference:
reference/neuron_ffn/neuron_resolve.py.
"""

from __future__ import annotations

from ...abi import (
    COLD_EARLY,
    COLD_EPOCH,
    COLD_HAND,
    COLD_HITS,
    COLD_MISSES,
    COLD_PARTS,
    COLD_USES,
    COUNT_DECODED,
    CTX_STREAM,
    FLAG_EARLY,
    STREAM_GATE,
    STREAM_UNIT,
)
from ...parameters import NEURON_RESOLVE
from ...registry import kernel
from ...vector.instruction import count, flags, inline, operand, outlined, parameter
from ...vector.memory import load_i32, load_i64, store_i32, store_i64
from ...vector.scalars import div_i64, trailing_zeros
from ...vector.targets import atomic_load
from ..forward import change
from ..slots import hold, let_go, post_piece

NO_SLOT = 3
"""Status of an instruction that finds no slot: the plan has fewer than a layer's cold clusters."""


@inline
def wanted(inst, masks, tokens, word):
    """Return which cold neurons of a word of masks one of the tokens computes; no masks: all."""
    at, first, neurons = 64 * word, parameter(inst, NEURON_RESOLVE.hot), parameter(inst, NEURON_RESOLVE.neurons)
    bits = 0 if masks else -1
    if masks:
        for t in range(tokens):
            bits |= load_i64(masks + t * parameter(inst, NEURON_RESOLVE.mask_stride) + 8 * word)
    if first > at:
        bits &= -1 << (first - at)
    if neurons < at + 64:
        bits &= ~(-1 << (neurons - at))
    return bits


@outlined
def pin(inst, ctx, masks, tokens, epoch):
    """Stamp the slots of wanted clusters that are there; return how many there are, and how many are missing."""
    table, uses, stamps = operand(inst, ctx, 1), operand(inst, ctx, 4), operand(inst, ctx, 5)
    shift, hits, missing = parameter(inst, NEURON_RESOLVE.shift), 0, 0
    together = (1 << (1 << shift)) - 1
    for word in range(parameter(inst, NEURON_RESOLVE.hot) >> 6, (parameter(inst, NEURON_RESOLVE.neurons) + 63) >> 6):
        bits = wanted(inst, masks, tokens, word)
        while bits:
            at = trailing_zeros(bits) >> shift << shift
            bits &= ~(together << at)
            slot = load_i32(table + 4 * ((64 * word + at) >> shift))
            if slot < 0:
                missing += 1
            else:
                hits += 1
                store_i64(stamps + 8 * slot, epoch)
                store_i32(uses + 4 * slot, min(load_i32(uses + 4 * slot) + 1, COLD_USES))
    return hits, missing


@inline
def victim(inst, ctx, masks, epoch):
    """Return the slot that the clock's hand takes, -1 if all are stamped with this epoch."""
    uses, stamps, words = operand(inst, ctx, 4), operand(inst, ctx, 5), operand(inst, ctx, 6)
    slots, hand, found = parameter(inst, NEURON_RESOLVE.slots), load_i64(words + COLD_HAND), -1
    turns = (COLD_USES + 2) * slots
    while found < 0 and turns > 0:
        if load_i64(stamps + 8 * hand) < epoch:
            left = load_i32(uses + 4 * hand) if masks else 0
            store_i32(uses + 4 * hand, max(left - 1, 0))
            found = hand if left == 0 else -1
        hand = hand + 1 if hand + 1 < slots else 0
        turns -= 1
    store_i64(words + COLD_HAND, hand)
    return found


@inline
def replace(inst, ctx, masks, cluster, epoch):
    """Give a missing cluster a slot, which another one may lose; return it."""
    table, owners, base = operand(inst, ctx, 1), operand(inst, ctx, 3), parameter(inst, NEURON_RESOLVE.base)
    slot = victim(inst, ctx, masks, epoch)
    if slot >= 0:
        owner = load_i32(owners + 4 * slot)
        if owner >= 0:
            store_i32(table + 4 * (owner - base), -1)  # in whichever layer
        store_i32(table + 4 * cluster, slot)
        store_i32(owners + 4 * slot, base + cluster)
        store_i64(operand(inst, ctx, 5) + 8 * slot, epoch)
    return slot


@inline
def part_of(inst, cluster):
    """Return the number of the event for which the instruction waits that computes a cluster's first cold neuron."""
    behind = (cluster << parameter(inst, NEURON_RESOLVE.shift)) - parameter(inst, NEURON_RESOLVE.hot)
    return parameter(inst, NEURON_RESOLVE.part) + div_i64(max(behind, 0), parameter(inst, NEURON_RESOLVE.span))


@inline
def post(inst, ctx, stream, cluster, slot, n):
    """Let readers bring n clusters, which follow each other, into as many slots."""
    nbytes = parameter(inst, NEURON_RESOLVE.cluster_bytes)
    post_piece(stream, part_of(inst, cluster), parameter(inst, NEURON_RESOLVE.unit) * STREAM_UNIT + cluster * nbytes,
               n * nbytes, n * nbytes, operand(inst, ctx, 2) + slot * nbytes)


@outlined
def fill(inst, ctx, stream, masks, tokens, epoch):
    """Give all missing clusters slots and post their reads; return whether there were slots for all."""
    table, shift, most = operand(inst, ctx, 1), parameter(inst, NEURON_RESOLVE.shift), parameter(inst,
                                                                                                 NEURON_RESOLVE.most)
    together, first, to, n = (1 << (1 << shift)) - 1, 0, 0, 0
    for word in range(parameter(inst, NEURON_RESOLVE.hot) >> 6, (parameter(inst, NEURON_RESOLVE.neurons) + 63) >> 6):
        bits = wanted(inst, masks, tokens, word)
        while bits:
            at = trailing_zeros(bits) >> shift << shift
            bits &= ~(together << at)
            cluster = (64 * word + at) >> shift
            if load_i32(table + 4 * cluster) < 0:
                slot = replace(inst, ctx, masks, cluster, epoch)
                if slot < 0:
                    return False
                if n and (cluster != first + n or slot != to + n or n == most
                          or part_of(inst, cluster) != part_of(inst, first)):
                    post(inst, ctx, stream, first, to, n)
                    n = 0
                if n == 0:
                    first, to = cluster, slot
                n += 1
    if n:
        post(inst, ctx, stream, first, to, n)
    return True


@kernel("neuron_resolve")
def neuron_resolve(inst, ctx, tid, n_threads):
    """Find the clusters that this forward pass needs of a layer, and have those read that are missing."""
    tokens, early = count(ctx, parameter(inst, NEURON_RESOLVE.rows)), flags(inst) & FLAG_EARLY
    masks = operand(inst, ctx, 0) if count(ctx, COUNT_DECODED) == tokens else 0
    if tid or (early and masks):
        return 0
    words, stream = operand(inst, ctx, 6), load_i64(ctx + CTX_STREAM)
    held, layer = load_i64(words + COLD_EARLY), parameter(inst, NEURON_RESOLVE.part) + 1
    epoch = load_i64(words + COLD_EPOCH) + (0 if held == layer else 1)
    store_i64(words + COLD_EPOCH, epoch)
    store_i64(words + COLD_EARLY, layer if early else 0)
    if held != layer:
        hold(stream, layer - 1, COLD_PARTS)
    hits, missing = pin(inst, ctx, masks, tokens, epoch)
    status = 0
    if missing:
        status = 0 if fill(inst, ctx, stream, masks, tokens, epoch) else NO_SLOT
        change(ctx, stream + STREAM_GATE, atomic_load(stream + STREAM_GATE) + 1)
    if masks:
        store_i64(words + COLD_HITS, load_i64(words + COLD_HITS) + hits)
        store_i64(words + COLD_MISSES, load_i64(words + COLD_MISSES) + missing)
    if early == 0:
        let_go(ctx, stream, layer - 1, COLD_PARTS)
    return status
