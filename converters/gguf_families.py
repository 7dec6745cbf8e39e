"""What the metadata of each architecture of GGUF say in the fields of a config.json, beside the sizes that all have.

Some of it a file does not hold: llama.cpp knows it by the architecture, and so does this table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from edgeinfer.errors import UnsupportedModelError

from .gguf_latent import KEYS, NAME, latent_fields, model_type_of

Get = Callable[[str], Any]
"""The value of a key, without the architecture's name before it; None where it is absent."""
RUNNABLE = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2vl": "qwen2", "qwen3vl": "qwen3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3", "smollm3": "smollm3", "granite": "granite",
    "olmo2": "olmo2", "gpt2": "gpt2", "gptneox": "gpt_neox", "falcon": "falcon", "stablelm": "stablelm", "phi2": "phi",
    "starcoder2": "starcoder2", "command-r": "cohere", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe", "granitemoe": "granitemoe", "gpt-oss": "gpt_oss", "smallthinker": "smallthinker",
    "deepseek2": "deepseek_v2", "gemma4": "gemma4_text", "mistral3": "ministral3", "exaone4": "exaone4",
    "glm4": "glm4", "cohere2": "cohere2", "qwen3vlmoe": "qwen3_moe", "starcoder": "gpt_bigcode",
}
"""GGUF's names of architectures and ours. Mistral's and Mixtral's is llama: with a window it becomes mistral, with
experts mixtral. deepseek2 is DeepSeek-V3's and GLM-4.7-Flash's too: both run as deepseek_v3. With a window
olmo2 becomes olmo3, with a shared FFN granitemoe becomes granitemoeshared; mistral3 is Mistral Small 3's too, which
runs as mistral."""
ACTIVATIONS = {"gemma": "gelu_pytorch_tanh", "gemma2": "gelu_pytorch_tanh", "gemma3": "gelu_pytorch_tanh",
               "gemma4": "gelu_pytorch_tanh",
               "gpt2": "gelu_new", "gptneox": "gelu", "falcon": "gelu", "phi2": "gelu_new",
               "starcoder2": "gelu_pytorch_tanh", "starcoder": "gelu_pytorch_tanh"}
"""Hidden activations that are not silu."""
TIED = ("gemma", "gemma2", "gemma3", "gemma4", "command-r", "cohere2")
"""Architectures whose head always is the embedding."""
PARTIAL = ("phi3", "gptneox", "stablelm", "phi2", "glm4")
"""Architectures of which a part of each head may turn."""
WINDOWED = ("gemma2", "gemma3", "gemma4", "phi3", "starcoder2", "gpt-oss", "smallthinker", "olmo2", "exaone4",
            "cohere2")
"""Architectures whose files say how wide windows are, and whose kind says which layers have one."""
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose scores are divided by the square root of hidden_size / heads, and not of a head's size."""
_HEAD_NORMS = "blk.0.attn_q_norm.weight"
"""A tensor of models whose heads are normed, where the metadata do not tell."""
_LAYERS_OF_EXAONE_32B = 64
_EVERY = 4
"""OLMo 3, EXAONE 4, Command-R7B: which layers see all."""
_WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern")
_MOST_LAYERS = 4096
_NO_ROPE_EVERY = 4
"""SmolLM3 and SmallThinker: which layers have no rotation."""


