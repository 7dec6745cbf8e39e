"""Graphs of decoder-only transformers: `read_config` understands a checkpoint's config, `build_graph` its forward pass."""

from .builder import GraphBuilder, round_up
from .config import ModelConfig, RopeConfig
from .types import Graph, Op, Tensor, Weight, WeightType

__all__ = ["Graph", "GraphBuilder", "ModelConfig", "Op", "RopeConfig", "Tensor", "Weight", "WeightType", "round_up"]
