"""Machine code in kernel objects: no foreign symbols, whatever the front end leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.errors import KernelError
from edgeinfer.kernels import available, find_set
from edgeinfer.kernels.toolchain import build, elf
from tests.helpers.kernel_builds import ISA, ROOT


@pytest.mark.slow
def test_a_kernel_that_needs_a_foreign_symbol_is_refused() -> None:
    script = """
import math
from edgeinfer.kernels import available
from edgeinfer.kernels.toolchain import compile
compile.load_kernels(available()[-1])
compile.only_translate()
def bad(inst, ctx, tid, n_threads):
    return int(math.exp(inst) * 8)
try:
    compile.compile_kernel("bad", bad)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "kernel bad needs the symbols exp, which only Numba has\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("names", [["quantize", "rms_norm_q8"], ["neuron_mask_signs"]], ids=" ".join)
def test_a_lighter_front_end_changes_no_code(names: list[str]) -> None:
    """With outlined helpers Numba makes one for each constant, so both front ends make one for all."""
    script = """
import hashlib, sys
from edgeinfer.kernels import available
from edgeinfer.kernels.toolchain import compile
from edgeinfer.kernels.toolchain import front_end
kernels = compile.load_kernels(available()[-1])
compile.only_translate()
if sys.argv[1] == "light":
    front_end.lighten()
elif "neuron_mask_signs" in sys.argv:
    front_end._one_helper_for_all_constants()
for name in sys.argv[2:]:
    print(hashlib.sha256(compile.compile_kernel(name, kernels[name])[0]).hexdigest())
"""
    codes = [subprocess.run([sys.executable, "-c", script, how, *names], cwd=ROOT, capture_output=True, text=True)
             for how in ("light", "whole")]
    assert codes[0].stdout == codes[1].stdout != "", codes[0].stderr
    assert len(codes[0].stdout.split()) == len(names), codes[0].stderr


@pytest.mark.parametrize("code", [b"", b"garbage", b"MZ" + bytes(100), b"\x7fELF\x01\x01" + bytes(100)])
def test_what_is_no_elf_object_is_refused(code: bytes) -> None:
    with pytest.raises(KernelError, match="is no 64-bit little-endian ELF file; kernels are built as ELF everywhere"):
        elf.undefined_symbols(code)


@pytest.mark.slow
def test_the_whole_set_needs_no_foreign_symbols() -> None:
    for file in find_set(ISA).glob("*.o"):
        assert elf.undefined_symbols(file.read_bytes()) <= {"memset", "memcpy", "memmove"}, file.name


def test_two_kernels_of_one_name_are_refused() -> None:
    from edgeinfer.kernels.registry import KERNELS, kernel

    kernel("twice")(lambda inst, ctx, tid, n: 0)
    try:
        with pytest.raises(ValueError, match="Two kernels are named 'twice'"):
            kernel("twice")(lambda inst, ctx, tid, n: 0)
    finally:
        del KERNELS["twice"]


@pytest.mark.slow
def test_what_lies_in_the_working_directory_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's directory may hold modules that are named like ours or like those that the compiler imports."""
    for name in ("edgeinfer", "numba", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    child = build._start(available()[0])
    child.communicate(timeout=600)
    assert not (tmp_path / "executed").exists()
