"""The models that a runner has open on a provider: running them, and ending that from another thread."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from edgeinfer.errors import ClosedError, EdgeInferError

from .devices import Provider
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
        self._copies: Any = provider.open(str(folder / COPY), 1)
        self._options: list[Any] = []
        self.options = self.new_options()
        """Of runs that are no graph's."""

    def new_options(self, graph: int = -1) -> Any:
        """Return options of a run: of the graph with this number where the provider has graphs, else of none."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.log_severity_level = 4  # what goes wrong is raised, and said once
        if self.provider.graphs:
            options.add_run_config_entry("gpu_graph_id", str(graph))
        self._options.append(options)
        return options

    def check_open(self) -> None:
        """Raise `ClosedError`, or what stands for it in a process that was forked."""
        if self._closed:
            raise ClosedError("The model was closed; open it again.")
        if self._process != os.getpid():
            raise EdgeInferError("This process was forked from the one that opened the model, and threads are not "
                                 "inherited; open the model again in this process.")

    def run(self, binding: Any, options: Any) -> None:
        """Run the model."""
        self._run(self.model, binding, options)

    def copy(self, slabs: Slabs, source: int, target: int) -> None:
        """Copy a block of the KV cache within the memory of its device."""
        self.check_open()
        binding = self._copies.io_binding()
        slabs.bind_copy(binding, source, target)
        self._run(self._copies, binding, self.options)

    def _run(self, session: Any, binding: Any, options: Any) -> None:
        try:
            session.run_with_iobinding(binding, options)
        except Exception as error:  # pybind's own classes, and RuntimeError
            self.check_open()
            said = " ".join(str(error).split())[:300]
            raise EdgeInferError(f"onnxruntime failed on {self.provider.name}, and the request ends here: {said} If "
                                 "that goes on, open the model again.") from None

    def terminate(self) -> None:
        """End a run of another thread, and refuse all that follow."""
        self._closed = True
        for options in tuple(self._options):
            options.terminate = True

    def close(self) -> None:
        """Let go of the models."""
        self.model = self._copies = None
