"""Quantised checkpoints become bundles: codes are kept, and the weights are those that independent code packed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert, open_checkpoint
from edgeinfer.errors import CheckpointError, UnsupportedModelError, UsageError
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.models import resolve
from edgeinfer.models.describe import describe
from edgeinfer.models.list import list_models
from tests.helpers.bundles import weights_of
from tests.helpers.checkpoints import make_checkpoint, refused, save_tensors
from tests.helpers.command_line import edgeinfer
from tests.helpers.packers import (
    FORMS,
    Raw,
    bf16,
    f16,
    f32,
    gptq,
    make_packed,
    mlx,
    mxfp4,
    raw_of,
    write_config,
    write_raw,
)
from tests.helpers.sessions import logits_of, session

EXACT = {"gptq": "q4", "gptq v2": "q4", "pack-quantized": "q4", "int-quantized": "int8", "mlx": "q4m",
         "mlx 2 bits": "q4m", "mlx 3 bits": "q4m", "mlx 5 bits": "q5m", "mlx mxfp4": "mxfp4",
         "mxfp4-pack-quantized": "mxfp4", "autoround gptq": "q4",
         "bitnet": "q2", "bitnet auto": "q2", "bitnet online": "q2",
         "mlx nvfp4": "f16", "mlx mxfp8": "f16", "nvfp4-pack-quantized": "f16"}
WITH_ZEROS = ("gptq asymmetric", "awq", "pack-quantized asymmetric", "autoround awq")
ROUNDED = ("float-quantized", "fp8", "mlx 8 bits", "mlx 6 bits")
PROMPT = [5, 17, 80, 3, 42, 61, 12, 9, 200, 31]


def expected(tensors: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """The bundle's weights from those of the checkpoint: fused and interleaved, nothing else."""
    out: dict[str, np.ndarray] = {}
    with Bundle.open(path) as bundle:
        for weight in build_graph(bundle.config, expected_types(bundle.types)).weights:
            parts = [tensors[source.name] for source in weight.sources]
            if weight.combine != "interleave16":
                out[weight.name] = np.concatenate(parts)
                continue
            rows = np.zeros(weight.shape, np.float32).reshape(-1, len(parts), 16, weight.shape[1])
            for i, part in enumerate(parts):
                padded = np.zeros((rows.shape[0] * 16, part.shape[1]), np.float32)
                padded[: len(part)] = part
                rows[:, i] = padded.reshape(-1, 16, part.shape[1])
            out[weight.name] = rows.reshape(weight.shape)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_that_were_packed(tmp_path: Path, form: str) -> None:
    tensors = make_packed(tmp_path / "hf", form)
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        for name, want in tensors.items():
            rows = checkpoint.read_rows(name, 3, len(want) - 2) if want.ndim == 2 else None
            found = checkpoint.read(name, [0], want.size).reshape(want.shape)
            assert np.array_equal(found, want), name
            assert rows is None or np.array_equal(rows, want[3:-2])
        down = "model.layers.1.mlp.down_proj.weight"  # columns, as neurons are read
        columns = checkpoint.read(down, [5 + 96 * row for row in range(2, 30)], 40)
        assert np.array_equal(columns, tensors[down][2:30, 5:45])


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("form", EXACT)
def test_codes_are_kept(tmp_path: Path, form: str) -> None:
    tensors = make_packed(tmp_path / "hf", form)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.rounded == () and report.requantised == report.inexact == ""
    types = {tensor.name: tensor.dtype for tensor in report.tensors}
    assert types["layers.0.qkv"] == types["layers.1.down"] == EXACT[form]
    assert types["embed"] == types["head"] == (EXACT[form] if form.startswith("mlx") else "f16")
    found = weights_of(tmp_path / "out")
    for name, want in expected(tensors, tmp_path / "out").items():
        assert np.array_equal(found[name], want), name


@pytest.mark.parametrize("form", ROUNDED)
def test_eight_bits_without_a_type_of_ours_are_rounded_to_f16(tmp_path: Path, form: str) -> None:
    tensors = make_packed(tmp_path / "hf", form)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert "are stored as f16" in report.inexact and report.requantised == ""
    found = weights_of(tmp_path / "out")
    for name, want in expected(tensors, tmp_path / "out").items():
        assert (np.abs(found[name] - want) <= np.maximum(4.9e-4 * np.abs(want), 3e-8)).all(), name
    small = convert(tmp_path / "hf", tmp_path / "small", weights="int8")
    assert "were requantised" in small.requantised and small.inexact == ""


