"""Names of a model family's parts in files: an architecture's file has a `FAMILY` beside `read` and `forward`.

Converters read it and know no family themselves. Names that all files share need no entry: a family whose
checkpoints use Llama's names and that has no GGUF files needs no `FAMILY` at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from ...base.dataclass import dataclass

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..steps import HeadOrder
    from ..weights import Source
    from .gguf_metadata import GgufMetadata
    from .pre_tokenizer import PreTokenizer

NORMS_ON_THE_WAY_OUT = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
                        "post_feedforward_layernorm": "post_ffw_norm"}
"""GGUF's names of the norms of layers that norm the outputs of attention and FFN."""
SOFTMAX = 1
"""llama.cpp's number for experts that are scored by a softmax."""


@dataclass(frozen=True)
class ExpertModules:
    """Names, within a layer, of the tensors of a mixture of experts in checkpoints."""

    block: str = "mlp"
    """Module of the experts."""
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Modules of one expert."""
    router: str = "mlp.gate"
    choice_bias: str = ""
    """Tensor of the bias by which experts are chosen, where it is not one of the router."""
    together: tuple[str, str] | None = None
    """Tensors of all experts, gate rows above up rows, and down; beside transformers 5's own."""
    shared: tuple[str, str] | None = None
    """Modules of the shared FFN that all tokens use, if it is not a module of three matrices."""
    plain: bool = False
    """FFNs of layers without experts are called as the shared one is."""
    in_turns: bool = False
    """Tensors of all experts have a gate row and an up row alternately, as columns where they are not quantised."""


@dataclass(frozen=True)
class GgufExperts:
    """Fields of a config.json that the metadata of a mixture of experts map to; unnamed fields do not exist."""

    count: str = "num_experts"
    """The field for the number of experts."""
    active: str = "num_experts_per_tok"
    """The field for the number of those that a token goes through."""
    size: str = "intermediate_size"
    """The field for the intermediate size of an expert."""
    shared_size: str = ""
    """The field for that of the FFN that all tokens go through."""
    normalise: bool | None = None
    """Default of norm_topk_prob for files without it; None: the config has no such field."""
    scores: Mapping[int, str] = field(default_factory=lambda: {SOFTMAX: "softmax"})
    """llama.cpp's numbers of the ways to score experts that the family has, with a word for each. Of the chosen it is
    the same as of all where the weights add up to 1."""


@dataclass(frozen=True)
class Ollama:
    """Names that files of ollama's own converter spell differently from llama.cpp's."""

    name: str = ""
    """Name of the architecture there; empty if it is the same."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """llama.cpp's keys by ollama's."""
    tensors: tuple[tuple[str, str], ...] = ()
    """Regular expressions of its tensors' names, and their replacements."""
    stretched: str = ""
    """Type of a rotation that has a factor and no type; empty: as llama.cpp has it."""


@dataclass(frozen=True)
class Gguf:
    """An architecture of GGUF that is read as the family."""

    name: str
    """Value of general.architecture; several families may share one."""
    when: Callable[[GgufMetadata], bool] | None = None
    """Tells whether a file is of this family; one of the families that share an architecture lacks it, the default."""
    fields: Callable[[GgufMetadata], dict[str, Any]] | None = None
    """Fields of a config.json from the metadata, beside the sizes that all have. Keys that it reads count as
    understood; raises `UnsupportedModelError`."""
    fixed_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a config.json that no file holds, because llama.cpp fixes them by architecture."""
    ignored: tuple[str, ...] = ()
    """Keys that do not affect the text."""
    tied: bool = False
    """The head always is the embedding."""
    rotated: str = "whole"
    """Rotated part of a head: ``whole``; ``share``, which the config has as partial_rotary_factor; ``count``, which no
    config of the family can express; ``none``, positions are learned.
    """
    rotation: Callable[[GgufMetadata], dict[str, Any]] | None = None
    """Fields of a rotation whose keys are not the usual ones."""
    proportional: bool = False
    """Factors of the rotation that are not 1 are huge: those pairs are not rotated."""
    stretch: Callable[[GgufMetadata, dict[str, Any]], dict[str, Any]] | None = None
    """Changes the section of a rotation that YaRN stretches."""
    experts: GgufExperts | None = None
    strips: bool = False
    """Spaces after special tokens are not part of a text, which no file says."""
    sees: bool = False
    """True if files may hold vision or audio parts without a field that says so."""
    ollama: Ollama | None = None


@dataclass(frozen=True)
class Seeing:
    """A model that also sees or hears, with a text model of the family inside."""

    name: str
    """model_type of the whole."""
    text: str = ""
    """Keys under which the inner config may name the text model; empty: the family's name."""
    meant: Mapping[str, Any] = field(default_factory=dict)
    """Fields that apply to the text model, overriding its config."""
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    """Fields that hold for it where its config is silent, and not for such a model alone."""


@dataclass(frozen=True)
class Family:
    """Names of a family's parts in GGUF files and checkpoints."""

    gguf: tuple[Gguf, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)
    """GGUF's names of modules and tensors beyond the usual ones: within a layer where the name is one of a layer."""
    neighbours: bool = False
    """llama.cpp's converter reorders rows of q and k, for a rotation that turns neighbours."""
    qkv: str = "apart"
    """True if GGUF files have q, k and v as the checkpoint (``apart``), as rows of one tensor (``rows``), or some so
    and some so (``either``)."""
    order: Callable[[ModelConfig, str], HeadOrder | None] | None = None
    """Order of heads in which the converter stores a tensor of a layer, by its name there; None: their own."""
    parts: Callable[[ModelConfig, str, Source], tuple[str, Source] | None] | None = None
    """A tensor of a layer that the converter takes apart: the file's name, and the source there of the wanted part."""
    norms_plus_one: bool = False
    """The converter adds 1 to norms."""
    pre_tokenizers: Mapping[str, PreTokenizer] = field(default_factory=dict)
    """Pre-tokenizers of byte-level BPE by the names of tokenizer.ggml.pre that only this family uses; one that is not
    byte-level is a kind of its own, named by tokenizer.ggml.model.
    """
    seeing: tuple[Seeing, ...] = ()
    """Models that are read as the family, without their vision and audio parts."""
    prefix: str = ""
    """Prefix of most tensor names in a checkpoint; some checkpoints were saved without it."""
    otherwise: str = ""
    """Prefix that some checkpoints have in place of ``model.``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tensors of a checkpoint: within a layer where the name is one of a layer."""
    further_tokens: bool = False
    """Checkpoints have layers that predict more than the next token, numbered after the others. The first one drafts if
    the family's file has a function ``block`` that builds a layer; else they are left out."""
    ambiguous: str = ""
    """Why a quantised checkpoint cannot be read, as the end of a sentence; empty if it can."""
    experts: ExpertModules = field(default_factory=ExpertModules)
    ffn_biases: bool = False
    """Any size of FFN may have biases, which random models with few active neurons need."""
