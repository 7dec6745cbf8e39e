"""Random bundles whose FFNs fire as sparse models do: density, skew and masks as asked for, parts that open."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sparse_speed import watch
from edgeinfer.bundle import Bundle, read_predictor, read_statistics
from edgeinfer.converters import SHAPES, Sparsity, write_random_bundle
from edgeinfer.errors import UsageError
from edgeinfer.quant import WeightType
from edgeinfer.registry import recipe_with
from edgeinfer.runtime import everywhere
from tests.helpers.sessions import session

SMALL = replace(SHAPES["tinyllama-1.1b"], hidden_size=256, intermediate_size=700, num_hidden_layers=2, vocab_size=300,
                num_attention_heads=4, num_key_value_heads=2, head_dim=64)
NEAR = 0.03
"""A few points: a few hundred tokens of one model, whose inputs are not quite normal."""


def rates(path: Path, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """By layer and neuron, shares of the tokens for which it fires, and of those for which it is chosen."""
    with session(path, ctx=256, prefill_chunk=256, recipe=everywhere(recipe_with(sparse=mode))) as opened:
        fired, chosen = watch(opened, 256)
    return fired / 256, chosen / 256


@pytest.mark.parametrize(("weights", "density", "skew"), [("q4", 0.1, 0.5), ("int8", 0.3, 0.7), ("q4", 0.1, 0.9)])
def test_neurons_fire_as_often_as_asked(tmp_path: Path, weights: str, density: float, skew: float) -> None:
    write_random_bundle(SMALL, tmp_path / "m", weights, ffn_layout="neuron", sparsity=Sparsity(density, skew))
    fired, _ = rates(tmp_path / "m", "exact")
    assert np.abs(fired.mean(axis=1) - density).max() < NEAR
    hot = fired[:, :350].sum() / fired.sum()
    assert abs(hot - skew) < NEAR, hot
    with Bundle.open(tmp_path / "m") as bundle:
        bundle.verify()
        statistics = read_statistics(bundle)
        assert statistics is not None and read_predictor(bundle) is None
        counted = statistics.fired[0] / statistics.tokens
        assert abs(counted.mean() - density) < 0.005 and abs(counted[:350].sum() / counted.sum() - skew) < 0.01


def test_each_neuron_fires_as_often_as_its_statistics_say(tmp_path: Path) -> None:
    """Tokens do not grow alike from layer to layer, so that a cache hits as the rates let expect."""
    write_random_bundle(replace(SMALL, num_hidden_layers=8), tmp_path / "m", ffn_layout="neuron",
                        sparsity=Sparsity(0.1, 0.9))
    fired, _ = rates(tmp_path / "m", "exact")
    with Bundle.open(tmp_path / "m") as bundle:
        statistics = read_statistics(bundle)
        assert statistics is not None
        off = np.abs(fired - np.array(statistics.fired) / statistics.tokens).mean(axis=1)
    assert off.max() < 0.03, off


@pytest.mark.parametrize(("kind", "rank", "mask"), [("lowrank", 64, None), ("lowrank", 64, 0.25), ("sign", 0, 0.2)])
def test_masks_choose_the_share_asked_for(tmp_path: Path, kind: str, rank: int, mask: float | None) -> None:
    sparsity = Sparsity(0.1, 0.8, kind, rank, mask)
    write_random_bundle(SMALL, tmp_path / "m", ffn_layout="neuron", sparsity=sparsity)
    alive, _ = rates(tmp_path / "m", "exact")
    computed, chosen = rates(tmp_path / "m", "predict")
    assert np.abs(alive.mean(axis=1) - 0.1).max() < NEAR
    assert np.abs(chosen.mean(axis=1) - sparsity.chosen).max() < NEAR
    found = computed.sum() / alive.sum()
    assert found > 0.8 if kind == "lowrank" else found > sparsity.chosen + 0.1  # better than chance
    with Bundle.open(tmp_path / "m") as bundle:
        predictor = read_predictor(bundle)
        assert predictor is not None and (predictor.kind, predictor.rank) == (kind, rank)
        int8 = WeightType("int8", 32)
        layer = 4 * 700 + (int8.nbytes((rank, 256)) + int8.nbytes((700, rank)) if rank else 8 * 700 * 4)
        assert predictor.nbytes == 2 * layer
        (entry,) = [entry for entry in bundle.header.files if entry.part == "predictor"]
        assert 0 <= entry.nbytes - predictor.nbytes < 4096


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    for wrong, said in ((dict(density=0.0), "density is 0.0; it must be from 0.001 to 0.9"),
                        (dict(density=0.1, skew=0.2), "skew is 0.2"), (dict(density=0.1, mask=0.2), "mask is the"),
                        (dict(density=0.1, predictor="lowrank"), "rank is 0"),
                        (dict(density=0.1, predictor="threshold"), "no predictor 'threshold'"),
                        (dict(density=0.1, predictor="sign", mask=float("nan")), "mask is nan")):
        with pytest.raises(UsageError, match=said):
            Sparsity(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="neuron by neuron, not as tile16"):
        write_random_bundle(SMALL, tmp_path / "m", sparsity=Sparsity(0.1))
    with pytest.raises(UsageError, match="biases in their FFN, which qwen2 does not have"):
        write_random_bundle(replace(SMALL, model_type="qwen2"), tmp_path / "m", ffn_layout="neuron",
                            sparsity=Sparsity(0.1))
    with pytest.raises(UsageError, match="rank is 257; hidden_size is 256"):
        Sparsity(0.1, predictor="lowrank", rank=257).config(SMALL)
    assert not list(tmp_path.iterdir())
    done = subprocess.run([sys.executable, "-m", "edgeinfer.converters.synthetic.random_bundle", str(tmp_path / "m"),
                           "--rank", "64"], capture_output=True, text=True)
    assert done.returncode != 0 and done.stderr == "--predictor, --rank and --mask belong to --density.\n"
