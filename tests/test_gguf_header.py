"""GGUF headers: the shape of a model from its fields; lies and cuts are refused in one sentence."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.converters import read_gguf_config
from edgeinfer.describe import describe
from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.graph import builtin_shapes

F = {"u8": 0, "u32": 4, "f32": 6, "bool": 7, "str": 8, "array": 9, "u64": 10}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(item: Any) -> bytes:
    if isinstance(item, str):
        return struct.pack("<I", F["str"]) + text(item)
    if isinstance(item, float):
        return struct.pack("<If", F["f32"], item)
    if isinstance(item, list) and item and isinstance(item[0], str):
        return struct.pack("<IIQ", F["array"], F["str"], len(item)) + b"".join(map(text, item))
    if isinstance(item, list):
        return struct.pack(f"<IIQ{len(item)}I", F["array"], F["u32"], len(item), *item)
    return struct.pack("<II", F["u32"], item)


def header(fields: dict[str, Any], tensors: dict[str, tuple[int, ...]], version: int = 3) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    out += b"".join(text(key) + value(item) for key, item in fields.items())
    for i, (name, shape) in enumerate(tensors.items()):
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 32 * i)
    return out + bytes(32 * len(tensors) + 64)


def fields_of(name: str, prefix: str = "llama") -> dict[str, Any]:
    c = builtin_shapes()[name].config
    out = {"general.architecture": prefix, "general.name": name}
    out |= {f"{prefix}.{key}": c[hf] for key, hf in (
        ("embedding_length", "hidden_size"), ("feed_forward_length", "intermediate_size"),
        ("block_count", "num_hidden_layers"), ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"), ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("context_length", "max_position_embeddings"), ("attention.key_length", "head_dim"),
        ("expert_count", "num_local_experts" if "num_local_experts" in c else "num_experts"),
        ("expert_used_count", "num_experts_per_tok"), ("expert_feed_forward_length", "moe_intermediate_size"),
        ("attention.sliding_window", "sliding_window"),
    ) if c.get(hf) is not None}
    return out | {f"{prefix}.rope.freq_base": float(c.get("rope_theta", 10000.0)),
                  "tokenizer.ggml.tokens": [f"w{i}" for i in range(c["vocab_size"])],
                  "tokenizer.ggml.token_type": [1] * c["vocab_size"]}


def tensors_of(name: str) -> dict[str, tuple[int, ...]]:
    """As many tensors as fill the count of parameters; the names that matter are right."""
    c, described = builtin_shapes()[name].config, describe(name)
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (c["hidden_size"], c["vocab_size"])}
    rest = described.parameters - c["hidden_size"] * c["vocab_size"]
    if not described.config.tie_word_embeddings:
        out["output.weight"] = out["token_embd.weight"]
        rest -= c["hidden_size"] * c["vocab_size"]
    if described.config.attention_bias:
        out["blk.0.attn_q.bias"] = (1,)
        rest -= 1
    return out | {"rope_freqs.weight": (64,), "blk.0.rest.weight": (rest,)}


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("tinyllama-1.1b", "llama"), ("smollm2-135m", "llama"), ("mistral-nemo-12b", "llama"), ("mixtral-8x7b", "llama"),
     ("qwen2.5-0.5b", "qwen2"), ("qwen3-8b", "qwen3"), ("qwen3-30b-a3b", "qwen3moe"), ("gemma-2-2b", "gemma2"),
     ("gemma-3-4b", "gemma3"), ("phi-4", "phi3")],
)
@pytest.mark.parametrize("version", [2, 3])
def test_the_shape_is_that_of_the_config(tmp_path: Path, name: str, prefix: str, version: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(fields_of(name, prefix), tensors_of(name), version))
    described, shape = describe(path, "q4", 64), describe(name, "q4", 64)
    assert described.source == f"GGUF file {path}"
    for figure in ("weight_bytes", "parameters", "active_parameters", "bytes_per_token", "kv_bytes_per_position",
                   "operations_per_token", "runnable"):
        assert getattr(described, figure) == getattr(shape, figure), figure
    assert described.config.max_position_embeddings == shape.config.max_position_embeddings


def test_a_file_of_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{i}" for i in range(40)])
    for name, shape in {"token_embd": (40, 32), "output": (40, 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
                        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
                        "blk.0.attn_output": (32, 32), "blk.0.ffn_norm": (32,), "blk.0.ffn_gate": (48, 32),
                        "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}.items():
        writer.add_tensor(name + ".weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    described = describe(path)
    assert (described.config.vocab_size, described.config.head_dim) == (40, 8) and described.runnable


GOOD = header(fields_of("smollm2-135m"), tensors_of("smollm2-135m"))


def changed(change: Callable[[dict[str, Any], dict[str, tuple[int, ...]]], object], version: int = 3) -> bytes:
    fields, tensors = fields_of("smollm2-135m"), tensors_of("smollm2-135m")
    change(fields, tensors)
    return header(fields, tensors, version)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "m.gguf is empty; download it again"),
        (b"GGML" + GOOD[4:], "is no GGUF file: it does not begin with GGUF"),
        (changed(lambda f, t: None, version=1), "has GGUF version 1; versions 2 and 3 can be read"),
        (changed(lambda f, t: None, version=50331648), "has GGUF version 50331648"),  # the other byte order
        (GOOD[:8] + struct.pack("<Q", 2**60) + GOOD[16:], "it has 1152921504606846976 tensors, above the limit"),
        (GOOD[:16] + struct.pack("<Q", 2**63) + GOOD[24:], "it has 9223372036854775808 fields, above the limit"),
        (GOOD[:24] + struct.pack("<Q", 2**40) + GOOD[32:], "damaged: it has 1099511627776 bytes of a text, above"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 99), "damaged: there is no type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "an array holds arrays"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 99, 5000), "there is no type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**30), "items of an array"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQQ", 9, 8, 5000, 2**60), "is cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 9), "tensor t has 9 dimensions"),
        (GOOD[:-200], r"is cut short: its header goes on after the file's \d+ bytes; download it again"),
        (changed(lambda f, t: f.update({"general.architecture": "mamba"})), "architecture 'mamba'; known: llama, "),
        (changed(lambda f, t: f.pop("general.architecture")), "of architecture None; known"),
        (changed(lambda f, t: f.update({"llama.block_count": 31})), "itself: its fields make a model of 138"),
        (changed(lambda f, t: t.popitem()), r"contradicts itself: .* but its tensors have [\d,]+; download it again"),
        (changed(lambda f, t: f.pop("llama.embedding_length")), "lacks 'hidden_size'"),
        (changed(lambda f, t: f.update({"llama.attention.head_count": [9, 9]})), "num_attention_heads is"),
        (changed(lambda f, t: f.pop("tokenizer.ggml.tokens")), "lacks 'vocab_size'"),
        (changed(lambda f, t: f.update({"llama.rope.freq_base": float("nan")})), "rope_theta is nan; it must be"),
    ],
)
def test_lies_and_cuts_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        describe(path)


def test_every_cut_of_a_header_is_refused(tmp_path: Path) -> None:
    small = header({"general.architecture": "llama", "llama.block_count": 1, "a": [1, 2], "b": "x", "c": 1.5},
                   {"token_embd.weight": (4, 5)})[:-96]
    for n in range(1, len(small)):
        (tmp_path / "m.gguf").write_bytes(small[:n])
        with pytest.raises(CheckpointError, match=r"cut short|no GGUF file|damaged"):
            read_gguf_config(tmp_path / "m.gguf")


def test_the_beginning_of_a_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD[: -32 * 3 - 64])  # without a byte of the tensors
    assert describe(path).weight_bytes == describe("smollm2-135m").weight_bytes


@pytest.mark.parametrize(
    ("name", "prefix"), [("llama-2-7b", "llama"), ("phi-3-mini", "phi3"), ("gemma-2-2b", "gemma2")]
)
def test_fields_without_tensors_are_enough(tmp_path: Path, name: str, prefix: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(fields_of(name, prefix), {}))
    assert describe(path).weight_bytes == describe(name).weight_bytes


@pytest.mark.parametrize(("file", "shape"), [("llama-spm", "llama-2-7b"), ("phi-3", "phi-3-mini")])
def test_published_vocabulary_files(shared_data: Callable[[str], Path], file: str, shape: str) -> None:
    path = shared_data(f"tokenizers/gguf-vocab/ggml-vocab-{file}.gguf")
    described = describe(path)
    assert described.parameters == pytest.approx(describe(shape).parameters, rel=0.001)


@pytest.mark.parametrize("file", ["gpt-2", "mpt"])
def test_other_families_are_named(shared_data: Callable[[str], Path], file: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"architecture '{file.replace('-', '')}'; known: llama"):
        describe(shared_data(f"tokenizers/gguf-vocab/ggml-vocab-{file}.gguf"))
