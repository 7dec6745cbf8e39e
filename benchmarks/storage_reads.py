"""How reads of weights reach a disk best: reader threads that are kernels, Python threads with os.preadv, io_uring.

    python benchmarks/storage_reads.py DIRECTORY [--seconds 0.5] [--gib 2] [--streams]

Scattered reads of 4 to 64 KiB at queue depths of 1 to 32, direct I/O, from a file of random bytes that is written into
DIRECTORY and removed; with --streams reads in order of 256 KiB to 8 MiB. The table goes into docs/streaming.md. For
io_uring all of a queue is submitted and awaited by one system call, from Python: nothing is computed per read.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edgeinfer.kernels import Kernels, abi, choose
from edgeinfer.runtime.memory import allocate
from edgeinfer.runtime.readers import _host_pread
from edgeinfer.runtime.threads import Pool

SMALL, LARGE = (4, 8, 16, 32, 64), (256, 512, 1024, 2048, 4096, 8192)
DEPTHS = (1, 2, 4, 8, 16, 32)
SETUP, ENTER, OP_READ, GETEVENTS = 425, 426, 22, 1
Way = Callable[[int, int, np.ndarray, int, float], float]


def kernel_threads(kernels: Kernels, pool: Pool) -> Way:
    """Return GB/s of the kernel `reader` on so many threads; nothing makes them wait for a buffer."""

    def measure(file: int, depth: int, offsets: np.ndarray, size: int, seconds: float) -> float:
        words, buffers = allocate(abi.STREAM_BYTES).view(np.int64), allocate(depth * size)
        pieces, part = np.zeros((len(offsets), 5), np.int64), np.array([[1, len(offsets), len(offsets)]], np.int64)
        pieces[:, 0], pieces[:, 1], pieces[:, 2] = offsets, size, size
        pieces[:, 3] = buffers.ctypes.data + np.arange(len(offsets)) % depth * size
        ticket = np.zeros(1, np.int64)
        for at, value in ((abi.STREAM_PREAD, _host_pread()[0]), (abi.STREAM_FILE, file),
                          (abi.STREAM_PIECES, pieces.ctypes.data), (abi.STREAM_N_PIECES, len(pieces)),
                          (abi.STREAM_PARTS, part.ctypes.data), (abi.STREAM_N_PARTS, 1),
                          (abi.STREAM_TICKETS, ticket.ctypes.data), (abi.STREAM_RELEASED, 1 << 40),
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
        with mmap.mmap(-1, size) as buffer:
            at = thread
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


def uring(file: int, depth: int, offsets: np.ndarray, size: int, seconds: float) -> float:
    """Return GB/s of io_uring; NaN where the system refuses it."""
    libc, parameters = ctypes.CDLL(None, use_errno=True), np.zeros(30, np.uint32)
    ring = libc.syscall(SETUP, depth, ctypes.c_void_p(parameters.ctypes.data))
    if ring < 0:
        return float("nan")
    submit, complete = parameters[10:20], parameters[20:30]  # sq_off, cq_off: head, tail, mask, entries, ...
    entries, n_complete = int(parameters[0]), int(parameters[1])
    with mmap.mmap(ring, int(submit[6]) + 4 * entries, offset=0) as sq, \
            mmap.mmap(ring, int(complete[5]) + 16 * n_complete, offset=0x8000000) as cq, \
            mmap.mmap(ring, 64 * entries, offset=0x10000000) as sqes:
        rows = np.frombuffer(sqes, np.uint64).reshape(entries, 8)
        buffers, total, at = allocate(depth * size), 0, 0
        rows[:depth] = 0
        rows[:depth, 0] = OP_READ | file << 32
        rows[:depth, 2] = buffers.ctypes.data + np.arange(depth, dtype=np.uint64) * size
        rows[:depth, 3] = size
        np.frombuffer(sq, np.uint32, entries, int(submit[6]))[:] = np.arange(entries)
        tail = np.frombuffer(sq, np.uint32, 1, int(submit[1]))
        done = [np.frombuffer(cq, np.uint32, 1, int(complete[i])) for i in (0, 1)]
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            rows[:depth, 1] = offsets[(at + np.arange(depth)) % len(offsets)]
            at += depth
            tail[0] += depth
            if libc.syscall(ENTER, ring, depth, depth, GETEVENTS, None, 0) != depth:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            total += size * int(done[1][0] - done[0][0])
            done[0][0] = done[1][0]
        took = time.perf_counter() - began
        del rows, tail, done
    os.close(ring)
    return total / took / 1e9


@contextmanager
def random_file(directory: Path, nbytes: int) -> Iterator[int]:
    """Yield a file of random bytes, open for direct I/O, that has no name any more."""
    path = directory / f".reads-{os.getpid()}.tmp"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    path.unlink()
    with mmap.mmap(-1, 4 << 20) as buffer:
        for _ in range(nbytes >> 22):
            buffer[:] = os.urandom(4 << 20)
            os.write(file, buffer)
    os.fsync(file)
    yield file
    os.close(file)


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser()
    options.add_argument("directory", type=Path)
    options.add_argument("--seconds", type=float, default=0.5)
    options.add_argument("--gib", type=float, default=2)
    options.add_argument("--streams", action="store_true")
    asked = options.parse_args()
    kernels = Kernels(choose())
    pool = Pool(kernels, 1, start=False)
    ways = {"kernel": kernel_threads(kernels, pool), "preadv": python_threads, "io_uring": uring}
    nbytes = int(asked.gib * 2**30) >> 22 << 22
    random = np.random.default_rng(0)
    print("| KiB | queue | " + " | ".join(f"{name}, GB/s" for name in ways) + " |")
    print("|---|---|" + "---|" * len(ways))
    with random_file(asked.directory, nbytes) as file:
        for kib in LARGE if asked.streams else SMALL:
            offsets = np.arange(0, nbytes - (kib << 10) + 1, kib << 10)
            offsets = offsets if asked.streams else random.permutation(offsets)
            for depth in (1, 2, 4, 8) if asked.streams else DEPTHS:
                found = [way(file, depth, offsets, kib << 10, asked.seconds) for way in ways.values()]
                print(f"| {kib} | {depth} | " + " | ".join(f"{gbs:.3f}" for gbs in found) + " |", flush=True)


if __name__ == "__main__":
    main()
