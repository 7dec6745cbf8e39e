"""GGUF files become bundles: codes and values as the gguf package reads them, configs as config.json says them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, BundleWriter
from edgeinfer.converters import convert
from edgeinfer.converters.gguf.blocks import pack_blocks, restated
from edgeinfer.converters.gguf.types import (
    BY_NAME,
    EXACT,
    INEXACT,
    OWN_ERROR,
    REQUANTISED,
    REQUANTISED_ERROR,
    REQUANTISED_KLD,
    TERNARY,
)
from edgeinfer.converters.gguf.values import dequantise
from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.models.describe import describe
from edgeinfer.quant import WeightType, layouts, packed, quantise
from tests.helpers.bundles import weights_of
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import OF_256, SIZES, permuted, random_blocks, sizes_for, write_gguf
from tests.helpers.sessions import logits_of, session

STORED = {"Q4_0": "q4g32", "Q4_1": "q4mg32", "Q5_0": "q5g32", "Q5_1": "q5mg32", "Q8_0": "int8g32", "IQ4_NL": "iq4g32",
          "MXFP4": "mxfp4g32", "F16": "f16", "F32": "f32", "BF16": "f32", "Q4_K": "q4kg32", "Q5_K": "q5kg32",
          "Q6_K": "q6g16", "IQ4_XS": "iq4kg32", "TQ1_0": "q2g128", "TQ2_0": "q2g128"}
"""Types of files that are taken as they are, and what they become."""


def expected(tensors: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """The bundle's weights from the values that the gguf package gives: rows reordered, nothing else."""
    with Bundle.open(path) as bundle:
        c = bundle.config
    out = {"embed": tensors["token_embd.weight"], "norm": tensors["output_norm.weight"]}
    if not c.tie_word_embeddings:
        out["head"] = tensors["output.weight"]
    unpermuted = c.model_type in ("llama", "mistral")
    for i in range(c.num_hidden_layers):
        of = {key.split(".", 2)[2]: value for key, value in tensors.items() if key.startswith(f"blk.{i}.")}
        for end in ("weight", "bias"):
            if f"attn_q.{end}" in of:
                q, k = of[f"attn_q.{end}"], of[f"attn_k.{end}"]
                if unpermuted:  # the other way round: heads of pairs to heads of halves
                    q, k = (values.reshape(heads, c.head_dim // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(
                        values.shape) for values, heads in ((q, c.num_attention_heads), (k, c.num_key_value_heads)))
                name = f"layers.{i}.qkv" + ("_bias" if end == "bias" else "")
                out[name] = np.concatenate([q, k, of[f"attn_v.{end}"]])
        out |= {f"layers.{i}.o": of["attn_output.weight"], f"layers.{i}.down": of["ffn_down.weight"]}
    return out


def check_weights(path: Path, tensors: dict[str, np.ndarray]) -> None:
    found = weights_of(path)
    for name, values in expected(tensors, path).items():
        assert np.array_equal(found[name], values), name
    with Bundle.open(path) as bundle:
        c = bundle.config
    for i in range(c.num_hidden_layers):
        tiles = found[f"layers.{i}.gate_up"].reshape(-1, 2, 16, c.hidden_size)
        for part, name in enumerate(("ffn_gate", "ffn_up")):
            rows = tiles[:, part].reshape(-1, c.hidden_size)
            assert np.array_equal(rows[: c.intermediate_size], tensors[f"blk.{i}.{name}.weight"])


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", STORED)
def test_every_value_is_that_of_the_file(tmp_path: Path, model_type: str, kind: str) -> None:
    if model_type not in ("llama", "qwen2") and kind not in ("Q4_0", "Q8_0", "F16", "F32", "BF16"):
        pytest.skip("tried with two architectures")
    window = {"sliding_window": 40} if model_type == "mistral" else {}
    source = make_checkpoint(tmp_path / "hf", model_type, **sizes_for(kind), **window)
    tensors = write_gguf(tmp_path / "m.gguf", source, kind)
    report = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert report.rounded == () and report.worst is None and report.requantised == ""
    check_weights(tmp_path / "out", tensors)
    convert(source, tmp_path / "hf-bundle", weights="f32")
    with Bundle.open(tmp_path / "out") as bundle, Bundle.open(tmp_path / "hf-bundle") as other:
        assert {str(t.type) for t in bundle.header.tensors if t.type.layout == "tile16"} == {STORED[kind]}
        assert replace(bundle.config, eos_token_ids=()) == replace(other.config, eos_token_ids=())
        described = describe(tmp_path / "m.gguf")
        assert described.weight_bytes == bundle.weights_bytes and described.quantisation == bundle.quantisation
    if kind == "F32":
        assert (tmp_path / "out/weights.bin").read_bytes() == (tmp_path / "hf-bundle/weights.bin").read_bytes()


