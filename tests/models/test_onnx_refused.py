"""Exports that are refused, each with one sentence; verification of exports; the packages that they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from edgeinfer.backends import Flavour, check_wheels, export, is_export, verify_export
from edgeinfer.backends.onnx import packages
from edgeinfer.backends.onnx.lowering import Lowering, lower
from edgeinfer.backends.onnx.model import GRAPH_KEY, graph_sha256
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.errors import (
    BundleError,
    DestinationError,
    EdgeInferError,
    TokenizerError,
    UnsupportedModelError,
    UsageError,
)
from edgeinfer.graph import NeuronGated, Tensor, Weight, build_graph, expected_types
from edgeinfer.models import demo_path
from tests.faults import strays
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import ROOT, edgeinfer, environment
from tests.helpers.onnx_models import data_of
from tests.helpers.sessions import write_model

onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.open(write_model(tmp_path / "models"))


@pytest.fixture
def model(bundle: Bundle, tmp_path: Path) -> Path:
    """An export in a folder of its own."""
    export(bundle, tmp_path / "out" / "m.onnx")
    return tmp_path / "out" / "m.onnx"


# -- refused -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Flavour, type[EdgeInferError], str]] = {
    "dtype": (Flavour(dtype="bf16"), UsageError, "--dtype is 'bf16'; choose one of f16, f32."),
    "target": (Flavour(target="vllm"), UsageError, "--for is 'vllm'; choose one of session, genai."),
    "attention": (Flavour(attention="mha"), UsageError, "--attention is 'mha'; choose one of gqa, paged."),
    "norm": (Flavour(qk_norm="none"), UsageError, "--qk-norm is 'none'; choose one of apart, fused."),
    "paged": (Flavour(target="genai", attention="paged"), UsageError, "use --attention gqa, whose inputs"),
    "ctx": (Flavour(ctx=1025), UsageError, "--ctx is 1025; it must be from 1 to 1024, the positions that the model"),
    "ctx 0": (Flavour(ctx=0), UsageError, "--ctx is 0; it must be from 1 to 1024"),
    "ctx text": (Flavour(ctx="x"), UsageError, "--ctx is 'x'; it must be an integer, from 1 to 1024"),  # type: ignore[arg-type]
    "top_k": (Flavour(top_k=100), UsageError, "top_k is 100; it must be from 0 to 99"),
    "top_k for genai": (Flavour("genai", top_k=1), UsageError, "top_k is 1; it must be from 0 to 99, and 0 for genai"),
    "top_k nothing": (Flavour(top_k=None), UsageError, "top_k is None; it must be an integer"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", REFUSED)
def test_flavours_that_cannot_be(what: str, bundle: Bundle, tmp_path: Path) -> None:
    flavour, kind, sentence = REFUSED[what]
    with pytest.raises(kind) as caught:
        export(bundle, tmp_path / "m.onnx", flavour)
    assert sentence in str(caught.value) and str(caught.value).endswith(".")
    assert strays(tmp_path, "models") == []


def test_destinations_that_are_none(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "dir.onnx").mkdir()
    (tmp_path / "full" / "inner").mkdir(parents=True)
    (tmp_path / "mixed" / "inner").mkdir(parents=True)
    (tmp_path / "mixed" / "genai_config.json").touch()
    for name, target, sentence in [
        ("m.bin", "session", "is not a valid name for a model; it must end in .onnx."),
        ("m.onnx", "genai", "is the name of a file; with --for genai name a folder that is to be made."),
        ("dir.onnx", "session", "exists and is not a file, so it is not overwritten; remove it first."),
        ("full", "genai", "exists and has no genai_config.json, so it is not overwritten; remove it first."),
        ("\udcff.onnx", "session", "has a name that is not UTF-8, which a model needs to name its data"),
        ("mixed", "genai", "also holds the folder inner, which is not part of an export, so it is not overwritten"),
    ]:
        with pytest.raises(DestinationError) as caught:
            export(bundle, tmp_path / name, Flavour(target=target), overwrite=True)
        assert sentence in str(caught.value)
    with pytest.raises(DestinationError, match=r"^/ is not a place for an export; name a directory that is to be made"):
        export(bundle, "/", Flavour(target="genai"), overwrite=True)
    with pytest.raises(DestinationError, match=r"^The destination is 3; it must be the path of a file or directory\.$"):
        export(bundle, 3)  # type: ignore[arg-type]
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=1e6)), \
            pytest.raises(DestinationError, match=r"needs .* MB, but its disk has only 1.0 MB free"):
        export(bundle, tmp_path / "m.onnx")
    with pytest.raises(DestinationError, match=r"Cannot write /proc/nobody/m\.onnx: "):
        export(bundle, "/proc/nobody/m.onnx")


def test_operations_that_leave_something_out(bundle: Bundle) -> None:
    graph = build_graph(bundle.config, expected_types(bundle.types))
    at = Lowering(graph, Flavour().checked(bundle.config))
    out, weight = Tensor("f", 8), Weight("layers.0.ffn", (8, 3, 8), "ffn")
    op = NeuronGated(out=out, x=out, weight=weight, activation="relu", mask=out)
    with pytest.raises(UnsupportedModelError, match=r"leaves out neurons, which ONNX cannot express; export the model"):
        lower(op, at)
    with pytest.raises(UnsupportedModelError, match=r"has no equivalent in ONNX, so it cannot be exported; leave out"):
        lower(mock.Mock(label="screen"), at)


def test_damaged_bundles_and_weights_beyond_f16(bundle: Bundle, tmp_path: Path) -> None:
    norm = np.full(48, 7e4, np.float32)
    convert(make_checkpoint(tmp_path / "c", tensors={"model.norm.weight": norm}), tmp_path / "b")
    with pytest.raises(BundleError, match=r"norm has the value 70000, beyond f16's 65504; export with --dtype f32\.$"):
        export(Bundle.open(tmp_path / "b"), tmp_path / "m.onnx")
    with open(bundle.weights_path, "r+b") as file:
        file.seek(100)
        file.write(b"\xff\x00\xff")
    with pytest.raises(BundleError, match=r"Cannot use the bundle .*embed"):
        export(Bundle.open(bundle.path), tmp_path / "m.onnx")
    assert strays(tmp_path, "models", "c", "b") == []


def test_a_tokenizer_that_genai_cannot_read(tmp_path: Path) -> None:
    convert(make_checkpoint(tmp_path / "c", tokenizer=False), tmp_path / "b")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json, which onnxruntime-genai reads; convert a"):
        export(Bundle.open(tmp_path / "b"), tmp_path / "m", Flavour(target="genai"))


# -- verified ----------------------------------------------------------------------------------------------------------


def test_damage_is_named(model: Path) -> None:
    assert is_export(model) and verify_export(model).tensors > 20
    data, text, proto = data_of(model), data_of(model).read_bytes(), model.read_bytes()

    def refused(sentence: str) -> None:
        with pytest.raises(BundleError) as caught:
            verify_export(model)
        assert str(caught.value).startswith(f"Cannot use the export {model}: ") and sentence in str(caught.value)
        data.write_bytes(text)
        model.write_bytes(proto)

    data.unlink()
    refused("its data m.")
    data.write_bytes(text[:-1])
    refused(f"is truncated: {len(text) - 1} bytes instead of {len(text)}; copy or export it again.")
    data.write_bytes(text + b"x")
    refused("is too long")
    entry = {e.key: e.value for t in onnx.load(str(model), load_external_data=False).graph.initializer
             for e in t.external_data if t.name == "layers.1.down.codes"}
    at = int(entry["offset"])
    data.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
    refused("the tensor 'layers.1.down.codes' in m.")
    data.write_bytes(text[: at - 1] + b"\1" + text[at:])
    refused("altered")
    changed = onnx.load(str(model), load_external_data=False)
    changed.graph.node[-1].op_type = "Identity"
    model.write_bytes(changed.SerializeToString())
    refused("m.onnx was altered: its checksum does not match; export it again.")
    model.write_bytes(b"\xff\xff")
    refused("m.onnx is not an ONNX model, or was damaged; export it again.")
    model.write_bytes(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])).SerializeToString())
    refused("m.onnx is not an export of edgeinfer's")
    model.unlink()
    refused("there is no m.onnx.")


def test_altered_offsets_and_metadata_with_a_new_checksum(model: Path) -> None:
    def change(sentence: str, **where: str) -> None:
        proto = onnx.load(str(model), load_external_data=False)
        for entry in next(t for t in proto.graph.initializer if t.name == "layers.1.o.codes").external_data:
            entry.value = where.get(entry.key, entry.value)
        for entry in proto.metadata_props:
            entry.value = where.get(entry.key.removeprefix("edgeinfer."), entry.value)
        for entry in proto.metadata_props:
            if entry.key == GRAPH_KEY:
                entry.value = graph_sha256(proto)
        model.with_name("x.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(BundleError) as caught:
            verify_export(model.with_name("x.onnx"))
        assert sentence in str(caught.value)

    change("does not directly follow the one before it.", offset=str(10**12))
    change("does not directly follow the one before it.", offset="4097")
    change("the tensor 'layers.1.o.codes' does not directly follow the one before it.", length="-1")
    change("its data file does not end with its last tensor.", data_bytes="1")
    change("it does not name its data file.", location="../m.data")
    change("its metadata do not belong to an export.", tensors="[1")
    change("its metadata do not belong to an export.", tensors="{}")
    change("its metadata do not belong to an export.", data_bytes="many")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "genai_config.json"])
def test_a_file_of_the_folder_that_was_altered_is_named(name: str, tmp_path: Path) -> None:
    convert(make_checkpoint(tmp_path / "c"), tmp_path / "b")
    export(Bundle.open(tmp_path / "b"), tmp_path / "g", Flavour(target="genai"))
    file = tmp_path / "g" / name
    file.write_text(file.read_text() + " ")
    with pytest.raises(BundleError, match=rf"its {re.escape(name)} is another model's, or was altered; export it"):
        verify_export(tmp_path / "g")
    file.unlink()
    with pytest.raises(BundleError, match=rf"its {re.escape(name)} is missing; export it again\.$"):
        verify_export(tmp_path / "g")
    if hasattr(os, "mkfifo"):
        os.mkfifo(file)  # reading it would wait for ever
        with pytest.raises(BundleError, match=r"g: it is a fifo, not a plain file\.$"):
            verify_export(tmp_path / "g")


# -- the command line and the packages ---------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = edgeinfer("export", "demo", tmp_path / "d.onnx", "--json")
    assert done.code == 0 and Path(done.json["data"]) == data_of(tmp_path / "d.onnx")
    assert abs(done.json["data_bytes"] / done.json["bundle_bytes"] - 1) < 0.04
    checked = edgeinfer("verify", tmp_path / "d.onnx", "--json")
    assert checked.json["ok"] and checked.json["files"] == 2 and checked.json["tensors"] == done.json["tensors"]
    again = edgeinfer("export", "demo", tmp_path / "d.onnx")
    assert again.code == 1 and "already exists" in again.sentence
    assert edgeinfer("export", "demo", tmp_path / "d.onnx", "--dtype", "f8").code == 2
    told = edgeinfer("export", "demo", tmp_path / "g", "--for", "genai", "--ctx", 64)
    assert told.code == 0 and "operators" in told.out
    config = json.loads((tmp_path / "g" / "genai_config.json").read_text())
    assert config["model"]["context_length"] == 64 and config["model"]["decoder"]["filename"] == "model.onnx"
    assert ": OK, " in edgeinfer("verify", tmp_path / "g").out
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    assert edgeinfer("export", make_checkpoint(tmp_path / "c"), tmp_path / "c.onnx").code == 0


@pytest.mark.parametrize(("versions", "sentence"), [
    ({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"},
     "onnxruntime 1.31.1 and onnxruntime-gpu 1.30.0 are both installed, and overwrite each other's files; uninstall "
     "both, then install one"),
    ({}, "onnxruntime is not installed: pip install 'edgeinfer[gpu]'"),
    ({"onnxruntime-gpu": "1.26.0"}, "onnxruntime-gpu 1.26.0 lacks operators of this model; 1.29 is the first"),
])
def test_wheels_that_will_not_do(versions: dict[str, str], sentence: str) -> None:
    with mock.patch.object(packages, "installed", lambda name: versions.get(name, "")), \
            pytest.raises(UsageError, match="(?s)^" + sentence.split("'")[0].replace(".", r"\.")):
        check_wheels()


def test_a_python_that_onnxruntime_has_no_package_for() -> None:
    """pip installs the extra there without it, as its marker says."""
    with mock.patch.object(packages, "installed", lambda name: ""), \
            mock.patch.object(packages.sys, "version_info", (3, 10, 14)), \
            pytest.raises(UsageError, match=r"^onnxruntime is not installed, and has no package for Python 3\.10; run"):
        check_wheels()


def test_without_the_package_onnx(bundle: Bundle, tmp_path: Path) -> None:
    with mock.patch.dict(sys.modules, {"onnx": None}), \
            pytest.raises(UsageError, match=r"^edgeinfer export needs the package onnx, which is not installed: pip"):
        export(bundle, tmp_path / "m.onnx")


def test_no_other_package_imports_them() -> None:
    code = ("import sys, edgeinfer; from edgeinfer import LLM; import edgeinfer.cli.app, edgeinfer.backends\n"
            "edgeinfer.cli.app.make_app(); from edgeinfer.backends import Flavour\n"
            f"m = LLM({str(demo_path())!r}); m.generate('Once', max_tokens=1); m.close()\n"
            "print([name for name in ('onnx', 'onnxruntime', 'google.protobuf') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
