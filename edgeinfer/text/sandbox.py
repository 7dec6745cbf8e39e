"""Jinja's sandbox for chat templates, with bounded work. Imports jinja2, so it is imported on the first render.

Jinja's immutable sandbox keeps templates away from Python's internals and from changing their input, but it bounds
``range`` alone. Here a template meets the types, methods, filters, tests and functions of a list and nothing else (see
`growth`), and everything that it does is charged to a budget:

* bytes of all values that it makes, living or not: `MADE_BYTES`, and `MADE_SHARE` for each character of its input;
* steps (turns of loops, calls, filters, comparisons, slices): `MAX_STEPS`; loops are counted when they start;
* integers: `MAX_BITS` bits; keys with the same hash: `MAX_COLLISIONS`; nesting: `growth.MAX_LEVELS` levels; the
  template itself: `MAX_TOKENS`;
* wall time: `MAX_SECONDS`, looked at before each step, as is the wish to end it.

The size of an operation's result is estimated before it runs and charged afterwards. As no value is larger than the
budget, no single step takes long. A child process with limits of the system would cost more and hold less: a second
interpreter with jinja2 takes 21 MB beside the memory plan and 150 to 165 ms to start (two x86 cores), a fork of a
process with threads may stop for ever in the child, and neither macOS nor Windows has a limit of memory that a process
sets.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from jinja2 import Template, TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.ext import loopcontrols
from jinja2.filters import do_mark_safe
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from ..errors import CancelledError, TokenizerError
from .growth import FILTERS, METHODS, TESTS, estimate_filter, estimate_format, estimate_method, text_size
from .sandbox_functions import (
    BoundedNamespace,
    RefusedError,
    WorkLimitError,
    bounded_dict,
    check_hashes,
    raise_exception,
    round_number,
    strftime_now,
    to_json,
)
from .sandbox_nodes import CountWork, GenerationTag

MAX_STEPS = 1_000_000
MADE_BYTES, MADE_SHARE = 8 << 20, 64
MAX_BITS = 4096
MAX_SECONDS = 10.0
MAX_TOKENS = 20_000
MAX_LITERAL, MAX_DIGITS = 65_536, 1233
"""Longest quoted text, and most digits of a number: as many as `MAX_BITS` have."""
_LONG_NUMBER = re.compile(rf"[0-9][0-9a-fA-FoxX_]{{{MAX_DIGITS}}}")

_LOOP_NAMES = frozenset(
    "index index0 revindex revindex0 first last length depth depth0 previtem nextitem cycle changed".split())


MARKED: type = type(do_mark_safe(""))
"""Type of the result of `safe`: text added to it is escaped for web pages, as in transformers."""
_ESCAPED = 6
"""Most characters that one becomes when escaped for web pages, with a margin."""


def _methods(owner: Any) -> frozenset[str]:
    """Return the methods that a template may call; text that is marked as safe has those of text."""
    return METHODS.get(str if type(owner) is MARKED else type(owner), frozenset())


def _escaping(*values: Any) -> int:
    """Return how many times as long a result may be because one of the values escapes the others."""
    return _ESCAPED if any(isinstance(value, MARKED) for value in values) else 1


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template; not safe to render from two threads at once."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self._finalize,
            optimized=False,  # folding constants would do work before anything is counted
            cache_size=0,
        )
        self.start({}, None)
        own: dict[str, Callable[..., Any]] = {"tojson": to_json, "round": round_number}
        self.filters = {name: self._guarded(name, own.get(name, self.filters[name])) for name in FILTERS}
        for work in (self._count_loop, self._made, self._concat, self._step):
            self.filters[work.__name__] = work
        self.tests = {name: self.tests[name] for name in TESTS}
        self._functions = (raise_exception, strftime_now, self.globals["range"], bounded_dict, BoundedNamespace)
        names = ("raise_exception", "strftime_now", "range", "dict", "namespace")
        self.globals = dict(zip(names, self._functions, strict=True))

    def start(self, variables: dict[str, Any], stopped: Callable[[], bool] | None) -> None:
        """Begin a run: all counters at zero."""
        self._steps = self._made_bytes = 0
        self._most_bytes = MADE_BYTES + MADE_SHARE * text_size(variables)
        self._stopped = stopped
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int = 1, nbytes: int = 0, kept: bool = False) -> None:
        """Charge work before it is done; raises `WorkLimitError` above a limit. Only `kept` work stays charged."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise WorkLimitError(f"it takes more than {MAX_STEPS} steps")
        if self._made_bytes + nbytes > self._most_bytes:
            raise WorkLimitError(f"it makes more than {self._most_bytes} bytes of text and lists")
        self._made_bytes += nbytes if kept else 0
        if time.monotonic() > self._deadline:
            raise WorkLimitError(f"it takes longer than {MAX_SECONDS:g} seconds")
        if self._stopped and self._stopped():
            raise CancelledError("The request was cancelled while its chat template was rendered.")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if _LONG_NUMBER.search(source):  # the lexer itself would take 280 MB for a megabyte of digits
            raise TemplateSyntaxError(f"it has a number of more than {MAX_DIGITS} digits", 1)
        if source.count("\\") > MAX_TOKENS:
            raise TemplateSyntaxError(f"it has more than {MAX_TOKENS} backslashes", 1)
        for number, (line, kind, text) in enumerate(self.lex(source)):
            if number > MAX_TOKENS:
                raise TemplateSyntaxError(f"it has more than {MAX_TOKENS} words and signs", 1)
            if kind == "string" and len(text) > MAX_LITERAL:
                raise TemplateSyntaxError(f"it has a text in quotes of more than {MAX_LITERAL} characters", line)
        return CountWork().visit(super()._parse(source, name, filename))

    @staticmethod
    @pass_context
    def _finalize(context: Any, value: Any) -> Any:
        environment = context.environment
        if not isinstance(value, str):
            environment.spend(0, 48 * text_size(value))
            value = str(value)
        return environment._made(value)

    def _count_loop(self, value: Any) -> Iterable[Any]:
        if hasattr(value, "__len__"):
            self.spend(1 + len(value))
            return value
        return self._counted(value)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend()
            yield value

    def _concat(self, parts: list[Any]) -> Any:
        self.spend(1, 4 * sum(len(part) if isinstance(part, str) else 12 * text_size(part) for part in parts))
        return self._made("".join(map(str, parts)))

    def _step(self, value: Any) -> Any:
        self.spend()
        return value

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter with its growth estimated before and its result counted after."""
        passed = getattr(function, "jinja_pass_arg", None)
        n_passed = 0 if passed is None else 1

        def guarded(*args: Any, **options: Any) -> Any:
            values = [self._counted_list(value) for value in args[n_passed:]]
            made = estimate_filter(name, values[0], [*values[1:], *options.values()])
            self.spend(1, _escaping(values[0], *values[1:], *options.values()) * made)
            if name == "unique" and isinstance(values[0], (list, tuple)):
                check_hashes(values[0])
            return self._made(function(*args[:n_passed], *values, **options))

        if passed is not None:
            guarded.jinja_pass_arg = passed  # type: ignore[attr-defined]
        return guarded

    def _counted_list(self, value: Any) -> Any:
        """Return iterators (of `map`, `select`, ...) as counted lists, everything else as it is."""
        return self._made(list(self._counted(value))) if isinstance(value, Iterator) else value

    def _made(self, value: Any) -> Any:
        """Charge a value that was made; one with shared parts counts as long as it would be written."""
        if isinstance(value, str):
            self.spend(1, sys.getsizeof(value), kept=True)
        elif isinstance(value, (list, tuple, dict)):
            self.spend(1, sys.getsizeof(value), kept=True)
            self.spend(0, text_size(value))
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise WorkLimitError(f"it computes a number of more than {MAX_BITS} bits")
        return value

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        """Call a function or method of the template, counted."""
        args = tuple(map(self._counted_list, args))
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if name in _methods(owner):
            named = [value for key, value in options.items() if not key.startswith("_")]  # Jinja's own: _loop_vars
            self.spend(1, _escaping(owner) * estimate_method(owner, name, [*args, *named]))
        elif isinstance(function, LoopContext):  # a recursive loop descends
            args = tuple(map(self._count_loop, args))
        elif not (isinstance(function, (Macro, Undefined)) or isinstance(owner, LoopContext)
                  or function in self._functions):
            raise SecurityError(f"a call of {type(function).__name__} {name or 'object'!r}")
        return self._made(super().call(context, function, *args, **options))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may see an attribute: methods of the list, a loop's own, a namespace's values."""
        if isinstance(obj, BoundedNamespace):
            return not attr.startswith("_")
        return attr in (_LOOP_NAMES if isinstance(obj, LoopContext) else _methods(obj))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return None: fields of ``str.format`` are names alone here (see `growth`), and ``format_map`` is refused."""
        return None

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; Jinja would let the access pass until its value is used."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an arithmetic operator, refusing results that would be too large."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if numbers:
            self._check_numbers(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            args = right if isinstance(right, tuple) else (right,)
            self.spend(1, _escaping(left) * 4 * estimate_format(left, args))
        elif operator == "*":
            times, other = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(other, (str, list, tuple)):
                self.spend(1, max(times, 0) * max(sys.getsizeof(other), text_size(other)))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self.spend(1, _escaping(left, right) * (sys.getsizeof(left) + sys.getsizeof(right)))
        elif not any(isinstance(side, Undefined) for side in (left, right)):
            raise TypeError(f"unsupported operand types for {operator}: {type(left).__name__}, {type(right).__name__}")
        return self._made(super().call_binop(context, operator, left, right))

    def _check_numbers(self, operator: str, left: float, right: float) -> None:
        self.spend()
        if not (isinstance(left, int) and isinstance(right, int)):
            return
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > (2 if operator in ("*", "**") else 4) * MAX_BITS // 2:
            raise WorkLimitError(f"it computes a number of more than {MAX_BITS} bits")


def compile_template(text: str, source: str) -> Template:
    """Compile a template in an environment of its own; raises `TokenizerError` for wrong syntax."""
    try:
        return BoundedEnvironment().from_string(text)
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"{source}: the chat template is damaged (line {error.lineno}: {error.message})."
        ) from error
    except Exception as error:  # RecursionError, or whatever Python's compiler makes of the generated code
        raise TokenizerError(f"{source}: the chat template cannot be compiled ({_reason(error)}).") from error


def render(
    template: Template, variables: dict[str, Any], source: str, stopped: Callable[[], bool] | None = None
) -> str:
    """Render a compiled template; everything it can raise becomes a `TokenizerError` of one sentence."""
    environment = cast(BoundedEnvironment, template.environment)
    environment.start(variables, stopped)
    try:
        text = template.render(variables)
    except CancelledError:
        raise
    except RefusedError as error:
        raise TokenizerError(f"The chat template refuses these messages: {_reason(error)}.") from error
    except WorkLimitError as error:
        raise TokenizerError(f"{source}: the chat template was stopped because {_reason(error)}.") from error
    except SecurityError as error:
        raise TokenizerError(f"{source}: the chat template tries something unsafe ({_reason(error)}).") from error
    except Exception as error:  # a template is a program: any exception of Python may come out of it
        raise TokenizerError(f"{source}: the chat template failed ({_reason(error)}).") from error
    return str(text)


def _reason(error: BaseException) -> str:
    """Return the error's first line, without a full stop at its end and of bounded length."""
    text = re.split(r"[\r\n]", str(error).strip())[0] or type(error).__name__
    return text[:300].rstrip(".")
