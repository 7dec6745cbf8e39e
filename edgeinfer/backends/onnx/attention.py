"""Attention to ONNX: over slots or pages, with norms of q and k heads apart or fused, and heads padded where needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Attention, RopeStore, RotateQueries, Rotation, Weight

from . import weights
from .flavour import HEAD_STEP, Heads, kv_layers, layers_read
from .lowering import MICROSOFT, Lowering, Value, lower
from .positions import alibi, rotated, scaled_queries, tables, turned_width
from .states import states_of


def declare(at: Lowering) -> None:
    """Add the inputs and outputs that every model of the flavour has, and values shared by all layers."""
    layers = kv_layers(at.graph)
    if at.flavour.attention == "paged":
        at.inputs += [Value("input_ids", "i64", ("tokens",)), Value("cumulative_sequence_length", "i32", ("ends",)),
                      Value("past_seqlens", "i32", ("sequences",)),
                      Value("block_table", "i32", ("sequences", "pages_of_sequence")),
                      Value("attention_metadata", "i32", (3,)), Value("output_rows", "i64", ("rows",))]
        for end, values in (("", at.inputs), ("_out", at.outputs)):
            values += [Value(f"{kv}_cache{end}.{i}", at.dtype, ("pages", "page_rows", heads.kv, heads.stored_dim))
                       for i, heads in layers.items() for kv in ("key", "value")]
        return
    if at.flavour.target == "genai" and (len(set(layers.values())) > 1
                                         or len(layers) < at.graph.config.num_hidden_layers):
        raise UnsupportedModelError("The model's layers have K and V of different sizes, or share them, and "
                                    "onnxruntime-genai feeds the same to each layer, so the model cannot be exported "
                                    "for it; export with --for session.")
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
        values += [Value(f"{kind}.{i}.{kv}", at.dtype, ("batch", heads.kv, where, heads.stored_dim))
                   for i, heads in layers.items() for kv in ("key", "value")]
    _declare_states(at)


def _declare_states(at: Lowering) -> None:
    """Add the state of recurrent layers, and which slots run."""
    if not (states := states_of(at.graph, at.dtype)):
        return
    at.inputs += [Value("cumulative_sequence_length", "i32", ("ends",)), Value("active", "i32", ("batch",))]
    for state in states:
        at.inputs.append(Value(state.past, state.kind, ("batch", *state.shape)))
        at.outputs.append(Value(state.present, state.kind, ("batch", *state.shape)))


class _Turn(NamedTuple):
    """Rotation of the heads of a layer."""

    rope: Rotation | None
    inside: bool
    """True if attention itself turns them."""


def _turn(op: Attention, rope: Rotation) -> _Turn:
    """The operator turns whole heads, or parts of heads that are multiples of 16 both."""
    return _Turn(rope, rotated_inside(op.head_dim, rope)) if rope.rotary else _Turn(None, False)


def rotated_inside(head_dim: int, rope: Rotation) -> bool:
    """Return whether attention itself rotates heads, which are padded in both halves then."""
    width = turned_width(rope)
    part = width % HEAD_STEP == head_dim % HEAD_STEP == 0
    return bool(rope.rotary) and (width == head_dim or part)


@lower.register
def _(op: RopeStore, at: Lowering) -> None:
    """Attention rotates, and writes K and V itself."""
    at.ropes[op.layer] = op
    at.same(op.out, op.qkv)


@lower.register
def _(op: RotateQueries, at: Lowering) -> None:
    """Queries of a layer that reads the K and V of another; or factors of queries, after their rotation."""
    if at.graph.config.rotations and at.graph.config.rotations[op.table].kind == "query_scale":
        at.scaled[op.layer] = op.table
    else:
        at.ropes[op.layer] = op
    at.same(op.out, op.q)


@lower.register
def _(op: Attention, at: Lowering) -> None:
    rope, heads = at.ropes[op.layer], Heads(op.heads, op.kv_heads, op.head_dim)
    turn, shared = _turn(op, rope), layers_read(at.graph.config)
    fused = isinstance(rope, RopeStore) and bool(rope.q_norm) and at.flavour.qk_norm == "fused" \
        and not heads.padded and op.layer not in shared
    plain = isinstance(rope, RopeStore) and not (rope.beside or rope.value_norm or rope.keys_as_values) \
        and (not rope.q_norm or fused) and not heads.padded and (turn.inside or not turn.rope) \
        and op.layer not in at.scaled and op.kv_layer is None and op.layer not in shared
    packed = at.value(op.qkv)
    if plain:
        qkv = (packed, "", "")
    else:
        qkv = _three(packed, op, rope, turn, heads, bool(rope.q_norm) and not fused, at)
    out = attended(op, qkv, turn.rope if turn.inside else None, at, rope if fused else None)
    at.set(op.out, unpadded(out, heads, heads.dim, at) if heads.padded else out)


def _three(packed: str, op: Attention, rope: Rotation, turn: _Turn, heads: Heads, norms: bool, at: Lowering
           ) -> tuple[str, str, str]:
    """Queries, keys and values apart: normalised, rotated, scaled and padded where attention does not do it."""
    own = rope if isinstance(rope, RopeStore) else None
    counts = [heads.query] + ([heads.kv] * (1 if own.keys_as_values else 2) if own else [])
    sizes = [n * heads.dim for n in counts] + ([own.beside] if own and own.beside else [])
    names = [f"{kind}.{op.layer}" for kind in ("queries", "keys", "values", "beside")]
    names = [*names[: len(counts)], *names[3 : 3 + len(sizes) - len(counts)]]
    if len(sizes) > 1:
        at.node("Split", packed, at.constant(*sizes), out=names, axis=-1)
    else:
        names = [packed]
    q = _head_rows(names[0], heads.query, rope.q_norm if norms else None, rope.eps, turn, heads, at)
    if op.layer in at.scaled:
        q = scaled_queries(q, at.scaled[op.layer], at)
    if own is None:
        return q, "", ""
    k = _head_rows(names[1], heads.kv, own.k_norm if norms else None, own.eps, turn, heads, at)
    v = names[1] if own.keys_as_values else names[2]
    if own.value_norm:
        ones = at.store(weights.computed(f"ones.{heads.dim}", at.dtype, (heads.dim,), lambda: np.ones(heads.dim)))
        v = _normed(v, heads.kv, ones, own.eps, heads, at)
    v = padded_rows(v, heads.kv, heads, False, at)
    return q, k, v


def _normed(x: str, n: int, scale: str, eps: float, heads: Heads, at: Lowering) -> str:
    """Rows of n heads, each normed by itself."""
    x = at.node("Reshape", x, at.constant(*at.rows(n, heads.dim)))
    x = at.node("RMSNormalization", x, scale, axis=-1, epsilon=eps)
    return at.node("Reshape", x, at.constant(*at.rows(n * heads.dim)))


def _head_rows(x: str, n: int, scale: Weight | None, eps: float, turn: _Turn, heads: Heads, at: Lowering) -> str:
    """Rows of n heads, normalised, rotated where attention does not do it, and padded with zeros."""
    if scale:
        x = _normed(x, n, at.vector(scale), eps, heads, at)
    if turn.rope and not turn.inside:
        x = rotated(x, n, turn.rope, at)
    return padded_rows(x, n, heads, turn.inside, at)


def padded_rows(x: str, n: int, heads: Heads, halves: bool, at: Lowering) -> str:
    """Rows of n heads padded with zeros; a head that attention rotates in each of its halves."""
    if not heads.padded:
        return x
    parts = 2 if halves else 1
    x = at.node("Reshape", x, at.constant(*at.rows(n * parts, heads.dim // parts)))
    x = at.node("Pad", x, at.constant(0, (heads.stored_dim - heads.dim) // parts), "", at.constant(-1))
    return at.node("Reshape", x, at.constant(*at.rows(n * heads.stored_dim)))


def unpadded(out: str, heads: Heads, width: int, at: Lowering) -> str:
    """Rows of the query heads, of each its first elements alone."""
    x = at.node("Reshape", out, at.constant(*at.rows(heads.query, heads.stored_dim)))
    x = at.node("Slice", x, at.constant(0), at.constant(width), at.constant(-1))
    return at.node("Reshape", x, at.constant(*at.rows(heads.query * width)))


def attended(op: Attention, qkv: tuple[str, str, str], turning: Rotation | None, at: Lowering,
             norms: Rotation | None = None) -> str:
    """Attention by the operator of the flavour, over the layer's own cache or another's."""
    heads, layer = Heads(op.heads, op.kv_heads, op.head_dim), op.layer or 0
    common: dict[str, Any] = {"num_heads": heads.query, "kv_num_heads": heads.kv, "do_rotary": int(bool(turning)),
                              "scale": op.scale, "domain": MICROSOFT}
    if op.window:
        common["local_window_size"] = op.window
    if op.cap:
        common["softcap"] = op.cap
    given = {"norms": ["", ""], "turns": ["", ""], "bias": "", "sinks": at.vector(op.sinks) if op.sinks else ""}
    if turning:
        given["turns"] = list(tables(turning, at, heads.stored_dim // 2 if heads.padded else 0))
    if isinstance(norms, RopeStore):
        common["qk_norm_epsilon"] = norms.eps
        given["norms"] = [at.vector(norm) if norm else "" for norm in (norms.q_norm, norms.k_norm)]
    if op.alibi:
        if at.flavour.attention == "paged":
            raise UnsupportedModelError(f"The operation {op.label} has ALiBi, for which PagedAttention has no input; "
                                        "export with --attention gqa, or run with --kv-layout slots.")
        given["bias"] = alibi(heads.query, op.scale, at)
    return (_paged if at.flavour.attention == "paged" else _slots)(op, layer, qkv, given, common, at)


def _slots(op: Attention, layer: int, qkv: tuple[str, str, str], given: dict[str, Any], common: dict[str, Any],
           at: Lowering) -> str:
    past, present = ([f"{kind}.{layer}.{kv}" for kv in ("key", "value")] for kind in ("past_key_values", "present"))
    if op.kv_layer is not None:  # its own tokens are there already, and written once more
        *kv, past_key, past_value = at.kept[op.kv_layer]
        qkv, past, present = (qkv[0], kv[0], kv[1]), [past_key, past_value], \
            [f"again.{layer}.{kv}" for kv in ("key", "value")]
    else:
        at.kept[layer] = (*qkv[1:], *present)
    inputs = [*qkv, *past, "seqlens_k", "total_sequence_length", *given["turns"], "", given["bias"], given["sinks"],
              "", "", *given["norms"]]
    while not inputs[-1]:
        inputs.pop()
    return at.node("GroupQueryAttention", *inputs, out=("", *present), **common)


def _paged(op: Attention, layer: int, qkv: tuple[str, str, str], given: dict[str, Any], common: dict[str, Any],
           at: Lowering) -> str:
    pages, after = ([f"{kv}_cache{end}.{layer}" for kv in ("key", "value")] for end in ("", "_out"))
    if op.kv_layer is not None:
        *kv, key, value = at.kept[op.kv_layer]
        qkv, pages, after = (qkv[0], kv[0], kv[1]), [key, value], []  # written in place
    else:
        at.kept[layer] = (*qkv[1:], *after)
    inputs = [*qkv, *pages, "cumulative_sequence_length", "past_seqlens", "block_table", *given["turns"], "",
              given["sinks"], *given["norms"], "", "", "attention_metadata"]
    return at.node("PagedAttention", *inputs, out=("", *after), **common)
