"""The memory of a run on onnxruntime, on both sides: the device that runs the model, and this process beside it.

What onnxruntime takes for itself is not known before it runs. Such regions say so in their reason; those of CUDA come
from its sources and documents and were not measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from edgeinfer.config import CUDA, Recipe, RuntimeConfig
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.graph import Graph
from edgeinfer.memory_planner import (
    DEVICE,
    PYTHON_RESERVE_BYTES,
    VOCABULARY_RESERVE_BYTES,
    Alternative,
    MemoryPlan,
    Region,
    Request,
    process_budget,
    resolve,
    to_request,
)
from edgeinfer.sizes import format_size

from .data import data_bytes
from .devices import Provider
from .driver import gpu_free_bytes
from .flavour import Flavour, Heads
from .lowering import Lowering
from .slots import FLOATS, slot_bytes
from .weights import Stored

LIBRARY_BYTES, CUDA_LIBRARY_BYTES = 60_000_000, 600_000_000
"""Of this process: onnxruntime on its CPU provider (52 MB measured); with CUDA's libraries (an estimate)."""
CONTEXT_BYTES = 500_000_000
"""Of a GPU's memory: CUDA's context and the code of the libraries (an estimate)."""
GRAPH_BYTES = 10_000_000
"""Of the graph of a decode step, by number of slots (an estimate)."""
BLOCK = 16
"""Tokens in which contexts that fit are given."""


def device_config(config: RuntimeConfig, provider: Provider) -> RuntimeConfig:
    """Return the settings of a run as its device takes them; raise `UsageError` for what it cannot do, by its name."""
    device = provider.device
    for step in config.recipe.steps:
        mode = dict(step.settings).get("mode")
        if step.name == "fuse_input" or (step.name == "sparse" and mode in ("off", "exact")) \
                or (step.name == "head" and mode == "exact"):
            continue
        raise UsageError(f"Device {device} runs models exactly and as they are stored; it has no pass {step}: leave it "
                         "out, or run with --device cpu.")
    if config.kv not in provider.kv:
        why = {"int8": "onnxruntime's int8 KV has constant scales, and ours one for each row and head",
               "f32": "attention in f32 does not exist there"}.get(config.kv, "its model has another type")
        raise UsageError(f"--kv {config.kv} is not offered on device {device}, for {why}; choose "
                         f"{' or '.join(provider.kv)}, or run with --device cpu.")
    for name, asked in (("--lazy", config.lazy), ("--mlock", config.mlock), ("--no-mmap", not config.mmap)):
        if asked:
            raise UsageError(f"{name} is not offered on device {device}; leave it out, or run with --device cpu.")
    return replace(config, recipe=Recipe(()))


