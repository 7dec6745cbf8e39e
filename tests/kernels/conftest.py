"""Fixtures of tests on how kernels are compiled and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.kernels.toolchain import build, objects, provide
from tests.helpers.kernel_builds import FEW, Builds, few_objects


@pytest.fixture(scope="session")
def real_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of the user's own set, built now where they are not there."""
    return few_objects(tmp_path_factory.mktemp("set"))


@pytest.fixture
def builds(real_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    """A new cache and package, few kernels, and compiling processes that only copy."""
    stand_in = Builds(real_set)
    monkeypatch.setattr(objects.KernelSet, "names", list(FEW))
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "package_directory", lambda: tmp_path / "package")
    monkeypatch.setattr(provide, "_unkept", {})
    monkeypatch.setattr(build, "_start", stand_in.start)
    return stand_in
