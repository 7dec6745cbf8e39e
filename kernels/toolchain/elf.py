"""Just enough of ELF to see the target of an object file and the symbols that it needs (System V ABI, chapter 4)."""

from __future__ import annotations

import struct

from edgeinfer.errors import KernelError

_MACHINES = {62: "x86_64", 183: "aarch64"}
"""e_machine by LLVM's names."""


def machine(code: bytes) -> str:
    """Architecture of a 64-bit little-endian ELF object, or its number where it is not one of edgeinfer's.

    Raises `KernelError` if the bytes are no such object.
    """
    _check(code)
    number, = struct.unpack_from("<H", code, 18)
    return _MACHINES.get(number, str(number))


def undefined_symbols(code: bytes) -> set[str]:
    """Names of the undefined symbols of a 64-bit little-endian ELF object.

    Raises `KernelError` if the bytes are no such object.
    """
    _check(code)
    section_table, = struct.unpack_from("<Q", code, 40)
    entry_size, n_sections = struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, section_table + i * entry_size) for i in range(n_sections)]
    names: set[str] = set()
    for _, kind, _, _, offset, size, link, _, _, item in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = sections[link][4]
        for at in range(offset + item, offset + size, item):
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0:  # SHN_UNDEF
                end = code.index(b"\0", strings + name)
                names.add(code[strings + name:end].decode())
    return names - {""}


def _check(code: bytes) -> None:
    if len(code) < 64 or code[:6] != b"\x7fELF\x02\x01":
        raise KernelError("A kernel object is no 64-bit little-endian ELF file; kernels are built as ELF everywhere.")
