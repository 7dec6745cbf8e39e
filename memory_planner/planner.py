"""The planner: from a graph and a request to the memory plan of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from edgeinfer.base.units import round_up
from edgeinfer.bundle import file_offsets
from edgeinfer.graph import Graph, KvAccess, Op, Sizes, Types
from edgeinfer.kernels import abi
from edgeinfer.registry import each, settled

from .kv_pool import ALIGNED, kv_region, place_kv, pool_sizes
from .lifetimes import Placement, place_activations, row_stride
from .plan import RESERVE, MemoryPlan, Region, Request
from .reasons import rotary, scored
from .shared_allocations import allocation_bytes
from .state import plan_state
from .weights import PlacedWeights, place_weights, weight_regions
from .windows import Windowed

PYTHON_RESERVE_BYTES = 121_000_000
"""The interpreter, NumPy, LLVM's loader, the command line: 108-118 MB measured on Linux, and 3 MB of the library that
samples progress bars (docs/measurements/memory.md)."""
_MANY = 1 << 40
"""Blocks of a pool that no sequences fill."""
VOCABULARY_RESERVE_BYTES = 360
"""Bytes of the tokenizer for each entry of the vocabulary."""


class DraftMemory(NamedTuple):
    """Second model or program in the same process."""

    plan: Callable[[MemoryPlan], MemoryPlan]
    """Turns the model's plan into that of model and draft."""
    without: dict[str, str | int]
    """Options to change in order to do without, as in `Alternative.options`."""
    check: Callable[[MemoryPlan], object] = lambda plan: None
    """Raises `RequestError` if the second one cannot run beside a plan that fits."""
    stores: tuple[KvAccess, ...] = ()
    """K and V that the second one stores in the blocks of the model's sequences."""


