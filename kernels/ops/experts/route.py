"""Select the experts of each token and their weights (arXiv 1701.06538, 2401.04088).

`route` turns a token's router logits into scores, selects the experts with the largest, and lists them by number, not
by score: outputs of experts are added in the order of this list, and so by expert for any number of tokens in a pass.
Ties go to the lower number. Scores grow with logits, so without a bias logits are compared; a bias counts for the
selection and not for the weights (arXiv 2408.15664), and groups of experts may be selected before experts
(arXiv 2412.19437, section 2.1.2). With FLAG_SCALED each expert has a factor of its weights. A token's row depends on
nothing else.

`sort_routes` sorts the entries of all tokens by expert, by counting.

Operands: 0 logits or rows of entries, 1 out, 2 bias, 3 scratch, 4 numbers of experts. Parameters: parameters.ROUTE.
Reference: reference/experts/route.py.
"""

from __future__ import annotations

from ...abi import FLAG_BIAS, FLAG_SCALED
from ...parameters import ROUTE
from ...registry import kernel
from ...routes import (
    ROUTE_BYTES,
    ROUTE_EXPERT,
    ROUTE_SEGMENTS,
    ROUTE_TOKEN,
    ROUTE_WEIGHT,
    SCORE_SIGMOID,
    SEGMENT_COUNT,
    SEGMENT_EXPERT,
    SEGMENT_FIRST,
)
from ...vector.instruction import (
    claim,
    count,
    flags,
    float_parameter,
    inline,
    operand,
    outlined,
    parameter,
    round_up_16,
)
from ...vector.lanes import (
    first_lane,
    keep_first,
    lane_numbers,
    mask_outside,
    max_lanes,
    splat_f32,
    splat_i32,
    sum_lanes,
    vmax,
)
from ...vector.memory import load_f32, load_f32x16, load_i32, store_f32, store_f32x16, store_i32
from ...vector.scalars import div_f32
from ...vector.vecmath import exp, sigmoid

TAKEN, CLOSED, LEAST = -(1 << 31), 1 - (1 << 31), 2 - (1 << 31)
"""Keys of experts that were chosen and of those in groups that were not; least key of any other."""


@inline
def key_at(address):
    """The float32 there as a whole number of the same order, above CLOSED even where it is NaN."""
    bits = load_i32(address)
    return max(bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)


@outlined
def score(logits, out, experts, kind):
    """Write the score of each expert: its share of the softmax, or the sigmoid of its logit."""
    if kind == SCORE_SIGMOID:
        for i in range(0, experts, 16):
            store_f32x16(out + 4 * i, sigmoid(load_f32x16(logits + 4 * i)))
        return
    lowest = first_lane(splat_f32(float("-inf")))
    largest = splat_f32(lowest)
    for i in range(0, experts, 16):
        there = mask_outside(load_f32x16(logits + 4 * i), lane_numbers() + splat_i32(i), 0, experts - 1, lowest)
        largest = vmax(there, largest)
    top, total = splat_f32(max_lanes(largest)), splat_f32(0.0)
    for i in range(0, experts, 16):
        e = exp(load_f32x16(logits + 4 * i) - top)
        store_f32x16(out + 4 * i, e)
        total = total + keep_first(e, experts - i)
    share = splat_f32(div_f32(first_lane(splat_f32(1.0)), sum_lanes(total)))
    for i in range(0, experts, 16):
        store_f32x16(out + 4 * i, load_f32x16(out + 4 * i) * share)


@outlined
def values_of_choice(values, bias, out, experts):
    """Write the scores by which experts are chosen: values, plus the bias if there is one (address 0: none); never
    -0."""
    zero = splat_f32(0.0)
    for i in range(0, experts, 16):
        v = load_f32x16(values + 4 * i)
        if bias:
            v = v + load_f32x16(bias + 4 * i)
        store_f32x16(out + 4 * i, v + zero)


@inline
def best_two(values, size):
    """Indices of the largest and the second largest of `size` values."""
    first, second = 0, -1
    for i in range(1, size):
        if key_at(values + 4 * i) > key_at(values + 4 * first):
            first, second = i, first
        elif second < 0 or key_at(values + 4 * i) > key_at(values + 4 * second):
            second = i
    return first, second


@outlined
def close_groups(values, sums, experts, groups, active, best):
    """Close the experts of all but the best groups: their values become the key CLOSED."""
    size = experts // groups
    for g in range(groups):
        first, second = best_two(values + 4 * g * size, size)
        total = load_f32(values + 4 * (g * size + first))
        if best > 1 and second >= 0:
            total = total + load_f32(values + 4 * (g * size + second))
        store_f32(sums + 4 * g, total)
    for g in range(groups):
        before, own = 0, key_at(sums + 4 * g)
        for other in range(groups):
            key = key_at(sums + 4 * other)
            if key > own or (key == own and other < g):
                before += 1
        for i in range(g * size, (g + 1) * size):
            store_i32(values + 4 * i, CLOSED if before >= active else key_at(values + 4 * i))


