"""From a config to its architecture: the file in graph/architectures that is named as the config's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from edgeinfer.kernels import ACTIVATIONS

from ..base.validation import similar
from ..config import Recipe
from ..errors import CheckpointError, UnsupportedModelError
from .builder.builder import GraphBuilder
from .check import check_runnable
from .config import ModelConfig, RopeConfig
from .draft_head import DRAFT_WORDS, draft_head, with_first_words
from .families.registry import architecture_module, family_of, seeing_models, supported_architectures
from .graph import Graph
from .hf_config.reader import ConfigReader
from .hf_config.wrappers import text_of
from .ops.rope import KINDS
from .passes import apply
from .quantize_activations import quantize_activations
from .weight_types import TypeOf

F32_LARGE = 1e30
"""Numbers of instructions are float32; no model comes near it."""


def read_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Understand a Hugging Face ``config.json``.

    Parameters
    ----------
    config : mapping
        The parsed file.
    generation : mapping, optional
        The parsed ``generation_config.json``; its bos_token_id and eos_token_id go before those of `config`.

    Raises
    ------
    CheckpointError
        A needed field is missing, or has a value that no model can have.
    UnsupportedModelError
        The architecture, or a field that changes the mathematics, is not implemented; the message names it.
    """
    ConfigReader(config)  # a JSON object, before its fields are merged
    config = text_of(config)
    if generation is not None:
        ConfigReader(generation, "generation_config.json")
        names = ("bos_token_id", "eos_token_id")
        config = {**config, **{n: generation[n] for n in names if generation.get(n) is not None}}
    model_type = config.get("model_type")
    if model_type is None:
        raise CheckpointError("config.json lacks 'model_type', which names the architecture; download the file again.")
    reader = ConfigReader(config)
    model: ModelConfig = _architecture(model_type, "config.json").read(reader)
    reader.refuse_unread()
    return model


def build_graph(config: ModelConfig, type_of: TypeOf, recipe: Recipe | None = None) -> Graph:
    """Build a model's graph for every reader: run, plan, estimate, describe, verify, convert.

    Parameters
    ----------
    config : ModelConfig
    type_of : callable
        Storage of each weight (see `requested_types`).
    recipe : Recipe, optional
        The passes over the architecture's graph; by default those of a run that asks for nothing.

    Raises
    ------
    UnsupportedModelError
        The config, which may come from a bundle instead of `read_config`, asks for something that no graph can have; or
        an operation lacks a cost, a kernel or a reference.
    """
    architecture = _architecture(config.model_type, "The model")
    _check(config)
    graph: Graph = architecture.forward(GraphBuilder(config, type_of), config)
    return check_runnable(apply(quantize_activations(graph), recipe or Recipe()))


def build_draft_head(config: ModelConfig, type_of: TypeOf, recipe: Recipe | None = None) -> Graph | None:
    """Build the graph of a model's head for further tokens (draft_head.py); None if its family has none.

    Parameters and exceptions are those of `build_graph`. The family's file has a function ``block``, the layer.
    """
    block = getattr(_architecture(config.model_type, "The model"), "block", None)
    if block is None or not family_of(config.model_type).further_tokens:
        return None
    _check(config)
    graph = with_first_words(draft_head(GraphBuilder(config, type_of), config, block), DRAFT_WORDS)
    return check_runnable(apply(quantize_activations(graph), recipe or Recipe()))


def _check(config: ModelConfig) -> None:
    """Refuse values for which there is no forward function."""
    for prefix, rope in (("rope", config.rope), ("local_rope", config.local_rope)):
        if rope:
            _check_rope(prefix, rope, config.turned(rope))
    positive = ("embedding_scale", "logits_scale")
    numbers = ("attention_scale", "attention_softcap", "logits_softcap", *positive)
    most = 2 if config.local_rope else 1
    for name, value, good, want in [
        ("hidden_act", config.hidden_act, config.hidden_act in ACTIVATIONS, "one of " + ", ".join(ACTIVATIONS)),
        ("head_dim", config.head_dim, config.head_dim % 2 == 0, "even"),
        ("rms_norm_eps", config.rms_norm_eps, 0 <= config.rms_norm_eps <= 1, "from 0 to 1"),
        ("rotary_dim", config.rope_dim, 0 <= config.rope_dim <= config.head_dim and config.rope_dim % 2 == 0,
         f"even, and from 0 to head_dim {config.head_dim}"),
        ("alibi", config.alibi, not config.alibi or (0 < config.alibi.max_bias <= 64 and not config.rope_dim),
         "a max_bias above 0 and at most 64, of heads that do not turn"),
        ("ropes", config.ropes, all(0 <= which <= most for which in config.ropes), f"0 to {most} for each layer"),
        *((name, getattr(config, name), (0 if name in positive else -1e-30) < getattr(config, name) < F32_LARGE,
           f"above 0 and below {F32_LARGE:g}") for name in numbers),
    ]:  # fmt: skip
        if not good:
            raise UnsupportedModelError(f"The model's {name} is {value!r}; it must be {want}.")


def _check_rope(prefix: str, rope: RopeConfig, rotary_dim: int) -> None:
    """Refuse values for which there is no rotation."""
    trained, pairs = rope.original_max_position_embeddings, rotary_dim // 2
    for name, good, want in [
        ("kind", rope.kind in KINDS, "one of " + ", ".join(KINDS)),
        ("theta", rope.theta > 1, "above 1"),
        ("dims", rope.dims >= 0 and rope.dims % 2 == 0, "even, and no less than 0"),
        ("span", rope.span % 2 == 0 and (rope.span >= max(rotary_dim, 1) if rope.kind == "proportional"
                                         else rope.span == 0),
         f"even, and no less than the {rotary_dim} dimensions that turn; 0 where the kind is not proportional"),
        ("factor", rope.factor >= 1 if rope.kind == "dynamic" else rope.factor > 0,
         "1 or more" if rope.kind == "dynamic" else "above 0"),
        ("original_max_position_embeddings", trained > 0 or not rope.uses_training_context, "above 0"),
        ("low_freq_factor", 0 < rope.low_freq_factor < rope.high_freq_factor, "above 0 and below high_freq_factor"),
        ("beta_fast", rope.beta_fast > 0, "above 0"),
        ("beta_slow", rope.beta_slow > 0, "above 0"),
        *([("dims", rotary_dim > 2, "of a head that turns by dynamic scaling more than 2")]
          if rope.kind == "dynamic" else []),
        *((which, rope.kind != "longrope" or (len(found) == pairs and all(f > 0 for f in found)),
           f"{pairs} numbers above 0")
          for which, found in (("short_factors", rope.short_factors), ("long_factors", rope.long_factors))),
    ]:  # fmt: skip
        if not good:
            raise UnsupportedModelError(f"The model's {prefix}.{name} is {getattr(rope, name)!r}; it must be {want}.")


def _architecture(model_type: Any, where: str) -> ModuleType:
    known = supported_architectures()
    if model_type not in known:
        names = [*known, *seeing_models()]
        near = similar(str(model_type), names, n=3)
        hint = f"the nearest: {', '.join(near)}; " if near else ""
        raise UnsupportedModelError(
            f"{where}: model_type is {model_type!r:.60}, which edgeinfer does not support; "
            f"{hint}supported: {', '.join(names)}."
        )
    return architecture_module(model_type)