class Planner:
    """Plans runs of one model as it is stored.

    Parameters
    ----------
    graph : Graph
    weight_bytes : int
        Length of weights.bin.
    offsets : mapping of str to int, optional
        Where each weight begins in weights.bin; by default where converting would put it.
    draft_memory : DraftMemory, optional
        Memory of a draft that each plan has room for, too.
    """

    def __init__(self, graph: Graph, weight_bytes: int, offsets: Mapping[str, int] | None = None,
                 draft_memory: DraftMemory | None = None):
        self.graph = graph
        self.weight_bytes = weight_bytes
        self.draft_memory = draft_memory
        self._offsets = offsets
        home = graph.buffers()
        self._logits = [name for name in home if home[name] == home[graph.logits.name]]  # those that are capped, too
        self._kinds = one_of_each(graph)
        self._accesses = [access for op in graph.ops if (access := op.kv)]
        self._accesses += draft_memory.stores if draft_memory else ()
        self._stateful = [op for op in graph.ops if op.state_bytes]
        self._instructions: dict[str, int] = {}
        self._scratch: dict[tuple[int, ...], tuple[int, int]] = {}
        self._activations: dict[tuple[int, int], tuple[dict[str, Placement], int]] = {}
        self._weights: dict[tuple[Any, ...], PlacedWeights] = {}

    def alone(self) -> Planner:
        """Return a planner of the model without a draft."""
        other = copy.copy(self)
        other.draft_memory, draft_memory = None, self.draft_memory.stores if self.draft_memory else ()
        other._accesses = [access for access in self._accesses if access not in draft_memory]
        return other

    def plan(self, request: Request) -> MemoryPlan:
        """Give every region of a run its bytes, and everything in it its offset."""
        own = self._plan(request)
        return self.draft_memory.plan(own) if self.draft_memory else own

    def _plan(self, request: Request) -> MemoryPlan:
        """Return the plan without the second model."""
        c, graph = self.graph.config, self.graph
        request = self._sized(replace(request, techniques=settled(request.techniques, c.num_hidden_layers)))
        boundaries = boundaries_of(request)
        placements, arena = self._place_activations(request)
        weights = self._place_weights(request)
        windowed, kv_layers, kv_bytes = place_kv(self._accesses, request, bool(boundaries))
        flags = request.kv_blocks * abi.BLOCK_TOKENS  # of a stage
        pruned = Placement("kv", kv_bytes, len(boundaries) * flags, flags) if boundaries else None
        rows = request.rows_of(graph.logits)
        logits = Placement("logits", 0, rows * row_stride(graph.logits) + 64, row_stride(graph.logits))
        rope_row = 2 * 4 * round_up(c.longest_rotation // 2, 16)
        turned = len(c.rotations) * c.table_rows(request.ctx) * rope_row
        slopes = round_up(4 * c.num_attention_heads, 64) if c.alibi else 0
        splits = -(-request.ctx // (abi.BLOCK_TOKENS * abi.SPLIT_BLOCKS))
        sizes = sizes_of(graph.types, splits, request)
        state = plan_state(self._stateful, request.sequences, request.state_memory)
        thread, shared = self._scratch_of(sizes)
        regions = (
            *weight_regions(graph, self.weight_bytes, request, weights),
            kv_region(request, kv_layers, kv_bytes, windowed, pruned),
            Region("activations", arena + 64, f"{request.tokens} tokens a pass, shared by lifetimes"),
            Region("logits", logits.nbytes, f"{rows} x {graph.logits.width} values"),
            Region("constants", turned + slopes + 64, rotary(c, request.ctx)),
            Region("scratch", round_up(request.threads * thread, 64) + shared + 64,
                   f"{request.threads} threads; partial attention of {splits} splits{scored(graph, sizes)}"),
            *([Region("state", state.nbytes, state.reason)] if state else []),
            *(region for one, settings in each(request.techniques) for region in one.regions(graph, request, settings)),
            Region("tables", self._table_bytes(request, windowed) + weights.table_bytes,
                   "ctx block, tokens, block tables, program"),
            Region("python", PYTHON_RESERVE_BYTES + VOCABULARY_RESERVE_BYTES * c.vocab_size,
                   f"interpreter, libraries, tokenizer of {c.vocab_size}", RESERVE),
        )
        allocations = {**placements, **dict.fromkeys(self._logits, logits), **weights.allocations}
        return MemoryPlan(request, regions, allocations, request.kv_blocks, kv_layers, thread, splits, rope_row,
                          weights.parts, weights.cold, weights.experts, pruned, weights.filed, windowed, state,
                          boundaries)

    def _scratch_of(self, sizes: Sizes) -> tuple[int, int]:
        """Return the scratch bytes of a thread, and those that all share; once for all contexts."""
        if sizes[1:] not in self._scratch:
            self._scratch[sizes[1:]] = scratch(self._kinds, sizes)
        return self._scratch[sizes[1:]]

    def _place_activations(self, request: Request) -> tuple[dict[str, Placement], int]:
        """Lay out activations, once for all contexts."""
        rows = (request.tokens, request.outputs)
        if rows not in self._activations:
            self._activations[rows] = place_activations(self.graph, *rows)
        return self._activations[rows]

    def _place_weights(self, request: Request) -> PlacedWeights:
        """Lay out weights, once for all contexts."""
        residency = (request.residency, request.hot, request.slots, request.expert_slots)
        if residency not in self._weights:
            self._weights[residency] = place_weights(self.graph, *self._stored, request)
        return self._weights[residency]

    @cached_property
    def _stored(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Offset of each weight in its file, and the bytes of the allocation that it begins."""
        return self._offsets or file_offsets(self.graph), allocation_bytes(self.graph)

    def _sized(self, request: Request) -> Request:
        """Return the request with the tokens that a KV pool of its bytes holds; one block at least."""
        if request.kv_memory is None:
            return request
        memory, request = request.kv_memory, replace(request, kv_memory=None)

        def nbytes(blocks: int, windows: int) -> int:
            return self._kv_bytes(request.of_pool(blocks, windows))

        more = nbytes(_MANY + 1, 1) - nbytes(_MANY, 1)  # for a block; 0 where all layers have a window
        most = memory // more if more else request.full_pool.kv_blocks
        return request.of_pool(*pool_sizes(lambda *sizes: nbytes(*sizes) <= memory, request, most))

    def _kv_bytes(self, request: Request) -> int:
        """Return the bytes of the KV region."""
        boundaries = boundaries_of(request)
        flags = len(boundaries) * request.kv_blocks * abi.BLOCK_TOKENS
        return place_kv(self._accesses, request, bool(boundaries))[2] + flags + ALIGNED

    def _table_bytes(self, request: Request, windowed: Windowed | None) -> int:
        """Return the bytes of the program, of ctx, and of the tables that describe a forward pass."""
        if request.kv not in self._instructions:
            graph = self.graph
            self._instructions[request.kv] = sum(len(op.kernels(graph.types, request.kv)) for op in graph.ops)
        listed = 4 * -(-request.ctx // abi.BLOCK_TOKENS) * (2 if windowed else 1)
        return abi.CTX_BYTES + request.tokens * (abi.TOKEN_BYTES
                                                 + 24) + abi.INSTRUCTION_BYTES * self._instructions[request.kv] \
            + request.sequences * (abi.SEQUENCE_BYTES + 8 * abi.MAX_STEPS + listed)


def boundaries_of(request: Request) -> tuple[int, ...]:
    """Return the layers after which prompt tokens may be pruned, by techniques whose settings are resolved."""
    return next((found for one, settings in each(request.techniques) if (found := one.boundaries(settings))), ())


def one_of_each(graph: Graph) -> list[Op]:
    """Return one operation of each kind and size: equal operations of layers are asked once."""
    found = {}
    for op in graph.ops:
        rows = tuple((x.width, x.dtype, x.group_size) for x in (op.out, *op.inputs))
        head = getattr(op, "head_dim", 0)
        found[type(op), rows, head, tuple((w.shape, graph.types[w.name]) for w in op.weights)] = op
    return list(found.values())


def sizes_of(types: Types, splits: int, request: Request) -> Sizes:
    """Return the sizes that scratch may depend on in a run."""
    return Sizes(types, splits, min(request.tokens, abi.ATTENTION_TOKENS), request.decoded_tokens)


def scratch(ops: Iterable[Op], sizes: Sizes) -> tuple[int, int]:
    """Return the scratch bytes of a thread, and of the shared scratch: the most that any operation needs."""
    needs = [op.scratch(sizes) for op in ops]
    return round_up(max(n.thread_bytes for n in needs) + 64, 64), max(n.shared_bytes for n in needs)
