"""Variants of an ONNX model, and the names and shapes of their inputs and outputs.

Letters: B sequences, S tokens of each, T tokens of all, R rows of logits that are wanted, V vocabulary, L layer, G KV
heads, D elements of a head (`Heads.stored_dim`), P positions of the longest sequence, N pages of M rows. X is float16
or float32, as `dtype` says.

Attention ``gqa``, one slot of KV per sequence; target ``session``:

=================================  =========================  ======================================================
input                              type and shape             meaning
=================================  =========================  ======================================================
input_ids                          int64 (B, S)               new tokens; S = 1, or B = 1, or no past
seqlens_k                          int32 (B,)                 positions of each sequence, these tokens included, less 1
total_sequence_length              int32 (1,), on the CPU     the largest of seqlens_k + 1, or the slots' length P
output_rows                        int64 (R,)                 rows b S + s whose logits are wanted
past_key_values.L.{key,value}      X (B, G, P, D)             the slots: bind one buffer as past and as present
cumulative_sequence_length         int32 (B + 1,)             recurrent models: 0, S, 2 S, ..., B S
active                             int32 (B,)                 recurrent models: 0 = leave the state of a slot as it is
past_inputs.L                      X (B, channels, width - 1) last inputs of a layer's convolution
past_matrices.L                    f32 (B, heads, value, key) matrices of a layer's heads
=================================  =========================  ======================================================

Outputs are ``logits`` float32 (R, V) and ``present.L.{key,value}`` X (B, G, P, D); with `top_k` also ``top_logits``
float32 (R, k), falling, and ``top_ids`` int64 (R, k): rows whose logits are not all finite are NaN there. Positions
follow from seqlens_k. Recurrent layers have the outputs ``present_inputs.L`` and ``present_matrices.L``, of the same
shapes as the inputs, which are zeros before the first token of a sequence.

Target ``genai`` (onnxruntime-genai): input_ids int64 (B, S), attention_mask int64 (B, S + past), the same past and
present, and logits X (B, S, V) of all tokens.

Attention ``paged``, for CUDA alone; target ``session``:

=================================  =========================  ======================================================
input                              type and shape             meaning
=================================  =========================  ======================================================
input_ids                          int64 (T,)                 new tokens of all sequences, one sequence after the other
cumulative_sequence_length         int32 (B + 1,)             where each sequence begins among them, and T
past_seqlens                       int32 (B,)                 positions of each sequence before these tokens
block_table                        int32 (B, pages)           pages of each sequence, in order
attention_metadata                 int32 (3,), on the CPU     most new tokens of a sequence, most positions, least
                                                              positions; 0 = unknown
output_rows                        int64 (R,)                 tokens whose logits are wanted
key_cache.L, value_cache.L         X (N, M, G, D)             the pages: bind one buffer as input and as output
=================================  =========================  ======================================================

Outputs are ``logits``, ``top_logits`` and ``top_ids`` as above, and ``key_cache_out.L``, ``value_cache_out.L``.
"""

from __future__ import annotations

from typing import NamedTuple

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.validation import checked, choice, integer
from edgeinfer.errors import UsageError
from edgeinfer.graph import Graph, ModelConfig

TARGETS = ("session", "genai")
DTYPES = ("f16", "f32")
ATTENTIONS = ("gqa", "paged")
QK_NORMS = ("apart", "fused")
ON_CPU = frozenset(("total_sequence_length", "attention_metadata"))
"""Inputs that operators read in the memory of the process, on any device."""
HEAD_STEP = 16
"""onnxruntime rotates heads whose dimension is a multiple of it; others are padded (GroupQueryAttention, 1.32)."""


@dataclass(frozen=True)
class Flavour:
    """One of the models that a graph can become."""

    target: str = "session"
    """``session``: inputs as above; ``genai``: those of onnxruntime-genai."""
    dtype: str = "f16"
    """Type of activations, KV, scales, norms and matrices that are not quantised."""
    attention: str = "gqa"
    """``gqa``: GroupQueryAttention over slots; ``paged``: PagedAttention over pages."""
    ctx: int | None = None
    """Positions in the tables of cosines and sines; None = the model's."""
    qk_norm: str = ""
    """Norms of q and k heads ``apart``, as operations that every provider has, or ``fused`` into attention, which CUDA
    and WebGPU have; empty: apart with gqa, fused with paged."""
    top_k: int = 0
    """Logits of a row that go out beside all of them, the largest with their ids; 0 = none. Of target session."""
    nibbles: bool = False
    """True if matrices of 8 bits are multiplied as two of 4 bits, for which the CPU provider has kernels."""

    @property
    def positions(self) -> int:
        """`ctx` of a flavour that was checked."""
        if self.ctx is None:
            raise ValueError("A flavour has its positions once it was checked.")
        return self.ctx

    def checked(self, config: ModelConfig) -> Flavour:
        """Return it with defaults resolved for the model; raise `UsageError` for impossible values."""
        norm = self.qk_norm or ("fused" if self.attention == "paged" else "apart")
        for option, value, known in (("--for", self.target, TARGETS), ("--dtype", self.dtype, DTYPES),
                                     ("--attention", self.attention, ATTENTIONS), ("--qk-norm", norm, QK_NORMS)):
            checked(option, value, choice(known))
        if self.target == "genai" and self.attention == "paged":
            raise UsageError("--attention paged is for sessions, and --for genai is given; use --attention gqa, whose "
                             "inputs onnxruntime-genai feeds.")
        most, vocabulary = config.max_position_embeddings, config.vocab_size
        ctx = checked("--ctx", most if self.ctx is None else self.ctx,
                      integer(1, most, f"from 1 to {most}, the positions that the model knows"))
        top_k = checked("top_k", self.top_k, integer(0, 0 if self.target == "genai" else vocabulary,
                                                     f"from 0 to {vocabulary}, and 0 for genai"))
        return Flavour(self.target, self.dtype, self.attention, ctx, norm, top_k, self.nibbles)


class Heads(NamedTuple):
    """Sizes of attention heads, and as the KV cache has them."""

    query: int
    kv: int
    dim: int
    """Elements that the model has."""

    @classmethod
    def of(cls, config: ModelConfig) -> Heads:
        """Return those of a model."""
        return cls(config.num_attention_heads, config.num_key_value_heads, config.head_dim)

    @property
    def stored_dim(self) -> int:
        """Elements of a head in the KV cache and in attention: a multiple of HEAD_STEP."""
        return -(-self.dim // HEAD_STEP) * HEAD_STEP

    @property
    def padded(self) -> bool:
        """True if attention has elements that the model has not."""
        return self.stored_dim != self.dim


def kv_layers(graph: Graph) -> dict[int, Heads]:
    """Return the heads of each layer that has K and V of its own."""
    config, stored = graph.config, {op.kv.layer for op in graph.ops if op.kv and op.kv.stores}
    return {i: Heads(config.num_attention_heads, config.kv_count(i), config.head_size(i)) for i in sorted(stored)}


def layers_read(config: ModelConfig) -> set[int]:
    """Return the layers whose K and V others read."""
    return {config.kv_layer(i) for i in range(config.num_hidden_layers) if config.kv_layer(i) != i}
