"""Gemma 4's text models: heads by kind of layer, shared KV, a row of each token for every layer, experts by FFNs."""

from __future__ import annotations

import re
from dataclasses import replace
from math import sqrt
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ..builder.builder import GraphBuilder
from ..builder.moe import count_experts
from ..config import ExpertsConfig, ModelConfig, RopeConfig
from ..families.family import NORMS_ON_THE_WAY_OUT, ExpertModules, Family, Gguf, GgufExperts, Ollama, Seeing
from ..families.gguf_metadata import GgufMetadata
from ..families.pre_tokenizer import PreTokenizer
from ..graph import Graph
from ..hf_config.common import LAYER_TYPES
from ..hf_config.reader import ABSENT, ConfigReader
from ..ops.rope import read_section
from ..tensors import Tensor
from ..weights import Source
from . import gemma

FULL, SLIDING = LAYER_TYPES
LONGEST = 131072
DEFAULTS = {**gemma.DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": LONGEST, "vocab_size": 262144,
            "num_attention_heads": 8}


def read(c: ConfigReader, window: int = 512, longest: int = LONGEST, inputs: int = 256) -> ModelConfig:
    """The last layers read the K and V of the last one before them that is of their kind, and may have wider FFNs.

    Of fields that are absent, `window`, `longest` and `inputs` are sliding_window, max_position_embeddings and
    hidden_size_per_layer_input.
    """
    c, experts = _as_text(c), _experts(c)
    layers, kinds = c.integer("num_hidden_layers", high=2**12), _kinds(c)
    window = c.integer("sliding_window", window)
    head_dims, kv_heads = _heads(c, kinds)
    kv_layers = _kv_layers(c, kinds)
    wide, size = c.flag("use_double_wide_mlp"), c.integer("intermediate_size", high=2**20)
    sizes = tuple(size * (2 if wide and of != i else 1) for i, of in enumerate(kv_layers))
    full, local = _rotations(c, dict(zip(kinds, head_dims, strict=True)))
    windows = tuple(window if kind == SLIDING else 0 for kind in kinds)
    some = any(windows)
    width = 0 if c.is_null("hidden_size_per_layer_input") else c.integer("hidden_size_per_layer_input", inputs, low=0,
                                                                         high=2**14)
    rows = c.integer("vocab_size_per_layer_input", 262144, high=2**22)
    config = gemma.read_gemma(
        c.instead(rope_parameters=None), {**DEFAULTS, "max_position_embeddings": longest}, attention_scale=1.0,
        windows=windows if some else (), rope=full,
        local_rope=local if some else None, ropes=tuple(2 if w else 1 for w in windows) if some else (),
        rotary_dim=None, value_norm=True, logits_softcap=c.number("final_logit_softcapping", None) or 0.0,
        head_dims=head_dims, kv_heads=kv_heads, kv_layers=kv_layers if kv_layers != tuple(range(layers)) else (),
        ffn_sizes=sizes if len(set(sizes)) > 1 else (), layer_input=width,
        layer_input_vocab=rows if width else 0, experts=experts,
        keys_as_values=tuple(i for i in range(layers) if kinds[i] == FULL and kv_layers[i] == i)
        if c.flag("attention_k_eq_v") else ())
    if config.attention_bias:
        raise c.unsupported("attention_bias", True, "published models of the family have none")
    if width and config.layer_input_vocab < config.vocab_size:
        raise CheckpointError(f"{c.where}: vocab_size_per_layer_input is {config.layer_input_vocab}; it must be at "
                              f"least vocab_size, {config.vocab_size}.")
    return config


def _as_text(c: ConfigReader) -> ConfigReader:
    """Read the config; text is causal even in models that see pictures bidirectionally."""
    return c.instead(use_bidirectional_attention=None) if c.get("use_bidirectional_attention") == "vision" else c


def _experts(c: ConfigReader) -> ExpertsConfig | None:
    """Read the experts that every layer of an MoE model has beside its FFN."""
    if c.flag("enable_moe_block"):
        n, active = count_experts(c, "num_experts", ABSENT, ABSENT, "top_k_experts")
        return ExpertsConfig(n, active, c.integer("moe_intermediate_size", high=2**20))
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        c.get(name)  # which mean nothing without
    return None


