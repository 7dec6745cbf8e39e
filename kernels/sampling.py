"""Choosing a token from its logits, in NumPy, as the kernels of `ops/sampling/sample.py` do.

The order is llama.cpp's: logit bias, penalties, the mask of a grammar, top-k, top-p, min-p, temperature. Every filter
keeps a prefix of the candidates sorted from best to worst, the lower id first among equals. The next token is sampled
from those kept by Gumbel-max (Gumbel, 1954; arXiv 1411.0030): the token with the largest logit / temperature - ln(-ln
u). The u of a token depends on seed, sample, position and token id alone, so a text does not depend on other work
beside it, nor on which other tokens are candidates.

Numbers come from SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014). exp and
ln are sequences of single float64 operations, so that they and the kernels give the same bits on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.intp]
Words = NDArray[np.uint64]

GAMMA = 0x9E3779B97F4A7C15
"""Step of SplitMix64."""
_MANY = 4096
"""Candidates from which on a bound is looked at before their numbers are computed exactly."""

# -- random numbers ----------------------------------------------------------------------------------------------------


def absorb(state: Words | int, values: NDArray[Any] | int) -> Words:
    """Return output number `values` (0, 1, ...) of the SplitMix64 generator with this state."""
    z = np.atleast_1d(np.asarray(values)).astype(np.uint64)
    z += np.uint64(1)
    z *= np.uint64(GAMMA)
    z += np.uint64(state) if isinstance(state, int) else state
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def stream_key(seed: int, sample: int) -> int:
    """Return the state that the positions of a sample's text are absorbed into."""
    return int(absorb(absorb(0, seed), sample)[0])


