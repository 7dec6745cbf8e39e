"""Outlier columns of inputs, whose weights are stored apart in f16: found, stored, multiplied as floats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe
from edgeinfer.converters import CALIBRATION_FILE, BitBudget, Calibration, Checkpoint, convert, share_of
from edgeinfer.converters.outliers import find_outliers
from edgeinfer.errors import BundleError, UnsupportedModelError, UsageError
from edgeinfer.graph import Graph, Weight
from edgeinfer.quant import InputStatistics
from edgeinfer.sparse.ffn import ffns
from tests.helpers.bundles import alter_header, weights_of
from tests.helpers.checkpoints import make_checkpoint, read_tensors, save_tensors
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import write_gguf
from tests.helpers.sessions import logits_of, running, tokens

FAR = [3, 20]
"""Channels that norms make a hundred times as large; the columns after them are as much smaller."""


def with_outliers(path: Path, model_type: str = "llama", **settings: object) -> Path:
    """A checkpoint whose function is that of another one, which has no outliers."""
    source = make_checkpoint(path, model_type, **settings)
    tensors = read_tensors(source)
    for name, values in tensors.items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            values[FAR] *= 100
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            values[:, FAR] /= 100
    save_tensors(source, tensors)
    return source


def known(weight: Weight) -> list[InputStatistics] | None:
    """Statistics of inputs in which these channels are far."""
    if weight.kind != "matrix" or not weight.name.endswith(("qkv", "gate_up")):
        return None
    square = np.ones(weight.shape[1], np.float32)
    square[FAR] = 1e4
    return [InputStatistics(2048, square, np.sqrt(square), np.diag(square))]


def calibrated(outliers: str):  # type: ignore[no-untyped-def]
    def calibration(checkpoint: Checkpoint) -> Calibration:
        return Calibration("gptq", "none", "", 0, known, scale=False, outliers=outliers)

    return calibration


@pytest.mark.parametrize("weights", ["int8", "q4"])
@pytest.mark.parametrize("model_type, settings", [("llama", {}), ("qwen2", {"num_hidden_layers": 1})])
def test_outliers_are_floats_and_the_rest_has_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str,
                                                    model_type: str, settings: dict[str, object]) -> None:
    monkeypatch.setattr("edgeinfer.converters.outliers.MAX_FOUND", 0.05)  # of 48 columns
    source = with_outliers(tmp_path / "hf", model_type, **settings)
    convert(source, tmp_path / "f32", weights="f32")
    convert(source, tmp_path / "plain", weights=weights)
    convert(source, tmp_path / "apart", weights=weights, calibration=calibrated("auto"))
    whole, found = weights_of(tmp_path / "f32"), weights_of(tmp_path / "apart")
    with Bundle.open(tmp_path / "apart") as bundle:
        own = {name: entry.type.outliers for name, entry in bundle.tensors.items() if entry.type.outliers}
        assert own and set(own.values()) == {2} and all(name.endswith(("qkv", "gate_up")) for name in own)
        for name in own:
            columns = np.concatenate(list(bundle.stored(f"{name}_columns"))).view("<i4")
            assert columns.tolist() == FAR
            np.testing.assert_array_equal(found[f"{name}_outliers"], whole[name][:, FAR].astype(np.float16))
            assert not found[name][:, FAR].any() and found[name].any()
    record = json.loads((tmp_path / "apart" / CALIBRATION_FILE).read_text())
    assert record["outliers"] == dict.fromkeys(own, FAR)
    rows = {}
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    for name in ("f32", "plain", "apart"):
        with running(tmp_path / name, kv="f32") as opened:
            rows[name] = logits_of(opened, tokens(40, vocab_size=opened.model.vocab_size), n_decoded=4)
    worse, better = (np.abs(rows[name] - rows["f32"]).mean() for name in ("plain", "apart"))
    assert better < (0.2 if weights == "int8" else 0.8) * worse


def test_passes_of_any_size_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.converters.outliers.MAX_FOUND", 0.05)
    convert(with_outliers(tmp_path / "hf"), tmp_path / "m", calibration=calibrated("auto"))
    rows = []
    for more in ({"threads": 1}, {"threads": 2, "prefill_chunk": 5}, {"threads": 3, "recipe": Recipe(())}):
        with running(tmp_path / "m", **more) as opened:
            rows.append(logits_of(opened, tokens(40, vocab_size=opened.model.vocab_size), n_decoded=6))
    assert (rows[1] == rows[0]).all() and (rows[2] == rows[0]).all()


def graph_of(path: Path) -> Graph:
    with running(path) as opened:
        return opened.graph


def test_a_share_of_the_columns(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    convert(source, tmp_path / "plain")
    graph = graph_of(tmp_path / "plain")
    found = find_outliers(graph, lambda weight: True, known, 0.03)
    assert found.columns and all(columns.size == 1 and columns[0] in FAR for columns in found.columns.values())
    assert not find_outliers(graph, lambda weight: False, known, 0.03).columns
    even = [InputStatistics(1, np.ones(48, np.float32))]
    assert not find_outliers(graph, lambda weight: True, lambda weight: even, None).columns
    report = convert(source, tmp_path / "even", calibration=lambda checkpoint: replace(
        calibrated("auto")(checkpoint), of=lambda weight: even if known(weight) else None))
    assert "No column of an input is an outlier, so none is stored apart." in report.remarks
    assert (tmp_path / "even/weights.bin").stat().st_size == (tmp_path / "plain/weights.bin").stat().st_size


def test_what_cannot_have_outliers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.converters.outliers.MAX_FOUND", 0.05)
    source = with_outliers(tmp_path / "hf")
    convert(source, tmp_path / "m", calibration=calibrated("auto"))
    with pytest.raises(UnsupportedModelError, match=r"The outlier columns of layers.0.gate_up are stored apart, which"):
        ffns(graph_of(tmp_path / "m"))
    for asked in ("some", "0%", "11%", "-1", "nan"):
        with pytest.raises(UsageError, match=r"--outliers is .*; give auto, or a percentage of the columns above 0"):
            share_of(asked)
    assert share_of("0.5%") == share_of("0.5") == 0.005 and share_of("auto") is None
    alone = edgeinfer("convert", source, tmp_path / "other", "--outliers", "auto")
    assert alone.code == 2 and "--outliers auto needs to know the inputs of matrices" in alone.sentence
    assert not (tmp_path / "other").exists()
    pytest.importorskip("onnx")
    refused = edgeinfer("export", tmp_path / "m", tmp_path / "m.onnx")
    assert refused.code != 0 and "stored apart, which is not exported to ONNX" in refused.sentence


@pytest.mark.parametrize("budget", [{"bits": 6.0}, {"size": 55_000}])
def test_outliers_are_part_of_the_bits_and_of_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       budget: dict[str, float]) -> None:
    monkeypatch.setattr("edgeinfer.converters.outliers.MAX_FOUND", 0.05)
    source = with_outliers(tmp_path / "hf", num_hidden_layers=1)
    report = convert(source, tmp_path / "m", calibration=calibrated("auto"), chooser=BitBudget(**budget))  # type: ignore[arg-type]
    matrices = [one for one in report.tensors if not one.name.endswith(("norm", "columns"))]
    bits = 8 * sum(one.nbytes for one in matrices) / sum(one.weights for one in matrices)
    assert {one.name for one in matrices if not one.weights} == {f"layers.0.{of}_outliers" for of in ("qkv", "gate_up")}
    assert report.bits == pytest.approx(bits) and (report.chosen and report.chosen.types["layers.0.qkv"].quantised)
    if "bits" in budget:
        assert 0.97 * budget["bits"] < bits <= budget["bits"]
    else:
        assert 0.97 * budget["size"] < (tmp_path / "m/weights.bin").stat().st_size <= budget["size"]
    with running(tmp_path / "m") as opened:
        assert opened.graph.types["layers.0.qkv"].outliers == 2


def test_columns_apart_leave_no_codes_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's codes have the columns that are multiplied apart, so a matrix without them has others."""
    monkeypatch.setattr("edgeinfer.converters.outliers.MAX_FOUND", 0.05)
    source = with_outliers(tmp_path / "hf", num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    write_gguf(tmp_path / "m.gguf", source, "Q8_0")
    report = convert(tmp_path / "m.gguf", tmp_path / "m", calibration=calibrated("auto"), chooser=BitBudget(bits=8.0))
    exact = {one.name: one.exact for one in report.tensors if one.dtype == "int8"}
    assert exact["embed"] and not exact.get("layers.0.qkv", False) and not exact.get("layers.0.gate_up", False)


@pytest.mark.parametrize("value", [0, 48, -1])
def test_a_header_with_impossible_outliers_is_refused(tmp_path: Path, value: int) -> None:
    convert(make_checkpoint(tmp_path / "hf"), tmp_path / "m")

    def change(data: dict) -> None:  # type: ignore[type-arg]
        next(row for row in data["tensors"] if row["name"] == "layers.0.qkv")["outliers"] = value

    alter_header(tmp_path / "m", change)
    with pytest.raises(BundleError, match=rf"tensor 'layers.0.qkv' has {value} columns of outliers, which is out of"):
        Bundle.open(tmp_path / "m")
