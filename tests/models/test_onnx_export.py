"""Files that an export makes: what is in them, and that they are there whole or not at all."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgeinfer.backends import Flavour, export, is_export, verify_export
from edgeinfer.base.lock import DestinationLock
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert, write_random_bundle
from edgeinfer.converters.synthetic.random_neurons import Sparsity
from edgeinfer.errors import DestinationError
from edgeinfer.quant import layouts
from tests.faults import full_disk, strays
from tests.helpers.bundles import tensor_bytes
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import PYTHON, ROOT, environment
from tests.helpers.onnx_models import Slots, data_of, difference, expected
from tests.helpers.sessions import TINY, tokens, write_model

onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.open(write_model(tmp_path / "models"))


@pytest.fixture
def model(bundle: Bundle, tmp_path: Path) -> Path:
    """An export in a folder of its own."""
    export(bundle, tmp_path / "out" / "m.onnx")
    return tmp_path / "out" / "m.onnx"


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_model_says_what_it_is(bundle: Bundle, model: Path) -> None:
    about = {entry.key: entry.value for entry in onnx.load(str(model), load_external_data=False).metadata_props}
    assert about["edgeinfer.bundle"] == bundle.identity
    assert about["edgeinfer.architecture"] == "llama" and about["edgeinfer.ctx"] == "1024"
    assert about["edgeinfer.tokenizer_sha256"] == ""
    assert {"edgeinfer.version", "edgeinfer.dtype", "edgeinfer.attention", "edgeinfer.target"} <= set(about)


def test_data_are_aligned_described_and_no_larger_than_they_must_be(bundle: Bundle, model: Path) -> None:
    proto = onnx.load(str(model), load_external_data=False)
    end = 0
    for tensor in proto.graph.initializer:
        if where := {entry.key: entry.value for entry in tensor.external_data}:
            assert where["location"] == data_of(model).name
            assert int(where["offset"]) == -(-end // 4096) * 4096
            end = int(where["offset"]) + int(where["length"])
        else:
            assert tensor.data_type == onnx.TensorProto.INT64 and tensor.dims[0] <= 4
    assert end == data_of(model).stat().st_size
    assert model.stat().st_size < 40_000


def test_a_bundle_whose_name_ends_like_an_exports_is_a_bundle(bundle: Bundle, tmp_path: Path) -> None:
    named = tmp_path / "named.onnx"
    shutil.copytree(bundle.path, named)
    assert not is_export(named)
    assert is_export(tmp_path / "absent.onnx")


def test_it_opens_from_another_directory(bundle: Bundle, model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    shutil.copytree(model.parent, tmp_path / "elsewhere")
    shutil.rmtree(model.parent)
    monkeypatch.chdir("/")
    moved = tmp_path / "elsewhere" / model.name
    verify_export(moved)
    onnx.checker.check_model(str(moved))
    ids = tokens(9)
    logits = Slots(moved, Flavour().checked(bundle.config)).chunks(ids, 9)
    assert difference(logits, expected(bundle, ids)) < 5e-3


def test_codes_stay_and_scales_too(bundle: Bundle, model: Path) -> None:
    """Against the loops that say where each nibble of a bundle lies, by way of what the layouts unpack."""
    proto = onnx.load(str(model))
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    everything = slice(None)
    for name, rows in (("layers.0.qkv", everything), ("layers.1.gate_up", slice(16)), ("layers.0.down", everything)):
        stored = bundle.types[name]
        codes, scales = layouts.tile16_codes(tensor_bytes(bundle, name), stored.dtype, stored.group_size,
                                             bundle.tensors[name].shape)  # type: ignore[arg-type]
        ours = name.replace("gate_up", "gate_proj")
        bytes_ = arrays[f"{ours}.codes"].reshape(len(arrays[f"{ours}.codes"]), -1)
        found = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(len(bytes_), -1)[:, : codes.shape[1]].astype(int) - 8
        assert np.array_equal(found[rows], codes[rows])
        assert np.array_equal(arrays[f"{ours}.scales"][rows], scales[rows])
        assert arrays[f"{ours}.scales"].dtype == np.float16
        assert (scales < 0).any()
    assert len(arrays["layers.1.gate_proj.codes"]) == TINY.intermediate_size != 80, "rows of padding"


def test_down_by_neuron_is_reported(tmp_path: Path) -> None:
    write_random_bundle(TINY, tmp_path / "b", ffn_layout="neuron")
    report = export(Bundle.open(tmp_path / "b"), tmp_path / "m.onnx")
    assert [remark for remark in report.remarks if "2 matrices are down matrices" in remark and "f16" in remark]


def test_what_cannot_stay_is_said(tmp_path: Path) -> None:
    """A sparse model is exported as it is: with its biases, without its predictor."""
    path = tmp_path / "b"
    write_random_bundle(TINY, path, ffn_layout="neuron", sparsity=Sparsity(0.3, predictor="lowrank", rank=8))
    bundle = Bundle.open(path)
    report = export(bundle, tmp_path / "m.onnx", Flavour(dtype="f32"))
    assert any(remark.startswith("Left out") and "predictor" in remark for remark in report.remarks)
    ids = tokens(20)
    logits = Slots(tmp_path / "m.onnx", Flavour(dtype="f32").checked(bundle.config)).chunks(ids, 20)
    assert difference(logits, expected(bundle, ids)) < 1e-5
    wide = Bundle.open(write_model(tmp_path, weights="f32"))
    assert any("f32 were rounded to f16" in remark for remark in export(wide, tmp_path / "w.onnx").remarks)
    assert not export(wide, tmp_path / "x.onnx", Flavour(dtype="f32")).remarks


def test_norms_of_heads_within_attention(tmp_path: Path) -> None:
    """No CPU provider runs this model; its numbers are those of the paged one, tests/models/test_onnx_paged.py."""
    convert(make_checkpoint(tmp_path / "c", "qwen3"), tmp_path / "b")
    export(Bundle.open(tmp_path / "b"), tmp_path / "m.onnx", Flavour(qk_norm="fused"))
    onnx.checker.check_model(str(tmp_path / "m.onnx"))
    nodes = [node for node in onnx.load(str(tmp_path / "m.onnx")).graph.node if node.op_type == "GroupQueryAttention"]
    assert [list(node.input[-2:]) for node in nodes] == [[f"layers.{i}.q_norm", f"layers.{i}.k_norm"] for i in (0, 1)]
    assert {len(node.input) for node in nodes} == {16}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """The largest tensor of this model has 16 MB; matrices in q4 go through in blocks of 4 MB."""
    config = replace(TINY, vocab_size=16000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=12,
                     num_attention_heads=16, num_key_value_heads=4, head_dim=64)
    path = write_model(tmp_path, config)
    code = ("import sys; from edgeinfer.bundle import Bundle; from edgeinfer.backends import export\n"
            "import onnx, numpy; from edgeinfer.backends.onnx import export as _\n"
            "peak = lambda: int([l for l in open('/proc/self/status') if 'VmHWM' in l][0].split()[1])\n"
            "before = peak(); export(Bundle.open(sys.argv[1]), sys.argv[2]); print(peak() - before)")
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    done = subprocess.run([sys.executable, "-c", code, path, tmp_path / "m.onnx"], env=environment(), cwd=ROOT,
                          capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40_000, f"{done.stdout} kB more for {data_of(tmp_path / 'm.onnx').stat().st_size} bytes"


# -- whole or not at all -----------------------------------------------------------------------------------------------


def test_overwriting_leaves_one_model_and_its_data(bundle: Bundle, model: Path) -> None:
    first = data_of(model).name
    with pytest.raises(DestinationError, match=r"m\.onnx already exists; choose another name, or use --overwrite\.$"):
        export(bundle, model)
    export(bundle, model, Flavour(dtype="f32"), overwrite=True)
    assert data_of(model).name != first
    verify_export(model)
    assert strays(model.parent, model.name, data_of(model).name) == []


def test_a_full_disk_at_any_write(bundle: Bundle, model: Path) -> None:
    """The model that was there stays."""
    before = {path.name: path.read_bytes() for path in model.parent.iterdir()}
    with full_disk(10**9) as disk:
        export(bundle, model.with_name("n.onnx"), Flavour(dtype="f32"))
    assert disk.writes > 3
    for path in (model.with_name("n.onnx"), data_of(model.with_name("n.onnx"))):
        path.unlink()
    for after in range(disk.writes):
        with full_disk(after), pytest.raises(DestinationError, match=r"^The disk is full: .* Nothing was left"):
            export(bundle, model, Flavour(dtype="f32"), overwrite=True)
        assert {path.name: path.read_bytes() for path in model.parent.iterdir() if ".lock" not in path.name} == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Over another model: what is there is the older or the newer, whole; what is left goes with the next export."""
    path, target = write_model(tmp_path), tmp_path / "out" / "m.onnx"
    export(Bundle.open(path), target, Flavour(dtype="f32"))
    code = ("import sys; from edgeinfer.bundle import Bundle; from edgeinfer.backends import Flavour, export\n"
            "b = Bundle.open(sys.argv[1]); print('ready', flush=True)\n"
            "while True:\n"
            " for dtype in ('f16', 'f32'): export(b, sys.argv[2], Flavour(dtype=dtype), overwrite=True)\n")
    rng = random.Random(1)
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", code, path, target], env=environment(), cwd=ROOT,
                                 stdout=subprocess.PIPE)
        assert child.stdout and child.stdout.readline()
        time.sleep(0.05 + rng.random() * 0.3)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        verify_export(target)
    export(Bundle.open(path), target, overwrite=True)
    assert strays(target.parent, "m.onnx", data_of(target).name) == []