def test_a_window_counts_where_the_file_says_no_context(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", "mistral", **SIZES, sliding_window=40)
    write_gguf(tmp_path / "m.gguf", source, "F16", {"llama.context_length": None})
    assert set(describe(tmp_path / "m.gguf").config.windows) == {40}


def test_types_are_mixed_within_a_weight_without_loss(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **SIZES)
    kinds = {"attn_v": "Q8_0", "attn_": "Q4_0", "ffn_gate": "F16", "ffn_up": "BF16", "ffn_down": "Q4_0",
             "token_embd": "Q8_0", "output.": "Q4_0"}
    tensors = write_gguf(tmp_path / "m.gguf", source, kinds)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    check_weights(tmp_path / "out", tensors)
    with Bundle.open(tmp_path / "out") as bundle:
        assert {name: str(stored) for name, stored in bundle.types.items() if "layers.1." not in name} == {
            "embed": "int8g32", "layers.0.attention_norm": "f32", "layers.0.qkv": "int8g32", "layers.0.o": "q4g32",
            "layers.0.ffn_norm": "f32", "layers.0.gate_up": "f32", "layers.0.down": "q4g32", "norm": "f32",
            "head": "q4g32"}


@pytest.mark.parametrize("gate, up", [("Q4_1", "Q8_0"), ("Q4_1", "Q5_0")])
def test_gate_and_up_of_unlike_types_become_one_type(tmp_path: Path, gate: str, up: str) -> None:
    source = make_checkpoint(tmp_path / "hf", hidden_size=64, intermediate_size=96)
    tensors = write_gguf(tmp_path / "m.gguf", source, {"ffn_gate": gate, "ffn_up": up, "ffn_down": "Q4_0"})
    report = convert(tmp_path / "m.gguf", tmp_path / "made")
    found = {one.name: one for one in report.tensors}
    assert found["layers.0.gate_up"].dtype == "int8" and 0 < found["layers.0.gate_up"].relative_error < 1e-4
    assert found["layers.0.down"].exact and "2 of" in report.requantised and gate in report.requantised
    made = weights_of(tmp_path / "made")["layers.0.gate_up"].reshape(-1, 2, 16, 64)
    off = made[:, 1].reshape(-1, 64)[:96] - tensors["blk.0.ffn_up.weight"]
    assert np.linalg.norm(off) < 0.01 * np.linalg.norm(tensors["blk.0.ffn_up.weight"])


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("model_type", "kinds", "stored"), [
    ("llama", {"attn_v": "Q6_K", "attn_": "Q4_K", "ffn_down": "Q6_K", "": "Q4_K"}, ["q4kg32", "q6g16"]),
    ("qwen2", {"attn_k": "F16", "attn_": "Q4_0", "": "Q4_0"}, ["q4g32", "f16", "q4g32"]),
    ("qwen3", {"attn_k": "Q8_0", "attn_": "Q4_K", "": "Q4_K"}, ["q4kg32", "int8g32", "q4kg32"]),
    pytest.param("qwen2", {"attn_q": "Q5_K", "attn_": "Q6_K", "": "Q5_K"}, ["q5kg32", "q6g16"], marks=pytest.mark.slow),
    pytest.param("qwen3", {"attn_k": "Q8_0", "attn_": "Q5_0", "": "Q5_0"}, ["q5g32", "int8g32", "q5g32"],
                 marks=pytest.mark.slow),
])
def test_parts_of_a_matrix_keep_their_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str,
                                            kinds: dict[str, str], stored: list[str]) -> None:
    """As q, k and v of Q4_K_M: values, the plan, and logits beside those of the same values in f32."""
    source = make_checkpoint(tmp_path / "hf", model_type, **sizes_for(*kinds.values()))
    tensors = write_gguf(tmp_path / "m.gguf", source, kinds)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    check_weights(tmp_path / "out", tensors)
    with Bundle.open(tmp_path / "out") as bundle:
        parts = {name: str(kind) for name, kind in bundle.types.items() if name.startswith("layers.1.qkv")}
        described = describe(tmp_path / "m.gguf")
        assert described.weight_bytes == bundle.weights_bytes and described.quantisation == bundle.quantisation
    assert [kind for name, kind in parts.items() if "bias" not in name] == stored
    assert next(iter(parts)) == "layers.1.qkv.0"
    convert(tmp_path / "m.gguf", tmp_path / "floats", weights="f32")
    ids = [1, 5, 9, 4, 100, 31, 7, 8, 2, 44, 6]
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with session(tmp_path / "out", kv="f32") as ours, session(tmp_path / "floats", kv="f32") as theirs:
        found, wanted = logits_of(ours, ids, n_decoded=3), logits_of(theirs, ids, n_decoded=3)
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()  # activations are rounded to 8 bits
    monkeypatch.delenv("EDGEINFER_CHECK")
    rows = []
    for threads, chunk in ((1, 64), (2, 64), (2, 3), (1, 1)):
        with session(tmp_path / "out", threads=threads, prefill_chunk=chunk) as opened:
            rows.append(logits_of(opened, ids, n_decoded=3))
    assert all((row == rows[0]).all() for row in rows)