def family_fields(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Return the fields that are this family's own; `config` has the sizes.

    Raises `UnsupportedModelError` where a number is missing that the others are calculated with.
    """
    reader = _READERS.get(name)
    return reader(name, get, config, tensors) if reader else {}


def _size(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"The metadata lack {field}, which the model needs; download the file again.")
    return value


def _layers(config: Mapping[str, Any]) -> int:
    """How many layers there are, bounded before something is made for each."""
    layers = _size(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise UnsupportedModelError(f"The metadata say that there are {layers} layers, but edgeinfer takes at most "
                                    f"{_MOST_LAYERS}; download the file again.")
    return layers


def _gemma(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"hidden_activation": ACTIVATIONS[name]}
    if name == "gemma":
        return fields
    wide = _size(config, "hidden_size") // _size(config, "num_attention_heads")
    whole = _size(config, "num_hidden_layers") == _LARGEST[name]
    fields |= {"query_pre_attn_scalar": wide if whole else config.get("head_dim", 256),
               "sliding_window": get("attention.sliding_window"), "final_logit_softcapping":
               get("final_logit_softcapping")}
    if name == "gemma2":
        return fields | {"attn_logit_softcapping": get("attn_logit_softcapping")}
    return fields | {"rope_local_base_freq": get("rope.freq_base_swa") or 10000.0,
                     "sliding_window_pattern": get("attention.sliding_window_pattern") or 6}


def _gemma4(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Sizes layer by layer; where k is v a file has no matrix for v."""
    n, shared = _layers(config), get("attention.shared_kv_layers") or 0
    if type(shared) is not int or not 0 <= shared < n:
        raise UnsupportedModelError(f"The metadata have {shared!r:.60} as attention.shared_kv_layers, which must be a "
                                    f"number from 0 to {n - 1}; download the file again.")
    heads, sizes = (_by_layer(config.get(field), n, field) for field in ("num_key_value_heads", "intermediate_size"))
    sliding = _by_layer(get("attention.sliding_window_pattern"), n, "attention.sliding_window_pattern")
    wide, short = get("attention.key_length"), get("attention.key_length_swa") or get("attention.key_length")
    double = shared > 0 and sizes[-1] == 2 * sizes[0]
    if sizes != [sizes[0]] * (n - shared) + [sizes[0] * (1 + double)] * shared or sliding[-1]:
        raise UnsupportedModelError("The metadata have layers whose feed_forward_length or attention."
                                    "sliding_window_pattern is none of Gemma 4's; edgeinfer knows no others.")
    for key, width in (("rope.dimension_count", wide), ("rope.dimension_count_swa", short),
                       ("attention.value_length", wide), ("attention.value_length_swa", short)):
        if (value := get(key)) not in (None, width):
            raise UnsupportedModelError(f"The metadata say gemma4.{key} {value}, which edgeinfer does not support; it "
                                        f"must be the width of a head, {width}.")
    table = tensors.get("per_layer_token_embd.weight") if isinstance(tensors, Mapping) else None
    full = [i for i in range(n - shared) if not sliding[i]]
    return {
        "hidden_activation": ACTIVATIONS[name], "hidden_act": None, "rope_theta": None, "intermediate_size": sizes[0],
        "num_key_value_heads": heads[0], "head_dim": short, "num_kv_shared_layers": shared,
        "use_double_wide_mlp": double, "sliding_window": get("attention.sliding_window"),
        "layer_types": [("full_attention", "sliding_attention")[bool(s)] for s in sliding],
        "per_layer_config": {str(i): {"head_dim": short if sliding[i] else wide, "num_key_value_heads": heads[i]}
                             for i in range(n)},
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": table.shape[0] if table else config.get("vocab_size"),
        "attention_k_eq_v": bool(tensors) and not any(f"blk.{i}.attn_v.weight" in tensors for i in full),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": get("rope.freq_base") or 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base_swa") or 10000.0}},
    }


def _by_layer(value: Any, layers: int, what: str) -> list[int]:
    """Numbers, or flags, of layers, of which a file may have one for all."""
    found = list(value) if isinstance(value, list | bytes) else [value] * layers
    if len(found) != layers or not all(isinstance(item, int) and item >= 0 for item in found):
        raise UnsupportedModelError(f"The metadata have {value!r:.60} as {what}, which the model needs for each of "
                                    f"{layers} layers; download the file again.")
    return found


