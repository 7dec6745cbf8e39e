"""Alternatives that fit: fewer checkpoints, the largest context, a smaller KV type, fewer bits a weight; each checked
against the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from edgeinfer.base.dataclass import dataclass
from edgeinfer.bundle import weights_file_bytes
from edgeinfer.config import GROUP_SIZES, RuntimeConfig
from edgeinfer.errors import RequestError, UnsupportedModelError
from edgeinfer.graph import Graph, TypeOf, requested_types
from edgeinfer.kernels import abi
from edgeinfer.quant import KV_TYPES, TYPES, WeightType, requestable

from .kv_pool import largest
from .plan import MemoryPlan, Request
from .planner import Planner
from .pool_budget import fewer_checkpoints, largest_pool, within
from .request import DRAFT, own_pool, to_request
from .stream_layers import stream

Options = dict[str, str | int]
Rebuild = Callable[[TypeOf], Graph]
"""Gives the model's graph with weights stored in another way."""
Placer = Callable[[Planner, Request, int], MemoryPlan | None]
"""Finds a plan within a budget if the weights do not all fit in memory; None if there is none."""
BLOCK, POOL, STATE = abi.BLOCK_TOKENS, "kv_memory", "state_memory"
STREAMED, COLD, EXPERTS = "streamed_layers", "cold_neurons", "kept_experts"
_BY_SIZE = sorted((WeightType.of(name) for name in requestable() if TYPES[name].usual),
                  key=lambda stored: -stored.bits_per_weight)
LIGHTEST = _BY_SIZE[-1]
STORAGES = (*_BY_SIZE[1:], *(replace(LIGHTEST, group_size=group) for group in LIGHTEST.storage.groups[1:]))
"""Types of weights that save memory, from the most bytes to the fewest; the lightest also in wider groups."""


@dataclass(frozen=True)
class Alternative:
    """A smaller request that fits."""

    options: Options
    """Options to change, by name: ctx, kv, kv_memory, state_memory, weights, group_size, samples; ``draft`` is
    ``none`` for the run without its draft model, ``speculate`` is ``off`` for the one that does not draft with a part
    of the model. ``streamed_layers``, ``cold_neurons`` and ``kept_experts`` are not options: run reads as many from
    storage by itself, or keeps this many experts in memory.
    """
    total_bytes: int
    """Total of the plan with these options."""
    streamed_bytes: int = 0
    """Bytes that each token then reads from storage."""

    @property
    def change(self) -> str:
        """The options' names, such as ``ctx`` or ``kv+ctx``."""
        return "+".join(name for name in self.options if name != "group_size")

    @property
    def value(self) -> str | int:
        """The option's new value; joined as `change` if there are several."""
        values = [value for name, value in self.options.items() if name != "group_size"]
        return values[0] if len(values) == 1 else "+".join(map(str, values))

    def __str__(self) -> str:
        flags = " ".join(f"--{name.replace('_', '-')} {value}{'B' if name in (POOL, STATE) and value else ''}"
                         for name, value in self.options.items() if name not in (STREAMED, COLD, EXPERTS, DRAFT))
        changes = [flags] if flags else []
        if DRAFT in self.options:
            changes.append("no --draft")
        if COLD in self.options:
            changes.append(f"{self.options[COLD]} neurons read from storage on demand, which run does automatically")
        if EXPERTS in self.options:
            changes.append(f"{self.options[EXPERTS]} experts in memory and the others read from storage on demand, "
                           "which run does automatically")
        if STREAMED in self.options:
            changes.append(f"{self.options[STREAMED]} layers streamed from storage, which run does automatically")
        return " and ".join(changes)


def without(planner: Planner, config: RuntimeConfig, budget: int) -> Alternative | None:
    """Return the same request without the draft model; None without one, or if the model alone is too large."""
    if planner.draft_memory is None:
        return None
    plan = within(planner.alone(), to_request(config), budget)
    return Alternative(planner.draft_memory.without, plan.total_bytes) if plan else None


def cold(plan: MemoryPlan, read_bytes: float) -> Alternative:
    """Return the request of a plan with cold neurons, and the bytes that a token reads."""
    neurons = plan.cold.cold_bytes // plan.cold.neuron_bytes if plan.cold else 0
    return Alternative({COLD: neurons}, plan.total_bytes, round(read_bytes))


def kept_experts(plan: MemoryPlan, read_bytes: float) -> Alternative:
    """Return the request of a plan with slots for experts, and the bytes that a token reads."""
    return Alternative({EXPERTS: plan.experts.slots if plan.experts else 0}, plan.total_bytes, round(read_bytes))


def streamed(plan: MemoryPlan) -> Alternative:
    """The same request as a plan with streamed layers has it."""
    return Alternative({STREAMED: len(plan.parts)}, plan.total_bytes, plan.streamed_bytes)


def streaming(planner: Planner, config: RuntimeConfig, budget: int) -> Alternative | None:
    """Return the request with layers streamed from storage, with less context or KV pool if need be; None if none fits,
    or a smaller pool does without."""
    asked, given = config.ctx or 0, config
    longest = min(asked, planner.graph.config.max_position_embeddings)
    alone = own_pool(config) and _smaller(planner, config, budget, longest)
    if alone or not (smaller := _smaller(planner, config, budget, longest, placer=stream)):
        return None
    options, config = smaller
    found = stream(planner, to_request(config), budget)
    if found is None or within(planner, to_request(config), budget):
        return None
    if draft_memory := planner.draft_memory:
        try:
            draft_memory.check(found)
        except RequestError:
            model = streaming(planner.alone(), given, budget)
            return model and replace(model, options=draft_memory.without | model.options)
    options = {} if options == {"ctx": asked} else options
    return Alternative(options | {STREAMED: len(found.parts)}, found.total_bytes, found.streamed_bytes)


