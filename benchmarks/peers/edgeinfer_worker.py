"""edgeinfer's worker, and the probe of the machine. Run by against_peers.py with the Python that runs it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serving import Runner, peak_rss_bytes, process_age_ms, random_ids, serve, token_ids

from edgeinfer.registry import placer, recipe_with


class EdgeInfer:
    """One bundle, reopened with each context."""

    def __init__(self) -> None:
        self._session: Any = None
        self._runner: Runner | None = None
        self._probe: Any = None
        self._path, self._threads, self._base = "", 1, 0
        self._random = np.random.default_rng(1)

    def load(self, path: str, threads: int) -> dict[str, Any]:
        import edgeinfer
        from edgeinfer.runtime import Session  # noqa: F401

        self._path, self._threads, self._base = path, threads, peak_rss_bytes() or 0
        return {"version": edgeinfer.__version__}

    def context(self, ctx: int, kv: str = "int8", budget: int | None = None, sparse: str = "exact") -> dict[str, Any]:
        from edgeinfer.bundle import Bundle
        from edgeinfer.config import Recipe, RuntimeConfig
        from edgeinfer.runtime import Session

        self._close()
        began = time.perf_counter()
        bundle = Bundle.open(self._path)
        config = RuntimeConfig(ctx=ctx, kv=kv, threads=self._threads, budget_bytes=budget,
                               recipe=recipe_with(sparse=sparse) if sparse else Recipe())
        session = Session(bundle, config, placer=placer(bundle.config, bundle))
        load_ms = 1000 * (time.perf_counter() - began)
        sequence = session.new_sequence()

        def process(ids: list[int]) -> None:
            if len(ids) == 1:
                session.decode([sequence], ids)
            else:
                session.prefill(sequence, ids)

        def back(n_tokens: int) -> None:
            session.rollback(sequence, n_tokens)
            session.checkpoint(sequence)

        self._session, self._sequence = session, sequence
        self._runner = Runner(session.model.vocab_size, process, back)
        experts = session.plan.experts
        return {"isa": session.isa, "load_ms": load_ms, "planned_bytes": session.plan.total_bytes,
                "slots": experts and experts.slots}

    def run(self, kind: str, tokens: int, depth: int) -> dict[str, Any]:
        from edgeinfer.bench import Case, bytes_per_token, operations_per_token

        case = Case(kind, tokens, depth)
        return {**self._runner.run(kind, tokens, depth), "bytes_per_token": bytes_per_token(self._session, case),
                "operations_per_token": operations_per_token(self._session, case)}

    def decode(self, tokens: int, empty: bool = False, repeats: float = 0.0,
               seed: int | None = None) -> dict[str, Any]:
        """Take the time of decoding tokens in no order, a new sequence for each call, after one that does not count.

        Parameters
        ----------
        tokens : int
        empty : bool
            Empty the cache of cold neurons before each token.
        repeats : float
            Share of the tokens that are the one before again: these want the same neurons.
        seed : int, optional
            Token ids; by default they continue from call to call.
        """
        session, times, token = self._session, [], 0
        session.truncate(self._sequence, 0)
        ids = None if seed is None else random_ids(seed, session.model.vocab_size, tokens + 1)
        before = session.reader.hits if session.reader else ()
        for i in range(tokens + 1):
            if ids:
                token = ids[i]
            elif not i or self._random.random() >= repeats:
                token = int(self._random.integers(3, session.model.vocab_size))
            if empty:
                session.executor.stream.forget()
            began = time.perf_counter()
            session.decode([self._sequence], [token])
            times.append(time.perf_counter() - began)
        found = [now - then for now, then in zip(session.reader.hits, before, strict=True)] if before else None
        return {"seconds": times[1:], "hit_rate": found and found[1] / max(1, found[1] + found[2])}

    def prompt(self, tokens: int, seed: int) -> dict[str, Any]:
        """Take the time of a prompt of tokens in no order."""
        self._session.truncate(self._sequence, 0)
        ids = random_ids(seed, self._session.model.vocab_size, tokens)
        began = time.perf_counter()
        self._session.prefill(self._sequence, ids)
        return {"seconds": [time.perf_counter() - began]}

    def memory(self) -> dict[str, Any]:
        return {"peak_rss_bytes": peak_rss_bytes(), "base_rss_bytes": self._base}

    def first_token(self, path: str, threads: int, ctx: int) -> dict[str, Any]:
        self.load(path, threads)
        self.context(ctx)
        self._session.prefill(self._session.new_sequence(), token_ids(self._session.model.vocab_size, 8))
        return {"ms": process_age_ms()}

    def probe(self, threads: int, read_bytes: int) -> dict[str, Any]:
        from edgeinfer.bench import MachineProbe

        if self._probe is None:
            self._probe = MachineProbe(threads, read_bytes)
        return {"read_gbs": self._probe.read_gbs(), "int8_gops": self._probe.int8_gops()}

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = self._runner = None


if __name__ == "__main__":
    worker = EdgeInfer()
    names = ("load", "context", "run", "decode", "prompt", "memory", "first_token", "probe")
    serve({name: getattr(worker, name) for name in names})
