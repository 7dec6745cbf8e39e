"""Graphs of decoder-only transformers: `read_config` understands a config, `build_graph` writes the forward pass."""

from .builder import GraphBuilder, round_up
from .config import ModelConfig, RopeConfig
from .model import build_graph, read_config, supported_architectures
from .outlines import Outline, read_outline
from .rope import rope_tables
from .shapes import Shape, builtin_shapes
from .storage import expected_types, requested_types
from .types import Graph, Op, Tensor, Weight, WeightType

__all__ = [
    "Graph",
    "GraphBuilder",
    "ModelConfig",
    "Op",
    "Outline",
    "RopeConfig",
    "Shape",
    "Tensor",
    "Weight",
    "WeightType",
    "build_graph",
    "builtin_shapes",
    "expected_types",
    "read_config",
    "read_outline",
    "requested_types",
    "rope_tables",
    "round_up",
    "supported_architectures",
]
