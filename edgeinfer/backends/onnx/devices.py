"""Devices that run a model: our own kernels, or an execution provider of onnxruntime by name, without silent fallback.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from edgeinfer.base.process import say
from edgeinfer.config import AUTO, COREML, CUDA, DEVICES, DML, ONNX_CPU, OPENVINO, QNN, WEBGPU
from edgeinfer.errors import UsageError

from .driver import check_driver
from .packages import check_wheels, import_onnxruntime, installed
from .plugins import Plugin

LIBRARIES = {"libcudart.so.13": "nvidia-cuda-runtime", "libcublasLt.so.13": "nvidia-cublas",
             "libcublas.so.13": "nvidia-cublas", "libcurand.so.10": "nvidia-curand",
             "libcudnn.so.9": "nvidia-cudnn-cu13"}
"""Libraries that the CUDA provider loads, and the packages that contain them.

It starts without cuDNN, but attention on GPUs of compute capability 9.0 and above then uses slower kernels.
"""
OPENVINO_OPTIONS = {"load_config": json.dumps({
    # by default activations are int8, and the rest bf16 if the processor has it: logits differed by 6e-3 (1.8.1)
    "CPU": {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "INFERENCE_NUM_THREADS": "{threads}"}})}
"""Settings of the provider; the devices GPU and NPU keep their own defaults."""
MEMORY_REMEDY = "Lower --ctx or --samples, end programs that hold memory there, or run with --device cpu."
_NO_MEMORY = re.compile(r"out of memory|failed to allocate|bad.alloc|ALLOC_FAILED", re.IGNORECASE)
FAST_MATMULS = "ep.cuda.fpa_intb_gemm"


class Provider(NamedTuple):
    """An execution provider as sessions are given it."""

    device: str
    """Name for ``--device``."""
    name: str
    """Name in onnxruntime."""
    memory: str
    """Kind of its memory, as bindings call it."""
    options: dict[str, str]
    """Options of the provider."""
    entries: dict[str, str]
    """Configuration entries of the session."""
    kv: tuple[str, ...]
    """Types of the KV cache, and so of the model; the first where nothing is requested."""
    graphs: bool = False
    """True if decode steps are recorded and replayed."""
    page_positions: int = 0
    """Positions of a page of KV in its kernels; 0 if it has no paged attention."""
    plugin: Plugin | None = None
    """The package that contains it, where that is not onnxruntime for CPUs or CUDA."""
    library_bytes: int = 28_000_000
    """Bytes of this process for onnxruntime and the libraries that the provider loads."""
    fault: str = ""
    """Why its results are not right yet, so that it is refused."""
    untried: bool = False
    """True if it has never run a model of edgeinfer's, which opening one says."""

    def for_sequences(self, sequences: int) -> Provider:
        """Return the provider with the matmuls that are fastest where at most so many sequences decode together.

        CUDA's fast matmuls pay from two rows on: one row of the 7B shape took 4.1 ms with them and 3.2 ms without, 32
        took 8.9 and 15.4 ms (docs/measurements/gpu.md).
        """
        if sequences > 1:
            return self
        return self._replace(entries={key: value for key, value in self.entries.items() if key != FAST_MATMULS})

    @property
    def partial(self) -> bool:
        """True if operations that it does not have may run on onnxruntime's CPU provider; how many is said."""
        return self.plugin is not None

    @property
    def fast_matmuls(self) -> bool:
        """True if it repacks matrices of 4 and 8 bits for the matmuls of several rows."""
        return FAST_MATMULS in self.entries

    def open(self, model: str, threads: int) -> Any:
        """Open a model, and see that all of it is there.

        Returns
        -------
        onnxruntime.InferenceSession
            Runners use its `io_binding` and `run_with_iobinding`.

        Raises
        ------
        UsageError
            The provider does not start, or would leave a part of the model to another.
        """
        options = self._session_options(threads)
        try:
            session = self._session(model, options, threads)
        except UsageError:
            raise
        except Exception as error:  # pybind's own classes, and RuntimeError
            remedy = MEMORY_REMEDY if lacks_memory(error) else (
                "Nothing falls back to another device; choose one with --device. If other models open, remove "
                f"{Path(model).parent}, and this one is lowered again.")
            raise UsageError(f"onnxruntime cannot open the model on {self.name}: {_first_line(error)} {remedy}"
                             ) from None
        if (first := session.get_providers()[0]) != self.name:
            remedy = self.plugin.command if self.plugin else "pip install 'edgeinfer[gpu]'"
            raise UsageError(f"onnxruntime gave {first} instead of {self.name}, which did not start; see that its "
                             f"libraries are there: {remedy}.")
        if self.partial:
            say(shared_out(session, self))
            if self.untried:
                say(f"Device {self.device} has not been tested with edgeinfer yet: compare its results first, with "
                    f"benchmarks/gpu_check.py --stage smoke --device {self.device}.")
        else:
            check_placement(session, self)
        return session

    def _session_options(self, threads: int) -> Any:
        options = import_onnxruntime().SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        if self.device == ONNX_CPU:  # a block for each length of a prompt, in addition to the arena, gains no time here
            options.enable_mem_pattern = False
        options.log_severity_level = 4  # errors are raised, and reported once
        for key, value in (*self.entries.items(), ("session.record_ep_graph_assignment_info", "1")):
            options.add_session_config_entry(key, value)
        return options

    def _session(self, model: str, options: Any, threads: int) -> Any:
        settings = {key: value.replace("{threads}", str(threads)) for key, value in self.options.items()}
        found = self.plugin.find(self.device, self.name) if self.plugin else None
        if found is None:
            return import_onnxruntime().InferenceSession(model, options, providers=[(self.name, settings)])
        options.add_provider_for_devices([found], settings)
        return import_onnxruntime().InferenceSession(model, options)


