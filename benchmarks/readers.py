"""Speed of a disk without a run: threads of the runtime's kernel, and threads of Python."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np

from edgeinfer.kernels import Kernels, abi
from edgeinfer.runtime.execution.threads import Pool
from edgeinfer.runtime.memory import allocate
from edgeinfer.runtime.weights.readers import _host_pread

Strategy = Callable[[int, int, np.ndarray, int, float], float]


def kernel_threads(kernels: Kernels, pool: Pool) -> Strategy:
    """Return GB/s of the kernel `reader` on so many threads; nothing makes them wait for a buffer."""

    def measure(file: int, depth: int, offsets: np.ndarray, size: int, seconds: float) -> float:
        words, buffers = allocate(abi.STREAM_BYTES).view(np.int64), allocate(depth * size)
        pieces, part = np.zeros((len(offsets), 5), np.int64), np.array([[1, len(offsets), len(offsets)]], np.int64)
        pieces[:, 0], pieces[:, 1], pieces[:, 2] = offsets, size, size
        pieces[:, 3] = buffers.ctypes.data + np.arange(len(offsets)) % depth * size
        event = np.zeros(1, np.int64)
        for at, value in ((abi.STREAM_PREAD, _host_pread()[0]), (abi.STREAM_FILE, file),
                          (abi.STREAM_PIECES, pieces.ctypes.data), (abi.STREAM_N_PIECES, len(pieces)),
                          (abi.STREAM_PARTS, part.ctypes.data), (abi.STREAM_N_PARTS, 1),
                          (abi.STREAM_EVENTS, event.ctypes.data), (abi.STREAM_RELEASED, 1 << 40),
                          (abi.STREAM_BUSY, depth)):
            words[at >> 3] = value
        reader = kernels.function("reader")
        threads = [threading.Thread(target=reader, args=(words.ctypes.data, pool.ctx, i, depth)) for i in range(depth)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        read, took = int(words[abi.STREAM_READ >> 3]), time.perf_counter() - began
        words[abi.STREAM_STATE >> 3] = abi.STREAM_ENDS
        for thread in threads:
            thread.join()
        assert not words[abi.STREAM_FAILED >> 3]
        return read / took / 1e9

    return measure


def python_threads(file: int, depth: int, offsets: np.ndarray, size: int, seconds: float) -> float:
    """Return GB/s of so many Python threads that call os.preadv."""
    done, until, places = [0] * depth, time.perf_counter() + seconds, offsets.tolist()

    def work(thread: int) -> None:
        at, buffer = thread, allocate(max(size, 2 << 20))[:size].data  # on a huge page, as the runtime's are
        while time.perf_counter() < until:
            done[thread] += os.preadv(file, [buffer], places[at % len(places)])
            at += depth

    threads = [threading.Thread(target=work, args=(i,)) for i in range(depth)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began) / 1e9
