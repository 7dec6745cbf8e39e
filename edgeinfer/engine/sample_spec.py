"""Sample specs: the settings of a sampler in the memory that kernels read (abi.SAMPLE_*), and checks of their parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edgeinfer.kernels import abi, sampling

from ..config import GenerationConfig
from ..errors import RequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mask: TypeAlias = "NDArray[np.int32] | NDArray[np.uint32]"
"""One bit for each token, set where it is allowed, from the lowest bit of the first word on."""
MAX_BIAS = 1e30
"""Stays finite in float32; a token with more is certain anyway."""
EDIT = np.dtype({"names": ["token", "count", "bias"], "formats": ["i4", "i4", "f4"], "itemsize": abi.EDIT_BYTES,
                 "offsets": [abi.EDIT_TOKEN, abi.EDIT_COUNT, abi.EDIT_BIAS]})  # fmt: skip
NONE = -1
"""SAMPLE_TOKEN of a sample that no kernel has chosen."""


def new_spec(config: GenerationConfig, key: int, ends: NDArray[np.int64], biases: int) -> NDArray[np.int64]:
    """Return the words of a sample that has no token yet.

    Parameters
    ----------
    key : state of its random numbers
    ends : tokens that end the text; read in place
    biases : how many tokens have one, which are first among the edits
    """
    spec = np.zeros(abi.SAMPLE_BYTES >> 3, np.int64)
    numbers = spec.view(np.float64)
    spec.view(np.uint64)[abi.SAMPLE_KEY >> 3] = key
    for offset, number in (
        (abi.SAMPLE_TEMPERATURE, config.temperature), (abi.SAMPLE_TOP_P, config.top_p),
        (abi.SAMPLE_MIN_P, config.min_p), (abi.SAMPLE_REPETITION, config.repetition_penalty),
        (abi.SAMPLE_PRESENCE, config.presence_penalty), (abi.SAMPLE_FREQUENCY, config.frequency_penalty),
    ):  # fmt: skip
        numbers[offset >> 3] = number
    alone = config.logprobs is None and not biases and not penalises(config)
    for offset, value in (
        (abi.SAMPLE_TOKEN, NONE), (abi.SAMPLE_TOP_K, config.top_k), (abi.SAMPLE_N_EDITS, biases),
        (abi.SAMPLE_ENDS, ends.ctypes.data), (abi.SAMPLE_N_ENDS, len(ends)), (abi.SAMPLE_SCREEN, alone),
        (abi.SAMPLE_ALONE, alone),
    ):  # fmt: skip
        spec[offset >> 3] = value
    return spec


def stream_key(seed: int, sample: int) -> int:
    """Return `sampling.stream_key` in Python's integers: for two numbers NumPy takes 40 us, a tenth of a short pass."""
    state, bits = 0, (1 << 64) - 1
    for number in (seed, sample):
        z = state + (number + 1) * sampling.GAMMA & bits
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & bits
        z = (z ^ z >> 27) * 0x94D049BB133111EB & bits
        state = z ^ z >> 31
    return state


def penalises(config: GenerationConfig) -> bool:
    """Return whether logits depend on the tokens before."""
    return (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) != (1, 0, 0)


def checked_bias(bias: dict[int, float], vocab_size: int) -> dict[int, float]:
    """Return `logit_bias` with plain integers as keys; raises `RequestError` for one that cannot be added."""
    for token_id, value in bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)) or not 0 <= token_id < vocab_size:
            raise RequestError(f"logit_bias names token {token_id!r}; ids are from 0 to {vocab_size - 1}.")
        if not isinstance(value, (int, float)) or not value <= MAX_BIAS:
            raise RequestError(f"logit_bias of token {token_id} is {value!r}; it must be a number up to {MAX_BIAS:g}.")
    return {int(token_id): value for token_id, value in bias.items()}


def checked_mask(words: Any, vocab_size: int) -> Mask:
    """Return a mask that has a bit for each token: where words are missing the tokens are forbidden.

    Raises
    ------
    RequestError
        It is no contiguous array of 32-bit words.
    """
    if not isinstance(words, np.ndarray) or words.dtype not in (np.int32, np.uint32) or words.ndim != 1 \
            or not words.flags.c_contiguous:
        kind = f"{words.dtype} of shape {words.shape}" if isinstance(words, np.ndarray) else type(words).__name__
        raise RequestError(f"A mask is {kind}; give a contiguous array of int32 words with one bit for each token.")
    missing = -(-vocab_size // 32) - len(words)
    return np.pad(words, (0, missing)) if missing > 0 else words
