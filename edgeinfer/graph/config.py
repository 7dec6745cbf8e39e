"""What the mathematics of a decoder depends on, in Hugging Face's words and independent of any one architecture."""

from __future__ import annotations

from dataclasses import field

from ..dataclass import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and how it is stretched."""

    theta: float = 10000.0
    """Base of the frequencies."""
    kind: str = "default"
    """default, linear, llama3 or yarn."""
    factor: float = 1.0
    """Stretch of the context."""
    original_max_position_embeddings: int = 0
    """Positions the model was trained on (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original/low are stretched by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original/high are kept."""
    beta_fast: float = 32.0
    """yarn: rotations above which a dimension is kept (arXiv 2309.00071, section 3.2)."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is stretched."""
    attention_factor: float = 1.0
    """yarn: multiplies cos and sin (the paper's sqrt(1/t))."""
    truncate: bool = True
    """yarn: the bounds of the ramp are rounded outwards to whole dimensions."""

    @property
    def uses_training_context(self) -> bool:
        """Whether the frequencies depend on original_max_position_embeddings."""
        return self.kind in ("llama3", "yarn")


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
    """silu, relu, relu2 (squared relu), gelu (erf) or gelu_tanh."""
    rms_norm_eps: float
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

    def window(self, layer: int) -> int:
        """Tokens that a query of this layer sees, itself included; 0 = all."""
        return self.windows[layer] if self.windows else 0

    @property
    def query_width(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of a token."""
        return self.num_key_value_heads * self.head_dim