def test_codes_are_kept_where_a_type_is_asked_for_that_holds_them(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **SIZES)
    kinds = {"token_embd": "Q5_0", "attn_": "Q4_0", "output.": "Q8_0", "": "Q4_0"}
    tensors = write_gguf(tmp_path / "m.gguf", source, kinds)
    report = convert(tmp_path / "m.gguf", tmp_path / "out", weights="q4")
    assert [tensor.name for tensor in report.rounded] == ["embed"]
    assert "1 of" in report.requantised and "Q5_0 1.7e-03" in report.requantised
    found = weights_of(tmp_path / "out")
    assert np.array_equal(found["layers.0.down"], tensors["blk.0.ffn_down.weight"])
    assert np.array_equal(found["head"], tensors["output.weight"])
    assert 0 < np.abs(found["embed"] - tensors["token_embd.weight"]).max() < 0.01


@pytest.mark.parametrize("kind", sorted(BY_NAME))
def test_values_are_those_of_the_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    if kind in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64"):
        with pytest.raises(UnsupportedModelError, match=f"GGUF type {kind} cannot be read; supported types: F32, F16"):
            dequantise(np.zeros((1, BY_NAME[kind].nbytes), np.uint8), kind)
        return
    if kind == "F64":
        return
    blocks = random_blocks(kind, (37, 512)).reshape(-1, BY_NAME[kind].nbytes)
    if kind == "Q1_0":  # the package has no code for it
        halves = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        bits = blocks[:, 2:, None] >> np.arange(8, dtype=np.uint8) & 1
        assert np.array_equal(dequantise(blocks, kind), np.where(bits.reshape(-1, 128), halves, -halves))
        check_ternary(kind, blocks)
        return
    if kind == "Q2_0":  # nor for this: (q - 1) x d, four codes in a byte, the lowest bits first (ggml-quants.c)
        halves = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        codes = [[int(byte) >> shift & 3 for byte in block for shift in (0, 2, 4, 6)] for block in blocks[:, 2:]]
        assert np.array_equal(dequantise(blocks, kind), (np.array(codes, np.float32) - 1) * halves)
        check_ternary(kind, blocks)
        return
    if kind in TERNARY:
        check_ternary(kind, blocks)
    wanted = gguf.quants.dequantize(blocks.reshape(37, -1), gguf.GGMLQuantizationType[kind]).reshape(-1)
    found = dequantise(blocks, kind).reshape(-1)
    assert np.array_equal(found.view(np.uint32), np.asarray(wanted, np.float32).view(np.uint32))


