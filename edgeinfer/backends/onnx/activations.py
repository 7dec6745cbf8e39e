"""Sizes of activations in a lowered graph: values that live together, at most."""

from __future__ import annotations

from edgeinfer.config import CUDA, ONNX_CPU
from edgeinfer.graph import ModelConfig
from edgeinfer.memory_planner import Request

from .devices import Provider
from .flavour import Heads
from .sizes import Sizes
from .slabs import FLOATS
from .topk_sampling import RETURNED_LOGITS

ARENA_SHARE, SCORES_SHARE = 1.6, 2.3
"""Factors of the memory that lives together in the CPU provider's arena, which rounds up to powers of two: activations
(1.4 to 1.5 measured), and scores that are in memory as a whole (1.7 to 2.2)."""
PARTIAL_ARENA_SHARE = 2.25
"""The same of both where a provider has operations on it (2.1 measured at most)."""


def arena_bytes(c: ModelConfig, sizes: Sizes, request: Request, provider: Provider, positions: int) -> int:
    """Return the bytes of activations that live together, and of the CPU provider's scores; its arena is larger.

    Its attention in f32 has scores in blocks (1.32), unless the model caps them or has sinks.
    """
    size = FLOATS[request.kv]().itemsize
    outputs = request.outputs * (c.vocab_size * (4 + size) + RETURNED_LOGITS * 12)
    rows = request.tokens * row_values(c) * (4 if provider.device == ONNX_CPU else size) + outputs
    whole = request.kv == "f16" or c.attention_softcap or c.attention_sinks or provider.partial
    scores = 4 * score_values(c, request.tokens, request.ctx, provider.device != CUDA and bool(whole))
    scores += sizes.copied_kv * positions * request.sequences * size
    if provider.device == CUDA:
        return rows + scores
    if provider.partial:
        return round(PARTIAL_ARENA_SHARE * (rows + scores))
    return round(ARENA_SHARE * rows + SCORES_SHARE * scores)


def row_values(config: ModelConfig) -> int:
    """Return the values of a token that are in memory at one time.

    In an MoE layer all experts have theirs: gates, ups, and their products with the weights.
    """
    heads = [Heads(config.num_attention_heads, config.kv_count(i), config.head_size(i))
             for i in range(config.num_hidden_layers)]
    inner = max(config.ffn_size(i) for i in range(config.num_hidden_layers))
    if experts := config.experts:
        inner = max(inner, (experts.total + 1) * (-(-experts.intermediate_size // 16) * 16))
    attention = max((one.query + 2 * one.kv) * one.stored_dim for one in heads)
    layer_inputs = config.num_hidden_layers * config.layer_input
    if r := config.recurrent:  # its input, the convolved columns, and both once more, as they are divided and gated
        attention = max(attention, 2 * r.conv_channels + 2 * r.value_width)
    copies = 4 if config.latent else 2  # of latents, queries are put together piece by piece
    return 3 * inner + 4 * config.hidden_size + copies * attention + 4 * layer_inputs


def score_values(config: ModelConfig, tokens: int, ctx: int, materialised: bool) -> int:
    """Return the scores that are in memory at one time, if attention has them whole, and the biases of ALiBi."""
    return config.num_attention_heads * tokens * ctx * (materialised + 2 * bool(config.alibi))
