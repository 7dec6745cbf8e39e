"""Factors that move from inputs into matrices: exact in floats, found where a few channels are far larger."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.converters import CALIBRATION_FILE, Calibration, conversion, convert, open_checkpoint
from edgeinfer.converters.scaling import Scaling, expected_error, find_scaling, foldable
from edgeinfer.graph import build_graph, requested_types
from edgeinfer.models.calibrated import by_text, calibration_text
from edgeinfer.quant import InputStatistics, WeightType
from tests.helpers.checkpoints import SENTENCES, make_checkpoint, read_tensors, save_tensors
from tests.helpers.sessions import logits_of, running, tokens

RNG = np.random.default_rng(0)


def folded(source: Path) -> Scaling:
    """Random factors wherever they can be folded."""
    with open_checkpoint(source) as checkpoint:
        graph = build_graph(checkpoint.config, requested_types("f32"))
    columns, rows = {}, {}
    for channels in foldable(graph, lambda weight: True):
        s = np.exp2(RNG.uniform(-3, 3, channels.readers[0].shape[1])).astype(np.float32)
        columns |= {weight.name: s for weight in channels.readers}
        for weight, places in channels.makers:
            rows[weight.name] = np.ones(weight.shape[0], np.float32)
            rows[weight.name][places] = s
    return Scaling(columns, rows)


@pytest.mark.parametrize("model_type, settings, matrices", [
    ("llama", {}, {"qkv", "gate_up", "down"}), ("gpt_neox", {"rotary_pct": 0.5, "hidden_act": "gelu"}, {"qkv", "up"})])
def test_folding_is_exact_in_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str,
                                    settings: dict[str, object], matrices: set[str]) -> None:
    source = make_checkpoint(tmp_path / "hf", model_type, **settings)
    scaling = folded(source)
    assert {name.rpartition(".")[2] for name in scaling.columns if name.startswith("layers.1.")} >= matrices
    convert(source, tmp_path / "plain", weights="f32")
    monkeypatch.setattr(conversion, "check_something_is_rounded", lambda *_: None)
    monkeypatch.setattr(conversion, "find_scaling", lambda *_: scaling)
    calibration = Calibration("gptq", "none", "", 0, lambda weight: None)
    convert(source, tmp_path / "folded", weights="f32", calibration=lambda _: calibration)
    assert (tmp_path / "plain/weights.bin").read_bytes() != (tmp_path / "folded/weights.bin").read_bytes()
    found = []
    for name in ("plain", "folded"):
        with running(tmp_path / name, kv="f32") as opened:
            found.append(logits_of(opened, tokens(40, vocab_size=opened.model.vocab_size)).copy())
    assert np.abs(found[1] - found[0]).max() <= 1e-4 * np.abs(found[0]).max()


def test_outliers_are_found_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 60), encoding="utf-8")
    source = make_checkpoint(tmp_path / "hf")
    tensors = read_tensors(source)
    tensors["model.layers.1.input_layernorm.weight"][[3, 20]] *= 100
    for name in "qkv":
        tensors[f"model.layers.1.self_attn.{name}_proj.weight"][:, [3, 20]] /= 100
    save_tensors(source, tensors)
    text = calibration_text(source, tmp_path / "text.txt", 2048)
    convert(source, tmp_path / "m", calibration=by_text(source, text.stream, lambda *_: None))
    assert json.loads((tmp_path / "m" / CALIBRATION_FILE).read_text())["scaled"] == ["layers.1.qkv"]


def test_weights_that_keep_their_codes_have_no_factors(tmp_path: Path) -> None:
    with open_checkpoint(make_checkpoint(tmp_path / "hf")) as checkpoint:
        graph = build_graph(checkpoint.config, requested_types("q4"))
    huge = np.ones(48, np.float32)
    huge[5] = 1e4
    outlier = [InputStatistics(1, huge, np.sqrt(huge))]
    assert find_scaling(graph, lambda weight: False, lambda weight: outlier, lambda weight: iter(())) is None

    def read(weight):  # type: ignore[no-untyped-def]
        yield RNG.standard_normal(weight.shape).astype(np.float32)

    def of(weight):  # type: ignore[no-untyped-def]
        return outlier if weight.shape[1] == 48 else None

    found = find_scaling(graph, lambda weight: True, of, read)
    assert found is not None and found.columns["layers.0.qkv"][5] == found.columns["layers.0.qkv"].max()
    assert (found.rows["layers.0.attention_norm"] == found.columns["layers.0.qkv"]).all()
    divided = found.of(of)
    (one,) = divided(next(weight for weight in graph.weights if weight.name == "layers.0.qkv"))  # type: ignore[misc]
    assert one.mean_square.max() / one.mean_square.min() < 1e4


def test_the_expected_error_is_that_of_rounding() -> None:
    w = RNG.standard_normal((200, 64)).astype(np.float32)
    squares = np.square(RNG.uniform(0.1, 2, 64)).astype(np.float32)
    stored = WeightType("q4", 32)
    steps = np.abs(w.reshape(200, 2, 32)).max(axis=2) * 2 / 15
    rounded = np.rint(w.reshape(200, 2, 32) / steps[..., None]) * steps[..., None]
    error = float((np.square(w - rounded.reshape(w.shape)) * squares).sum())
    assert 0.8 < expected_error(w, squares, stored) / error < 1.4
    assert expected_error(w, squares, WeightType("f16")) == 0