def check_ternary(kind: str, blocks: np.ndarray) -> None:
    """Every type that holds the codes stands for the file's values, in rows of 512 columns."""
    for stored in EXACT[kind][:-1]:
        form = {"q2": "Q2_0", "q4": "Q4_0", "int8": "Q8_0"}[stored.dtype]
        data = pack_blocks(restated(blocks.reshape(37, -1), kind, form), form, stored, "w")
        found = layouts.unpack_tile16(data, stored.dtype, stored.group_size, (37, 512))
        assert np.array_equal(found.reshape(-1), dequantise(blocks, kind).reshape(-1))


@pytest.mark.parametrize("kind", [kind for kind in STORED if kind not in ("F16", "F32", "BF16")])
def test_any_bytes_become_what_they_stand_for_or_are_refused(kind: str) -> None:
    """Blocks of random bits, of which some have numbers that are none."""
    gguf = pytest.importorskip("gguf")
    stored, taken = EXACT[kind][0], 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        raw = rng.integers(0, 256, (19, 2 * BY_NAME[kind].nbytes), np.uint8)
        if seed % 2:  # finite, or else nearly all would be refused
            raw[:] = random_blocks(kind, (19, 2 * BY_NAME[kind].elements), seed)
            raw[raw == 128] = 127 if kind == "Q8_0" else 128
        shape = (19, 2 * BY_NAME[kind].elements)
        form = "Q2_0" if kind in TERNARY else kind
        try:
            data = pack_blocks(restated(raw, kind, form), form, stored, "w")
        except CheckpointError as error:
            assert str(error).startswith("The tensor w has ")
            continue
        with np.errstate(all="ignore"):
            wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(shape)
        assert np.array_equal(layouts.unpack_tile16(data, stored.dtype, stored.group_size, shape), wanted)
        taken += 1
    assert taken >= 18


@pytest.mark.slow
def test_ternary_codes_give_the_logits_that_four_bits_give(tmp_path: Path) -> None:
    """The same codes and scales as q4 with groups as large: the same bits."""
    write_gguf(tmp_path / "m.gguf", make_checkpoint(tmp_path / "hf", "llama", **OF_256), {"token": "Q8_0", "": "TQ2_0"})
    convert(tmp_path / "m.gguf", tmp_path / "q2")
    with Bundle.open(tmp_path / "q2") as bundle, \
            BundleWriter(tmp_path / "q4", bundle.config, bundle.quantisation) as writer:
        for name, entry in bundle.tensors.items():
            data, stored = np.concatenate(list(bundle.stored(name))), entry.type
            if stored.dtype == "q2":
                codes, factors = packed.unpack(data, stored, entry.shape)
                stored = WeightType("q4", stored.group_size)
                data = layouts.pack_tile16(codes, "q4", stored.group_size, factors.scales)
            writer.add(name, stored, entry.shape, data)
    found = []
    for name, dtype in (("q2", "q2"), ("q4", "q4")):
        with session(tmp_path / name) as opened:
            assert opened.bundle.weight_type("layers.0.down") == WeightType(dtype, 128)
            found.append(logits_of(opened, list(range(1, 41))).copy())
    assert np.isfinite(found[0]).all() and found[0].std() > 0
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("kind", INEXACT)
def test_what_no_type_holds_is_quantised_anew_by_less_than_it_has_lost(kind: str) -> None:
    """Blocks of random codes are about what the types make of weights with a bell curve."""
    values = dequantise(random_blocks(kind, (64, 1024)).reshape(-1, BY_NAME[kind].nbytes), kind).reshape(64, -1)
    added = quantise.quantise(values, REQUANTISED.dtype, REQUANTISED.group_size)[2].relative
    assert 0 < added < OWN_ERROR[kind]


