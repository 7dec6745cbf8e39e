"""Checkpoints that are missing, incomplete or contradict themselves: one sentence, nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.converters import convert
from edgeinfer.errors import CheckpointError, UnsupportedModelError, UsageError
from tests.helpers.checkpoints import make_checkpoint, read_tensors, refused, save_tensors, tiny_config

ROOT = Path(__file__).resolve().parents[2]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "hf")


def test_directories(tmp_path: Path, source: Path) -> None:
    assert refused(tmp_path / "absent") == "There is no checkpoint at SOURCE: no such directory."
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty") == "SOURCE is not a checkpoint: it has no config.json."
    file = source / "model.safetensors"
    assert refused(file) == (
        "SOURCE is a file; give the directory that holds config.json and the weights, or a GGUF file.")
    file.unlink()
    assert refused(source) == (
        "SOURCE has no weights: neither model.safetensors nor model.safetensors.index.json is there."
    )
    (source / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert refused(source) == (
        "SOURCE has its weights only as a pickle (pytorch_model.bin), which could run any code when it is loaded; "
        "save the model again with safetensors (transformers' save_pretrained does so) or download that version."
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{", "config.json is not valid JSON: "),
        (b"\xff", "config.json is not valid JSON: "),
        (b"[" * 99_999, "config.json is not valid JSON: "),
        (b"[]", "config.json is not a JSON object."),
    ],
)
def test_a_config_that_is_none(source: Path, text: bytes, sentence: str) -> None:
    (source / "config.json").write_bytes(text)
    assert refused(source).startswith(sentence)


def test_a_config_without_end(source: Path) -> None:
    os.truncate(source / "config.json", (64 << 20) + 1)
    assert refused(source) == "config.json is larger than 64 MiB, too large for its purpose."


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "model_type"])
def test_a_config_without_a_needed_field(tmp_path: Path, field: str) -> None:
    source = make_checkpoint(tmp_path / "hf")
    (source / "config.json").write_text(json.dumps(tiny_config(**{field: None})))
    assert f"'{field}'" in refused(source)


def test_an_unknown_architecture(source: Path) -> None:
    (source / "config.json").write_text(json.dumps(tiny_config("mamba")))
    assert "model_type is 'mamba', which edgeinfer does not support" in refused(source, UnsupportedModelError)


def test_unknown_types(source: Path) -> None:
    with pytest.raises(UsageError, match=r"weights is 'q1'; choose one of q4, int8, f16, f32, "):
        convert(source, source.parent / "bundle", weights="q1")
    with pytest.raises(UsageError, match=r"group_size is 48; choose one of 32, 64, 128\."):
        convert(source, source.parent / "bundle", group_size=48)
    assert not (source.parent / "bundle").exists()


def test_vocabulary_and_embedding_that_disagree(source: Path) -> None:
    (source / "config.json").write_text(json.dumps(tiny_config(vocab_size=301)))
    assert refused(source) == (
        "config.json says vocab_size 301, but model.embed_tokens.weight in model.safetensors has 300 rows; "
        "they must agree."
    )


def changed(source: Path, **tensors: np.ndarray | None) -> None:
    """Replace, add or leave out tensors; dots in names are written as __."""
    changes = {name.replace("__", "."): value for name, value in tensors.items()}
    have = {**read_tensors(source), **changes}
    save_tensors(source, {name: value for name, value in have.items() if value is not None})


def test_wrong_shapes_and_names(source: Path) -> None:
    changed(source, model__norm__weight=np.ones(47, np.float32))
    assert refused(source) == (
        "The tensor model.norm.weight in model.safetensors has shape [47], but config.json needs [48]."
    )
    changed(source, model__norm__weight=None)
    assert refused(source) == "SOURCE lacks the tensor model.norm.weight."
    norm, up = np.ones(48, np.float32), np.ones((84, 48), np.float32)
    changed(source, model__norm__weight=norm, model__layers__2__mlp__up_proj__weight=up)
    assert refused(source) == (
        "The tensor model.layers.2.mlp.up_proj.weight in model.safetensors is not part of a llama model; "
        "config.json and the weights do not fit together."
    )


def test_a_tied_head_of_another_shape_is_only_remarked(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", tie_word_embeddings=True, tensors={"lm_head.weight": np.ones((2, 3))})
    assert "lm_head.weight differs" in convert(source, tmp_path / "bundle").remarks[0]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("weights", ["q4", "int8", "f16", "f32"])
def test_weights_that_are_not_finite(source: Path, value: str, weights: str) -> None:
    table = read_tensors(source)["model.layers.1.mlp.down_proj.weight"]
    table[40, 5] = float(value)
    changed(source, model__layers__1__mlp__down_proj__weight=table)
    assert refused(source, weights=weights) == (
        f"The tensor model.layers.1.mlp.down_proj.weight has the value {value} at [40, 5]; weights must be finite."
    )


def test_norms_that_are_not_finite(source: Path) -> None:
    changed(source, model__norm__weight=np.full(48, np.nan, np.float32))
    assert refused(source) == "The tensor model.norm.weight has the value nan at [0, 0]; weights must be finite."


@pytest.mark.parametrize(
    ("weights", "value", "sentence"),
    [
        ("f16", 1e5, "has the value 1e+05, too large for f16; convert with weights f32."),
        ("q4", 1e6, "has the value 1e+06, too large for q4 with fp16 scales; convert with weights f32."),
    ],
)
def test_weights_that_are_too_large(source: Path, weights: str, value: float, sentence: str) -> None:
    changed(source, model__layers__0__self_attn__o_proj__weight=np.full((48, 48), value, np.float32))
    text = refused(source, weights=weights)
    assert text == f"The tensor model.layers.0.self_attn.o_proj.weight {sentence}"


def test_doubles_beyond_float32(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", dtype="F64", tensors={"model.norm.weight": np.full(48, 1e300)})
    assert "The tensor model.norm.weight has the value inf" in refused(source)


def test_files_that_travel_are_bounded(tmp_path: Path) -> None:
    """Of sizes that no disk has here: the files are pruned rows."""
    source = make_checkpoint(tmp_path / "hf")
    for name in ("README.md", "LICENSE"):
        with open(source / name, "wb") as file:
            file.truncate(10 << 30)
    report = convert(source, tmp_path / "out")
    assert [remark for remark in report.remarks if "README.md has 10737418240 bytes, over the 8388608" in remark]
    assert not (tmp_path / "out" / "README.md").exists() and not (tmp_path / "out" / "LICENSE").exists()
    for name in ("merges.txt", "chat_template.jinja"):
        with open(source / name, "wb") as file:
            file.truncate(10 << 30)
        with pytest.raises(CheckpointError, match=rf"{name} has 10737418240 bytes, and {name} may have 134217728 at"):
            convert(source, tmp_path / "other")
        (source / name).unlink()
        assert not (tmp_path / "other").exists()
    for number in range(70):
        (source / f"LICENSE.{number}").write_text("yes")
    with pytest.raises(CheckpointError, match=r"has 7\d files for its texts and licences, and a"):
        convert(source, tmp_path / "other")
