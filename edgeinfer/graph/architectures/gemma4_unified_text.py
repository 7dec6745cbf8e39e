"""Gemma 4's text model where no encoder makes tokens of pictures and sounds (12B): no rows of tokens for layers."""

from __future__ import annotations

from ..config import ModelConfig
from ..families.family import Family, Seeing
from ..hf_config.reader import ConfigReader
from . import gemma4_text
from .gemma4_text import forward

__all__ = ["FAMILY", "forward", "read"]


def read(c: ConfigReader) -> ModelConfig:
    """Read the config; the defaults of windows and contexts are longer."""
    return gemma4_text.read(c, window=1024, longest=2 * gemma4_text.LONGEST, inputs=0)


FAMILY = Family(seeing=(Seeing("gemma4_unified"),), experts=gemma4_text.FAMILY.experts)
