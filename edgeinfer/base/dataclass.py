"""A `dataclass` decorator that costs a tenth of the standard library's: a class is finished at its first use.

The standard library compiles six methods of each class with `exec` while the class is defined, and 86 classes took a
fifth of the time from the start of `edgeinfer run demo` to its first text. Here the methods that are the same for all
classes are written once, the fields are read when they are first asked for, and a constructor is compiled when its
class is first instantiated. The standard library's `fields`, `replace` and `asdict` work as usual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, *, frozen: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
        """Give a class what the standard library's decorator of the same options would."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq, kw_only=kw_only)
        own = dict(cls.__dict__)
        with _finding:
            if any(base.frozen is not frozen for base in _options_of_bases(cls)):
                raise TypeError("of a dataclass and its bases all are frozen or none is")
            cls.__dataclass_params__ = _Options(frozen)
        cls.__dataclass_fields__ = _Later(cls, "__dataclass_fields__", lambda: _find_fields(cls, frozen, kw_only))
        cls.__match_args__ = _Later(cls, "__match_args__", lambda: _match_args(cls))
        if any(isinstance(value, dataclasses.Field) for value in own.values()):
            dataclasses.fields(cls)  # which puts defaults in the place of these
        methods = {"__init__": _Later(cls, "__init__", lambda: _compiled(cls, frozen)), "__repr__": _repr}
        if eq:
            methods["__eq__"] = _Later(cls, "__eq__", lambda: _equality(_key(cls)))
            methods["__hash__"] = _Later(cls, "__hash__", lambda: _hashing(_key(cls))) if frozen else None
        if frozen:
            methods |= _freezing(cls)
        for name, method in methods.items():
            if name not in own or (name == "__hash__" and own[name] is None and "__eq__" in own):
                setattr(cls, name, method)
        return cls


__all__ = ["dataclass"]

_finding = RLock()


class _Options(NamedTuple):
    """Options that the standard library asks of a base whose fields are not found yet."""

    frozen: bool


class _Later:
    """Stand in for an attribute of a class until it is first looked up."""

    def __init__(self, cls: Any, name: str, make: Callable[[], Any]):
        self._cls, self._name, self._make = cls, name, make

    def __get__(self, instance: Any, owner: type) -> Any:
        made = self._make()
        setattr(self._cls, self._name, made)
        return made.__get__(instance, owner) if hasattr(made, "__get__") else made


def _options_of_bases(cls: type) -> list[Any]:
    return [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if "__dataclass_params__" in vars(base)]


def _find_fields(cls: Any, frozen: bool, kw_only: bool) -> dict[str, Any]:
    """Let the standard library find the fields; frozen classes are none to it meanwhile, or it compiles methods."""
    for base in cls.__mro__[1:]:
        getattr(base, "__dataclass_fields__", None)
    with _finding:
        bases = _options_of_bases(cls)
        try:
            for base in bases:
                base.frozen = False
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, match_args=False, kw_only=kw_only)(cls)
        finally:
            for base in bases:
                base.frozen = frozen
        cls.__dataclass_params__.frozen = frozen
        return vars(cls)["__dataclass_fields__"]


def _match_args(cls: Any) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(cls) if one.init and not one.kw_only)


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
    exec(f"def __init__({', '.join(parameters[False] + named)}):\n " + "\n ".join(body or ["pass"]), scope)
    made = scope["__init__"]
    made.__module__, made.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    made.__annotations__ = {one.name: one.type for one in dataclasses.fields(cls)} | {"return": None}
    return made


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _key(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Return what makes a tuple of the fields that are compared."""
    names = [one.name for one in dataclasses.fields(cls) if one.compare]
    return attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)


def _equality(key: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], Any]:
    def __eq__(self: Any, other: object) -> Any:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hashing(key: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(key(self))

    return __hash__


def _freezing(cls: Any) -> dict[str, Any]:
    """Return the methods that refuse to change a field or any attribute of the class itself."""
    def __setattr__(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}
