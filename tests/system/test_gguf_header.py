"""GGUF headers: the shape of a model from its fields; lies and cuts are refused in one sentence."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.base.units import format_size
from edgeinfer.converters import describe_gguf, read_gguf_tokenizer
from edgeinfer.converters.gguf.file import read_header
from edgeinfer.converters.gguf.header import HeaderReader
from edgeinfer.converters.gguf.names import with_gguf_names
from edgeinfer.converters.gguf.types import EXACT, GGUF_TYPES
from edgeinfer.errors import CheckpointError, TokenizerError, UnsupportedModelError
from edgeinfer.graph import build_graph, builtin_shapes, read_config, requested_types
from edgeinfer.models.describe import describe
from tests.helpers.command_line import edgeinfer

F = {"u8": 0, "u32": 4, "f32": 6, "bool": 7, "str": 8, "array": 9, "u64": 10}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


@cache
def texts(items: tuple[str, ...]) -> bytes:
    return struct.pack("<IIQ", F["array"], F["str"], len(items)) + b"".join(map(text, items))


@cache
def words(n: int) -> tuple[str, ...]:
    return tuple(f"w{i}" for i in range(n))


def value(item: Any) -> bytes:
    if isinstance(item, str):
        return struct.pack("<I", F["str"]) + text(item)
    if isinstance(item, float):
        return struct.pack("<If", F["f32"], item)
    if isinstance(item, list | tuple) and item and isinstance(item[0], str):
        return texts(tuple(item))
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
                  "tokenizer.ggml.tokens": words(c["vocab_size"]),
                  "tokenizer.ggml.token_type": [1] * c["vocab_size"]}


def tensors_of(name: str) -> dict[str, tuple[int, ...]]:
    """Those of the model."""
    config = read_config(builtin_shapes()[name].config)
    graph = with_gguf_names(build_graph(config, requested_types("f32")), config)
    return {source.name: source.stored[::-1] for weight in graph.weights for source in weight.sources}


@pytest.mark.slow(keep=2)
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
                   "operations_per_token"):
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
    assert (described.config.vocab_size, described.config.head_dim) == (40, 8)


def quantised_file(path: Path, kinds: dict[str, str]) -> dict[str, int]:
    """A file of the gguf package whose tensors have these types by name, else F32; gives the bytes by type."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    c = builtin_shapes()["smollm2-135m"].config
    hidden, ffn, layers = 256, 512, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_token_list([f"t{i}" for i in range(40)])
    shapes = {"token_embd": (40, hidden), "output": (40, hidden), "output_norm": (hidden,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in {
            "attn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (128, hidden), "attn_v": (128, hidden),
            "attn_output": (hidden, hidden), "ffn_norm": (hidden,), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn)}.items()}
    wanted: dict[str, int] = {}
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType[kinds.get(name.rsplit(".", 1)[-1], "F32")]
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.zeros((*shape[:-1], shape[-1] // elements * nbytes), np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
        wanted[kind.name] = wanted.get(kind.name, 0) + raw.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wanted


MATRICES = ("token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
Q4_K_M = {**dict.fromkeys(MATRICES, "Q4_K"), "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}


@pytest.mark.parametrize("kinds", [Q4_K_M, dict.fromkeys(MATRICES, "Q8_0"), dict.fromkeys(MATRICES, "F16"), {}])
def test_types_and_bytes_are_those_of_the_file(tmp_path: Path, kinds: dict[str, str]) -> None:
    path = tmp_path / "m.gguf"
    wanted = quantised_file(path, kinds)
    described = describe(path, "q4", 32)
    assert described.file_types == wanted and list(wanted.values()) != []
    assert sorted(described.file_types.values(), reverse=True) == list(described.file_types.values())
    total = sum(wanted.values())
    assert 0 <= path.stat().st_size - total < 6000
    assert described.file_note.startswith(f"The file holds {format_size(total)} of tensors (")
    assert all(f"{name} {format_size(nbytes)}" in described.file_note for name, nbytes in wanted.items())
    made = f"a bundle of {format_size(described.weight_bytes)}"
    assert described.file_note.endswith(f"requantised as --weights q4 asks: {made}.")


def test_plan_and_estimate_tell_files_of_one_model_apart(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    totals, figures = set(), set()
    for kinds in (Q4_K_M, {**Q4_K_M, "attn_q": "Q3_K"}, *(dict.fromkeys(MATRICES, kind) for kind in ("Q8_0", "F16"))):
        path.unlink(missing_ok=True)
        wanted = quantised_file(path, kinds)
        plan = edgeinfer("plan", path, "--ctx", 64, "--json").json
        speed = edgeinfer("estimate", path, "--machine", "rpi5", "--ctx", 64, "--json").json
        assert plan["file_types"] == speed["file_types"] == wanted
        note = next(note for note in plan["notes"] if note.startswith("The file holds"))
        assert "codes and scales are kept" in note and speed["file_note"] == note
        assert ("except Q3_K, which no type of edgeinfer's" in note) == (not wanted.keys() <= EXACT.keys())
        totals.add(sum(wanted.values()))
        figures.add((plan["total_bytes"], speed["weight_bytes"]))
        for command in (["plan", path], ["estimate", path, "--machine", "rpi5"]):
            words = " ".join(edgeinfer(*command, "--ctx", 64).out.split())
            assert f"The file holds {format_size(sum(wanted.values()))} of tensors" in words
    assert len(totals) == len(figures) == 4
    assert edgeinfer("plan", "smollm2-135m", "--json").json["file_types"] is None


GOOD = header(fields_of("smollm2-135m"), tensors_of("smollm2-135m"))
GOOD_DATA = -(-(len(GOOD) - 32 * len(tensors_of("smollm2-135m")) - 64) // 32) * 32


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("command", ["run", "verify", "convert", "bench"])
def test_a_file_without_its_data_says_what_to_do(tmp_path: Path, command: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD)
    done = edgeinfer(command, path, *([tmp_path / "out"] if command == "convert" else []), stdin=b"hello")
    assert done.code == 1 and done.sentence == (
        f"{path} is cut short: it has {len(GOOD)} bytes, but the tensor token_embd.weight ends at byte "
        f"{GOOD_DATA + 4 * 49152 * 576}; download it again."
    )
    assert f"is cut short: it has {len(GOOD)} bytes" in edgeinfer("info", path, "--json").json["header"]["reason"]


def test_the_table_of_types_is_that_of_the_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {number: (row.name, row.elements, row.nbytes) for number, row in GGUF_TYPES.items()}
    assert {number: row for number, row in ours.items() if number in theirs} == {
        number: row for number, row in theirs.items() if number in ours}
    assert {"Q4_K", "Q6_K", "Q8_0", "F16", "BF16", "IQ4_XS"} <= {name for name, _, _ in ours.values()}


def changed(change: Callable[[dict[str, Any], dict[str, tuple[int, ...]]], object], version: int = 3) -> bytes:
    fields, tensors = fields_of("smollm2-135m"), tensors_of("smollm2-135m")
    change(fields, tensors)
    return header(fields, tensors, version)


later = partial(partial, changed)
"""Defer making a changed header: thirty of them take seconds in every process that collects tests."""


def retyped(kind: int, columns: int | None = None) -> bytes:
    """The header with another type, and perhaps another width, of its first tensor."""
    begin = GOOD.index(text("token_embd.weight")) + len(text("token_embd.weight"))
    n_dims, width, rows, _, offset = struct.unpack_from("<IQQIQ", GOOD, begin)
    changed = struct.pack("<IQQIQ", n_dims, columns or width, rows, kind, offset)
    return GOOD[:begin] + changed + GOOD[begin + len(changed) :]


@pytest.mark.slow(keep=20)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "m.gguf is empty; download it again"),
        (b"GGML" + GOOD[4:], "is not a GGUF file: it does not begin with GGUF"),
        (b"hi\n", "is not a GGUF file: it does not begin with GGUF"),
        (later(lambda f, t: None, version=1), "has GGUF version 1; versions 2 and 3 are supported"),
        (later(lambda f, t: None, version=50331648), r"is a big-endian GGUF file \(version 3\)"),
        (later(lambda f, t: None, version=7), "has GGUF version 7; versions 2 and 3 are supported: update edgeinfer"),
        (GOOD[:8] + struct.pack("<Q", 2**60) + GOOD[16:], "it has 1152921504606846976 tensors, above the limit"),
        (GOOD[:16] + struct.pack("<Q", 2**63) + GOOD[24:], "it has 9223372036854775808 fields, above the limit"),
        (GOOD[:24] + struct.pack("<Q", 2**40) + GOOD[32:], "damaged: it has 1099511627776 bytes of a text, above"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 99), "has the type 99, which"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "an array holds arrays"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 99, 5000), "the type 99, which"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**30), "items of an array"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQQ", 9, 8, 5000, 2**60), "is cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 2**60), "976 items of an"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 9) + bytes(99), "t has 9 dimensions"),
        (retyped(99), r"token_embd.weight of .* has GGUF type 99, which this version of edgeinfer does not know \(it"),
        (retyped(2, columns=570), r"has rows of 570 elements, which are not blocks of 32, as Q4_0 needs; download"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + 2 * (text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)), "tensor t twice"),
        (GOOD[: GOOD_DATA - 200], r"is cut short: its header continues after the file's \d+ bytes; download it again"),
        (later(lambda f, t: f.update({"general.architecture": "mamba"})), "architecture 'mamba'; known: "),
        (later(lambda f, t: f.pop("general.architecture")), "of architecture None; known"),
        (later(lambda f, t: f.update({"llama.block_count": 31})), "lacks the tensor blk.30.attn_norm.weight"),
        (later(lambda f, t: f.update({"llama.block_count": 29})), "blk.29.attn_k.weight in .* is not part of"),
        (later(lambda f, t: t.popitem()), r"lacks the tensor output_norm.weight"),
        (later(lambda f, t: t.update({"output_norm.weight": (575,)})), "shape .575., but its metadata needs .576."),
        (later(lambda f, t: t.update({"output_norm.weight": (2**40, 2**40)})), "dimensions .* which are impossible"),
        (later(lambda f, t: t.update({"output_norm.weight": (576, 0)})), "dimensions .* which are impossible"),
        (later(lambda f, t: f.pop("llama.embedding_length")), "lacks 'hidden_size'"),
        (later(lambda f, t: f.update({"llama.attention.head_count": [9, 3]})), "num_attention_heads is"),
        (later(lambda f, t: f.update({"tokenizer.ggml.tokens": words(49151)})), "contradictory vocabulary sizes: its"),
        (later(lambda f, t: f.update({"general.alignment": 33})), "general.alignment is 33, no power of two"),
        (later(lambda f, t: f.update({"llama.rope.scaling.type": "longrope"})), "scaling.type is 'longrope', which"),
        (later(lambda f, t: f.update({"llama.attention.clamp_kqv": 8.0})), "llama.attention.clamp_kqv is 8.0, which"),
        (later(lambda f, t: f.update({"llama.attention.scale": 1.0})), "only 1/sqrt.64. is supported"),
        (later(lambda f, t: f.update({"llama.rope.dimension_count": 31})), "it must be the width of a head, 64"),
        (later(lambda f, t: f.update({"general.type": "imatrix"})), "is an importance matrix, which a quantiser"),
        (later(lambda f, t: f.update({"general.architecture": "clip"})), "is the image encoder of a vision model"),
        (later(lambda f, t: f.update({"general.architecture": "qwen5"})), "'qwen5'; known: .*; the nearest is qwen"),
        (later(lambda f, t: f.update({"llama.rope.freq_base": float("nan")})), "rope_theta is nan; it must be"),
        (later(lambda f, t: f.update({"llama.attention.scale": "q"})), "attention.scale is 'q'; it must be a number"),
        (later(lambda f, t: f.update({"llama.attention.sliding_window": [1, 2]})), r"window is \[1, 2\]; it must be"),
        (later(lambda f, t: f.update({"llama.attention.sliding_window": 4, "llama.context_length": [1, 2]})),
         r"max_position_embeddings is \[1, 2\]; it must be"),
        (later(lambda f, t: f.update({"llama.vocab_size": [1, 2]})), "has contradictory vocabulary sizes"),
        (later(lambda f, t: f.update({"general.type": [1, 2], "llama.block_count": 0})), "num_hidden_layers is 0"),
        (later(lambda f, t: f.update({"llama.rope.scaling.factor": "q"})), "factor is 'q'; it must be a number"),
    ],
)
def test_lies_and_cuts_are_refused(tmp_path: Path, content: bytes | Callable[[], bytes], message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content() if callable(content) else content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        describe(path)


def test_trailing_dimensions_of_one_are_none(tmp_path: Path) -> None:
    """To ggml, every tensor has four dimensions."""
    path = tmp_path / "m.gguf"
    path.write_bytes(changed(lambda f, t: t.update({"output_norm.weight": (576, 1, 1, 1),
                                                    "blk.0.attn_output.weight": (576, 576, 1)})))
    assert describe(path).parameters == builtin_shapes()["smollm2-135m"].parameters


def test_tokens_that_none_is(tmp_path: Path) -> None:
    """Some converters write -1 if there is no such token."""
    path = tmp_path / "m.gguf"
    path.write_bytes(changed(lambda f, t: f.update({"tokenizer.ggml.bos_token_id": 2**32 - 1})))
    described = describe_gguf(path, "q4").model
    assert described and described.bos_token_id is None


def test_bytes_of_tokens_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    array = struct.pack("<IIQ", 9, 8, 2) + text("a") + struct.pack("<Q", 2) + b"\xff\xfe"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text("tokenizer.ggml.tokens") + array
                     + text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("gpt2"))
    with pytest.raises(TokenizerError, match=r"token 1 is '\\udcff\\udcfe', which is not valid UTF-8; download"):
        read_gguf_tokenizer(read_header(path).fields, str(path))


