"""From the arguments of `LLM` to the configuration of a run; each is checked before anything is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..base.validation import check_known
from ..config import GenerationConfig, RuntimeConfig
from ..registry import COMMANDS, configured, options, plain


def with_techniques(config: RuntimeConfig, values: Mapping[str, Any], others: Iterable[str]) -> RuntimeConfig:
    """Return the configuration with the settings of techniques that options request.

    Raises `UsageError` for an option that no technique has, with the nearest one, which may be one of the `others`.
    """
    if not values:  # as mostly: nothing is imported for them
        return config
    check_known([*(one.name for one in options(COMMANDS[0])), *others], values)
    return configured(config, values)


def runtime_config(budget: int | str | None, **settings: Any) -> RuntimeConfig:
    """Return the configuration of a run from fields of `RuntimeConfig`, of which each may be None, whatever its type.
    """
    return RuntimeConfig(**settings, budget_bytes=plain({"budget": budget})["budget"])


def with_beams(config: RuntimeConfig, beams: int | None) -> RuntimeConfig:
    """Make room for a search over this many beams."""
    beams = plain({"beams": beams})["beams"]
    if beams is None or beams == 1:
        return config
    return replace(config, max_sequences=max(config.max_sequences, beams),
                   own_tokens=config.own_tokens or GenerationConfig.max_tokens)
