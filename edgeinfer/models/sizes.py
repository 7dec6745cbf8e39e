"""Bytes and operations of the built-in shapes by type of their weights, so that many are compared in an instant.

The table is shape_sizes.json; ``python -m tests.make_sizes`` makes it from the descriptions of the shapes.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.dataclass import dataclass

if TYPE_CHECKING:
    from edgeinfer.devices import Traffic

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
OF_TYPE = ("weight_bytes", "prefill_weight_bytes", "pure_bits")
"""Fields of the traffic that depend on the type."""
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
              if one.name not in (*OF_TYPE, "ffn_bytes", "topn") and getattr(traffic, one.name) != one.default}
    sized = Sized("", "", model.parameters, 0, model.weight_bytes, 0, traffic)
    return {"parameters": model.parameters, "longest": model.config.max_position_embeddings,
            "other_bytes": round(total_bytes - sized.run_bytes(CTX)), "traffic": common}


def of_type(model: ModelDescription) -> list[float]:
    """Return the table's entry of a type: bytes of the file, and the fields of `OF_TYPE`."""
    traffic = model.traffic(KV)
    return [model.weight_bytes, *(getattr(traffic, name) for name in OF_TYPE)]


def of_description(model: ModelDescription, kind: str, total_bytes: int, ctx: int) -> Sized:
    """Return a model that is no built-in shape; `total_bytes` are those of its plan with a context of `ctx`."""
    sized = Sized(model.name, kind, model.parameters, model.config.max_position_embeddings, model.weight_bytes, 0,
                  model.traffic(KV))
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
    traffic = Traffic(**row["traffic"], **dict(zip(OF_TYPE, values, strict=True)))
    return Sized(name, kind, row["parameters"], row["longest"], nbytes, row["other_bytes"], traffic,
                 ternary="q2" in row["types"])