@pytest.mark.parametrize("form", WITH_ZEROS)
def test_zero_points_become_minima_rounded_to_fp16(tmp_path: Path, form: str) -> None:
    tensors = make_packed(tmp_path / "hf", form)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert "kept their codes" in report.inexact and report.requantised == ""
    assert {tensor.dtype for tensor in report.tensors} == {"q4m", "f16", "f32"}
    found = weights_of(tmp_path / "out")
    for name, want in expected(tensors, tmp_path / "out").items():
        # the product of a zero point, up to 16, and a scale, up to 0.02
        assert np.abs(found[name] - want).max() <= 2**-11 * 16 * 0.02, name
        assert np.square(found[name] - want).sum() <= 1.2e-7 * np.square(want).sum(), name
    report = convert(tmp_path / "hf", tmp_path / "anew", weights="q4")
    assert "were requantised. The file's types typically lose" in report.requantised
    assert "6.4e-03" in report.requantised
    found = weights_of(tmp_path / "anew")
    for name, want in expected(tensors, tmp_path / "anew").items():
        assert np.square(found[name] - want).sum() < 0.02 * np.square(want).sum(), name


@pytest.mark.slow
def test_a_scale_and_a_minimum_for_64_and_128_columns(tmp_path: Path) -> None:
    for group in (64, 128):
        source, out = tmp_path / f"hf{group}", tmp_path / f"out{group}"
        tensors = make_packed(source, "mlx", options={"group": group}, hidden_size=256, intermediate_size=384)
        write_config(source, quantization={"group_size": group, "bits": 4})
        assert convert(source, out).rounded == ()
        with Bundle.open(out) as bundle:
            assert {stored.group_size for stored in bundle.types.values() if stored.dtype == "q4m"} == {group}
        found = weights_of(out)
        assert all(np.array_equal(found[name], want) for name, want in expected(tensors, out).items())
        with session(out) as opened:
            assert np.isfinite(logits_of(opened, PROMPT)).all()


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("form", [
    pytest.param(form, marks=pytest.mark.slow) if EXACT.get(form) in ("q2", "q5m", "mxfp4") else form
    for form in (*EXACT, *WITH_ZEROS, *ROUNDED)])
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, form: str) -> None:
    tensors = make_packed(tmp_path / "hf", form)
    convert(tmp_path / "hf", tmp_path / "out")
    make_checkpoint(tmp_path / "plain", hidden_size=64, intermediate_size=96, vocab_size=304)
    save_tensors(tmp_path / "plain", tensors)
    convert(tmp_path / "plain", tmp_path / "f32", weights="f32")
    logits = []
    for path in ("out", "f32"):
        with session(tmp_path / path, kv="f32") as opened:
            logits.append(logits_of(opened, PROMPT))
    largest = np.abs(logits[1]).max()
    # activations of int8 products are rounded to 7 bits in both directions; with f16 weights they stay f32
    near = 1e-3 if form in ROUNDED else 0.05 if form == "bitnet online" else 0.03  # int8 of that model is 0.027 away
    assert np.abs(logits[0] - logits[1]).max() <= near * largest


@pytest.mark.parametrize("group", [64, 128])
def test_large_groups_keep_their_codes_in_small_ones(tmp_path: Path, group: int) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True}
    tensors = make_packed(tmp_path / "hf", "gptq", options={"group": group}, hidden_size=256, intermediate_size=384)
    write_config(tmp_path / "hf", quantization_config=config)
    assert convert(tmp_path / "hf", tmp_path / "own").rounded == ()
    with Bundle.open(tmp_path / "own") as bundle:
        assert bundle.types["layers.0.down"].group_size == group
    report = convert(tmp_path / "hf", tmp_path / "small", weights="q4", embedding="f32", head="f32")
    assert report.rounded == ()
    for path in ("own", "small"):
        found = weights_of(tmp_path / path)
        for name, want in expected(tensors, tmp_path / path).items():
            assert np.array_equal(found[name], want), name


