"""Graphs of decoder-only transformers: `read_config` understands a config, `build_graph` writes the forward pass."""

from typing import TYPE_CHECKING

from ..base.lazy_import import lazily
from ..quant import WeightType
from .build import build_draft_head, build_graph, read_config
from .builder.builder import F_NORM
from .builder.moe import MAX_EXPERTS_PER_LAYER
from .check import check, check_runnable
from .config import AlibiConfig, ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from .draft_head import WORDS as DRAFT_WORDS
from .draft_head import prefix as draft_head_prefix
from .draft_head import words_of
from .families.registry import (
    family_of,
    gguf_architectures,
    gguf_of,
    pre_tokenizers,
    seeing_models,
    supported_architectures,
)
from .graph import Graph
from .hf_config.fields import QUANTISED, is_quantised
from .hf_config.reader import ConfigReader
from .layer_range import LAYER_RANGE, cut_before
from .ops.alibi import alibi_bias, alibi_slopes
from .ops.attention import Attention, RopeStore, RotateQueries, Rotation
from .ops.base import ATTENTION, FFN, HEAD, PARTS, Op, RowOp
from .ops.costs import KvAccess, OnDemand, Read, Sizes
from .ops.experts import SCORES, ExpertsDown, ExpertsGated, ExpertsInput, Route, SigmoidGate, SortRoutes
from .ops.latent import HeadLinear, LatentAttention, QuantizeHeads, StoreLatent
from .ops.lm_head import OUTER_TYPE, Screen, ScreenableHead, ScreenedHead, find_head, inner_type, with_screen
from .ops.matmul import RELUS, GatedLinear, Linear, LinearPart, MatMul, NeuronDown, NeuronGated, parameters
from .ops.recurrent import CausalConv, DeltaRule, GatedNorm, SelectiveScan, StateRule
from .ops.rope import fill_rope_tables, inverse_frequencies, rope_tables
from .ops.rows import (
    Activate,
    AddPositions,
    Embed,
    GatherOutputs,
    GivenRows,
    LayerNorm,
    NormedSum,
    NormPart,
    Quantize,
    RmsNorm,
    Sample,
    TokenRows,
)
from .ops.sparse_ffn import PREDICTOR_TYPE, PREDICTORS, ScoreMask, SignMask, with_predictor
from .ops.topn_attention import INSTEAD, SelectedAttention, least_score, with_selection
from .passes import PASSES, apply, approximate, approximates, graph_pass, insert_after, without_approximations
from .quantize_activations import quantize_activations
from .recurrent import RecurrentConfig
from .steps import Affine, Columns, Decay, HeadOrder, RopeHalves, Rows, Step, Tap, Transposed
from .tensors import Tensor, Types
from .weight_types import ORDER, ROUTER, TypeOf, expected_types, fitting, requested_types
from .weights import Source, Weight

if TYPE_CHECKING:
    from .families.family import ExpertModules, Family, Gguf, GgufExperts, Ollama
    from .families.gguf_metadata import GgufMetadata, plain_value, with_head
    from .families.pre_tokenizer import DIGITS, GPT2, PreTokenizer
    from .shapes import Shape, builtin_shapes, other_names

__all__ = ["ATTENTION", "DIGITS", "DRAFT_WORDS", "FFN", "F_NORM", "GPT2", "HEAD", "INSTEAD", "LAYER_RANGE",
           "MAX_EXPERTS_PER_LAYER", "ORDER", "OUTER_TYPE", "PARTS", "PASSES", "PREDICTORS", "PREDICTOR_TYPE",
           "QUANTISED", "RELUS", "ROUTER", "SCORES", "Activate", "AddPositions", "Affine", "AlibiConfig", "Attention",
           "CausalConv", "Columns", "ConfigReader", "Decay", "DeltaRule", "Embed", "ExpertModules", "ExpertsConfig",
           "ExpertsDown", "ExpertsGated", "ExpertsInput", "Family", "GatedLinear", "GatedNorm", "GatherOutputs",
           "Gguf", "GgufExperts", "GgufMetadata", "GivenRows", "Graph", "HeadLinear", "HeadOrder", "KvAccess",
           "LatentAttention", "LatentConfig", "LayerNorm", "Linear", "LinearPart", "MatMul", "ModelConfig",
           "NeuronDown", "NeuronGated", "NormPart", "NormedSum", "Ollama", "OnDemand", "Op", "PreTokenizer",
           "Quantize", "QuantizeHeads", "Read", "RecurrentConfig", "RmsNorm", "RopeConfig", "RopeHalves", "RopeStore",
           "RotateQueries", "Rotation", "Route", "RowOp", "Rows", "Sample", "ScoreMask", "Screen", "ScreenableHead",
           "ScreenedHead", "SelectedAttention", "SelectiveScan", "Shape", "SigmoidGate", "SignMask", "Sizes",
           "SortRoutes", "Source", "StateRule", "Step", "StoreLatent", "Tap", "Tensor", "TokenRows", "Transposed",
           "TypeOf", "Types", "Weight", "WeightType", "alibi_bias", "alibi_slopes", "apply", "approximate",
           "approximates", "build_draft_head", "build_graph", "builtin_shapes", "check", "check_runnable",
           "cut_before", "draft_head_prefix", "expected_types", "family_of", "fill_rope_tables", "find_head",
           "fitting", "gguf_architectures", "gguf_of", "graph_pass", "inner_type", "insert_after",
           "inverse_frequencies", "is_quantised", "least_score", "other_names", "parameters", "plain_value",
           "pre_tokenizers", "quantize_activations", "read_config", "requested_types", "rope_tables", "seeing_models",
           "supported_architectures", "with_head", "with_predictor", "with_screen", "with_selection",
           "without_approximations", "words_of"]
__getattr__ = lazily(__name__, {"families.family": "ExpertModules Family Gguf GgufExperts Ollama",
                                "families.gguf_metadata": "GgufMetadata plain_value with_head",
                                "families.pre_tokenizer": "DIGITS GPT2 PreTokenizer",
                                "shapes": "Shape builtin_shapes other_names"})
"""Names that a run does not need; they are imported on first use."""
