"""The memory of a run on onnxruntime, on both sides: the device that runs the model, and this process beside it.

The memory that onnxruntime takes for itself is not known before it runs. Such regions say so in their reason; those of
CUDA were measured on an H100 (docs/measurements/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import numpy as np

from edgeinfer.base.units import format_size
from edgeinfer.config import CUDA, ONNX_CPU, PAGES, SLOTS, Recipe, RuntimeConfig
from edgeinfer.errors import UsageError
from edgeinfer.graph import Graph, ModelConfig
from edgeinfer.memory_planner import (
    DEVICE,
    VOCABULARY_RESERVE_BYTES,
    Alternative,
    MemoryPlan,
    Region,
    Request,
    held_words,
    own_pool,
    to_request,
)
from edgeinfer.registry import each, technique

from .activations import ARENA_SHARE, arena_bytes
from .devices import Provider
from .flavour import Flavour
from .pages import LAYOUT as PAGE_LAYOUT
from .pages import table_widths
from .sizes import Matmul, Sizes, written_out
from .slabs import FLOATS, STATE_BLOCKS, Layout
from .slots import LAYOUT as SLOT_LAYOUT
from .step import step_outputs, step_sizes
from .topk_sampling import RETURNED_LOGITS

PROGRAM_BYTES = 70_000_000
"""The interpreter, NumPy and the command line, without the loader of compiled kernels; onnx, which lowers a model."""
CONTEXT_BYTES = 1_260_000_000
"""Memory of a GPU that CUDA's context, code and library workspaces take (0.9 to 1.21 GB measured)."""
GRAPH_BYTES = 10_000_000
"""Memory of the graph of a decode step (measured), per number of slots, or of sequences and width of the page table."""


def device_config(config: RuntimeConfig, provider: Provider) -> RuntimeConfig:
    """Return the settings of a run for its device; raise `UsageError` for unsupported ones, by name."""
    device = provider.device
    for step in config.recipe.steps:
        if step in Recipe().steps or ((one := technique(step.name)) and one.exact(dict(step.settings))):
            continue
        raise UsageError(f"Device {device} runs models exactly and as they are stored; it has no pass {step}: leave it "
                         "out, or run with --device cpu.")
    if config.kv not in provider.kv:
        why = {"int8": "onnxruntime's int8 KV has constant scales, and ours one for each row and head",
               "f32": "attention in f32 does not exist there"}.get(config.kv, "its model has another type")
        raise UsageError(f"--kv {config.kv} is not available on device {device}: {why}; choose "
                         f"{' or '.join(provider.kv)}, or run with --device cpu.")
    others = [(one.options[0].flag, True) for one, _ in each(config.techniques)]
    for name, asked in (*others, ("--mlock", config.mlock), ("--no-mmap", not config.mmap),
                        ("--state-memory", config.state_memory)):
        if asked:
            raise UsageError(f"{name} is not available on device {device}; leave it out, or run with --device cpu.")
    layout = config.kv_layout or default_layout(config, provider)
    if layout == PAGES and not provider.page_positions:
        raise UsageError(f"--kv-layout pages is not available on device {device}, because PagedAttention has no CPU "
                         "kernel; choose slots, or run with --device cuda.")
    if layout == SLOTS and own_pool(config):
        raise UsageError("--kv-memory is not offered with --kv-layout slots, where each sequence has a slot with room "
                         "for a whole context; choose pages (on cuda), or lower --ctx.")
    return replace(config, recipe=Recipe(()), kv_layout=layout)


def default_layout(config: RuntimeConfig, provider: Provider) -> str:
    """Return pages where several sequences may run and the provider has them, else slots.

    One sequence decodes faster in a slot: 3.2 ms a token of the 7B shape beside 3.7 (docs/measurements/gpu.md). Pages
    verify the draft tokens of many in one call, and share common prefixes of sequences.
    """
    return PAGES if provider.page_positions and (config.max_sequences > 1 or own_pool(config)) else SLOTS


def device_planner(graph: Graph, config: RuntimeConfig, provider: Provider,
                   kv: str | None = None) -> tuple[DevicePlanner, RuntimeConfig]:
    """Return a planner of a model on a device, and the settings of its run as the device takes them.

    `plan`, `estimate`, `run` and `LLM` ask this function whether a device runs a model.

    Parameters
    ----------
    graph : Graph
        Without passes.
    config : RuntimeConfig
    provider : Provider
    kv : str, optional
        Type of the KV cache where one was requested; by default the device's own.

    Raises
    ------
    UsageError
        The device does not support a setting.
    UnsupportedModelError
        It cannot run the model: an operation or a type of weights has no equivalent in ONNX.
    """
    if (graph.config.alibi or graph.config.recurrent) and config.kv_layout is None:
        if provider.page_positions and own_pool(config):
            why = "has ALiBi, for which PagedAttention has no input" if graph.config.alibi else \
                "keeps a recurrent state of each sequence, in a slot"
            raise UsageError(f"--kv-memory is for pages, and this model {why}; lower --ctx instead.")
        config = replace(config, kv_layout=SLOTS)
    config = device_config(replace(config, kv=kv or provider.kv[0]), provider)
    planner = DevicePlanner(graph.config, provider, config.kv_layout, partial(_lowered, graph))
    planner.lower(to_request(config))
    return planner, config


