"""Attention to ONNX: over slots or pages, with norms of q and k heads apart or fused, and heads padded where needed."""

from __future__ import annotations

from typing import Any

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Attention, RopeStore, Weight

from . import weights
from .flavour import Heads
from .lowering import MICROSOFT, Lowering, Value, lower


def declare(at: Lowering) -> None:
    """Add the inputs and outputs that every model of the flavour has, and what all layers share."""
    c, heads = at.graph.config, Heads.of(at.graph.config)
    layers, dim = range(c.num_hidden_layers), heads.stored_dim
    for which in (0, 1):
        at.store(weights.rope(c, at.flavour.positions, which, at.dtype))
    if at.flavour.attention == "paged":
        at.inputs += [Value("input_ids", "i64", ("tokens",)), Value("cumulative_sequence_length", "i32", ("ends",)),
                      Value("past_seqlens", "i32", ("sequences",)),
                      Value("block_table", "i32", ("sequences", "pages_of_sequence")),
                      Value("attention_metadata", "i32", (3,)), Value("output_rows", "i64", ("rows",))]
        shape: tuple[int | str, ...] = ("pages", "page_rows", heads.kv, dim)
        at.inputs += [Value(f"{kv}_cache.{i}", at.dtype, shape) for i in layers for kv in ("key", "value")]
        at.outputs += [Value(f"{kv}_cache_out.{i}", at.dtype, shape) for i in layers for kv in ("key", "value")]
        return
    at.inputs.append(Value("input_ids", "i64", ("batch", "tokens")))
    past, present = ("past", "past_and_new") if at.flavour.target == "genai" else ("slot", "slot")
    if at.flavour.target == "genai":
        at.inputs.append(Value("attention_mask", "i64", ("batch", "total")))
        seen = at.node("ReduceSum", "attention_mask", at.constant(1), keepdims=0)
        at.node("Cast", at.node("Sub", seen, at.constant(1)), out="seqlens_k", to="i32")
        length = at.node("Gather", at.node("Shape", "attention_mask"), at.constant(1), axis=0)
        at.node("Cast", length, out="total_sequence_length", to="i32")
    else:
        at.inputs += [Value("seqlens_k", "i32", ("batch",)), Value("total_sequence_length", "i32", (1,)),
                      Value("output_rows", "i64", ("rows",))]
    for kind, values, where in (("past_key_values", at.inputs, past), ("present", at.outputs, present)):
        values += [Value(f"{kind}.{i}.{kv}", at.dtype, ("batch", heads.kv, where, dim))
                   for i in layers for kv in ("key", "value")]


@lower.register
def _(op: RopeStore, at: Lowering) -> None:
    """Attention rotates, and writes K and V itself."""
    at.ropes[op.layer] = op
    at.same(op.out, op.qkv)


@lower.register
def _(op: Attention, at: Lowering) -> None:
    rope, heads = at.ropes[op.layer], Heads(op.heads, op.kv_heads, op.head_dim)
    for what, there in (("ALiBi", op.alibi), ("a soft cap", op.cap),
                        ("heads that turn in part, or not at all", rope.rotary != op.head_dim),
                        ("a rotation that follows the context", at.graph.config.rope.kind == "dynamic"),
                        ("a rotation of its own", rope.table), ("a norm of its values", rope.value_norm),
                        ("sinks", op.sinks), ("keys that are its values", rope.keys_as_values)):
        if there:
            raise UnsupportedModelError(f"The operation {op.label} has {what}, which has no equivalent in ONNX yet, so "
                                        "the model cannot be exported; run it with --device cpu.")
    fused = bool(rope.q_norm) and at.flavour.qk_norm == "fused" and not heads.padded
    apart = bool(rope.q_norm) and not fused
    packed = at.value(op.qkv)
    qkv = _three(packed, rope, heads, apart, at) if apart or heads.padded else (packed, "", "")
    common: dict[str, Any] = {"num_heads": heads.query, "kv_num_heads": heads.kv, "do_rotary": 1,
                              "scale": op.scale, "domain": MICROSOFT}
    if op.window:
        common["local_window_size"] = op.window
    if fused:
        common["qk_norm_epsilon"] = rope.eps
    norms = [at.vector(norm) if fused and norm else "" for norm in (rope.q_norm, rope.k_norm)]
    out = (_paged if at.flavour.attention == "paged" else _slots)(op.layer or 0, qkv, norms, common, at)
    at.set(op.out, _unpadded(out, heads, at) if heads.padded else out)


def _slots(layer: int, qkv: tuple[str, str, str], norms: list[str], common: dict[str, Any], at: Lowering) -> str:
    past, present = ([f"{kind}.{layer}.{kv}" for kv in ("key", "value")] for kind in ("past_key_values", "present"))
    inputs = [*qkv, *past, "seqlens_k", "total_sequence_length", "cos", "sin"]
    inputs += ["", "", "", "", "", *norms] if any(norms) else []
    return at.node("GroupQueryAttention", *inputs, out=("", *present), **common)


def _paged(layer: int, qkv: tuple[str, str, str], norms: list[str], common: dict[str, Any], at: Lowering) -> str:
    pages, after = ([f"{kv}_cache{end}.{layer}" for kv in ("key", "value")] for end in ("", "_out"))
    inputs = [*qkv, *pages, "cumulative_sequence_length", "past_seqlens", "block_table", "cos", "sin", "", "", *norms,
              "", "", "attention_metadata"]
    return at.node("PagedAttention", *inputs, out=("", *after), **common)


def _three(packed: str, rope: RopeStore, heads: Heads, norms: bool, at: Lowering) -> tuple[str, str, str]:
    """Queries, keys and values apart: with norms of heads where asked, with padded heads where these are short."""
    names = [f"{kind}.{rope.layer}" for kind in ("queries", "keys", "values")]
    widths = [n * heads.dim for n in (heads.query, heads.kv, heads.kv)]
    at.node("Split", packed, at.constant(*widths), out=names, axis=-1)
    scales = (rope.q_norm, rope.k_norm, None) if norms else (None, None, None)
    counts = (heads.query, heads.kv, heads.kv)
    q, k, v = (_head_rows(name, n, scale, i < 2, rope.eps, heads, at)
               for i, (name, n, scale) in enumerate(zip(names, counts, scales, strict=True)))
    return q, k, v


def _head_rows(x: str, n: int, scale: Weight | None, rotates: bool, eps: float, heads: Heads, at: Lowering) -> str:
    """Rows of n heads, normalised and padded with zeros; a rotating head is padded in each of its halves."""
    if scale:
        x = at.node("Reshape", x, at.constant(*at.rows(n, heads.dim)))
        x = at.node("RMSNormalization", x, at.vector(scale), axis=-1, epsilon=eps)
    if heads.padded:
        parts = 2 if rotates else 1
        x = at.node("Reshape", x, at.constant(*at.rows(n * parts, heads.dim // parts)))
        short = (heads.stored_dim - heads.dim) // parts
        x = at.node("Pad", x, at.constant(0, short), "", at.constant(-1))
    return at.node("Reshape", x, at.constant(*at.rows(n * heads.stored_dim))) if scale or heads.padded else x


def _unpadded(out: str, heads: Heads, at: Lowering) -> str:
    """Rows of the query heads without what they were padded with."""
    x = at.node("Reshape", out, at.constant(*at.rows(heads.query, heads.stored_dim)))
    x = at.node("Slice", x, at.constant(0), at.constant(heads.dim), at.constant(-1))
    return at.node("Reshape", x, at.constant(*at.rows(heads.query * heads.dim)))
