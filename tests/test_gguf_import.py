"""GGUF files become bundles: codes and values as the gguf package reads them, configs as config.json says them."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer import LLM
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert, gguf_structure, open_checkpoint, read_headers
from edgeinfer.converters.gguf_blocks import pack_blocks, restated
from edgeinfer.converters.gguf_file import gguf_parts
from edgeinfer.converters.gguf_types import ANEW, BY_NAME, EXACT, INEXACT, OWN_ERROR, TERNARY
from edgeinfer.converters.gguf_values import dequantise
from edgeinfer.describe import describe
from edgeinfer.errors import CheckpointError, EdgeInferError, UnsupportedModelError, UsageError
from edgeinfer.quant import layouts, quantise
from tests.checkpoints import make_checkpoint
from tests.command_line import edgeinfer
from tests.gguf_files import SIZES, permuted, random_blocks, write_gguf
from tests.sessions import logits_of, scored, session

STORED = {"Q4_0": "q4g32", "Q4_1": "q4mg32", "Q5_0": "q5g32", "Q5_1": "q5mg32", "Q8_0": "int8g32", "IQ4_NL": "iq4g32",
          "MXFP4": "mxfp4g32", "F16": "f16", "F32": "f32", "BF16": "f32", "Q4_K": "q4kg32", "Q5_K": "q5kg32",
          "Q6_K": "q6g16", "IQ4_XS": "iq4kg32", "TQ1_0": "q4g32", "TQ2_0": "q4g32"}
"""Types of files that are taken as they are, and what they become."""
OF_256 = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16, "head_dim": 16,
          "num_key_value_heads": 2, "num_hidden_layers": 2}
"""Sizes of a model whose rows are whole blocks of 256."""


def sizes_for(*kinds: str) -> dict[str, int]:
    return OF_256 if any(BY_NAME[kind].elements == 256 for kind in kinds) else SIZES


def weights_of(path: Path) -> dict[str, np.ndarray]:
    """All weights of a bundle as float32, by name."""
    data, out = np.fromfile(path / "weights.bin", np.uint8), {}
    with Bundle.open(path) as bundle:
        for entry in bundle.header.tensors:
            raw, stored = data[entry.offset : entry.offset + entry.nbytes], entry.type
            values = (raw.view("<f4")[: entry.shape[0]] if stored.layout == "plain" else
                      layouts.unpack_tile16(raw, stored.dtype, stored.group_size, entry.shape))
            whole = re.sub(r"qkv\.[0-9]", "qkv", entry.name)  # parts of a matrix, in their order
            out[whole] = np.concatenate([out[whole], values]) if whole in out else values
    return out


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


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", STORED)
def test_every_value_is_that_of_the_file(tmp_path: Path, model_type: str, kind: str) -> None:
    if model_type not in ("llama", "qwen2") and kind not in ("Q4_0", "Q8_0", "F16", "F32", "BF16"):
        pytest.skip("tried with two architectures")
    window = {"sliding_window": 40} if model_type == "mistral" else {}
    source = make_checkpoint(tmp_path / "hf", model_type, **sizes_for(kind), **window)
    tensors = write_gguf(tmp_path / "m.gguf", source, kind)
    report = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert report.rounded == () and report.worst is None and report.anew == ""
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


@pytest.mark.parametrize(("model_type", "kinds", "stored"), [
    ("llama", {"attn_v": "Q6_K", "attn_": "Q4_K", "ffn_down": "Q6_K", "": "Q4_K"}, ["q4kg32", "q6g16"]),
    ("qwen2", {"attn_q": "Q5_K", "attn_": "Q6_K", "": "Q5_K"}, ["q5kg32", "q6g16"]),
    ("qwen3", {"attn_k": "Q8_0", "attn_": "Q5_0", "": "Q5_0"}, ["q5g32", "int8g32", "q5g32"]),
    ("qwen2", {"attn_k": "F16", "attn_": "Q4_0", "": "Q4_0"}, ["q4g32", "f16", "q4g32"]),
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
    assert "1 of" in report.anew and "Q5_0 1.7e-03" in report.anew
    found = weights_of(tmp_path / "out")
    assert np.array_equal(found["layers.0.down"], tensors["blk.0.ffn_down.weight"])
    assert np.array_equal(found["head"], tensors["output.weight"])
    assert 0 < np.abs(found["embed"] - tensors["token_embd.weight"]).max() < 0.01


@pytest.mark.parametrize("kind", sorted(BY_NAME))
def test_values_are_those_of_the_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    if kind in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64"):
        with pytest.raises(UnsupportedModelError, match=f"GGUF type {kind} cannot be read; types that can: F32, F16"):
            dequantise(np.zeros((1, BY_NAME[kind].nbytes), np.uint8), kind)
        return
    if kind == "F64":
        return
    blocks = random_blocks(kind, (37, 512)).reshape(-1, BY_NAME[kind].nbytes)
    if kind == "Q1_0":  # the package has no code for it
        halves = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        bits = blocks[:, 2:, None] >> np.arange(8, dtype=np.uint8) & 1
        assert np.array_equal(dequantise(blocks, kind), np.where(bits.reshape(-1, 128), halves, -halves))
        return
    wanted = gguf.quants.dequantize(blocks.reshape(37, -1), gguf.GGMLQuantizationType[kind]).reshape(-1)
    found = dequantise(blocks, kind).reshape(-1)
    assert np.array_equal(found.view(np.uint32), np.asarray(wanted, np.float32).view(np.uint32))


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
        form = "Q4_0" if kind in TERNARY else kind
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


@pytest.mark.parametrize("kind", INEXACT)
def test_what_no_type_holds_is_quantised_anew_by_less_than_it_has_lost(kind: str) -> None:
    """Blocks of random codes are about what the types make of weights with a bell curve."""
    values = dequantise(random_blocks(kind, (64, 1024)).reshape(-1, BY_NAME[kind].nbytes), kind).reshape(64, -1)
    added = quantise.quantise(values, ANEW.dtype, ANEW.group_size)[2].relative
    assert 0 < added < OWN_ERROR[kind]


@pytest.mark.parametrize("kind", ["Q3_K", "IQ2_XXS"])
def test_types_of_which_none_has_the_levels_are_quantised_anew_and_it_is_said(tmp_path: Path, kind: str) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **OF_256)
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, source, {"ffn_down": kind, "attn_v": "Q4_0", "attn_": kind, "": "Q8_0"})
    assert f"but for {kind}, which has levels of no type here: quantised anew to q4" in describe(path).file_note
    done = edgeinfer("convert", path, tmp_path / "out")
    assert f"were quantised anew, since no type here has the levels of {kind}: " in " ".join(done.err.split())
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
    assert f"2 of {len(report.tensors)} tensors were quantised anew" in report.anew
    convert(path, tmp_path / "floats", weights="f32")
    assert np.array_equal(weights_of(tmp_path / "floats")["layers.1.down"], tensors["blk.1.ffn_down.weight"])


def test_llama3_factors_become_the_rule(tmp_path: Path) -> None:
    rule = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}
    source = make_checkpoint(tmp_path / "hf", "llama", **SIZES, rope_theta=500000.0, rope_scaling=rule)
    from edgeinfer.graph import inverse_frequencies

    with open_checkpoint(source) as checkpoint:
        rope = checkpoint.config.rope
    factors = inverse_frequencies(replace(rope, kind="default"), 16) / inverse_frequencies(rope, 16)
    assert factors.max() == 32 and factors.min() == 1
    factors = factors.astype(np.float32)
    write_gguf(tmp_path / "m.gguf", source, extra={"rope_freqs.weight": factors})
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config.rope == rope
    known = gguf_structure(read_headers(tmp_path / "m.gguf"))
    write_gguf(tmp_path / "m.gguf", source, extra={"rope_freqs.weight": factors * np.float32(1.5)})
    assert gguf_structure(read_headers(tmp_path / "m.gguf")) != known, "it would be judged as the other"
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight in .* holds factors .* rule does not give"):
        open_checkpoint(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", source, extra={"rope_freqs.weight": np.ones(1 << 17, np.float32)})
    with pytest.raises(CheckpointError, match=r"has 131072 values, more than any head needs"):
        open_checkpoint(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", source, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config.rope.kind == "default"


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
     ({"type": "none", "factor": 4.0}, None),
     ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
     ({"factor": 0.0}, None),
     ({"factor": 4.0, "linear": 2.0}, {"rope_type": "linear", "factor": 4.0}),
     ({"linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
     ({"type": "yarn", "factor": 4.0, "original_context_length": 64},
      {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})],
)
def test_scaled_rotations(tmp_path: Path, fields: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    source = make_checkpoint(tmp_path / "hf", "qwen2", **SIZES, **({"rope_scaling": scaling} if scaling else {}))
    keys = {key: "qwen2.rope.scale_linear" if key == "linear" else f"qwen2.rope.scaling.{key}" for key in fields}
    write_gguf(tmp_path / "m.gguf", source, fields={keys[key]: value for key, value in fields.items()})
    with open_checkpoint(tmp_path / "m.gguf") as ours, open_checkpoint(source) as theirs:
        assert ours.config.rope.attention_factor == pytest.approx(theirs.config.rope.attention_factor)
        assert replace(ours.config.rope, attention_factor=1.0) == replace(theirs.config.rope, attention_factor=1.0)


def split(path: Path, directory: Path, source: Path, count: int = 3) -> list[Path]:
    """Write a model in parts, of which the first has the fields, as llama-gguf-split does."""
    gguf = pytest.importorskip("gguf")
    write_gguf(path, source)
    reader = gguf.GGUFReader(path)
    parts = [directory / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        for key, value in reader.fields.items():
            if i == 0 and key.startswith("llama."):
                add = writer.add_float32 if "freq_base" in key or "epsilon" in key else writer.add_uint32
                add(key, value.contents())
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_a_split_model_is_the_whole(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **SIZES)
    parts = split(tmp_path / "m.gguf", tmp_path, source)
    for path, name in ((tmp_path / "m.gguf", "whole"), (parts[0], "parts")):
        convert(path, tmp_path / name)
    assert (tmp_path / "whole/weights.bin").read_bytes() == (tmp_path / "parts/weights.bin").read_bytes()
    assert describe(parts[0]).weight_bytes == describe(tmp_path / "m.gguf").weight_bytes
    with pytest.raises(CheckpointError, match=r"is part 2 of 3 of a split model; give the first, .*-00001-of-00003"):
        convert(parts[1], tmp_path / "out")
    shutil.copy(parts[1], parts[2])
    with pytest.raises(CheckpointError, match=r"00003-of-00003.gguf is not part 3 of the model that begins with"):
        convert(parts[0], tmp_path / "out")
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"is the first of 3 parts, and .*00003-of-00003.gguf is missing"):
        convert(parts[0], tmp_path / "out")
    loud = Path("M-00001-OF-00003.GGUF")
    assert [part.name for part in gguf_parts(loud)] == [f"M-0000{i}-OF-00003.GGUF" for i in (1, 2, 3)]
    parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 parts of a split model, so its name must end in"):
        convert(tmp_path / "other.gguf", tmp_path / "out")


def spoiled(path: Path, tensor: str, at: int, data: bytes) -> None:
    with open_checkpoint(path) as checkpoint:
        offset = checkpoint.tensor(tensor).offset
    with open(path, "r+b") as file:
        file.seek(offset + at)
        file.write(data)


@pytest.mark.parametrize(
    ("kind", "at", "data", "message"),
    [("Q4_0", 18, b"\x00\x7e", "has a scale that is NaN or infinite"),
     ("Q8_0", 34, b"\x00\x7c", "has a scale that is NaN or infinite"),
     ("Q8_0", 40, b"\x80", "has an 8-bit code of -128"),
     ("Q4_1", 22, b"\x00\x7c", "has a scale that is NaN or infinite"),
     ("Q4_K", 146, b"\x00\xfc", "has a scale that is NaN or infinite"),
     ("Q6_K", 418, b"\x00\x7e", "has a scale that is NaN or infinite"),
     ("MXFP4", 17, b"\x20", r"has scales of 2\^-96, and fp16 holds 2\^-24 to 2\^15; .* --weights f32"),
     ("F16", 2, b"\x00\xfc", "has a value that is NaN or infinite"),
     ("F32", 4, b"\x00\x00\x80\x7f", "has a value that is NaN or infinite"),
     ("BF16", 2, b"\xc0\x7f", r"has the value nan at \[0, 1\]")],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, kind: str, at: int, data: bytes, message: str) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **sizes_for(kind))
    write_gguf(tmp_path / "m.gguf", source, kind)
    spoiled(tmp_path / "m.gguf", "blk.1.ffn_down.weight", at, data)
    with pytest.raises(CheckpointError, match=f"tensor blk.1.ffn_down.weight {message}"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) in ([], ["out.lock"], [".out.lock"])


def test_data_that_overlap_or_end_early_are_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "hf", "llama", **SIZES))
    whole = path.read_bytes()
    for size in (len(whole) - 33, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"is cut short: it has \d+ bytes, but the tensor .* ends at byte"):
            convert(path, tmp_path / "out")
        describe(path)  # a plan needs the header alone
    path.write_bytes(whole)
    tensor = gguf.GGUFReader(path).get_tensor(3)
    at = tensor.field.offset + 8 + len(tensor.name) + 4 + 8 * len(tensor.shape) + 4
    for offset, message in ((0, "overlap"), (2**40, "cut short"), (33, "no multiple of 32"), (2**63, "begins at")):
        path.write_bytes(whole[:at] + offset.to_bytes(8, "little") + whole[at + 8 :])
        with pytest.raises(CheckpointError, match=message):
            convert(path, tmp_path / "out")


def test_a_thousand_mutated_headers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "hf", "llama", **SIZES), "Q8_0")
    whole, rng, refused = path.read_bytes(), random.Random(1), 0
    with open_checkpoint(path) as checkpoint:
        end = min(checkpoint.tensor(name).offset for name in checkpoint.files)
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(end)
            how = rng.random()
            if how < 0.5:
                data[at] = rng.randrange(256)
            elif how < 0.8:
                data[at : at + 8] = rng.choice((0, 1, 2**31, 2**60, 2**63, 2**64 - 1)).to_bytes(8, "little")
            else:
                del data[at : at + rng.choice((1, 4, 8, 100))]
        path.write_bytes(data)
        try:
            describe(path)
            open_checkpoint(path).close()
        except EdgeInferError as error:
            refused += 1
            assert str(error).count("\n") == 0
    assert refused > 600


def test_options_that_need_weights(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **SIZES)
    write_gguf(tmp_path / "m.gguf", source, "Q4_0")
    for option in ({"group_size": 64}, {"embedding": "f16"}, {"head": "f16"}, {"ffn_layout": "neuron"}):
        with pytest.raises(UsageError, match=r"A GGUF file is taken as it is, type by type; .* say with --weights"):
            convert(tmp_path / "m.gguf", tmp_path / "out", **option)  # type: ignore[arg-type]
    convert(tmp_path / "m.gguf", tmp_path / "out", weights="q4", ffn_layout="neuron")


@pytest.mark.parametrize("model", [
    *(f"stories260K-hf-{kind}" for kind in ("F16", "Q4_0", "Q4_1", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_M", "Q8_0",
                                            "IQ4_NL")),
    *(f"fables-5m-silu-{kind}" for kind in ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS"))])
def test_real_files_say_what_llama_cpp_says(shared_data: Callable[[str], Path], tmp_path: Path, model: str
                                            ) -> None:
    """Each token of llama.cpp's greedy texts is the likeliest, or as good as that: it rounds in other places."""
    cases = json.loads(shared_data("gguf/golden.json").read_text())["cases"][f"{model}.gguf"]
    convert(shared_data(f"gguf/{model}.gguf"), tmp_path / "out")
    with LLM(tmp_path / "out") as llm:
        tokenizer = llm.tokenizer
    with session(tmp_path / "out", kv="f16") as opened:
        for case in cases:
            prompt = tokenizer.encode(case["prompt"])
            ids = tokenizer.encode(case["greedy_text_with_prompt"].lstrip())
            assert ids[: len(prompt)] == prompt and len(ids) > len(prompt) + 60
            logits, chosen = scored(opened, ids)[len(prompt) - 1 : -1], ids[len(prompt) :]
            behind = logits.max(axis=1) - logits[np.arange(len(chosen)), chosen]
            assert behind.max() < 0.1 and (behind == 0).mean() > 0.95


def test_the_plan_of_a_file_is_that_of_its_bundle(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    for model in ("stories260K-hf-Q4_0", "fables-5m-silu-Q8_0", "stories260K-hf-F16", "fables-5m-silu-Q4_K_M"):
        path = shared_data(f"gguf/{model}.gguf")
        convert(path, tmp_path / model)
        plans = [edgeinfer("plan", source, "--json").json for source in (path, tmp_path / model)]
        for key in ("regions", "total_bytes", "weights", "group_size", "parameters"):
            assert plans[0][key] == plans[1][key], key


def test_permutation_is_undone() -> None:
    rows = np.arange(24).reshape(24, 1)
    assert permuted(rows, 2)[:4, 0].tolist() == [0, 6, 1, 7]
