"""Sizes of activations in a lowered graph: values that live together, at most."""

from __future__ import annotations

from edgeinfer.graph import Graph, ModelConfig

from .flavour import Heads, kv_layers, layers_read


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


def read_again(graph: Graph, positions: int, sequences: int) -> int:
    """Return the values of K and V that attention copies in a layer that reads those of another."""
    layers, shared = kv_layers(graph), layers_read(graph.config)
    return max((2 * layers[i].kv * layers[i].stored_dim * positions * sequences for i in shared), default=0)
