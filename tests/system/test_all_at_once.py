"""Requests of all kinds that run at once get the tokens and log-probabilities that each gets alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")

from edgeinfer.graph import ExpertsConfig, ModelConfig
from edgeinfer.registry import recipe_with
from tests.helpers.at_once import Asked, asked_for, compiler_of, each_alone, engine_of, together
from tests.helpers.offloaded import CONFIG, made
from tests.helpers.screened import write_screened_demo
from tests.helpers.sessions import HYBRID, TINY, WINDOWED, running, write_model
from tests.kernel_selection import everything


@dataclass
class Model:
    """A model of the test, how it runs, and the longest prompt that it is given."""

    write: Callable[[Path], Path]
    options: dict[str, Any] = field(default_factory=dict)
    longest: int = 2000


def random_model(config: ModelConfig, **options: Any) -> Model:
    """A model with random weights and a tokenizer that has all bytes."""
    return Model(lambda folder: write_model(folder, _long(config)), options)


def sparse_model(mode: str) -> Model:
    """A model with a ReLU whose neurons mostly rest, and a predictor of them."""
    return Model(lambda folder: made(folder / f"sparse-{mode}", _long(CONFIG)), {"recipe": recipe_with(sparse=mode)})


def _long(config: ModelConfig) -> ModelConfig:
    return replace(config, vocab_size=300, max_position_embeddings=4096)


MODELS = {
    "full attention": random_model(TINY),
    "windows": random_model(replace(WINDOWED, windows=(0, 96, 40))),
    "experts": random_model(replace(TINY, model_type="qwen3_moe", experts=ExpertsConfig(9, 3, 40))),
    "recurrent": random_model(HYBRID),
    "screened head": Model(write_screened_demo, {"recipe": recipe_with(head="screened")}, 380),
    "sparse": sparse_model("exact"),
    "predicted": sparse_model("predict"),
}


WHOLE, PARTS = (True, True, 2, True), ((False, False, 1, False), (True, False, 3, True), (False, True, 1, True))
"""Prefix cache, drafts, threads, and whether the pool is for few of the requests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


_paths: dict[tuple[Path, str], Path] = {}
_outcomes: dict[tuple[Path, str, int], list[Any]] = {}


def path_of(folder: Path, name: str) -> Path:
    """Return where a model is, which is written once."""
    key = folder, name
    if key not in _paths:
        _paths[key] = MODELS[name].write(folder)
    return _paths[key]


def alone(folder: Path, name: str, requests: list[Asked], ctx: int) -> list[Any]:
    """Return the result of each request from a model of its own size, one after the other."""
    key = folder, name, len(requests)
    if key not in _outcomes:
        options = {"ctx": ctx, "max_sequences": 2, "outputs": 8, **MODELS[name].options}
        with running(path_of(folder, name), **options) as runner:
            _outcomes[key] = each_alone(runner, requests, compiler_of(runner))
    return _outcomes[key]


def compare(folder: Path, name: str, n: int, longest: int, reuse: bool, speculate: bool, threads: int,
            pool: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """Compare requests that run together with the same alone; with a `pool` for few of them they are preempted."""
    model, ctx = MODELS[name], longest + 160
    requests = asked_for(n, 3, grammars=True, longest=longest)
    want = alone(folder, name, requests, ctx)
    options = {"ctx": ctx, "max_sequences": 32, "outputs": 40, "threads": threads, "draft_tokens": 3,
               "kv_tokens": pool, **model.options}
    with running(path_of(folder, name), **options) as runner, engine_of(runner) as engine, \
            caplog.at_level(logging.INFO, "edgeinfer"):
        have = together(engine, requests, reuse, speculate, grammars=compiler_of(runner))
        for one, found, right in zip(requests, have, want, strict=True):
            assert found == right, f"another outcome than alone: {one}"
        assert engine.passes < sum(one.config.max_tokens for one in requests), "they took turns"
        assert engine.preemptions or not pool, "the pool was not too small"
        said = [record.getMessage() for record in caplog.records if "was preempted at" in record.getMessage()]
        assert len(said) == engine.preemptions


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", MODELS)
def test_some_at_once(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In a pool for few of them, with prefix cache, drafts and two threads."""
    compare(folder, name, 28, 170, True, True, 2, 336, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_many_at_once(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With prompts of 1 to 2000 tokens, if the model can be given so many: all at a time, then one of its parts.

    EDGEINFER_TEST_ALL=1 takes two hundred requests in place of one hundred, and every part with every model.
    """
    longest, turn = MODELS[name].longest, list(MODELS).index(name) % len(PARTS)
    n, parts = (200, PARTS) if everything() else (100, PARTS[turn : turn + 1])
    for reuse, speculate, threads, crowded in (WHOLE, *parts):
        caplog.clear()
        compare(folder, name, n, longest, reuse, speculate, threads, longest + 160 if crowded else None, caplog)
