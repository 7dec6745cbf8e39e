"""A little of each fault that `python -m tests.faults` does a hundred times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import KINDS


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("conversions", 3), ("first-runs", 3), ("saves", 3), ("full-disk", 1)])
def test_nothing_is_lost_or_half_written(kind: str, count: int, tmp_path: Path) -> None:
    assert KINDS[kind](tmp_path, count, 1)