@outlined
def choose(keys, experts, active):
    """Mark the `active` largest keys as TAKEN, of equal ones the first."""
    for _chosen in range(active):
        best, largest = 0, TAKEN
        for i in range(experts):
            key = load_i32(keys + 4 * i)
            if key > largest:
                best, largest = i, key
        store_i32(keys + 4 * best, TAKEN)


@outlined
def list_chosen(keys, scores, experts, t, normalise, scale, factors, out):
    """Write an entry for each expert whose key is TAKEN, by number; weights times its factor (address 0: none)."""
    total = first_lane(splat_f32(1e-20))
    if normalise:
        for i in range(experts):
            if load_i32(keys + 4 * i) == TAKEN:
                total = total + load_f32(scores + 4 * i)
    for i in range(experts):
        if load_i32(keys + 4 * i) == TAKEN:
            weight = load_f32(scores + 4 * i)
            if normalise:
                weight = div_f32(weight, total)
            if factors:
                weight = weight * load_f32(factors + 4 * i)
            store_i32(out + ROUTE_EXPERT, i)
            store_i32(out + ROUTE_TOKEN, t)
            store_f32(out + ROUTE_WEIGHT, weight * scale)
            out += ROUTE_BYTES


@kernel("route")
def route(inst, ctx, tid, n_threads):
    """Router logits (T, experts) to entries (T, active); scratch has room for 3 rows of logits."""
    own, experts, t = operand(inst, ctx, 3) + tid * parameter(inst, ROUTE.scratch), parameter(inst, ROUTE.experts), \
        claim(ctx)
    keys, groups = own + 4 * round_up_16(experts), parameter(inst, ROUTE.groups)
    sums = keys + 4 * round_up_16(experts)
    while t < count(ctx, parameter(inst, ROUTE.rows)):
        logits = operand(inst, ctx, 0) + t * parameter(inst, ROUTE.in_stride)
        score(logits, own, experts, parameter(inst, ROUTE.scores))
        if flags(inst) & FLAG_BIAS:
            values_of_choice(own, operand(inst, ctx, 2), keys, experts)
        else:
            values_of_choice(logits, 0, keys, experts)
        close_groups(keys, sums, experts, groups, parameter(inst, ROUTE.active_groups),
                     parameter(inst, ROUTE.group_best))
        choose(keys, experts, parameter(inst, ROUTE.active))
        factors = 0
        if flags(inst) & FLAG_SCALED:
            factors = operand(inst, ctx, 4)
        list_chosen(keys, own, experts, t, parameter(inst, ROUTE.normalise), float_parameter(inst, ROUTE.scale),
                    factors,
                    operand(inst, ctx, 1) + t * parameter(inst, ROUTE.out_stride))
        t = claim(ctx)
    return 0


@outlined
def starts_of(routes, stride, tokens, active, experts, starts, segments):
    """Write where each expert's entries begin in the list, and the segments; gives how many these are."""
    for e in range(experts):
        store_i32(starts + 4 * e, 0)
    for t in range(tokens):
        for k in range(active):
            at = starts + 4 * load_i32(routes + t * stride + ROUTE_BYTES * k + ROUTE_EXPERT)
            store_i32(at, load_i32(at) + 1)
    first, found = 0, 0
    for e in range(experts):
        n = load_i32(starts + 4 * e)
        store_i32(starts + 4 * e, first)
        if n:
            store_i32(segments + SEGMENT_EXPERT, e)
            store_i32(segments + SEGMENT_FIRST, first)
            store_i32(segments + SEGMENT_COUNT, n)
            segments += ROUTE_BYTES
            found += 1
        first += n
    return found


@kernel("sort_routes")
def sort_routes(inst, ctx, tid, n_threads):
    """Entries of all tokens in one list by expert, segments after it; scratch has room for a row of logits."""
    tokens, active = count(ctx, parameter(inst, ROUTE.rows)), parameter(inst, ROUTE.active)
    if claim(ctx) != 0 or tokens == 0:
        return 0
    routes, out, starts = operand(inst, ctx, 0), operand(inst, ctx, 1), \
        operand(inst, ctx, 3) + tid * parameter(inst, ROUTE.scratch)
    stride = parameter(inst, ROUTE.in_stride)
    found = starts_of(routes, stride, tokens, active, parameter(inst, ROUTE.experts), starts,
                      out + ROUTE_BYTES * tokens * active)
    for t in range(tokens):
        for k in range(active):
            entry = routes + t * stride + ROUTE_BYTES * k
            next_entry = starts + 4 * load_i32(entry + ROUTE_EXPERT)
            to = out + ROUTE_BYTES * load_i32(next_entry)
            store_i32(next_entry, load_i32(next_entry) + 1)
            store_i32(to + ROUTE_EXPERT, load_i32(entry + ROUTE_EXPERT))
            store_i32(to + ROUTE_TOKEN, t)
            store_f32(to + ROUTE_WEIGHT, load_f32(entry + ROUTE_WEIGHT))
    store_i32(out + ROUTE_SEGMENTS, found)
    return 0
