"""The machine code of the hot kernels: each ISA level uses the instruction that it exists for, and nothing beyond."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.kernels import ISA_LEVELS, Isa
from edgeinfer.kernels.toolchain import elf

ROOT = Path(edgeinfer.__file__).parents[1]
pytestmark = pytest.mark.slow
KERNELS = ("linear_q4_g32", "linear_int8_g64")
MATMULS = {
    "vpdpbusd zmm": r"^\tvpdpbusd\t.*%zmm",
    "vpdpbusd ymm": r"^\t\{vex\}\s+vpdpbusd\t.*%ymm",
    "vpmaddubsw": r"^\tvpmaddubsw\t.*%ymm",
    "smmla": r"^\tsmmla\tv",
    "sdot": r"^\tsdot\tv",
    "smull": r"^\tsmull2?\tv",
}
USED = {
    "avx512vnni": {"vpdpbusd zmm"}, "avxvnni": {"vpdpbusd ymm"}, "avx2": {"vpmaddubsw"},
    "neon_i8mm": {"smmla", "sdot"},  # sdot for single tokens
    "neon_dotprod": {"sdot"}, "neon": {"smull"}, "generic": set(),
}
MACHINES = {"x86_64": 62, "aarch64": 183}
"""ELF's numbers of the architectures."""


def compiled(level: Isa, out: Path) -> list[tuple[str, bytes]]:
    """Compile KERNELS for an ISA level; gives the assembly and the object of each."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
    environment |= {"NUMBA_CPU_NAME": level.cpu, "NUMBA_CPU_FEATURES": level.features, "EDGEINFER_ASSEMBLY": str(out)}
    command = [sys.executable, "-m", "edgeinfer.kernels.toolchain.compile", level.machine, level.name]
    names = "".join(f"{name}\n" for name in KERNELS).encode()
    run = subprocess.run(command, input=names, env=environment, cwd=ROOT, capture_output=True)
    assert run.returncode == 0, run.stderr
    assert b"not a recognized" not in run.stderr  # a misspelt feature is only a warning to LLVM
    made, rest = [], run.stdout
    for name in KERNELS:
        header, _, rest = rest.partition(b"\n")
        assert header.split()[0] == name.encode()
        size = int(header.split()[1])
        made.append(((out / f"{name}.s").read_text(), rest[:size]))
        rest = rest[size:]
    return made


@pytest.mark.parametrize("level", ISA_LEVELS, ids=lambda level: f"{level.machine}-{level.name}")
def test_machine_code(level: Isa, tmp_path: Path) -> None:
    """One test for all that is looked for, since compiling takes by far the most of the time."""
    for text, code in compiled(level, tmp_path):
        matmuls_use_the_instruction_of_their_isa_level(text, level)
        scales_are_converted_and_added_by_instructions(text, level)
        nothing_beyond_the_isa_level_is_used(text, level)
        objects_need_nothing_but_memory_functions(code, level)


def found(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.MULTILINE) is not None


def matmuls_use_the_instruction_of_their_isa_level(text: str, level: Isa) -> None:
    assert {matmul for matmul, pattern in MATMULS.items() if found(pattern, text)} == USED[level.name]


def scales_are_converted_and_added_by_instructions(text: str, level: Isa) -> None:
    arm, plain = level.machine == "aarch64", level.machine == "x86_64" and level.name == "generic"
    assert found(r"^\tfcvtl\t", text) == arm
    assert found(r"^\tfmla\t", text) == arm
    assert found(r"^\tvcvtph2ps\t", text) == (not arm and not plain)
    assert found(r"^\tvfmadd\d+ps\t", text) == (not arm and not plain)
    assert not found(r"__(extend|trunc)|__gnu_[hf]2[hf]", text)


def nothing_beyond_the_isa_level_is_used(text: str, level: Isa) -> None:
    """Registers and instructions that the machine may lack, or that belong to its system."""
    if level.machine == "x86_64":
        widest = {"avx512vnni": "zmm", "generic": "xmm"}.get(level.name, "ymm")
        assert set(re.findall(r"%([xyz]mm)\d", text)) >= {widest}
        assert not [register for register in "yz" if register > widest[0] and f"%{register}mm" in text]
    else:
        assert not found(r"\b[zp]\d+\.[bhsdq]\b|\bptrue\b", text)  # SVE
        assert not found(r"\b[wx]18\b", text)
        newer = r"ldapu?r|stlur|fcadd|fcmla|bf(cvt|dot|ml|mmla)\w*|frint(32|64)\w|irg|pac\w+|aut\w+|fjcvtzs"
        assert not found(rf"^\t({newer})\b", text)
        if level.name in ("neon", "generic"):
            assert not found(r"^\t(ldadd|swp|cas)\w*\b", text)  # Armv8.0 has none but loads and stores


def objects_need_nothing_but_memory_functions(code: bytes, level: Isa) -> None:
    assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == MACHINES[level.machine]
    assert elf.undefined_symbols(code) <= {"memset", "memcpy", "memmove"}
