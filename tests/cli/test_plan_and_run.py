"""Plan and run agree on whether a run fits, how, within which budget, and on every refusal, word by word."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.helpers import answers
from tests.kernel_selection import everything

pytest.importorskip("gguf", reason="gguf is not installed (extra 'dev')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'dev')")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return answers.models(tmp_path_factory.mktemp("models"))


def modes(cases: Iterable[answers.Case], whole: bool = False) -> set[str]:
    """Compare the two commands in each case, with a `whole` opening of the model; returns the ways in which they run.
    """
    found, different = set(), []
    for case in cases:
        said, decided = answers.planned(case), answers.run(case, whole)
        if not answers.agree(case, said, decided):
            different.append(f"{case}: plan says {said}, and run {decided}")
        found.add(said.mode)
    assert different == []
    return found


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("seed", range(2))
def test_they_agree(models: dict[str, Path], seed: int) -> None:
    assert len(modes(answers.cases(models, 12, seed))) > 1


@pytest.mark.slow
def test_they_agree_on_thousands(models: dict[str, Path]) -> None:
    """5,000 cases take nine minutes of processor time, so only EDGEINFER_TEST_ALL=1 asks for all of them; the first 60
    run in each of these ways."""
    wanted = {"", "resident", "streamed", "refused", "sparse from flash", "experts from flash"}
    assert modes(answers.cases(models, 5000 if everything() else 60, 12), whole=True) == wanted
