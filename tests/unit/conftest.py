"""The rules of the unit tier: a test starts no process, wants no kernel, and takes less than a second.

The last one is looked at with `--all` alone, since no test of README's tier asserts a time.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from edgeinfer.kernels.toolchain import provide
from tests import tiers


@pytest.fixture(autouse=True)
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse what belongs into another folder of tests."""

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("a unit test starts no process and wants no kernel: move it out of tests/unit", pytrace=False)

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(provide, "find_set", refuse)
    began = time.process_time()
    yield
    if said := tiers.too_long(request.node, time.process_time() - began):
        pytest.fail(said, pytrace=False)
