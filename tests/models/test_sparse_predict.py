"""Predictors in a run: each decoded token computes the neurons of its own mask, whichever others run beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, BundleWriter, Predictor, weights_identity
from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import PREDICTOR_TYPE
from edgeinfer.quant import layouts, quantise
from edgeinfer.registry import recipe_with
from edgeinfer.runner import DECODE, PROMPT, Segment
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, logits_of, session, tokens

MODEL = replace(TINY, hidden_act="relu")
N, H, LAYERS = MODEL.intermediate_size, MODEL.hidden_size, MODEL.num_hidden_layers
PREDICT = recipe_with(sparse="predict")


def matrix(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    codes, scales, _ = quantise.quantise(rng.standard_normal(shape).astype(np.float32), PREDICTOR_TYPE.dtype,
                                         PREDICTOR_TYPE.group_size, "test")
    return layouts.pack_tile16(codes, PREDICTOR_TYPE.dtype, PREDICTOR_TYPE.group_size, scales)


def predictor(kind: str, least: float) -> Predictor:
    """A random one, and whether a neuron is computed is up to its score and `least`."""
    rng, size = np.random.default_rng(5), 1 if kind == "threshold" else N
    limits = {"thresholds": tuple(np.full(size, least, np.float32) for _ in range(LAYERS))}
    if kind == "sign":
        signs = tuple(rng.integers(0, 1 << H, (N, 1), np.uint64) for _ in range(LAYERS))
        return Predictor(kind, 0, signs=signs, **limits)
    if kind == "threshold":
        return Predictor(kind, 0, **limits)
    inner, outer = (tuple(matrix(rng, shape) for _ in range(LAYERS)) for shape in ((9, H), (N, 9)))
    return Predictor(kind, 9, inner=inner, outer=outer, **limits)


def with_predictor(path: Path, kind: str, least: float, group: int = 32, activation: str = "relu") -> Path:
    """A random model, neuron by neuron, with a predictor."""
    config = replace(MODEL, hidden_act=activation)
    write_random_bundle(config, path / "plain", "q4", group, ffn_layout="neuron")
    with Bundle.open(path / "plain") as bundle, BundleWriter(path / "m", config, bundle.quantisation) as writer:
        for entry in bundle.header.tensors:
            writer.add(entry.name, entry.type, entry.shape, bundle.weights[entry.offset :][: entry.nbytes])
        content = b"".join(predictor(kind, least).pack(weights_identity(bundle.header.tensors)))
        writer.add_file("predictor.bin", content, "predictor")
    return path / "m"


def decoded(opened: Session, ids: list[int]) -> np.ndarray:
    """Logits of each token, one token a forward pass."""
    sequence = opened.new_sequence()
    return np.concatenate([opened.forward([Segment(sequence, [i], (0,), DECODE)]).copy() for i in ids])


@pytest.mark.parametrize(("kind", "group"), [("sign", 32), ("lowrank", 32), ("lowrank", 128), ("threshold", 32)])
def test_a_token_has_the_same_bits_in_any_batch(kind: str, group: int, tmp_path: Path) -> None:
    path = with_predictor(tmp_path, kind, 0.3 if kind == "threshold" else 0.0, group, "silu" if kind == "threshold" else
                          "relu")
    ids, rows = tokens(9), []
    for threads in (1, 2, 3):
        with session(path, ctx=128, threads=threads, recipe=PREDICT, outputs=9, max_sequences=2) as opened:
            rows.append(decoded(opened, ids))
            together, alone = opened.new_sequence(), opened.new_sequence()
            rows.append(opened.forward([Segment(together, ids, tuple(range(9)), DECODE)]).copy())
            opened.forward([Segment(alone, ids[:5], (), DECODE)])
            both = opened.forward([Segment(alone, ids[5:], tuple(range(4)), DECODE),
                                Segment(opened.new_sequence(), ids[:4], (), PROMPT)]).copy()
            assert np.array_equal(both, rows[0][5:])
    assert all(np.array_equal(row, rows[0]) for row in rows)
    with session(path, ctx=128, recipe=recipe_with(sparse="exact")) as opened:
        assert not np.array_equal(decoded(opened, ids), rows[0])


@pytest.mark.parametrize("kind", ["sign", "lowrank", "threshold"])
def test_prompts_and_masks_of_all_neurons_are_exact(kind: str, tmp_path: Path) -> None:
    path, ids = with_predictor(tmp_path, kind, 0.0 if kind == "threshold" else -3e38), tokens(40)
    with session(path, ctx=128, recipe=PREDICT) as opened, session(path, ctx=128) as exact:
        assert np.array_equal(logits_of(opened, ids, n_decoded=6), logits_of(exact, ids, n_decoded=6))
    nothing = with_predictor(tmp_path / "nothing", kind, 3e38)
    with session(nothing, ctx=128, recipe=PREDICT) as opened, session(path, ctx=128) as exact:
        assert np.array_equal(opened.prefill(opened.new_sequence(), ids), exact.prefill(exact.new_sequence(), ids))
        assert not np.array_equal(decoded(opened, ids[:2]), decoded(exact, ids[:2]))


@pytest.mark.parametrize("kind", ["sign", "lowrank", "threshold"])
def test_every_kernel_agrees_with_its_reference(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ids = with_predictor(tmp_path, kind, 0.1), tokens(6)
    with session(path, ctx=64, recipe=PREDICT) as opened:
        want = decoded(opened, ids)
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with session(path, ctx=64, recipe=PREDICT) as opened:
        assert np.allclose(decoded(opened, ids), want, atol=1e-4)


def test_the_predictor_is_planned(tmp_path: Path) -> None:
    path = with_predictor(tmp_path, "lowrank", 0.0)
    with session(path, ctx=64, recipe=PREDICT) as opened, session(path, ctx=64) as exact:
        more = opened.plan.region("resident").nbytes
        assert more >= predictor("lowrank", 0.0).nbytes
        assert "resident" not in [region.name for region in exact.plan.regions]
        assert opened.plan.total_bytes >= exact.plan.total_bytes + more
