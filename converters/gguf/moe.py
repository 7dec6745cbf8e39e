"""Metadata of mixtures of experts in GGUF files, as the fields of the family's config.json."""

from __future__ import annotations

from typing import Any

from edgeinfer.graph import ConfigReader, GgufExperts, GgufMetadata

_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
         "expert_weights_norm")


def moe_fields(experts: GgufExperts, m: GgufMetadata) -> dict[str, Any]:
    """Return the fields of a family's experts."""
    fields = {experts.count: m.get("expert_count"), experts.active: m.get("expert_used_count")}
    if size := m.get("expert_feed_forward_length"):
        fields[experts.size] = size
    if experts.shared_size and (shared := m.get("expert_shared_feed_forward_length")):
        fields[experts.shared_size] = shared
    if experts.normalise is not None:
        said = m.get("expert_weights_norm")
        fields["norm_topk_prob"] = experts.normalise if said is None else said
    return fields


def read_choice(r: ConfigReader, prefix: str, experts: GgufExperts) -> None:
    """Read the keys of how experts are chosen; raises `UnsupportedModelError` for one that asks for another way."""
    for key in _KEYS:
        r.get(prefix + key)
    said = " or ".join(f"{number} ({way})" for number, way in experts.scores.items())
    for key, known, words in (("expert_gating_func", (None, 0, *experts.scores), said),
                              ("expert_shared_count", (None, 0, 1), "1")):
        value = r.get(prefix + key)
        if value not in known:
            raise r.unsupported(prefix + key, value, f"only {words} is supported")