PROVIDERS = {
    ONNX_CPU: Provider(ONNX_CPU, "CPUExecutionProvider", "cpu", {}, {}, ("f32", "f16")),
    CUDA: Provider(
        CUDA, "CUDAExecutionProvider", "cuda",
        # the default arena rounds up to powers of two: 173 MB of weights took 269 MB (1.31.1)
        {"device_id": "0", "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0",
         "enable_cuda_graph": "1"},
        {"session.disable_cpu_ep_fallback": "1",  # else a broken installation gives a session on the CPU
         "session.use_device_allocator_for_initializers": "1", FAST_MATMULS: "1"},
        ("f16",), True, 256, None, 901_000_000),  # pages that all kernels of PagedAttention take (1.31.1)
    **{one.device: one for one in (
        Provider(WEBGPU, "WebGpuExecutionProvider", "cpu", {}, {}, ("f16", "f32"),
                 plugin=Plugin("onnxruntime-ep-webgpu", ("linux", "win32", "darwin"), "onnxruntime_ep_webgpu"),
                 fault="its attention gave other values than the CPU's with K and V in this process's memory"),
        Provider(OPENVINO, "OpenVINOExecutionProvider", "cpu", OPENVINO_OPTIONS, {}, ("f32", "f16"),
                 plugin=Plugin("onnxruntime-ep-openvino", ("linux", "win32"), "onnxruntime_ep_openvino"),
                 library_bytes=78_000_000),
        Provider(COREML, "CoreMLExecutionProvider", "cpu", {}, {}, ("f16", "f32"),
                 plugin=Plugin("onnxruntime", ("darwin",)), untried=True),
        Provider(QNN, "QNNExecutionProvider", "cpu", {}, {}, ("f16", "f32"),
                 plugin=Plugin("onnxruntime-qnn", ("linux", "win32"), "onnxruntime_qnn", ("NPU", "GPU", "CPU")),
                 untried=True),
        Provider(DML, "DmlExecutionProvider", "cpu", {}, {}, ("f16", "f32"),
                 plugin=Plugin("onnxruntime-directml", ("win32",)), untried=True),
    )},
}


def provider_of(device: str) -> Provider | None:
    """Return the executors that may run models here; None for our own kernels.

    Of auto that is CUDA where it works; whether it runs a certain model says `device_planner`.

    Raises
    ------
    UsageError
        There is no such device, or it does not work here; the sentence has the reason and the remedy.
    """
    if device not in DEVICES:
        raise UsageError(f"device is {device!r}; choose one of {', '.join(DEVICES)}.")
    if device == AUTO:
        try:
            check_cuda()
        except UsageError as why:
            say(f"Device auto took cpu, our own kernels, because CUDA cannot be used: {why}")
            return None
        return PROVIDERS[CUDA]
    if device == CUDA:
        check_cuda()
    elif device == ONNX_CPU:
        check_wheels()
    found = PROVIDERS.get(device)
    if found and found.plugin:
        if found.fault:
            raise UsageError(f"Device {device} is not available, because {found.fault}; run with --device cpu.")
        found.plugin.find(device, found.name)
    return found


