"""A predictor under a budget: planned like the weights, streamed beside, and never in the way of a refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import PREDICTOR_FILE, Bundle, BundleWriter, Predictor, weights_identity
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.graph import build_graph, requested_types
from edgeinfer.registry import recipe_with
from edgeinfer.runtime import plan_run
from tests.helpers.sessions import TINY, logits_of, session, tokens

CONFIG = replace(TINY, hidden_size=128, intermediate_size=320, num_hidden_layers=7, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, hidden_act="relu")
PREDICT = recipe_with(sparse="predict")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle by neuron whose predictor, of random signs, names about half of the neurons."""
    root = tmp_path_factory.mktemp("predicted")
    write_random_bundle(CONFIG, root / "plain", "q4", 32, ffn_layout="neuron")
    rng, layers = np.random.default_rng(3), range(CONFIG.num_hidden_layers)
    signs = tuple(rng.integers(0, 2**64, (320, 2), np.uint64, endpoint=False) for _ in layers)
    made = Predictor("sign", 0, signs=signs, thresholds=tuple(np.zeros(320, np.float32) for _ in layers))
    with Bundle.open(root / "plain") as bundle, \
            BundleWriter(root / "m", CONFIG, bundle.header.quantisation) as writer:
        for entry in bundle.header.tensors:
            writer.add(entry.name, entry.type, entry.shape, bundle.weights[entry.offset :][: entry.nbytes])
        writer.add_file(PREDICTOR_FILE, b"".join(made.pack(weights_identity(bundle.header.tensors))), "predictor")
    return root / "m"


@pytest.mark.parametrize("threads", [1, 3])
def test_streamed_layers_with_a_predictor_change_no_bit(model: Path, threads: int) -> None:
    ids = tokens(90)
    with session(model, ctx=256, recipe=PREDICT) as opened:
        assert opened.executor.stream is None
        needs, want = opened.plan.total_bytes, logits_of(opened, ids, 6)
    with session(model, ctx=256) as dense:
        assert dense.plan.total_bytes < needs and not (logits_of(dense, ids, 6)[1:] == want[1:]).all()
    with session(model, ctx=256, recipe=PREDICT, threads=threads, budget_bytes=needs - 100_000) as opened:
        assert opened.plan.parts and (logits_of(opened, ids, 6) == want).all()


def test_a_budget_too_small_is_refused_as_one(model: Path) -> None:
    with pytest.raises(BudgetError, match="The run needs"), \
            session(model, ctx=256, recipe=PREDICT, budget_bytes=1_000_000):
        pass


@pytest.mark.slow
def test_a_refusal_offers_the_exact_run_where_that_fits(model: Path) -> None:
    """As it was asked for, or with less context where nothing of the approximated run fits."""
    offered = set()
    with Bundle.open(model) as bundle:
        config = RuntimeConfig(256, threads=1, prefill_chunk=64, recipe=PREDICT)
        most = plan_run(bundle, replace(config, budget_bytes=1 << 40)).plan.total_bytes
        for less in (*range(700_000, 800_000, 20_000), *range(1_080_000, 1_160_000, 20_000)):
            try:
                plan_run(bundle, replace(config, budget_bytes=(budget := most - less)))
            except BudgetError as error:
                first = next(iter(error.alternatives), None)
                if first is None or "sparse" not in first.options:
                    continue
                assert f"It fits with --sparse exact{' --ctx' * ('ctx' in first.options)}" in str(error)
                other = replace(config, ctx=first.options.get("ctx", 256), recipe=recipe_with(sparse="exact"))
                assert plan_run(bundle, replace(other, budget_bytes=budget)).plan.total_bytes == first.total_bytes
                offered.add("ctx" in first.options)
    assert offered == {True, False}


def test_the_plan_says_of_each_region_what_lies_there(model: Path) -> None:
    with session(model, recipe=PREDICT) as opened:
        said = {region.name: region.reason for region in opened.plan.regions}
    assert "predictor" in said["resident"] and "ffn" not in said["resident"]
    assert "predictor" not in said["weights"] and "ffn" in said["weights"]


def test_sparse_is_said_once(model: Path) -> None:
    for first in ("off", "exact", "predict"):
        assert recipe_with(recipe_with(sparse=first), sparse="exact") == recipe_with(sparse="exact")
    for text in ("sparse:mode=predict+sparse:mode=exact", "sparse:mode=off+sparse:mode=predict"):
        with pytest.raises(UsageError, match="has the pass sparse twice"), session(model, recipe=Recipe.parse(text)):
            pass


@pytest.mark.parametrize("asked", ["kind=lowrank,rank=x", "kind=lowrank,rank=inf", "kind=lowrank,rank=5.5",
                                   "kind=lowrank,rank=129", "kind=lowrank", "kind=sign,rank=3", "kind=5"])
def test_a_predictor_that_cannot_be_has_no_graph(asked: str) -> None:
    with pytest.raises(UsageError, match=r"A predictor of kind .* does not exist; kinds are sign"):
        build_graph(CONFIG, requested_types(ffn_layout="neuron"), Recipe.parse(f"sparse:mode=predict,{asked}"))
