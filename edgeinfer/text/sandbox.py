"""Jinja's sandbox for chat templates, with bounded work. Imports jinja2, so it is imported on the first render.

Jinja's immutable sandbox keeps templates away from Python's internals and from changing their input. It bounds
``range`` alone, so this module adds limits on everything that can loop or grow:

* steps (turns of loops, calls, filters): `MAX_STEPS`; loops are counted by their length when they start;
* any one string, list, and the result: `MAX_LENGTH` characters or items;
* characters copied into new strings in the whole run: `MAX_COPIED`;
* integers: `MAX_BITS` bits;
* wall time: `MAX_SECONDS`, looked at before each step.

What a single operation makes is estimated before it runs (repetition, joining, padding, formatting, replacing).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import TokenizerError
from .growth import estimate_call, estimate_filter, estimate_format, text_size

MAX_STEPS = 1_000_000
MAX_LENGTH = 1 << 24
MAX_COPIED = 1 << 28
MAX_BITS = 4096
MAX_SECONDS = 10.0

_FILTERS_LEFT_OUT = ("random", "urlize", "xmlattr", "pprint")
"""One would make the text differ from run to run; the others are for web pages and debugging."""


class WorkLimitError(TemplateError):
    """A template did more work than it may."""


class RefusedError(TemplateError):
    """A template called ``raise_exception``."""


class _Namespace(Namespace):
    """Jinja's namespace without underscored names, which could be taken for Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _check_name(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # printing the values could take for ever where they share parts


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _CountWork(NodeTransformer):
    """Route loops, ``~`` and literal text through counting filters, which templates cannot redefine."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_count_loop", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_concat", [], [], None, None, lineno=node.lineno)

    def _visit_container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the targets of an assignment
            return node
        return nodes.Filter(node, "_check", [], [], None, None, lineno=node.lineno)

    visit_List = visit_Tuple = visit_Dict = _visit_container

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # a constant passes through `finalize` as expressions do


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template; not safe to render from two threads at once."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize,
            optimized=False,  # folding constants would do work before anything is counted
            cache_size=0,
        )
        self.start()
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters["_count_loop"] = pass_context(lambda _context, value: self._count_loop(value))
        self.filters["_check"] = pass_context(lambda _context, value: self._check_result(value))
        self.filters["_concat"] = pass_context(lambda _context, parts: self._concat(parts))
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(str(pattern)[:256])

    def start(self) -> None:
        """Begin a run: all counters at zero."""
        self._steps = 0
        self._copied = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int = 1, characters: int = 0) -> None:
        """Count work before it is done; raises `WorkLimitError` above a limit."""
        self._steps += steps
        self._copied += characters
        if self._steps > MAX_STEPS:
            raise WorkLimitError(f"it takes more than {MAX_STEPS} steps")
        if characters > MAX_LENGTH or self._copied > MAX_COPIED:
            raise WorkLimitError(f"it builds text or lists longer than {MAX_LENGTH}, or {MAX_COPIED} in all")
        if time.monotonic() > self._deadline:
            raise WorkLimitError(f"it takes longer than {MAX_SECONDS:g} seconds")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _CountWork().visit(super()._parse(source, name, filename))

    @staticmethod
    @pass_context
    def _finalize(context: Any, value: Any) -> Any:
        context.environment.spend(0, text_size(value))
        return value if isinstance(value, str) else str(value)

    def _count_loop(self, value: Any) -> Iterable[Any]:
        if hasattr(value, "__len__"):
            self.spend(1 + len(value))
            return value
        return self._counted(value)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend()
            yield value

    def _concat(self, parts: list[Any]) -> str:
        self.spend(1, sum(map(text_size, parts)))
        return "".join(map(str, parts))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter with its growth estimated before and its result counted after."""
        passed = getattr(function, "jinja_pass_arg", None)
        n_passed = 0 if passed is None else 1

        def guarded(*args: Any, **options: Any) -> Any:
            values = [self._counted_list(value) for value in args[n_passed:]]
            self.spend(1, estimate_filter(name, values, options))
            return self._check_result(function(*args[:n_passed], *values, **options))

        if passed is not None:
            guarded.jinja_pass_arg = passed  # type: ignore[attr-defined]
        return guarded

    def _counted_list(self, value: Any) -> Any:
        """Return iterators (of `map`, `select`, ...) as counted lists, everything else as it is."""
        return list(self._counted(value)) if isinstance(value, Iterator) else value

    def _check_result(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple, dict)) and text_size(value) > MAX_LENGTH:
            self.spend(0, MAX_LENGTH + 1)
        return value

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        """Call a function or method of the template, counted."""
        args = tuple(map(self._counted_list, args))
        self.spend(1, estimate_call(function, args, options))
        if isinstance(function, LoopContext):  # a recursive loop descends
            args = tuple(map(self._count_loop, args))
        return self._check_result(super().call(context, function, *args, **options))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's replacement of ``str.format``, with its result estimated before it runs."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def guarded(*args: Any, **options: Any) -> str:
            self.spend(1, estimate_call(value, args, options))
            return wrapped(*args, **options)

        return guarded

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once; Jinja would let the access pass until its value is used."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply ``+ * ** %``, refusing results that would be too large."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if numbers:
            self._check_numbers(operator, left, right)
        elif operator == "%":
            self.spend(1, estimate_format(left, right if isinstance(right, tuple) else (right,)))
        elif operator == "*":
            times, other = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and hasattr(other, "__len__"):
                self.spend(1, max(times, 0) * len(other))
        elif hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.spend(1, len(left) + len(right))
        return self._check_result(super().call_binop(context, operator, left, right))

    def _check_numbers(self, operator: str, left: float, right: float) -> None:
        self.spend()
        if not (isinstance(left, int) and isinstance(right, int)):
            return
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > MAX_BITS:
            raise WorkLimitError(f"it computes a number of more than {MAX_BITS} bits")


def _raise_exception(message: Any = "no reason given") -> None:
    raise RefusedError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as chat templates expect it: not escaped for web pages, no ASCII escapes."""
    if isinstance(indent, (int, str)) and len(" " * min(indent, 17) if isinstance(indent, int) else indent) > 16:
        raise WorkLimitError("tojson may indent by 16 at most")
    if separators is not None and any(len(text) > 16 for text in separators):
        raise WorkLimitError("tojson takes separators of at most 16 characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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


def render(template: Template, variables: dict[str, Any], source: str) -> str:
    """Render a compiled template; everything it can raise becomes a `TokenizerError` of one sentence."""
    environment = cast(BoundedEnvironment, template.environment)
    environment.start()
    try:
        text = template.render(variables)
        environment._check_result(text)
    except RefusedError as error:
        raise TokenizerError(f"The chat template refuses these messages: {_reason(error)}.") from error
    except WorkLimitError as error:
        raise TokenizerError(f"{source}: the chat template was stopped because {_reason(error)}.") from error
    except SecurityError as error:
        raise TokenizerError(f"{source}: the chat template tries something unsafe ({_reason(error)}).") from error
    except Exception as error:  # a template is a program: any exception of Python may come out of it
        raise TokenizerError(f"{source}: the chat template failed ({_reason(error)}).") from error
    return text


def _reason(error: BaseException) -> str:
    """Return the error's first line, without a full stop at its end and of bounded length."""
    text = re.split(r"[\r\n]", str(error).strip())[0] or type(error).__name__
    return text[:300].rstrip(".")
