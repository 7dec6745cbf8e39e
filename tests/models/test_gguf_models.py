"""GGUF files of whole models: how positions turn, models in parts, damage, real files."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import convert, gguf_structure, open_checkpoint, read_headers
from edgeinfer.converters.gguf.file import gguf_parts
from edgeinfer.errors import CheckpointError, EdgeInferError, UnsupportedModelError, UsageError
from edgeinfer.graph import build_graph, read_config, requested_types
from edgeinfer.llm.api import LLM
from edgeinfer.models.describe import describe
from tests.helpers import golden_cases
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import SIZES, sizes_for, split, write_gguf
from tests.helpers.reference import forward
from tests.helpers.sessions import scored, session


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


def test_a_part_of_a_head_turns(tmp_path: Path) -> None:
    """The first 6 of 10 elements of the file, neighbours in pairs, which were 0, 5, 1, 6, 2 and 7 of a head."""
    case = golden_cases.load("llama-mha")
    source = golden_cases.write_checkpoint(case, tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", source, fields={"llama.rope.dimension_count": 6})
    convert(tmp_path / "m.gguf", tmp_path / "bundle")
    halves = (np.arange(0, 60, 10)[:, None] + [0, 1, 2, 5, 6, 7, 3, 8, 4, 9]).ravel()
    tensors = {name: values[halves] if "q_proj" in name or "k_proj" in name else values
               for name, values in case.tensors.items()}
    config = replace(read_config(case.config), rotary_dim=6)
    golden = forward(build_graph(config, requested_types("f32")), tensors, case.ids)
    with session(tmp_path / "bundle", kv="f32", outputs=16) as opened:
        assert np.abs(scored(opened, case.ids) - golden).max() < 1e-5 * np.abs(golden).max()
    assert np.abs(golden - case.logits).max() > 1e-2 * np.abs(golden).max()


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


@pytest.mark.slow(keep=5)
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


@pytest.mark.slow
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