def uniforms(key: int, position: int, ids: NDArray[Any]) -> NDArray[np.float64]:
    """Return numbers in (0, 1), uniform over the odd multiples of 2^-53, for tokens at a position of the text."""
    bits = absorb(absorb(key, position), ids) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def gumbels(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -ln(-ln u): numbers of the standard Gumbel distribution."""
    return -log(-log(uniform))


# -- elementary functions ----------------------------------------------------------------------------------------------

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOG = (6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
        1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01)
_EXP = (1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040, 1 / 720, 1 / 120,
        1 / 24, 1 / 6, 0.5, 1.0, 1.0)


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ln x of positive normal numbers, within 1 ulp (fdlibm's e_log.c)."""
    bits = x.view(np.int64)
    exponent = (bits >> 52) - 1023
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(np.float64)
    high = m > 1.4142135623730951
    m, k = np.where(high, m * 0.5, m), (exponent + high).astype(np.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    c = _LOG
    r = z * (c[0] + w * (c[2] + w * (c[4] + w * c[6]))) + w * (c[1] + w * (c[3] + w * c[5]))
    half = 0.5 * f * f
    return k * _LN2_HIGH - ((half - (s * (half + r) + k * _LN2_LOW)) - f)


def exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return e^x for x <= 0, exactly 1 at 0; 0 below -708."""
    normal = x >= -708.0
    x = np.where(normal, x, 0.0)
    k = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    p = np.full_like(r, _EXP[0])
    for c in _EXP[1:]:
        p = p * r + c
    return np.where(normal, p * ((k.astype(np.int64) + 1023) << 52).view(np.float64), 0.0)


# -- the chain ---------------------------------------------------------------------------------------------------------


def apply_penalties(
    logits: Floats, seen: Ids, counts: Floats, repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0
) -> None:
    """Penalise tokens that occurred before, in place.

    Parameters
    ----------
    logits : float32 array of shape (vocab_size,), changed
    seen : distinct ids in the prompt or the generated text
    counts : array of the same shape, how often each of them was generated (0: in the prompt only)
    repetition : divides positive and multiplies other logits of all seen tokens (CTRL, section 4.1)
    presence : subtracted once from generated tokens
    frequency : subtracted once per occurrence in the generated text
    """
    values = logits[seen].astype(np.float64)
    with np.errstate(over="ignore"):
        values = np.where(values > 0, values / repetition, values * repetition)
        values = values - presence * (counts > 0) - frequency * counts
        logits[seen] = np.minimum(values, np.finfo(np.float32).max)  # -inf stays: the token is forbidden


def forbid(logits: Floats, mask: NDArray[Any]) -> Floats:
    """Return a copy of the logits with -inf for each token whose bit is not set in a mask (`abi.SAMPLE_MASK`).

    Parameters
    ----------
    logits : float32 array of shape (vocab_size,)
    mask : int32 or uint32 array of at least vocab_size / 32 words
    """
    allowed = np.unpackbits(mask.view(np.uint8), count=len(logits), bitorder="little")
    return np.where(allowed, logits, np.float32(-np.inf))


def top_k_ids(logits: Floats, k: int) -> Ids:
    """Return the ids of the k largest logits, best first, the lower id first among equals.

    Parameters
    ----------
    logits : float32 array of shape (vocab_size,), no NaN
    k : 1 or more; more than vocab_size means all
    """
    ids = _likely(logits, k)
    if k < len(logits):
        values = logits[ids]
        ids = ids[values >= np.partition(values, len(ids) - k)[len(ids) - k]]
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:k]]


def _likely(logits: Floats, k: int) -> Ids:
    """Return ids in ascending order, the k largest logits' among them.

    Columns of a large array, seen as a table, whose largest value is below the k-th largest of a column hold none of
    the k largest values, so all but a few values are only compared.
    """
    rows, n = 32, len(logits)
    columns = n // rows
    if columns <= 4 * k:
        return np.arange(n)
    whole = rows * columns
    largest = logits[:whole].reshape(rows, columns).max(axis=0)
    some = np.flatnonzero(largest >= np.partition(largest, columns - k)[columns - k])
    starts = np.arange(0, whole, columns)[:, None]
    return np.concatenate(((starts + some).ravel(), np.arange(whole, n)))


def weights(logits: Floats) -> NDArray[np.float64]:
    """Return e^(logit - largest) of logits sorted from best to worst."""
    exact = logits.astype(np.float64)
    return exp(exact - exact[0])


def n_kept(kept: NDArray[np.float64], top_p: float, min_p: float, total: float | None = None) -> tuple[int, bool]:
    """Count the best candidates that top-p and min-p keep, at least 1; also tell whether one of them was at work.

    Parameters
    ----------
    kept : weights, from best to worst
    top_p : share of the total that the kept ones reach together (nucleus sampling); 1 keeps all
    min_p : least weight; 0 keeps all
    total : of all tokens that top-p is about; by default the sum of these, in order
    """
    n = len(kept)
    if top_p < 1:
        sums = np.cumsum(kept)
        n = min(n, int(np.searchsorted(sums, top_p * (sums[-1] if total is None else total))) + 1)
        cut = total is None or bool(sums[n - 1] >= top_p * total)
    else:
        cut = False
    likely = int(np.searchsorted(-kept, -min_p, side="right")) if min_p > 0 else len(kept)
    return min(n, likely), cut or likely < len(kept)


def candidates(logits: Floats, top_k: int, top_p: float, min_p: float) -> Ids | None:
    """Return the tokens that may be sampled, best first; None for the whole vocabulary."""
    if 0 < top_k < len(logits):
        ids = top_k_ids(logits, top_k)
        return ids[: n_kept(weights(logits[ids]), top_p, min_p)[0]]
    if top_p < 1:
        return _nucleus(logits, top_p, min_p)
    if min_p > 0:
        near = np.flatnonzero(logits >= float(logits.max()) + np.log(min_p) - 1e-3)
        ids = near[np.argsort(-logits[near], kind="stable")]
        return ids[: n_kept(weights(logits[ids]), 1.0, min_p)[0]]
    return None


def _nucleus(logits: Floats, top_p: float, min_p: float) -> Ids:
    """Return the best ids that top-p and min-p keep, without sorting the whole vocabulary.

    The sum runs over all tokens; candidates are added until they reach top_p, or until min-p drops the last one.
    """
    with np.errstate(over="ignore"):
        total = float(np.exp(logits - logits.max()).sum(dtype=np.float64))
    k = 256
    while True:
        ids = top_k_ids(logits, k)
        n, cut = n_kept(weights(logits[ids]), top_p, min_p, total)
        if cut or k >= len(logits):
            return ids[:n]
        k *= 8


def sample(logits: Floats, ids: Ids | None, temperature: float, key: int, position: int) -> int:
    """Sample one of the candidates; the lowest id among equals.

    Parameters
    ----------
    logits : float32 array of shape (vocab_size,)
    ids : candidates; None is the whole vocabulary
    temperature : divides the logits; above 0
    key : of the sample (`stream_key`)
    position : of the token that is sampled, from 0 at the beginning of the prompt
    """
    chosen: Ids = np.arange(len(logits)) if ids is None else ids
    scores = (logits if ids is None else logits[ids]).astype(np.float64)
    scores -= scores.max()
    with np.errstate(over="ignore"):
        scores /= temperature
    uniform = uniforms(key, position, chosen)
    if len(chosen) > _MANY:  # -ln u >= 1 - u bounds the score; few can reach the one with the best bound
        bounds = scores - np.log(1.0 - uniform)
        best = np.argmax(bounds)
        reached = scores[best] + gumbels(uniform[best : best + 1])[0]
        few = np.flatnonzero(bounds >= reached - 1e-6)
        chosen, scores, uniform = chosen[few], scores[few], uniform[few]
    scores += gumbels(uniform)
    return int(chosen[scores == scores.max()].min())


def sample_rows(logits: Floats, ids: Ids, top_k: Ids, top_p: Floats, min_p: Floats, temperature: Floats, keys: Words,
              positions: Ids) -> Ids:
    """Sample from several rows at once, each as `sample` does from the candidates that its filters keep.

    Parameters
    ----------
    logits : float32 array of shape (rows, k), each row from best to worst
    ids : int64 array of the same shape, their tokens, the lower id first among equals
    top_k : candidates of each row that there are at all, from 1 to k
    top_p, min_p, temperature, keys, positions : of each row
    """
    exact, columns = logits.astype(np.float64), np.arange(logits.shape[1])
    exact -= exact[:, :1]
    kept, within = exp(exact), columns < top_k[:, None]
    sums = np.cumsum(kept, axis=1)
    total = sums[np.arange(len(sums)), top_k - 1]
    nucleus = ((sums < (top_p * total)[:, None]) & within).sum(1) + 1
    likely = ((kept >= min_p[:, None]) & within).sum(1)
    n = np.minimum(np.where(top_p < 1, np.minimum(nucleus, top_k), top_k), np.where(min_p > 0, likely, top_k))
    bits = absorb(absorb(keys, positions)[:, None], ids) >> np.uint64(12)
    with np.errstate(over="ignore"):
        scores = exact / temperature[:, None] + gumbels((bits.astype(np.float64) + 0.5) * 2.0**-52)
    scores[columns >= n[:, None]] = -np.inf
    best = scores == scores.max(1, keepdims=True)
    return np.asarray(np.where(best, ids, np.iinfo(np.int64).max).min(1))
