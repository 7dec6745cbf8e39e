"""Addresses of everything that instructions name, and the lowering of operations; lower.py has ours.

`lower` is open: a technique registers the lowering of its own operation and changes nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

from edgeinfer.base.units import round_up
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Attention, Graph, NeuronDown, NeuronGated, Op, RopeStore, StoreLatent, Tensor, Weight
from edgeinfer.kernels import NEURON_RESOLVE, RELEASE, abi, fill
from edgeinfer.memory_planner import READ_BYTES, MemoryPlan, Placement, scratch, sizes_of

from ..program import Instruction, Program

RESOLVE_KERNEL, EXPERTS_KERNEL, RELEASE_KERNEL = "neuron_resolve", "experts_resolve", "stream_release"
"""Kernels that wait for weights from storage, or give their memory back."""
CHUNK_BYTES = 64 << 10
"""Weights of a claimed chunk: long enough to stream, short enough to balance."""
STREAM_BYTES = 32 << 10
"""Least weights of each of the streams that a chunk is read in: shorter ones end before prefetchers have settled."""
STREAMS = 4
"""Units that a few tokens take together (Isa.streams)."""


def matmul_chunk(unit_bytes: int, unit_tiles: int, working: int, threads: int) -> int:
    """Return how many units of a matmul are claimed at once.

    Parameters
    ----------
    unit_bytes, unit_tiles : int
        Of a unit: its weights, and its tiles of 16 rows.
    working : int
        Units that a token goes through.
    threads : int

    Returns
    -------
    int
        Chunks of whole streams; of very few units pairs, so that each thread has some.
    """
    streams = STREAMS * -(-STREAM_BYTES // unit_bytes)
    chunk = max(1, min(max(CHUNK_BYTES // unit_bytes, streams), working // (4 * threads)))
    together = STREAMS if working * unit_tiles >= 16 * threads else 2
    return chunk + -chunk % together


class Operand(NamedTuple):
    """Memory that an instruction works on."""

    region: str
    offset: int
    nbytes: int
    """Length in bytes; `Program.check` proves that it ends inside its region."""

    def shifted(self, skipped: int) -> Operand:
        """Return the memory after its first `skipped` bytes."""
        return Operand(self.region, self.offset + skipped, self.nbytes - skipped)


NOTHING = Operand("activations", 0, 0)
"""An operand that a kernel does not use."""


class Lowering:
    """Addresses of everything that instructions name.

    Parameters
    ----------
    graph : Graph
    plan : MemoryPlan
    token_tiles : tuple of int
        Tokens of the blocks that the instruction set works in (Isa.token_tiles).
    cold_units : tuple of int
        Start of each layer's clusters in their file, in units of abi.STREAM_UNIT, if the plan has cold neurons.
    """

    def __init__(self, graph: Graph, plan: MemoryPlan, token_tiles: tuple[int, ...], cold_units: tuple[int, ...] = ()):
        self.graph, self.plan, self.token_tiles = graph, plan, abi.pack_token_tiles(token_tiles)
        self.types, self.kv, self.threads = graph.types, plan.request.kv, plan.request.threads
        self.sizes = sizes_of(graph.types, plan.splits, plan.request)
        self._shared_bytes = scratch(graph.ops, self.sizes)[1]
        self.cold_units: tuple[int, ...] = cold_units
        self._parts = {name: part for part, names in enumerate(plan.parts) for name in names}

    def program(self) -> Program:
        """Lower all operations, in order; after the last that reads a streamed part its buffer is released."""
        instructions: list[Instruction] = []
        last = {part: i for i, op in enumerate(self.graph.ops) if (part := self.part(op)) is not None}
        early = self._early()
        for i, op in enumerate(self.graph.ops):
            if op.layer in early:
                instructions.append(resolve_instruction(early.pop(op.layer), self, early=True))
            instructions += lower(op, self)
            if (part := self.part(op)) is not None and last[part] == i:
                instructions.append(Instruction(RELEASE_KERNEL, f"release {', '.join(self.plan.parts[part])}",
                                      parameters=tuple(fill(RELEASE, part=part)), event=part))
        return Program(tuple(instructions))

    def _early(self) -> dict[int | None, NeuronGated]:
        """FFNs with cold neurons, by their layers: a prompt has them read from the layer's beginning on."""
        return {op.layer: op for op in self.graph.ops if isinstance(op, NeuronGated) and self.n_cold(op)}

    def part(self, op: Op) -> int | None:
        """Return the number of the streamed part whose weights an operation reads, or None."""
        return next((self._parts[weight.name] for weight in op.weights if weight.name in self._parts), None)

    def at(self, what: Tensor | Weight | None) -> Operand:
        """Return the operand of a tensor or a weight; for None one that is not used."""
        if what is None:
            return NOTHING
        allocation = self.plan.allocations[what.name]  # vectors of weights are read in whole lines of 64 bytes
        return Operand(allocation.region, allocation.offset, round_up(allocation.nbytes, 64))

    def stride(self, tensor: Tensor) -> int:
        """Bytes from one row to the next."""
        return self.plan.allocations[tensor.name].stride

    def head_bytes(self, tensor: Tensor) -> int:
        """Bytes from the rows of one head to those of the next, where a tensor has rows for each."""
        return self.plan.request.tokens * self.stride(tensor)

    def layer(self, op: RopeStore | StoreLatent | Attention) -> Placement:
        """K and V that the operation stores or reads: of its layer, or of another."""
        return self.plan.kv_layers[op.kv.layer if op.kv else 0]

    def recent(self, op: Op) -> int:
        """Return which of a sequence's block tables holds these K and V (abi.SEQUENCE_BLOCKS)."""
        windowed = self.plan.windowed
        return int(windowed is not None and op.kv is not None and op.kv.layer in windowed.layers)

    def pool(self, op: Op) -> int:
        """Blocks of the pool that has these K and V."""
        return self.plan.kv_pool(op.kv.layer if op.kv else 0)

    def cold(self, offset: int, nbytes: int) -> Operand:
        """Return a part of the region of cold neurons."""
        return Operand("cold", offset, nbytes)

    def n_cold(self, op: NeuronGated | NeuronDown) -> int:
        """Count the neurons of an FFN that are not resident."""
        plan = self.plan.cold
        return plan.neurons - plan.hot[op.layer or 0] if plan else 0

    @property
    def scratch(self) -> Operand:
        """Scratch of all threads, each with its own share."""
        return Operand("scratch", 0, self.threads * self.plan.thread_scratch_bytes)

    @property
    def shared(self) -> Operand:
        """Scratch that threads share: partial attention, sums of neurons."""
        return Operand("scratch", self.plan.shared_scratch_offset, self._shared_bytes)

    def instruction(self, op: Op, kernel: str, operands: Sequence[Operand], parameters: Sequence[int], flags: int = 0,
               predicates: tuple[int, ...] = (), step: int = 0, label: str = "", event: int
                    | None = None) -> Instruction:
        """Make an instruction; it is skipped where the operation has no rows, or one of the predicates' counts is 0."""
        if op.sampled:
            predicates = (abi.COUNT_SAMPLES, *predicates)
        elif op.out.rows == "outputs":
            predicates = (abi.COUNT_OUTPUTS, *predicates)
        if op.decoded:
            predicates = (abi.COUNT_DECODED, *predicates)
        if op.several:
            predicates = (abi.COUNT_SEVERAL, *predicates)
        nbytes = 0 if step else sum(read.batch for read in op.reads(self.types))
        where = tuple((o.region, o.offset) for o in operands)
        return Instruction(kernel, label or op.label, where, tuple(parameters), flags, predicates, nbytes,
                      tuple(o.nbytes for o in operands), op, step, self.part(op) if event is None else event,
                      next((levels for weight in op.weights if (levels := self.types[weight.name].levels)), ()))


