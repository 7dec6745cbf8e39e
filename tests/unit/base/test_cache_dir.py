"""The user's directories."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from edgeinfer.base.cache_dir import user_directory


@pytest.mark.parametrize("given", [None, "", "/somewhere/else"])
def test_directories_are_those_of_platformdirs(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    for kind in ("CACHE", "CONFIG"):
        monkeypatch.delenv(f"XDG_{kind}_HOME", raising=False)
        if given is not None:
            monkeypatch.setenv(f"XDG_{kind}_HOME", given)
    assert user_directory("cache") == Path(platformdirs.user_cache_dir("edgeinfer"))
    assert user_directory("config") == Path(platformdirs.user_config_dir("edgeinfer"))
