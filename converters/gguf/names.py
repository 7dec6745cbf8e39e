"""GGUF names of the tensors that an architecture calls by Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from edgeinfer.graph import Affine, Decay, Graph, ModelConfig, Source, Tap, Transposed, Weight, family_of

from ..checkpoint.convolutions import with_convolutions_apart
from ..checkpoint.expert_names import with_stacks
from .latent import with_heads_apart

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps", "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""Names in Llama's layers and in our builder's MoE models; families add others (`Family.tensors`)."""
SHARED_GATE = ".ffn_gate_inp_shexp.weight"
"""A matrix of one row, which files have as a vector."""
VECTORS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")
"""Vectors that files have as columns, or with a row for each group."""
CONVOLUTIONS = re.compile(r"blk\.[0-9]+\.ssm_conv1d_[qkv]\.weight")
"""Convolutions of q, k and v by themselves, which files have with axes of one element."""
_HEAD_NORM = re.compile(r"model\.layers\.([0-9]+)\.self_attn\.([qk])_layernorm\.norms\.([0-9]+)\.weight")
"""The norm of one head, which files have in one tensor for all."""
_FUSED = re.compile(r"(blk\.[0-9]+\.ffn_)(gate|up)(_exps\.(?:weight|bias))")
_IN_LAYER = re.compile(r"[a-z_]+\.(?:layers|blocks|h)\.([0-9]+)\.(.+)")
_KIND = re.compile(r"(.+)\.(weight|bias)")


def with_gguf_names(graph: Graph, config: ModelConfig, names: Collection[str] = ()) -> Graph:
    """Return the graph with the sources of its weights as a GGUF file has them; `names` are those of its tensors."""
    def rows_of(name: str) -> tuple[int, ...] | None:
        """Channels of one of three convolutions that a file has apart."""
        r = config.recurrent
        found = CONVOLUTIONS.fullmatch(own := gguf_name(name, config.model_type))
        return (r.value_width if "_v." in own else r.key_width,) if r and found and own in names else None

    graph = with_convolutions_apart(graph, rows_of)
    return replace(graph, weights=tuple(_renamed(weight, config, names) for weight in graph.weights))


def _renamed(weight: Weight, config: ModelConfig, names: Collection[str]) -> Weight:
    apart = with_heads_apart(weight, config, names)
    if apart is not weight:
        return apart
    qkv = family_of(config.model_type).qkv
    fused = re.fullmatch(r"layers\.([0-9]+)\.qkv(_bias)?", weight.name) if qkv != "apart" else None
    name = f"blk.{fused[1]}.attn_qkv.{'bias' if fused[2] else 'weight'}" if fused else ""
    if fused and (qkv == "rows" or name in names):
        return replace(weight, sources=_rows(name, weight))
    return with_stacks(weight, lambda source: _source(source, config, names, weight.ordered))


def _rows(name: str, weight: Weight) -> tuple[Source, ...]:
    """Each part of the weight as rows of one tensor."""
    counts = [source.shape[0] for source in weight.sources]
    whole = Source(name, (sum(counts), *weight.sources[0].shape[1:]))
    return tuple(whole.rows(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts)))


def _source(source: Source, config: ModelConfig, names: Collection[str], ordered: bool) -> Source:
    """The same elements by the file's name; steps of the architecture come after those that undo the converter's.

    Steps that the converter has taken already are left out, and so is an order of columns that the weight itself has.
    """
    family, layer = family_of(config.model_type), _IN_LAYER.fullmatch(source.name)
    if layer and family.parts and (found := family.parts(config, layer[2], source)):
        whole = f"blk.{layer[1]}.{found[0]}"
        if whole in names or gguf_name(source.name, config.model_type) not in names:  # as older files have it
            return replace(found[1], name=whole)
    name, steps, stored = gguf_name(source.name, config.model_type), source.steps, source.stored
    if any(isinstance(step, Transposed) for step in steps) and not config.latent:
        steps, stored = tuple(step for step in steps if not isinstance(step, Transposed)), stored[::-1]
    if any(isinstance(step, Tap) for step in steps):
        stored = (stored[0], stored[2])
    steps = tuple(step for step in steps if not isinstance(step, Decay))
    if family.norms_plus_one:
        steps = tuple(step for step in steps if step != Affine(plus=1.0))
    if source.each and name not in names and (single := name.replace("_exps.", ".{}.")).format(0) in names:
        name = single  # files of early 2024 have a tensor for each expert
    plain = replace(source, name=name, stored=stored, steps=())
    if head := _HEAD_NORM.fullmatch(source.name):
        heads = config.num_attention_heads if head[2] == "q" else config.num_key_value_heads
        plain = replace(plain, stored=(heads, *stored), index=(int(head[3]),))
    if (part := _FUSED.fullmatch(name)) and name not in names and (both := f"{part[1]}gate_up{part[3]}") in names:
        rows, second = stored[1], part[2] == "up"
        plain = replace(plain, name=both, stored=(stored[0], 2 * rows, *stored[2:]))
        if family.experts.in_turns:
            plain = plain.every(2, int(second))
        else:
            plain = plain.rows(rows * second, rows * (1 + second))
    order = family.order(config, layer[2]) if layer and family.order else None
    if order and not (ordered and order.axis == "columns"):
        plain = replace(plain, steps=(order,))
    if family.neighbours and re.search(r"\.attn_[qk]\.", name):
        plain = plain.rope_halves(config.head_dim, config.rope_dim)
    return replace(plain, steps=(*plain.steps, *steps))


def gguf_name(name: str, model_type: str = "") -> str:
    """The file's name of a tensor; one that has none there keeps its own, and will be said to be missing."""
    if head := _HEAD_NORM.fullmatch(name):
        return f"blk.{head[1]}.attn_{head[2]}_norm.weight"
    own = family_of(model_type).tensors
    layer = _IN_LAYER.fullmatch(name)
    if layer and layer[2] in own:  # a name that does not end in a kind
        return f"blk.{layer[1]}.{own[layer[2]]}"
    parts = _KIND.fullmatch(layer[2] if layer else name)
    known = {**(_LAYER if layer else _OUTER), **own}
    if not parts or parts[1] not in known:
        return name
    return f"{f'blk.{layer[1]}.' if layer else ''}{known[parts[1]]}.{parts[2]}"
