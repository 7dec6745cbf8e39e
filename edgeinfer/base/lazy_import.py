"""Packages that load a public name only when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package (PEP 562): `homes` has the public names of each module, in one text.

    A name that is its module's own stands for the module.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    loaded: dict[str, ModuleType] = {}  # every request imports names, and `import_module` takes 10 us

    def load(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        if home not in loaded:
            loaded[home] = import_module(f".{home}", package)
        return loaded[home] if name == home else getattr(loaded[home], name)

    return load
