"""The rules of the unit tier: a test starts no process, wants no kernel, and takes less than a second."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from edgeinfer.kernels.toolchain import provide

MOST_SECONDS = 1.0
"""Seconds of this process that a test may take; time that other processes take from it does not count."""


@pytest.fixture(autouse=True)
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse what belongs into another folder of tests."""

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("a unit test starts no process and wants no kernel: move it out of tests/unit", pytrace=False)

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(provide, "find_set", refuse)
    began = time.process_time()
    yield
    seconds = time.process_time() - began
    exempt = any(request.node.get_closest_marker(mark) for mark in ("slow", "reference"))
    if seconds > MOST_SECONDS and not exempt:
        pytest.fail(f"a unit test took {seconds:.1f} s of at most {MOST_SECONDS:g}", pytrace=False)