def test_rows_that_are_groups(tmp_path: Path) -> None:
    tensors = make_packed(tmp_path / "hf", "gptq", options={"group": 96})  # of 64 and of 96 columns
    write_config(tmp_path / "hf", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": -1})
    assert convert(tmp_path / "hf", tmp_path / "out").rounded == ()
    found = weights_of(tmp_path / "out")
    assert all(np.array_equal(found[name], want) for name, want in expected(tensors, tmp_path / "out").items())


def test_columns_in_groups_that_are_not_full(tmp_path: Path) -> None:
    """As no program writes them; full ones are taken as they are (models/test_act_order.py)."""
    order = {columns: np.random.default_rng(7).integers(0, columns // 32, columns) for columns in (64, 96)}

    def alter(module: str, parts: dict[str, Raw]) -> None:
        columns = 96 if "down" in module else 64
        packed, weights[module] = gptq(np.random.default_rng(3), (64 if "down" in module else rows_of(module), columns),
                                       order=order[columns])
        parts |= packed

    def rows_of(module: str) -> int:
        return 32 if module.endswith(("k_proj", "v_proj")) else 64 if "self_attn" in module else 96

    weights: dict[str, np.ndarray] = {}
    make_packed(tmp_path / "hf", "gptq", alter=alter)
    why = refused(tmp_path / "hf", UnsupportedModelError)
    assert "14 of GPTQ int4 g32 act-order" in why and "edgeinfer run SOURCE --weights q4" in why
    (listed,) = list_models([tmp_path], stores=False)
    assert (listed.runs, listed.remedy) == (False, "--weights") and listed.planned_bytes
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        for module, want in weights.items():
            assert np.array_equal(checkpoint.read_rows(f"{module}.weight", 0, len(want)), want)
    assert convert(tmp_path / "hf", tmp_path / "out", weights="f32").rounded == ()


def test_zero_points_of_8_where_they_should_be_less_one(tmp_path: Path) -> None:
    tensors = make_packed(tmp_path / "hf", "gptq v2")
    write_config(tmp_path / "hf", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        name = "model.layers.0.mlp.up_proj.weight"
        assert np.array_equal(checkpoint.read_rows(name, 0, 96), tensors[name])


def test_codes_of_minus_128_and_scales_beyond_fp16_are_told(tmp_path: Path) -> None:
    tensors = make_packed(tmp_path / "hf", "int-quantized", options={"least": -128})
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert "kept their codes" in report.inexact and report.worst and 0 < report.worst.relative_error < 1e-5
    found = weights_of(tmp_path / "out")
    for name, want in expected(tensors, tmp_path / "out").items():
        assert (np.abs(found[name] - want) <= np.abs(want) / 127).all(), name

    def odd(module: str, parts: dict[str, Raw]) -> None:
        _, shape, content = parts[".weight_scale"]
        parts[".weight_scale"] = f32(np.frombuffer(content, "<f4").reshape(shape) * np.float32(1.0003))

    make_packed(tmp_path / "odd", "int-quantized", alter=odd)
    report = convert(tmp_path / "odd", tmp_path / "odd-out")
    assert report.worst and 0 < report.worst.relative_error < 2.4e-7


@pytest.mark.parametrize(("factor", "said"), [(1e8, "has a scale of .*too large for fp16; convert with --weights f32"),
                                              (1e-7, "has scales that are too small for fp16")])
def test_scales_that_fp16_cannot_have(tmp_path: Path, factor: float, said: str) -> None:
    def alter(module: str, parts: dict[str, Raw]) -> None:
        _, shape, content = parts[".weight_scale"]
        parts[".weight_scale"] = f32(np.frombuffer(content, "<f4").reshape(shape) * np.float32(factor))

    make_packed(tmp_path / "hf", "int-quantized", alter=alter)
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "hf", tmp_path / "out")
    assert convert(tmp_path / "hf", tmp_path / "out", weights="f32").rounded == ()


def test_modules_that_stay_floats_and_what_is_no_weight(tmp_path: Path) -> None:
    tensors = make_packed(tmp_path / "hf", "pack-quantized")
    rng = np.random.default_rng(5)
    raw = raw_of(tmp_path / "hf")
    for name in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        values = (rng.standard_normal(tensors[f"{name}.weight"].shape) / 10).astype(np.float32)
        raw = {key: part for key, part in raw.items() if not key.startswith(f"{name}.")}
        raw[f"{name}.weight"] = bf16(values)
    raw["model.layers.0.self_attn.k_scale"] = f32(np.ones(1))
    raw["model.layers.0.self_attn.o_proj.activation_scale"] = f32(np.ones(1))  # as Ministral 3's FP8 files have it
    raw["model.layers.0.self_attn.q_proj.bias"] = f16(np.zeros(64))  # which some programs write for modules without
    write_raw(tmp_path / "hf" / "model.safetensors", raw)
    report = convert(tmp_path / "hf", tmp_path / "out")
    types = {tensor.name: (tensor.dtype, tensor.exact) for tensor in report.tensors}
    assert types["layers.0.qkv.2"][0] == "f16" and types["layers.1.down"][0] == "f16"
    assert types["layers.0.o"] == types["layers.0.qkv.0"] == types["layers.1.qkv"] == ("q4", True)
    assert report.remarks == ("2 scales of activations, K or V are left out: edgeinfer computes its own, by group and "
                              "token.",)


def test_parts_in_several_files(tmp_path: Path) -> None:
    tensors = make_packed(tmp_path / "hf", "awq")
    raw = raw_of(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    index = {}
    for i in range(3):
        part = {name: raw[name] for name in sorted(raw)[i::3]}
        write_raw(tmp_path / "hf" / f"model-{i}.safetensors", part)
        index |= dict.fromkeys(part, f"model-{i}.safetensors")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        for name, want in tensors.items():
            assert np.array_equal(checkpoint.read(name, [0], want.size).reshape(want.shape), want)


def test_stacked_matrices_of_mxfp4(tmp_path: Path) -> None:
    from edgeinfer.converters.checkpoint.safetensors_file import SafetensorsFile
    from edgeinfer.converters.quantized.config import take_scheme
    from edgeinfer.converters.quantized.gather import gathered

    for shape in ((10, 64), (3, 5, 96)):
        parts, want = mxfp4(np.random.default_rng(1), shape)
        write_raw(tmp_path / "m.safetensors", {f"experts.down_proj{end}": part for end, part in parts.items()})
        file = SafetensorsFile(tmp_path / "m.safetensors")
        _, scheme = take_scheme({"quantization_config": {"quant_method": "mxfp4"}})
        assert scheme
        every, packed, _ = gathered(dict.fromkeys(file.tensors, file), scheme)
        found = every["experts.down_proj"].read("experts.down_proj", [0], want.size)
        assert np.array_equal(found.reshape(shape), want) and packed["experts.down_proj"].kind.name == "MXFP4 e2m1 g32"
        assert np.array_equal(packed["experts.down_proj"].block(2, 9).values(), want.reshape(-1, shape[-1])[2:9])
        file.close()


def test_mlx_with_modules_of_their_own(tmp_path: Path) -> None:
    own = {"model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 8}}
    weights: dict[str, np.ndarray] = {}

    def alter(module: str, parts: dict[str, Raw]) -> None:
        if module in own:
            packed, weights[module] = mlx(np.random.default_rng(9), (96, 64), 8, 64, bf16)
            parts |= packed

    make_packed(tmp_path / "hf", "mlx", alter=alter)
    write_config(tmp_path / "hf", quantization={"group_size": 32, "bits": 4, **own, "lm_head": True})
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        found = checkpoint.read_rows("model.layers.0.mlp.up_proj.weight", 0, 96)
    assert np.array_equal(found, weights["model.layers.0.mlp.up_proj"])


@pytest.mark.parametrize("form", ["gptq", "int-quantized", "fp8", "awq"])
def test_the_plan_is_that_of_the_bundle(tmp_path: Path, form: str) -> None:
    make_packed(tmp_path / "hf", form)
    convert(tmp_path / "hf", tmp_path / "out")
    plans = [edgeinfer("plan", str(tmp_path / name), "--json", "--ctx", "64").json for name in ("hf", "out")]
    for key in ("total_bytes", "weights", "group_size", "parameters"):
        assert plans[0][key] == plans[1][key], key
    assert plans[0]["file_types"]
    assert describe(tmp_path / "hf").file_note.startswith("The file holds")
    (tmp_path / "hf" / "model.safetensors").unlink()  # the config alone says what will be
    alone = edgeinfer("plan", str(tmp_path / "hf" / "config.json"), "--json", "--ctx", "64").json
    assert alone["weights"] == plans[1]["weights"]


def test_run_converts_once_as_it_is(tmp_path: Path) -> None:
    make_packed(tmp_path / "hf", "gptq")
    path = resolve(tmp_path / "hf")
    assert path == resolve(tmp_path / "hf")
    with Bundle.open(path) as bundle:
        assert bundle.types["layers.0.qkv"].dtype == "q4" and bundle.types["embed"].dtype == "f16"
    make_packed(tmp_path / "small", "awq", options={"group": 16})
    write_config(tmp_path / "small", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 16})
    with pytest.raises(UnsupportedModelError, match=r"14 of AWQ uint4 g16.*--weights q4"):
        resolve(tmp_path / "small")
    assert describe(tmp_path / "small").file_says.startswith("not all of it can be taken")


def test_embedding_and_head_may_be_quantised_alone(tmp_path: Path) -> None:
    make_packed(tmp_path / "hf", "gptq")
    report = convert(tmp_path / "hf", tmp_path / "out", embedding="int8", head="f32")
    types = {tensor.name: tensor.dtype for tensor in report.tensors}
    assert (types["embed"], types["head"], types["layers.0.o"]) == ("int8", "f32", "q4")
    with pytest.raises(UsageError, match="A quantised checkpoint is taken as it is; for --group-size"):
        convert(tmp_path / "hf", tmp_path / "other", group_size=64)
    convert(tmp_path / "hf", tmp_path / "neuron", weights="q4", ffn_layout="neuron")
    with Bundle.open(tmp_path / "neuron") as bundle:
        assert bundle.types["layers.0.ffn"].layout == "neuron"
