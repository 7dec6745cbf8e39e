"""Cases of the measurements of all families as ONNX models: the figures are within bounds, and a fault shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends.onnx.step import Step
from edgeinfer.graph import read_config, supported_architectures
from tests.helpers.onnx_families import OTHERS, models, storages, write_floats, write_tiny
from tests.helpers.onnx_models import difference, expected
from tests.helpers.sessions import scored, session, tokens

pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
onnx_models = pytest.importorskip("benchmarks.onnx_models")
onnx_requests = pytest.importorskip("benchmarks.onnx_requests")
LOWERED = [name for name in supported_architectures() if onnx_models.is_lowered(name)]
STORED = {str(storage): (i, storage) for i, storage in enumerate(storages())}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("name", "kind"), [
    ("llama-mha", "tableq:32"), ("bitnet", "q4:32 by neuron"), ("llama-gqa3-bias-gelu", "q2:64 by neuron"),
    ("gemma4", "q4k:32"), ("gpt-oss", "tableq3:64"), ("olmoe", "q6:16"), ("bamba", "q5:32"),
    ("smallthinker", "iq4k:32")])
def test_models_in_floats_have_the_values_of_codes(name: str, kind: str, tmp_path: Path) -> None:
    """Of experts, tables of rows, FFNs by neuron with their biases, and tables of levels."""
    bundle, ids = write_tiny(name, STORED[kind][1], tmp_path / "b"), tokens(30)
    with session(write_floats(bundle, tmp_path / "floats"), kv="f32", ctx=30, outputs=30) as opened:
        assert {str(stored) for stored in opened.graph.types.values()} == {"f32"}
        assert difference(scored(opened, ids), expected(bundle, ids)) < 3e-5


def test_every_architecture_has_models() -> None:
    assert all(models(name) for name in supported_architectures()) and set(OTHERS) < set(supported_architectures())


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", STORED)
def test_figures_of_types(kind: str) -> None:
    """Each type in another architecture."""
    index, storage = STORED[kind]
    case = onnx_models.run(LOWERED[7 * index % len(LOWERED)], storage, index)
    print(case)
    assert max(case.f32, case.genai_f32) < 5e-5
    assert max(case.f16, case.genai_f16) <= max(5e-3, 2.5 * case.rounding)
    assert case.greedy == "" and case.genai_greedy in ("", "not run")


def test_a_text_that_is_another_is_shown() -> None:
    texts = object.__new__(onnx_models.Texts)
    texts.logits = [np.array([0.0, 1.0, 4.0]), np.array([3.0, 2.9999, 1.0])]
    assert texts.unlike([2, 0]) == "" and texts.never == 1
    assert texts.unlike([2, 1]) == "close token 1, by 3.3e-05"
    assert texts.unlike([1, 0]) == "another token 0, by 7.5e-01"


@pytest.mark.slow
def test_the_tables_are_written_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_models, "is_lowered", lambda name: name != "bamba")
    given = ["--families", "mpt", "bamba", "--types", "q4:32", "f16", "--results", str(tmp_path / "r.jsonl"),
             "--output", str(tmp_path / "page.md")]
    for _ in range(2):
        assert onnx_models.main(given) == 0
        lines = (tmp_path / "r.jsonl").read_text().splitlines()
        assert [json.loads(line)[:2] for line in lines] == [["mpt", "q4:32"], ["mpt", "f16"]]
    page = (tmp_path / "page.md").read_text()
    assert "| mpt | 2 |" in page and "| f16 | 1 |" in page and "Refused: bamba." in page


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("architecture", LOWERED)
def test_requests_of_each_kind_have_equal_tokens(architecture: str) -> None:
    """One of the 60 requests of each kind; logits that are close are shown."""
    found = onnx_requests.run(architecture, 1)
    print(found)
    assert all(": close token" in why for why in found.others)
    refused = [kind for kind, equal in found.equal.items() if equal is None]
    recurrent = read_config(next(iter(models(architecture).values()))).recurrent
    assert refused == (["lookup", "draft"] if recurrent else []) and bool(found.drafted) is not bool(refused)
    assert sum(equal or 0 for equal in found.equal.values()) + len(found.others) == 7 - len(refused)
    assert len(found.others) < 2


def test_a_wrong_logit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On onnxruntime every step prefers another token than the best."""
    logits = Step.logits

    def wrong(step: Step) -> Any:
        rows = np.array(logits(step))
        rows[np.arange(len(rows)), rows.argmax(1)] -= 5
        return rows

    monkeypatch.setattr(Step, "logits", wrong)
    monkeypatch.setattr("edgeinfer.backends.onnx.calls.choose", lambda *given: False)
    found = onnx_requests.run("llama", 1)
    assert found.equal["greedy"] == 0 and any(why.startswith("greedy: another token") for why in found.others)
