"""Sampling from the largest logits of a row alone, where they provably give the same token as the whole row."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.kernels import abi, sampling
from edgeinfer.runner import DECODE, Segment

RETURNED_LOGITS = 64
"""Number of the largest logits of a row that decode steps return with their token ids."""


def sampled(segment: Segment) -> list[tuple[int, int]]:
    """Return the sample spec and the position of the sampled token for each row of logits; 0 if the row is not sampled.

    Rows of a prompt and rows that the caller asked for are not sampled.
    """
    sample_specs = segment.sample_specs if segment.sample_specs and segment.role == DECODE \
        else [0] * len(segment.outputs)
    return [(spec, len(segment.sequence) + len(segment.ids)) for spec in sample_specs]


def choose(sample_specs: Items[int], values: NDArray[np.float32], ids: NDArray[np.int64],
           positions: NDArray[Any]) -> bool:
    """Sample several tokens from the largest logits of their rows, if these determine all of them.

    They do if sampling is greedy, or if top-k is smaller than the number of logits here. The k-th largest must also
    differ from the smallest logit here, since of equal logits the lower id comes first, and it might not be among
    these. A mask that forbids tokens needs the whole row.

    Parameters
    ----------
    sample_specs : their addresses (kernels/abi/sampling.py); 0 for none
    values, ids : the largest logits of each row and their tokens, in any order; NaN where a row is not finite
    positions : positions of the sampled tokens

    Returns
    -------
    bool
        True if the sample specs hold the tokens now; False if the whole rows are needed.
    """
    if not all(sample_specs) or np.isnan(values).any():
        return False
    specs = b"".join(ctypes.string_at(address, abi.SAMPLE_BYTES) for address in sample_specs)
    words = np.frombuffer(specs, np.int64).reshape(len(sample_specs), -1).T
    temperature, top_p, min_p = np.frombuffer(specs).reshape(len(sample_specs), -1).T[
        [abi.SAMPLE_TEMPERATURE >> 3, abi.SAMPLE_TOP_P >> 3, abi.SAMPLE_MIN_P >> 3]]
    top_k = np.where(temperature == 0, 1, words[abi.SAMPLE_TOP_K >> 3])
    alone = (words[abi.SAMPLE_ALONE >> 3] != 0) & (words[abi.SAMPLE_MASK >> 3] == 0)
    if not (alone.all() and (top_k > 0).all() and (top_k < values.shape[1]).all()):
        return False
    rows, order = np.arange(len(sample_specs)), np.lexsort((ids, -values))
    values, ids = values[rows[:, None], order], ids[rows[:, None], order]
    if (values[rows, top_k - 1] == values[:, -1]).any():
        return False
    chosen = ids[:, 0]
    if temperature.any():
        most, keys = int(top_k.max()), words[abi.SAMPLE_KEY >> 3].view(np.uint64)
        chosen = sampling.sample_rows(values[:, :most], ids[:, :most], top_k, top_p, min_p,
                                    np.where(temperature == 0, 1.0, temperature), keys, positions)
    for address, token in zip(sample_specs, chosen.tolist(), strict=True):
        ctypes.c_int64.from_address(address + abi.SAMPLE_TOKEN).value = token
    return True
