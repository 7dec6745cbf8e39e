"""Matrices whose columns are in an order of their own (act-order): codes are kept, inputs are put in that order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import Flavour, export
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.errors import BundleError, UnsupportedModelError
from edgeinfer.graph import ORDER, build_graph, expected_types, requested_types, supported_architectures
from edgeinfer.models.describe import describe
from edgeinfer.quality.evaluate import Stream
from edgeinfer.sparse import sparsify
from tests.helpers import reference
from tests.helpers.bundles import alter_header
from tests.helpers.checkpoints import make_checkpoint, save_tensors
from tests.helpers.command_line import edgeinfer
from tests.helpers.onnx_models import Slots, difference
from tests.helpers.packers import FORMS, Raw, compressed_config, e4m3_values, f32, gptq, i32, make_packed, write_config
from tests.helpers.sessions import logits_of, session
from tests.models.test_gguf_import import weights_of
from tests.models.test_packed import expected

PROMPT = [5, 17, 80, 3, 42, 61, 12, 9, 200, 31]
Shared = Callable[[str], str]


def inputs(module: str) -> str:
    """Return the module whose order is shared: modules of a layer with one input, as GPTQ quantises them together."""
    return re.sub(r"[qkv]_proj|gate_proj|up_proj", "in", module)


def make_ordered(path: Path, form: str = "gptq", group: int = 32, shared: Shared = inputs, **overrides: Any
                 ) -> dict[str, np.ndarray]:
    """A tiny checkpoint of which each module has a random g_idx, that of others with the same `shared` name."""
    weights: dict[str, np.ndarray] = {}
    own = FORMS[form][1]

    def alter(module: str, parts: dict[str, Raw]) -> None:
        rows, columns = parts[".scales"][1][1], parts[".g_idx"][1][0]
        seed = np.random.default_rng(list(shared(module).encode()))
        order = seed.permutation(np.arange(columns) // group)
        packed, weights[f"{module}.weight"] = gptq(np.random.default_rng(list(module.encode())), (rows, columns),
                                                   order=order, group=group, **own)
        parts |= packed

    tensors = make_packed(path, form, alter=alter, options={"group": group}, **overrides)
    write_config(path, quantization_config={**FORMS[form][2], "desc_act": True, "group_size": group},
                 torch_dtype="float16")
    return tensors | weights


def natural(path: Path) -> dict[str, np.ndarray]:
    """A bundle's weights with their columns in the order of the inputs."""
    found = weights_of(path)
    with Bundle.open(path) as bundle:
        for weight in build_graph(bundle.config, expected_types(bundle.types)).weights:
            whole = re.sub(r"qkv\.[0-9]", "qkv", weight.name)
            if weight.ordered and weight.name == whole:
                order = found.pop(weight.order_name).view("<i4")
                assert not np.array_equal(order, np.arange(len(order)))
                found[weight.name] = found[weight.name][:, np.argsort(order)]
    return found


def plain_logits(path: Path, tensors: dict[str, np.ndarray], **sizes: Any) -> np.ndarray:
    """Logits of the dequantised weights, in f32."""
    make_checkpoint(path / "plain", **sizes)
    save_tensors(path / "plain", tensors)
    convert(path / "plain", path / "f32", weights="f32")
    with session(path / "f32", kv="f32") as opened:
        return logits_of(opened, PROMPT, n_decoded=4)


def near(have: np.ndarray, want: np.ndarray) -> bool:
    """Return whether logits differ by what int8 activations cost random weights; in another order nothing would be
    alike."""
    return bool(np.linalg.norm(have - want) <= 0.15 * np.linalg.norm(want))