def test_every_cut_of_a_header_is_refused(tmp_path: Path) -> None:
    small = header({"general.architecture": "llama", "llama.block_count": 1, "a": [1, 2], "b": "x", "c": 1.5},
                   {"token_embd.weight": (4, 5)})[:-96]
    for n in range(1, len(small)):
        (tmp_path / "m.gguf").write_bytes(small[:n])
        with pytest.raises(CheckpointError, match=r"cut short|no GGUF file|damaged"):
            describe_gguf(tmp_path / "m.gguf")


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping of it would end the process by SIGBUS."""
    path, read = tmp_path / "model.gguf", HeaderReader.header
    path.write_bytes(header(fields_of("llama-3.2-1b"), tensors_of("llama-3.2-1b")))

    def cut_then_read(reader: HeaderReader) -> Any:
        os.truncate(path, 0)
        return read(reader)

    monkeypatch.setattr(HeaderReader, "header", cut_then_read)
    with pytest.raises(CheckpointError, match=r"model\.gguf is cut short: its header continues after"):
        describe_gguf(path)


def test_the_beginning_of_a_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD[:GOOD_DATA])  # without a byte of the tensors
    assert describe(path, "q4").weight_bytes == describe("smollm2-135m").weight_bytes
    assert describe(path).weight_bytes == describe("smollm2-135m", "f32").weight_bytes


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


def test_other_families_are_named(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(header({**fields_of("llama-2-7b", "llama"), "general.architecture": "rwkv7"}, {}))
    with pytest.raises(UnsupportedModelError, match=r"architecture 'rwkv7'; known: .*llama"):
        describe(path)
