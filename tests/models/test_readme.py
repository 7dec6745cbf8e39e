"""README is short, counts what there is, and shows pictures of what was measured and planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pictures import pictures
from edgeinfer.devices import profiles
from edgeinfer.graph import supported_architectures

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "README.md").is_file():
    pytest.skip("no checkout: the pages are not installed", allow_module_level=True)
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_has_at_most_80_lines_of_100_columns() -> None:
    lines = README.splitlines()
    assert len(lines) <= 80 and not [line for line in lines if len(line) > 100]



def test_no_page_has_a_line_over_120_columns() -> None:
    wide = [f"{page.relative_to(ROOT)}:{n}" for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
            for n, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > 120 and not line.startswith("|")]
    assert not wide, "only rows of tables may be wider"


def test_it_counts_architectures_and_devices() -> None:
    words = " ".join(README.split())
    assert f" {len(supported_architectures())} architectures" in words and f" {len(profiles())} devices" in words


def test_the_pictures_show_the_table_and_the_plan() -> None:
    for name, text in pictures().items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == text, "python benchmarks/pictures.py"
