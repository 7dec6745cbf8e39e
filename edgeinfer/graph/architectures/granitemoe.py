"""Granite 3 with a mixture of experts (IBM): Granite's multipliers, Mixtral's layers."""

from __future__ import annotations

from dataclasses import replace

from ..builder.moe import read_experts
from ..config import ModelConfig
from ..families.family import ExpertModules, Family, Gguf, GgufExperts
from ..hf_config.reader import ConfigReader
from . import granite
from .mixtral import forward

__all__ = ["FAMILY", "forward", "read"]


def read(c: ConfigReader) -> ModelConfig:
    """Read the config as Granite's; the weights of a token's experts add up to 1."""
    size = c.integer("intermediate_size", high=2**20)
    return replace(granite.read(c), experts=read_experts(c, "num_local_experts", 8, 2, size))


GGUF = Gguf("granitemoe", fields=granite.gguf_fields, experts=GgufExperts("num_local_experts"))
EXPERTS = ExpertModules("block_sparse_moe", router="block_sparse_moe.router.layer",
                        together=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"))
FAMILY = Family((GGUF,), neighbours=True, experts=EXPERTS)
