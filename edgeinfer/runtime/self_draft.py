"""A cheaper program over a session's own weights, KV cache and threads, which drafts tokens for the session to verify.

The program is an early exit (the first layers, then the final norm and the head) or the model with neuron masks, where
the session itself computes all neurons (arXiv 2309.08168 and 2411.12692). It writes into the KV cache after the ends
of the sequences. The forward pass that verifies the draft tokens computes their K and V again in each layer before any
of those rows is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, Step
from edgeinfer.errors import RequestError
from edgeinfer.graph import Graph, KvAccess, ModelConfig
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import DraftMemory, MemoryPlan, Planner
from edgeinfer.registry import recipe_with, techniques
from edgeinfer.runner import Cancellation, Sequence, decoding

from .execution.forward import Logits
from .execution.thread_tuner import SMALL_BYTES, ThreadTuner
from .memory import allocate
from .planning import planner_of
from .program.lowering.lower import Lowering
from .session import Session
from .weights.loading import load_parts

OWN = ("activations", "logits", "scratch", "tables")
"""Regions that the program has for itself."""
HOME = "streamed"
"""Region of weights that are a file of their own: nothing is streamed where there are such."""
SHARE = 3
"""An early exit leaves the model after one layer of this many."""


class Planned(NamedTuple):
    """A cheaper program beside a session's."""

    graph: Graph
    plan: MemoryPlan
    """Plan of its own regions; weights and KV are where the session has them."""


class DraftPlan:
    """A program that drafts beside a session, as plans see it."""

    refusal: ClassVar[str]
    """Message for a session whose weights are read from storage."""
    stores: tuple[KvAccess, ...] = ()
    """K and V of its own in the blocks of the session's sequences."""

    @property
    def draft_memory(self) -> DraftMemory:
        """Let plans have room for it."""
        def both(plan: MemoryPlan) -> MemoryPlan:
            if not (found := self.planned(plan)):
                return plan
            own = (replace(one, name="weights" if one.name == HOME else one.name) for one in found.plan.regions)
            return plan.with_draft(replace(found.plan, regions=tuple(own)))

        return DraftMemory(both, {"speculate": "off"}, self.check, self.stores)

    def planned(self, host: MemoryPlan) -> Planned | None:
        """Plan it beside a session's plan; None if weights are read from storage, or there is nothing cheaper."""
        return None if host.parts or host.cold or host.experts else self._planned(host)

    def _planned(self, host: MemoryPlan) -> Planned | None:
        raise NotImplementedError

    def check(self, host: MemoryPlan) -> Planned:
        """Return it beside a session's plan; raises `RequestError` if there is none."""
        if not (found := self.planned(host)):
            raise RequestError(self.refusal)
        return found


@dataclass(frozen=True)
class SelfDraftPlan(DraftPlan):
    """Strategies for a model to draft for itself, the best first, as far as they are known before a run is planned."""

    planners: tuple[Planner, ...]
    refusal: ClassVar[str] = ("Weights of the model are read from storage, so it cannot draft for itself; leave "
                              "--speculate self out.")

    @classmethod
    def of(cls, model: ModelConfig, plain: Recipe, parts: Collection[str],
           make: Callable[[Recipe], Planner]) -> SelfDraftPlan:
        """Return the ways of a model that runs with the recipe `plain`: the approximations that its `parts` allow, such
        as a predictor, and an early exit. `make` gives the planner of a recipe.

        Raises
        ------
        RequestError
            The model has nothing to leave out.
        """
        if model.recurrent:
            raise RequestError("A part of this model cannot draft for it: its recurrent layers would process draft "
                               "tokens. Leave --speculate self out; lookup and draft models work.")
        recipes = list(_recipes(model, plain, parts))
        if not recipes:
            raise RequestError("The model has one layer and no predictor, so no part of it can draft for it; leave "
                               "--speculate self out.")
        return cls(tuple(map(make, recipes)))

    @classmethod
    def of_bundle(cls, bundle: Bundle, plain: Recipe, own: Recipe | None = None) -> SelfDraftPlan:
        """Return those of a bundle, or the one by its `own` recipe."""
        if own:
            return cls((planner_of(bundle, own),))
        return cls.of(bundle.config, plain, bundle.parts, partial(planner_of, bundle))

    def _planned(self, host: MemoryPlan) -> Planned | None:
        """Plan the first way that goes together with a session's plan."""
        for planner in self.planners:
            own = [weight.name for weight in planner.graph.weights if weight.name not in host.allocations]
            cheaper = own or _layers(planner.graph) < planner.graph.config.num_hidden_layers
            if cheaper and not (own and any(region.name == "resident" for region in host.regions)):
                return Planned(planner.graph, _plan(planner, host, bool(own)))
        return None

    def open(self, host: Session) -> SelfDraftSession:
        """Take its memory, beside an open session whose plan has room for it."""
        return SelfDraftSession(host, *self.check(host.plan))


