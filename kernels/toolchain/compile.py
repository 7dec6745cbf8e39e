"""Compile a share of the kernels of one instruction set (a child process of build.py; Numba's only home).

Each kernel becomes one object file with one exported symbol, its name, and no undefined symbol but memset, memcpy and
memmove.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ..isa import ISA_LEVELS, Isa, triple
from .elf import undefined_symbols
from .front_end import lighten

ALLOWED = {"memset", "memcpy", "memmove"}


def aim(machine: str) -> None:
    """Make Numba generate code for `triple(machine)`; must run before Numba is imported, nothing is called after."""
    import llvmlite.binding as llvm
    from llvmlite.binding import targets

    aimed = triple(machine)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for module in (llvm, targets):
        module.get_process_triple = module.get_default_triple = lambda: aimed
    from_triple = targets.Target.from_triple
    targets.Target.from_default_triple = classmethod(lambda cls: from_triple(aimed))


def load_kernels(isa: Isa, extension: str = "") -> dict[str, Any]:
    """Import the kernel files for an ISA level, or the module of an extension; importing registers them."""
    from ..vector import targets

    targets.use(isa)
    from ..registry import KERNELS

    if extension:
        import_module(extension)
    else:
        from ..ops import (  # noqa: F401
            elementwise,
            embedding,
            forward,
            gather,
            matmul,
            norms,
            probe,
            rope,
            screen,
            stream,
            values,
        )
        from ..ops.attention import (  # noqa: F401
            attention,
            attention_merge,
            attention_scores,
            attention_select,
            attention_values,
            store_latent,
        )
        from ..ops.experts import experts, experts_input, experts_resolve, route  # noqa: F401
        from ..ops.neuron_ffn import neuron_down, neuron_gated, neuron_mask, neuron_resolve  # noqa: F401
        from ..ops.recurrent import causal_conv, gated_norm, state_rules  # noqa: F401
        from ..ops.sampling import sample  # noqa: F401

    return KERNELS


def only_translate() -> None:
    """Make Numba stop at LLVM IR: helpers are neither optimised nor turned into machine code one by one.

    Nothing that is compiled here is called here, and the finished kernel is optimised once, whole: loops of helpers
    that were unrolled before they are inlined would make it three times as long. Numba needs a built-in function as the
    key of each helper; a new list's method is one.
    """
    from numba.core.codegen import CPUCodeLibrary, JITCodeLibrary
    from numba.core.cpu import CPUContext

    def only_lay_out(library: Any, module: Any) -> None:
        module.data_layout = library._codegen._data_layout

    CPUContext.get_executable = lambda self, library, fndesc, env: [].append
    CPUCodeLibrary._optimize_functions = only_lay_out
    CPUCodeLibrary._optimize_final_module = lambda self: None
    JITCodeLibrary._finalize_specific = lambda self: None


def optimise(module: Any, machine: Any) -> None:
    """LLVM's -O3 without its vectorisers: the kernels spell out their vectors."""
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)


def compile_kernel(name: str, function: Any, assembly: bool = False) -> tuple[bytes, str]:
    """Object code of one kernel, and its assembly if asked for.

    Raises
    ------
    RuntimeError
        If the object needs a symbol that a process without Numba does not have.
    """
    import llvmlite.binding as llvm
    from numba import njit
    from numba.core.compiler_lock import global_compiler_lock

    options = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled = njit("int64(int64, int64, int64, int64)", **options)(function)
    overload = compiled.overloads[compiled.signatures[0]]
    library = overload.library
    with global_compiler_lock:
        library.finalize()  # links the helpers in
    module = library._final_module
    module.link_in(llvm.parse_assembly(_entry(name, overload.fndesc.mangled_name, module)))
    for inner in (*module.functions, *module.global_variables):
        if not inner.is_declaration and inner.name != name:
            inner.linkage = "internal"
    _keep_apart(module)
    module.verify()
    machine = library.codegen._tm
    optimise(module, machine)
    code = machine.emit_object(module)
    foreign = undefined_symbols(code) - ALLOWED
    if foreign:
        raise RuntimeError(f"kernel {name} needs the symbols {', '.join(sorted(foreign))}, which only Numba has")
    return code, machine.emit_assembly(module) if assembly else ""


def _keep_apart(module: Any) -> None:
    """Tell LLVM to leave outlined helpers alone; it would inline nearly all of them, and each into several places."""
    from ..vector.instruction import OUTLINED

    names = {made.fndesc.mangled_name for helper in OUTLINED for made in helper.overloads.values()}
    for function in module.functions:
        if function.name in names:
            function.add_function_attribute("noinline")


def _entry(name: str, mangled: str, module: Any) -> str:
    """IR of ``int64 name(inst, ctx, tid, n_threads)``, which calls Numba's function by its own convention."""
    return f"""
        target datalayout = "{module.data_layout}"
        target triple = "{module.triple}"
        declare i32 @"{mangled}"(ptr, ptr, i64, i64, i64, i64)
        define i64 @{name}(i64 %inst, i64 %ctx, i64 %tid, i64 %n) {{
          %result = alloca i64
          %error = alloca ptr
          %status = call i32 @"{mangled}"(ptr %result, ptr %error, i64 %inst, i64 %ctx, i64 %tid, i64 %n)
          %value = load i64, ptr %result
          ret i64 %value
        }}"""


def main(arguments: list[str]) -> None:
    """``compile MACHINE ISA [MODULE]``: reads names of kernels, writes ``NAME BYTES`` and the code of each.

    MODULE is an extension. Messages go to standard error. EDGEINFER_ASSEMBLY names a directory for ``NAME.s``.

    Raises
    ------
    RuntimeError
        If there is no kernel of a name.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else gets among the code
    machine, isa_name, *extension = arguments
    isa = next(i for i in ISA_LEVELS if (i.machine, i.name) == (machine, isa_name))
    aim(machine)
    kernels = load_kernels(isa, *extension)
    only_translate()
    lighten()
    gc.freeze()  # loaded objects stay; collecting them again and again costs a sixth of the time
    gc.set_threshold(50_000, 30, 30)
    assembly_directory = os.environ.get("EDGEINFER_ASSEMBLY")
    for line in sys.stdin:
        name = line.strip()
        if name not in kernels:
            raise RuntimeError(f"there is no @kernel named {name}")
        code, assembly = compile_kernel(name, kernels[name], bool(assembly_directory))
        if assembly_directory:
            Path(assembly_directory, f"{name}.s").write_text(assembly)
        out.write(f"{name} {len(code)}\n".encode() + code)
        out.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
