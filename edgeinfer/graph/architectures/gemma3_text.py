"""Gemma 3's text model (arXiv 2503.19786): Gemma 2 with normed heads instead of soft caps, and two rotations."""

from __future__ import annotations

from typing import Any

from ...errors import CheckpointError
from ..builder.blocks import llama_like
from ..builder.builder import GraphBuilder
from ..config import ModelConfig, RopeConfig
from ..families.family import NORMS_ON_THE_WAY_OUT, Family, Gguf, Ollama, Seeing
from ..families.gguf_metadata import GgufMetadata
from ..graph import Graph
from ..hf_config.common import read_sliding
from ..hf_config.reader import ConfigReader
from ..ops.rope import read_section
from . import gemma

LONGEST = 131072
DEFAULTS = {**gemma.DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": LONGEST, "rope_theta": 1e6,
            "vocab_size": 262208, "num_attention_heads": 8}
KINDS = ("full_attention", "sliding_attention")


def read(c: ConfigReader) -> ModelConfig:
    """Five layers of six have a window, and the local rotation."""
    period = c.integer("sliding_window_pattern", c.integer("_sliding_window_pattern", 6))
    window = c.integer("sliding_window", None if c.is_null("sliding_window") else 4096)
    windows = read_sliding(c, window, lambda i: (i + 1) % period != 0 and window is not None)
    if cap := c.get("attn_logit_softcapping"):
        raise c.unsupported("attn_logit_softcapping", cap, "Gemma 3 has no such cap; remove the field from the file")
    c, local = _rotations(c)
    return gemma.read_gemma(
        c, DEFAULTS, windows=windows, attention_scale=c.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logits_softcap=c.number("final_logit_softcapping", None) or 0.0, local_rope=local if windows else None,
        ropes=tuple(2 if w else 1 for w in windows))


def _rotations(c: ConfigReader) -> tuple[ConfigReader, RopeConfig]:
    """The config with the rotation of layers without a window alone, and that of the others.

    transformers 5 writes a section for each kind of layers.
    """
    local = RopeConfig(c.number("rope_local_base_freq", 10000.0, above=1.0))
    both = c.section("rope_parameters")
    if both is None or not any(both.has(kind) for kind in KINDS):
        return c, local
    inner = {kind: both.section(kind) for kind in KINDS}
    both.refuse_unread()
    positions = c.integer("max_position_embeddings", LONGEST)
    if section := inner["sliding_attention"]:
        local = read_section(section, local.theta, None, positions)
        if local.kind != "default":
            raise CheckpointError(f"{section.where}: rope_type is {local.kind!r}; that of layers with a window is "
                                  "default.")
    own = inner["full_attention"]
    return c.instead(rope_parameters=own.items() if own else None), local


def forward(g: GraphBuilder, c: ModelConfig) -> Graph:
    """Tokens to logits."""
    return llama_like(g, c, gemma.layer, gemma.norm("model.norm", c.hidden_size), sandwich=True, qk_norm=True)


def _fields(m: GgufMetadata) -> dict[str, Any]:
    return gemma.gguf_fields(m, 62) | {"rope_local_base_freq": m.get("rope.freq_base_swa") or 10000.0,
                                       "sliding_window_pattern": m.get("attention.sliding_window_pattern") or 6}


FAMILY = Family((Gguf("gemma3", fields=_fields, fixed_fields=gemma.GELU, tied=True, sees=True, ollama=Ollama(keys={
    "rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"})),), NORMS_ON_THE_WAY_OUT,
    norms_plus_one=True, seeing=(Seeing("gemma3"),))
