"""A session: one bundle with its plan, memory, program and threads; tokens go in, logits come out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import HEADER_FILE, Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import BundleError, RequestError
from edgeinfer.graph import ModelConfig, build_graph, expected_types, fill_rope_tables, round_up
from edgeinfer.kernels import Kernels, abi, choose
from edgeinfer.memory_planner import SPLIT_TOKENS, Planner, check_budget, resolve, to_request

from .executor import Executor
from .lowering import Lowering
from .memory import Toucher, allocate, lock, read_in
from .sequence import KVCache, Sequence

Logits = NDArray[np.float32]


class Session:
    """Plans a run, takes all its memory, links its kernels and starts its threads. Not thread-safe, but for `cancel`.

    Parameters
    ----------
    bundle : Bundle
    config : RuntimeConfig
    progress : callable, optional
        Called with (done, total, name) while kernels compile on the first run.
    loading : callable, optional
        Called with (bytes done, bytes in all, file name) while weights of 1 GB or more are read in.

    Raises
    ------
    BudgetError
        If the plan exceeds the budget.
    """

    def __init__(self, bundle: Bundle, config: RuntimeConfig | None = None,
                 progress: Callable[[int, int, str], None] | None = None,
                 loading: Callable[[int, int, str], None] | None = None):
        self.bundle = bundle
        self.model: ModelConfig = bundle.config
        self.config = resolve(config or RuntimeConfig(), self.model)
        self.graph = build_graph(self.model, expected_types(bundle.types))
        bundle.check({w.name: w.shape for w in self.graph.weights})
        if list(bundle.tensors.values())[-1].layout == "neuron":  # kernels read a little behind it
            raise BundleError(f"The bundle {bundle.path} ends with a tensor in layout neuron, as no bundle may; "
                              "convert it again.")
        planner = Planner(self.graph, bundle.weights_bytes)
        self.plan = planner.plan(to_request(self.config))
        self.budget_bytes = check_budget(planner, self.plan, self.config, lambda t: build_graph(self.model, t))
        kernels = Kernels(choose(), progress)
        self.isa = kernels.isa.name
        regions = {name: allocate(self.plan.region(name).nbytes, touched=name != "kv")
                   for name in ("kv", "activations", "logits", "constants", "scratch")}
        self._toucher = Toucher(regions["kv"])
        regions["weights"] = bundle.weights
        read_in(bundle.weights, bundle.weights_path, loading)
        if self.config.mlock:
            lock(bundle.weights)
        self._fill_constants(regions["constants"])
        offsets = {name: entry.offset for name, entry in bundle.tensors.items()}
        self.program = Lowering(self.graph, self.plan, offsets, kernels.isa.heights).program()
        self.kv = KVCache(self.plan, regions["kv"], self.model.num_hidden_layers)
        self._logits = regions["logits"][: self.config.outputs * self.plan.logits_stride].view(np.float32)
        self._logits = self._logits.reshape(self.config.outputs, -1)[:, : self.model.vocab_size]
        self._tables = _Tables(self.plan.request.tokens, self.config.max_sequences, self.config.ctx or 0)
        self.executor = Executor(self.program, kernels, self.plan.request.threads, regions)
        self._tables.publish(self.executor)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def new_sequence(self) -> Sequence:
        """An empty sequence."""
        return Sequence()

    def fork(self, sequence: Sequence) -> Sequence:
        """A copy that shares the KV blocks until one of the two writes."""
        return self.kv.fork(sequence)

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n."""
        self.kv.truncate(sequence, n_tokens)

    def release(self, sequence: Sequence) -> None:
        """Give back the sequence's blocks; it is empty afterwards."""
        self.kv.truncate(sequence, 0)

    def save(self, sequence: Sequence, path: str | Path) -> None:
        """Write the sequence's tokens and KV blocks to a file (prompt cache)."""
        self.kv.save(sequence, Path(path), self._identity())

    def load(self, path: str | Path) -> Sequence:
        """A sequence as it was saved, by the same model with the same KV type."""
        return self.kv.load(Path(path), self._identity())

    # -- tokens in, logits out ---------------------------------------------------------------------------------------

    def prefill(self, sequence: Sequence, ids: list[int]) -> Logits:
        """Process a prompt in chunks.

        Returns
        -------
        float32 array of shape (vocab_size,)
            Logits after the last token.
        """
        self._check(sequence, ids)
        step = self.config.prefill_chunk
        for start in range(0, len(ids), step):
            chunk = ids[start : start + step]
            last = start + step >= len(ids)
            self._walk([sequence] * len(chunk), chunk, [len(chunk) - 1] if last else [])
        return self._logits[0].copy()

    def decode(self, sequences: list[Sequence], ids: list[int]) -> Logits:
        """One more token for each of several sequences, in one walk.

        Returns
        -------
        float32 array of shape (len(sequences), vocab_size)
        """
        most = self.config.max_sequences
        if not 1 <= len(sequences) <= most or len(sequences) != len(ids):
            raise RequestError(
                f"{len(sequences)} sequences and {len(ids)} tokens do not fit one walk; this session decodes up to "
                f"{most} sequences at once, set by max_sequences."
            )
        if len({id(s) for s in sequences}) != len(sequences):
            raise RequestError("A sequence takes part twice in one decode walk; fork it.")
        for sequence, token in zip(sequences, ids, strict=True):
            self._check(sequence, [token])
        self._walk(sequences, ids, list(range(len(ids))))
        return self._logits[: len(ids)].copy()

    def score(self, sequence: Sequence, ids: list[int]) -> Iterator[tuple[int, Logits]]:
        """Logits after every token.

        Yields
        ------
        start : int
            Index of the block's first token in `ids`.
        logits : float32 array of shape (rows, vocab_size)
        """
        self._check(sequence, ids)
        step = min(self.config.outputs, self.config.prefill_chunk)
        for start in range(0, len(ids), step):
            chunk = ids[start : start + step]
            self._walk([sequence] * len(chunk), chunk, list(range(len(chunk))))
            yield start, self._logits[: len(chunk)].copy()

    def settle(self) -> None:
        """Return when the process holds all the memory that was planned; measured peaks mean nothing before."""
        self._toucher.wait()

    def cancel(self) -> None:
        """End the running call within 100 ms with a CancelledError; callable from any thread."""
        self.executor.cancel()

    def close(self) -> None:
        """Stop the threads and let go of all memory."""
        self._toucher.close()
        self.executor.close()
        self.executor.regions.clear()
        self.kv.close()
        self._logits = np.zeros((0, 0), np.float32)
        self.bundle.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _walk(self, sequences: list[Sequence], ids: list[int], outputs: list[int]) -> None:
        """Run the program over one flat list of tokens; each sequence's tokens are consecutive."""
        distinct = list(dict.fromkeys(sequences))
        try:
            for sequence in distinct:
                self.kv.extend(sequence, sum(s is sequence for s in sequences) if len(distinct) > 1 else len(ids))
            highest = self._tables.write(distinct, sequences, ids, outputs)
            split = len(ids) <= SPLIT_TOKENS and highest >= abi.BLOCK_TOKENS * abi.SPLIT_BLOCKS
            for index, value in ((abi.COUNT_TOKENS, len(ids)), (abi.COUNT_OUTPUTS, len(outputs)),
                                 (abi.COUNT_MERGE, len(ids) if split else 0),
                                 (abi.COUNT_MANY, len(ids) if len(ids) > 1 or self.executor.check else 0)):
                self.executor.set_count(index, value)
            self.executor.run()
            for sequence, token in zip(sequences, ids, strict=True):
                sequence.tokens.append(token)
        except BaseException:
            for sequence in distinct:
                self.kv.trim(sequence)
            raise

    def _check(self, sequence: Sequence, ids: list[int]) -> None:
        ctx = self.plan.request.ctx
        if not ids:
            raise RequestError("The prompt is empty; give at least one token.")
        for token in ids:
            if not 0 <= token < self.model.vocab_size:
                raise RequestError(f"Token id {token} is outside the vocabulary (0 to {self.model.vocab_size - 1}).")
        if len(sequence) + len(ids) > ctx:
            before = f" after {len(sequence)} tokens" if len(sequence) else ""
            raise RequestError(
                f"{len(ids)} tokens{before} do not fit the context of {ctx}; shorten the prompt or raise --ctx (the "
                f"model allows {self.model.max_position_embeddings})."
            )

    def _fill_constants(self, region: NDArray[np.uint8]) -> None:
        """Cosines and sines per position, each padded to vectors of 16."""
        half = self.model.head_dim // 2
        padded = round_up(half, 16)
        table = region[: self.plan.request.ctx * self.plan.rope_row_bytes].view(np.float32).reshape(-1, 2, padded)
        fill_rope_tables(self.model.rope, self.model.head_dim, table[:, 0, :half], table[:, 1, :half])

    def _identity(self) -> str:
        return hashlib.sha256((self.bundle.path / HEADER_FILE).read_bytes()).hexdigest()


