"""Formats that grow: older bundles open, younger fields have defaults, and unknown fields are refused with advice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import HEADER_FILE, PARTS, Bundle, BundleWriter, Quantisation
from edgeinfer.errors import BundleError
from edgeinfer.graph import ModelConfig
from edgeinfer.models import demo_path
from edgeinfer.quant import TYPES, WeightType
from tests.helpers.bundles import CONFIG, alter_header, as_format_1, write_bundle
from tests.helpers.sessions import session

ROOT = Path(__file__).resolve().parents[2]
FORMAT_1 = Path(__file__).parents[1] / "golden" / "format-1" / HEADER_FILE


@dataclass(frozen=True)
class Grown(ModelConfig):
    """The model's config of a later version."""

    logit_softcap: float = 0.0


@pytest.fixture
def demo_1(tmp_path: Path) -> Path:
    """The demo as format 1 had it: its header as it was, its weights without the zeros after them."""
    path = Path(shutil.copytree(demo_path(), tmp_path / "demo-1"))
    shutil.copy(FORMAT_1, path / HEADER_FILE)
    os.truncate(path / "weights.bin", (path / "weights.bin").stat().st_size - 64)
    return path


def test_a_bundle_of_format_1_opens_and_says_the_same(demo_1: Path) -> None:
    with Bundle.open(demo_1) as old, Bundle.open(demo_path()) as new:
        old.verify()
        assert (old.header.version, new.header.version) == (1, 2)
        assert replace(old.header, version=2, weights_bytes=new.weights_bytes) == new.header
    rows = []
    for path in (demo_1, demo_path()):
        with session(path, ctx=64) as opened:
            rows.append(opened.prefill(opened.new_sequence(), [1, 5, 9]).copy())
    np.testing.assert_array_equal(*rows)


def test_checksums_of_format_1_count(demo_1: Path) -> None:
    with open(demo_1 / "weights.bin", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(BundleError, match="is damaged: its checksum does not match; convert or copy"):
        Bundle.open(demo_1).verify()
    text = (demo_1 / HEADER_FILE).read_text()
    (demo_1 / HEADER_FILE).write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-04'))
    with pytest.raises(BundleError, match=r"bundle\.json was altered: its checksum does not match"):
        Bundle.open(demo_1)


@pytest.mark.parametrize("version", [1, 2])
def test_neurons_of_an_older_format_are_refused(version: int, tmp_path: Path) -> None:
    """Their gates stand elsewhere; the bytes would be taken for others."""
    write_bundle(tmp_path / "m")
    if version == 1:
        as_format_1(tmp_path / "m")
    else:
        alter_header(tmp_path / "m", lambda data: data.update(version=2))
    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path / "m")
    assert str(caught.value) == (
        f"Cannot open the bundle {tmp_path / 'm'}: tensor 'ffn' is in layout neuron as format {version} had it, with "
        "each gate beside its up row; convert the model again.")


def test_rows_of_format_1_have_their_own_fields(demo_1: Path) -> None:
    alter_header(demo_1, lambda data: data["tensors"][0].update(dtype="q1"))
    with pytest.raises(BundleError, match=r"'embed': type 'q1' does not exist in layout tile16; it holds q4, int8"):
        Bundle.open(demo_1)
    alter_header(demo_1, lambda data: data["tensors"][0].update(bits=4))
    with pytest.raises(BundleError, match=r"tensors\[0\] has the unknown field 'bits'; the bundle was written by e"):
        Bundle.open(demo_1)


def test_a_field_with_a_default_may_be_absent(tmp_path: Path) -> None:
    write_bundle(tmp_path / "m")
    for name in ("rope", "windows", "mlp_bias", "eos_token_ids"):
        alter_header(tmp_path / "m", lambda data, name=name: data["config"].pop(name))
        assert Bundle.open(tmp_path / "m").config == CONFIG


