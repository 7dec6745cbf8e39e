"""Qwen3.5-MoE (Alibaba): Qwen3.5's layers with a mixture of experts and, beside it, one that all tokens go through."""

from __future__ import annotations

from ..config import ModelConfig
from ..families.family import Family, Gguf, GgufExperts, Seeing
from ..families.gguf_hybrid import delta_fields
from ..hf_config.reader import ConfigReader
from .qwen2_moe import qwen_experts
from .qwen3_5_text import DEFAULTS, PICTURES, TENSORS, block, forward, order, read_hybrid

__all__ = ["FAMILY", "block", "forward", "read"]


def read(c: ConfigReader) -> ModelConfig:
    """The weights of a token's experts add up to 1."""
    if not c.flag("norm_topk_prob", True):
        raise c.unsupported("norm_topk_prob", False, "weights of a token's experts add up to 1 in this family")
    return read_routed(c, 256, 8)


def read_routed(c: ConfigReader, total: int, active: int, ffn: int = 0) -> ModelConfig:
    """Read a hybrid with experts; `ffn` is the size of FFNs in layers without them, 0 that of an expert."""
    experts = qwen_experts(c, total, active, 512, 512, normalise=True)
    defaults = {"num_key_value_heads": 2, "intermediate_size": ffn or c.integer("moe_intermediate_size", 512)}
    return read_hybrid(c, {**DEFAULTS, **defaults}, experts=experts)


EXPERTS = GgufExperts(size="moe_intermediate_size", shared_size="shared_expert_intermediate_size", normalise=True)
FAMILY = Family(
    (Gguf("qwen35moe", fields=delta_fields, rotated="share", ignored=PICTURES, experts=EXPERTS),), TENSORS, order=order,
    further_tokens=True, norms_plus_one=True, seeing=(Seeing("qwen3_5_moe"),))
