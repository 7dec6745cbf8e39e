"""The memory plan of a run: every region with its bytes and the reason for them, before anything is allocated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from edgeinfer.bundle import file_offsets
from edgeinfer.dataclass import dataclass
from edgeinfer.graph import Graph, KvAccess, Op, Sizes, TokenRows, Types
from edgeinfer.kernels import abi
from edgeinfer.pruning import Schedule
from edgeinfer.sizes import format_size, round_up

from .blocks import shared_blocks
from .cold import ColdPlan, masked
from .expert_slots import PAGE_BYTES, READ_BYTES, ExpertsPlan
from .lifetimes import Placement, place_activations, row_stride
from .reasons import pools, rotary, scored, types_of
from .windows import Windowed

PYTHON_RESERVE_BYTES = 118_000_000
"""The interpreter, NumPy, LLVM's loader, the command line: 108-118 MB measured on Linux (docs/memory.md)."""
VOCABULARY_RESERVE_BYTES = 340
"""Of the tokenizer, for each entry of the vocabulary."""


@dataclass(frozen=True)
class Request:
    """What is to be planned; all fields concrete."""

    ctx: int
    """Tokens of one sequence."""
    kv: str
    """int8, f16 or f32."""
    threads: int
    tokens: int
    """Most tokens of one walk (prefill chunk or parallel sequences)."""
    outputs: int
    """Most rows of logits of one walk."""
    sequences: int
    """Sequences alive at once."""
    mlock: bool = False
    """Whether the weights are locked into memory."""
    homes: tuple[tuple[str, str], ...] = ()
    """Weights that do not lie in the mapped file, by name: ``resident`` or ``streamed``; the name ``*`` means all
    others."""
    hot: tuple[int, ...] = ()
    """Resident neurons of each layer's FFN, where masks leave others to be read when they are wanted; none: all."""
    slots: int = 0
    """Clusters of other neurons that are kept."""
    expert_slots: int = 0
    """Experts that are kept, where all are read when a token wants them; 0: they lie where other weights do."""
    own_tokens: int | None = None
    """Tokens that each sequence may have of its own behind a prompt of all; None: each may have a whole context."""
    lazy: Schedule | None = None
    """Which share of a prompt's tokens goes through which layers."""

    @property
    def decoded_tokens(self) -> int:
        """Most tokens of a walk in decode role: one of each sequence, or as many as rows of logits."""
        return min(self.tokens, max(self.sequences, self.outputs))

    @property
    def kv_blocks(self) -> int:
        """Blocks that the sequences may hold together."""
        return self.blocks_of(abi.BLOCK_TOKENS)

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks of so many tokens each the sequences may hold together."""
        if self.sequences > 1 and self.own_tokens is not None:
            own = min(self.own_tokens, self.ctx)
            prompt = round_up(self.ctx - own + 1, tokens) - 1  # that ends in the middle of a block
            return shared_blocks(prompt, own, self.sequences, tokens)
        copies = 1 if self.sequences > 1 else 0  # of last blocks that sequences share
        return self.sequences * (-(-self.ctx // tokens) + copies)


PRIVATE, MAPPED, LOCKED, RESERVE, DEVICE = "private", "mapped", "locked", "reserve", "device"
"""How a region is kept: taken up front and never given back; pages of a file, which the system may drop and read again;
such pages locked into memory; set aside for what others allocate; in the memory of another device than this process."""
STREAM_BUFFERS = 2
"""Parts of streamed weights (layers) that are in memory at once: the one in work and the one that is read ahead."""


@dataclass(frozen=True)
class Region:
    """One stretch of memory."""

    name: str
    nbytes: int
    reason: str
    """What it is for, with the numbers that give its size."""
    kind: str = PRIVATE
    """private, mapped, locked, reserve or device."""

    @property
    def bytes(self) -> int:
        """Same as nbytes, by the name that reports use."""
        return self.nbytes


@dataclass(frozen=True)
class MemoryPlan:
    """All regions of a run and what lies where in them."""

    request: Request
    regions: tuple[Region, ...]
    places: dict[str, Placement]
    """Where each tensor and each weight lies, by name."""
    kv_blocks: int
    """Blocks of the pool; each holds some tokens (`Runner.block_tokens`) of all layers."""
    kv_layers: dict[int, Placement]
    """Planes of each layer that stores K and V (abi.BLOCK_TOKENS); `stride` is what a block has in all of them."""
    thread_scratch_bytes: int
    splits: int
    """Attention splits of the longest context."""
    rope_row_bytes: int
    """Constants: bytes of one position's cosines and sines."""
    parts: tuple[tuple[str, ...], ...] = ()
    """Names of streamed weights by part: what is read together, in the order of use. Part i lies in buffer
    i % STREAM_BUFFERS."""
    cold: ColdPlan | None = None
    """Neurons that are read when they are wanted, where there are any."""
    experts: ExpertsPlan | None = None
    """Experts that are read when they are wanted, where there are any."""
    holes: Placement | None = None
    """With a schedule of pruning: which tokens of a block each stage but the first lacks (abi.FLAG_HOLES); the stages
    one after the other, `stride` bytes each."""
    filed: tuple[str, ...] = ()
    """Tables that stay in their file: of these a token reads a row, and the sum has the pages of rows alone."""
    windowed: Windowed | None = None
    """Layers whose blocks are of a smaller pool, where there are any: they keep what their window sees."""

    @property
    def streamed_bytes(self) -> int:
        """Weights that each walk reads from storage."""
        return sum(self.places[name].nbytes for part in self.parts for name in part)

    @property
    def filed_bytes(self) -> int:
        """Of tables that stay in their file."""
        return sum(self.places[name].nbytes for name in self.filed)

    @property
    def stored_bytes(self) -> int:
        """Weights that are not in memory from the start: streamed ones, cold neurons, and experts."""
        cold, experts = self.cold.cold_bytes if self.cold else 0, self.experts.stored_bytes if self.experts else 0
        return self.streamed_bytes + cold + experts

    @property
    def unstreamed_bytes(self) -> int:
        """What `total_bytes` would be with all weights in memory."""
        instead = sum(r.nbytes for r in self.regions if r.name in ("streamed", "cold", "experts"))
        return self.total_bytes + self.stored_bytes - instead

    @property
    def shared_scratch_offset(self) -> int:
        """Where the scratch that threads share begins, behind their own: partial attention, sums of neurons."""
        return round_up(self.request.threads * self.thread_scratch_bytes, 64)

    @property
    def total_bytes(self) -> int:
        """Sum of all regions of the process: the most that it holds, weights included."""
        return sum(r.nbytes for r in self.regions if r.kind != DEVICE)

    @property
    def device_bytes(self) -> int:
        """Memory of a device beside the process's, such as a GPU's."""
        return sum(r.nbytes for r in self.regions if r.kind == DEVICE)

    @property
    def resident_bytes(self) -> int:
        """Memory that stays taken until the run ends: all but mapped weights that are not locked."""
        return self.total_bytes - self.reclaimable_bytes

    @property
    def mapped_bytes(self) -> int:
        """Weights, which are pages of their file: shared by all processes that map it."""
        return sum(r.nbytes for r in self.regions if r.kind in (MAPPED, LOCKED))

    @property
    def reclaimable_bytes(self) -> int:
        """Mapped weights that the system may drop when memory is short, and read again when they are needed."""
        return sum(r.nbytes for r in self.regions if r.kind == MAPPED)

    @property
    def logits_stride(self) -> int:
        """Bytes from one row of logits to the next."""
        return next(p.stride for p in self.places.values() if p.region == "logits")

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block in one layer, in the layer that needs most."""
        return max((layer.stride for layer in self.kv_layers.values()), default=0)

    def kv_pool(self, layer: int) -> int:
        """Blocks of the pool that a layer's K and V are in."""
        return self.windowed.blocks if self.windowed and layer in self.windowed.layers else self.kv_blocks

    @property
    def context_kv_bytes(self) -> tuple[int, int]:
        """K and V of one sequence with a full context, and what they would be, did all layers keep all of it."""
        whole = sum(layer.stride for layer in self.kv_layers.values()) // abi.BLOCK_TOKENS * self.request.ctx
        if not self.windowed:
            return whole, whole
        windowed = sum(self.kv_layers[layer].stride for layer in self.windowed.layers) // abi.BLOCK_TOKENS
        return whole - windowed * max(0, self.request.ctx - self.windowed.positions), whole

    def region(self, name: str) -> Region:
        """The region of that name."""
        return next(r for r in self.regions if r.name == name)

    def beside(self, draft: MemoryPlan) -> MemoryPlan:
        """Plan a second model, such as a draft, that runs in the same process on the same threads.

        It has regions of its own, all but the interpreter's; their names begin with ``draft_``.
        """
        own = tuple(replace(r, name=f"draft_{r.name}") for r in draft.regions if r.kind != RESERVE)
        return replace(self, regions=self.regions + own)