def _lowered(graph: Graph, flavour: Flavour) -> Sizes:
    from .lower_graph import lower_graph

    return Sizes.of(lower_graph(graph, flavour))


class DevicePlanner:
    """Plans runs of one model on a provider.

    Parameters
    ----------
    config : ModelConfig
    provider : Provider
    kv_layout : {"slots", "pages"}
    lowered : callable
        Returns the sizes of the model for a target of the lowering, once for each.
    """

    def __init__(self, config: ModelConfig, provider: Provider, kv_layout: str | None,
                 lowered: Callable[[Flavour], Sizes]):
        self.config, self.provider, self.paged = config, provider, kv_layout == PAGES
        self.layout: Layout = PAGE_LAYOUT if self.paged else SLOT_LAYOUT
        self._lowered = cache(lowered)

    def flavour(self, request: Request) -> Flavour:
        """Return the target of the lowering; its tables have all positions, so that it serves every context.

        LongRoPE and dynamic scaling have other frequencies in contexts no longer than that of the training; tables for
        these end there. Beyond it each context has its own with dynamic scaling.
        """
        rope, ctx = self.config.rope, None
        trained = min(rope.original_max_position_embeddings, self.config.max_position_embeddings)
        if rope.kind in ("longrope", "dynamic") and request.ctx <= trained:
            ctx = trained
        elif rope.kind == "dynamic":
            ctx = request.ctx
        return Flavour(dtype=request.kv, attention=self.layout.attention, ctx=ctx,
                       top_k=min(RETURNED_LOGITS, self.config.vocab_size),
                       nibbles=self.provider.device == ONNX_CPU and not self.paged).checked(self.config)

    def lower(self, request: Request) -> Sizes:
        """Return the sizes of the model as a request has it; raises as `lower_graph`."""
        return self._lowered(self.flavour(request))

    @property
    def spare(self) -> int:
        """Pages that no sequence holds: the idle rows of recorded steps write to one."""
        return int(self.paged)

    def positions(self, request: Request) -> int:
        """Return the positions of a slot or of a page."""
        return self.provider.page_positions if self.paged else request.ctx

    def plan(self, request: Request) -> MemoryPlan:
        """Give every region its bytes."""
        request = self._sized(request)
        blocks = request.blocks_of(self.positions(request)) if self.paged else request.sequences
        return MemoryPlan(request, tuple(self._regions(request, blocks)), {}, blocks, {}, 0, 0, 0)

    def _sized(self, request: Request) -> Request:
        """Return the request with the tokens that a pool of its bytes holds, one page at least; slots have no pool."""
        if not self.paged:
            return replace(request, kv_tokens=None)
        if request.kv_memory is None:
            return request
        page = self._block(request)
        pages = max(1, request.kv_memory // page - self.spare)
        return replace(request, kv_memory=None, kv_tokens=pages * self.positions(request))

    def _regions(self, request: Request, blocks: int) -> Iterator[Region]:
        c, cuda = self.config, self.provider.device == CUDA
        provider = self.provider.for_sequences(request.sequences)
        here = DEVICE if cuda else "private"
        yield from self._weights(request, here)
        kv = self._kv(request, blocks, here)
        yield kv
        yield from self._states(request, here)
        copy = self._written_out(request, provider)
        own = self.lower(request)
        arena = arena_bytes(c, own, request, provider, self.positions(request)) + copy
        cpu = own.cpu if provider.device == ONNX_CPU else None
        if cpu:
            arena = max(arena + round(2 * ARENA_SHARE * 4 * request.tokens * cpu.summed), cpu.opening)
        yield Region("arena", arena, f"activations of {request.tokens} tokens, at most"
                     + (f", and a matrix as f16 for its matmul ({format_size(copy)})" if copy else ""), here)
        most = request.sequences
        row = sum(width * np.dtype(kind).itemsize for width, kind in step_outputs(c.vocab_size).values())
        sizes = step_sizes(most) if provider.graphs else range(1, most + 1)
        yield Region("steps", sum(sizes) * row, f"logits of steps of 1 to {most} sequences", here)
        if cuda:
            yield from self._cuda(request, len(sizes), kv)
        yield Region("logits", 2 * request.outputs * c.vocab_size * 4, f"2 x {request.outputs} x {c.vocab_size} values")
        more = cpu.described if cpu else 0
        yield Region("onnxruntime", self.provider.library_bytes + more, "its libraries"
                     + (f", and {format_size(more)} that describe operators" if more else ""), "reserve")
        yield Region("python", PROGRAM_BYTES + VOCABULARY_RESERVE_BYTES * c.vocab_size,
                     f"interpreter, libraries, tokenizer of {c.vocab_size}", "reserve")

    def _weights(self, request: Request, here: str) -> Iterator[Region]:
        """Weights as they are in the model, and as the provider holds them besides."""
        c, kv, own, cuda = self.config, request.kv, self.lower(request), here == DEVICE
        more = f", with {format_size(own.more)} for codes that no operator has" if own.more > 0 else ""
        if own.cpu and self.provider.device == ONNX_CPU:
            yield Region("weights", own.cpu.read(request.ctx * request.sequences),
                         f"pages of the model's file ({format_size(own.data)}{more}) that stay in memory", "mapped")
            yield Region("prepacked", own.cpu.packed, "onnxruntime's own copies of matrices and scales", here)
            return
        yield Region("weights", own.data, f"as they are in the model, {kv} where they are not quantised{more}",
                     DEVICE if cuda else "mapped")
        if self.provider.partial:  # measured with OpenVINO: 610 MB of 626 with the shape of SmolLM2 135M in f32
            yield Region("prepacked", own.codes + 2 * own.scales, "onnxruntime's own copy of the quantised matrices"
                         + (", with scales in f32" if own.scales else ""), here)
            table = c.vocab_size * c.hidden_size * FLOATS[kv]().itemsize
            yield Region("compiled", own.codes + table, f"the provider's copy of matrices, and the embedding in {kv}",
                         here)

    def _block(self, request: Request) -> int:
        """Return the bytes of K and V of a slot or a page."""
        return 2 * self.lower(request).kv_width * self.positions(request) * FLOATS[request.kv]().itemsize

    def _kv(self, request: Request, blocks: int, here: str) -> Region:
        """Slots or pages."""
        positions = self.positions(request)
        block = self._block(request)
        held, kind = (held_words(request), "pages") if self.paged else ("", "slots")
        spare = ", and one for idle rows" if self.spare else ""
        return Region("kv", (blocks + self.spare) * block, f"{request.kv}, {blocks} {kind}{held} of {positions} "
                                                           f"positions, {block} bytes each{spare}", here)

    def state_bytes(self, request: Request) -> tuple[int, int]:
        """Return the bytes of a slot that recurrent layers have in matrices, and in inputs of convolutions."""
        own = self.lower(request)
        return own.matrix_state_bytes, own.state_bytes - own.matrix_state_bytes

    def _states(self, request: Request, here: str) -> Iterator[Region]:
        """States of recurrent layers in each slot, and twice more; see `Slabs`."""
        if each := self.lower(request).state_bytes:
            slots = request.sequences + STATE_BLOCKS
            yield Region("state", slots * each, f"recurrent state: {slots} slots x {each} bytes ({request.sequences} "
                                                "sequences, a running prompt, an empty one)", here)

    def _cuda(self, request: Request, sizes: int, kv: Region) -> Iterator[Region]:
        """Memory that CUDA takes for itself, with steps of so many sizes, and that of tensors on their way to it."""
        positions, own = self.positions(request), self.lower(request)
        graphs = sizes * (table_widths(-(-request.ctx // positions)) if self.paged else 1)
        yield Region("context", CONTEXT_BYTES + GRAPH_BYTES * graphs,
                     f"CUDA's context, code and workspaces, {graphs} graphs of decode steps; measured on an H100",
                     DEVICE)
        slab = kv.nbytes // max(1, own.kv_width) * own.widest_kv // 2
        slab = max(slab, own.largest_state * (request.sequences + STATE_BLOCKS))
        yield Region("staging", 2 * own.largest + slab,
                     "the largest tensor, read and repacked, and a slab of a layer, on their way")

    def _written_out(self, request: Request, provider: Provider) -> int:
        """Bytes of the largest matrix that matmuls write out as f16: on partial providers in all f16 models."""
        if provider.device == CUDA:
            return self.largest_written_out(request, provider.fast_matmuls)[0]
        if provider.partial and request.kv == "f16":
            return max((2 * rows * columns for rows, columns, *_ in self.lower(request).matmuls), default=0)
        return 0

    def largest_written_out(self, request: Request, fast_matmuls: bool = False) -> tuple[int, Matmul | None]:
        """Return the most bytes of a matrix that CUDA writes out as f16, and its matmul."""
        vocabulary = self.config.vocab_size
        return max(((written_out(one, request.outputs if one.rows == vocabulary else request.tokens, fast_matmuls), one)
                    for one in self.lower(request).matmuls), default=(0, None))

    def refusal(self, plan: MemoryPlan, host: int | None, device: int | None, options: list[Alternative]) -> str:
        """The sentence for a plan that does not fit."""
        here = host is not None and plan.total_bytes > host
        needs, has = (plan.total_bytes, host or 0) if here else (plan.device_bytes, device or 0)
        said = (format_size(needs), format_size(has))
        if said[0] == said[1]:
            said = (f"{needs:,} bytes", f"{has:,} bytes")
        advice = f"It fits with {', or with '.join(map(str, options))}" if options else \
            "No smaller setting of this model fits"
        return (f"The run needs {said[0]} of {'this process' if here else 'the GPU'}'s memory, and the "
                f"budget is {said[1]}; layers are not streamed on device {self.provider.device}. {advice}; "
                "otherwise run with --device cpu.")
