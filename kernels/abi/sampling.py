"""Settings and results of sampling a token from a row of logits; rows of work of the kernels that sample and screen."""

from __future__ import annotations

SAMPLE_BYTES = 128
"""Kept by the caller while it samples; integers are int64, the others float64."""
SAMPLE_TOKEN = 0
"""Result: the token's id; -1 if there is none: a logit is NaN or infinite, or all are -inf after bias and mask."""
SAMPLE_KEY = 8
"""State of the random numbers (sampling.stream_key)."""
SAMPLE_TEMPERATURE, SAMPLE_TOP_P, SAMPLE_MIN_P, SAMPLE_TOP_K = 16, 24, 32, 40
"""Temperature 0 takes the best token; the others as in GenerationConfig."""
SAMPLE_EDITS, SAMPLE_N_EDITS = 48, 56
"""Address of EDIT_BYTES for each token whose logit has a bias or a penalty, and how many there are."""
SAMPLE_REPETITION, SAMPLE_PRESENCE, SAMPLE_FREQUENCY = 64, 72, 80
SAMPLE_ENDS, SAMPLE_N_ENDS = 88, 96
"""Address of the tokens (int64) that end the text, after which no pass continues by itself; and how many there are."""
SAMPLE_SCREEN = 104
"""1 if estimates suffice for logits that cannot be the largest, else 0: only the sample reads the row."""
SAMPLE_ALONE = 112
"""1 if the row is not looked at once the token is chosen, so that a runner need not give it; else 0."""
SAMPLE_MASK = 120
"""Address of int32 words with a bit for each token, from the lowest bit of the first word on, or 0. Tokens whose bit is
not set are forbidden: wherever the sample kernels read a logit of theirs it counts as -inf, unless it is NaN or +inf,
and the row stays as it is. With a mask SAMPLE_SCREEN and SAMPLE_ALONE count as 0, and no pass continues by itself."""
SAMPLE_CANDIDATES = 128
"""Most candidates that kernels sort; where more may be kept the cut is found by counting, in this many bins."""
SAMPLE_BINS = 256
SAMPLE_BLOCK, SAMPLE_CHUNK = 64, 1024
"""Logits of which the largest is noted, and of a chunk: a vector of such maxima."""
EDIT_BYTES = 16
EDIT_TOKEN = 0
"""int32, once in a list."""
EDIT_COUNT = 4
"""int32: how often the token was generated; 0 in the prompt only, -1 if it has a bias and was never seen."""
EDIT_BIAS = 8
"""float32."""
EDIT_KEPT = 12
"""float32: the model's own value, while the row is edited."""


def sample_row(vocab_size: int) -> tuple[int, int, int]:
    """Return the layout of a row of work of the sample kernels, in bytes: (its length, offset of sums, of candidates).

    Maxima of blocks come first, whole vectors of them; then the sum of each chunk's exponentials; then the candidates;
    then bins of a count and a weight.
    """
    chunks = -(-vocab_size // SAMPLE_CHUNK)
    sums = 64 * chunks
    candidates = sums + 64 * -(-chunks // 16)
    return candidates + 8 * SAMPLE_CANDIDATES + 16 * SAMPLE_BINS, sums, candidates


SCREEN_LEAST, SCREEN_REACH, SCREEN_MAXIMA = 0, 4, 64
"""Offsets in a row of work of the screen kernels: float32 that a logit must be able to reach, the factor of the
bounds of all logits, and the largest estimate of each chunk of SAMPLE_CHUNK."""
SCREEN_ROUNDING = 64
"""Weight of an error of the rounded input relative to one of the input, in reach and in bounds."""


def screen_row(vocab_size: int) -> int:
    """Return the bytes of a row of work of the screen kernels."""
    return SCREEN_MAXIMA + 64 * -(-vocab_size // (16 * SAMPLE_CHUNK))
