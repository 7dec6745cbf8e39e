"""Sizes: strict reading, and how they are shown."""

from __future__ import annotations

import pytest

from edgeinfer.base.units import format_size, parse_size
from edgeinfer.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5 GiB", 3 << 29), ("2kB", 2000), ("2KiB", 2048), ("1TB", 10**12),
        ("17B", 17), ("4gib", 4 << 30), (" 3 MiB ", 3 << 20), ("0.1GB", 100_000_000), (12345, 12345), ("1TiB", 1 << 40),
        ("766335297", 766335297), ("150000000", 150_000_000), ("1000000", 10**6),
    ],
)
def test_a_size_is_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("4", r"Size '4' cannot be read; did you mean 4GiB or 4MB\?"),
        ("999999", r"Size '999999' cannot be read; did you mean 999999MB or 999999kB\?"),
        ("99999999999999999999", "Size '99999999999999999999' is out of range; it must be more than 0, "),
        ("0", r"Size '0' is out of range; it must be more than 0, and at most 2\^63 - 1 bytes."),
        ("", "Size '' cannot be read; write a number and a unit, as in 4GiB or 500MB."),
        ("GiB", "cannot be read"),
        ("-1GiB", "cannot be read"),
        ("1e9B", "cannot be read"),
        ("4 G i B", "cannot be read"),
        ("४GB", "cannot be read"),
        ("4G", r"Size '4G' has the unknown unit 'G'; did you mean 4GiB or 4GB\?"),
        ("4Gb/s", "cannot be read"),
        ("4XB", "Size '4XB' has the unknown unit 'XB'; units are B, kB, MB, GB, TB and KiB, MiB, GiB, TiB."),
        ("0B", r"Size '0B' is out of range; it must be more than 0, and at most"),
        ("99999999999TiB", "is out of range"),
        (0, "Size 0 bytes is out of range"),
        (2**63, "is out of range"),
        (1.5, "Size 1.5 is a float; write it as '4GiB' or '500MB'."),
        (True, "Size True is a bool"),
    ],
)
def test_what_is_no_size_is_refused(text: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (34_567, "35 kB"), (3_400_000, "3.4 MB"), (4 << 30, "4.29 GB"),
        (10**12, "1.00 TB"),
    ],
)
def test_a_size_is_shown(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