class SelfDraftSession(Session):
    """Runs ahead of a session with its sequences, which it leaves as they are.

    Parameters
    ----------
    host : Session
        Whose sequences it continues with; closed after this one.
    graph, plan : see `Planned`
    """

    def __init__(self, host: Session, graph: Graph, plan: MemoryPlan):
        self.bundle, self.model, self.isa, self.kv, self.graph, self.plan = \
            host.bundle, host.model, host.isa, host.kv, graph, plan
        self.config = replace(host.config, outputs=plan.request.outputs, draft_tokens=0)
        regions = {name: memory for name, memory in host.executor.regions.items() if name not in OWN}
        regions |= {region.name: allocate(region.nbytes) for region in plan.regions if region.name in abi.REGIONS}
        self.load_own(host, regions)
        kernels, tuner = host.executor.kernels, host.executor.tuner
        program = Lowering(graph, plan, kernels.isa.token_tiles).program()
        self._link(program, kernels, regions, host.executor.pool,
                   ThreadTuner(tuner.threads, tuner.choose, self.bundle.weights_bytes <= SMALL_BYTES))

    def load_own(self, host: Session, regions: dict[str, NDArray[np.uint8]]) -> None:
        """Bring those weights into memory that the session does not have."""
        own = [weight for weight in self.graph.weights if weight.name not in host.plan.allocations]
        load_parts(self.bundle, own, self.plan, regions)

    @property
    def vocab_size(self) -> int:
        """Tokens that it may draft, the first ones of the vocabulary."""
        return self.graph.logits.width

    def ahead(self, sequences: Items[Sequence], ids: Items[int], sample_specs: Items[int], offset: int, further: int,
              cancel: Cancellation | None = None) -> tuple[Logits, list[list[int]]]:
        """Run over a token of each sequence without appending it; see `runner.DraftRunner`."""
        segments = decoding(sequences, ids, sample_specs)
        self._admit(segments)
        if not offset:
            for sequence in sequences:
                self.reserve(sequence, 1 + further)
        elif (short := min(sequence.reserved for sequence in sequences)) < offset + 1 + further:
            raise RequestError(f"{offset + 1 + further} tokens ahead are more than the {short} that there is room for.")
        further = self._steps(segments, further, offset)
        rows = self._run(segments, 0, None, offset, cancel, further)
        return rows, self._tables.chosen(len(segments), further, self.executor.steps_left)

    def settle(self) -> None:
        """All memory is there from the start."""

    def close(self) -> None:
        """Cancel the running forward pass and free its own memory."""
        self.executor.close()
        self.executor.regions.clear()


def _recipes(model: ModelConfig, plain: Recipe, parts: Collection[str]) -> Iterator[Recipe]:
    for one in techniques() if parts else ():
        if one.drafts and one.part and one.part.name in parts:
            yield recipe_with(plain, **{one.options[0].name: one.by_itself})
    if (layers := model.num_hidden_layers) > 1:
        yield Recipe((*plain.steps, Step("early_exit", (("layers", max(1, layers // SHARE)),))))


def _layers(graph: Graph) -> int:
    return len({op.layer for op in graph.ops} - {None})


def _plan(planner: Planner, host: MemoryPlan, resident: bool) -> MemoryPlan:
    """Plan the program's own regions, for forward passes over one token of each sequence."""
    layers, masks = planner.graph.config.num_hidden_layers, " with masks" if resident else ""
    return plan_program(planner, host, host.request.sequences,
                        f"draft tokens of {_layers(planner.graph)} of {layers} layers{masks}", resident)


def plan_program(planner: Planner, host: MemoryPlan, tokens: int, how: str, resident: bool = False) -> MemoryPlan:
    """Plan a program beside a session's, with weights and KV where that has them, for passes over so many tokens."""
    request = replace(host.request, tokens=tokens, outputs=host.request.sequences, residency=(), hot=(), slots=0)
    plan, names = planner.plan(request), (*OWN, "resident") if resident else OWN
    shared = {weight.name: host.allocations[weight.name] for weight in planner.graph.weights
              if weight.name in host.allocations}
    regions = tuple(replace(region, reason=f"{how}: {region.reason}") for region in plan.regions
                    if region.name in names)
    return replace(plan, regions=regions, allocations={**plan.allocations, **shared}, kv_blocks=host.kv_blocks,
                   kv_layers=host.kv_layers, pruned=host.pruned, windowed=host.windowed)
