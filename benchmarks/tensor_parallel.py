"""Tensor parallelism, a prototype: each of two processes has half of the heads and of the FFN's rows.

    python benchmarks/tensor_parallel.py --shape tinyllama-1.1b --document docs/measurements/tensor-parallel.md

The split is that of Megatron-LM (Shoeybi et al., arXiv 1909.08053): after the output projection of attention and after
the FFN the two exchange partial sums of the residual, twice a layer, over TCP with a delay that stands for the network.
Each process is one thread, as a machine of one core. Weights are random, and of each half its own. The last table is
what these figures mean for other machines: the estimator's times of the whole and of a half, and two messages a layer.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, row, table, wait_for_calm
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.devices import estimate, load_profile
from edgeinfer.graph import ModelConfig
from edgeinfer.models import cached_bundle
from edgeinfer.models.describe import _described
from edgeinfer.pipeline import LINKS
from edgeinfer.runner import Segment
from edgeinfer.runtime import Session

TOKENS, WARM, CTX = 40, 4, 512
DELAYS = (0.0, 0.1, 0.2, 0.35, 0.6)
"""Milliseconds of an exchange beside what it takes on this machine."""
PARTIAL = (".o", ".down")
"""Ends of the names of the matrices whose products are partial sums."""


def half(shape: ModelConfig) -> ModelConfig:
    """Return the model that one of two processes has: half of the heads, of the FFN and of the output head."""
    return replace(shape, num_attention_heads=shape.num_attention_heads // 2, head_dim=shape.head_dim,
                   num_key_value_heads=shape.num_key_value_heads // 2, intermediate_size=shape.intermediate_size // 2,
                   vocab_size=shape.vocab_size // 2)


def bundle_of(name: str, shape: ModelConfig) -> Path:
    """Return a bundle of random weights, which is made once."""
    return cached_bundle(f"the random model {name}", f"tensor-parallel-{name}", lambda target: write_random_bundle(
        shape, target, "q4", 32, overwrite=True))


class Rank:
    """One process: a session whose program stops where partial sums are exchanged."""

    def __init__(self, path: Path):
        self.session = Session(Bundle.open(path), RuntimeConfig(ctx=CTX, threads=1))
        program = self.session.program.instructions
        ends = [i for i, one in enumerate(program) if one.op.weights and one.op.weights[0].name.endswith(PARTIAL)]
        self.stops = [i + 1 for i in ends]
        self.n = len(program)
        self._sequence = self.session.new_sequence()
        self._rows = [self._row(program[i].op.out.name) for i in ends]

    def _row(self, name: str) -> NDArray[np.float32]:
        place, hidden = self.session.plan.allocations[name], self.session.model.hidden_size
        return self.session.executor.regions[place.region][place.offset :][: 4 * hidden].view(np.float32)

    def whole(self) -> None:
        """Run a token in one piece."""
        self.session.decode([self._sequence], [1])

    def pieces(self, exchange: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None) -> None:
        """Run a token, and exchange the partial sums of each piece."""
        session, segment = self.session, Segment(self._sequence, [1])
        session.reserve(self._sequence, 1)
        before = np.zeros(session.model.hidden_size, np.float32)
        start = 0
        for stop, residual in zip(self.stops, self._rows, strict=True):
            session.forward_range(segment, start, stop)
            if exchange is not None:
                own = residual - before
                residual[:] = before + exchange(own)
                before[:] = residual
            start = stop
        session.forward_range(segment._replace(outputs=(0,)), start, self.n)
        session.append(self._sequence, [1])

    def milliseconds(self, token: Callable[[], None]) -> float:
        """Return the least time of a token: others use the machine too."""
        times = []
        for _ in range(WARM + TOKENS):
            began = time.perf_counter()
            token()
            times.append(1000 * (time.perf_counter() - began))
        return min(times[WARM:])


class Exchange:
    """Sums of two processes over a connection; both send, and both wait for the other and for the delay."""

    def __init__(self, connection: socket.socket, rank: int, hidden: int):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._rank, self.delay = connection, rank, 0.0
        self._other = np.zeros(hidden, np.float32)

    def __call__(self, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum, with the same bits in both."""
        began = time.perf_counter()
        self._connection.sendall(own.data.cast("B"))
        left = memoryview(self._other).cast("B")
        while left.nbytes:
            left = left[self._connection.recv_into(left) :]
        while time.perf_counter() - began < self.delay:
            pass
        pair = (own, self._other) if self._rank == 0 else (self._other, own)
        return pair[0] + pair[1]


