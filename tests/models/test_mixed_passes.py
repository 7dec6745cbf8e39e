"""Decoded tokens beside a prompt have the bits of a pass of their own, however many of them are split."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.config import Recipe
from edgeinfer.graph import AlibiConfig, ModelConfig
from edgeinfer.kernels import abi
from edgeinfer.registry import recipe_with
from edgeinfer.runner import DECODE, Segment, Sequence
from edgeinfer.runtime import Session
from tests.helpers.sessions import SPLIT, TINY, WINDOWED, free_blocks, session, tokens, write_model
from tests.models.test_gpt_oss import MOE
from tests.models.test_latent import MODEL

LONG = 3 * SPLIT + 60
DEPTHS = (LONG, 40, 2 * SPLIT - 1, SPLIT + 7)
FAMILIES: dict[str, tuple[ModelConfig, Recipe]] = {
    "plain": (TINY, Recipe()), "windows": (WINDOWED, Recipe()), "sinks": (MOE, Recipe()), "latent": (MODEL, Recipe()),
    "alibi": (replace(TINY, model_type="falcon", num_key_value_heads=6, rotary_dim=0, alibi=AlibiConfig(bfloat16=True)),
              Recipe()),
    "selected": (TINY, recipe_with(attention="top:100")),
    "selected windows": (WINDOWED, recipe_with(attention="eps:0")),
}
TREE = [-1, 0, 0, 1, 2]


def prompted(opened: Session, n: int) -> Sequence:
    sequence = opened.new_sequence()
    opened.prefill(sequence, tokens(n, seed=n))
    return sequence


def split(opened: Session) -> int:
    """Tokens of the last pass that were split."""
    return dict(opened._counts)[abi.COUNT_MERGE]


def rows_of(opened: Session, segments: Items[Segment]) -> list[np.ndarray]:
    """The rows of logits of each segment; its sequence is as before."""
    lengths = [len(segment.sequence) for segment in segments]
    rows = opened.forward(segments).copy()
    for segment, length in zip(segments, lengths, strict=True):
        opened.truncate(segment.sequence, length)
    ends = np.cumsum([len(segment.outputs) for segment in segments])[:-1]
    return np.split(rows, ends)


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_tokens_have_the_bits_of_a_pass_of_their_own(tmp_path: Path, family: str, threads: int,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """One token each, then draft tokens and a tree; as many are split as the rule says, and other numbers."""
    model, recipe = FAMILIES[family]
    path = write_model(tmp_path, replace(model, max_position_embeddings=2048))
    with session(path, ctx=LONG + 80, max_sequences=5, outputs=30, threads=threads, recipe=recipe) as opened:
        deep = [prompted(opened, n) for n in DEPTHS]
        prompt = Segment(prompted(opened, 9), tokens(40, seed=3), (39, 7))
        single = [Segment(sequence, [number], (0,), DECODE) for number, sequence in enumerate(deep)]
        drafts = [Segment(sequence, tokens(n, seed=n), tuple(range(n)), DECODE, parents)
                  for sequence, n, parents in zip(deep, (7, 6, 5, 4), (None, None, TREE, None), strict=True)]
        for segments, counts in ((single, (None, 0, 1, 4)), (drafts, (None, 0, 6, 16))):
            alone = [rows_of(opened, [segment])[0] for segment in (*segments, prompt)]
            for mixed, count in product(([*segments, prompt], [prompt, *segments], segments), counts):
                with monkeypatch.context() as patch:
                    if count is not None:
                        patch.setattr(opened, "_split", lambda segments, offset, count=count: count)
                    found = rows_of(opened, mixed)
                assert split(opened) == count or (count is None and (split(opened) == 15 or segments is single))
                for segment, rows in zip(mixed, found, strict=True):
                    want = alone[[*map(id, (*segments, prompt))].index(id(segment))]
                    assert rows.tobytes() == want.tobytes()
        before = free_blocks(opened)
        opened.forward([prompt, *single])
        rows = opened.decode(deep, [5, 6, 7, 8]).copy()  # K and V of the mixed pass
        for sequence, n in zip((*deep, prompt.sequence), (*DEPTHS, 9), strict=True):
            opened.truncate(sequence, n)
        assert free_blocks(opened) == before
        for number, sequence in enumerate(deep):
            opened.decode([sequence], [number])
            assert opened.decode([sequence], [5 + number])[0].tobytes() == rows[number].tobytes()
