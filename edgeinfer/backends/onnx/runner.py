"""A runner on onnxruntime: attention gqa over slots, which are bound where they lie; ragged decodes in one call."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.errors import CancelledError, ClosedError, EdgeInferError, RequestError
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.memory_planner import MemoryPlan, resolve
from edgeinfer.runner import Cancellation, Runner, Segment, Sequence, plain_segments

from .copying import FROM, TO
from .data import Progress
from .devices import Provider, open_session
from .driver import gpu_free_bytes
from .flavour import Heads
from .planning import DevicePlanner, device_config, fit_device
from .slots import Pool, Slabs
from .step import PAST, PRESENT, Step, run_options
from .stored import COPY, MODEL, model_folder

Logits = NDArray[np.float32]


class _Call(NamedTuple):
    """What one call of the model runs: new tokens of a range of slots."""

    first: int
    """Slot."""
    ids: NDArray[np.int64]
    """(slots, tokens)."""
    ends: NDArray[np.int32]
    """Positions of each slot, these tokens included."""
    rows: list[int]
    """Of the call, whose logits are wanted: slot x tokens + token."""
    targets: list[int]
    """Rows of the walk that they become."""


class OnnxRunner(Runner):
    """Runs a bundle on an execution provider of onnxruntime.

    Each sequence that has tokens holds a slot with room for a whole context, whatever it shares with others. Several
    new tokens of a sequence go through in a call of their own; single ones of all sequences together. A walk can be
    cancelled between its calls.

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
    beside : MemoryPlan, optional
        Of what has taken its memory before, within the same budget.

    Raises
    ------
    BudgetError
        The plan exceeds the memory of this process or of the device.
    UsageError
        The provider does not work, or cannot do what is asked for.
    BundleError, DestinationError, UnsupportedModelError
        The bundle is damaged, cannot be lowered, or the cache cannot be written.
    """

    def __init__(self, bundle: Bundle, config: RuntimeConfig, provider: Provider, progress: Progress | None = None,
                 beside: MemoryPlan | None = None):
        self.bundle, self.model, self.provider = bundle, bundle.config, provider
        self.config = resolve(device_config(config, provider), self.model)
        self.isa = f"onnxruntime {provider.name}"
        planner = DevicePlanner(build_graph(self.model, expected_types(bundle.types), Recipe(())), provider)
        self.plan = fit_device(planner, self.config, beside)
        self._turn, self._closed, self._process = threading.RLock(), False, os.getpid()
        self._free = gpu_free_bytes() if self.plan.device_bytes else 0
        ctx, slots, kv = int(self.config.ctx or 0), self.config.max_sequences, self.config.kv
        self.block_tokens = ctx
        with ExitStack() as opened:
            self.slabs = Slabs(self.model.num_hidden_layers, Heads.of(self.model), slots, ctx, kv, provider)
            opened.callback(self.slabs.close)
            bundle.check_contents(self.config.threads)
            folder = model_folder(bundle, planner.flavour(kv), self.slabs.names, progress)
            self._session = open_session(str(folder / MODEL), provider, int(self.config.threads or 1))
            self._copies = open_session(str(folder / COPY), provider, 1)
            self._options = run_options(provider)
            opened.pop_all()
        self.pool = Pool(slots)
        self._chunks: dict[int, Any] = {}
        self._steps: dict[tuple[int, int], Step] = {}
        self._staged = np.zeros((max(self.config.outputs, 1), self.model.vocab_size), np.float32)
        self._logits = np.zeros((self.config.outputs, self.model.vocab_size), np.float32)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def new_sequence(self) -> Sequence:
        """Return an empty sequence."""
        return self.pool.new()

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a copy, with a slot of its own that is copied at once; raises `RequestError` if all slots are held."""
        self.pool.check_own(sequence)
        copy = self.pool.new()
        if sequence.tokens:
            with self._turn:
                self._check_open()
                target = self.pool.hold(copy)
                binding = self._copies.io_binding()
                self.slabs.bind(binding, sequence.blocks[0], 1, FROM, TO, target)
                self._run_bound(self._copies, binding, self._options)
            copy.tokens = list(sequence.tokens)
        copy.decoded = sequence.decoded
        return copy

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n."""
        self.pool.truncate(sequence, n_tokens)

    # -- tokens in, logits out ---------------------------------------------------------------------------------------

    def walk(self, segments: Items[Segment], cancel: Cancellation | None = None) -> Logits:
        """Run the model over the new tokens of several sequences; see `Runner.walk`."""
        segments = plain_segments(segments)
        self._admit(segments)
        with self._turn:
            self._check_open()
            try:
                for segment in segments:
                    self.pool.hold(segment.sequence)
                for call in self._calls(segments):
                    self._check_open()
                    if cancel is not None and cancel.asked:
                        raise CancelledError("The run was cancelled.")
                    self._run(call)
                for segment in segments:
                    segment.sequence.tokens.extend(segment.ids)
            finally:  # a walk that failed leaves slots of sequences without tokens
                for segment in segments:
                    self.pool.trim(segment.sequence)
            return self._logits[: sum(len(segment.outputs) for segment in segments)]

    def close(self) -> None:
        """End a walk that runs and let go of all memory; callable twice, and from any thread."""
        self._closed = True
        for options in (self._options, *(step.options for step in tuple(self._steps.values()))):
            options.terminate = True  # of a call that runs in another thread
        with self._turn:
            self._chunks.clear()
            self._steps.clear()
            self._session = self._copies = None
            self.slabs.close()
            self._staged = self._logits = np.zeros((0, 0), np.float32)
            self.bundle.close()

    @property
    def device_used_bytes(self) -> int | None:
        """Memory of the GPU that is taken since this runner opened, by it or by others; None without one."""
        return self._free - gpu_free_bytes() if self.plan.device_bytes else None

    # -- parts -------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The model was closed; open it again.")
        if self._process != os.getpid():
            raise EdgeInferError("This process was forked from the one that opened the model, and threads are not "
                                 "inherited; open the model again in this process.")

    def _admit(self, segments: Items[Segment]) -> None:
        """Refuse a walk that does not fit the plan or makes no sense."""
        self.check_walk(segments, self.plan.request.tokens)
        for segment in segments:
            self.pool.check_own(segment.sequence)
            self.check(segment.sequence, segment.ids)
            segment.check()
            if segment.parents is not None and list(segment.parents) != list(range(-1, len(segment.ids) - 1)):
                raise RequestError(f"This model cannot walk the tree {list(segment.parents)}; walk its tokens as a "
                                   "chain.")

    def _calls(self, segments: Items[Segment]) -> Iterator[_Call]:
        """What is to be run: behind a past attention takes several tokens of one slot, or one token of each.

        Single tokens come first: what their call writes into idle slots, others of this walk overwrite.
        """
        row, single, several = 0, list[tuple[int, Segment, list[int]]](), list[_Call]()
        for segment in segments:
            targets = list(range(row, row := row + len(segment.outputs)))
            slot, end = segment.sequence.blocks[0], len(segment.sequence) + len(segment.ids)
            if len(segment.ids) == 1:
                single.append((slot, segment, targets))
                continue
            several.append(_Call(slot, np.array([segment.ids], np.int64), np.array([end], np.int32),
                                 list(segment.outputs), targets))
        for part in self._ranges(sorted(single, key=lambda item: item[0])):
            yield self._together(part)
        yield from several

    def _ranges(self, single: list[tuple[int, Segment, list[int]]]) -> Iterator[list[tuple[int, Segment, list[int]]]]:
        """Slots that decode together: one call takes a range, whose idle slots write a row behind their end, where they
        have room for one."""
        part: list[tuple[int, Segment, list[int]]] = []
        for item in single:
            if part and any(self._length(slot) >= self.block_tokens for slot in range(part[-1][0] + 1, item[0])):
                yield part
                part = []
            part.append(item)
        if part:
            yield part

    def _length(self, slot: int) -> int:
        owner = self.pool.owner(slot)
        return len(owner.tokens) if owner else 0

    def _together(self, part: list[tuple[int, Segment, list[int]]]) -> _Call:
        """The call of single tokens of a range of slots."""
        first, last = part[0][0], part[-1][0]
        ids = np.zeros((last - first + 1, 1), np.int64)
        ends = np.array([self._length(slot) + 1 for slot in range(first, last + 1)], np.int32)
        rows, targets = [], []
        for slot, segment, wanted in part:
            ids[slot - first] = segment.ids[0]
            rows += [slot - first] * len(wanted)
            targets += wanted
        return _Call(first, ids, ends, rows, targets)

    def _run(self, call: _Call) -> None:
        """Run the model, and put the logits into the walk's rows."""
        if call.ids.shape[1] == 1:
            self._run_step(call)
            return
        rows = call.rows or [call.ids.size - 1]  # none at all would be a product without rows
        binding = self._chunks.get(call.first)
        if binding is None:
            binding = self._chunks[call.first] = self._session.io_binding()
            self.slabs.bind(binding, call.first, 1, PAST, PRESENT)
        for name, values in (("input_ids", call.ids), ("seqlens_k", call.ends - 1),
                             ("total_sequence_length", call.ends.max(keepdims=True)),
                             ("output_rows", np.array(rows, np.int64))):
            binding.bind_cpu_input(name, values)
        binding.bind_output("logits", "cpu", 0, np.float32, [len(rows), self.model.vocab_size],
                            self._staged.ctypes.data)
        self._run_bound(self._session, binding, self._options)
        if call.targets:
            self._logits[call.targets] = self._staged[: len(rows)]

    def _run_step(self, call: _Call) -> None:
        key = (call.first, len(call.ids))
        step = self._steps.get(key)
        if step is None:
            step = Step(self._session, self.provider, self.slabs, *key, self.model.vocab_size, len(self._steps) + 1)
            self._steps[key] = step
        step.write(call.ids, call.ends)
        self._run_bound(self._session, step.binding, step.options)
        if call.targets:
            self._logits[call.targets] = step.logits()[call.rows]

    def _run_bound(self, session: Any, binding: Any, options: Any) -> None:
        try:
            session.run_with_iobinding(binding, options)
        except Exception as error:  # pybind's own classes, and RuntimeError
            self._check_open()
            said = " ".join(str(error).split())[:300]
            raise EdgeInferError(f"onnxruntime failed on {self.provider.name}, and the request ends here: {said} If "
                                 "that goes on, open the model again.") from None