def why_not(device: str) -> str:
    """Return the reason why a device does not work here; empty if it does."""
    try:
        provider_of(device)
    except UsageError as why:
        return str(why)
    return ""


def check_cuda() -> None:
    """Raise `UsageError` if onnxruntime's CUDA provider cannot work; the sentence has the reason and the remedy."""
    wheel = check_wheels()
    if wheel != "onnxruntime-gpu":
        raise UsageError(f"{wheel} {installed(wheel)} is installed, which has no CUDA provider; replace it: pip "
                         f"uninstall -y {wheel}, then pip install 'edgeinfer[gpu]'.")
    check_driver(wheel, installed(wheel))
    onnxruntime = import_onnxruntime()
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # of the packages beside it; prints the missing ones
    for library, package in LIBRARIES.items() if sys.platform == "linux" else ():
        try:
            ctypes.CDLL(library)
        except OSError:
            raise UsageError(f"CUDA's library {library} is missing; the package {package} has it: pip install "
                             f"'edgeinfer[gpu]', or {package} alone.") from None
    if PROVIDERS[CUDA].name not in onnxruntime.get_available_providers():
        raise UsageError(f"This {wheel} was built without a CUDA provider; reinstall it: pip install "
                         f"--force-reinstall {wheel}.")


def check_placement(session: Any, provider: Provider) -> None:
    """Raise `UsageError` if a node of a session was given to another provider."""
    elsewhere = [f"{node.op_type} {node.name}" for part in session.get_provider_graph_assignment_info()
                 if part.ep_name != provider.name for node in part.get_nodes()]
    if elsewhere:
        raise UsageError(f"{len(elsewhere)} operations of the model would not run on {provider.name}, such as "
                         f"{elsewhere[0]}; choose another --device, or another version of onnxruntime.")


def shared_out(session: Any, provider: Provider) -> str:
    """Return a sentence with the operations that run on a provider and on the CPU provider; raise `UsageError` if the
    provider runs none.

    Some providers do not record their operations (WebGPU, 1.27); then at least no matmul may be on the CPU provider.
    """
    own, elsewhere = Counter[str](), Counter[str]()
    for part in session.get_provider_graph_assignment_info():
        (own if part.ep_name == provider.name else elsewhere).update(node.op_type for node in part.get_nodes())
    listed = ", ".join(f"{count} {kind}" for kind, count in elsewhere.most_common())
    if not own and any("MatMul" in kind for kind in elsewhere):
        raise UsageError(f"{provider.name} runs none of the model's {elsewhere.total()} operations ({listed[:200]}); "
                         "run with --device cpu.")
    count = f"{own.total()} of {own.total() + elsewhere.total()}" if own else "all other" if elsewhere else "all"
    return f"Device {provider.device} runs {count} operations on {provider.name}" + (
        f"; on the CPU provider: {listed}." if elsewhere else ".")


def take_as_asked() -> None:
    """Allocate the requested memory on a GPU for the KV cache, as planned, not the next power of two.

    The provider's option `arena_extend_strategy` is for the arenas of sessions alone. Values made outside of them have
    one whose only setting this is (onnxruntime-gpu 1.31.1; deprecated for sessions); wheels for CPUs do not have it.
    """
    from onnxruntime.capi import _pybind_state as native

    if hasattr(native, "set_arena_extend_strategy"):
        native.set_arena_extend_strategy(native.ArenaExtendStrategy.kSameAsRequested)


def raised_by_onnxruntime(error: Exception) -> bool:
    """Return whether an error is one of its own classes, which have no common one, or an error of its
    bindings."""
    return isinstance(error, (RuntimeError, MemoryError)) or type(error).__module__.startswith("onnxruntime")


def lacks_memory(error: Exception) -> bool:
    """Return whether an error of onnxruntime, CUDA or cuBLAS says that process or device have no memory left."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def one_line(error: Exception) -> str:
    """Return an error's message on one line of bounded length."""
    return " ".join(str(error).split())[:300]


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n", 1)[0].split())[:300]
