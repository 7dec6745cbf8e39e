"""Samples of rows that check a draft follow the sampler's own distribution, and are its text."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Sampler

SAMPLES = int(os.environ.get("EDGEINFER_SAMPLES", "800"))
"""Per setting; CI has no time for 100,000."""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"logit_bias": {3: 1.0, 5: -2.0}},
    {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05}])
def test_samples_of_checked_rows_follow_the_distribution(options: dict[str, Any]) -> None:
    """Chi-square against the sampler's own distribution; a draft with other logits draft tokens with the same
    numbers.
    """
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal(12) * 1.3).astype(np.float32)
    others = logits + rng.standard_normal(12).astype(np.float32) / 2
    config = GenerationConfig(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options})
    chain, sampled, right = Sampler(config, 12, seed=9, room=SAMPLES + 8), list[int](), 0
    ids, probabilities = chain.distribution(logits)
    while len(sampled) < SAMPLES:
        draft, propose = chain.for_draft(12, 3), list[int]()
        for _ in range(3):
            propose.append(draft.sample(others).token_id)
            draft.accept(propose[-1])
        for place, row in enumerate(chain.following(propose)):
            sampled.append(row.sample(logits).token_id)
            chain.accept(sampled[-1])
            if propose[place : place + 1] != sampled[-1:]:
                break
            right += 1
    expected = probabilities * len(sampled)
    seen = np.bincount(sampled, minlength=12)
    chi_square, freedom = ((seen[ids] - expected) ** 2 / expected).sum(), len(ids) - 1
    assert seen[ids].sum() == len(sampled) and chi_square < freedom + 4 * np.sqrt(2 * max(freedom, 1))
    assert right > 0.3 * len(sampled)
    plain, text = Sampler(config, 12, seed=9, room=SAMPLES + 8), list[int]()
    for _ in sampled:
        text.append(plain.sample(logits).token_id)
        plain.accept(text[-1])
    assert text == sampled