def rows(tensor: Tensor) -> int:
    """Return the count that gives the number of a tensor's rows."""
    return abi.COUNT_OUTPUTS if tensor.rows == "outputs" else abi.COUNT_TOKENS


@singledispatch
def lower(op: Op, at: Lowering) -> list[Instruction]:
    """Turn an operation into instructions. Raises `UnsupportedModelError` if no lowering is registered for it."""
    raise UnsupportedModelError(f"The operation {op.label} has no lowering to a kernel, so edgeinfer cannot run it.")


def slots_of(op: NeuronGated | NeuronDown, at: Lowering) -> list[Operand]:
    """Slot of each of the layer's clusters, and the slots."""
    if not at.n_cold(op) or not (plan := at.plan.cold):
        return [NOTHING, NOTHING]
    return [at.cold(plan.table + 4 * plan.clusters * (op.layer or 0), 4 * plan.clusters),
            at.cold(0, plan.slots * plan.cluster_bytes)]


def resolve_instruction(op: NeuronGated, at: Lowering, early: bool = False) -> Instruction:
    """The instruction that finds a layer's cold neurons, and has those read that are missing; an `early` one for
    prompts.
    """
    plan, layer, stride = at.plan.cold, op.layer or 0, at.stride(op.mask) if op.mask else 0
    assert plan
    parameters = fill(NEURON_RESOLVE, neurons=plan.neurons, hot=plan.hot[layer], shift=plan.shift,
                      cluster_bytes=plan.cluster_bytes, slots=plan.slots, base=plan.clusters * layer,
                      unit=at.cold_units[layer], most=max(1, READ_BYTES // plan.cluster_bytes),
                      part=abi.COLD_PARTS * layer, rows=rows(op.out), mask_stride=stride,
                      span=plan.part_neurons(layer))
    operands = [at.at(op.mask), *slots_of(op, at), at.cold(plan.owners, 4 * plan.slots),
                at.cold(plan.uses, 4 * plan.slots), at.cold(plan.stamps, 8 * plan.slots),
                at.cold(plan.words, abi.COLD_BYTES)]
    flags, when, verb = (abi.FLAG_EARLY, (abi.COUNT_SEVERAL,), "ask for") if early else (0, (), "find")
    return at.instruction(op, RESOLVE_KERNEL, operands, parameters, flags, when, 1, f"{verb} {op.weight.name}")