def test_an_order_of_columns_gives_identical_tokens(tmp_path: Path) -> None:
    """Groups in another order, with their scales: the same weights, and inputs of the same int8 values."""
    def alter(module: str, parts: dict[str, Raw]) -> None:
        groups, rows = parts[".scales"][1]
        order = np.random.default_rng(list(inputs(module).encode())).permutation(groups)
        scales = np.empty((groups, rows), np.float16)
        scales[order] = np.frombuffer(parts[".scales"][2], np.float16).reshape(groups, rows)
        parts |= {".scales": ("F16", (groups, rows), scales.tobytes()),
                  ".g_idx": i32(order[np.arange(parts[".g_idx"][1][0]) // 32])}

    sizes = {"hidden_size": 128, "intermediate_size": 224}
    make_packed(tmp_path / "plain", "gptq", **sizes)
    make_packed(tmp_path / "ordered", "gptq", alter=alter, **sizes)
    write_config(tmp_path / "ordered", quantization_config={**FORMS["gptq"][2], "desc_act": True, "group_size": 32})
    found = []
    for name in ("plain", "ordered"):
        convert(tmp_path / name, tmp_path / f"{name}.made")
        with Bundle.open(tmp_path / f"{name}.made") as bundle:
            assert ("layers.0.qkv_order" in bundle.tensors) is (name == "ordered"), sorted(bundle.tensors)
        with session(tmp_path / f"{name}.made", kv="f32") as opened:
            found.append(logits_of(opened, PROMPT, n_decoded=4).copy())
    assert (found[0].argmax(axis=-1) == found[1].argmax(axis=-1)).all()
    assert np.abs(found[0] - found[1]).max() <= 1e-4 * np.abs(found[0]).max()


@pytest.mark.parametrize(("form", "group", "stored"), [
    ("gptq", 32, "q4"), ("gptq", 128, "q4"), ("gptq asymmetric", 32, "q4m"), ("gptq 8 bits", 32, "int8"),
    pytest.param("gptq asymmetric", 64, "q4m", marks=pytest.mark.slow)])
def test_codes_are_kept_in_their_order(tmp_path: Path, form: str, group: int, stored: str) -> None:
    """The weights are those that were packed, their logits those of the dequantised model, the plan the bundle's."""
    sizes = {"hidden_size": 160, "intermediate_size": 224, "vocab_size": 304, "num_attention_heads": 10,
             "num_key_value_heads": 5}
    tensors = make_ordered(tmp_path / "hf", form, group, **sizes)
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert report.requantised == "" and (report.inexact == "" or stored == "q4m" or "-127" in report.inexact)
    types = {tensor.name: tensor.dtype for tensor in report.tensors}
    assert types["layers.0.qkv"] == types["layers.1.down"] == stored and types["layers.0.qkv_order"] == "i32"
    found = natural(tmp_path / "out")
    for name, want in expected(tensors, tmp_path / "out").items():
        if name.endswith("_order"):
            continue
        off = np.abs(found[name] - want)
        assert off.max() <= (0 if stored == "q4" else 2**-11 * 16 * 0.02 if stored == "q4m" else 0.02), name
    plans = [edgeinfer("plan", str(tmp_path / name), "--json", "--ctx", "64").json for name in ("hf", "out")]
    assert plans[0]["total_bytes"] == plans[1]["total_bytes"] and plans[0]["weights"] == plans[1]["weights"]
    (tmp_path / "hf" / "model.safetensors").unlink()  # the config alone says what will be
    assert describe(tmp_path / "hf" / "config.json").weight_bytes == describe(tmp_path / "out").weight_bytes
    want = plain_logits(tmp_path, tensors, **sizes)
    with session(tmp_path / "out", kv="f32", threads=2) as opened:
        have = logits_of(opened, PROMPT, n_decoded=4)
    assert near(have, want)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("model_type", "more"), [
    ("qwen2", {}), ("gpt_neox", {"num_key_value_heads": 4}), ("falcon", {"multi_query": False, "bias": False,
                                                                         "num_key_value_heads": 4}),
    ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}), ("starcoder2", {})])
