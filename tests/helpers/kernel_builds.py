"""Few kernels that represent a set, and a substitute for the processes that compile them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import edgeinfer
from edgeinfer.kernels import Isa, available
from edgeinfer.kernels.catalogue import FAMILIES
from edgeinfer.kernels.toolchain import objects, provide

ROOT = str(Path(edgeinfer.__file__).parents[1])
ISA = available()[0]
NAMES = ("quantize", "gather_outputs")
EVERY_PROGRAM = next(family.kernels for family in FAMILIES if family.name == "forward")
FEW = ("linear_q4_g32", *NAMES, "rms_norm_q8", *EVERY_PROGRAM)
"""Kernels that represent a set: nothing here depends on their number."""
SEAL = 32


def few_objects(directory: Path) -> Path:
    """Lay sealed objects of FEW into a directory; returns it."""
    wanted = objects.KernelSet(ISA)
    for name, code in provide.find_objects(wanted, FEW).items():
        wanted.write(directory, name, code)
    return directory


class Builds:
    """Stands for the compiling processes: they hand out objects of the real set."""

    def __init__(self, source: Path):
        self.source, self.started, self.failure = source, 0, ""

    def start(self, isa: Isa, extension: object = None) -> subprocess.Popen[bytes]:
        self.started += 1
        script = f"""
            import sys
            from pathlib import Path
            if {self.failure!r}: raise RuntimeError({self.failure!r})
            for name in sys.stdin:
                code = Path({str(self.source)!r}, name.strip() + ".o").read_bytes()[:-{SEAL}]
                sys.stdout.buffer.write(f"{{name.strip()}} {{len(code)}}\\n".encode() + code)
                sys.stdout.flush()"""
        script = "\n".join(line[12:] for line in script.splitlines())
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-S", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)


def cached(tmp_path: Path) -> Path:
    return objects.KernelSet(ISA).directory(tmp_path / "cache" / "kernels", False)


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def flip_a_bit(file: Path) -> None:
    code = bytearray(file.read_bytes())
    code[len(code) // 2] ^= 4
    file.write_bytes(bytes(code))


def refused(why: str) -> str:
    return f"edgeinfer: kernels cannot be kept ({why}); they are compiled again in the next process. " \
        "Set EDGEINFER_CACHE to a directory that only you can write.\n"
