"""The options of `edgeinfer convert` that calibrate, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.calibration import effects, inputs
from edgeinfer.converters import CALIBRATION_FILE, bit_budget, packing
from edgeinfer.models import comparison
from edgeinfer.models.calibrated import IMPORTANCE, TOKENS
from tests.helpers.checkpoints import SENTENCES, make_checkpoint
from tests.helpers.command_line import edgeinfer

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 60), encoding="utf-8")
    return make_checkpoint(tmp_path / "hf")


@pytest.mark.parametrize("options, said", [
    (("--rounding", "awq", "--calibrate"), "--rounding is 'awq'; choose one of gptq, importance"),
    (("--rounding", "importance"), "--rounding importance needs the model's activations over a text; also give "),
    (("--calibrate-tokens", "4096"), "--calibrate-tokens 4096 needs the model's activations over a text; also give "),
    (("--rounding", "gptq", "--imatrix", "some.gguf"), "--rounding gptq and --imatrix some.gguf both determine"),
])
def test_a_rounding_that_cannot_be_is_refused(source: Path, options: tuple[str, ...], said: str) -> None:
    done = edgeinfer("convert", source, source.parent / "made", *options)
    assert done.code == 2 and said in done.sentence and not (source.parent / "made").exists(), done.sentence


@pytest.mark.slow
def test_the_rounding_sets_method_and_tokens(source: Path) -> None:
    done = edgeinfer("convert", source, source.parent / "made", "--calibrate", "--rounding", "importance")
    assert done.code == 0 and "matrices' outputs is" in done.out, done.sentence
    record = json.loads((source.parent / "made" / CALIBRATION_FILE).read_text())
    assert (record["method"], record["tokens"]) == ("importance", TOKENS[IMPORTANCE])


@pytest.mark.slow
def test_the_comparison_has_other_types(source: Path) -> None:
    done = edgeinfer("convert", source, source.parent / "made", "--calibrate", source.parent / "text.txt",
                     "--compare", source.parent / "text.txt", "--compare-types", "q5,tableq3,f32", "--json")
    rows = {row["method"]: row for row in json.loads(done.out)["compared"]}
    assert list(rows) == ["f16", "plain", "importance", "q5, gptq", "tableq3, gptq", "f32", "gptq"]
    losses = [rows[name]["kld_mean"] for name in ("f32", "q5, gptq", "gptq", "tableq3, gptq")]
    assert losses == sorted(losses) and losses[0] < 1e-6 < losses[1]
    assert rows["q5, gptq"]["bits"] > rows["gptq"]["bits"] > rows["tableq3, gptq"]["bits"]


@pytest.mark.slow
def test_types_by_size_are_compared_with_the_same_types(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Effects of errors choose other types than errors alone, which plain rounding would go by."""
    def types(path: Path) -> dict[str, Any]:
        with Bundle.open(path) as bundle:
            return {one.name: one.type for one in bundle.header.tensors}

    def compare(_source: Path, _text: Path, own: tuple[str, Path], others: Any, _progress: Any) -> list[Any]:
        for method, make in others:
            make(source.parent / method)
            found[method] = types(source.parent / method)
        found[own[0]] = types(own[1])
        return []

    found: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr(effects, "MOST_TOKENS", effects.LEAST_TOKENS)
    text = source.parent / "text.txt"
    assert edgeinfer("convert", source, source.parent / "made", "--calibrate", text, "--bits", 5.5, "--compare", text
                     ).code == 0
    assert [*found] == ["plain", "importance", "gptq"] and found["plain"] == found["importance"] == found["gptq"]


@pytest.mark.parametrize("options, said", [
    (("--compare-types", "q5"), "--compare-types q5 needs a text to measure on; also give --compare TEXT"),
    (("--compare-types", "q5,q3", "--compare", "text.txt"), r"--compare-types is 'q3'; choose one of q4, int8"),
    (("--compare-types", "", "--compare", "text.txt"), "--compare-types is ''; choose one of q4, int8"),
])
def test_types_that_cannot_be_compared_are_refused(source: Path, options: tuple[str, ...], said: str) -> None:
    done = edgeinfer("convert", source, source.parent / "made", *options)
    assert done.code == 2 and said in done.sentence and not (source.parent / "made").exists(), done.sentence


@pytest.mark.parametrize("more", [(), ("--outliers", "auto")])
def test_the_option_that_rounds_nothing_is_named(source: Path, more: tuple[str, ...]) -> None:
    done = edgeinfer("convert", source, source.parent / "made", "--weights", "f16", "--imatrix",
                     DATA / "fables-draft-imatrix.gguf", *more)
    assert done.code == 2 and "--imatrix has nothing to round: all" in done.sentence, done.sentence


@pytest.mark.slow
@pytest.mark.parametrize("module, name", [
    (inputs, "_add"), (effects, "_add_noise"), (bit_budget, "_errors"), (packing, "rounded"),
    (comparison, "evaluate"),
], ids=lambda one: getattr(one, "__name__", one))
def test_an_interruption_in_any_phase_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch, module: object,
                                                     name: str) -> None:
    """Only statistics that are complete stay, and a bundle that is complete before it is compared."""
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    text, kept = source.parent / "text.txt", source.parent / "cache" / "calibration"
    done = edgeinfer("convert", source, source.parent / "made", "--bits", 5, "--calibrate", text, "--compare", text)
    assert done.code == 1 and done.err.endswith("edgeinfer: Interrupted.\n"), done.err
    assert (source.parent / "made").exists() is (name == "evaluate")
    assert not [path.name for folder in (source.parent, kept) for path in folder.iterdir() if path.name.startswith(".")]
    assert len(list(kept.iterdir())) == (name != "_add")
