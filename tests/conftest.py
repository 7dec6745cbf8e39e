"""Helpers that every test may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Give the path of a file of the development data, which lies beside the checkout; skip the test without it."""

    def find(relative: str = "") -> Path:
        path = SHARED / relative
        if not path.exists():
            pytest.skip(f"development data not present: {relative or 'shared/data'}")
        return path

    return find


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of our variables but the cache, whatever the shell of the developer has."""
    for name in [name for name in os.environ if name.startswith("EDGEINFER_") and name != "EDGEINFER_CACHE"]:
        monkeypatch.delenv(name)
