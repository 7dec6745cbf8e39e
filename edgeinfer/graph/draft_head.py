"""Multi-token prediction: a layer after the last drafts the token after the next (arXiv 2412.19437, section 2.2).

For each token the head reads the token's embedding and the final norm's output of the token before. Its layer follows
the model's last one in number, so its K and V are one more layer of the cache. It shares the model's embedding and
output head. Its tensors have the names of DeepSeek's checkpoints, which those of Qwen are mapped to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgeinfer.kernels import abi

from .builder.builder import GraphBuilder
from .config import ModelConfig
from .families.registry import family_of
from .graph import Graph
from .ops.matmul import Linear
from .ops.rows import Sample
from .tensors import Tensor
from .weights import Source, Weight

DRAFT_WORDS = 65536
"""Words that are drafted at most, the first ones of a vocabulary: byte-level BPE numbers frequent ones first, and of
small models with large vocabularies the head is half of a token's bytes (FR-Spec, arXiv 2502.14856)."""
WORDS = "draft_words"
"""Weight that stands for the first rows of the output head."""
Block = Callable[[GraphBuilder, ModelConfig, Tensor, int], Tensor]
"""One layer of a family, by its number."""


def prefix(config: ModelConfig) -> str:
    """Return the prefix of the names of the head's own weights."""
    return f"layers.{config.num_hidden_layers}."


def words_of(config: ModelConfig) -> str:
    """Return the name of the weight whose first rows `WORDS` has: the output head, or the embedding that it is."""
    return "embed" if config.tie_word_embeddings else "head"


def draft_head(g: GraphBuilder, c: ModelConfig, block: Block) -> Graph:
    """Rows of the last norm, and the tokens after them, to logits of the tokens after these.

    The layer reads W [norm(embedding); norm(given row)]; the two halves of the matrix are stored one by one.
    """
    hidden, d, name, hf = g.given_rows(), c.hidden_size, prefix(c), f"model.layers.{c.num_hidden_layers}."
    plus_one = family_of(c.model_type).norms_plus_one

    def norm(module: str) -> Source:
        source = Source(f"{hf}{module}.weight", (d,))
        return source.plus(1.0) if plus_one else source

    x, g.layer = g.embed("model.embed_tokens.weight"), c.num_hidden_layers
    both = Source(hf + "eh_proj.weight", (d, 2 * d))
    x = g.rms_norm(x, name + "embedding_norm", norm("enorm"))
    x = g.linear(x, name + "of_embedding", (both.columns(0, d),), (d,))
    h = g.rms_norm(hidden, name + "hidden_norm", norm("hnorm"))
    x = block(g, c, g.linear(h, name + "of_hidden", (both.columns(d, 2 * d),), (d,), residual=x), c.num_hidden_layers)
    return g.build(g.logits(x, norm("shared_head.norm"), "lm_head.weight", norm_name=name + "norm"))


def with_first_words(graph: Graph, most: int) -> Graph:
    """Leave logits of the first words alone."""
    vocab = graph.logits.width
    if vocab <= most:
        return graph
    head = next(op for op in graph.ops if op.out == graph.logits)
    sample = next(op for op in graph.ops if isinstance(op, Sample))
    assert isinstance(head, Linear)
    logits = replace(graph.logits, width=most)
    words = Weight(WORDS, (most, head.weight.shape[1]), "head", head.weight.sources)
    work = replace(sample.out, width=abi.sample_row(most)[0] // 4)
    changed = {id(head): head.replaced(out=logits, weight=words), id(sample): sample.replaced(out=work, logits=logits)}
    kept = tuple(weight for weight in graph.weights if weight.name != "head")
    return replace(graph, ops=tuple(changed.get(id(op), op) for op in graph.ops), weights=(*kept, words),
                   types={**graph.types, WORDS: graph.types[head.weight.name]}, logits=logits)
