"""Packages that load a public name only when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package (PEP 562): `homes` has the public names of each module, in one text.

    A name that is its module's own stands for the module.
    """
    buffer_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in buffer_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f".{buffer_of[name]}", package)
        return module if name == buffer_of[name] else getattr(module, name)

    return load