def test_a_younger_bundle_runs_where_its_field_is_known_and_is_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(demo_path(), tmp_path / "m"))
    with monkeypatch.context() as later:
        later.setattr("edgeinfer.bundle.config_json.ModelConfig", Grown)
        with session(path, ctx=64) as opened:  # the bundle is older than the field
            assert opened.model == Grown(**Bundle.open(demo_path()).config.__dict__)
            opened.prefill(opened.new_sequence(), [1, 5, 9])
        alter_header(path, lambda data: (data["config"].update(logit_softcap=30.0), data.update(made_by="edgeinfer 9")))
        assert Bundle.open(path).config == replace(opened.model, logit_softcap=30.0)
    with pytest.raises(BundleError) as caught:
        Bundle.open(path)
    assert str(caught.value) == (
        f"Cannot open the bundle {path}: config has the unknown field 'logit_softcap'; the bundle was written by "
        "edgeinfer 9: upgrade edgeinfer, or convert the model again with this one.")


def test_all_fields_are_written(tmp_path: Path) -> None:
    write_bundle(tmp_path / "m")
    config = json.loads((tmp_path / "m" / HEADER_FILE).read_text())["config"]
    assert config.keys() == ModelConfig.__dataclass_fields__.keys()
    assert config["rope"].keys() == type(CONFIG.rope).__dataclass_fields__.keys()


OTHERS = [part for part in PARTS if part not in ("predictor", "statistics", "cold", "screen", "draft_head")]
"""Parts whose content the bundle itself does not read (test_bundle_parts.py and test_screened_head.py have others)."""


