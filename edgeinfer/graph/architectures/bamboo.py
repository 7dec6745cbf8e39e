"""Bamboo (PowerInfer, arXiv 2406.05955): Mistral whose FFN rectifies gate and up, so that most neurons are 0."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..hf_config.reader import ConfigReader
from . import mistral
from .llama import forward

__all__ = ["forward", "read"]


def read(c: ConfigReader) -> ModelConfig:
    """Read a config; the code that it names is Mistral's with dReLU, although `hidden_act` says relu."""
    c.own_code()
    if c.get("hidden_act", "relu") != "relu":
        raise c.unsupported("hidden_act", c.get("hidden_act"), "Bamboo's is relu")
    return replace(mistral.read(c), hidden_act="drelu")
