"""The user's directories."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

from edgeinfer.base.cache_dir import user_directory
from edgeinfer.errors import DestinationError


@pytest.mark.parametrize("given", [None, "", "/somewhere/else", "relative", "~/cache"])
@pytest.mark.parametrize("home", [None, "", "/home/somebody", "/", "relative"])
def test_directories_are_those_of_platformdirs(monkeypatch: pytest.MonkeyPatch, given: str | None, home: str | None
                                               ) -> None:
    for variable, value in [("XDG_CACHE_HOME", given), ("XDG_CONFIG_HOME", given), ("HOME", home)]:
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert user_directory("cache") == Path(platformdirs.user_cache_dir("edgeinfer"))
    assert user_directory("config") == Path(platformdirs.user_config_dir("edgeinfer"))


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory named ~ is not made where the process happens to be."""
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(DestinationError, match=r"^The home directory .* is unknown; set HOME to a directory\.$"):
        user_directory("cache")
