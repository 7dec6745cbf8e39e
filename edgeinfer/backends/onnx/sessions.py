"""The models that a runner has open on a provider: running them, and ending that from another thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.process import check_process
from edgeinfer.config import ONNX_CPU
from edgeinfer.errors import CancelledError, ClosedError, EdgeInferError
from edgeinfer.runner import Cancellation

from .caller import NO_GRAPH, Caller
from .devices import MEMORY_REMEDY, PROVIDERS, Provider, lacks_memory, one_line, raised_by_onnxruntime
from .slabs import Slabs
from .stored import COPY, MODEL


class Sessions:
    """The lowered model and the one that copies blocks of its KV cache.

    Parameters
    ----------
    folder : Path
        As `model_folder` returns it.
    provider : Provider
    threads : int
    """

    def __init__(self, folder: Path, provider: Provider, threads: int):
        self.provider, self._closed, self._process = provider, False, os.getpid()
        self.model: Any = provider.open(str(folder / MODEL), threads)
        copier = PROVIDERS[ONNX_CPU] if provider.partial else provider  # there K and V are this process's memory
        self._copies: Any = copier.open(str(folder / COPY), 1)
        self._caller = Caller(provider)

    @property
    def forked(self) -> bool:
        """True if this process was forked from the one that opened the models."""
        return self._process != os.getpid()

    def check_open(self) -> None:
        """Raise `ClosedError`, or its equivalent in a process that was forked."""
        if self._closed:
            raise ClosedError("The model was closed; open it again.")
        check_process(self._process)

    def run(self, binding: Any, graph: int = NO_GRAPH, cancel: Cancellation | None = None) -> None:
        """Run the model, until `cancel` is requested; raises whatever onnxruntime does, see `translated_errors`."""
        self._run(self.model, binding, graph, cancel)

    def copy(self, slabs: Slabs, source: int, target: int, states_alone: bool = False) -> None:
        """Copy a block of the KV cache, or only of the states of recurrent layers, within the memory of its device."""
        self.check_open()
        with self.translated_errors():
            binding = self._copies.io_binding()
            slabs.bind_copy(binding, source, target, states_alone)
            self._run(self._copies, binding)

    def read(self, slabs: Slabs, block: int, first: int, end: int, numbers: Items[int]) -> list[NDArray[Any]]:
        """Return rows of a block of the KV cache, copied from its device: (KV heads, rows, elements) for each of the
        slabs of these numbers."""
        self.check_open()
        found = []
        with self.translated_errors():
            for head in range(slabs.heads_apart(numbers)):
                binding = self._copies.io_binding()
                found.append(slabs.bind_read(binding, block, first, end, head, numbers))
                self._run(self._copies, binding)
        return [np.concatenate([heads[number] for heads in found if number in heads]) for number in numbers]

    @contextmanager
    def translated_errors(self, cancel: Cancellation | None = None) -> Iterator[None]:
        """Turn onnxruntime's errors, when it runs a model or copies to and from a device, into one sentence.
        """
        try:
            yield
        except Exception as error:
            if not raised_by_onnxruntime(error):
                raise
            self.check_open()
            if cancel is not None and cancel.asked:
                raise CancelledError("The run was cancelled.") from None
            remedy = MEMORY_REMEDY if lacks_memory(error) else "If that persists, open the model again."
            raise EdgeInferError(f"onnxruntime failed on {self.provider.name}, which ends the request: "
                                 f"{one_line(error)} {remedy}") from None

    def _run(self, session: Any, binding: Any, graph: int = NO_GRAPH, cancel: Cancellation | None = None) -> None:
        self._caller.run(session, binding, lambda: self._closed or (cancel is not None and cancel.asked), graph)

    def terminate(self) -> None:
        """End a run of another thread, and refuse all that follow."""
        self._closed = True
        self._caller.end()

    def close(self) -> None:
        """Free the models once the cancelled run has ended."""
        self._caller.close()
        self.model = self._copies = None
