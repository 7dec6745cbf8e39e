"""Crowds of random requests on a prefix cache: the logits of each text alone, and no block that is lost."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgeinfer.memory_planner import BlockPool
from edgeinfer.models import demo_path
from edgeinfer.runner.prefix_cache import PrefixCache
from tests.helpers.crowd import BLOCKS, POOL, Crowd, branching, logits_alone
from tests.helpers.sessions import TINY, session, write_model
from tests.kernel_selection import everything
from tests.models.test_windows import MODEL as WINDOWED

TEXTS = branching(24)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def expected(path: Path, kv: str) -> list[np.ndarray]:
    """Logits of all texts."""
    return logits_alone(path, TEXTS, kv=kv)


def crowd(path: Path, requests: int, seed: int = 0, **options: Any) -> dict[str, int]:
    """Run a crowd of requests with some KV type or model; return its events."""
    with session(path, **{**POOL, **options}) as opened:
        assert opened.n_blocks == BLOCKS
        one = Crowd(opened, TEXTS, expected(path, opened.config.kv), seed)
        counts = one.run(requests)
        one.nothing_is_lost()
    happened = "forks", "cuts", "cancelled", "forgotten", "waited", "full", "recounted"
    assert all(counts[name] for name in happened), counts
    assert counts["hit"] > counts["asked"] / 10, counts
    return counts


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_every_request_of_a_crowd_has_the_logits_of_its_text_alone(models: Path, kv: str) -> None:
    crowd(write_model(models), 60, kv=kv)


def test_crowds_of_models_with_windows(models: Path) -> None:
    crowd(write_model(models, WINDOWED), 60)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "requests"), [("tiny", 10_000), ("windows", 3000), ("demo", 2000)])
def test_crowds_of_thousands(models: Path, name: str, requests: int) -> None:
    """All of them take minutes of processor time, so a tenth is enough where not EDGEINFER_TEST_ALL=1 asks for all."""
    path = {"demo": demo_path, "tiny": lambda: write_model(models), "windows": lambda: write_model(models, WINDOWED)}
    crowd(path[name](), requests if everything() else requests // 10, seed=1)


def recount(pool: PrefixCache, tables: Any) -> None:
    """Count holders from block tables alone, as if the cache held nothing."""
    BlockPool.recount(pool, tables)


def is_shared(pool: PrefixCache, block: int) -> bool:
    """Say whether another sequence holds a block, as if the cache did not."""
    return pool._holders[block] - (block in pool._keys) > 1


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("fault", [recount, is_shared])
@pytest.mark.parametrize("model", [TINY, WINDOWED], ids=["tiny", "windows"])
def test_a_crowd_notices_blocks_that_are_overwritten(models: Path, fault: Any, model: Any) -> None:
    """By their logits alone, which the cache's own books do not help to find."""
    def check_books(crowd: Crowd) -> None: ...

    with mock.patch.object(PrefixCache, fault.__name__, fault), mock.patch.object(Crowd, "check_books", check_books), \
            pytest.raises(AssertionError, match="other logits than alone"):
        crowd(write_model(models, model), 2000)
