"""Our dataclasses beside the standard library's: the same values, refusals and signatures, compiled later."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from edgeinfer.base import dataclass as ours

ROOT = Path(__file__).resolve().parents[2]


def classes(dataclass: Callable[..., Any]) -> list[Any]:
    """Classes of each kind that the program has."""

    @dataclass(frozen=True)
    class Point:
        """Frozen, with a default and a made default."""

        x: int
        y: float = 2.5
        names: list[str] = field(default_factory=list, compare=False)
        hidden: str = field(default="h", repr=False)

    @dataclass(frozen=True)
    class Further(Point):
        """With fields of a base."""

        z: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            object.__setattr__(self, "z", (*self.z, self.x))

    @dataclass(frozen=True, kw_only=True)
    class Named(Point):
        """Its own fields by name alone."""

        w: int

    @dataclass
    class Open:
        """Its fields may change."""

        a: int = 1

        def __repr__(self) -> str:
            return "mine"

    @dataclass(frozen=True, eq=False)
    class Itself:
        """Equal to itself alone."""

        a: Any

    @dataclass(frozen=True)
    class Own:
        """Compares in its own way."""

        a: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own)

    @dataclass(frozen=True)
    class Empty:
        """Without fields."""

    return [Point, Further, Named, Open, Itself, Own, Empty]


def outcome(act: Callable[[], Any]) -> Any:
    """Return the result: a value, or the type of an error and, of a refusal to change, its words."""
    try:
        return act()
    except Exception as error:
        return type(error), str(error) if isinstance(error, FrozenInstanceError) else ""


def changed(value: Any, name: str) -> Any:
    """Set an attribute and read it."""
    setattr(value, name, 7)
    return getattr(value, name)


ACTS: tuple[Callable[[list[Any]], Any], ...] = (
    lambda k: [repr(k[0](1)), repr(k[1](1, 2.0, ["n"], "g", (3,))), repr(k[2](1, w=4)), repr(k[3]()), repr(k[6]())],
    lambda k: [k[0](1) == k[0](1, names=["other"]), k[0](1) == k[0](2), k[0](1) == k[1](1), k[0](1) == 1],
    lambda k: [hash(k[0](1)), hash(k[1](1, z=(2,))), hash(k[6]()), k[3].__hash__],
    lambda k: [k[4](1) == k[4](1), k[5](1) == k[5](2), hash(k[5](1)), k[3](1) == k[3](1), k[6]() == k[6]()],
    *((lambda k, i=i: k[i]()) for i in (0, 1, 2, 4)),
    lambda k: k[0](1, q=2), lambda k: k[0](1, 2, 3, 4, 5), lambda k: k[2](1, 2.0, [], "h", 5),
    lambda k: changed(k[0](1), "x"), lambda k: changed(k[0](1), "new"), lambda k: changed(k[3](), "a"),
    lambda k: delattr(k[0](1), "x"), lambda k: changed(k[1](1), "y"),
    lambda k: changed(type("Sub", (k[0],), {})(1), "new"), lambda k: changed(type("Sub", (k[0],), {})(1), "x"),
    lambda k: [dataclasses.asdict(k[1](1)), repr(dataclasses.replace(k[1](1), y=9.0))],
    lambda k: dataclasses.astuple(k[2](1, w=2)),
    lambda k: [str(inspect.signature(each)).replace("<factory>", "absent") for each in k[3:]],
    lambda k: [list(inspect.signature(each).parameters) for each in k],
    lambda k: [[one.name for one in dataclasses.fields(each)] for each in k],
    lambda k: [each.__match_args__ for each in k],
    lambda k: [sorted(get_type_hints(each.__init__)) for each in k],
    lambda k: repr(copy.deepcopy(k[1](1))),
    lambda k: k[0](1).names is k[0](1).names,
)


@pytest.mark.parametrize("act", ACTS)
def test_as_the_standard_librarys(act: Callable[[list[Any]], Any]) -> None:
    mine, theirs = (outcome(lambda kind=kind: act(classes(kind))) for kind in (ours.dataclass, dataclasses.dataclass))
    assert mine == theirs


def test_the_standard_librarys_may_have_ours_as_a_base() -> None:
    """Kernels from outside bring operations of their own."""

    def derived(base: Any) -> Any:
        @dataclasses.dataclass(frozen=True)
        class Derived(base):
            """Of somebody else."""

            v: int = 3

        return [repr(Derived(1)), outcome(lambda: changed(Derived(1), "x")), Derived(1) == Derived(1)]

    assert derived(classes(ours.dataclass)[0]) == derived(classes(dataclasses.dataclass)[0])
    with pytest.raises(TypeError, match="all are frozen or none is"):
        ours.dataclass(type("Loose", (classes(ours.dataclass)[0],), {}))


def test_constructors_of_other_parameters_than_the_fields_are_refused() -> None:
    for base, names in [({"a": field(init=False)}, {"a": int}), ({}, {"a": dataclasses.InitVar[int]})]:
        with pytest.raises(TypeError, match=r"^init=False and InitVar need the standard library's dataclass$"):
            ours.dataclass(type("Odd", (), {**base, "__annotations__": names}))


def test_request_types_survive_pickle() -> None:
    from edgeinfer.config import GenerationConfig

    config = GenerationConfig(top_k=3, logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_class_is_compiled_when_it_is_used() -> None:
    script = """
import sys
from edgeinfer.base.dataclass import dataclass
texts = []
sys.addaudithook(lambda event, given: texts.append(given[0]) if event == "compile" else None)
@dataclass(frozen=True)
class Point:
    "A point."
    x: int
    y: int = 2
defined = len(texts)
Point(1), Point(2), hash(Point(1)), repr(Point(1)), Point(1) == Point(2)
print(defined, len(texts))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0 1\n", done.stderr