def alternatives(planner: Planner, config: RuntimeConfig, budget: int, rebuild: Rebuild) -> Iterator[Alternative]:
    """Smaller requests that fit, in the order in which they are to be tried: checkpoints of recurrent state, context
    (or the KV pool if its size was given), KV type, weight type.

    If a smaller KV or weight type does not help alone, it is offered together with others that help.
    """
    if fewer := fewer_checkpoints(planner.plan, to_request(config), budget):
        yield Alternative({STATE: int(fewer.request.state_memory or 0)}, fewer.total_bytes)
    kv, smaller = config.kv, _smaller_kv(config.kv)
    least = [kv] if own_pool(config) else smaller[-1:] or [kv]  # whose pool has as many bytes with every type
    lighter, same = list(storages(planner, budget, rebuild)), Options()
    stages: tuple[list[tuple[Planner, Options, str, bool]], ...] = (
        [(planner, same, kv, True)],
        [(planner, same, other, False) for other in smaller]
        + [(planner, same, other, True) for other in least if other != kv],
        [(other, stored, used, False) for used in (kv, *smaller[-1:]) for stored, other in lighter]
        + [(other, stored, least[0], True) for stored, other in lighter if stored["weights"] == LIGHTEST.dtype],
    )
    sizes: set[str | int] = set()
    for stage in stages:
        tried = (_fitting(config, budget, *candidate) for candidate in stage)
        if found := next(filter(None, tried), None):
            own = {POOL} if POOL in found.options else {found.options["ctx"]} if "ctx" in found.options else set()
            if not own & sizes:  # to change more must give more
                sizes |= own
                yield found


def _smaller_kv(kv: str) -> list[str]:
    """KV types with fewer bytes, the largest first."""
    sizes = {name: abi.kv_head_bytes(name, 64) for name in KV_TYPES}
    return sorted((other for other in sizes if sizes[other] < sizes[kv]), key=lambda other: -sizes[other])


def _fitting(
    config: RuntimeConfig, budget: int, planner: Planner, stored: Options, kv: str, shorter: bool
) -> Alternative | None:
    """The request with this storage and KV type if it fits, `shorter` with the largest context or pool that does."""
    asked, own = config.ctx or 0, planner.graph.config.max_position_embeddings
    below = own if asked > own else BLOCK * ((asked - 1) // BLOCK)  # run refuses more than the model's own
    options = stored | ({"kv": kv} if kv != config.kv else {})
    if shorter:
        if not (smaller := _smaller(planner, config, budget, below, kv)):
            return None
        options, config = options | smaller[0], smaller[1]
    plan = within(planner, to_request(config, kv=kv), budget)
    return Alternative(options, plan.total_bytes) if plan else None


def _smaller(planner: Planner, config: RuntimeConfig, budget: int, at_most: int, kv: str | None = None,
             placer: Placer = within) -> tuple[Options, RuntimeConfig] | None:
    """The request with the largest context that fits, or the largest KV pool if its size was given."""
    if own_pool(config):
        request = to_request(config, kv=kv)
        pool = largest_pool(lambda smaller: placer(planner, smaller, budget), request,
                            planner.plan(request).region("kv").nbytes)
        return ({POOL: pool}, replace(config, kv_tokens=None, kv_memory=pool)) if pool else None
    ctx = largest_ctx(planner, config, budget, at_most, kv, placer)
    return ({"ctx": ctx}, replace(config, ctx=ctx)) if ctx else None


def storages(planner: Planner, budget: int, rebuild: Rebuild) -> Iterator[tuple[Options, Planner]]:
    """Ways to store the weights in fewer bytes than they are now, the most bytes first.

    None if the lightest codes alone, without scales, exceed the budget: then no graph is built only to be refused;
    and none with a predictor, which belongs to the weights as they are.
    """
    if any(weight.kind == "predictor" for weight in planner.graph.weights):  # converted again, the model has none
        return
    values = sum(math.prod(weight.shape) for weight in planner.graph.weights if weight.kind != "vector")
    if values * LIGHTEST.storage.bits // 8 > budget:
        return
    for stored in STORAGES:
        try:
            graph = rebuild(requested_types(stored.dtype, stored.group_size or GROUP_SIZES[0]))
        except UnsupportedModelError:  # the recipe needs neurons by themselves, and converting stores none
            return
        nbytes = weights_file_bytes(graph)
        if nbytes < planner.weight_bytes:
            options: Options = {"weights": stored.dtype}
            options |= {"group_size": stored.group_size} if stored.quantised else {}
            yield options, Planner(graph, nbytes, draft_memory=planner.draft_memory)


def largest_ctx(planner: Planner, config: RuntimeConfig, budget: int, at_most: int, kv: str | None = None,
                placer: Placer = within) -> int:
    """Largest context that fits the budget, or 0: `at_most`, or whole blocks of 16 tokens below.

    All weights are in memory, or where `placer` puts them.
    """

    def fits(ctx: int) -> bool:
        return placer(planner, to_request(config, ctx, kv), budget) is not None

    if at_most < 1 or fits(at_most):
        return max(at_most, 0)
    if at_most < BLOCK or not fits(BLOCK):  # where the weights alone are too much, nothing is searched
        return 0
    return BLOCK * largest(lambda blocks: fits(BLOCK * blocks), at_most // BLOCK)
