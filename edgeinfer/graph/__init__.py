"""Graphs of decoder-only transformers: `read_config` understands a config, `build_graph` writes the forward pass."""

from .builder import GraphBuilder, round_up
from .config import ModelConfig, RopeConfig
from .model import build_graph, read_config, supported_architectures
from .outlines import Outline, read_outline
from .rope import fill_rope_tables, rope_tables
from .shapes import Shape, builtin_shapes
from .storage import TypeOf, expected_types, requested_types
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
    "TypeOf",
    "Weight",
    "WeightType",
    "build_graph",
    "builtin_shapes",
    "expected_types",
    "fill_rope_tables",
    "read_config",
    "read_outline",
    "requested_types",
    "rope_tables",
    "round_up",
    "supported_architectures",
]
