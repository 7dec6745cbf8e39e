"""Damaged, lying and foreign bundles: each refused with one sentence."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import __version__
from edgeinfer.bundle import HEADER_FILE, Bundle
from edgeinfer.errors import BundleError
from tests.helpers.bundles import TENSORS, alter_header, write_bundle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "m")
    return tmp_path / "m"


def sentence(path: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(path)
    text = str(caught.value)
    assert text.startswith(f"Cannot open the bundle {path}: ") and text.endswith(".") and "\n" not in text
    return text.removeprefix(f"Cannot open the bundle {path}: ")


def tensor(i: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["tensors"][i].update(fields)


def file(name: str, nbytes: int, sha256: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["files"].append({"name": name, "nbytes": nbytes, "sha256": sha256, "part": ""})


def in_config(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["config"].update(fields)


SHA = "0" * 64
ADVICE = (f"; the bundle was written by edgeinfer {__version__}: upgrade edgeinfer, or convert the model again with "
          "this one.")
ALTERATIONS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.update(format="gguf"), "bundle.json is not a bundle header: its format is not 'edgeinfer-bundle'."),
    (lambda d: d.update(version="1"), "bundle.json has no valid format version."),
    (lambda d: d.update(version=0), "bundle.json has no valid format version."),
    (lambda d: d.update(version=4), "the bundle has format version 4, made by a newer edgeinfer; this one reads up to "
                                    "version 3: upgrade edgeinfer."),
    (lambda d: d.update(hidden=1), "bundle.json has the unknown field 'hidden'" + ADVICE),
    (lambda d: d.update(hidden=1, made_by="x\ny" * 99), "; the bundle was written by x?yx?y"),
    (lambda d: d.update(hidden=1, made_by=""), "; the bundle was written by an unknown program: upgrade"),
    (lambda d: d.update(hidden=1, made_by=1), "bundle.json: made_by is not a string."),
    (lambda d: d.pop("files"), "bundle.json lacks the field 'files'."),
    (lambda d: d.update(tensors={}), "bundle.json: tensors is not a list."),
    (lambda d: d.update(tensors=[]), "bundle.json lists no tensors."),
    (lambda d: d.update(weights_bytes=-1), "bundle.json: weights_bytes is not a size in bytes."),
    (lambda d: d.update(source=None), "bundle.json: source is not a string."),
    (lambda d: d.update(weights_bytes=d["weights_bytes"] + 64), ", but the tensors end at byte "),
    (lambda d: d["tensors"].append(dict(d["tensors"][0])), "tensor 'embed' occurs twice in bundle.json."),
    (lambda d: d["tensors"].append(7), "tensors[4] is not a JSON object."),
    (lambda d: d["tensors"][0].pop("offset"), "tensors[0] lacks the field 'offset'."),
    (tensor(0, more=1), "tensors[0] has the unknown field 'more'" + ADVICE),
    (tensor(0, offset="0"), "tensors[0].offset is not of type int."),
    (tensor(0, offset=True), "tensors[0].offset is not of type int."),
    (tensor(0, name="../x/y"), "tensors[0] has the unusable name '../x/y'."),
    (tensor(1, offset=2**63), "tensor 'norm' has the offset 9223372036854775808, which is out of range."),
    (tensor(1, offset=-64), "tensor 'norm' has the offset -64, which is out of range."),
    (tensor(1, offset=3200), "tensor 'norm' starts at byte 3200; without hole or overlap it is 3264."),
    (tensor(2, offset=131072), "tensor 'big' starts at byte 131072; without hole or overlap it is 65536."),
    (tensor(1, nbytes=97), "tensor 'norm' has 97 bytes; its shape and type need 96."),
    (tensor(1, shape=[25]), "tensor 'norm' has 96 bytes; its shape and type need 100."),
    (tensor(1, shape=[24.0]), "tensor 'norm' has a shape that is not a list of integers."),
    (tensor(1, shape=[2**62]), "tensor 'norm': shape [4611686018427387904] is out of range"),
    (tensor(3, bits=8, grid=[-127, 127], shape=[2**31 - 1, 3, 2**31 - 1]), "more than a 64-bit offset can address."),
    (tensor(0, layout="rows"),
     "tensor 'embed': layout 'rows' is unknown; this version reads tile16, neuron, plain" + ADVICE),
    (tensor(0, bits=2), "tensor 'embed' has a type that is not known here: bits 2, grid [-127, 127], table [], scale "
                        "\"f16\", minimum false" + ADVICE),
    (tensor(3, minimum=True), "tensor 'ffn' has a type that is not known here: bits 4, grid [-8, 7], table [], scale "
                              "\"f16\", minimum true" + ADVICE),
    (tensor(3, grid=[], table=list(range(15))), "bits 4, grid [], table [0, 1, 2, 3, "),
    (tensor(3, grid=[], table=list(range(16))), "tensor 'ffn': type 'tableq' does not exist in layout neuron"),
    (tensor(0, scale="u8"), "tensor 'embed' has a type that is not known here"),
    (tensor(0, minimum=0), "tensors[0].minimum is not of type bool."),
    (tensor(0, layout="plain"), "tensor 'embed': type 'int8' does not exist in layout plain; it holds f32, i32"
     + ADVICE),
    (tensor(0, group_size=33), "tensor 'embed': group size 33 is unknown; int8 has groups of 32, 64 or 128" + ADVICE),
    (lambda d: d["files"][0].update(part="router"), "file 'tokenizer.json' is the unknown part 'router' of a model"
                                                    + ADVICE),
    (lambda d: d["files"][0].pop("part"), "files[0] lacks the field 'part'."),
    (tensor(0, sha256="xyz"), "tensor 'embed' has no valid sha256."),
    (file("../../etc/passwd", 1, SHA),
     "files[1] has the unusable name '../../etc/passwd'."),
    (file("x", -1, SHA), "file 'x' has -1 bytes."),
    (file("x", 1, ""), "file 'x' has no valid sha256."),
    (file("x", 1, SHA), "its file x is missing."),
    (lambda d: d["files"].append(d["files"][0]), "a file occurs twice in bundle.json."),
    (lambda d: d["quantisation"].update(weights="q3"), "quantisation: type 'q3' does not exist in layout tile16"),
    (lambda d: d.update(config=[]), "config is not a JSON object."),
    (in_config(colour=1), "config has the unknown field 'colour'" + ADVICE),
    (lambda d: d["config"]["rope"].update(spin=1), "config.rope has the unknown field 'spin'" + ADVICE),
    (lambda d: d["config"].pop("head_dim"), "config lacks the field 'head_dim'."),
    (in_config(vocab_size="40"), "config.vocab_size is '40'; it must be of type int."),
    (in_config(vocab_size=True), "config.vocab_size is True; it must be of type int."),
    (in_config(vocab_size=0), "config.vocab_size is 0; it must be from 1 to 2147483647."),
    (in_config(rms_norm_eps="x" * 99), "config.rms_norm_eps is 'xxxx"),
    (in_config(windows=[1, None]), "config.windows is [1, None]; it must be a list of integers."),
    (in_config(windows=[4, 4]), "config.windows has 2 entries for 1 layers."),
    (in_config(num_hidden_layers=10**6), "config.num_hidden_layers is 1000000; the limit is 4096."),
    (in_config(num_key_value_heads=3), "config.num_attention_heads is 4, no multiple of config.num_key_value_heads 3."),
    (in_config(model_type="os.system"), "config.model_type 'os.system' is not the name of an architecture."),
]


@pytest.mark.slow(keep=20)
@pytest.mark.parametrize(("change", "want"), ALTERATIONS, ids=[want[:50] for _, want in ALTERATIONS])
def test_a_header_that_lies(path: Path, change: Callable[[dict[str, Any]], object], want: str) -> None:
    alter_header(path, change)
    assert want in sentence(path)


def test_every_bit_of_the_header_counts(path: Path) -> None:
    text = (path / HEADER_FILE).read_text()
    (path / HEADER_FILE).write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-04'))
    assert sentence(path) == "bundle.json was altered: its checksum does not match; convert the model again."


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (b"{", "bundle.json is not valid JSON"),
        (b"\xff\xfe", "bundle.json is not valid JSON"),
        (b"[" * 100_000, "bundle.json is not valid JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "a name occurs twice in one object"),
        (b"[]", "bundle.json is not a JSON object; the bundle is damaged."),
        (b"", "bundle.json is not valid JSON"),
    ],
)
def test_a_header_that_is_none(path: Path, text: bytes, want: str) -> None:
    (path / HEADER_FILE).write_bytes(text)
    assert want in sentence(path)


def test_a_header_without_end(path: Path) -> None:
    with open(path / HEADER_FILE, "r+b") as file:
        file.truncate((64 << 20) + 1)
    assert sentence(path) == "bundle.json has 67108865 bytes; the limit is 67108864."


def test_missing_parts(path: Path, tmp_path: Path) -> None:
    assert sentence(tmp_path / "absent") == "there is no such directory."
    assert sentence(path / HEADER_FILE) == "it is not a directory."
    (tmp_path / "empty").mkdir()
    assert sentence(tmp_path / "empty") == "it has no bundle.json."
    (path / "tokenizer.json").unlink()
    assert sentence(path) == "its file tokenizer.json is missing."
    (path / "weights.bin").unlink()
    (path / "tokenizer.json").write_bytes(b'{"model": 1}')
    assert sentence(path) == "its file weights.bin is missing."


def test_unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("edgeinfer.bundle.reader.read_header", refuse)
    assert sentence(path) == "Permission denied."


@pytest.mark.parametrize("change", [-1, -64, 1, 64])
def test_weights_of_another_length(path: Path, change: int) -> None:
    size = (path / "weights.bin").stat().st_size
    os.truncate(path / "weights.bin", size + change)
    how = "truncated" if change < 0 else "too long"
    assert sentence(path) == f"weights.bin is {how}: {size + change} bytes instead of {size}."


def test_verify_finds_one_flipped_bit(path: Path) -> None:
    bundle = Bundle.open(path)
    ends = [(name, entry.offset + entry.nbytes - 1) for name, entry in bundle.tensors.items()]
    with open(path / "weights.bin", "r+b") as file:
        for name, place in ends:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 4]))
            file.flush()
            with pytest.raises(BundleError, match=rf"^Cannot use the bundle .*m: the tensor '{name}' is damaged"):
                Bundle.open(path).verify()
            file.seek(place)
            file.write(bytes([byte]))
            file.flush()
        Bundle.open(path).verify()
        file.seek(40000)  # between two tensors
        file.write(b"x")
        file.flush()
        with pytest.raises(BundleError, match=r"m: the gap at byte 3360 of weights\.bin is not zero; convert or copy"):
            Bundle.open(path).verify()
        file.seek(40000)
        file.write(b"\0")
        file.seek(-1, os.SEEK_END)  # after the last tensor
        file.write(b"x")
        file.flush()
        with pytest.raises(BundleError, match=r"m: the gap at byte \d+ of weights\.bin is not zero; convert or copy"):
            Bundle.open(path).verify()


def test_verify_finds_an_altered_file(path: Path) -> None:
    bundle = Bundle.open(path)
    (path / "tokenizer.json").write_bytes(b'{"model": 2}')
    assert sentence(path) == ("the file 'tokenizer.json' is damaged: its checksum does not match; convert or copy the "
                              "model again.")
    with pytest.raises(BundleError, match=r"^Cannot use the bundle .*m: the file 'tokenizer.json' is damaged"):
        bundle.verify()
    (path / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"m: tokenizer.json cannot be read: No such file or directory\.$"):
        bundle.verify()


def test_tensors_that_the_graph_does_not_expect(path: Path) -> None:
    expected = {name: shape for name, (_, shape) in TENSORS.items()}
    Bundle.open(path, expected).close()
    with pytest.raises(BundleError, match=r"Cannot open the bundle .*: the tensor 'head' is missing\."):
        Bundle.open(path, {**expected, "head": (1, 1)})
    bundle = Bundle.open(path)
    with pytest.raises(BundleError, match=r"Cannot use the bundle .*: the tensor 'ffn' is not part of a llama"):
        bundle.check({name: shape for name, shape in expected.items() if name != "ffn"})
    with pytest.raises(BundleError, match=r"the tensor 'norm' has shape \[24\]; the model needs \[25\]\."):
        bundle.check({**expected, "norm": (25,)})
    with pytest.raises(BundleError, match=r"^The bundle .*m lacks the tensor 'head'\.$"):
        bundle.weight_type("head")


def test_the_header_is_plain_json(path: Path) -> None:
    data = json.loads((path / HEADER_FILE).read_text())
    assert list(data)[:2] == ["format", "version"]
    assert data["tensors"][1] == {
        "name": "norm", "layout": "plain", "bits": 32, "grid": [], "table": [], "scale": "", "minimum": False,
        "group_size": 0, "shape": [24], "offset": 3264, "nbytes": 96, "sha256": data["tensors"][1]["sha256"],
    }
    assert data["tensors"][3] | {"bits": 4, "grid": [-8, 7], "scale": "f16", "group_size": 32} == data["tensors"][3]
    assert data["files"][0]["part"] == ""
