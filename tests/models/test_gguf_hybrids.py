"""GGUF files of models with recurrent layers have the weights and the config of the checkpoint, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import DRAFT_HEAD_FILE, Bundle, own_weights, read_draft_head
from edgeinfer.bundle.arrays import open_arrays
from edgeinfer.converters import convert
from edgeinfer.errors import EdgeInferError
from edgeinfer.graph import ORDER, build_graph, read_config, requested_types
from edgeinfer.models.describe import describe
from edgeinfer.quant import layouts, packed
from tests.golden_hybrids import CASES
from tests.helpers import golden_cases
from tests.helpers.bundles import tensor_bytes, weights_of
from tests.helpers.draft_heads import with_head
from tests.helpers.gguf_hybrids import ARCHITECTURES, architecture, metadata, tensors_of
from tests.helpers.sessions import logits_of, session
from tests.models.test_gguf_families import write
from tests.models.test_packed_hybrids import sized

UNSAID = {  # what files cannot say, as llama.cpp has it
    "qwen3-5-equal-heads": {"attention_bias": False}, "granitemoehybrid-experts": {
        "position_embedding_type": "nope", "time_step_limit": None, "attention_bias": False},
    "falcon-h1-gate-first": {"time_step_limit": None}, "falcon-h1-norm": {
        "mamba_norm_before_gate": False, "attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False,
        "projectors_bias": False},
    "nemotron-h-bias": {"mlp_bias": False}, "mamba2-bias": {"time_step_limit": None},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
}
NAMES = [name for name, config in CASES.items()
         if config["model_type"] in ARCHITECTURES and name not in ("qwen3-next-dense-layer", "kimi-linear-groups")]
"""Files of Qwen3-Next cannot say that a layer has no experts, those of Kimi that delta rules have heads of their own
number."""
FOLDED = ("falcon-h1", "falcon-h1-norm")
"""Cases with multipliers, which the converter folds into the weights in an order of its own."""


def written(name: str, path: Path, drafts: int = 0, head: bool = False, **more: Any) -> golden_cases.GoldenCase:
    """Write a case, without what files cannot say, as a checkpoint and as a GGUF file; perhaps with a head that drafts,
    or a part of one."""
    case = with_head(golden_cases.load(name)) if head else golden_cases.load(name)
    config = {**case.config, **UNSAID.get(name, {})}
    biases = ("self_attn.", "feed_forward.", "in_proj.", "out_proj.", "up_proj.", "down_proj.")
    dropped = {tensor for tensor in case.tensors if name in UNSAID and tensor.endswith(".bias")
               and any(part in tensor for part in biases)}
    if name == "nemotron-h-bias":
        dropped = {tensor for tensor in dropped if "up_proj" in tensor or "down_proj" in tensor}
    if name == "mamba2-bias":
        dropped = set()
    if name == "granitemoehybrid-experts":
        dropped = {tensor for tensor in dropped if "self_attn" in tensor}
    case = case._replace(config=config, tensors={t: x for t, x in case.tensors.items() if t not in dropped})
    c = read_config(case.config)
    arch = architecture(case, c)
    fields = metadata(case, c, arch, drafts) | {f"{arch}.{key}": value for key, value in more.items()}
    tensors = tensors_of(case, c, arch)
    for i in range(c.num_hidden_layers, c.num_hidden_layers + drafts * (not head)):
        tensors |= {f"blk.{i}.nextn.enorm.weight": np.ones(4, np.float32), f"blk.{i}.attn_q.weight": np.ones((4, 4))}
    if name in FOLDED:
        tensors = folded(tensors, config)
    write(path / "m.gguf", fields, tensors, arch)
    golden_cases.write_checkpoint(case, path / "hf")
    return case


def folded(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Multiply as FalconH1Model.modify_tensors does."""
    inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    widths = (inner, inner, state, state, config["mamba_n_heads"])
    rows = np.repeat(config["ssm_multipliers"], widths).astype(np.float32)[:, None]
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    by: dict[str, Any] = {
        "ssm_in.weight": rows * config["ssm_in_multiplier"], "ssm_out.weight": config["ssm_out_multiplier"],
        "attn_q.weight": into, "attn_k.weight": into * config["key_multiplier"], "attn_v.weight": into,
        "attn_output.weight": config["attention_out_multiplier"], "ffn_gate.weight": gate, "ffn_down.weight": down,
        "token_embd.weight": config["embedding_multiplier"], "output.weight": config["lm_head_multiplier"]}
    return {name: x * next((factor for end, factor in by.items() if name.endswith(end)), 1)
            for name, x in tensors.items()}


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_the_checkpoint(name: str, tmp_path: Path) -> None:
    """The weights are equal bit for bit; multipliers that the converter folded differ by their rounding."""
    written(name, tmp_path)
    convert(tmp_path / "hf", tmp_path / "checkpoint", weights="f32")
    convert(tmp_path / "m.gguf", tmp_path / "file")
    with Bundle.open(tmp_path / "checkpoint") as one, Bundle.open(tmp_path / "file") as other:
        ids: dict[str, Any] = {"bos_token_id": None, "eos_token_ids": ()}
        wanted, found = (replace(bundle.header.config, **ids) for bundle in (one, other))
    if name in FOLDED:
        wanted = replace(wanted, multipliers=(), embedding_scale=1.0, logits_scale=1.0)
    assert found == wanted
    expected, values = weights_of(tmp_path / "checkpoint"), weights_of(tmp_path / "file")
    assert expected.keys() == values.keys()
    for weight, array in expected.items():
        if name not in FOLDED:
            assert values[weight].tobytes() == array.tobytes(), weight
        elif weight not in ("embed", "norm", "head"):  # whose multipliers the checkpoint's bundle has elsewhere
            assert np.allclose(values[weight], array, rtol=5e-7, atol=0), weight
    assert describe(tmp_path / "m.gguf").weight_bytes == describe(tmp_path / "file").weight_bytes