class DevicePlanner:
    """Plans runs of one model on a provider.

    Parameters
    ----------
    graph : Graph
        Without passes.
    provider : Provider
    """

    def __init__(self, graph: Graph, provider: Provider):
        self.graph, self.provider = graph, provider
        self._stored: dict[str, list[Stored]] = {}

    def flavour(self, kv: str) -> Flavour:
        """Return what the model is lowered for; its tables have all positions, so that it serves every context."""
        return Flavour(dtype=kv).checked(self.graph.config)

    def plan(self, request: Request) -> MemoryPlan:
        """Give every region its bytes."""
        blocks = request.sequences * (-(-request.ctx // BLOCK) + 1)  # what a pool of so many contexts would have
        return MemoryPlan(request, tuple(self._regions(request)), {}, blocks, {}, 0, 0, 0)

    def _regions(self, request: Request) -> Iterator[Region]:
        c, kv, heads = self.graph.config, request.kv, Heads.of(self.graph.config)
        if kv not in self._stored:
            self._stored[kv] = list(Lowering(self.graph, self.flavour(kv)).run().stored.values())
        stored, cuda = self._stored[kv], self.provider.device == CUDA
        here = DEVICE if cuda else "private"
        weights, codes = data_bytes(stored), sum(one.nbytes for one in stored if one.kind == "u8")
        yield Region("weights", weights, f"as they are in the model, {kv} where they are not quantised",
                     DEVICE if cuda else "mapped")
        yield Region("prepacked", codes, "onnxruntime's own copy of the quantised matrices", here)
        slot = slot_bytes(c.num_hidden_layers, heads, request.ctx, kv)
        yield Region("kv", request.sequences * slot,
                     f"{kv}, {request.sequences} slots of {request.ctx} positions, {slot} bytes each", here)
        yield Region("arena", self._arena(request, cuda), f"activations of {request.tokens} tokens, at most", here)
        if cuda:
            yield Region("context", CONTEXT_BYTES + GRAPH_BYTES * request.sequences,
                         f"CUDA's context and code, {request.sequences} graphs of decode steps, an estimate", DEVICE)
            yield Region("staging", max(one.nbytes for one in stored) + slot * request.sequences
                         // (2 * c.num_hidden_layers), "the largest tensor, and a layer's slots, on their way")
        yield Region("logits", 2 * request.outputs * c.vocab_size * 4, f"2 x {request.outputs} x {c.vocab_size} values")
        yield Region("onnxruntime", CUDA_LIBRARY_BYTES if cuda else LIBRARY_BYTES, "its libraries", "reserve")
        yield Region("python", PYTHON_RESERVE_BYTES + VOCABULARY_RESERVE_BYTES * c.vocab_size,
                     f"interpreter, libraries, tokenizer of {c.vocab_size}", "reserve")

    def _arena(self, request: Request, cuda: bool) -> int:
        """Activations that live together, and the CPU provider's scores; it rounds up to powers of two."""
        c, size = self.graph.config, FLOATS[request.kv]().itemsize
        heads = Heads.of(c)
        row = 3 * c.intermediate_size + 4 * c.hidden_size + 2 * (heads.query + 2 * heads.kv) * heads.stored_dim
        rows = request.tokens * row * size + request.outputs * c.vocab_size * (4 + size)
        scores = 0 if cuda else heads.query * request.tokens * request.ctx * 4
        return rows + scores if cuda else 2 * (rows + scores)

    def smaller(self, config: RuntimeConfig, fits: Callable[[MemoryPlan], bool]) -> Iterator[Alternative]:
        """Yield smaller requests that fit: a shorter context."""
        if ctx := longest_ctx(self, config, fits, min(int(config.ctx or 0), self.graph.config.max_position_embeddings)):
            yield Alternative({"ctx": ctx}, self.plan(to_request(config, ctx)).total_bytes)

    def refusal(self, plan: MemoryPlan, host: int, device: int | None, options: list[Alternative]) -> str:
        """The sentence for a plan that does not fit."""
        here = plan.total_bytes > host
        needs, has = (plan.total_bytes, host) if here else (plan.device_bytes, device or 0)
        advice = "Fits: " + "; ".join(map(str, options)) if options else "Nothing smaller of this model fits"
        return (f"The run needs {format_size(needs)} of {'this process' if here else 'the GPU'}'s memory, and the "
                f"budget is {format_size(has)}; layers are not streamed on device {self.provider.device}. {advice}; or "
                "run with --device cpu.")


def memory_of(provider: Provider, config: RuntimeConfig) -> tuple[int, int | None]:
    """Return the memory that this process may take, and what is free of the device's; None where that is this process,
    or no GPU is found here.
    """
    host = process_budget() if config.budget_bytes is None else config.budget_bytes
    if provider.device != CUDA:
        return host, None
    try:
        return host, gpu_free_bytes()
    except UsageError:  # a run is refused before it plans
        return host, None


def fit_device(planner: DevicePlanner, config: RuntimeConfig, beside: MemoryPlan | None = None) -> MemoryPlan:
    """Plan a run within the memory of this process and of its device, of which something else may have taken a part.

    Raises
    ------
    BudgetError
        It does not fit; the sentence has what would.
    """
    config = resolve(config, planner.graph.config)
    plan = planner.plan(to_request(config))
    host, device = memory_of(planner.provider, config)
    if beside and config.budget_bytes:  # else it is what is left already, as of the device
        host -= sum(r.nbytes for r in beside.regions if r.kind not in (DEVICE, "reserve"))

    def fits(other: MemoryPlan) -> bool:
        return other.total_bytes <= host and (device is None or other.device_bytes <= device)

    if fits(plan):
        return plan
    options = list(planner.smaller(config, fits))
    short = host if plan.total_bytes > host else device or 0
    raise BudgetError(planner.refusal(plan, host, device, options), plan, short, tuple(options))


def longest_ctx(planner: DevicePlanner, config: RuntimeConfig, fits: Callable[[MemoryPlan], bool],
                at_most: int) -> int:
    """Return the longest context that fits: `at_most`, or a multiple of 16 below, or 0."""
    if fits(planner.plan(to_request(config, at_most))):
        return at_most
    low, high = 0, (at_most - 1) // BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(planner.plan(to_request(config, BLOCK * middle))) else (low, middle - 1)
    return BLOCK * low


def most_sequences(planner: DevicePlanner, config: RuntimeConfig, fits: Callable[[MemoryPlan], bool]) -> int:
    """Return how many sequences of this context fit, 64 at most."""
    found = 0
    while found < 64 and fits(planner.plan(to_request(replace(config, max_sequences=found + 1)))):
        found += 1
    return found
