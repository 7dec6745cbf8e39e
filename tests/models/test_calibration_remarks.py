"""Sentences on texts that say too little, with the number of tokens that is enough."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeinfer.converters import convert
from edgeinfer.errors import UsageError
from edgeinfer.models.calibrated import _remarks, by_text, calibration_text
from edgeinfer.models.comparison import Compared, too_few
from tests.helpers.checkpoints import SENTENCES
from tests.helpers.packers import make_packed


class Pieces(list[int]):
    """Statistics of the experts of a layer, of matrices with 64 columns: the tokens that each saw."""

    width = 64

    @property
    def tokens(self) -> list[int]:
        return self


@pytest.mark.parametrize("tokens, said", [
    ([64, 100], ""),
    ([10, 100], r"1 matrices of experts saw fewer .* one of them 10, and .*; about 14,000 tokens of such a text are"),
    ([0, 32], r"2 matrices of experts saw fewer .* one of them 0, and .*; more than 5,000 tokens of such a text are"),
])
def test_experts_that_saw_too_little_are_told_what_is_enough(tokens: list[int], said: str) -> None:
    kept = SimpleNamespace(names=["layers.0.experts_gate_up"], of=lambda name: Pieces(tokens))
    found = " ".join(_remarks(kept, True, 2048))  # type: ignore[arg-type]
    assert re.match(said, found) if said else not found, found


def test_a_comparison_of_few_tokens_says_so() -> None:
    assert too_few([], Path("a.txt")) == "" == too_few([Compared("f16", 16.0, 1, 9.0, None, 4096)], Path("a.txt"))
    assert too_few([Compared("f16", 16.0, 1, 9.0, None, 6)], Path("tales/a.txt")) == (
        "a.txt has 6 tokens to predict, too few to tell bundles apart; compare on 4096 at least.")


def test_a_quantised_checkpoint_is_told_another_type_than_its_own(tmp_path: Path) -> None:
    make_packed(tmp_path / "hf", "gptq")
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 60))
    stream = calibration_text(tmp_path / "hf", tmp_path / "text.txt", 2048).stream
    with pytest.raises(UsageError, match=r"nothing to round: all \d+ matrices .* \(f16, q4\); give --weights tableq"):
        convert(tmp_path / "hf", tmp_path / "made", embedding="f16", head="f16",
                calibration=by_text(tmp_path / "hf", stream, lambda *_: None))