def test_blocks_that_draft_are_left_out(tmp_path: Path) -> None:
    """Multi-token prediction is a block after the last layer, and the file counts it among them."""
    written("qwen3-5", tmp_path, drafts=1)
    convert(tmp_path / "hf", tmp_path / "checkpoint", weights="f32")
    report = convert(tmp_path / "m.gguf", tmp_path / "file")
    assert any("2 tensors of layers that predict further tokens" in remark for remark in report.remarks)
    expected, values = weights_of(tmp_path / "checkpoint"), weights_of(tmp_path / "file")
    assert {name: array.tobytes() for name, array in expected.items()} == {
        name: array.tobytes() for name, array in values.items()}


@pytest.mark.parametrize(("name", "weights"), [("qwen3-5", 13), ("qwen3-5-moe", 17), ("qwen3-next", 17)])
def test_a_head_that_drafts_is_the_checkpoints(name: str, weights: int, tmp_path: Path) -> None:
    written(name, tmp_path, drafts=1, head=True)
    convert(tmp_path / "hf", tmp_path / "checkpoint", weights="f32")
    report = convert(tmp_path / "m.gguf", tmp_path / "file")
    assert not any("predict further tokens" in remark for remark in report.remarks)
    expected, found = (open_arrays(tmp_path / name / DRAFT_HEAD_FILE) for name in ("checkpoint", "file"))
    assert found[0]["types"] == expected[0]["types"] and len(found[1]) == weights
    assert {name: array.tobytes() for name, array in found[1].items()} == {
        name: array.tobytes() for name, array in expected[1].items()}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("kind", "inputs"), [("Q8_0", "Q8_0"), ("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")])
