"""The rules of the unit tier: a test starts no process, wants no kernel, and takes less than a second.

The last one is looked at with `--all` alone, since no test of README's tier asserts a time.
"""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from edgeinfer.kernels.toolchain import provide
from tests import tiers


@pytest.fixture(autouse=True)
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse processes and kernels, whose tests belong in another folder."""

    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("a unit test starts no process and wants no kernel: move it out of tests/unit", pytrace=False)

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(provide, "find_set", refuse)
    collecting = [0.0]

    def collected(phase: str, _: dict[str, int]) -> None:
        collecting[0] += time.process_time() * (1 if phase == "stop" else -1)

    gc.callbacks.append(collected)  # a collection looks at all that other tests have imported and kept
    began = time.process_time()
    yield
    seconds = time.process_time() - began - collecting[0]
    gc.callbacks.remove(collected)
    if said := tiers.too_long(request.node, seconds):
        pytest.fail(said, pytrace=False)
