"""Same bundle, prompt and seed: the same logits bit for bit, so the same text, for any threads, chunks and batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Sampler
from edgeinfer.graph import ModelConfig
from edgeinfer.runtime import Session
from tests import kernel_selection
from tests.helpers.sessions import SPLIT, TINY, WINDOWED, scored, session, tokens, write_model

PROMPT = tokens(2 * SPLIT + 91)  # three attention splits, the last of them part of a block
CONTINUED = 12
RUNS = ((1, 1), (1, 7), (1, 64), (2, 7), (2, 64), (2, 512), (3, 1), (3, 64), (3, 512))
"""(threads, chunk), each compared with one thread that takes 512 tokens at a time."""
STORAGE = (
    *(("q4", group, kv) for group in (32, 128) for kv in ("int8", "f16", "f32")),
    *(pytest.param("q4", 64, kv, marks=pytest.mark.slow) for kv in ("int8", "f16", "f32")),
    ("int8", 32, "int8"), pytest.param("int8", 64, "int8", marks=pytest.mark.slow), ("int8", 128, "int8"),
    ("f16", 32, "f32"), ("f16", 32, "int8"), ("f32", 32, "f16"),
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the module's bundles."""
    return tmp_path_factory.mktemp("models")


def trace(opened: Session, prompt: list[int], seed: int) -> tuple[list[int], bytes]:
    """Tokens sampled after a prompt, every second one greedily, and all logits that led to them."""
    sequence = opened.new_sequence()
    sampler = Sampler(GenerationConfig(temperature=0.9, top_k=0), opened.model.vocab_size, seed)
    logits, chosen, bits = opened.prefill(sequence, prompt), [], b""
    for step in range(CONTINUED):
        bits += logits.tobytes()
        chosen.append(int(logits.argmax()) if step % 2 else sampler.sample(logits).token_id)
        logits = opened.decode([sequence], [chosen[-1]])[0]
    opened.release(sequence)
    return chosen, bits


def compare(path: Path, kv: str, runs: tuple[tuple[int, int], ...] = RUNS) -> None:
    """All runs give the result of the first one."""
    with session(path, kv=kv, prefill_chunk=512) as opened:
        expected = trace(opened, PROMPT, seed=5)
    assert len(set(expected[0])) >= 4  # no loop that would hide a difference
    for threads, chunk in runs:
        with session(path, kv=kv, threads=threads, prefill_chunk=chunk) as opened:
            assert trace(opened, PROMPT, seed=5) == expected, f"{threads} threads, chunks of {chunk}"


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("weights", "group_size", "kv"), STORAGE)
def test_threads_and_chunks(weights: str, group_size: int, kv: str, models: Path) -> None:
    full = (weights, group_size, kv) == ("q4", 32, "int8")
    compare(write_model(models, TINY, weights, group_size), kv, RUNS if full else RUNS[1:6] + RUNS[7:])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_threads_and_chunks_with_windows(kv: str, models: Path) -> None:
    compare(write_model(models, WINDOWED), kv, ((1, 1), (1, 7), (2, 64), (3, 512)))


@pytest.mark.parametrize("isa", kernel_selection.levels())
def test_threads_and_chunks_on_every_instruction_set(isa: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_ISA", isa)
    for weights, kv in (("q4", "int8"), ("f16", "f32")):
        compare(write_model(models, WINDOWED, weights), kv, ((1, 7), (2, 64), (3, 512)))


@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["full", "windows"])
@pytest.mark.parametrize("n_outputs", [1, 5, 64])
def test_logits_of_every_position_do_not_depend_on_the_block(config: ModelConfig, n_outputs: int, models: Path) -> None:
    path = write_model(models, config)
    with session(path, prefill_chunk=128, outputs=128) as opened:
        expected = scored(opened, PROMPT)
    n = len(PROMPT) if n_outputs > 1 else SPLIT + 20
    with session(path, prefill_chunk=128, outputs=n_outputs, threads=2 if n_outputs > 1 else 1) as opened:
        assert scored(opened, PROMPT[:n]).tobytes() == expected[:n].tobytes()


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["full", "windows"])
def test_sequences_decoded_together_or_alone(config: ModelConfig, kv: str, models: Path) -> None:
    """Two to six sequences of different lengths in one pass: attention in splits for up to four, whole beyond."""
    lengths = (SPLIT - 3, 2 * SPLIT + 7, 5, 40, SPLIT + 1, 300)
    path = write_model(models, config)
    with session(path, kv=kv, max_sequences=6, ctx=600, threads=2) as opened:
        for n in (2, 4, 6):
            together = [opened.new_sequence() for _ in range(n)]
            alone = [opened.new_sequence() for _ in range(n)]
            for i in range(n):
                prompt = tokens(lengths[i], seed=i)
                opened.prefill(together[i], prompt)
                opened.prefill(alone[i], prompt) if n < 6 else None
            if n == 6:  # the pool has no room for twelve
                alone = [opened.fork(sequence) for sequence in together]
            for step in range(5):  # the first sequence crosses into its second split
                ids = tokens(n, seed=100 + step)
                rows = opened.decode(together, ids).copy()
                each = [opened.decode([s], [i])[0].copy() for s, i in zip(alone, ids, strict=True)]
                assert rows.tobytes() == np.stack(each).tobytes()
            for sequence in (*together, *alone):
                opened.release(sequence)