def test_codes_stay_where_they_are(kind: str, inputs: str, tmp_path: Path) -> None:
    """Rows of value heads are put back, and columns of the output matrix stay, with an order of its inputs.

    Q4_K_M has q, k and v of some layers in Q6_K; they are stored apart from the gates, which are fewer than 16 rows.
    """
    case = golden_cases.load("qwen3-5")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
             "linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64,
             "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25}}
    case = case._replace(config={**case.config, **sizes})
    c = read_config(case.config)
    shapes = {source.name: source.stored for weight in build_graph(c, requested_types("f32")).weights
              for source in weight.sources}
    case = case._replace(tensors={tensor: golden_cases.weights(tensor, shape) for tensor, shape in shapes.items()})
    words = dict.fromkeys(("attn_", "ffn_", "ssm_out", "ssm_alpha", "ssm_beta"), kind)
    words = {"attn_qkv": inputs, **words}
    write(tmp_path / "m.gguf", metadata(case, c, "qwen35"), tensors_of(case, c, "qwen35"), "qwen35", words)
    convert(tmp_path / "m.gguf", tmp_path / "file")
    convert(tmp_path / "m.gguf", tmp_path / "floats", weights="f32")
    with Bundle.open(tmp_path / "file") as bundle:
        types = {entry.name: entry.type for entry in bundle.header.tensors}
        order = tensor_bytes(bundle, "layers.0.mixer_out_order").view("<i4").copy()
    assert types["layers.0.mixer_out"].quantised
    parts = ["layers.0.mixer_in"] if inputs == kind else ["layers.0.mixer_in.0", "layers.0.mixer_in.1"]
    assert all(types[part].quantised for part in parts)
    assert sorted(order) == list(range(512))
    assert order[:128].tolist() == [*range(64), *range(256, 320)]
    found, wanted = unpacked(tmp_path / "file"), unpacked(tmp_path / "floats")
    for weight, values in wanted.items():
        same = np.concatenate([rows for name, rows in found.items() if name == weight or name[:-1] == weight + "."])
        same = same[:, np.argsort(order)] if weight.endswith("mixer_out") else same
        assert np.array_equal(same, values), weight
    with session(tmp_path / "file", kv="f32", ctx=64) as ours, session(tmp_path / "floats", kv="f32", ctx=64) as other:
        assert ours.graph.types["layers.0.mixer_out_order"] == ORDER
        assert ours.graph.weight_count == other.graph.weight_count
        near, exact = logits_of(ours, case.ids, 3), logits_of(other, case.ids, 3)
    assert np.abs(near - exact).max() < 0.15 * np.abs(exact).max()  # activations of 8 bits, random weights
    assert describe(tmp_path / "m.gguf").weight_bytes == describe(tmp_path / "file").weight_bytes


def test_codes_of_a_head_stay_where_they_are(tmp_path: Path) -> None:
    """Also those of its experts; the matrix of which columns are taken apart is in floats."""
    case = with_head(sized("qwen3-5-moe"))
    c = read_config(case.config)
    words = dict.fromkeys(("attn_", "_exps", "_shexp", "eh_proj"), "Q8_0")
    write(tmp_path / "m.gguf", metadata(case, c, "qwen35moe", 1), tensors_of(case, c, "qwen35moe"), "qwen35moe", words)
    convert(tmp_path / "m.gguf", tmp_path / "file")
    convert(tmp_path / "m.gguf", tmp_path / "floats", weights="f32")
    found, wanted = (heads_weights(tmp_path / name) for name in ("file", "floats"))
    with Bundle.open(tmp_path / "file") as bundle:
        head = read_draft_head(bundle)
    assert head
    quantised = {name for name in found if head.types[name].dtype == "int8"}
    assert quantised == {f"layers.4.{part}" for part in ("qkv", "o", "experts_gate_up", "experts_down",
                                                         "shared_gate_up", "shared_down")}
    for weight, values in wanted.items():
        assert np.array_equal(found[weight], values), weight


def heads_weights(path: Path) -> dict[str, np.ndarray]:
    """The matrices of a bundle's head for further tokens."""
    with Bundle.open(path) as bundle:
        head, arrays = read_draft_head(bundle), open_arrays(path / DRAFT_HEAD_FILE)[1]
        assert head
        return {weight.name: layouts.unpack_tile16(np.array(arrays[weight.name]), head.types[weight.name].dtype,
                                                   head.types[weight.name].group_size, weight.shape)
                for weight in own_weights(head) if len(weight.shape) == 2}


def unpacked(path: Path) -> dict[str, np.ndarray]:
    """Matrices and vectors of floats of a bundle."""
    out: dict[str, np.ndarray] = {}
    with Bundle.open(path) as bundle:
        for entry in bundle.header.tensors:
            if entry.type.dtype == "i32":
                continue
            raw = tensor_bytes(bundle, entry.name)
            out[entry.name] = (raw.view("<f4")[: entry.shape[0]].copy() if entry.type.layout == "plain" else
                               layouts.unpack_tile16(raw, entry.type.dtype, entry.type.group_size, entry.shape)
                               if entry.type.dtype in ("f32", "int8") else
                               packed.values(*packed.unpack(raw, entry.type, entry.shape), entry.type))
    return out


