"""A runner on onnxruntime: admission, cancellation and closing, for every layout of the KV cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.process import say
from edgeinfer.bundle import Bundle
from edgeinfer.config import CUDA, Recipe, RuntimeConfig
from edgeinfer.errors import CancelledError, RequestError, UsageError
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.memory_planner import MemoryPlan, resolve
from edgeinfer.runner import (
    BlockForm,
    Cancellation,
    Runner,
    Segment,
    Sequence,
    computed_elsewhere,
    integers,
    plain_segments,
    prepare_samples,
)

from ...base.progress import OnStageProgress
from .calls import Calls
from .devices import Provider
from .driver import gpu_free_bytes
from .fitting import fit_device
from .flavour import kv_layers
from .pages import PageCalls, Pages
from .planning import device_planner
from .prompt_blocks import PromptBlocks
from .sessions import Sessions
from .slabs import Slabs
from .slots import SlotCalls, Slots
from .states import UNTRIED_STATES, states_of
from .stored import model_folder

Logits = NDArray[np.float32]


class OnnxRunner(Runner):
    """Runs a bundle on an execution provider of onnxruntime.

    Sequences hold a slot each, or pages that they share; a pass is several calls over slots, and one over pages.

    Parameters
    ----------
    bundle : Bundle
        Open; it is lowered into the user's cache unless it was before.
    config : RuntimeConfig
        Its `kv` is the type of the model, too; passes that approximate are refused.
    provider : Provider
        As `provider_of` returns it.
    progress : callable, optional
        Called with (bytes done, bytes in all, name) while the model is lowered.
    draft_plan : MemoryPlan, optional
        Plan of the draft that is opened next, within the same budget.
    plan : MemoryPlan, optional
        Its own, where that is made already.

    Raises
    ------
    BudgetError
        The plan exceeds the memory of this process or of the device.
    UsageError
        The provider does not work, or does not support the request.
    BundleError, DestinationError, UnsupportedModelError
        The bundle is damaged, cannot be lowered, or the cache cannot be written.
    """

    kv: Slots | Pages
    """Owner of each sequence's K and V."""
    _calls: Calls

    def __init__(self, bundle: Bundle, config: RuntimeConfig, provider: Provider,
                 progress: OnStageProgress | None = None,
                 draft_plan: MemoryPlan | None = None, plan: MemoryPlan | None = None):
        self.bundle, self.model, self.provider = bundle, bundle.config, provider
        self.isa, self.device = f"onnxruntime {provider.name}", provider.device
        graph = build_graph(self.model, expected_types(bundle.types), Recipe(()))
        planner, config = device_planner(graph, config, provider, config.kv)
        self.plan = plan or fit_device(planner, config, draft_plan)
        sequences = self.plan.request.sequences  # fewer slots than requested
        self.config = replace(resolve(config, self.model), max_sequences=sequences)
        self.block_tokens = planner.positions(self.plan.request)
        self.lowered_bytes = planner.lower(self.plan.request).read
        self._turn = threading.RLock()
        self._free = gpu_free_bytes() if self.plan.device_bytes else 0
        kv = self.config.kv
        with ExitStack() as opened:
            self.slabs = Slabs(planner.layout, kv_layers(graph), self.plan.kv_blocks + planner.spare,
                               self.block_tokens, kv, provider, states_of(graph, kv))
            opened.callback(self.slabs.close)
            bundle.check_contents(self.config.threads)
            folder = model_folder(bundle, planner.flavour(self.plan.request), self.slabs.copied, progress)
            self.sessions = Sessions(folder, provider.for_sequences(sequences), int(self.config.threads or 1))
            opened.pop_all()
        if provider.device == CUDA and self.slabs.recurrent:
            say(UNTRIED_STATES)
        self._blocks = PromptBlocks(graph, self.slabs, self.sessions)
        self._arrange(planner.paged)
        self._changed: list[Sequence] = []
        """Sequences whose recurrent states include this pass already."""
        self._logits = np.zeros((self.config.outputs, self.model.vocab_size), np.float32)

    def _arrange(self, paged: bool) -> None:
        """Return the owner of the KV cache, and the calls of a forward pass."""
        copy = partial(self.sessions.copy, self.slabs)
        given = self.sessions, self.slabs, self.config.outputs, self.model.vocab_size
        if paged:
            self.kv = Pages(self.plan.kv_blocks, self.block_tokens, copy)
            self._calls = PageCalls(*given, int(self.config.ctx or 0), self.config.max_sequences)
        else:
            self.kv = Slots(self.plan.kv_blocks, copy, self.slabs.recurrent)
            self._calls = SlotCalls(*given, self.kv.pool)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def new_sequence(self) -> Sequence:
        """Return an empty sequence."""
        return self.kv.new()

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a copy: one that shares its pages until one of the two writes, or with a slot of its own, for which
        `RequestError` is raised if all are held."""
        with self._turn:
            return self.kv.fork(sequence)

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return the most of the first n tokens that a sequence can be cut to."""
        return self.kv.can_truncate(sequence, n_tokens)

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n; raises `RequestError` if a recurrent state includes the others."""
        self.kv.truncate(sequence, n_tokens)

    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether context and pages have room for this many more tokens of each; see `Runner.fits`."""
        return super().fits(wanted) and self.kv.fits(wanted)

    @property
    def n_blocks(self) -> int:
        """Pages, or slots."""
        return self.plan.kv_blocks

    @property
    def free_blocks(self) -> int:
        """Pages that are neither held nor cached, or free slots."""
        return self.kv.pool.n_free

    @property
    def prefix_blocks(self) -> int:
        """Pages in the prefix cache; none in slots."""
        return self.kv.n_cached

    def from_prefix(self, ids: Items[int], salt: bytes = b"") -> Sequence:
        """Return a sequence with the longest cached beginning of a prompt, or an empty one that will have a slot; see
        `Runner.from_prefix`."""
        ids = integers("ids", ids)
        self.check(self.kv.new(), ids)
        return self.kv.from_prefix(ids, salt)

    @property
    def caches_prefixes(self) -> bool:
        """True if the KV cache has pages, which sequences can share."""
        return isinstance(self.kv, Pages)

    def cache_prefix(self, sequence: Sequence, salt: bytes = b"") -> None:
        """Cache the full pages of a sequence; see `Runner.cache_prefix`. Nothing happens to slots."""
        self.kv.cache_prefix(sequence, len(sequence), salt)

    def drop_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.kv.drop_prefixes()

    def read_blocks(self, sequence: Sequence, first: int, complete: bool, form: BlockForm | None = None
                    ) -> Iterator[bytes]:
        """Return parts of a prompt for our own kernels; see `Runner.read_blocks`."""
        if self.slabs.recurrent:
            raise RequestError("This device does not hand over the recurrent state of a prompt; compute it without "
                               "--prefill-device.")
        if form is None or form.model != computed_elsewhere(self.bundle.identity):
            raise RequestError("K and V of this prompt are for our own kernels with the same bundle alone.")
        self.kv.check_own(sequence)
        self.sessions.check_open()
        return self._in_turn(self._blocks.read(sequence, first, complete, form))

    def _in_turn(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield parts, each of which waits for the pass that runs; others run between them."""
        while True:
            with self._turn:
                part = next(parts, None)
            if part is None:
                return
            yield part

    # -- tokens in, logits out ---------------------------------------------------------------------------------------

    def forward(self, segments: Items[Segment], cancel: Cancellation | None = None) -> Logits:
        """Run the model over the new tokens of several sequences; see `Runner.forward`."""
        segments = plain_segments(segments)
        self._admit(segments)
        prepare_samples(segments)
        with self._turn:
            self.sessions.check_open()
            logits = self._logits
            self._changed.clear()
            try:
                for segment in segments:
                    self.kv.extend(segment.sequence, len(segment.ids))
                with self.sessions.translated_errors(cancel):
                    self._run(segments, cancel)
                for segment in segments:
                    segment.sequence.tokens.extend(segment.ids)
                    segment.sequence.cut = False
            except BaseException as error:
                for sequence in self._changed:  # states from before are gone
                    self.kv.truncate(sequence, 0)
                if isinstance(error, Exception):  # a signal handler may have closed the model in between
                    self.sessions.check_open()
                raise
            finally:  # a forward pass that failed leaves room after the last token
                for segment in segments:
                    self.kv.trim(segment.sequence)
            return logits[: sum(len(segment.outputs) for segment in segments)]

    def close(self) -> None:
        """Cancel the running forward pass and free all memory; callable twice, and from any thread."""
        self.sessions.terminate()
        if self.sessions.forked:  # the holder of the turn does not exist here
            return
        with self._turn:
            self._calls.close()
            self.sessions.close()
            self.slabs.close()
            self._logits = self._logits[:0]
            self.bundle.close()

    @property
    def device_used_bytes(self) -> int | None:
        """Memory of the GPU that is taken since this runner opened, by it or by others; None without one, or where its
        driver does not say."""
        if not self.plan.device_bytes:
            return None
        try:
            return self._free - gpu_free_bytes()
        except UsageError:  # a missing statistic ends nothing
            return None

    # -- parts -------------------------------------------------------------------------------------------------------

    def _run(self, segments: Items[Segment], cancel: Cancellation | None) -> None:
        """Make the calls of a forward pass, and keep their logits."""
        for number, call in enumerate(self._calls.of(segments)):
            self.sessions.check_open()
            if cancel is not None and cancel.asked and not (call.in_place and number):
                raise CancelledError("The run was cancelled.")
            if call.in_place:
                self._changed += call.changes
            self.sessions.run(call.binding, call.graph, None if call.in_place else cancel)
            if call.commit:
                self._changed += call.changes
                call.commit()
            if call.targets:
                self._logits[call.targets] = call.logits()

    def _admit(self, segments: Items[Segment]) -> None:
        """Refuse a forward pass that does not fit the plan or makes no sense."""
        self.check_pass(segments, self.plan.request.tokens)
        for segment in segments:
            self.kv.check_own(segment.sequence)
            self.check(segment.sequence, segment.ids)
            segment.check()
            if segment.parents is not None and list(segment.parents) != list(range(-1, len(segment.ids) - 1)):
                raise RequestError(f"This model cannot run the tree {list(segment.parents)}; run its tokens as a "
                                   "chain.")
