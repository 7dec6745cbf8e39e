"""Multimodal models: the part of their config that describes the text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..families.registry import text_models, wrapper_of
from .reader import ConfigReader

PICTURES = frozenset(
    """vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id vision_token_id
    image_token_index boi_token_index eoi_token_index mm_tokens_per_image multimodal_projector_bias
    projector_hidden_act spatial_merge_size vision_feature_layer audio_config boi_token_id eoi_token_id audio_token_id
    boa_token_id eoa_token_id eoa_token_index vision_soft_tokens_per_image
    """.split())
"""Fields of the outer config that say how pictures come in."""
_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
"""Fields for which the outer config's value applies."""
_MROPE = ("mrope_section", "mrope_interleaved")
"""Fields that assign dimensions to the three positions of a picture's token; for text all three are equal."""


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model; of a model without pictures its own.

    Older files have the text model's fields beside the pictures', newer ones a section of their own. Other fields of
    the outer config are kept, so that unknown ones are refused, too.
    """
    wrapper = wrapper_of(config.get("model_type"))
    if wrapper is None:
        return config
    inside, seeing = wrapper
    outer = {name: value for name, value in config.items() if name not in PICTURES and name != "text_config"}
    section = ConfigReader(config).section("text_config")
    text = section.items() if section else {}
    own = str(text.get("model_type") or inside)
    text = {**text, **without_mrope({**outer, **text})}
    kept = {name: outer[name] for name in _OUTER if outer.get(name) is not None}
    model_type = text_models().get(own, own)
    return {**seeing.unsaid, **outer, **text, **kept, **seeing.meant, "model_type": model_type}


def without_mrope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of RoPE as text has it: M-RoPE turns it as the plain rotation does."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(section := fields.get(name), Mapping):
            found[name] = {key: "default" if key in ("type", "rope_type") and value == "mrope" else value
                           for key, value in section.items() if key not in _MROPE}
    return found
