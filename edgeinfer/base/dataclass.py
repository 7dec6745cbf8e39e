"""A `dataclass` decorator that costs a tenth of the standard library's: constructors are compiled at their first use.

The standard library compiles six methods of each class with `exec` while the class is defined, and 86 classes took a
fifth of the time from the start of `edgeinfer run demo` to its first text. Here the methods that are the same for all
classes are written once, and a constructor is compiled when its class is first instantiated. The standard library's
`fields`, `replace` and `asdict` work as usual.
"""

from __future__ import annotations

import dataclasses
import sys
from _thread import allocate_lock
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, *, frozen: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
        """Give a class the same methods as the standard library's decorator of the same options."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq, kw_only=kw_only)
        own = dict(cls.__dict__)
        cls = _with_fields(cls, frozen, kw_only)
        methods = {"__init__": _Constructor(cls, frozen), "__repr__": _repr}
        if eq:
            methods |= _comparing(cls, frozen)
        if frozen:
            methods |= _freezing(cls)
        for name, method in methods.items():
            if name not in own or (name == "__hash__" and own[name] is None and "__eq__" in own):
                setattr(cls, name, method)
        return cls


__all__ = ["dataclass"]


_defining = allocate_lock()


def _with_fields(cls: Any, frozen: bool, kw_only: bool) -> Any:
    """Let the standard library find the fields; frozen classes are none to it meanwhile, or it compiles methods."""
    with _defining:
        bases = [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if "__dataclass_params__" in vars(base)]
        if any(base.frozen is not frozen for base in bases):
            raise TypeError("of a dataclass and its bases all are frozen or none is")
        try:
            for base in bases:
                base.frozen = False
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        finally:
            for base in bases:
                base.frozen = frozen
        cls.__dataclass_params__.frozen = frozen
    if any(not one.init or "InitVar" in str(one.type) for one in cls.__dataclass_fields__.values()):
        raise TypeError("init=False and InitVar need the standard library's dataclass")
    return cls


class _Constructor:
    """Stand in for ``__init__`` until it is first looked up."""

    def __init__(self, cls: type, frozen: bool):
        self._cls, self._frozen = cls, frozen

    def __get__(self, instance: Any, owner: type) -> Any:
        cls: Any = self._cls
        cls.__init__ = _compiled(cls, self._frozen)
        return cls.__init__.__get__(instance, owner)


def _compiled(cls: Any, frozen: bool) -> Any:
    """``__init__`` of a class, with its fields as parameters."""
    scope: dict[str, Any] = {"set_field": object.__setattr__, "absent": dataclasses.MISSING}
    parameters: dict[bool, list[str]] = {False: ["self"], True: []}
    body = []
    for one in dataclasses.fields(cls):
        name = value = one.name
        default = ""
        if one.default is not dataclasses.MISSING:
            scope[f"default_{name}"], default = one.default, f"=default_{name}"
        elif one.default_factory is not dataclasses.MISSING:
            scope[f"make_{name}"], default = one.default_factory, "=absent"
            value = f"make_{name}() if {name} is absent else {name}"
        parameters[bool(one.kw_only)].append(name + default)
        body.append(f"set_field(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    named = ["*", *parameters[True]] if parameters[True] else []
    lines = [f"def __init__({', '.join(parameters[False] + named)}):", *body, "pass"]
    names = getattr(sys.modules.get(cls.__module__), "__dict__", {})  # where `typing.get_type_hints` looks
    made: Any = {}
    exec(f"def make({', '.join(scope)}):\n " + "\n  ".join(lines) + "\n return __init__", names, made)
    made = made["make"](**scope)
    made.__module__, made.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    made.__annotations__ = {one.name: one.type for one in dataclasses.fields(cls)} | {"return": None}
    return made


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _comparing(cls: Any, frozen: bool) -> dict[str, Any]:
    """``__eq__`` by the fields, and ``__hash__`` where these stay."""
    names = [one.name for one in dataclasses.fields(cls) if one.compare]
    key: Callable[[Any], tuple[Any, ...]]
    key = attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)

    def __eq__(self: Any, other: object) -> Any:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(key(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _freezing(cls: Any) -> dict[str, Any]:
    """Return the methods that refuse to change a field or any attribute of the class itself."""
    names = {one.name for one in dataclasses.fields(cls)}

    def __setattr__(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}
