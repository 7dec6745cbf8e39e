"""Lowering of multi-head latent attention (MLA) in its absorbed form: one KV head, which is key and value."""

from __future__ import annotations

from edgeinfer.graph import HeadLinear, LatentAttention, QuantizeHeads, RopeStore, StoreLatent

from . import weights
from .attention import attended, padded_rows, unpadded
from .flavour import Heads
from .lowering import BY_HEAD, Lowering, lower
from .positions import rotated, row_numbers


@lower.register
def _(op: QuantizeHeads, at: Lowering) -> None:
    at.same(op.out, op.x)


@lower.register
def _(op: HeadLinear, at: Lowering) -> None:
    """Each head's piece times its own matrix: a batch of matmuls, one for each head."""
    stored, (rows, cols) = at.graph.types[op.weight.name], (op.rows, op.weight.shape[1])
    matrix = weights.dense_rows(at.whole(op.weight), at.dtype, op.weight.name, (op.heads, cols, rows), transposed=True)
    if stored.quantised:
        at.remark(BY_HEAD, stored.nbytes(op.weight.shape), matrix.nbytes)
    x = at.node("Slice", at.value(op.x), at.constant(0), at.constant(op.heads * cols), at.constant(-1))
    x = at.node("Reshape", x, at.constant(-1, op.heads, cols))
    y = at.node("MatMul", at.node("Transpose", x, perm=(1, 0, 2)), at.store(matrix))
    y = at.node("Transpose", y, perm=(1, 0, 2))
    if op.step != rows:
        y = at.node("Pad", y, at.constant(0, op.step - rows), "", at.constant(-1))
    y = at.node("Reshape", y, at.constant(-1, op.heads * op.step))
    at.set(op.out, _as_tokens(y, at))


def _as_tokens(rows: str, at: Lowering) -> str:
    """A list of rows of all tokens, with the axes of tokens again."""
    return rows if at.axes == 1 else at.node("Gather", rows, row_numbers(at), axis=0)


@lower.register
def _(op: StoreLatent, at: Lowering) -> None:
    """Queries of all heads with their rotated parts, then the key."""
    width, rope = op.rank + op.rotary, _rotation(op)
    queries = at.node("Slice", at.value(op.queries), at.constant(0), at.constant(op.heads * width), at.constant(-1))
    queries = at.node("Reshape", queries, at.constant(*at.rows(op.heads, width)))
    queries = at.node("Slice", queries, at.constant(0), at.constant(op.rank), at.constant(-1))
    parts = (("q", at.value(op.q), op.q_first, op.heads * op.rotary),
             ("latent", at.value(op.compressed), op.first, op.rank),
             ("key", at.value(op.compressed), op.first + op.rank, op.rotary))
    q, latent, key = (at.node("Slice", x, at.constant(first), at.constant(first + n), at.constant(-1))
                      for _, x, first, n in parts)
    q, key = rotated(q, op.heads, rope, at), rotated(key, 1, rope, at)
    q = at.node("Reshape", q, at.constant(*at.rows(op.heads, op.rotary)))
    q = at.node("Reshape", at.node("Concat", queries, q, axis=-1), at.constant(*at.rows(op.heads * width)))
    latent = at.node("RMSNormalization", latent, at.vector(op.norm), axis=-1, epsilon=op.eps)
    at.set(op.out, at.node("Concat", q, latent, key, axis=-1))


def _rotation(op: StoreLatent) -> RopeStore:
    """The rotation of the elements after the latent, as other layers have it."""
    return RopeStore(out=op.out, qkv=op.queries, heads=op.heads, kv_heads=1, head_dim=op.rank + op.rotary, eps=op.eps,
                     rotary=op.rotary, layer=op.layer)


@lower.register
def _(op: LatentAttention, at: Lowering) -> None:
    """The operator wants a value as wide as the key: it is the key, and everything but its latent is cut off."""
    heads = Heads(op.heads, 1, op.head_dim)
    names = [f"{kind}.{op.layer}" for kind in ("queries", "key")]
    at.node("Split", at.value(op.qkv), at.constant(op.heads * op.head_dim, op.head_dim), out=names, axis=-1)
    q, key = (padded_rows(name, n, heads, False, at) for name, n in zip(names, (op.heads, 1), strict=True))
    out = attended(op, (q, key, key), None, at)
    at.set(op.out, unpadded(out, heads, op.values, at))
