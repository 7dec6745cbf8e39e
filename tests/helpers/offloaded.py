"""Models whose neurons are partly read on demand: code that their tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.bundle import Bundle
from edgeinfer.converters import write_random_bundle
from edgeinfer.converters.synthetic.random_neurons import Sparsity
from edgeinfer.memory_planner import ColdPlan, MemoryPlan, Planner, Request
from edgeinfer.registry import recipe_with
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, config_of, logits_of, session, tokens

CONFIG = replace(TINY, hidden_size=128, intermediate_size=328, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32)
"""Six blocks of neurons, the last one of 8; eight neurons in a cluster."""
WIDE = replace(CONFIG, hidden_size=704, num_attention_heads=22, num_hidden_layers=2)
"""One neuron in a cluster."""
IDS = tokens(70)
OPTIONS: dict[str, Any] = {"prefill_chunk": 48, "ctx": 256, "recipe": recipe_with(sparse="predict")}
COLD, MIXED, HOT = (0, 0, 0, 0), (64, 0, 128, 328), (320, 328, 328, 256)


def made(path: Path, config: Any = CONFIG, weights: str = "q4") -> Path:
    write_random_bundle(config, path, weights, ffn_layout="neuron", sparsity=Sparsity(0.3, 0.8, "sign"))
    return path


def placed(hot: tuple[int, ...], more: int = 0) -> Callable[[Planner, Request, int], MemoryPlan]:
    """Keeps so many neurons of each layer, and as many slots as it must and some more."""
    def place(planner: Planner, request: Request, budget: int) -> MemoryPlan:
        slots = ColdPlan.of(planner.graph, hot, 0).least_slots + more
        return planner.plan(replace(request, residency=(("*", "resident"),), hot=hot, slots=slots))

    return place


@contextmanager
def offloaded(path: Path, hot: tuple[int, ...] = MIXED, more: int = 3, **options: Any) -> Iterator[Session]:
    config = config_of(**{"threads": 1, "budget_bytes": 1, **OPTIONS, **options})
    opened = Session(Bundle.open(path), config, placer=placed(hot, more))
    try:
        yield opened
    finally:
        opened.close()


def resident(path: Path, **options: Any) -> np.ndarray:
    with session(path, **{**OPTIONS, **options}) as opened:
        assert opened.plan.cold is None
        return logits_of(opened, IDS, 12)
