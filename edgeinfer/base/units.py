"""Sizes and numbers as people write them: ``4GiB`` is 4 * 2^30 bytes, ``500MB`` is 500 * 10^6."""

from __future__ import annotations

import re

from ..errors import UsageError

_FACTORS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}
_PLAIN = re.compile(r"\d{1,30}", re.ASCII)
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]+)", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
MAX_BYTES = 2**63 - 1
MIN_PLAIN = 10**6
"""A number without a unit is bytes from here on; a smaller one lacks the unit that its writer had in mind."""


def round_up(n: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least n."""
    return -(-n // step) * step


def parse_size(text: str | int) -> int:
    """Return the bytes of a size.

    Parameters
    ----------
    text : str or int
        A number with a unit (B, kB, MB, GB, TB: powers of 1000; KiB, MiB, GiB, TiB: powers of 1024; capitals do not
        matter), or a number of bytes: an int, or digits alone from 1000000 on.

    Raises
    ------
    UsageError
        The text is not a size, is a small number without a unit, or is not from 1 to 2^63 - 1 bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return _in_range(text, f"{text} bytes")
    if not isinstance(text, str):
        raise UsageError(f"Size {text!r} is a {type(text).__name__}; write it as '4GiB' or '500MB'.")
    match, plain = _SIZE.fullmatch(text.strip()), _PLAIN.fullmatch(text.strip())
    if plain and ((nbytes := int(plain[0])) >= MIN_PLAIN or nbytes == 0):
        return _in_range(nbytes, repr(text))
    if not match:
        units = ("GiB", "MB") if plain and int(plain[0]) < 1000 else ("MB", "kB")
        hint = f"; did you mean {' or '.join(text.strip() + unit for unit in units)}?" if plain else \
            "; write a number and a unit, as in 4GiB or 500MB."
        raise UsageError(f"Size {text!r} cannot be read{hint}")
    number, unit = match[1], match[2].lower()
    if unit not in _FACTORS:
        letter = match[2].upper()
        hint = f"; did you mean {number}{letter}iB or {number}{letter}B?" if unit in tuple("kmgt") else \
            "; units are B, kB, MB, GB, TB and KiB, MiB, GiB, TiB."
        raise UsageError(f"Size {text!r} has the unknown unit {match[2]!r}{hint}")
    whole, _, fraction = number.partition(".")
    scale = 10 ** len(fraction)  # whole numbers throughout: 0.1GiB is exact where floats are not
    return _in_range(int(whole + fraction) * _FACTORS[unit] // scale, repr(text))


def _in_range(nbytes: int, said: str) -> int:
    if not 1 <= nbytes <= MAX_BYTES:
        raise UsageError(f"Size {said} is out of range; it must be more than 0, and at most 2^63 - 1 bytes.")
    return nbytes


def format_size(nbytes: int) -> str:
    """Return a size for people, in powers of 1000: ``1.53 GB``, ``734 MB``, ``96 kB``, ``12 B``."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    for unit, factor in (("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.{0 if nbytes >= 10 * factor else 1}f} {unit}"
    return f"{nbytes} B"


def number_of(text: str) -> str | float:
    """Return the number that a text is, else the text."""
    if not _NUMBER.fullmatch(text):
        return text
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:  # of thousands of digits
        return text
