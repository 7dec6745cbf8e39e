"""A session: one bundle with its plan, memory, program and threads; tokens go in, logits come out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.progress import OnPromptProgress, OnStageProgress
from edgeinfer.base.validation import shown
from edgeinfer.bundle import Bundle, watch
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import RequestError
from edgeinfer.graph import ModelConfig
from edgeinfer.kernels import Kernels, abi, choose
from edgeinfer.memory_planner import DraftMemory, Placer
from edgeinfer.registry import each, in_use, technique
from edgeinfer.runner import DECODE, Cancellation, Segment, Sequence, decoding, integers, plain_segments

from .execution.forward import Logits
from .execution.thread_tuner import SMALL_BYTES, ThreadTuner
from .kv.sequence import KVCache
from .memory import Prefaulter, allocate
from .planning import plan_run
from .program.lowering.lower import Lowering
from .sequences import SequenceOwner
from .weights.loading import fill_constants, load

if TYPE_CHECKING:
    from edgeinfer.bundle import Cold

    from .weights.readers import Readers


class Session(SequenceOwner):
    """Plans a run, takes all its memory, links its kernels and starts its threads.

    Parameters
    ----------
    bundle : Bundle
    config : RuntimeConfig
    progress : callable, optional
        Called with (done, total, name) while kernels compile on the first run.
    loading : callable, optional
        Called with (bytes done, bytes in all, file name) while weights of 1 GB or more are read, and while checksums
        are compared for more than a second.
    host : Session, optional
        Shares its threads: the two sessions take turns, and either may be closed first.
    placer : callable, optional
        Chooses the weights that stay in memory if not all fit; without it layers are streamed (`registry.placer`).
    draft_memory : DraftMemory, optional
        Memory that the plan reserves for a draft model, a self-draft or a draft head; opening that takes it.

    Raises
    ------
    BudgetError
        If the plan exceeds the budget.
    BundleError
        If weights are damaged.
    RequestError
        If other threads are requested than the host has.

    Attributes
    ----------
    selects : bool
        True if decoded tokens skip rows of V.
    smaller_alternative : Alternative or None
        The first smaller request that would fit without streaming, if layers are streamed.
    """

    def __init__(self, bundle: Bundle, config: RuntimeConfig | None = None,
                 progress: OnStageProgress | None = None,
                 loading: OnStageProgress | None = None, host: Session | None = None,
                 placer: Placer | None = None, draft_memory: DraftMemory | None = None):
        self.bundle = bundle
        self.model: ModelConfig = bundle.config
        config = config or RuntimeConfig()
        free = config.threads is None and (host is None or host.executor.tuner.choose)
        planned = plan_run(bundle, _with_threads_of(host, config), placer, draft_memory)
        (self.config, self.recipe, self.sparse, self.graph, self.plan, self.budget_bytes,
         self.smaller_alternative) = planned
        cold = self._cold_neurons()
        bundle.check_contents(self.plan.request.threads, loading, cold=cold is not None)
        kernels = host.executor.kernels if host else Kernels(choose(), progress)
        self.isa = kernels.isa.name
        with ExitStack() as opened:  # nothing stays open if a step below fails
            regions = {region.name: allocate(region.nbytes, touched=region.name != "kv")
                       for region in self.plan.regions if region.name in abi.REGIONS and region.name != "weights"}
            self._prefaulter = Prefaulter(regions["kv"])
            opened.callback(self._prefaulter.close)
            load(bundle, self.graph, self.plan, regions, self.config.mlock, loading)
            fill_constants(self.model, self.plan, regions["constants"])
            units = tuple(offset // abi.STREAM_UNIT for offset in cold.offsets) if cold else ()
            program = Lowering(self.graph, self.plan, kernels.isa.token_tiles, units).program()
            stores = [op.kv for op in self.graph.ops if op.kv and op.kv.stores]
            self.kv = KVCache(self.plan, regions["kv"], [*stores, *(draft_memory.stores if draft_memory else ())],
                              regions.get("state"))
            tuner = ThreadTuner(self.plan.request.threads, free, bundle.weights_bytes <= SMALL_BYTES)
            self._link(program, kernels, regions, host.executor.pool if host else None, tuner)
            opened.callback(self.executor.close)
            if "weights" in regions:
                self.executor.unchanged = watch(bundle.weights)
            if self.plan.parts:
                from .weights.on_demand import read_layers

                read_layers(self.executor, bundle, self.plan)
            if reader := technique(self.plan.technique):
                reader.attach(self, None)
            for one, settings in each(in_use(self.config)):
                one.attach(self, settings)
            opened.pop_all()

    def _cold_neurons(self) -> Cold | None:
        """Return the cold neurons, which stay in storage, if the plan has any."""
        if not self.plan.cold:
            return None
        from edgeinfer.bundle import read_cold

        return read_cold(self.bundle)

    # -- tokens in, logits out ---------------------------------------------------------------------------------------

    def prefill(self, sequence: Sequence, ids: Items[int], cancel: Cancellation | None = None,
                spec: int = 0, on_progress: OnPromptProgress | None = None) -> Logits:
        """Process a prompt in chunks, or by the strategy of a technique; see `Runner.prefill`."""
        if self.prefill_strategy and self.prefill_strategy.takes(ids := integers("ids", ids)):
            return self.prefill_strategy.prefill(sequence, ids, cancel, spec, on_progress)
        return super().prefill(sequence, ids, cancel, spec, on_progress)

    def forward(self, segments: Items[Segment], cancel: Cancellation | None = None) -> Logits:
        """Run the program once over the new tokens of several sequences; see `Runner.forward`."""
        return self._run_and_commit(plain_segments(segments), cancel)

    def decode(self, sequences: Items[Sequence], ids: Items[int], cancel: Cancellation | None = None,
               sample_specs: Items[int] = (), further: int = 0) -> Logits:
        """Decode one or more tokens of several sequences; see `Runner.decode`."""
        segments = decoding(sequences, ids, sample_specs)
        if further > 0:
            return self._run_and_commit(plain_segments(segments), cancel, further)
        return self.forward(segments, cancel)

    def pass_tokens(self, role: int) -> int:
        """Return the most tokens of a role in a forward pass; decoded ones are limited by their scratch memory."""
        most = self.plan.request
        return most.decoded_tokens if role == DECODE and self.selects else most.tokens

    def reserve(self, sequence: Sequence, n_tokens: int) -> None:
        """Reserve room for a prompt that `forward_range` runs; `append` commits its tokens, `truncate` cancels it."""
        self.kv.check_own(sequence)
        room = self.plan.request.ctx - len(sequence)
        if not 1 <= n_tokens <= room:
            raise RequestError(f"{n_tokens} tokens cannot be reserved; the context has room for 1 to {room} more.")
        try:
            self.kv.extend(sequence, n_tokens)
            if self.kv.states:
                self.kv.states.begin(sequence, n_tokens)
        except BaseException:  # others may need the blocks that it took before the pool was empty
            self.kv.trim(sequence)
            raise
        sequence.reserved = n_tokens

    def forward_range(self, segment: Segment, first: int, stop: int, offset: int = 0,
                   cancel: Cancellation | None = None, rows: NDArray[np.int64] | None = None) -> Logits:
        """Run the instructions first .. stop - 1 over tokens that begin `offset` rows after the sequence's end, or are
        the `rows` after it, ascending from 0 on.

        This runs a prompt stage by stage: every chunk through the first range of instructions, then every chunk through
        the next. At the beginning of a layer a chunk needs only its hidden states (tensor ``x.0``) of the instructions
        before, which the caller keeps between stages. `reserve` made room for all chunks; the sequence has none of
        these tokens before `append`.
        """
        (segment,) = plain_segments((segment,))
        self._admit((segment,))
        if rows is not None:
            if len(rows) != len(segment.ids) or segment.parents or (np.diff(rows, prepend=-1) < 1).any():
                raise RequestError(f"Rows {shown(rows.tolist())} cannot be those of {len(segment.ids)} tokens of a "
                                   "chain; give one for each, ascending.")
            offset = int(rows[-1]) + 1 - len(rows)
        if offset < 0 or offset + len(segment.ids) > segment.sequence.reserved:
            raise RequestError(f"{len(segment.ids)} tokens {offset} after the end do not fit the "
                               f"{segment.sequence.reserved} reserved ones; reserve more.")
        n = len(self.program.instructions)
        if not 0 <= first <= stop <= n:
            raise RequestError(f"The program has no instructions {first} to {stop - 1}; it has 0 to {n - 1}.")
        logits = self._run((segment,), first, stop, offset, cancel, 0, rows)
        if self.kv.states:
            self.kv.states.end(segment.sequence, len(segment.ids), 0, offset)
        return logits

    def append(self, sequence: Sequence, ids: Items[int], role: int = DECODE) -> None:
        """Commit reserved tokens that have gone through all instructions; PROMPT where all ranges had that role."""
        ids = integers("ids", ids)
        if len(ids) > sequence.reserved:
            raise RequestError(f"{len(ids)} tokens are more than the {sequence.reserved} reserved ones.")
        if self.kv.states and len(ids) < sequence.reserved:
            raise RequestError(f"Recurrent layers have gone through {sequence.reserved} reserved tokens; append all of "
                               f"them, not {len(ids)}.")
        if role == DECODE:
            _mark_decoding(sequence)
        sequence.tokens.extend(ids)
        sequence.cut, sequence.reserved = len(ids) < sequence.reserved, 0
        self.kv.trim(sequence)
        if self.kv.states:
            self.kv.states.settle(sequence)

    @property
    def reader(self) -> Readers | None:
        """Reader of weights in storage during generation; None if all weights are in memory."""
        return self.executor.stream

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that forward passes have waited for reads of weights."""
        return self.executor.waited_ns

    @property
    def value_blocks(self) -> int:
        """Blocks of V, each of one KV head, that decoded tokens have read in layers with top-n attention."""
        return self.executor.get(abi.CTX_VALUES)

    def settle(self) -> None:
        """Wait until the process holds all planned memory; peaks measured earlier are too low."""
        self._prefaulter.wait()

    def close(self) -> None:
        """Cancel the running pass, stop the threads and free all memory; callable twice, and from any thread."""
        self._prefaulter.close()
        self.executor.close()
        self.executor.regions.clear()
        self.kv.close()
        self._logits = np.zeros((0, 0), np.float32)
        self.bundle.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _run_and_commit(self, segments: Items[Segment], cancel: Cancellation | None, further: int = 0) -> Logits:
        """Run tokens, commit them to their sequences, and decode up to `further` more within the same pass."""
        self._admit(segments)
        further = self._steps(segments, further) if further else 0
        try:
            for segment in segments:
                self.kv.extend(segment.sequence, len(segment.ids) + further)
                if self.kv.states:
                    self.kv.states.begin(segment.sequence, len(segment.ids), further > 0)
            logits = self._run(segments, 0, None, 0, cancel, further)
            chosen = self._tables.chosen(len(segments), further, self.executor.steps_left) if further else repeat(())
            for segment, more in zip(segments, chosen, strict=False):
                if segment.role == DECODE:
                    _mark_decoding(segment.sequence)
                if self.kv.states:
                    self.kv.states.end(segment.sequence, len(segment.ids), len(more))
                segment.sequence.tokens.extend((*segment.ids, *more))
                segment.sequence.cut = False
        finally:  # frees the blocks after the last token if the forward pass failed or ended early
            for segment in segments:
                self.kv.trim(segment.sequence)
                if self.kv.states:
                    self.kv.states.settle(segment.sequence)
        return logits


def _with_threads_of(host: Session | None, config: RuntimeConfig) -> RuntimeConfig:
    """Return the config with the number of threads of the host session."""
    if host is None:
        return config
    if config.threads not in (None, host.config.threads):
        raise RequestError(f"The session whose threads are shared has {host.config.threads}, and {config.threads} are "
                           "asked for; leave threads out.")
    return replace(config, threads=host.config.threads)


def _mark_decoding(sequence: Sequence) -> None:
    """Mark where decoding began: from here on approximate passes may have changed the KV cache."""
    if sequence.decoded is None:
        sequence.decoded = len(sequence)
