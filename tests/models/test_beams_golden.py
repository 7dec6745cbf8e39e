"""Beam search against transformers (float32): texts and scores of all results, on random and on real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.converters import convert
from edgeinfer.engine import BeamSearch, Completion, run_alone
from edgeinfer.runner import Runner
from tests import make_beams
from tests.helpers import golden_cases
from tests.helpers.sessions import free_blocks, running

GAP = 1e-4
"""Results whose scores differ by less may change places between two programs."""
TOLERANCE = 1e-4
ROWS: list[dict[str, Any]] = json.loads(make_beams.FILE.read_text(encoding="utf-8"))


def of(model: str) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["model"] == model]


def found(opened: Runner, row: dict[str, Any]) -> Completion:
    names = ("beams", "max_tokens", "length_penalty", "early_stopping")
    config = GenerationConfig(n=row["beams"], **{name: row[name] for name in names if name in row})
    return run_alone(BeamSearch(opened, None, row["prompt"], config, row["ends"]), opened)


def compare(opened: Runner, rows: list[dict[str, Any]]) -> None:
    """Scores of each place, and the texts wherever no other score is near."""
    sure = ended = n = 0
    for row in rows:
        choices, scores = found(opened, row).choices, row["scores"]
        assert [choice.score for choice in choices] == pytest.approx(scores, abs=TOLERANCE, rel=1e-6), row
        for i, (choice, text) in enumerate(zip(choices, row["texts"], strict=True)):
            if all(abs(scores[i] - other) > GAP for other in scores[:i] + scores[i + 1 :]):
                assert list(choice.token_ids) == text, (row, i)
                assert choice.finish_reason == ("length" if len(text) == row["max_tokens"] else "stop")
                sure += 1
            n, ended = n + 1, ended + (choice.finish_reason == "stop")
    assert sure > 0.8 * n and 0.1 * n < ended < n
    assert free_blocks(opened) == opened.plan.kv_blocks


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("device", ["cpu", "onnx-cpu", "pages"])
@pytest.mark.parametrize("name", make_beams.RANDOM)
def test_random_models(name: str, device: str, tmp_path: Path) -> None:
    case = golden_cases.load(name)
    convert(golden_cases.write_checkpoint(case, tmp_path / "checkpoint"), tmp_path / "bundle", weights="f16")
    assert len(of(name)) == len(make_beams.SETTINGS)
    with running(tmp_path / "bundle", device, kv="f32", max_sequences=8, own_tokens=14) as opened:
        compare(opened, of(name))


@pytest.mark.parametrize("device", ["cpu", "onnx-cpu"])
@pytest.mark.parametrize("name", make_beams.FABLES)
def test_real_models(name: str, device: str, shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    convert(shared_data(f"models/{name}"), tmp_path / "bundle", weights="f16")
    assert {2, 4, 8} == {row["beams"] for row in of(name)}
    with running(tmp_path / "bundle", device, kv="f32", ctx=96, max_sequences=8, own_tokens=32, threads=2) as opened:
        compare(opened, of(name))


@pytest.mark.reference
@pytest.mark.parametrize("name", make_beams.RANDOM)
def test_the_file_is_what_transformers_says_now(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra 'reference')")
    pytest.importorskip("transformers", reason="transformers is not installed (extra 'reference')")
    model, _ = make_beams.transformers_model(name, make_beams.CASES[name])
    for row in of(name):
        now = make_beams.results(model, row)
        assert now["scores"] == pytest.approx(row["scores"], abs=TOLERANCE) and now["texts"][0] == row["texts"][0]


@pytest.mark.reference
def test_real_models_now(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    """Prompts and settings that are in no file."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra 'reference')")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra 'reference')")
    folder = shared_data("models/fables-5m-silu")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    convert(folder, tmp_path / "bundle", weights="f16")
    prompts = [row["prompt"] for row in of("fables-5m-silu")]
    settings = [(2, 1.0), (3, 1.3), (4, 1.0), (5, -1.0), (8, 1.0), (8, 0.3)]
    rows = [{"prompt": prompts[i][: 3 + i], "ends": [2, 13, 4049][: 1 + i % 3], "max_tokens": 24, "beams": beams,
             "length_penalty": penalty} for i, (beams, penalty) in enumerate(settings)]
    with running(tmp_path / "bundle", kv="f32", ctx=64, max_sequences=8, own_tokens=24, threads=2) as opened:
        compare(opened, [row | make_beams.results(model, row) for row in rows])
