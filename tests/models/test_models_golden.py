"""The runtime against transformers: golden logits of every architecture, greedy text of real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import convert
from tests.helpers import golden_cases
from tests.helpers.sessions import scored, session

TOLERANCE = 1e-5  # of max |logit|; the same f16 weights, float32 on both sides, other orders of summation
GAP = 0.05  # logits closer than this may change places between two programs
REAL_MODELS = ("stories260K-hf", "babyllama-tok361-hf", "babyllama-tok105-as361-hf",
               "fables-5m-relu", "fables-5m-silu", "fables-draft")  # fmt: skip


def difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest logit."""
    assert logits.shape == expected.shape
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.slow(keep=24)
@pytest.mark.parametrize("name", golden_cases.names())
def test_transformers_logits(name: str, tmp_path: Path) -> None:
    """Every position by `score` in blocks of an odd size, then by a prefill in chunks and decoding one by one."""
    case = golden_cases.load(name)
    convert(golden_cases.write_checkpoint(case, tmp_path / "checkpoint"), tmp_path / "bundle", weights="f16")
    ctx = len(case.ids) if "dynamic" in name else None  # where the rotation follows the context
    with session(tmp_path / "bundle", kv="f32", ctx=ctx, threads=2, prefill_chunk=13, outputs=16) as opened:
        assert difference(scored(opened, case.ids), case.logits) < TOLERANCE
        sequence = opened.new_sequence()
        n = len(case.ids) // 2 + 1
        rows = [opened.prefill(sequence, case.ids[:n]).copy()]
        rows += [opened.decode([sequence], [token])[0].copy() for token in case.ids[n:]]
        assert difference(np.stack(rows), case.logits[n - 1 :]) < TOLERANCE
        assert sequence.tokens == case.ids


@pytest.mark.parametrize("model", REAL_MODELS)
def test_real_models_choose_the_golden_tokens(
    model: str, shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """Teacher-forced: golden.json's greedy token comes first wherever the two best differ by more than the gap."""
    folder = shared_data(f"models/{model}")
    own = folder / "golden.json"
    golden = json.loads(own.read_text() if own.exists() else shared_data("models/golden.json").read_text())
    cases: list[dict[str, Any]] = (golden if own.exists() else golden[model])["cases"]
    convert(folder, tmp_path / "bundle", weights="f16")
    sure = 0
    with session(tmp_path / "bundle", kv="f32", ctx=256, threads=2, outputs=32) as opened:
        for case in cases:
            prompt, greedy = case["prompt_ids"], case["greedy_ids"]
            logits = scored(opened, prompt + greedy[:-1])[len(prompt) - 1 :]
            second, first = np.partition(logits, -2)[:, -2:].T
            clear = first - second > GAP
            assert np.array_equal(logits.argmax(-1)[clear], np.array(greedy)[clear])
            assert (first - second).min() == pytest.approx(case["min_top2_gap"], abs=2e-3)
            assert logits[0, case.get("top5_ids", [])] == pytest.approx(case.get("top5_logits", []), abs=2e-3)
            sure += int(clear.sum())
    assert sure > 0.9 * sum(len(case["greedy_ids"]) for case in cases)
