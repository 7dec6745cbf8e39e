"""Regions locked by `--mlock`: every one that holds weights, wherever they are read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.converters import write_random_bundle
from edgeinfer.runtime.weights import loading
from tests.helpers.offloaded import made, offloaded
from tests.models.test_expert_slots import MOE, kept


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that was locked."""
    found: list[int] = []
    monkeypatch.setattr(loading, "lock", lambda memory: found.append(memory.nbytes))
    return found


def test_slots_of_neurons_are_locked(tmp_path: Path, locked: list[int]) -> None:
    path = made(tmp_path / "m")
    with offloaded(path):
        assert not locked
    with offloaded(path, mlock=True) as opened:
        assert locked == [opened.plan.region(name).nbytes for name in ("resident", "cold")]


def test_slots_of_experts_are_locked(tmp_path: Path, locked: list[int]) -> None:
    write_random_bundle(MOE, tmp_path / "m")
    with kept(tmp_path / "m", 12, mlock=True) as opened:
        assert locked == [opened.plan.region(name).nbytes for name in ("resident", "experts")]