def test_optional_parts_are_listed_files(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer:
        writer.add("norm", WeightType("f32", 0, "plain"), (24,), bytes(96))
        for part in OTHERS:
            writer.add_file(f"{part}.bin", b"1", part)
        with pytest.raises(BundleError, match="'router' is not part of a model; the parts are predictor, statistics,"):
            writer.add_file("router.bin", b"1", "router")
    with Bundle.open(tmp_path / "m") as bundle:
        bundle.verify()
        assert {entry.part: name for name, entry in bundle.files.items()} == {part: f"{part}.bin" for part in OTHERS}
    (tmp_path / "m" / "quality.bin").write_bytes(b"2")
    with pytest.raises(BundleError, match=r"the file 'quality.bin' is damaged"):
        Bundle.open(tmp_path / "m").verify()


def test_a_type_is_what_its_fields_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table is found by its fields, under whatever name; without the row it is refused."""
    write_bundle(tmp_path / "m")
    alter_header(tmp_path / "m", lambda data: data["tensors"][3].update(grid=[], table=list(range(-8, 7))))
    monkeypatch.setitem(TYPES, "q4t", replace(TYPES["q4"], name="q4t", grid=(), table=tuple(range(-8, 7))))
    assert str(Bundle.open(tmp_path / "m").weight_type("ffn")) == "q4tg32 by neuron"
    monkeypatch.undo()
    with pytest.raises(BundleError, match=r"tensor 'ffn' has a type that is not known here: bits 4, grid \[\], ta"):
        Bundle.open(tmp_path / "m")


def test_levels_of_a_tensor_are_in_its_row(tmp_path: Path) -> None:
    """A version without such types refuses them, as it refuses every table that it does not know."""
    stored = WeightType("tableq3", 64, levels=(-127, -75, -42, -14, 12, 40, 71, 119))
    with BundleWriter(tmp_path / "m", CONFIG, Quantisation("tableq3", 64)) as writer:
        writer.add("w", stored, (16, 64), bytes(stored.nbytes((16, 64))))
    with Bundle.open(tmp_path / "m") as bundle:
        assert bundle.weight_type("w") == stored
    alter_header(tmp_path / "m", lambda data: data["tensors"][0]["table"].pop())
    with pytest.raises(BundleError, match=r"'w' has a type that is not known here: bits 3, grid \[\], table \[-127"):
        Bundle.open(tmp_path / "m")
    alter_header(tmp_path / "m", lambda data: data["tensors"][0]["table"].append(128))
    with pytest.raises(BundleError, match=r"tensor 'w': the levels \[-127, -75, .* do not fit tableq3"):
        Bundle.open(tmp_path / "m")


def test_a_row_of_the_table_is_offered_everywhere() -> None:
    """The choices of requests, the command line and the planner, sizes and the quantiser follow from a new row."""
    done = subprocess.run([sys.executable, "-c", FURTHER_TYPE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FURTHER_TYPE = """
import numpy as np
from edgeinfer.quant import KV_TYPES, TYPES, KvType, StorageType, WeightType, kv, layouts, quantise

TYPES["w6"] = StorageType("w6", 6, ("tile16",), grid=(-31, 31), groups=(32,), scale="f16")
TYPES["w3"] = StorageType("w3", 3, ("tile16",), grid=(-4, 3), groups=(32, 64), scale="f16")
KV_TYPES["int4"] = KvType(4, scale_bytes=2)
from edgeinfer import config
from edgeinfer.registry import OPTIONS
from edgeinfer.errors import UsageError
from edgeinfer.graph import requested_types
from edgeinfer.kernels import abi, catalogue
from edgeinfer.memory_planner.alternatives import STORAGES, _smaller_kv

assert config.WEIGHT_TYPES[:2] == ("q4", "int8") and config.WEIGHT_TYPES[-2:] == ("w6", "w3")
assert next(one.metavar for one in OPTIONS if one.name == "weights").endswith("|w6|w3")
sizes = [stored.bits_per_weight for stored in STORAGES]
assert sizes == sorted(sizes, reverse=True)
assert {"f16", "int8_g32", "w6_g32", "q4_g32", "w3_g32"} <= {stored.suffix for stored in STORAGES}
w6 = WeightType("w6", 32)
assert w6.tile_bytes(65) == 2 * (16 * 64 * 6 // 8 + 64) and w6.words == "w6 in groups of 32" and w6.quantised
assert requested_types("w6").__closure__
try:
    requested_types("w6", ffn_layout="neuron")
    raise SystemExit("not refused")
except UsageError as error:
    assert str(error) == "ffn_layout neuron holds q4, int8, q2, but weights is w6; choose one, or tile16."
weights = np.random.default_rng(0).standard_normal((4, 64), np.float32)
codes, scales, errors = quantise.quantise(weights, "w6", 32)
assert abs(codes).max() == 31 and errors.relative < 0.001
for name, most in (("w6", 0.001), ("w3", 0.05)):
    codes, scales, errors = quantise.quantise(weights, name, 32)
    data = layouts.pack_tile16(codes, name, 32, scales)
    assert len(data) == WeightType(name, 32).nbytes(weights.shape) and errors.relative < most
    values = layouts.unpack_tile16(data, name, 32, weights.shape)
    assert np.array_equal(values, codes * np.repeat(scales.astype(np.float32), 32, axis=1))
    assert all(catalogue.has_reference(f"{kind}_{name}_g32") for kind in ("linear", "gated", "embed", "experts_down"))
    assert not catalogue.is_known(f"neuron_gated_{name}")
assert config.RuntimeConfig(kv="int4").kv == "int4" and _smaller_kv("f16") == ["int8", "int4"]
assert abi.kv_head_bytes("int4", 20) == 2 * 16 * (16 + 2) and abi.kv_block_bytes("int4", 20) == 16 * 16
assert catalogue.has_reference("attention_int4") and catalogue.has_reference("rope_store_int4")
codes = np.random.default_rng(1).integers(-7, 8, (3, 16, 32)).astype(np.int8)
for pack, unpack in ((kv.pack_keys, kv.unpack_keys), (kv.pack_values, kv.unpack_values)):
    data = pack(codes, KV_TYPES["int4"])
    assert data.shape == (3, 16 * 16) and np.array_equal(unpack(data, KV_TYPES["int4"], 16), codes)
"""

