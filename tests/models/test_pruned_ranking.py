"""Tokens of a prompt that are kept: ranked by the attention of its last ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import AlibiConfig, Attention
from edgeinfer.runner import Segment
from edgeinfer.runner.pruning import Schedule
from edgeinfer.runtime.prompt_pruning import importance, most_important
from tests.helpers.pruned import HALF, written
from tests.helpers.sessions import TINY, session, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"))


def test_importance_is_the_attention_of_the_last_tokens(model: Path) -> None:
    """Beside the softmax of their scores in float64, from the queries and keys that the layer has."""
    with session(model, ctx=256, kv="f32", lazy=HALF) as opened:
        sequence = opened.new_sequence()
        seen = []
        opened.prefill_strategy.choose = lambda weight, rows, most: seen.append((weight, rows, most)) or rows[-most:]
        opened.prefill(sequence, tokens(128))
        (first, _, most), (second, rows, _) = seen
        assert most == 64 and np.isinf(first[[0, *range(112, 128)]]).all() and np.isfinite(first[1:112]).all()
        assert rows.tolist() == list(range(64, 128)) and not np.isinf(second[0])
        op = opened.prefill_strategy._stages[1].attention
        q = np.random.default_rng(0).standard_normal((2, 36)).astype(np.float32)
        got = importance(opened, sequence, op, 1, q, 128)
        k = [opened.kv.keys(sequence, op.layer, head)[:128].astype(np.float64) for head in range(2)]
        scores = np.array([[k[head // 3] @ row[6 * head :][:6] for head in range(6)] for row in q]) / np.sqrt(6)
        scores[:, :, :64] = scores[0, :, 127] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        mean = (weights / weights.sum(axis=2, keepdims=True)).mean(axis=(0, 1))
        expected = [mean[max(i - 2, 0) : i + 3].max() for i in range(128)]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_importance_falls_with_the_distance(bfloat16: bool, tmp_path: Path) -> None:
    """ALiBi goes by the places that tokens had before any was left out; beside the softmax in float64."""
    alibi = AlibiConfig(bfloat16=bfloat16)
    config = replace(TINY, model_type="falcon", num_key_value_heads=6, rotary_dim=0, alibi=alibi, head_dim=6)
    write_random_bundle(config, tmp_path / "bundle", "f32")
    with session(tmp_path / "bundle", ctx=512, kv="f32", lazy=Schedule.parse("keep=0.5", "1")) as opened:
        sequence, n = opened.new_sequence(), 400
        opened.prefill(sequence, tokens(n))
        op = next(op for op in opened.graph.ops if isinstance(op, Attention))
        q = np.random.default_rng(0).standard_normal((1, 6 * op.heads)).astype(np.float32)
        got = importance(opened, sequence, op, 0, q, n)
        k = [opened.kv.keys(sequence, 0, head)[:n].astype(np.float64) for head in range(op.heads)]
        bias = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])[:, None] * (np.arange(n) - (n - 1))
        if bfloat16:
            parts, power = np.frexp(np.arange(n))  # slopes are powers of 2 here, so places alone are rounded
            places = np.ldexp(np.rint(256 * parts) / 256, power)
            bias = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])[:, None] * (places - places[-1]) / np.sqrt(6)
        scores = np.array([k[head] @ q[0, 6 * head :][:6] for head in range(op.heads)]) / np.sqrt(6) + bias
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mean = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
        expected = [mean[max(i - 2, 0) : i + 3].max() for i in range(n)]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-8)


def test_keys_are_read_as_they_are_stored(model: Path) -> None:
    """Those of the first layer, which sees the same rows whatever is stored."""
    found = {}
    for kv in ("f32", "f16", "int8"):
        with session(model, ctx=96, kv=kv) as opened:
            sequence = opened.new_sequence()
            opened.forward([Segment(sequence, tokens(50))])
            found[kv] = [opened.kv.keys(sequence, 0, head)[:50] for head in range(2)]
    for kv, share in (("f16", 1e-3), ("int8", 1e-2)):
        for mine, exact in zip(found[kv], found["f32"], strict=True):
            assert np.abs(mine - exact).max() <= share * np.abs(exact).max() and exact.std() > 0


def test_ties_go_to_the_earlier_position() -> None:
    rows = np.array([3, 5, 8, 9, 12])
    weight = np.array([1, 2, 1, np.inf, 1], np.float32)
    assert most_important(weight, rows, 3).tolist() == [3, 5, 9]
    assert most_important(weight, rows, 9).tolist() == rows.tolist()