class _Tables:
    """The tables that ctx points to: tokens, sequences, block tables, outputs; written before each walk."""

    def __init__(self, tokens: int, sequences: int, ctx: int):
        self._tokens = np.zeros((tokens, abi.TOKEN_BYTES // 8), np.int64)
        self._sequences = np.zeros((max(sequences, 1), abi.SEQUENCE_BYTES // 8), np.int64)
        self._blocks = np.zeros((max(sequences, 1), -(-ctx // abi.BLOCK_TOKENS)), np.int32)
        self._sequences[:, abi.SEQUENCE_BLOCKS // 8] = [row.ctypes.data for row in self._blocks]
        self._outputs = np.zeros(tokens, np.int64)

    def publish(self, executor: Executor) -> None:
        """Write the tables' addresses into ctx."""
        executor.set(abi.CTX_TOKENS, self._tokens.ctypes.data)
        executor.set(abi.CTX_SEQUENCES, self._sequences.ctypes.data)
        executor.set(abi.CTX_OUTPUTS, self._outputs.ctypes.data)

    def write(self, distinct: list[Sequence], sequences: list[Sequence], ids: list[int], outputs: list[int]) -> int:
        """Describe one walk; returns the highest position in it."""
        n = len(ids)
        table = self._tokens[:n]
        table[:, abi.TOKEN_ID // 8] = ids
        table[:, abi.TOKEN_MASK // 8] = -1
        start = highest = 0
        for number, sequence in enumerate(distinct):
            count = n if len(distinct) == 1 else sum(s is sequence for s in sequences)
            rows = table[start : start + count]
            positions = np.arange(len(sequence), len(sequence) + count)
            blocks = np.asarray(sequence.blocks, np.int32)
            self._blocks[number, : len(blocks)] = blocks
            self._sequences[number, abi.SEQUENCE_LENGTH // 8] = len(sequence) + count
            rows[:, abi.TOKEN_SEQUENCE // 8] = number
            rows[:, abi.TOKEN_POSITION // 8] = positions
            rows[:, abi.TOKEN_SLOT // 8] = \
                blocks[positions // abi.BLOCK_TOKENS].astype(np.int64) * abi.BLOCK_TOKENS + positions % abi.BLOCK_TOKENS
            highest = max(highest, len(sequence) + count - 1)
            start += count
        self._outputs[: len(outputs)] = outputs
        return highest
