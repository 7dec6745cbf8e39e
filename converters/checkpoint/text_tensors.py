"""Tensors that a checkpoint names differently from its architecture, with another prefix or inside a larger model."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from edgeinfer.graph import ModelConfig, family_of

PICTURES = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|"
                      r"embed_audio|vision_embedder)\..+")
"""Tensors of vision and audio encoders."""
_PREFIXED = re.compile(r"model\.language_model\.(?P<inner>.+)|language_model\.(?P<outer>.+)")
_LAYER = re.compile(r"(?:model\.layers|blk)\.([0-9]{1,9})\.")
_HEADS = ("lm_head.", "embed_out.")
_DRAFTS = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.",
           "norm.": "shared_head.norm.", "layers.0.": ""}
"""Modules of Qwen's head for further tokens, ``mtp``, and the same of a layer after the last (arXiv 2412.19437)."""
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.rotary\.inv_freq|(.+\.)?(attn|attn\.attention|attention)\."
                      r"(masked_)?bias")
"""Tensors in old checkpoints that follow from the config: frequencies and attention masks."""


_KEYS = re.compile(r"(?:.+\.)?layers\.(?P<hf>[0-9]+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.[^.]+"
                   r"|blk\.(?P<gguf>[0-9]+)\.attn_(?:k|v|k_norm)\.[^.]+")


class Names(NamedTuple):
    """Difference between a checkpoint's names and the architecture's."""

    aliases: dict[str, str]
    """The stored tensor of each of the architecture's names that differs."""
    pictures: frozenset[str]
    """Tensors of the part that sees pictures."""


def names_of_text(stored: Collection[str], config: ModelConfig, sees: bool) -> Names:
    """Find the architecture's names; `sees`: the text model is in one that sees pictures."""
    pictures = frozenset(name for name in stored if sees and PICTURES.fullmatch(name))
    aliases: dict[str, str] = {}
    for name in stored if sees else ():
        if (match := _PREFIXED.fullmatch(name)) and name not in pictures:
            aliases[f"model.{match['inner']}" if match["inner"] else match["outer"]] = name
    family = family_of(config.model_type)
    own = {other: name for name, other in family.aliases.items()}
    for name in stored if own else ():
        start = match.end() if (match := _LAYER.match(name)) else 0
        if name[start:] in own:
            aliases[name[:start] + own[name[start:]]] = name
    if family.otherwise:
        aliases |= {"model." + name.removeprefix(family.otherwise): name for name in stored
                    if name.startswith(family.otherwise)}
    base = family.prefix
    if base and not any(name.startswith(base) for name in stored):
        aliases |= {base + name: name for name in stored if not name.startswith(_HEADS)}
    if family.further_tokens:
        block = f"model.layers.{config.num_hidden_layers}."
        aliases |= {block + module + name.removeprefix("mtp." + part): aliases.get(name, name)
                    for name in (*stored, *aliases) for part, module in _DRAFTS.items()
                    if name.startswith("mtp." + part)}
    return Names({name: other for name, other in aliases.items() if name not in stored}, pictures)


def said_by(name: str, config: ModelConfig, stored: Collection[str]) -> str:
    """Return the checkpoint's name for a tensor that it lacks: Qwen's word, where it has others of such a head."""
    block = f"model.layers.{config.num_hidden_layers}."
    if not name.startswith(block) or not any(other.startswith("mtp.") for other in stored):
        return name
    part, own = next(pair for pair in _DRAFTS.items() if name.startswith(block + pair[1]))
    return "mtp." + part + name.removeprefix(block + own)


def predicts_ahead(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is of the layers after the last, which predict further tokens (GLM, arXiv 2412.19437)."""
    if not family_of(config.model_type).further_tokens:
        return False
    if name.startswith("mtp."):
        return True
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= config.num_hidden_layers


def unread_keys(stored: Collection[str], kv_layers: tuple[int, ...]) -> frozenset[str]:
    """Tensors of K and V in layers that read those of another (ModelConfig.kv_layers), which some checkpoints have."""
    found = ((name, int(match["hf"] or match["gguf"]))
             for name in stored if kv_layers and (match := _KEYS.fullmatch(name)))
    return frozenset(name for name, i in found if i < len(kv_layers) and kv_layers[i] != i)


def is_buffer(name: str) -> bool:
    """Return whether a tensor is not a weight of the model but follows from its config."""
    return _BUFFERS.fullmatch(name) is not None