@pytest.mark.parametrize(("name", "key", "value", "message"), [
    ("qwen3-5", "ssm.time_step_rank", 7, "120 as ssm.inner_size and 7 as ssm.time_step_rank"),
    ("qwen3-5", "ssm.group_count", 4, "linear_num_value_heads is 6; it must be a multiple of linear_num_key_heads, 4"),
    ("qwen3-5", "ssm.conv_kernel", 9, "linear_conv_kernel_dim is 9; it must be a whole number from 2 to 8"),
    ("qwen3-5", "nextn_predict_layers", 4, "nextn_predict_layers is 4, .* below the 4 layers"),
    ("qwen3-5", "attention.recurrent_layers", [True, False], "attention.recurrent_layers, .* each of 4 layers"),
    ("qwen3-5", "attention.recurrent_layers", [True, True, True, True], "lacks the tensor blk.3.attn_qkv.weight"),
    ("kimi-linear", "kda.head_dim", 17, r"blk.0.attn_q.weight .* \[90, 60\], .* needs \[85, 60\]"),
    ("kimi-linear", "attention.head_count_kv", [0, 0, 0], "blk.1.attn_q.weight"),
    ("kimi-linear", "ssm.conv_kernel", 9, "linear_conv_kernel_dim is 9; it must be a whole number from 2 to 8"),
    ("lfm2", "attention.head_count_kv", [0, 2, 1, 0], "layers with attention must have the same number"),
    ("lfm2", "shortconv.l_cache", 1, "conv_L_cache is 1; it must be a whole number from 2 to 8"),
    ("granitemoehybrid", "ssm.inner_size", 97, "97 as ssm.inner_size .* 12 as ssm.time_step_rank"),
    ("granitemoehybrid", "rope.scaling.finetuned", True, "rope.scaling.finetuned is True"),
    ("nemotron-h", "ssm.group_count", 4, "mamba_n_heads is 6; it must be a multiple of mamba_n_groups, 4"),
])
def test_files_that_contradict_themselves(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    written(name, tmp_path, **{key: value})
    with pytest.raises(EdgeInferError, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(("name", "tensor", "value", "message"), [
    ("qwen3-5", "linear_attn.A_log", None, "lacks the tensor model.layers.0.linear_attn.A_log"),
    ("qwen3-5", "linear_attn.dt_bias", None, "lacks the tensor model.layers.0.linear_attn.dt_bias"),
    ("granitemoehybrid", "mamba.D", None, "lacks the tensor model.layers.0.mamba.D"),
    ("qwen3-5", "linear_attn.A_log", np.nan, "linear_attn.A_log .*nan"),
    ("qwen3-5", "linear_attn.A_log", np.inf, "linear_attn.A_log .*inf"),
    ("granitemoehybrid", "mamba.A_log", 200.0, "mamba.A_log after its steps .*inf"),
    ("granitemoehybrid", "mamba.conv1d.weight", np.nan, "mamba.conv1d.weight .*nan"),
])
def test_checkpoints_with_missing_or_infinite_values(name: str, tensor: str, value: float | None, message: str,
                                                     tmp_path: Path) -> None:
    case = golden_cases.load(name)
    full = f"model.layers.0.{tensor}"
    tensors = {key: array.copy() for key, array in case.tensors.items() if value is not None or key != full}
    if value is not None:
        tensors[full].reshape(-1)[1] = value
    golden_cases.write_checkpoint(case._replace(tensors=tensors), tmp_path / "hf")
    with pytest.raises(EdgeInferError, match=message):
        convert(tmp_path / "hf", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["qwen3-5", "nemotron-h"])
def test_other_prefixes_and_layers_that_draft(name: str, tmp_path: Path) -> None:
    """Published files of Nemotron-H say backbone, those of Qwen3.5 have tensors of multi-token prediction."""
    case = golden_cases.load(name)
    golden_cases.write_checkpoint(case, tmp_path / "hf")
    tensors = {key.replace("model.", "backbone.") if name == "nemotron-h" else key: array
               for key, array in case.tensors.items()}
    tensors["mtp.layers.0.norm.weight"] = np.ones(4, np.float16)
    golden_cases.write_checkpoint(case._replace(tensors=tensors), tmp_path / "other")
    convert(tmp_path / "hf", tmp_path / "plain")
    report = convert(tmp_path / "other", tmp_path / "same")
    assert any("1 tensors of layers that predict further tokens" in remark for remark in report.remarks)
    assert (tmp_path / "plain" / "weights.bin").read_bytes() == (tmp_path / "same" / "weights.bin").read_bytes()


@pytest.mark.parametrize("name", ["qwen3-5-wrapped", "lfm2", "granitemoehybrid", "nemotron-h"])
def test_channels_last(name: str, tmp_path: Path) -> None:
    """MLX's files: convolutions are turned, and 1 is added to norms that are stored as their difference from it."""
    case = golden_cases.load(name)
    plus = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", "q_norm.weight",
            "k_norm.weight") if name.startswith("qwen") else ("none",)
    tensors: dict[str, np.ndarray] = {}
    for key, array in case.tensors.items():
        own = key.replace("model.language_model.", "language_model.model.")
        turned = np.moveaxis(array, 2, 1) if "conv" in key and array.ndim == 3 else array.astype(np.float32)
        tensors[own] = turned.copy() if turned.ndim == 3 else turned + np.float32(own.endswith(plus))
    golden_cases.write_checkpoint(case, tmp_path / "hf")
    golden_cases.write_checkpoint(case._replace(tensors=tensors), tmp_path / "mlx")
    convert(tmp_path / "hf", tmp_path / "plain", weights="f32")
    convert(tmp_path / "mlx", tmp_path / "same", weights="f32")
    assert (tmp_path / "plain" / "weights.bin").read_bytes() == (tmp_path / "same" / "weights.bin").read_bytes()


@pytest.mark.parametrize("cuts", [(20, 40), (54, 108)])
@pytest.mark.parametrize("last", [False, True])
def test_convolutions_in_pieces_and_other_names_of_norms(cuts: tuple[int, int], last: bool, tmp_path: Path) -> None:
    """OLMo Hybrid's files: pieces are those of q, k and v, or as transformers cuts them; MLX has channels last."""
    case, tensors = golden_cases.load("olmo-hybrid"), dict[str, np.ndarray]()
    for key, array in case.tensors.items():
        own = key.replace("input_layernorm", "attention_layer_norm")
        own = own.replace("post_attention_layernorm", "feedforward_layer_norm")
        pieces = np.split(np.moveaxis(array, 2, 1) if last else array, cuts) if "conv1d" in key else [array]
        tensors |= {own.replace("conv1d", f"{part}_conv1d"): np.ascontiguousarray(piece)
                    for part, piece in zip("qkv", pieces, strict=False)}
    golden_cases.write_checkpoint(case, tmp_path / "hf")
    golden_cases.write_checkpoint(case._replace(tensors=tensors), tmp_path / "other")
    convert(tmp_path / "hf", tmp_path / "plain")
    convert(tmp_path / "other", tmp_path / "same")
    assert (tmp_path / "plain" / "weights.bin").read_bytes() == (tmp_path / "same" / "weights.bin").read_bytes()
    short = {key: array[1:] if key.endswith("2.linear_attn.k_conv1d.weight") else array
             for key, array in tensors.items()}
    golden_cases.write_checkpoint(case._replace(tensors=short), tmp_path / "short")
    with pytest.raises(EdgeInferError, match=r"k_conv1d.weight, .* have 159 rows together, .* needs 160; download"):
        convert(tmp_path / "short", tmp_path / "bundle")


def test_channels_last_with_multipliers_is_refused(tmp_path: Path) -> None:
    case = golden_cases.load("falcon-h1")
    tensors = {key: np.moveaxis(array, 2, 1).copy() if array.ndim == 3 else array
               for key, array in case.tensors.items()}
    golden_cases.write_checkpoint(case._replace(tensors=tensors), tmp_path / "mlx")
    with pytest.raises(EdgeInferError, match=r"channels last, as MLX writes them, .* multipliers"):
        convert(tmp_path / "mlx", tmp_path / "bundle")
