"""References of the sample kernels: edits, maxima and sums of logits, and the choice of a token, by sampling.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import abi, sampling
from ...parameters import SAMPLE
from ..expected import Expected
from ..tolerances import TOLERANCES
from ..view import InstructionView, memory

EDIT = np.dtype([("token", "i4"), ("count", "i4"), ("bias", "f4"), ("kept", "f4")])
"""An entry of a sample spec's list (abi.EDIT_*)."""


class _Row(NamedTuple):
    """One sample with its row."""

    words: NDArray[np.int64]
    """Words of the sample."""
    floats: NDArray[np.float64]
    """The same memory."""
    edits: NDArray[Any]
    logits: NDArray[np.float32]
    mask: NDArray[np.int32] | None
    """Mask of the tokens that it allows; None allows all."""
    work: int
    """Address of its row of work."""
    position: int
    """Position of the token that is sampled."""

    def word(self, offset: int) -> int:
        return int(self.words[offset // 8])

    def number(self, offset: int) -> float:
        return float(self.floats[offset // 8])

    @property
    def allowed(self) -> NDArray[np.float32]:
        """The logits as they are read: -inf where the mask forbids one that is no sign of damage."""
        if self.mask is None:
            return self.logits
        return np.where(self.logits < np.inf, sampling.forbid(self.logits, self.mask), self.logits)

    @property
    def temperature(self) -> float:
        return self.number(abi.SAMPLE_TEMPERATURE)

    @property
    def settings(self) -> tuple[int, float, float]:
        """top_k, top_p, min_p."""
        return self.word(abi.SAMPLE_TOP_K), self.number(abi.SAMPLE_TOP_P), self.number(abi.SAMPLE_MIN_P)

    @property
    def sums_wanted(self) -> bool:
        """True if top-p is about the whole vocabulary: top-k is off, or as large."""
        top_k, top_p, _ = self.settings
        return not 0 < top_k < len(self.logits) and top_p < 1 and self.temperature > 0


def _rows(view: InstructionView) -> Iterator[_Row]:
    p, n = view.parameters(SAMPLE), view.count(abi.COUNT_SAMPLES)
    positions = view.tokens(abi.TOKEN_POSITION)[view.outputs(n)]
    for r, address in enumerate(view.sample_specs(n)):
        if address:
            words = memory(address, np.int64, (abi.SAMPLE_BYTES // 8,))
            edits = memory(int(words[abi.SAMPLE_EDITS // 8]), EDIT, (int(words[abi.SAMPLE_N_EDITS // 8]),))
            logits = view.array(0, np.float32, (p.vocab_size,), at=r * p.logits_stride)
            mask = int(words[abi.SAMPLE_MASK // 8])
            allowed = memory(mask, np.int32, (-(-p.vocab_size // 32),)) if mask else None
            yield _Row(words, words.view(np.float64), edits, logits, allowed, view.address(1) + r * p.work_stride,
                       int(positions[r]) + 1)


def edit_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``sample_edit``."""
    expected = []
    for row in _rows(view):
        logits, ids, counts = row.logits.copy(), row.edits["token"], row.edits["count"]
        logits[ids] += row.edits["bias"]
        seen = counts >= 0
        penalties = (row.number(offset) for offset in (abi.SAMPLE_REPETITION, abi.SAMPLE_PRESENCE,
                                                       abi.SAMPLE_FREQUENCY))
        sampling.apply_penalties(logits, ids[seen].astype(np.intp), counts[seen], *penalties)
        expected += [Expected("kept", row.edits["kept"], row.logits[ids]), Expected("logits", row.logits, logits)]
    return expected


def _chunks(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of SAMPLE_CHUNK logits, -inf after the last one."""
    padded = np.full(-(-len(logits) // abi.SAMPLE_CHUNK) * abi.SAMPLE_CHUNK, -np.inf, np.float32)
    padded[: len(logits)] = logits
    return padded.reshape(-1, abi.SAMPLE_CHUNK)


def blocks_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``sample_blocks``."""
    expected, sums_at = [], view.parameters(SAMPLE).sums
    for row in _rows(view):
        chunks = _chunks(row.allowed)
        maxima = chunks.reshape(-1, abi.SAMPLE_BLOCK).max(axis=1)
        maxima[np.isnan(maxima)] = np.inf
        expected.append(Expected("maxima", memory(row.work, np.float32, maxima.shape), maxima))
        if row.sums_wanted:
            sums = stored = memory(row.work + sums_at, np.float32, (len(chunks),))
            if np.isfinite(maxima.max()):  # otherwise the sums are never read
                top = np.maximum(maxima.reshape(len(chunks), -1).max(axis=1), np.finfo(np.float32).min)
                sums = np.exp(chunks.astype(np.float64) - top[:, None]).sum(axis=1)
            expected.append(Expected("sums", stored, sums, exact=False, tolerance=TOLERANCES["sums"] * np.abs(sums)))
    return expected


def choose_reference(view: InstructionView) -> list[Expected]:
    """The reference of ``sample_choose``."""
    expected, p = [], view.parameters(SAMPLE)
    for row in _rows(view):
        token, ids = _choose(row, p.sums)
        logits = row.logits.copy()
        logits[row.edits["token"]] = row.edits["kept"]
        bins = memory(row.work + p.candidates + 8 * abi.SAMPLE_CANDIDATES, np.uint8, (16 * abi.SAMPLE_BINS,))
        expected += [Expected("token", row.words[:1], np.array([token])), Expected("logits", row.logits, logits),
                     Expected("candidates", memory(row.work + p.candidates, np.int64, (len(ids),)),
                              _keys(row.allowed[ids], ids)),
                     Expected("bins", bins, bins)]  # scratch, whatever it holds
    return expected


def _choose(row: _Row, sums_at: int) -> tuple[int, sampling.Ids]:
    """Return the token, -1 if there is none to choose from, and the candidates that are sorted."""
    (top_k, top_p, min_p), logits, none = row.settings, row.allowed, np.zeros(0, np.intp)
    n_chunks = -(-len(logits) // abi.SAMPLE_CHUNK)
    maxima = memory(row.work, np.float32, (n_chunks, abi.SAMPLE_CHUNK // abi.SAMPLE_BLOCK)).max(axis=1)
    if not np.isfinite(maxima.max()):
        return -1, none
    wanted = top_k if 0 < top_k < len(logits) else len(logits)
    if row.temperature == 0:
        ids = sampling.top_k_ids(logits, 1)
        return int(ids[0]), ids
    ids = sampling.top_k_ids(logits, min(wanted, abi.SAMPLE_CANDIDATES))
    total = None
    if row.sums_wanted:
        scales = sampling.exp(maxima.astype(np.float64) - float(logits[ids[0]]))
        total = float(np.cumsum(memory(row.work + sums_at, np.float32, (n_chunks,)) * scales)[-1])
    every = sampling.top_k_ids(logits, wanted)
    n, _ = sampling.n_kept(sampling.weights(logits[every]), top_p, min_p, total)
    key = row.word(abi.SAMPLE_KEY) % 2**64
    return sampling.sample(logits, every[:n], row.temperature, key, row.position), ids


def _keys(logits: NDArray[np.float32], ids: sampling.Ids) -> NDArray[np.int64]:
    """Candidates as the kernel sorts them: order-preserving bits of the logit above the inverted id, none for -inf."""
    bits = (logits + np.float32(0)).view(np.int32).astype(np.int64)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32 | np.where(logits > -np.inf, 0xFFFFFFFF - ids, 0)
