"""Safetensors files and indices that are truncated, damaged or lie: one sentence, nothing left behind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.converters import Checkpoint
from edgeinfer.converters.checkpoint.safetensors_file import SafetensorsFile
from edgeinfer.errors import CheckpointError
from tests.helpers.checkpoints import make_checkpoint, raw_safetensors, read_tensors, refused

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "hf")


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES: list[tuple[dict[str, Any] | bytes, bytes, int | None, str]] = [
    ({"a": entry()}, bytes(8), 2**63, "its header should have 9223372036854775808 bytes, but the file has"),
    ({"a": entry()}, bytes(8), 200, "its header should have 200 bytes, but the file has"),
    (b"{", b"", None, "its header is not valid JSON."),
    (b"\xff\xff", b"", None, "its header is not valid JSON."),
    (b"[" * 99_999, b"", None, "its header is not valid JSON."),
    (b"[]", b"", None, "its header is not a JSON object."),
    ({"a": 1}, b"", None, "the entry of tensor 'a' lacks dtype, shape or data_offsets."),
    ({"a": {"dtype": "F32", "shape": [2]}}, b"", None, "the entry of tensor 'a' lacks dtype, shape or data_offsets."),
    ({"a": entry(offsets=[0, 8, 16])}, bytes(8), None, "the entry of tensor 'a' lacks dtype, shape or data_offsets."),
    ({"a": entry(shape=3)}, bytes(8), None, "the entry of tensor 'a' lacks dtype, shape or data_offsets."),
    ({"a": entry(shape=[-2])}, bytes(8), None, "the shape or offsets of tensor 'a' are not sizes."),
    ({"a": entry(shape=[2.0])}, bytes(8), None, "the shape or offsets of tensor 'a' are not sizes."),
    ({"a": entry(shape="22")}, bytes(8), None, "the shape or offsets of tensor 'a' are not sizes."),
    ({"a": entry(offsets=[0, 2**70])}, bytes(8), None, "the shape or offsets of tensor 'a' are not sizes."),
    ({"a": entry(dtype="Q9")}, bytes(8), None, "the tensor 'a' has the unknown type 'Q9'."),
    ({"a": entry(dtype=[])}, bytes(8), None, "the tensor 'a' has the unknown type []."),
    ({"a": entry(shape=[2**40, 2**40])}, bytes(8), None, "the shape [1099511627776, 1099511627776] of tensor"),
    ({"a": entry(shape=[3])}, bytes(8), None, "the tensor 'a' has 8 bytes, but its shape [3] and type F32 need 12."),
    ({"a": entry(offsets=[8, 0])}, bytes(8), None, "the tensor 'a' has -8 bytes, but its shape [2] and type F32"),
    ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), None, "the tensor 'b' overlaps another one at byte 4 of"),
    ({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20), None, "the tensor 'b' follows a hole at byte 12 of"),
    ({"a": entry()}, bytes(7), None, "it is truncated: "),
    ({"a": entry()}, bytes(9), None, "1 bytes after the last tensor belong to nothing."),
]


@pytest.mark.parametrize(("header", "data", "length", "sentence"), LIES, ids=[lie[3][:60] for lie in LIES])
def test_a_header_that_lies(
    source: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None, sentence: str
) -> None:
    raw_safetensors(source / "model.safetensors", header, data, length)
    text = refused(source)
    assert text.startswith("Cannot read model.safetensors: ") and sentence in text


@pytest.mark.parametrize("size", [0, 7, 100, -1, -5000])
def test_a_truncated_file(source: Path, size: int) -> None:
    file = source / "model.safetensors"
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    text = refused(source)
    assert text.startswith("Cannot read model.safetensors: ") and "truncated" in text


def test_a_file_that_becomes_shorter_while_it_is_read(source: Path) -> None:
    with Checkpoint.open(source) as checkpoint:
        os.truncate(source / "model.safetensors", 20_000)
        with pytest.raises(CheckpointError, match=r"model\.safetensors became shorter while it was read; the tensor"):
            checkpoint.read_rows("model.norm.weight", 0, 48)


@pytest.mark.parametrize("dtype", ["I32", "F8_E4M3", "BOOL"])
def test_weights_of_another_type(source: Path, dtype: str) -> None:
    sizes = {"I32": 4, "F8_E4M3": 1, "BOOL": 1}
    header: dict[str, Any] = {}
    end = 0
    for name, values in read_tensors(source).items():
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [end, end + values.size * sizes[dtype]]}
        end += values.size * sizes[dtype]
    raw_safetensors(source / "model.safetensors", header, bytes(end))
    assert refused(source) == (
        f"The tensor {EMBEDDING} in model.safetensors has the type {dtype}; weights must be F32, F16, BF16 or F64."
    )


def test_errors_of_the_disk(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(source) as checkpoint:
        file = checkpoint.files[EMBEDDING]
        file._file.close()
        file._file = FailingFile()  # type: ignore[assignment]
        with pytest.raises(CheckpointError, match=r"^Cannot read .*model\.safetensors: Input/output error\.$"):
            checkpoint.read_rows(EMBEDDING, 0, 1)


class FailingFile:
    """A file on a broken disk."""

    def seek(self, place: int) -> None:
        raise OSError(5, "Input/output error")

    def close(self) -> None:
        pass


def test_a_file_that_may_not_be_read(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").mkdir()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert "model.safetensors is a directory instead of a plain file" in refused(source)


def alter_index(source: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = source / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.pop("weight_map"), "model.safetensors.index.json has no weight_map."),
        (lambda d: d.update(weight_map={}), "model.safetensors.index.json has no weight_map."),
        (lambda d: d["weight_map"].update(a="../x.safetensors"),
         "model.safetensors.index.json names the file '../x.safetensors', which is not a plain safetensors file name."),
        (lambda d: d["weight_map"].update(a=7),
         "model.safetensors.index.json names the file 7, which is not a plain safetensors file name."),
        (lambda d: d["weight_map"].update(a="weights.bin"), "which is not a plain safetensors file name."),
        (lambda d: d["weight_map"].update(a="model-00003-of-00003.safetensors"),
         "names the file model-00003-of-00003.safetensors, which is missing; download it again."),
        (lambda d: d["weight_map"].update(a="model-00001-of-00002.safetensors"),
         "says that model-00001-of-00002.safetensors holds the tensor a, but it does not."),
    ],
)
def test_an_index_that_lies(tmp_path: Path, change: Callable[[dict[str, Any]], object], sentence: str) -> None:
    source = make_checkpoint(tmp_path / "hf", shards=2)
    alter_index(source, change)
    assert refused(source).endswith(sentence)


def test_a_missing_shard(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", shards=2)
    (source / "model-00002-of-00002.safetensors").unlink()
    assert refused(source) == (
        "model.safetensors.index.json names the file model-00002-of-00002.safetensors, which is missing; "
        "download it again."
    )


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", shards=2)
    first, second = sorted(source.glob("model-*.safetensors"))
    second.write_bytes(first.read_bytes())
    assert re.fullmatch(
        r"The tensor \S+ is both in model-00001-of-00002\.safetensors and in model-00002-of-00002\.safetensors\.",
        refused(source),
    )


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^Cannot read .*absent: No such file or directory\.$"):
        SafetensorsFile(tmp_path / "absent")