@pytest.mark.parametrize("kind", ["Q3_K", "IQ2_XXS"])
def test_types_of_which_none_has_the_levels_are_quantised_anew_and_it_is_said(tmp_path: Path, kind: str) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **OF_256)
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, source, {"ffn_down": kind, "attn_v": "Q4_0", "attn_": kind, "": "Q8_0"})
    assert f"except {kind}, which no type of edgeinfer's holds exactly: requantised to q4" in describe(path).file_note
    own, both = REQUANTISED_ERROR[kind]
    assert f"{kind} itself {own:.1e}, as q4 {both:.1e}, +" in describe(path).file_note
    assert ("its KL divergence 0.016, as q4 0.023, +44%" in describe(path).file_note) == (kind == "IQ3_S")
    assert ("KL divergence" in describe(path).file_note) == (kind in REQUANTISED_KLD)
    assert REQUANTISED_ERROR.keys() == set(INEXACT) > set(REQUANTISED_KLD)
    done = edgeinfer("convert", path, tmp_path / "out")
    assert f"were requantised, because no type of edgeinfer's holds {kind} exactly. " in " ".join(done.err.split())
    with Bundle.open(tmp_path / "out") as bundle:
        types = {name: str(stored) for name, stored in bundle.types.items()}
        assert describe(path).weight_bytes == bundle.weights_bytes
    assert types["layers.0.down"] == types["layers.0.qkv.0"] == types["layers.0.qkv.2"] == "q4g32"
    found = weights_of(tmp_path / "out")
    assert np.array_equal(found["layers.1.qkv"][-32:], tensors["blk.1.attn_v.weight"]), "of a type that is held exactly"
    wanted = tensors["blk.1.ffn_down.weight"]
    codes, scales, _ = quantise.quantise(wanted, "q4", 32)
    assert np.array_equal(found["layers.1.down"], codes * np.repeat(scales.astype(np.float32), 32, axis=1))
    report = convert(path, tmp_path / "int8", weights="int8")
    assert {tensor.name for tensor in report.rounded} >= {"layers.0.down", "layers.1.down"}
    convert(path, tmp_path / "floats", weights="f32")
    assert np.array_equal(weights_of(tmp_path / "floats")["layers.1.down"], wanted)


def test_tensors_of_no_type_of_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "hf", "llama", **SIZES), {"ffn_down": "F64", "": "Q8_0"})
    with pytest.raises(UnsupportedModelError, match=r"has tensors of types that weights do not have \(2 of F64\); "):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "(2 of F64)" in edgeinfer("run", path, stdin=b"hello").sentence


def test_types_asked_for_hold_what_no_type_has(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **OF_256)
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, source, {"ffn_down": "Q3_K", "": "Q8_0"})
    report = convert(path, tmp_path / "out", weights="int8")
    assert {tensor.name for tensor in report.rounded} == {"layers.0.down", "layers.1.down"}
    assert f"2 of {len(report.tensors)} tensors were requantised" in report.requantised
    convert(path, tmp_path / "floats", weights="f32")
    assert np.array_equal(weights_of(tmp_path / "floats")["layers.1.down"], tensors["blk.1.ffn_down.weight"])


def test_permutation_is_undone() -> None:
    rows = np.arange(24).reshape(24, 1)
    assert permuted(rows, 2)[:4, 0].tolist() == [0, 6, 1, 7]