class Beside(NamedTuple):
    """What runs beside a model in the same process."""

    plan: Callable[[MemoryPlan], MemoryPlan]
    """From the model's plan to that of both."""
    without: dict[str, str | int]
    """What to change to do without, as in `Alternative.options`."""


@dataclass(frozen=True)
class _Weights:
    """Where the weights lie."""

    places: dict[str, Placement]
    parts: tuple[tuple[str, ...], ...]
    """Streamed ones."""
    resident_bytes: int
    buffer_bytes: int
    """Of one part of the streamed ones."""
    cold: ColdPlan | None
    experts: ExpertsPlan | None
    filed: tuple[str, ...]
    """Tables that stay in their file, of which a token reads a row."""

    @property
    def filed_bytes(self) -> int:
        """Of these tables."""
        return sum(self.places[name].nbytes for name in self.filed)

    @property
    def table_bytes(self) -> int:
        """Of the records and tables that streaming needs."""
        pieces = (2 + self.places[name].nbytes // READ_BYTES for part in self.parts for name in part)
        streamed = len(self.parts) * (abi.RECORD_BYTES + abi.PART_BYTES) + abi.PIECE_BYTES * sum(pieces)
        records = (2 + abi.COLD_PARTS) * abi.RECORD_BYTES
        cold = self.cold.queue_bytes + records * len(self.cold.hot) if self.cold else 0
        return streamed + cold + (self.experts.queue_bytes if self.experts else 0)


class Planner:
    """Plans runs of one model as it is stored.

    Parameters
    ----------
    graph : Graph
    weight_bytes : int
        Length of weights.bin.
    offsets : mapping of str to int, optional
        Where each weight begins in weights.bin; by default where converting would put it.
    beside : Beside, optional
        What each plan has room for too.
    """

    def __init__(self, graph: Graph, weight_bytes: int, offsets: Mapping[str, int] | None = None,
                 beside: Beside | None = None):
        self.graph = graph
        self.weight_bytes = weight_bytes
        self.beside = beside
        self._offsets = offsets
        self._kinds = one_of_each(graph)
        self._stores = [op.kv for op in graph.ops if op.kv and op.kv.stores]
        self._state_bytes = sum(op.state_bytes for op in graph.ops)
        self._records: dict[str, int] = {}
        self._scratch: dict[tuple[int, ...], tuple[int, int]] = {}
        self._activations: dict[tuple[int, int], tuple[dict[str, Placement], int]] = {}
        self._weights: dict[tuple[Any, ...], _Weights] = {}

    def alone(self) -> Planner:
        """Return a planner of the model without what runs beside it."""
        other = copy.copy(self)
        other.beside = None
        return other

    def plan(self, request: Request) -> MemoryPlan:
        """Give every region of a run its bytes, and everything in it its place."""
        own = self._plan(request)
        return self.beside.plan(own) if self.beside else own

    def _plan(self, request: Request) -> MemoryPlan:
        c, graph = self.graph.config, self.graph
        lazy = request.lazy and request.lazy.placed(c.num_hidden_layers)
        request = replace(request, lazy=lazy)
        rows = (request.tokens, request.outputs)
        if rows not in self._activations:  # whatever the context
            self._activations[rows] = place_activations(graph, *rows)
        placements, arena = self._activations[rows]
        homes = (request.homes, request.hot, request.slots, request.expert_slots)
        if homes not in self._weights:
            self._weights[homes] = self._place_weights(request)
        weights = self._weights[homes]
        per_sequence = -(-request.ctx // abi.BLOCK_TOKENS)
        kv_blocks = request.kv_blocks
        windowed, kv_layers, kv_bytes = self._place_kv(request)
        flags = kv_blocks * abi.BLOCK_TOKENS  # of a stage
        holes = Placement("kv", kv_bytes, len(lazy.keep) * flags, flags) if lazy else None
        logits = Placement("logits", 0, request.outputs * row_stride(graph.logits) + 64, row_stride(graph.logits))
        rope_row = 2 * 4 * round_up(c.longest_rotation // 2, 16)
        splits = -(-request.ctx // (abi.BLOCK_TOKENS * abi.SPLIT_BLOCKS))
        sizes = sizes_of(graph.types, splits, request)
        if sizes[1:] not in self._scratch:
            self._scratch[sizes[1:]] = scratch(self._kinds, sizes)
        thread, shared = self._scratch[sizes[1:]]
        tables = abi.CTX_BYTES + request.tokens * (abi.TOKEN_BYTES + 24)
        if request.kv not in self._records:
            self._records[request.kv] = sum(len(op.kernels(graph.types, request.kv)) for op in graph.ops)
        tables += abi.RECORD_BYTES * self._records[request.kv]
        listed = 4 * per_sequence * (2 if windowed else 1)
        tables += request.sequences * (abi.SEQUENCE_BYTES + 8 * abi.MOST_STEPS + listed)
        tables += weights.table_bytes
        several = request.sequences > 1 and request.own_tokens is not None
        held = f" (a prompt once, {request.sequences} x {request.own_tokens} tokens)" if several else ""
        strides = [layer.stride for layer in kv_layers.values()]
        regions = (
            *self._weight_regions(request, weights),
            Region("kv", kv_bytes + (holes.nbytes if holes else 0) + 64,
                   f"{request.kv}{pools(kv_blocks, held, strides, windowed)}"
                   + (f"; {holes.nbytes} bytes say what later layers lack of prompts" if holes else "")),
            Region("activations", arena + 64, f"{request.tokens} tokens a walk, shared by lifetimes"),
            Region("logits", logits.nbytes, f"{request.outputs} x {c.vocab_size} values"),
            Region("constants", len(c.rotations) * request.ctx * rope_row + 64, rotary(c, request.ctx)),
            Region("scratch", round_up(request.threads * thread, 64) + shared + 64,
                   f"{request.threads} threads; partial attention of {splits} splits{scored(graph, sizes)}"),
            *self._state(request),
            *self._aux(request),
            Region("tables", tables, "ctx block, tokens, block tables, program"),
            Region("python", PYTHON_RESERVE_BYTES + VOCABULARY_RESERVE_BYTES * c.vocab_size,
                   f"interpreter, libraries, tokenizer of {c.vocab_size}", RESERVE),
        )
        home_of = graph.homes()  # of logits that are capped where they lie, too
        made = (name for name, home in home_of.items() if home == home_of[graph.logits.name])
        places = {**placements, **dict.fromkeys(made, logits), **weights.places}
        return MemoryPlan(request, regions, places, kv_blocks, kv_layers, thread, splits, rope_row, weights.parts,
                          weights.cold, weights.experts, holes, weights.filed, windowed)

    def _place_kv(self, request: Request) -> tuple[Windowed | None, dict[int, Placement], int]:
        """Lay out K and V: layers that keep all, then those that keep what their window sees."""
        windowed = Windowed.of((op.kv for op in self.graph.ops if op.kv), request)
        if not windowed:
            return None, *place_kv(self._stores, request.kv, request.kv_blocks)
        whole = [access for access in self._stores if access.layer not in windowed.layers]
        recent = [access for access in self._stores if access.layer in windowed.layers]
        layers, end = place_kv(whole, request.kv, request.kv_blocks)
        others, end = place_kv(recent, request.kv, windowed.blocks, end)
        return windowed, {**layers, **others}, end

    def _place_weights(self, request: Request) -> _Weights:
        """Place each weight."""
        graph, types, homes = self.graph, self.graph.types, dict(request.homes)
        offsets = self._offsets or file_offsets((w.name, types[w.name], w.shape) for w in graph.weights)
        layers = {weight.name: op.layer for op in graph.ops for weight in op.weights}
        places: dict[str, Placement] = {}
        parts: dict[int | None, list[str]] = {}
        resident, cold = 0, ColdPlan.of(graph, request.hot, request.slots) if request.hot else None
        hot = {op.weight.name: cold.hot[op.layer or 0] for op in masked(graph)} if cold else {}
        experts = ExpertsPlan.of(graph, offsets, request.expert_slots) if request.expert_slots else None
        for weight in graph.weights:
            name, nbytes = weight.name, types[weight.name].nbytes(weight.shape)
            if cold and name in hot:
                nbytes = hot[name] * cold.neuron_bytes
            home = homes.get(name, homes.get("*", "weights")) if weight.kind != "predictor" else "resident"
            if experts and weight.kind == "experts":
                home = "experts"
            places[name] = Placement(home, offsets[name] if home == "weights" else resident, nbytes)
            if home == "resident":
                resident = round_up(resident + nbytes, 64)
        for name, layer in layers.items():
            if places[name].region == "streamed":
                parts.setdefault(layer, []).append(name)
        buffer = 0
        for names in parts.values():  # as far behind the beginning of a page as in the file
            end = 0
            for name in names:
                within = offsets[name] % PAGE_BYTES
                places[name] = replace(places[name], offset=end + within)
                end = round_up(end + within + places[name].nbytes, PAGE_BYTES)
            buffer = max(buffer, end)
        for number, names in enumerate(parts.values()):
            for name in names:
                at = places[name].offset + number % STREAM_BUFFERS * buffer
                places[name] = replace(places[name], offset=at)
        filed = tuple(w.name for w in graph.weights if w.kind == "rows" and places[w.name].region == "weights")
        return _Weights(places, tuple(map(tuple, parts.values())), resident, buffer, cold, experts, filed)

    def _weight_regions(self, request: Request, weights: _Weights) -> Iterator[Region]:
        def stored(home: str) -> str:
            return types_of(self.graph, {name for name, place in weights.places.items() if place.region == home})

        if any(place.region == "weights" and name not in weights.filed for name, place in weights.places.items()):
            yield Region("weights", self.weight_bytes - weights.filed_bytes, stored("weights"),
                         LOCKED if request.mlock else MAPPED)
        if weights.filed:
            yield self._rows(request, weights)
        if weights.resident_bytes:
            yield Region("resident", weights.resident_bytes + 64,
                         f"weights in memory of the process: {stored('resident')}")
        if weights.parts:
            yield Region("streamed", STREAM_BUFFERS * weights.buffer_bytes + 64,
                         f"{STREAM_BUFFERS} buffers of {weights.buffer_bytes} bytes; "
                         f"{len(weights.parts)} layers take turns")
        if cold := weights.cold:
            yield Region("cold", cold.nbytes, f"{cold.slots} slots of {cold.cluster_bytes} bytes for neurons that are "
                                              "read when they are wanted")
        if experts := weights.experts:
            yield Region("experts", experts.nbytes, f"{experts.slots} slots of {experts.slot_bytes} bytes for "
                                                    f"{experts.total} experts that are read when they are wanted")

    def _rows(self, request: Request, weights: _Weights) -> Region:
        """Pages of tables that stay in their file: as many as the contexts' tokens have rows on."""
        tables = [op.table for op in self.graph.ops if isinstance(op, TokenRows) and op.table.name in weights.filed]
        rows = [self.graph.types[table.name].tile_bytes(table.shape[1]) for table in tables]
        tokens = request.ctx * request.sequences
        most = tokens * sum(round_up(row, PAGE_BYTES) + PAGE_BYTES for row in rows)
        return Region("rows", min(weights.filed_bytes, most), f"{tokens} rows x {sum(rows)} B, "
                      f"{format_size(weights.filed_bytes)} stay in the file", MAPPED)

    def _state(self, request: Request) -> Iterator[Region]:
        if self._state_bytes:
            yield Region("state", request.sequences * self._state_bytes + 64,
                         f"recurrent state of {request.sequences} sequences")

    def _aux(self, request: Request) -> Iterator[Region]:
        if request.lazy:
            hidden = self.graph.config.hidden_size
            heads = max((op.kv for op in self.graph.ops if op.kv and op.kv.stores), key=lambda kv: kv.head_dim)
            score = score_bytes(self.graph.config.num_attention_heads // heads.heads, heads.head_dim)
            yield Region("aux", request.ctx * (4 * hidden + score) + 64,
                         f"of {request.ctx} prompt tokens {4 * hidden} bytes each, for the stages of {request.lazy}, "
                         f"and {score} to choose who goes on")


def score_bytes(group: int, head_dim: int) -> int:
    """Bytes for each position while tokens are chosen: a head's keys, stored and as floats; scores of its queries."""
    return 8 * abi.padded_head_dim(head_dim) + 12 * group + 32


def one_of_each(graph: Graph) -> list[Op]:
    """Return one operation of each kind and size: what layers have in common is asked once."""
    found = {}
    for op in graph.ops:
        rows = tuple((x.width, x.dtype, x.group_size) for x in (op.out, *op.inputs))
        head = getattr(op, "head_dim", 0)
        found[type(op), rows, head, tuple((w.shape, graph.types[w.name]) for w in op.weights)] = op
    return list(found.values())


def place_kv(stores: Iterable[KvAccess], kv: str, blocks: int, end: int = 0) -> tuple[dict[int, Placement], int]:
    """Lay out the K and V of layers that store any, from byte `end` on; gives their places and where they end.

    Of a plane a block of a head has a multiple of 64 bytes, so all planes begin with a line.
    """
    layers = {}
    for access in stores:
        stride = access.position_bytes(kv) * abi.BLOCK_TOKENS
        layers[access.layer] = Placement("kv", end, blocks * stride, stride)
        end += round_up(blocks * stride, 64)
    return layers, end


def sizes_of(types: Types, splits: int, request: Request) -> Sizes:
    """Return what scratch may depend on in a run."""
    return Sizes(types, splits, min(request.tokens, abi.ATTENTION_TOKENS), request.decoded_tokens)


def scratch(ops: Iterable[Op], sizes: Sizes) -> tuple[int, int]:
    """Scratch bytes of a thread, and of what threads share: the most that any operation asks for."""
    needs = [op.scratch(sizes) for op in ops]
    return round_up(max(n.thread_bytes for n in needs) + 64, 64), max(n.shared_bytes for n in needs)
