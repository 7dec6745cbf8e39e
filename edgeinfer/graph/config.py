"""Parameters of a decoder's mathematics, in Hugging Face's words and independent of any one architecture."""

from __future__ import annotations

from dataclasses import field

from ..base.dataclass import dataclass
from .recurrent import RecurrentConfig


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and how it is stretched."""

    theta: float = 10000.0
    """Base of the frequencies."""
    kind: str = "default"
    """default, linear, dynamic, llama3, yarn, longrope, proportional, query_scale, or none: nothing turns."""
    factor: float = 1.0
    """Stretch of the context. query_scale: queries at position p are multiplied by 1 + factor log(1 + floor(p /
    original_max_position_embeddings)), and nothing turns (Llama 4's temperature of attention)."""
    original_max_position_embeddings: int = 0
    """Positions the model was trained on (dynamic, llama3, yarn, longrope, query_scale)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original/low are stretched by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original/high are kept."""
    beta_fast: float = 32.0
    """yarn: rotations above which a dimension is kept (arXiv 2309.00071, section 3.2)."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is stretched."""
    attention_factor: float = 1.0
    """yarn, longrope: multiplies cos and sin (YaRN's sqrt(1/t))."""
    truncate: bool = True
    """yarn: the bounds of the ramp are rounded outwards to whole dimensions."""

    short_factors: tuple[float, ...] = ()
    """longrope: factors of the wavelength of each pair of dimensions, in runs of a context no longer than
    that of the training (arXiv 2402.13753)."""
    long_factors: tuple[float, ...] = ()
    """longrope: the same in runs of a longer one."""
    dims: int = 0
    """Dimensions of a head that turn, where they are not the model's `rope_dim`."""
    span: int = 0
    """proportional: dimensions over which the frequencies spread, of which only the first `dims` turn; the other of a
    pair is half of them away."""

    @property
    def uses_training_context(self) -> bool:
        """True if the frequencies depend on original_max_position_embeddings."""
        return self.kind in ("dynamic", "llama3", "yarn", "longrope", "query_scale")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts (arXiv 1701.06538): each token goes through a few of many FFNs, which its router chooses."""

    total: int
    active: int
    """Experts that a token goes through."""
    intermediate_size: int
    """Size of one expert."""
    normalise: bool = True
    """True if the weights of a token's experts add up to 1."""
    scores: str = "softmax"
    """Function of the router logits: softmax or sigmoid."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Groups of neighbouring experts, `active_groups` of which are selected before experts are."""
    active_groups: int = 1
    group_best: int = 1
    """Number of a group's best scores whose sum ranks the group."""
    shared_size: int = 0
    """Intermediate size of the shared FFN, which all tokens use beside their experts; 0 = there is none."""
    bias: bool = False
    """Bias on the router and on all three matrices of each expert."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a plain FFN in place of experts."""
    shared_gate: bool = True
    """True if a sigmoid of its own weighs the shared FFN's output."""
    choice_bias: bool = False
    """True if experts are chosen by scores plus a bias, which their weights lack."""
    gated: bool = True
    """True if an expert has a gate; without one its activation is relu2, which is relu(x) x."""
    latent_size: int = 0
    """Width of a latent that experts work on; 0: they work on the stream."""


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (MLA, arXiv 2405.04434): keys and values are made of one latent for all heads.

    In a model's config `head_dim` is the width of a stored key, the latent and the `rotary_dim` elements after it, and
    there is one KV head.
    """

    q_rank: int
    """Width of a latent that queries are made of; 0 = of the stream itself."""
    nope_dim: int
    """Elements of a head's query and key that do not turn."""
    value_dim: int
    """Size of V of a head."""
    interleaved: bool = True
    """True if neighbours turn in the checkpoint."""


@dataclass(frozen=True)
class AlibiConfig:
    """Attention with linear biases (ALiBi, arXiv 2108.12409): scores fall with the distance of the key."""

    max_bias: float = 8.0
    """The slopes of n heads begin with 2^(-max_bias / n) and end with 2^-max_bias; see `graph.alibi_slopes`."""
    bfloat16: bool = False
    """Slope x position is rounded to bfloat16, of factors that are rounded so too, and multiplied by the scale of
    scores (Falcon)."""


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer."""

    model_type: str
    """Hugging Face's model_type; names the file in graph/architectures."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    """silu, relu, relu2 (squared relu), gelu (erf), gelu_tanh, drelu (relu of gate and up), fatrelu (0 below a
    limit) or swiglu_oai (gpt-oss's, clamped)."""
    rms_norm_eps: float
    """Epsilon of all norms of any kind."""
    max_position_embeddings: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    windows: tuple[int, ...] = ()
    """Per layer: tokens a query sees, itself included (sliding window); 0 sees all. Empty: all layers see all."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on q, k and v."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    rotary_dim: int | None = None
    """Dimensions of a head that RoPE turns, the first ones; None: all, 0: the model knows positions otherwise."""
    local_rope: RopeConfig | None = None
    """A second rotation, of the layers that `ropes` gives it; of kind query_scale all layers' queries have it too."""
    ropes: tuple[int, ...] = ()
    """Per layer: 0 no rotation, 1 `rope`, 2 `local_rope`. Empty: `rope` in all layers."""
    attention_scale: float = 0.0
    """Factor of attention scores; 0 = 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Scores become cap x tanh(score / cap); 0 = they stay as they are."""
    logits_softcap: float = 0.0
    """The same of logits."""
    embedding_scale: float = 1.0
    """Factor of embeddings.

    A model that multiplies addends to the residual stream by r runs with a stream that is 1 / r times as large:
    this and `rms_norm_eps` account for it (Granite).
    """
    logits_scale: float = 1.0
    """Factor of logits; it is folded into the weights of the last norm when a bundle is made."""
    parallel_residual: bool = False
    """Attention and FFN read the same residual stream, and both are added to it."""
    parallel_norms: int = 1
    """Number of norms of a layer with `parallel_residual`: 2 if the FFN has its own."""
    head_bias: bool = False
    """Bias on the output head."""
    hidden_act_limit: float = 0.0
    """fatrelu: gates that are not above it count as 0. swiglu_oai: gates and their factors are clamped there."""
    attention_sinks: bool = False
    """Each query head has a logit that takes part in its softmax and has no value (arXiv 2309.17453)."""
    alibi: AlibiConfig | None = None
    """ALiBi: scores fall with distance and heads are not rotated."""
    experts: ExpertsConfig | None = None
    """Mixture of experts, in models whose layers have one."""
    latent: LatentConfig | None = None
    """Latent attention (MLA), in models that have it."""
    head_dims: tuple[int, ...] = ()
    """Per layer: elements of a head. Empty: `head_dim` in all layers."""
    kv_heads: tuple[int, ...] = ()
    """Per layer: key-value heads. Empty: `num_key_value_heads` in all layers."""
    kv_layers: tuple[int, ...] = ()
    """Per layer: the layer whose K and V its attention reads, itself or one before it (cross-layer attention, arXiv
    2405.12981); those of another are all that it has. Empty: each its own."""
    ffn_sizes: tuple[int, ...] = ()
    """Per layer: intermediate size. Empty: `intermediate_size` in all layers."""
    value_norm: bool = False
    """v heads are normed, without a weight."""
    keys_as_values: tuple[int, ...] = ()
    """Layers without a matrix for v, whose v is k before norm and rotation."""
    embedding_dim: int = 0
    """Elements of a row of the embedding and of the head, with projections between these and the stream; 0: as many as
    the stream has."""
    norms_behind: bool = False
    """The stream itself is normed after attention and FFN, which get it as it is (OPT-350m)."""
    final_norm: bool = True
    """True if there is a norm before the head."""
    head_layer_norm: bool = False
    """Heads of q and k go through layer norms before they turn."""
    head_norm: bool = False
    """The same with RMS norms, in families of which some models have them (GLM-4.5)."""
    layer_input: int = 0
    """Size of a token's own row for each layer (per-layer embeddings, Gemma 3n); 0 = none."""
    layer_input_vocab: int = 0
    """Rows of that table."""
    recurrent: RecurrentConfig | None = None
    """Layers that keep a state instead of K and V, in models that have some."""
    attention_gate: bool = False
    """The output of attention is multiplied by a sigmoid of further columns of the queries' matrix."""
    mixers: tuple[str, ...] = ()
    """Kind of each layer, in models whose layers are attention, FFN or recurrent alone (Nemotron-H)."""
    multipliers: tuple[float, ...] = ()
    """Factors of single matrices, in an order that the family knows (Falcon-H1); they are folded into the weights."""

    def window(self, layer: int) -> int:
        """Tokens that a query of this layer sees, itself included; 0 = all."""
        return self.windows[layer] if self.windows else 0

    def head_size(self, layer: int) -> int:
        """Elements of a head of this layer."""
        return self.head_dims[layer] if self.head_dims else self.head_dim

    def kv_count(self, layer: int) -> int:
        """Key-value heads of this layer."""
        return self.kv_heads[layer] if self.kv_heads else self.num_key_value_heads

    def kv_layer(self, layer: int) -> int:
        """The layer whose K and V this layer's attention reads."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def ffn_size(self, layer: int) -> int:
        """Intermediate size of this layer's FFN."""
        return self.ffn_sizes[layer] if self.ffn_sizes else self.intermediate_size

    def turned(self, rope: RopeConfig) -> int:
        """Dimensions of a head that a rotation turns."""
        return rope.dims or self.rope_dim

    @property
    def head_width(self) -> int:
        """Elements that the head reads."""
        return self.embedding_dim or self.hidden_size

    @property
    def query_scale(self) -> bool:
        """True if queries are multiplied by a factor of their position."""
        return self.local_rope is not None and self.local_rope.kind == "query_scale"

    def table_rows(self, ctx: int) -> int:
        """Rows of a rotation's table: one for each position, or a single one where nothing turns."""
        return ctx if any(rope.kind != "none" for rope in self.rotations) else 1

    def turns(self, layer: int) -> int:
        """Return the index of a layer's rotation, as in `ropes`."""
        return self.ropes[layer] if self.ropes else 1

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that a rotation turns."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """Rotations that layers have; each needs a table."""
        return (self.rope, *([self.local_rope] if self.local_rope else [])) if self.rope_dim else ()

    @property
    def longest_rotation(self) -> int:
        """Dimensions that the rotation turns which turns most; 0 without any."""
        return max(map(self.turned, self.rotations), default=0)

    @property
    def query_width(self) -> int:
        """Elements of all query heads of a token, where all layers have heads of one size."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of a token, where all layers have heads of one size."""
        return self.num_key_value_heads * self.head_dim
