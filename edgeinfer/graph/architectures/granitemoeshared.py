"""Granite 3.1 MoE and 4 (IBM): Granite's mixture with an FFN beside it that all tokens go through."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..reader import ConfigReader
from . import granitemoe
from .mixtral import forward

__all__ = ["forward", "read"]


def read(c: ConfigReader) -> ModelConfig:
    """As granitemoe's; `shared_intermediate_size` is 0 where there is no such FFN."""
    config, size = granitemoe.read(c), c.integer("shared_intermediate_size", 0, low=0, high=2**20)
    assert config.experts
    return replace(config, experts=replace(config.experts, shared_size=size, shared_gate=False))
