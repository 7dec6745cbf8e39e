"""Graphs of decoder-only transformers: `read_config` understands a config, `build_graph` writes the forward pass."""

from typing import TYPE_CHECKING

from ..lazy import lazily
from ..quant import WeightType
from .alibi import alibi_bias, alibi_slopes
from .builder import GraphBuilder
from .check import check, check_runnable
from .config import AlibiConfig, ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from .experts import SCORES, ExpertsDown, ExpertsGated, ExpertsInput, Route, SigmoidGate, SortRoutes
from .families import family_of, gguf_architectures, gguf_of, pre_tokenizers, seeing_models, supported_architectures
from .fields import QUANTISED, is_quantised
from .graph import Graph
from .head import OUTER_TYPE, Place, Screen, ScreenedHead, inner_type, place_of_head, with_screen
from .latent import HeadLinear, LatentAttention, QuantizeHeads, StoreLatent
from .mixture import MOST_OF_A_LAYER
from .model import build_graph, read_config
from .operation import KvAccess, OnDemand, Op, Read, RowOp, Scratch, Sizes
from .ops import (
    Activate,
    AddPositions,
    Attention,
    Draw,
    Embed,
    GatherOutputs,
    LayerNorm,
    NormedSum,
    NormPart,
    Quantize,
    RmsNorm,
    RopeStore,
    RotateQueries,
    TokenRows,
)
from .passes import PASSES, apply, approximate, approximates, graph_pass, insert_after, without_approximations
from .predict import PREDICTOR_TYPE, PREDICTORS, ScoreMask, SignMask, with_predictor
from .products import RELUS, Gated, Linear, LinearPart, NeuronDown, NeuronGated, Product, parameters
from .quantize_activations import quantize_activations
from .reader import ConfigReader
from .rope import fill_rope_tables, inverse_frequencies, rope_tables
from .selection import INSTEAD, SelectedAttention, least_score, with_selection
from .storage import ORDER, ROUTER, TypeOf, expected_types, requested_types
from .types import Tensor, Types
from .weights import Affine, RopeHalves, Rows, Source, Transposed, Weight

if TYPE_CHECKING:
    from .family import ExpertModules, Family, Gguf, GgufExperts, Ollama
    from .gguf_metadata import GgufMetadata, plain_value, with_head
    from .pre_tokenizer import DIGITS, GPT2, PreTokenizer
    from .shapes import Shape, builtin_shapes

__all__ = ["DIGITS", "GPT2", "INSTEAD", "MOST_OF_A_LAYER", "ORDER", "OUTER_TYPE", "PASSES", "PREDICTORS",
           "PREDICTOR_TYPE", "QUANTISED", "RELUS", "ROUTER", "SCORES", "Activate", "AddPositions", "Affine",
           "AlibiConfig", "Attention", "ConfigReader", "Draw", "Embed", "ExpertModules", "ExpertsConfig",
           "ExpertsDown", "ExpertsGated", "ExpertsInput", "Family", "Gated", "GatherOutputs", "Gguf", "GgufExperts",
           "GgufMetadata", "Graph", "GraphBuilder", "HeadLinear", "KvAccess", "LatentAttention", "LatentConfig",
           "LayerNorm", "Linear", "LinearPart", "ModelConfig", "NeuronDown", "NeuronGated", "NormPart", "NormedSum",
           "Ollama", "OnDemand", "Op", "Place", "PreTokenizer", "Product", "Quantize", "QuantizeHeads", "Read",
           "RmsNorm", "RopeConfig", "RopeHalves", "RopeStore", "RotateQueries", "Route", "RowOp", "Rows", "ScoreMask",
           "Scratch", "Screen", "ScreenedHead", "SelectedAttention", "Shape", "SigmoidGate", "SignMask", "Sizes",
           "SortRoutes", "Source", "StoreLatent", "Tensor", "TokenRows", "Transposed", "TypeOf", "Types", "Weight",
           "WeightType", "alibi_bias", "alibi_slopes", "apply", "approximate", "approximates", "build_graph",
           "builtin_shapes", "check", "check_runnable", "expected_types", "family_of", "fill_rope_tables",
           "gguf_architectures", "gguf_of", "graph_pass", "inner_type", "insert_after", "inverse_frequencies",
           "is_quantised", "least_score", "parameters", "place_of_head", "plain_value", "pre_tokenizers",
           "quantize_activations", "read_config", "requested_types", "rope_tables", "seeing_models",
           "supported_architectures", "with_head", "with_predictor", "with_screen", "with_selection",
           "without_approximations"]
__getattr__ = lazily(__name__, {"family": "ExpertModules Family Gguf GgufExperts Ollama",
                                "gguf_metadata": "GgufMetadata plain_value with_head",
                                "pre_tokenizer": "DIGITS GPT2 PreTokenizer", "shapes": "Shape builtin_shapes"})
"""What a run does not need is imported on first use."""
