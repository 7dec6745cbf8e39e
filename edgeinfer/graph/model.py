"""From a config to its architecture: the file in graph/architectures that is named as the config's `model_type`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from . import architectures
from .builder import GraphBuilder
from .config import ModelConfig
from .reader import ConfigReader
from .storage import TypeOf
from .types import Graph


def supported_architectures() -> list[str]:
    """The `model_type` of every architecture there is a file for, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(architectures.__path__))


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
    if generation is not None:
        ConfigReader(generation, "generation_config.json")
        names = ("bos_token_id", "eos_token_id")
        config = {**config, **{n: generation[n] for n in names if generation.get(n) is not None}}
    model_type = config.get("model_type")
    if model_type is None:
        raise CheckpointError("config.json lacks 'model_type', which names the architecture; download the file again.")
    reader = ConfigReader(config)
    model: ModelConfig = _architecture(model_type).read(reader)
    reader.refuse_unread()
    return model


def build_graph(config: ModelConfig, type_of: TypeOf) -> Graph:
    """The forward pass of a model whose weights are stored as `type_of` says (see `requested_types`)."""
    graph: Graph = _architecture(config.model_type).forward(GraphBuilder(config, type_of), config)
    return graph


def _architecture(model_type: Any) -> ModuleType:
    known = supported_architectures()
    if model_type not in known:
        near = difflib.get_close_matches(str(model_type), known, n=1)
        hint = f"the nearest is {near[0]}; " if near else ""
        raise UnsupportedModelError(
            f"config.json: model_type is {model_type!r:.60}, which edgeinfer does not support; "
            f"{hint}supported: {', '.join(known)}."
        )
    return importlib.import_module(f"{architectures.__name__}.{model_type}")
