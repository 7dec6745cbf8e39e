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


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory):
    """Give an ISA level's directory with the objects and assembly of KERNELS; each ISA level compiles once."""
    done: dict[Isa, Path] = {}

    def compile_some(level: Isa) -> Path:
        if level not in done:
            out = tmp_path_factory.mktemp(f"{level.machine}-{level.name}")
            environment = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
            environment |= {"NUMBA_CPU_NAME": level.cpu, "NUMBA_CPU_FEATURES": level.features,
                            "EDGEINFER_ASSEMBLY": str(out)}
            command = [sys.executable, "-m", "edgeinfer.kernels.toolchain.compile", level.machine, level.name]
            names = "".join(f"{name}\n" for name in KERNELS).encode()
            run = subprocess.run(command, input=names, env=environment, cwd=ROOT, capture_output=True)
            assert run.returncode == 0, run.stderr
            assert b"not a recognized" not in run.stderr  # a misspelt feature is only a warning to LLVM
            rest = run.stdout
            for name in KERNELS:
                header, _, rest = rest.partition(b"\n")
                assert header.split()[0] == name.encode()
                (out / f"{name}.o").write_bytes(rest[: int(header.split()[1])])
                rest = rest[int(header.split()[1]) :]
            done[level] = out
        return done[level]

    return compile_some


@pytest.fixture(params=ISA_LEVELS, ids=lambda level: f"{level.machine}-{level.name}")
def level(request: pytest.FixtureRequest) -> Isa:
    return request.param


def assembly(directory: Path, name: str) -> str:
    return (directory / f"{name}.s").read_text()


def found(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.MULTILINE) is not None


@pytest.mark.parametrize("name", KERNELS)
def test_matmuls_use_the_instruction_of_their_isa_level(compiled, level: Isa, name: str) -> None:
    text = assembly(compiled(level), name)
    assert {matmul for matmul, pattern in MATMULS.items() if found(pattern, text)} == USED[level.name]


@pytest.mark.parametrize("name", KERNELS)
def test_scales_are_converted_and_added_by_instructions(compiled, level: Isa, name: str) -> None:
    text = assembly(compiled(level), name)
    arm, plain = level.machine == "aarch64", level.machine == "x86_64" and level.name == "generic"
    assert found(r"^\tfcvtl\t", text) == arm
    assert found(r"^\tfmla\t", text) == arm
    assert found(r"^\tvcvtph2ps\t", text) == (not arm and not plain)
    assert found(r"^\tvfmadd\d+ps\t", text) == (not arm and not plain)
    assert not found(r"__(extend|trunc)|__gnu_[hf]2[hf]", text)


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_beyond_the_isa_level_is_used(compiled, level: Isa, name: str) -> None:
    """Registers and instructions that the machine may lack, or that belong to its system."""
    text = assembly(compiled(level), name)
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


@pytest.mark.parametrize("name", KERNELS)
def test_objects_need_nothing_but_memory_functions(compiled, level: Isa, name: str) -> None:
    code = (compiled(level) / f"{name}.o").read_bytes()
    assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == MACHINES[level.machine]
    assert elf.undefined_symbols(code) <= {"memset", "memcpy", "memmove"}