def test_logits_of_other_forms_of_layers(tmp_path: Path, model_type: str, more: dict[str, Any],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, attention and FFN side by side with orders of their own, FFNs without a gate; kernels as their
    references.
    """
    if model_type not in supported_architectures():
        pytest.skip(f"there is no family {model_type}")
    sizes = {"model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
             "vocab_size": 304, **more}
    tensors = make_ordered(tmp_path / "hf", **sizes)
    assert convert(tmp_path / "hf", tmp_path / "out").requantised == ""
    want = plain_logits(tmp_path, tensors, **sizes)
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with session(tmp_path / "out", kv="f32") as opened:
        assert sum(instruction.kernel == "quantize" for instruction in opened.program.instructions) >= 8
        have = logits_of(opened, PROMPT, n_decoded=4)
    assert near(have, want)


@pytest.mark.parametrize(("form", "stored"), [("int-quantized", "int8"), ("float-quantized", "f16")])
def test_a_byte_for_each_weight_in_another_order(tmp_path: Path, form: str, stored: str) -> None:
    """compressed-tensors writes weight_g_idx beside these codes, too."""
    weights: dict[str, np.ndarray] = {}

    def alter(module: str, parts: dict[str, Raw]) -> None:
        (rows, columns), rng = parts[".weight"][1], np.random.default_rng(list(inputs(module).encode()))
        order = rng.permutation(np.arange(columns) // 32)
        scales = rng.uniform(1e-4, 1e-3, (rows, columns // 32)).astype(np.float16).astype(np.float32)
        raw = np.frombuffer(parts[".weight"][2], "u1").reshape(rows, columns)
        codes = raw.view("i1") if stored == "int8" else e4m3_values()[raw]
        weights[f"{module}.weight"] = codes * scales[:, order]
        parts |= {".weight_scale": f32(scales), ".weight_g_idx": i32(order)}

    tensors = make_packed(tmp_path / "hf", form, alter=alter) | weights
    config = compressed_config(form)
    config["config_groups"]["group_0"]["weights"] |= {"strategy": "group", "group_size": 32, "actorder": "group"}
    write_config(tmp_path / "hf", quantization_config=config)
    convert(tmp_path / "hf", tmp_path / "out")
    with Bundle.open(tmp_path / "out") as bundle:
        assert bundle.types["layers.0.o"].dtype == stored
        assert ("layers.0.o_order" in bundle.types) == (stored == "int8")
    found = natural(tmp_path / "out")
    for name, want in expected(tensors, tmp_path / "out").items():
        if not name.endswith("_order"):
            assert np.allclose(found[name], want, rtol=2**-11, atol=2**-25), name


def test_q_k_and_v_with_orders_of_their_own_are_multiplied_apart(tmp_path: Path) -> None:
    """k and v share one; in layer 1, q is in the order of its inputs."""
    def own(module: str) -> str:
        return module if "q_proj" in module else inputs(module)

    tensors = make_ordered(tmp_path / "hf", shared=own)
    assert convert(tmp_path / "hf", tmp_path / "out").rounded == ()
    with Bundle.open(tmp_path / "out") as bundle:
        names = {name for name in bundle.types if name.startswith("layers.0.qkv")}
    assert names == {"layers.0.qkv.0", "layers.0.qkv.0_order", "layers.0.qkv.1", "layers.0.qkv.1_order"}
    assert describe(tmp_path / "hf").weight_bytes == describe(tmp_path / "out").weight_bytes
    want = plain_logits(tmp_path, tensors, hidden_size=64, intermediate_size=96, vocab_size=304)
    with session(tmp_path / "out", kv="f32") as opened:
        assert near(logits_of(opened, PROMPT, n_decoded=4), want)


def test_what_no_input_is_put_in_order_for_is_refused_by_name(tmp_path: Path) -> None:
    moe = {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2,
               "moe_intermediate_size": 32, "norm_topk_prob": True}
    for name, said, more in [
        ("pair", r"columns of the tensors model\.layers\.0\.mlp\.gate_proj\.weight, model\.layers\.0\.mlp\.up_proj\."
                 r"weight are in 2 orders \(act-order\).* add --weights q4", {"shared": str}),
        ("experts", r"mlp\.experts\.0\.gate_proj\.weight.* \(act-order\).* add --weights q4", {**moe}),
    ]:
        make_ordered(tmp_path / name, **more)
        with pytest.raises(UnsupportedModelError, match=said):
            convert(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert "--weights q4" in describe(tmp_path / name).file_note
        assert "requantised" in convert(tmp_path / name, tmp_path / f"{name}-q4", weights="q4").requantised


@pytest.mark.parametrize("damage", [lambda order: order * 0, lambda order: order - 1, lambda order: order + 1])
def test_an_order_that_is_none_is_refused(tmp_path: Path, damage: Callable[[np.ndarray], np.ndarray]) -> None:
    """Also where the checksum is right: a kernel would read beside its input."""
    make_ordered(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    with Bundle.open(tmp_path / "out") as bundle:
        entry = bundle.tensors["layers.1.o_order"]
    path = tmp_path / "out" / "weights.bin"
    data = bytearray(path.read_bytes())
    order = np.frombuffer(data, "<i4", entry.shape[0], entry.offset)
    data[entry.offset : entry.offset + entry.nbytes] = damage(order).astype("<i4").tobytes()
    path.write_bytes(data)
    sha256 = hashlib.sha256(data[entry.offset : entry.offset + entry.nbytes]).hexdigest()
    alter_header(tmp_path / "out", lambda header: next(
        row for row in header["tensors"] if row["name"] == entry.name).update(sha256=sha256))
    said = f"the tensor {entry.name!r} does not name each of its 64 columns once; convert the model again"
    with pytest.raises(BundleError, match=said), session(tmp_path / "out"):
        pass


def test_an_order_of_a_matrix_that_is_not_quantised_is_refused(tmp_path: Path) -> None:
    """As no checkpoint makes it."""
    make_ordered(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", weights="f16")
    with Bundle.open(tmp_path / "out") as bundle:
        types, config = {**bundle.types, "layers.0.o_order": ORDER}, bundle.config
    with pytest.raises(UnsupportedModelError, match=r"quantize layers\.0\.o_order does not fit: .* is not quantised"):
        build_graph(config, expected_types(types))


def test_neurons_are_not_made_of_columns_in_another_order(tmp_path: Path) -> None:
    """Their rows would be read with the columns of others."""
    make_ordered(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    stream = Stream(tuple(range(3, 259)), (True,) * 256, 256)
    with Bundle.open(tmp_path / "out") as bundle, pytest.raises(
            UnsupportedModelError, match=r"columns of layers\.0\.down are .* --weights q4 --ffn-layout neuron"):
        sparsify(bundle, tmp_path / "sparse", stream)
    assert not (tmp_path / "sparse").exists()


def test_weights_that_are_asked_for_are_in_the_order_of_their_inputs(tmp_path: Path) -> None:
    tensors = make_ordered(tmp_path / "hf")
    assert "8 of " in convert(tmp_path / "hf", tmp_path / "q4", weights="q4").requantised
    convert(tmp_path / "hf", tmp_path / "f32", weights="f32")
    found = weights_of(tmp_path / "f32")
    for name, want in expected(tensors, tmp_path / "f32").items():
        assert np.array_equal(found[name], want), name
    with Bundle.open(tmp_path / "q4") as bundle:
        assert "i32" not in {stored.dtype for stored in bundle.types.values()}


def test_logits_in_onnx_where_activations_are_floats(tmp_path: Path) -> None:
    """Without rounded activations the oracle's logits of the dequantised weights remain."""
    tensors = make_ordered(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    flavour = Flavour(dtype="f32", ctx=32)
    with Bundle.open(tmp_path / "out") as bundle:
        export(bundle, tmp_path / "m.onnx", flavour)
        graph = build_graph(bundle.config, requested_types("f32"))
    assert difference(Slots(tmp_path / "m.onnx", flavour).chunks(PROMPT, 7), reference.forward(graph, tensors, PROMPT)
                      ) < 1e-4
