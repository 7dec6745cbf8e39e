"""ProSparse (SparseLLM, arXiv 2402.13516): Llama whose FFN zeroes activations up to a limit (FATReLU)."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config.reader import ConfigReader
from . import llama
from .llama import forward

__all__ = ["forward", "read"]


def read(c: ConfigReader) -> ModelConfig:
    """`hidden_act_param` is the limit; ReLU is the activation without one."""
    c.own_code()
    if c.choice("hidden_act", c.get("hidden_act", "relu"), ("relu", "fatrelu")) == "relu":
        return llama.read(c)
    limit = c.number("hidden_act_param", above=-1e-9)
    return replace(llama.read(c.instead(hidden_act="relu")), hidden_act="fatrelu", hidden_act_limit=limit)
