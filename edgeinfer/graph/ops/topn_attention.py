"""Attention that reads only the rows of V with the largest weights while decoding (TopN-V: KCache, arXiv 2404.18057).

All of K is read. A head selects a row of V if the row's weight is among its N largest, or is at least a given share of
its largest one. A block of V is read if any head selects one of its rows, and then all its rows count. The mean of V
stands in for the rows that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar

from edgeinfer.kernels import abi

from ...base.dataclass import dataclass
from ...errors import UsageError
from ..graph import Graph
from ..topn_cost import TopNCost
from .attention import Attention
from .costs import KvAccess, Scratch, Sizes

INSTEAD = {"nothing": abi.INSTEAD_NOTHING, "scale": abi.INSTEAD_SCALE, "mean": abi.INSTEAD_MEAN}
"""Replacements for omitted rows: nothing, as published; weights of the others rescaled to add up to 1; a mean."""


@dataclass(frozen=True, kw_only=True)
class SelectedAttention(Attention):
    """Attention whose decoded tokens read the rows of V that their scores choose."""

    KERNELS: ClassVar[tuple[str, ...] | None] = (
        "attention_{kv}", "attention_merge", "attention_scores_{kv}", "attention_select", "attention_values_{kv}",
        "attention_merge")
    top: int = 0
    """Rows that a head needs; 0: those by `eps`."""
    eps: float = 0.0
    """Least share of the head's largest weight that is requested."""
    instead: str = "mean"
    """Replacement for the omitted rows, see INSTEAD."""

    @property
    def kv(self) -> KvAccess | None:
        """Return the K and V of the visible tokens; decoded tokens omit a part of V."""
        access = super().kv
        assert access
        group, mean = self.heads // self.kv_heads, self.instead == "mean"
        return access._replace(topn=TopNCost(self.eps, self.top, group, mean=mean))

    def parts(self, sizes: Sizes) -> tuple[int, int, int]:
        """Return the bytes that threads share: partial results, scores with the selection, means."""
        padded, tokens = abi.padded_head_dim(self.head_dim), sizes.decoded_tokens
        partial = max(sizes.split_tokens, tokens) * self.heads * sizes.splits * (128 + 4 * padded)
        means = tokens * self.kv_heads * (4 * padded + 64)
        return partial, tokens * self.heads * abi.score_row_bytes(sizes.splits), means

    def scratch(self, sizes: Sizes) -> Scratch:
        """Return the scratch of attention, and scores of each position for each head of a decoded token."""
        return Scratch(super().scratch(sizes).thread_bytes, sum(self.parts(sizes)))

    def faults(self, types: object) -> Iterator[str]:
        """A window leaves V out as it is."""
        yield from super().faults(types)  # type: ignore[arg-type]
        if self.window:
            yield f"rows of V are chosen of whole contexts, and it has a window of {self.window}"


def with_selection(graph: Graph, eps: float | None, top: int | None, instead: str, exact: int) -> Graph:
    """Let the attention of a graph select rows of V, by `eps` or by `top`; the other is None.

    Raises
    ------
    UsageError
        `instead` or `exact` is none that there is, or the model's attention cannot choose.
    """
    if not isinstance(instead, str) or instead not in INSTEAD:
        raise UsageError(f"attention has instead {instead!r}; choose one of {', '.join(INSTEAD)}.")
    if graph.config.attention_sinks:
        raise UsageError("attention chooses rows of V by weights that add up to 1, and those of "
                         f"{graph.config.model_type} do not, for its heads have sinks; leave attention out.")
    layers = graph.config.num_hidden_layers
    if type(exact) is not int or not 0 <= exact <= layers:
        raise UsageError(f"attention has exact {exact!r:.40}; the first layers that stay exact are from 0 to {layers}.")
    if graph.config.latent:
        raise UsageError("attention chooses rows of V, and this model stores none: its V is the beginning of its keys, "
                         "which are read whole; leave --attention out.")
    if any(isinstance(op, SelectedAttention) for op in graph.ops):
        raise UsageError("The recipe has the pass attention twice; name it once.")
    own: dict[str, Any] = {"top": min(top or 0, 2**31 - 1), "eps": float(eps or 0), "instead": instead}

    def selected(op: Attention) -> SelectedAttention:
        return SelectedAttention(**{field.name: getattr(op, field.name) for field in fields(op)}, **own)

    return replace(graph, ops=tuple(
        selected(op) if isinstance(op, Attention) and not op.window and (op.layer or 0) >= exact else op
        for op in graph.ops))


def least_score(eps: float) -> float:
    """Return the distance below the largest score within which scores are kept."""
    return math.log(eps) if eps else -math.inf
