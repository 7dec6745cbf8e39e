"""How a token is to be chosen from a row of logits, and which was; rows of work of the kernels that draw and screen."""

from __future__ import annotations

DRAW_BYTES = 128
"""Kept by whoever draws, as long as it draws; integers are int64, the others float64."""
DRAW_TOKEN = 0
"""Result: the token's id; -1 where a logit is NaN or infinite."""
DRAW_KEY = 8
"""State of the random numbers (sampling.stream_key)."""
DRAW_TEMPERATURE, DRAW_TOP_P, DRAW_MIN_P, DRAW_TOP_K = 16, 24, 32, 40
"""Temperature 0 takes the best token; the others as in GenerationConfig."""
DRAW_EDITS, DRAW_N_EDITS = 48, 56
"""Address of EDIT_BYTES for each token whose logit has a bias or a penalty, and how many there are."""
DRAW_REPETITION, DRAW_PRESENCE, DRAW_FREQUENCY = 64, 72, 80
DRAW_ENDS, DRAW_N_ENDS = 88, 96
"""Address of the tokens (int64) that end the text, behind which no walk goes on by itself; and how many there are."""
DRAW_SCREEN = 104
"""1 where of logits that cannot be the largest estimates are enough, else 0: nobody but the draw looks at the row."""
DRAW_ALONE = 112
"""1 where the row is not looked at once the token is chosen, so that a runner need not give it; else 0."""
DRAW_CANDIDATES = 128
"""Most candidates that kernels sort; where more may be kept the cut is found by counting, in so many bins."""
DRAW_BINS = 256
DRAW_BLOCK, DRAW_CHUNK = 64, 1024
"""Logits of which the largest is noted, and of a chunk: a vector of such maxima."""
EDIT_BYTES = 16
EDIT_TOKEN = 0
"""int32, once in a list."""
EDIT_COUNT = 4
"""int32: how often the token was generated; 0 in the prompt only, -1 if it has a bias and was never seen."""
EDIT_BIAS = 8
"""float32."""
EDIT_KEPT = 12
"""float32: what the model computed, while the row is edited."""


def draw_row(vocab_size: int) -> tuple[int, int, int]:
    """Return the layout of a row of work of the draw kernels, in bytes: (its length, place of sums, of candidates).

    Maxima of blocks come first, whole vectors of them; then the sum of each chunk's exponentials; then the candidates;
    then bins of a count and a weight.
    """
    chunks = -(-vocab_size // DRAW_CHUNK)
    sums = 64 * chunks
    candidates = sums + 64 * -(-chunks // 16)
    return candidates + 8 * DRAW_CANDIDATES + 16 * DRAW_BINS, sums, candidates


SCREEN_LEAST, SCREEN_REACH, SCREEN_MAXIMA = 0, 4, 64
"""Places in a row of work of the screen kernels: float32 that a logit must be able to reach, what the bounds of all
logits are multiplied by, and the largest estimate of each chunk of DRAW_CHUNK."""
SCREEN_ROUNDING = 64
"""How much more an error of the rounded input weighs than one of the input, in reach and in bounds."""


def screen_row(vocab_size: int) -> int:
    """Return the bytes of a row of work of the screen kernels."""
    return SCREEN_MAXIMA + 64 * -(-vocab_size // (16 * DRAW_CHUNK))