def _phi3(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {"sliding_window": get("attention.sliding_window") or None}


def _smollm3(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {"no_rope_layer_interval": _NO_ROPE_EVERY}


def _granite(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    keys = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale"}
    scale = _size(config, "head_dim") ** -0.5  # of files that say none
    return {"attention_multiplier": scale} | {ours: get(key) for ours, key in keys.items() if get(key)}


def _falcon(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    kv, heads = config.get("num_key_value_heads", 1), _size(config, "num_attention_heads")
    two = "blk.0.attn_norm_2.weight" in tensors
    return {"num_kv_heads": kv, "new_decoder_architecture": two or kv not in (1, heads), "multi_query": kv == 1,
            "num_ln_in_parallel_attn": 2 if two else 1, "num_key_value_heads": None}


def _side(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    normed = {"qk_layernorm": _HEAD_NORMS in tensors} if name == "stablelm" else {}
    return {"use_parallel_residual": bool(get("use_parallel_residual")), **normed}


def _starcoder2(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {"sliding_window": get("attention.sliding_window") or None}


def _cohere(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {"logit_scale": get("logit_scale"), "use_qk_norm": _HEAD_NORMS in tensors}


def _latent(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {**latent_fields(get), "model_type": model_type_of(get)}


def _gpt_oss(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {"sliding_window": get("attention.sliding_window")}


def _smallthinker(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """With windows, the first of every four layers has neither a window nor a rotation."""
    layers, window = _layers(config), get("attention.sliding_window")
    local = [int(not window or i % _NO_ROPE_EVERY != 0) for i in range(layers)]
    return {"sliding_window_size": window or None, "rope_layout": local,
            "sliding_window_layout": local if window else None}


def _olmo(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """OLMo 3's layers with a window turn by the plain rotation."""
    window, theta = get("attention.sliding_window"), get("rope.freq_base") or 10000.0
    if not window:
        return {}
    own = get("rope.freq_base_swa") or theta
    return {"model_type": "olmo3", "sliding_window": window, "layer_types": _kinds(get, config, _EVERY),
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": own}}}


def _exaone(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Files of the 32B model do not all say its windows; llama.cpp knows them by its 64 layers."""
    large = _layers(config) == _LAYERS_OF_EXAONE_32B
    window = get("attention.sliding_window") or (4096 if large else None)
    if not window:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": _kinds(get, config, _EVERY)}


def _cohere2(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {"logit_scale": get("logit_scale"), "sliding_window": get("attention.sliding_window"),
            "layer_types": _kinds(get, config, _EVERY)}


def _kinds(get: Get, config: Mapping[str, Any], period: int) -> list[str]:
    """Which layers have a window: a flag for each, or every one but the last of a period."""
    layers, said = _layers(config), get("attention.sliding_window_pattern")
    period = said if type(said) is int and said > 0 else period
    slides = [(i + 1) % period != 0 for i in range(layers)]
    if said is not None and type(said) is not int:
        slides = [bool(flag) for flag in _by_layer(said, layers, "attention.sliding_window_pattern")]
    return [("full_attention", "sliding_attention")[slide] for slide in slides]


def _mistral3(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Mistral Small 3 has no factors of queries."""
    return {"sliding_window": None, "model_type": "ministral3" if get("attention.temperature_scale") else "mistral"}


def _granite_moe(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    shared = get("expert_shared_feed_forward_length")
    more = {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}
    return {**_granite(name, get, config, tensors), **more}


def _starcoder(name: str, get: Get, config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    return {"multi_query": config.get("num_key_value_heads") == 1}


_READERS: dict[str, Callable[[str, Get, Mapping[str, Any], Collection[str]], dict[str, Any]]] = {
    "gemma": _gemma, "gemma2": _gemma, "gemma3": _gemma, "gemma4": _gemma4,
    "phi3": _phi3, "smollm3": _smollm3, "granite": _granite,
    "granitemoe": _granite_moe, "olmo2": _olmo, "exaone4": _exaone, "cohere2": _cohere2, "mistral3": _mistral3,
    "starcoder": _starcoder,
    "falcon": _falcon, "gptneox": _side, "stablelm": _side, "starcoder2": _starcoder2, "command-r": _cohere,
    "gpt-oss": _gpt_oss, "smallthinker": _smallthinker, NAME: _latent,
}
OWN_KEYS = {
    "gemma2": ("attention.sliding_window", "final_logit_softcapping", "attn_logit_softcapping"),
    "gemma3": ("attention.sliding_window", "final_logit_softcapping", "rope.freq_base_swa",
               "attention.sliding_window_pattern"),
    "gemma4": ("attention.sliding_window", "attention.sliding_window_pattern", "attention.shared_kv_layers",
               "attention.key_length_swa", "attention.value_length", "attention.value_length_swa",
               "embedding_length_per_layer_input", "final_logit_softcapping", "rope.freq_base_swa",
               "rope.dimension_count", "rope.dimension_count_swa"),
    "phi3": ("attention.sliding_window", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    "granite": ("embedding_scale", "residual_scale", "attention.scale", "logit_scale"),
    "granitemoe": ("embedding_scale", "residual_scale", "attention.scale", "logit_scale"),
    "gptneox": ("use_parallel_residual",), "stablelm": ("use_parallel_residual",),
    "starcoder2": ("attention.sliding_window",), "command-r": ("logit_scale",), "falcon": ("tensor_data_layout",),
    "qwen2vl": ("rope.dimension_sections",), "qwen3vl": ("rope.dimension_sections", "n_deepstack_layers"),
    "gpt2": ("tensor_data_layout",), "gpt-oss": ("attention.sliding_window",),
    "smallthinker": ("attention.sliding_window",), NAME: KEYS,
    "olmo2": (*_WINDOWS, "rope.freq_base_swa"), "exaone4": _WINDOWS, "cohere2": (*_WINDOWS, "logit_scale"),
    "mistral3": ("attention.temperature_scale",), "qwen3vlmoe": ("rope.dimension_sections", "n_deepstack_layers"),
}
"""Keys that `family_fields` reads, or that say how pictures come in."""
