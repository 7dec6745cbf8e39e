"""The memory plan of a run: every region with its bytes and the reason for them, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.graph import Graph, round_up
from edgeinfer.kernels import abi

from .lifetimes import Placement, place_activations

SPLIT_TOKENS = 4
"""Walks of at most this many tokens may split their attention along the context."""
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


PRIVATE, MAPPED, LOCKED, RESERVE = "private", "mapped", "locked", "reserve"
"""How a region is kept: taken up front and never given back; pages of a file, which the system may drop and read again;
such pages locked into memory; set aside for what others allocate."""


@dataclass(frozen=True)
class Region:
    """One stretch of memory."""

    name: str
    nbytes: int
    reason: str
    """What it is for, with the numbers that give its size."""
    kind: str = PRIVATE
    """private, mapped, locked or reserve."""

    @property
    def bytes(self) -> int:
        """Same as nbytes, by the name that reports use."""
        return self.nbytes


@dataclass(frozen=True)
class MemoryPlan:
    """All regions of a run and what lies where in them."""

    request: Request
    regions: tuple[Region, ...]
    activations: dict[str, Placement]
    """Places in the region `activations`, by tensor."""
    logits_stride: int
    """Bytes from one row of logits to the next."""
    kv_blocks: int
    """Blocks of the pool; each holds 16 tokens of all layers."""
    kv_block_bytes: int
    """Bytes of one block in one layer."""
    thread_scratch_bytes: int
    splits: int
    """Attention splits of the longest context."""
    rope_row_bytes: int
    """Constants: bytes of one position's cosines and sines."""

    @property
    def shared_scratch_offset(self) -> int:
        """Where the scratch that threads share begins, behind their own: partial attention, sums of neurons."""
        return round_up(self.request.threads * self.thread_scratch_bytes, 64)

    @property
    def total_bytes(self) -> int:
        """Sum of all regions: the most that the process holds, weights included."""
        return sum(r.nbytes for r in self.regions)

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

    def region(self, name: str) -> Region:
        """The region of that name."""
        return next(r for r in self.regions if r.name == name)

    def layer_offset(self, layer: int) -> int:
        """Bytes from the base of the KV region to a layer's blocks."""
        return layer * round_up(self.kv_blocks * self.kv_block_bytes, 64)


def make_plan(graph: Graph, request: Request, weight_bytes: int) -> MemoryPlan:
    """Plan one run; a `Planner` plans several of the same model faster.

    Parameters
    ----------
    graph : Graph
    request : Request
    weight_bytes : int
        Length of weights.bin.
    """
    return Planner(graph, weight_bytes).plan(request)


class Planner:
    """Plans runs of one model as it is stored.

    Parameters
    ----------
    graph : Graph
    weight_bytes : int
        Length of weights.bin.
    """

    def __init__(self, graph: Graph, weight_bytes: int):
        self.graph = graph
        self.weight_bytes = weight_bytes
        self._scratch = thread_scratch(graph)
        self._activations: dict[tuple[int, int], tuple[dict[str, Placement], int]] = {}

    def plan(self, request: Request) -> MemoryPlan:
        """Give every region of a run its bytes."""
        c, layers = self.graph.config, self.graph.config.num_hidden_layers
        rows = (request.tokens, request.outputs)
        if rows not in self._activations:  # whatever the context
            self._activations[rows] = place_activations(self.graph, *rows)
        placements, arena = self._activations[rows]
        kv_block_bytes = c.num_key_value_heads * abi.kv_head_bytes(request.kv, c.head_dim)
        per_sequence = -(-request.ctx // abi.BLOCK_TOKENS)
        copies = 1 if request.sequences > 1 else 0  # of last blocks that sequences share
        kv_blocks = request.sequences * (per_sequence + copies)
        rope_row = 2 * 4 * round_up(c.head_dim // 2, 16)
        splits = -(-request.ctx // (abi.BLOCK_TOKENS * abi.SPLIT_BLOCKS))
        partial = c.num_attention_heads * splits * (128 + 4 * abi.padded_head_dim(c.head_dim))
        shared = max(SPLIT_TOKENS * partial, neuron_sums(self.graph))
        logits_stride = 4 * round_up(c.vocab_size, 16)
        tables = abi.CTX_BYTES + request.tokens * (abi.TOKEN_BYTES + 8)
        tables += abi.RECORD_BYTES * (len(self.graph.ops) + layers)
        tables += request.sequences * (abi.SEQUENCE_BYTES + 4 * per_sequence)
        regions = (
            self._weights(request.mlock),
            Region("kv", layers * round_up(kv_blocks * kv_block_bytes, 64) + 64,
                   f"{request.kv}, {kv_blocks} pages x {layers} layers x {kv_block_bytes} bytes"),
            Region("activations", arena + 64, f"{request.tokens} tokens a walk, shared by lifetimes"),
            Region("logits", request.outputs * logits_stride + 64, f"{request.outputs} x {c.vocab_size} values"),
            Region("constants", request.ctx * rope_row + 64, f"rotary tables of {request.ctx} positions"),
            Region("scratch", round_up(request.threads * self._scratch, 64) + shared + 64,
                   f"{request.threads} threads; partial attention of {splits} splits"),
            Region("tables", tables, "ctx block, tokens, block tables, program"),
            Region("python", PYTHON_RESERVE_BYTES + VOCABULARY_RESERVE_BYTES * c.vocab_size,
                   f"interpreter, libraries, tokenizer of {c.vocab_size}", RESERVE),
        )
        return MemoryPlan(request, regions, placements, logits_stride, kv_blocks, kv_block_bytes, self._scratch, splits,
                          rope_row)

    def _weights(self, mlock: bool) -> Region:
        return Region("weights", self.weight_bytes, _types(self.graph), LOCKED if mlock else MAPPED)


def thread_scratch(graph: Graph) -> int:
    """Scratch bytes of a thread: the largest that any kernel asks for."""
    c = graph.config
    attention = abi.attention_scratch_bytes(c.head_dim)
    norm = 4 * round_up(c.hidden_size, 16)
    widths = {(t.width, t.group_size) for op in graph.ops for t in op.outputs if t.dtype == "q8"}
    own_input = max((abi.q8_row_bytes(*width)[0] for width in widths), default=0)
    neurons = [0]
    for stored in (graph.types[w.name] for w in graph.weights if w.kind == "ffn"):
        neurons += [abi.neuron_gated_scratch_bytes(c.hidden_size, stored.group_size, stored.dtype),
                    abi.neuron_down_scratch_bytes()]
    return round_up(max(attention, abi.GATED_SCRATCH_BYTES + own_input + norm, *neurons) + 64, 64)


def neuron_sums(graph: Graph) -> int:
    """Bytes of the sums that blocks of neurons leave in an FFN that is stored neuron by neuron."""
    c, types = graph.config, (graph.types[w.name] for w in graph.weights if w.kind == "ffn")
    return max((abi.neuron_sums_bytes(c.intermediate_size, c.hidden_size, t.group_size, t.dtype) for t in types),
               default=0)


def _types(graph: Graph) -> str:
    """How the matrices are stored, such as ``embedding, head int8g32; matrix q4g32``."""
    kinds = {w.kind: str(graph.types[w.name]) for w in graph.weights if w.kind != "vector"}
    alike = {stored: [kind for kind in kinds if kinds[kind] == stored] for stored in kinds.values()}
    return "; ".join(f"{', '.join(names)} {stored}" for stored, names in alike.items())