def _kinds(c: ConfigReader) -> list[str]:
    """Return the kind of each layer; the last one has full attention whatever the config says."""
    layers, types = c.integer("num_hidden_layers", high=2**12), c.get("layer_types")
    if types is None:
        types = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"{c.where}: layer_types is {types!r:.60}; it must list {layers} types.")
    return [*(c.choice("layer_types", kind, LAYER_TYPES) for kind in types[:-1]), FULL]


def _heads(c: ConfigReader, kinds: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and numbers of heads of each layer; transformers 5 writes those of layers without a window one by one."""
    plain = {"head_dim": c.integer("head_dim", 256, high=2**12),
             "num_key_value_heads": c.integer("num_key_value_heads", 4, high=2**12)}
    wide = c.integer("global_head_dim", 512, high=2**12)
    few = c.integer("num_global_key_value_heads", None)
    few = few if c.flag("attention_k_eq_v") else None
    own: dict[str, Any] = {"head_dim": wide, **({"num_key_value_heads": few} if few else {})}
    listed = c.section("per_layer_config")
    names = {int(name): name for name in (listed.items() if listed else ()) if re.fullmatch("[0-9]{1,5}", name)}
    found = []
    for i, kind in enumerate(kinds):
        section = listed.section(names.get(i, str(i))) if listed else None  # transformers pads: 05 of 11 layers
        if section:
            found.append({name: section.integer(name, value, high=2**12) for name, value in plain.items()})
            section.refuse_unread()
        else:
            found.append({**plain, **own} if kind == FULL and not listed else plain)
    if listed:
        listed.refuse_unread()
    dims, counts = (tuple(layer[name] for layer in found) for name in plain)
    heads = c.integer("num_attention_heads", 8, high=2**12)
    if bad := [n for n in counts if heads % n]:
        raise CheckpointError(f"{c.where}: num_attention_heads is {heads}; it must be a multiple of the key-value "
                              f"heads of every layer, and one has {bad[0]}.")
    if len(set(zip(kinds, dims, strict=True))) > len(set(kinds)) or any(n % 2 for n in dims):
        raise c.unsupported("head_dim", sorted(set(dims)), "layers of one kind have heads of one, even size")
    return dims, counts


def _kv_layers(c: ConfigReader, kinds: list[str]) -> tuple[int, ...]:
    """The layer whose K and V each layer reads."""
    shared = c.integer("num_kv_shared_layers", 0, low=0)
    first = len(kinds) - shared
    own = {kind: i for i, kind in enumerate(kinds[: max(first, 0)])}
    if missing := set(kinds[max(first, 0):]) - set(own):
        raise CheckpointError(f"{c.where}: num_kv_shared_layers is {shared}, but no {missing.pop()} layer before the "
                              "last ones has K and V for them to share.")
    return tuple(i if i < first else own[kind] for i, kind in enumerate(kinds))


def _rotations(c: ConfigReader, head_dims: dict[str, int]) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotations of layers without a window, and of the others; `head_dims` are sizes of heads by kind."""
    both = c.section("rope_parameters") or ConfigReader({})
    full, sliding = (both.section(kind) for kind in (FULL, SLIDING))
    both.refuse_unread()
    local = read_section(sliding, 10000.0, None, LONGEST) if sliding else RopeConfig(10000.0)
    if local.kind != "default":
        raise c.unsupported("rope_type of layers with a window", local.kind, "it must be default")
    full = full or ConfigReader({"rope_type": "proportional", "partial_rotary_factor": 0.25})
    n, theta = head_dims[FULL], full.number("rope_theta", 1e6, above=1.0)
    if full.get("rope_type", "default") == "default":
        return replace(read_section(full, theta, None, LONGEST), dims=n), local
    full.choice("rope_type", full.get("rope_type"), ("default", "proportional"))
    dims = 2 * int(full.number("partial_rotary_factor", 1.0, high=1.0) * n // 2)
    rope = RopeConfig(theta, "proportional", full.number("factor", 1.0), dims=dims, span=n)
    full.refuse_unread()
    if not dims:
        raise c.unsupported("partial_rotary_factor", full.get("partial_rotary_factor"), "two dimensions turn at least")
    return rope, local


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    x = g.embed("model.embed_tokens.weight")
    inputs = _layer_inputs(g, c, x) if c.layer_input else None
    for i in range(c.num_hidden_layers):
        x = _layer(g, c, x, i, inputs)
    return g.build(g.logits(x, "model.norm.weight", "lm_head.weight"))


def _layer_inputs(g: GraphBuilder, c: ModelConfig, x: Tensor) -> Tensor:
    """Return the per-layer inputs of a token: its own row plus norm(x W^T), part by part.

    The model multiplies the row by sqrt(width), x W^T by 1 / sqrt(hidden_size) and the sum by 1 / sqrt(2). Here the row
    is as it is stored: the norm's weight is divided by the first, its eps by the square of the second; the layers
    norm the sum, with an eps that accounts for the rest.
    """
    layers, width = c.num_hidden_layers, c.layer_input
    rows = g.token_rows("layer_rows", "model.embed_tokens_per_layer.weight", c.layer_input_vocab, layers * width)
    made = g.linear(x, "layer_projection", ("model.per_layer_model_projection.weight",), (layers * width,),
                    kind="inputs")
    norm = Source("model.per_layer_projection_norm.weight", (width,)).scaled(1 / sqrt(width))
    return g.normed_sum(rows, made, "layer_projection_norm", norm, parts=layers, eps_times=c.hidden_size)


def _layer(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, inputs: Tensor | None) -> Tensor:
    """One block: attention and FFN between norms, then the addend from the token's own row; all of it times a
    number."""
    g.layer, hf, name, d = i, f"model.layers.{i}.", f"layers.{i}.", c.hidden_size
    scalar, x = hf + "layer_scalar", _attended(g, c, x, i, hf, name)
    h = _moe(g, c, x, hf, name) if c.experts else _ffn(g, x, hf, name)
    x = g.normed_sum(x, h, name + "ffn_out_norm", hf + "post_feedforward_layernorm.weight",
                     scalar="" if inputs else scalar)
    if not inputs:
        return x
    h = g.linear(x, name + "input_gate", (hf + "per_layer_input_gate.weight",), (c.layer_input,), kind="inputs")
    h = g.activate(h, c.hidden_act, c.hidden_act_limit, by=inputs, start=i * c.layer_input)
    h = g.linear(h, name + "input_out", (hf + "per_layer_projection.weight",), (d,), kind="inputs")
    return g.normed_sum(x, h, name + "input_norm", hf + "post_per_layer_input_norm.weight", scalar=scalar,
                        eps_times=2 / c.layer_input)


def _ffn(g: GraphBuilder, x: Tensor, hf: str, name: str) -> Tensor:
    """The plain FFN of norm(x)."""
    mlp = hf + "mlp."
    h = g.rms_norm(x, name + "ffn_norm", hf + "pre_feedforward_layernorm.weight")
    return g.ffn(h, name, (mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj"))


def _moe(g: GraphBuilder, c: ModelConfig, x: Tensor, hf: str, name: str) -> Tensor:
    """norm(FFN) + norm(experts), each of x by a norm of its own; the router's is scaled by 1 / sqrt(hidden_size).

    The router comes first: the FFN is computed while experts are read. The model's factor for each expert's
    weights stays an operand: matrices are not scaled, so that codes of a file can be kept.
    """
    scale = Source(hf + "router.scale", (c.hidden_size,)).scaled(c.hidden_size**-0.5)
    routes = g.route(g.rms_norm(x, name + "router_norm", scale), name, hf + "mlp.",
                     hf + "router.per_expert_scale")
    h = g.rms_norm(_ffn(g, x, hf, name), name + "ffn_own_norm", hf + "post_feedforward_layernorm_1.weight")
    e = g.rms_norm(x, name + "experts_norm", hf + "pre_feedforward_layernorm_2.weight")
    e = g.experts(e, routes, name, hf + "mlp.", residual=None)
    return g.normed_sum(h, e, name + "experts_own_norm", hf + "post_feedforward_layernorm_2.weight")


def _attended(g: GraphBuilder, c: ModelConfig, x: Tensor, i: int, hf: str, name: str) -> Tensor:
    """The first half of a block; where layers share K and V it has queries alone, and where k is v no matrix for v."""
    attn, n = hf + "self_attn.", c.head_size(i)
    own, same = c.kv_layer(i) == i, i in c.keys_as_values
    heads = (c.num_attention_heads * n, *((c.kv_count(i) * n,) * (2 - same) if own else ()))
    parts = tuple(attn + p + ".weight" for p in ("q_proj", "k_proj", "v_proj")[: len(heads)])
    h = g.rms_norm(x, name + "attention_norm", hf + "input_layernorm.weight")
    h = g.linear(h, name + "qkv", parts, heads, room=heads[1] if own and same else 0)
    h = g.attention(g.rope_store(h, attn + "q_norm.weight", attn + "k_norm.weight" if own else ""))
    h = g.linear(h, name + "o", (attn + "o_proj.weight",), (c.hidden_size,))
    return g.normed_sum(x, h, name + "attention_out_norm", hf + "post_attention_layernorm.weight")


# -- files -------------------------------------------------------------------------------------------------------------


def _fields(m: GgufMetadata) -> dict[str, Any]:
    """Sizes layer by layer; where k is v a file has no matrix for v."""
    get, config, n, shared = m.get, m.config, m.layers(), m.get("attention.shared_kv_layers") or 0
    if type(shared) is not int or not 0 <= shared < n:
        raise UnsupportedModelError(f"The metadata have {shared!r:.60} as attention.shared_kv_layers, which must be a "
                                    f"number from 0 to {n - 1}; download the file again.")
    heads, sizes = (m.by_layer(config.get(field), field) for field in ("num_key_value_heads", "intermediate_size"))
    sliding = m.by_layer(get("attention.sliding_window_pattern"), "attention.sliding_window_pattern")
    wide, short = get("attention.key_length"), get("attention.key_length_swa") or get("attention.key_length")
    double = shared > 0 and sizes[-1] == 2 * sizes[0]
    if sizes != [sizes[0]] * (n - shared) + [sizes[0] * (1 + double)] * shared or sliding[-1]:
        raise UnsupportedModelError("The metadata have layers whose feed_forward_length or attention."
                                    "sliding_window_pattern is not that of a known Gemma 4; edgeinfer knows no others.")
    for key, width in (("rope.dimension_count", wide), ("rope.dimension_count_swa", short),
                       ("attention.value_length", wide), ("attention.value_length_swa", short)):
        if (value := get(key)) not in (None, width):
            raise UnsupportedModelError(f"The metadata say {m.prefix}{key} {value}, which edgeinfer does not support; "
                                        f"it must be the width of a head, {width}.")
    table = m.tensors.get("per_layer_token_embd.weight")
    full = [i for i in range(n - shared) if not sliding[i]]
    return {
        "hidden_act": None, "rope_theta": None, "intermediate_size": sizes[0],
        "num_key_value_heads": heads[0], "head_dim": short, "num_kv_shared_layers": shared,
        "use_double_wide_mlp": double, "sliding_window": get("attention.sliding_window"),
        "layer_types": [LAYER_TYPES[bool(s)] for s in sliding],
        "per_layer_config": {str(i): {"head_dim": short if sliding[i] else wide, "num_key_value_heads": heads[i]}
                             for i in range(n)},
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": table.shape[0] if table else config.get("vocab_size"),
        "attention_k_eq_v": bool(m.tensors) and not any(f"blk.{i}.attn_v.weight" in m.tensors for i in full),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": get("rope.freq_base") or 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": get("rope.freq_base_swa") or 10000.0}},
        **({"enable_moe_block": True} if get("expert_count") else {}),
    }


def _rotation(m: GgufMetadata) -> dict[str, Any]:
    """Rotations are by kind of layer, as `_fields` has them."""
    return {}


FAMILY = Family(
    (Gguf("gemma4", fields=_fields, fixed_fields=gemma.GELU, tied=True, sees=True, rotation=_rotation,
          proportional=True, experts=GgufExperts(active="top_k_experts", size="moe_intermediate_size"),
          ollama=Ollama(tensors=((r"(blk\.\d+)\.ffn_gate_inp\.per_expert_scale$", r"\1.ffn_down_exps.scale"),
                                 (r"(blk\.\d+)\.layer_scalar$", r"\1.layer_output_scale.weight")))),),
    NORMS_ON_THE_WAY_OUT | {
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2", "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
    pre_tokenizers={"gemma4": PreTokenizer(byte_level=False, add_bos=True)},
    seeing=(Seeing("gemma4"),),
    experts=ExpertModules(router="router.proj", together=("experts.gate_up_proj", "experts.down_proj")))
