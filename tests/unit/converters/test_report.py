"""Sentences of a conversion's report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edgeinfer.converters.report import not_definite


def test_matrices_that_gptq_could_not_round_are_one_sentence() -> None:
    matrices: list[Any] = [SimpleNamespace(nearest=name) for name in ("q", "", "k", "v")]
    assert not_definite(matrices[1:2]) == []
    for n, said in ((1, "q are not"), (3, "q and of another matrix are not"), (4, "q and of 2 other matrices are not")):
        (found,) = not_definite(matrices[:n])
        assert found.startswith(f"The second moments of the inputs of {said} positive definite")
