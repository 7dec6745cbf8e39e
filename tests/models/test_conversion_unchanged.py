"""Parts of conversions that calibration and types by size leave alone: plain bundles, and codes of files; mixtures and
the last line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import Calibration, convert
from edgeinfer.models.file_types import mixed_types
from edgeinfer.quant import InputStatistics, layouts, quantise
from tests.helpers.checkpoints import make_checkpoint, read_tensors
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import write_gguf

KEYS = {"name", "layout", "bits", "grid", "table", "group_size", "scale", "minimum", "shape", "offset", "nbytes",
        "sha256"}
"""Fields of a tensor in the header of a bundle without any of this."""


def stored(path: Path) -> dict[str, bytes]:
    with Bundle.open(path) as bundle:
        return {name: b"".join(bytes(block) for block in bundle.stored(name)) for name in bundle.tensors}


def test_a_plain_bundle_has_the_bytes_of_plain_rounding(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    convert(source, tmp_path / "made")
    codes, scales, _ = quantise.quantise(
        read_tensors(source)["model.layers.0.mlp.down_proj.weight"].astype(np.float32), "q4", 32)
    assert stored(tmp_path / "made")["layers.0.down"] == layouts.pack_tile16(codes, "q4", 32, scales).tobytes()
    header = json.loads((tmp_path / "made" / "bundle.json").read_text())
    assert all(set(tensor) == KEYS for tensor in header["tensors"]) and "calibration" not in json.dumps(header)


def known(weight: Any) -> list[InputStatistics]:
    x = np.random.default_rng(0).standard_normal((200, weight.shape[-1])).astype(np.float32)
    x[:, 3] *= 100  # factors and columns with outliers would be worth it
    return [InputStatistics(200, np.square(x).mean(axis=0), np.abs(x).max(axis=0), x.T @ x / 200)]


@pytest.mark.parametrize("outliers", ["", "auto"])
def test_codes_of_a_file_are_the_same_beside_calibrated_matrices(tmp_path: Path, outliers: str) -> None:
    source = make_checkpoint(tmp_path / "hf", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    write_gguf(tmp_path / "m.gguf", source, {"ffn_down": "Q4_0", "token_embd": "Q8_0"})
    calibration = Calibration("gptq", "a text", "", 200, known, outliers=outliers)
    report = convert(tmp_path / "m.gguf", tmp_path / "made", weights="q4", calibration=lambda _: calibration)
    convert(tmp_path / "m.gguf", tmp_path / "kept")
    before, after = stored(tmp_path / "kept"), stored(tmp_path / "made")
    assert before["layers.0.down"] == after["layers.0.down"] and before["embed"] == after["embed"]
    assert {"layers.0.qkv", "layers.0.gate_up"} <= {one.name for one in report.calibrated}
    assert not {"layers.0.down", "embed"} & {one.name for one in report.calibrated}


@pytest.mark.parametrize("options, named", [
    ((), True), (("--weights", "tableq"), True), (("--weights", "int8"), False), (("--weights", "f16"), False),
    (("--bits", 5), False),
])
def test_the_last_line_names_what_loses_less(tmp_path: Path, options: tuple[Any, ...], named: bool) -> None:
    source = make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    done = edgeinfer("convert", source, tmp_path / "made", *options)
    last = (done.out + done.err).strip().splitlines()
    assert done.code == 0 and any("loses less" in line and "--calibrate" in line for line in last) is named, last


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_K_M"])
def test_named_mixtures_are_those_of_a_file_of_llama_quantize(tmp_path: Path, name: str,
                                                              shared_data: Callable[[str], Path]) -> None:
    file, source = shared_data(f"gguf/fables-5m-silu-{name}.gguf"), shared_data("models/fables-5m-silu")
    convert(file, tmp_path / "theirs")
    convert(source, tmp_path / "ours", chooser=lambda reading, *_: mixed_types(name.lower(), reading.checkpoint))
    types = []
    for which in ("theirs", "ours"):
        with Bundle.open(tmp_path / which) as bundle:
            types.append({one: entry.type.dtype for one, entry in bundle.tensors.items()})
    assert types[0] == types[1] and len(set(types[0].values())) > 2