@pytest.mark.slow
def test_two_at_once(bundle: Bundle, model: Path) -> None:
    lock = DestinationLock(model)
    lock.acquire()
    try:
        with pytest.raises(DestinationError, match="is being written by another process; wait until it has finished"):
            export(bundle, model, overwrite=True)
    finally:
        lock.release()
    words = [*PYTHON, "export", bundle.path, model.with_name("two.onnx")]
    both = [subprocess.Popen(list(map(str, words)), env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)
            for _ in range(2)]
    errors = [child.communicate()[1] for child in both]
    assert 0 in (codes := [child.returncode for child in both]) and set(codes) <= {0, 1}, errors
    assert not [error for error in errors if "Traceback" in error]
    verify_export(model.with_name("two.onnx"))


def test_a_folder_for_genai_is_replaced_as_one(tmp_path: Path) -> None:
    convert(make_checkpoint(tmp_path / "c"), tmp_path / "b")
    bundle, folder, genai = Bundle.open(tmp_path / "b"), tmp_path / "folder", Flavour(target="genai")
    export(bundle, folder, genai)
    export(bundle, folder, Flavour(target="genai", dtype="f32"), overwrite=True)
    assert verify_export(folder).files == len(list(folder.iterdir())) == 6
    before = sorted(path.name for path in folder.iterdir())
    rename = os.rename

    def broken(old: Path, new: Path) -> None:
        if old.name.endswith(".partial"):
            raise OSError(errno.EIO, "broken")
        rename(old, new)

    with mock.patch("os.rename", broken), pytest.raises(DestinationError, match=r"Cannot write .*folder: broken"):
        export(bundle, folder, genai, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == before
    os.rename(folder, tmp_path / ".folder.0123456789abcdef.old")  # killed between the two
    export(bundle, tmp_path / "folder", genai, overwrite=True)
    assert strays(tmp_path, "folder", "b", "c") == []
