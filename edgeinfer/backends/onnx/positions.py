"""Positions of tokens, and values that depend on them alone: rotated heads, factors of queries, the biases of ALiBi."""

from __future__ import annotations

import numpy as np

from edgeinfer.graph import Rotation, alibi_bias, alibi_slopes

from . import weights
from .lowering import MICROSOFT, Lowering


def positions(at: Lowering) -> str:
    """Positions of the tokens, int64: (B, S), or (T,) of pages.

    A row's last token is at seqlens_k, unless the row is padded, which a first prompt may be: its tokens begin at 0.
    """
    return at.once("positions", lambda: _of_pages(at) if at.flavour.attention == "paged" else _of_slots(at))


def _of_slots(at: Lowering) -> str:
    before, count = _numbers(at)
    last = at.node("Unsqueeze", at.node("Cast", "seqlens_k", to="i64"), at.constant(1))
    first = at.node("Sub", at.node("Add", last, at.constant(1)), count)
    return at.node("Add", before, at.node("Max", first, at.constant(0)))


def _ones(at: Lowering) -> str:
    """A one for each token."""
    return at.once("ones", lambda: at.node("Add", at.node("Mul", "input_ids", at.constant(0)), at.constant(1)))


def _before(x: str, axis: int, at: Lowering) -> str:
    """Sums of the elements before each one."""
    return at.node("CumSum", x, at.number(axis, "i64"), exclusive=1)


def _total(x: str, at: Lowering) -> str:
    """Sums of integers along the second axis, which CUDA's ReduceSum computes by cuDNN."""
    sums = at.node("CumSum", x, at.number(1, "i64"))
    return at.node("Slice", sums, at.constant(-1), at.constant(1 << 62), at.constant(1))


def _numbers(at: Lowering) -> tuple[str, str]:
    """A token's number in its row, (B, S), and the tokens of a row, (B, 1); shapes are left to the device, as those
    that are read back would keep it from being recorded.
    """
    return (at.once("numbers", lambda: _before(_ones(at), 1, at)),
            at.once("counts", lambda: _total(_ones(at), at)))


def row_numbers(at: Lowering) -> str:
    """A token's number among those of all rows: (B, S)."""
    number, count = _numbers(at)
    return at.once("row numbers", lambda: at.node("Add", number, _before(count, 0, at)))


def _of_pages(at: Lowering) -> str:
    """A token's number among those of its sequence, which is the last one that begins at or before it."""
    number = _before(_ones(at), 0, at)
    ends = at.node("Cast", "cumulative_sequence_length", to="i64")
    begins = at.node("Slice", ends, at.constant(0), at.constant(-1), at.constant(0))
    there = at.node("GreaterOrEqual", at.node("Unsqueeze", number, at.constant(1)), begins)
    begun = at.node("Squeeze", _total(at.node("Cast", there, to="i64"), at), at.constant(1))
    sequence = at.node("Sub", begun, at.constant(1))
    past = at.node("Sub", at.node("Cast", "past_seqlens", to="i64"), begins)
    return at.node("Add", number, at.node("Gather", past, sequence, axis=0))


def turned_width(rope: Rotation) -> int:
    """Elements of a head that a rotation's table is for; of a proportional one those that stand still too."""
    return 2 * rope.apart or rope.rotary


def tables(rope: Rotation, at: Lowering, padded: int = 0) -> tuple[str, str]:
    """Names of a rotation's cosines and sines."""
    more = f".{rope.table}" if rope.table else ""
    names = []
    for which, name in enumerate(("cos", "sin")):
        names.append(at.store(weights.rope(at.graph.config, rope.table, turned_width(rope), at.flavour.positions,
                                           which, name + more, at.dtype, padded)))
    return names[0], names[1]


def rotated(x: str, heads: int, rope: Rotation, at: Lowering) -> str:
    """Rows of heads that turn apart from attention; pages have no axis of sequences, which the operator wants."""
    cos, sin = tables(rope, at)
    flat, where = at.axes == 1, positions(at)
    if flat:
        where = at.once("positions of one", lambda: at.node("Unsqueeze", positions(at), at.constant(0)))
        x = at.node("Unsqueeze", x, at.constant(0))
    x = at.node("RotaryEmbedding", x, where, cos, sin, domain=MICROSOFT, num_heads=heads,
                rotary_embedding_dim=turned_width(rope))
    return at.node("Squeeze", x, at.constant(0)) if flat else x


def scaled_queries(q: str, table: int, at: Lowering) -> str:
    """Queries times the factor of their position."""
    c, ctx = at.graph.config, at.flavour.positions
    name = at.store(weights.rope(c, table, c.turned(c.rotations[table]), ctx, 0, f"cos.{table}", at.dtype))

    def factor() -> str:
        found = at.node("Gather", name, positions(at), axis=0)
        return at.node("Slice", found, at.constant(0), at.constant(1), at.constant(-1))

    return at.node("Mul", q, at.once(("factor", table), factor))


def alibi(heads: int, scale: float, at: Lowering) -> str:
    """The bias of each score: (B, heads, S, positions), the key's less the query's."""
    return at.once(("alibi", heads, scale), lambda: _alibi(heads, scale, at))


def _alibi(heads: int, scale: float, at: Lowering) -> str:
    config, ctx = at.graph.config.alibi, at.flavour.positions
    assert config

    def table() -> np.ndarray:
        return np.stack([alibi_bias(config, slope, scale, np.arange(ctx), 0) for slope in alibi_slopes(config, heads)])

    whole = at.store(weights.computed("alibi", "f32", (heads, ctx), table))
    zero, one = (at.number((i,), "i32") for i in (0, 1))  # as the length, which is in the memory of the process
    keys = at.node("Slice", whole, zero, "total_sequence_length", one)
    keys = at.node("Unsqueeze", keys, at.constant(0, 2))
    queries = at.node("Transpose", at.node("Gather", whole, positions(at), axis=1), perm=(1, 0, 2))
    bias = at.node("Sub", keys, at.node("Unsqueeze", queries, at.constant(3)))
    return bias if at.dtype == "f32" else at.node("Cast", bias, to=at.dtype)
