"""What the metadata of a GGUF file say of a mixture of experts, as the fields of its family's config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgeinfer.graph import ConfigReader

_COUNTS = {"llama": "num_local_experts", "granitemoe": "num_local_experts", "gpt-oss": "num_local_experts",
           "smallthinker": "moe_num_primary_experts"}
"""What families call the number of their experts, where not num_experts."""
_CHOSEN = {"smallthinker": "moe_num_active_primary_experts", "gemma4": "top_k_experts"}
"""What they call the number of those that a token goes through, where not num_experts_per_tok."""
_OWN_SIZE = ("qwen2moe", "qwen3moe", "qwen3vlmoe", "gemma4")
"""Architectures whose config has a size of experts beside that of a plain FFN."""
_NORMALISED = {"qwen2moe": False, "qwen3moe": True, "qwen3vlmoe": True, "olmoe": False}
"""Whether the weights of a token's experts add up to 1 where a file does not say it; elsewhere they always do."""
MIXTURES = ("llama", "qwen2moe", "qwen3moe", "qwen3vlmoe", "olmoe", "granitemoe", "gpt-oss", "smallthinker", "gemma4")
"""Architectures whose files may have experts; a llama with experts is a Mixtral."""
SOFTMAX = 1
_WAYS = {"gpt-oss": {SOFTMAX: "softmax", 3: "softmax of the chosen"},
         "smallthinker": {SOFTMAX: "softmax", 2: "sigmoid"}}
"""What llama.cpp's numbers of ways to score experts stand for, where not softmax alone; of the chosen it is the same as
of all where the weights add up to 1."""
_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
         "expert_weights_norm")


def mixture_fields(name: str, get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the fields of an architecture's experts.

    Parameters
    ----------
    name : str
        GGUF's name of the architecture, one of `MIXTURES`.
    get : callable
        The value of a key, without the architecture's name before it; None where it is absent.
    """
    chosen = _CHOSEN.get(name, "num_experts_per_tok")
    fields = {_COUNTS.get(name, "num_experts"): get("expert_count"), chosen: get("expert_used_count")}
    if name == "gemma4":
        fields["enable_moe_block"] = True
    if name == "smallthinker":
        return fields | {"moe_ffn_hidden_size": get("expert_feed_forward_length") or get("feed_forward_length"),
                         "moe_primary_router_apply_softmax": get("expert_gating_func") == SOFTMAX}
    if size := get("expert_feed_forward_length"):
        fields["moe_intermediate_size" if name in _OWN_SIZE else "intermediate_size"] = size
    if name == "qwen2moe" and (shared := get("expert_shared_feed_forward_length")):
        fields["shared_expert_intermediate_size"] = shared
    if name in _NORMALISED:
        said = get("expert_weights_norm")
        fields["norm_topk_prob"] = _NORMALISED[name] if said is None else said
    return fields


def read_choice(r: ConfigReader, prefix: str) -> None:
    """Read the keys of how experts are chosen; raises `UnsupportedModelError` for one that asks for another way."""
    for key in _KEYS:
        r.get(prefix + key)
    ways = _WAYS.get(prefix[:-1], {SOFTMAX: "softmax"})
    said = " or ".join(f"{number} ({way})" for number, way in ways.items())
    for key, known, words in (("expert_gating_func", (None, 0, *ways), said),
                              ("expert_shared_count", (None, 0, 1), "1")):
        value = r.get(prefix + key)
        if value not in known:
            raise r.unsupported(prefix + key, value, f"only {words} is supported")
