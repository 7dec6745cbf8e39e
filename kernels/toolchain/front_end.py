"""Numba's front end without the work that no kernel needs: two thirds of a first run's compiling are spent there.

Helpers are small and many, so the cost per call or per helper decides. Nothing here changes a kernel's results; all of
it concerns the compiling process alone, which calls nothing that it compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

_IDLE_PASSES = {
    "AnnotateTypes", "DumpParforDiagnostics", "IRLegalization", "InlineClosureLikes", "InlineInlinables",
    "InlineOverloads", "LiteralUnroll", "NopythonRewrites", "WithLift",
}
"""Passes for closures, inlining on request, array expressions, blocks of `with`, and listings: helpers of addresses
have none of these. IRLegalization marks where each variable dies, for the references that it holds: none."""


def lighten() -> None:
    """Make Numba quicker at the code of kernels; after `aim`, before the first kernel."""
    _one_helper_for_all_constants()
    _fewer_passes()
    _remember_types_of_calls()
    _read_instructions_quickly()
    _count_no_references()
    _measure_types_once()
    _link_once()
    _tell_nobody()


def _one_helper_for_all_constants() -> None:
    """Compile a helper once for an integer, not again for each constant that it is called with.

    A variable that starts as a constant in front of a loop even made Numba compile a helper that nothing calls. Values
    that a helper needs while it compiles (heights of tiles) come from the function that makes it.
    """
    from numba.core.dispatcher import Dispatcher
    from numba.core.types.misc import unliteral

    changed: Any = Dispatcher
    template = changed.get_call_template

    def get_call_template(dispatcher: Any, args: Any, kws: Any) -> Any:
        plain = {name: unliteral(kind) for name, kind in kws.items()}
        return template(dispatcher, tuple(map(unliteral, args)), plain)

    changed.get_call_template = get_call_template


def _fewer_passes() -> None:
    from numba.core.compiler import DefaultPassBuilder

    changed: Any = DefaultPassBuilder
    define = changed.define_nopython_pipeline

    def define_nopython_pipeline(state: Any, name: str = "nopython") -> Any:
        manager = define(state, name)
        manager.passes = [each for each in manager.passes if each[0].__name__ not in _IDLE_PASSES]
        return manager

    changed.define_nopython_pipeline = staticmethod(define_nopython_pipeline)


def _remember_types_of_calls() -> None:
    """Types of `a + b` and of intrinsics depend on their arguments alone; Numba asks NumPy's rules at each again."""
    from numba.core.types.functions import BaseFunction

    changed: Any = BaseFunction
    resolve = changed.get_call_type
    known: dict[Any, Any] = {}

    def get_call_type(function: Any, context: Any, args: Any, kws: Any) -> Any:
        key = function, tuple(args), tuple(sorted(kws.items()))
        if key not in known:
            known[key] = resolve(function, context, args, kws)
        return known[key]

    changed.get_call_type = get_call_type


def _read_instructions_quickly() -> None:
    """Return the variables of an instruction: most operands are constants and positions, told by their exact type."""
    from numba.core.ir import Inst, Var

    def variables(instruction: Any, value: Any) -> list[Any]:
        kind = type(value)
        if kind is Var:
            return [value]
        if kind in (list, tuple, dict):
            items = value.values() if kind is dict else value
            return [var for item in items for var in variables(instruction, item)]
        return value.list_vars() if isinstance(value, Inst) else []

    changed: Any = Inst
    changed._rec_list_vars = variables


def _count_no_references() -> None:
    """Leave out how long variables live: kernels know numbers, vectors and tuples of them, which are not
    reference-counted."""
    from numba.core import transforms
    from numba.core.lowering import BaseLower, Lower
    from numba.core.postproc import PostProcessor

    def run(processor: Any, emit_dels: bool = False, extend_lifetimes: bool = False) -> None:
        processor.func_ir.blocks = transforms.canonicalize_cfg(processor.func_ir.blocks)

    changed: Any = PostProcessor
    changed.run = run
    for lower in (BaseLower, Lower):
        lowering: Any = lower
        lowering.incref = lowering.decref = lambda self, kind, value: None


def _measure_types_once() -> None:
    """Sizes of types, each found by compiling a module, and signatures of functions: asked for again and again."""
    from numba.core import base, utils

    changed: Any = base.BaseContext
    measure, sizes = changed.get_abi_sizeof, {}

    def get_abi_sizeof(context: Any, kind: Any) -> Any:
        if kind not in sizes:
            sizes[kind] = measure(context, kind)
        return sizes[kind]

    changed.get_abi_sizeof = get_abi_sizeof
    for module, name in ((utils, "pysignature"), (base, "_has_loc")):
        setattr(module, name, lru_cache(None)(getattr(module, name)))


def _link_once() -> None:
    """Link each helper into the kernel alone, not into each helper that calls it and from there into the next."""
    from numba.core.codegen import CPUCodeLibrary

    def helpers(library: Any, seen: set[Any]) -> Iterator[Any]:
        for helper in library._linking_libraries:
            if helper not in seen:
                seen.add(helper)
                yield helper
                yield from helpers(helper, seen)

    def finalize(library: Any) -> None:
        for helper in helpers(library, {library}):
            library._final_module.link_in(helper._final_module, preserve=True)  # other kernels may want it too
        library._finalized = True

    changed: Any = CPUCodeLibrary
    changed.add_linking_library = lambda library, helper: library._linking_libraries.append(helper)
    changed.finalize = finalize


def _tell_nobody() -> None:
    """Leave out Numba's events, which time its own steps at each lock that it takes."""
    from numba.core import event

    changed: Any = event
    changed.start_event = changed.end_event = lambda *_arguments, **_named: None
