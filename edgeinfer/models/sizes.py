"""Bytes and operations of the built-in shapes by type of their weights, so that many are compared in an instant.

The table is shape_sizes.json; ``python -m tests.make_sizes`` makes it from the descriptions of the shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.dataclass import dataclass
from ..config import CUDA, Recipe, RuntimeConfig
from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    from edgeinfer.backends import DevicePlanner, OnCard
    from edgeinfer.devices import Traffic

    from ..graph import ModelConfig
    from .description import ModelDescription

TYPES = ("f16", "int8", "Q6_K", "Q5_K_M", "Q4_K_M", "q4", "Q4_0", "IQ4_XS")
"""Types that people run: those that edgeinfer makes by default, and files that are downloaded, the most exact first."""
MADE = ("f16", "int8", "q6", "q5m", "q5k", "q5", "q4m", "q4k", "iq4", "iq4k", "tableq", "q4", "mxfp4", "tableq3")
"""Types that edgeinfer makes of a checkpoint, the most exact first."""
COMPARED = ("f16", "int8", "q6", "Q6_K", "q5m", "q5k", "Q5_K_M", "q5", "q4m", "q4k", "Q4_K_M", "iq4", "iq4k", "tableq",
            "IQ4_XS", "q4", "Q4_0", "mxfp4", "tableq3")
"""All of them, as the table has them."""
TERNARY = ("q2", "q4", "int8", "f16")
"""Types that hold the weights of a model that was trained with three values, all exactly, the smallest first."""
EITHER = ("Q5_K_M", "Q4_K_M")
"""Types of files that can be made too (``convert --weights q4_k_m``)."""
OF_TYPE = ("weight_bytes", "prefill_weight_bytes", "pure_bits", "ffn_bytes")
"""Fields of the traffic that depend on the type; the last is in the table for mixtures of experts alone."""
KV, CTX = "int8", 4096
"""Type of the KV cache in the table, and the context whose plan it is from."""


@dataclass(frozen=True)
class Sized:
    """A built-in shape with one type of weights."""

    name: str
    kind: str
    """One of `COMPARED`."""
    parameters: int
    longest: int
    """Context that it was trained for."""
    file_bytes: int
    """Bytes of all weights."""
    other_bytes: int
    """Bytes of a run with a context of `CTX`, without weights and KV cache."""
    traffic: Traffic
    on_card: Callable[[int, int | None], OnCard] | None = None
    """Plans the run on an NVIDIA card with a context and a limit of the process; None if CUDA refuses the model."""
    ternary: bool = False
    """True if its weights have three values, which no type of `TERNARY` rounds."""

    def run_bytes(self, ctx: int, sequences: int = 1) -> float:
        """Return the memory of a run, all weights in memory, to a few megabytes."""
        kept = self.traffic.kv_bytes * ctx + self.traffic.window_kv_bytes * min(ctx, self.traffic.window + 512)
        return self.file_bytes + self.other_bytes + sequences * (kept + self.traffic.state_bytes / 2)


def row_of(model: ModelDescription, total_bytes: int) -> dict[str, Any]:
    """Return the table's entry of a model: `total_bytes` are those of its plan."""
    traffic = model.traffic(KV)
    common = {one.name: getattr(traffic, one.name) for one in fields(traffic)
              if one.name not in (*OF_TYPE, "topn", "types") and getattr(traffic, one.name) != one.default}
    sized = Sized("", "", model.parameters, 0, model.weight_bytes, 0, traffic)
    return {"parameters": model.parameters, "longest": model.config.max_position_embeddings,
            "other_bytes": round(total_bytes - sized.run_bytes(CTX)), "traffic": common}


def of_type(model: ModelDescription) -> list[float]:
    """Return the table's entry of a type: bytes of the file, and the fields of `OF_TYPE`."""
    traffic = model.traffic(KV)
    return [model.weight_bytes, *(getattr(traffic, name) for name in OF_TYPE[:None if traffic.experts else -1])]


def card_planner(model: ModelDescription) -> DevicePlanner | None:
    """Return the planner of runs of a described model on NVIDIA's cards; None if CUDA does not run it."""
    from ..backends import PROVIDERS, device_planner

    try:
        return device_planner(model.as_stored, RuntimeConfig(ctx=CTX, recipe=Recipe(())), PROVIDERS[CUDA])[0]
    except UnsupportedModelError:
        return None


def lowered_of(models: dict[str, ModelDescription]) -> dict[str, Any]:
    """Return the table's entry of a model on NVIDIA's cards, from its descriptions by type of the weights; empty if
    CUDA does not run it. Types that become the same are there once."""
    from ..backends import known_of

    shape, types, of = dict[str, float](), list[list[float]](), dict[str, int]()
    for kind, model in models.items():
        if (planner := card_planner(model)) is None:
            return {}
        shape, found = known_of(planner, CTX)
        types += [found] if found not in types else []
        of[kind] = types.index(found)
    return {"lowered": {**shape, "types": types, "of": of}}


def of_description(model: ModelDescription, kind: str, total_bytes: int, ctx: int,
                   planner: DevicePlanner | None = None) -> Sized:
    """Return a model that is no built-in shape; `total_bytes` are those of its plan with a context of `ctx`, and
    `planner` that of its runs on NVIDIA's cards."""
    from ..backends import OnCard

    sized = Sized(model.name, kind, model.parameters, model.config.max_position_embeddings, model.weight_bytes, 0,
                  model.traffic(KV), partial(OnCard.known, planner, model.traffic(KV)) if planner else None)
    return replace(sized, other_bytes=round(total_bytes - sized.run_bytes(ctx)))


@cache
def _table() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("shape_sizes.json").read_text(encoding="utf-8")))


def names() -> list[str]:
    """Return the shapes of the table."""
    return list(_table())


def types_of(name: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types of a built-in shape that are compared: `kinds`, or those that hold three values."""
    return TERNARY if "q2" in _table()[name]["types"] else kinds


@cache
def sized(name: str, kind: str) -> Sized:
    """Return a built-in shape with one type of weights, one of `types_of`."""
    from edgeinfer.devices import Traffic

    row = _table()[name]
    nbytes, *values = row["types"][kind]
    traffic = Traffic(**row["traffic"], **dict(zip(OF_TYPE, values, strict=False)))
    return Sized(name, kind, row["parameters"], row["longest"], nbytes, row["other_bytes"], traffic,
                 partial(_on_card, name, kind) if "lowered" in row else None, ternary="q2" in row["types"])


@lru_cache(1 << 13)
def _on_card(name: str, kind: str, ctx: int, budget: int | None) -> OnCard:
    """Return the run of a built-in shape on NVIDIA's cards, which all of them share."""
    from ..backends import OnCard, known_planner

    row = _table()[name]["lowered"]
    planner = known_planner(_config(name), row, row["types"][row["of"][kind]])
    return OnCard.known(planner, sized(name, kind).traffic, ctx, budget)


@cache
def _config(name: str) -> ModelConfig:
    from ..graph import builtin_shapes, read_config

    return read_config(dict(builtin_shapes()[name].config))
