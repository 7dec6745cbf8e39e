"""The memory plan of a run: the request, every region with its size and the reason for it, and the allocations inside.

planner.py makes it before anything is allocated.
"""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.units import round_up
from edgeinfer.graph import Tensor
from edgeinfer.kernels import abi
from edgeinfer.registry import Settings

from .blocks import shared_blocks
from .cold import ColdPlan
from .expert_slots import ExpertsPlan
from .lifetimes import Placement
from .state import StatePlan
from .windows import Windowed

USUAL_TOKENS = 2048
"""Tokens of a sequence that are assumed when a KV pool of a given size is divided between layers with and without a
window."""


@dataclass(frozen=True)
class Request:
    """Run to plan; all fields are concrete."""

    ctx: int
    """Tokens of one sequence."""
    kv: str
    """int8, f16 or f32."""
    threads: int
    tokens: int
    """Most tokens of one forward pass (prefill chunk or parallel sequences)."""
    outputs: int
    """Most rows of logits of one forward pass."""
    sequences: int
    """Sequences alive at once."""
    mlock: bool = False
    """True if the weights are locked into memory."""
    residency: tuple[tuple[str, str], ...] = ()
    """Weights that are not in the mapped file, by name: ``resident`` or ``streamed``; the name ``*`` means all others
    but tables of which a token reads a row, which ``rows`` means."""
    hot: tuple[int, ...] = ()
    """Resident neurons of each layer's FFN, if the others are read on demand; none: all."""
    slots: int = 0
    """Clusters of other neurons that are kept."""
    expert_slots: int = 0
    """Experts kept in memory, if experts are read on demand; 0: they are placed like other weights."""
    own_tokens: int | None = None
    """Tokens that each sequence may have of its own after a prompt of all; None: each may have a whole context."""
    techniques: Settings = ()
    """Techniques that the run uses, with their settings."""
    kv_tokens: int | None = None
    """Tokens that the KV pool holds of all sequences together; None: the sequences' number and context say it."""
    kv_windows: int | None = None
    """Sequences whose windows the pool of layers with a window holds then; None: as many as are of `USUAL_TOKENS`."""
    state_memory: int | None = None
    """Bytes for checkpoints of recurrent state; None: for a few."""
    kv_memory: int | None = None
    """Bytes of the KV pool, for which the planner puts `kv_tokens` and `kv_windows`."""

    @property
    def decoded_tokens(self) -> int:
        """Most tokens of a forward pass in decode role: one of each sequence, or as many as rows of logits."""
        return min(self.tokens, max(self.sequences, self.outputs))

    def rows_of(self, tensor: Tensor) -> int:
        """Most rows of a tensor in one forward pass: of every token, or of those whose logits are wanted."""
        return tensor.times * (self.outputs if tensor.rows == "outputs" else self.tokens)

    @property
    def shares_prompt(self) -> bool:
        """True if the KV pool is sized for one prompt that several sequences share."""
        return self.sequences > 1 and self.own_tokens is not None and self.kv_tokens is None

    @property
    def kv_blocks(self) -> int:
        """Blocks that the sequences may hold together."""
        return self.blocks_of(abi.BLOCK_TOKENS)

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks of this many tokens each the sequences may hold together."""
        if self.kv_tokens is not None:
            return -(-self.kv_tokens // tokens)
        if self.shares_prompt:
            own = self.own_each
            prompt = round_up(self.ctx - own + 1, tokens) - 1  # that ends in the middle of a block
            return shared_blocks(prompt, own, self.sequences, tokens)
        copies = 1 if self.sequences > 1 else 0  # of last blocks that sequences share
        return self.sequences * (-(-self.ctx // tokens) + copies)

    def of_pool(self, blocks: int, windows: int, block_tokens: int = abi.BLOCK_TOKENS) -> Request:
        """Return the request with a KV pool of this many blocks, and of windows of this many sequences."""
        return replace(self, kv_tokens=blocks * block_tokens, kv_windows=windows, kv_memory=None)

    @property
    def full_pool(self) -> Request:
        """The request with a KV pool that has a context for each sequence."""
        return replace(self, own_tokens=None, kv_tokens=None, kv_windows=None, kv_memory=None)

    @property
    def windows(self) -> int:
        """Sequences whose windows layers that have one keep."""
        if self.kv_tokens is None:
            return self.sequences
        return self.kv_windows or min(self.sequences, -(-self.kv_tokens // min(self.ctx, USUAL_TOKENS)))

    @property
    def own_each(self) -> int:
        """Most tokens that a sequence may have of its own, after a common prompt if one is planned."""
        return self.ctx if self.kv_tokens is not None or self.own_tokens is None else min(self.own_tokens, self.ctx)


PRIVATE, MAPPED, LOCKED, RESERVE, DEVICE = "private", "mapped", "locked", "reserve", "device"
"""Kinds of regions: allocated up front and never freed; pages of a file, which the system may drop and read again;
such pages locked into memory; reserved for allocations of others; in the memory of another device.
"""
RESIDENT, FLASH, EXPERTS, STREAMED = "resident", "sparse from flash", "experts from flash", "streamed"
"""Residency of the weights during a run (`MemoryPlan.mode`)."""
STREAM_BUFFERS = 2
"""Parts of streamed weights (layers) that are in memory at once: the one in work and the one that is read ahead."""


@dataclass(frozen=True)
class Region:
    """One stretch of memory."""

    name: str
    nbytes: int
    reason: str
    """Purpose, with the numbers that give its size."""
    kind: str = PRIVATE
    """private, mapped, locked, reserve or device."""

    @property
    def bytes(self) -> int:
        """Same as nbytes, by the name that reports use."""
        return self.nbytes


@dataclass(frozen=True)
class MemoryPlan:
    """All regions of a run and the positions of their contents."""

    request: Request
    regions: tuple[Region, ...]
    allocations: dict[str, Placement]
    """Position of each tensor and each weight, by name."""
    kv_blocks: int
    """Blocks of the pool; each holds some tokens (`Runner.block_tokens`) of all layers."""
    kv_layers: dict[int, Placement]
    """Planes of each layer that stores K and V (abi.BLOCK_TOKENS); `stride` is the size of a block in all of them."""
    thread_scratch_bytes: int
    splits: int
    """Attention splits of the longest context."""
    rope_row_bytes: int
    """Constants: bytes of one position's cosines and sines."""
    parts: tuple[tuple[str, ...], ...] = ()
    """Names of streamed weights by part, which is read as a whole, in the order of use. Part i is in buffer i %
    STREAM_BUFFERS."""
    cold: ColdPlan | None = None
    """Neurons that are read on demand, if there are any."""
    experts: ExpertsPlan | None = None
    """Experts that are read on demand, if there are any."""
    pruned: Placement | None = None
    """Flags of pruned prompts: the tokens of a block that each stage but the first lacks (abi.FLAG_PRUNED); one stage
    after the other, `stride` bytes each.
    """
    filed: tuple[str, ...] = ()
    """Tables that stay in their file: of these a token reads a row, and the sum has the pages of rows alone."""
    windowed: Windowed | None = None
    """Layers with a window whose blocks are in a smaller pool, if there are any."""
    state: StatePlan | None = None
    """Slots of recurrent layers, if there are any."""
    boundaries: tuple[int, ...] = ()
    """Layers after which prompt tokens may be pruned; a stage is the layers between two of them."""

    @property
    def mode(self) -> str:
        """Residency of the weights during the run: ``resident``, or ``sparse from flash``, ``experts from flash`` or
        ``streamed`` if some are read from storage.
        """
        return STREAMED if self.parts else FLASH if self.cold else EXPERTS if self.experts else RESIDENT

    @property
    def technique(self) -> str:
        """Name of the technique that reads weights on demand; empty if none does."""
        return self.mode if self.cold or self.experts else ""

    @property
    def streamed_bytes(self) -> int:
        """Weights that each forward pass reads from storage."""
        return sum(self.allocations[name].nbytes for part in self.parts for name in part)

    @property
    def filed_bytes(self) -> int:
        """Bytes of tables that stay in their file."""
        return sum(self.allocations[name].nbytes for name in self.filed)

    @property
    def stored_bytes(self) -> int:
        """Weights that are not in memory from the start: streamed ones, cold neurons, and experts."""
        cold, experts = self.cold.cold_bytes if self.cold else 0, self.experts.stored_bytes if self.experts else 0
        return self.streamed_bytes + cold + experts

    @property
    def unstreamed_bytes(self) -> int:
        """Return the value of `total_bytes` with all weights in memory."""
        instead = sum(r.nbytes for r in self.regions if r.name in ("streamed", "cold", "experts"))
        return self.total_bytes + self.stored_bytes - instead

    @property
    def shared_scratch_offset(self) -> int:
        """Offset of the scratch that threads share, after their own: partial attention, sums of neurons."""
        return round_up(self.request.threads * self.thread_scratch_bytes, 64)

    @property
    def total_bytes(self) -> int:
        """Sum of all regions of the process: the most that it holds, weights included."""
        return sum(r.nbytes for r in self.regions if r.kind != DEVICE)

    @property
    def device_bytes(self) -> int:
        """Memory of a device, such as a GPU, in addition to the process's."""
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
        return next(p.stride for p in self.allocations.values() if p.region == "logits")

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block in one layer, in the layer that needs most."""
        return max((layer.stride for layer in self.kv_layers.values()), default=0)

    def kv_pool(self, layer: int) -> int:
        """Blocks of the pool that a layer's K and V are in."""
        return self.windowed.blocks if self.windowed and layer in self.windowed.layers else self.kv_blocks

    def sequences_of(self, tokens: int, block_tokens: int = abi.BLOCK_TOKENS) -> int:
        """Return how many sequences of this many tokens each the KV pools hold at once, at most those of a pass."""
        most = min(self.request.sequences, self.kv_blocks // -(-tokens // block_tokens))
        return min(most, self.windowed.sequences_of(tokens, self.request.tokens)) if self.windowed else most

    @property
    def context_kv_bytes(self) -> tuple[int, int]:
        """Return the bytes of K and V of one sequence with a full context, and without windows."""
        whole = sum(layer.stride for layer in self.kv_layers.values()) // abi.BLOCK_TOKENS * self.request.ctx
        if not self.windowed:
            return whole, whole
        windowed = sum(self.kv_layers[layer].stride for layer in self.windowed.layers) // abi.BLOCK_TOKENS
        return whole - windowed * max(0, self.request.ctx - self.windowed.positions), whole

    def sequence_bytes(self, n_tokens: int) -> int:
        """Return the bytes of K, V and recurrent state of a sequence of so many tokens, the most where layers have
        windows."""
        blocks, windowed = -(-n_tokens // abi.BLOCK_TOKENS), self.windowed
        recent = min(blocks, windowed.sequence_blocks) if windowed else blocks
        kept = sum(layer.stride * (recent if windowed and number in windowed.layers else blocks)
                   for number, layer in self.kv_layers.items())
        return kept + (self.state.slot_bytes if self.state else 0)

    def region(self, name: str) -> Region:
        """The region of that name."""
        return next(r for r in self.regions if r.name == name)

    def with_draft(self, draft: MemoryPlan) -> MemoryPlan:
        """Plan a second model, such as a draft, that runs in the same process on the same threads.

        It has regions of its own, all but the interpreter's; their names begin with ``draft_``.
        """
        own = tuple(replace(r, name=f"draft_{r.name}") for r in draft.regions if r.kind != RESERVE)
        return replace(self, regions=self.regions + own)
