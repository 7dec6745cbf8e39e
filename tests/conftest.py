"""Helpers that every test may use."""

from __future__ import annotations

import os
import time
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


TRIES, PAUSE_S = 4, 3.0
"""Chances of a test that is marked `timing`, and what lies between them."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of times again where it fails: neighbours on the same machine disturb some of its runs, not all."""
    if pyfuncitem.get_closest_marker("timing") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for left in reversed(range(TRIES)):
        try:
            pyfuncitem.obj(**arguments)
            break
        except AssertionError:
            if not left:
                raise
            time.sleep(PAUSE_S)
    return True