def follow(path: str, port: int) -> None:
    """Run the second process."""
    rank = Rank(Path(path))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        exchange = Exchange(connection, 1, rank.session.model.hidden_size)
        for delay in DELAYS:
            exchange.delay = delay / 1000
            rank.milliseconds(lambda: rank.pieces(exchange))
        connection.recv(1)


def measure(name: str, patience: float) -> tuple[dict[str, float], dict[float, float], int]:
    """Return milliseconds of a token without exchange, those with each delay, and the exchanges of a token."""
    shape = SHAPES[name]
    whole, first, second = bundle_of(name, shape), bundle_of(f"{name}-half-0", half(shape)), bundle_of(
        f"{name}-half-1", half(shape))
    wait_for_calm(patience, 0.2)
    one = Rank(whole)
    alone = {"one process": one.milliseconds(one.whole)}
    one.session.close()
    rank = Rank(first)
    alone["a half"] = rank.milliseconds(rank.whole)
    alone["a half in pieces"] = rank.milliseconds(lambda: rank.pieces(None))
    together = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = subprocess.Popen([sys.executable, __file__, "--follow", str(second), "--port",
                                  str(server.getsockname()[1])])
        try:
            connection, _ = server.accept()
            exchange = Exchange(connection, 0, rank.session.model.hidden_size)
            for delay in DELAYS:
                exchange.delay = delay / 1000
                together[delay] = rank.milliseconds(lambda: rank.pieces(exchange))
            connection.close()
        finally:
            other.wait(60)
    rank.session.close()
    return alone, together, len(rank.stops)


def elsewhere(names: tuple[str, ...], devices: tuple[str, ...], piece_ms: float) -> list[str]:
    """Return rows of what two machines make of a shape, by the estimator; a piece costs what it was measured to."""
    rows = []
    for name in names:
        shape, q4 = SHAPES[name], ("q4", 32)
        parts = [_described(name, "", one, *q4, Recipe()).traffic() for one in (shape, half(shape))]
        for device in devices:
            one, two = (1000 / estimate(load_profile(device), traffic, 128).decode_tok_per_s for traffic in parts)
            cells: list[Any] = [name, device, f"{one:.0f} ms", f"{two:.0f} ms"]
            n = 2 * shape.num_hidden_layers
            for link in ("1GbE", "2.5GbE", "10GbE"):
                hop = 1000 * (LINKS[link].seconds + 4 * shape.hidden_size / LINKS[link].bytes_per_s)
                cells.append(f"{one / (two + n * (hop + piece_ms)):.2f}x")
            rows.append(row(*cells))
    return rows


def main() -> None:
    """Measure, and print or publish two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--document", type=Path)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.follow:
        return follow(asked.follow, asked.port)
    alone, together, n = measure(asked.shape, asked.patience)
    one = alone["one process"]
    rows = [row(what, f"{ms:.1f} ms", f"{one / ms:.2f}x") for what, ms in alone.items()]
    rows += [row(f"two halves, {delay:g} ms an exchange", f"{ms:.1f} ms", f"{one / ms:.2f}x")
             for delay, ms in together.items()]
    piece = max(0.0, alone["a half in pieces"] - alone["a half"]) / n
    text = (f"{asked.shape}, {n} exchanges a token, one thread a process; {machine()}; `python "
            f"benchmarks/tensor_parallel.py --shape {asked.shape}`.\n\n"
            + table("a token of | time | relative to one process", rows)
            + f"\n\nPredicted for two machines, with {1000 * piece:.0f} us for each piece of the program beside the "
            "link:\n\n"
            + table("shape | machines | one | a half | 1GbE | 2.5GbE | 10GbE",
                    elsewhere(("llama-2-7b", "llama-3.1-8b"), ("rpi5", "rk3588"), piece)))
    publish(text, asked.document, "tensor-parallel")


if __name__ == "__main__":
    main()
