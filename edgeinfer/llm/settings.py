"""From the arguments of `LLM` to the configuration of a run; each is checked before anything is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..base.validation import check_known
from ..config import GenerationConfig, RuntimeConfig
from ..errors import UsageError
from ..models import Storage, resolve
from ..registry import COMMANDS, Drafting, configured, drafting, options, plain

CONFIG = ("ctx", "kv", "threads", "prefill_chunk", "max_sequences", "own_tokens", "kv_tokens", "mlock", "mmap",
          "kv_layout")
"""Arguments that are fields of `RuntimeConfig`, which checks them."""
PLAIN = ("recipe", "kv_memory", "state_memory", "fill_budget")
"""Arguments that are such fields once they are plain."""
CHECKED = ("model", "max_kld", "device", "progress", "max_queue", "split", "prefix_file")
NAMES = (*CONFIG, *PLAIN, *CHECKED, "budget", "beams", "weights", "group_size")
OTHERS = ("self", "techniques")
"""Parameters of `LLM` that are no such arguments."""
SIZES = ("max_sequences", "beams", "own_tokens", "kv_tokens", "kv_memory", "fill_budget")
"""Arguments without which a few sequences share the memory of one context."""


class Asked(NamedTuple):
    """The arguments of `LLM`, checked."""

    config: RuntimeConfig
    drafting: Drafting
    shares: bool
    """Whether a few sequences share the memory of one context, because nothing else was requested."""
    kv: str | None
    """Type of the KV cache; None if a device may choose it."""
    weights: Any
    group_size: Any
    others: Mapping[str, Any]
    """Those of `CHECKED`, in plain form."""

    def resolved(self) -> Path:
        """Return the path of the model's bundle; raises as `models.resolve`."""
        return resolve(self.others["model"], self.others["progress"],
                       storage=Storage(self.weights, self.group_size, self.config.budget_bytes))


def asked_of(given: Mapping[str, Any]) -> Asked:
    """Return the arguments of `LLM` in plain form; those that are left out, or None, are the defaults.

    Raises `UsageError` for a value out of its range, and for options that no technique has.
    """
    given = {**dict.fromkeys(NAMES), **given}
    techniques = {name: value for name, value in given.items() if name not in NAMES}
    config = runtime_config(given["budget"], **{name: given[name] for name in CONFIG},
                            **plain({name: given[name] for name in PLAIN}))
    others = plain({name: given[name] for name in CHECKED})
    if others["split"] is not None and others["prefix_file"]:
        raise UsageError("A model that is split between processes keeps no prefix file; leave it out.")
    config = with_techniques(with_beams(config, given["beams"]), techniques, NAMES)
    drafts = drafting(techniques)
    return Asked(replace(config, draft_tokens=drafts.rows), drafts, all(given[name] is None for name in SIZES),
                 given["kv"] and config.kv, given["weights"], given["group_size"], others)


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
