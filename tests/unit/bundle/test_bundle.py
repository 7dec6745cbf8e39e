"""A bundle's bytes, its table, and the way there and back."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, BundleWriter, Quantisation, config_from_json, is_bundle
from edgeinfer.errors import BundleError
from edgeinfer.graph import ModelConfig, RopeConfig
from edgeinfer.quant import WeightType
from tests.helpers.bundles import CONFIG, TENSORS, contents, tensor_bytes, write_bundle


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "model"
    data = write_bundle(path, source="somebody/model")
    assert is_bundle(path) and not is_bundle(tmp_path)
    with Bundle.open(path) as bundle:
        assert bundle.config == CONFIG
        assert bundle.quantisation == Quantisation()
        assert bundle.header.source == "somebody/model"
        assert bundle.header.made_by.startswith("edgeinfer ")
        assert bundle.path == path and bundle.weights_path == path / "weights.bin"
        assert bundle.weights_bytes == bundle.weights_path.stat().st_size == bundle.weights.size
        assert list(bundle.tensors) == list(TENSORS)
        assert bundle.types == {name: weight_type for name, (weight_type, _) in TENSORS.items()}
        assert bundle.weight_type("ffn") == WeightType("q4", 32, "neuron")
        for name, (_, shape) in TENSORS.items():
            assert bundle.tensors[name].shape == shape
            np.testing.assert_array_equal(tensor_bytes(bundle, name), data[name])
            assert bundle.tensors[name].sha256 == hashlib.sha256(data[name]).hexdigest()
        assert bundle.file("tokenizer.json") == path / "tokenizer.json"
        assert bundle.file("tokenizer.model") is None
        bundle.check({name: shape for name, (_, shape) in TENSORS.items()})
        bundle.verify()


def test_nothing_but_the_bundle_is_left(tmp_path: Path) -> None:
    write_bundle(tmp_path / "deep" / "model")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["model"]
    names = sorted(p.name for p in (tmp_path / "deep" / "model").iterdir())
    assert names == ["bundle.json", "tokenizer.json", "weights.bin"]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a")
    write_bundle(tmp_path / "b")
    for name in ("bundle.json", "weights.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_alignment_gaps_and_end(tmp_path: Path) -> None:
    write_bundle(tmp_path / "model")
    bundle = Bundle.open(tmp_path / "model")
    offsets = {name: entry.offset for name, entry in bundle.tensors.items()}
    # 3 tiles x 1 record of 2 x 8 lines of int8 and one of scales; 24 floats padded to 128 bytes; 64 KiB for the big one
    assert offsets == {"embed": 0, "norm": 3 * 1088, "big": 65536, "ffn": 65536 + 2 * 8200 * 64}
    norm_end = 3 * 1088 + 96
    assert not bundle.weights[norm_end:65536].any()
    end = offsets["ffn"] + 36 * 3 * 64
    assert bundle.weights_bytes == end + 64  # kernels read a little after the last tensor
    assert not bundle.weights[end:].any()


def test_the_mapping_is_read_only_and_outlives_close(tmp_path: Path) -> None:
    data = write_bundle(tmp_path / "model")
    bundle = Bundle.open(tmp_path / "model")
    view = tensor_bytes(bundle, "norm")
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    bundle.close()
    np.testing.assert_array_equal(view, data["norm"])
    with pytest.raises(BundleError, match=r"The bundle .*model was closed\."):
        tensor_bytes(bundle, "norm")


def test_data_may_come_in_pieces(tmp_path: Path) -> None:
    data = contents()
    with BundleWriter(tmp_path / "m", CONFIG, Quantisation()) as writer:
        for name, (weight_type, shape) in TENSORS.items():
            writer.add(name, weight_type, shape, (bytes(piece) for piece in np.array_split(data[name], 7)))
        (tmp_path / "LICENSE").write_text("free")
        entry = writer.copy_file(tmp_path / "LICENSE")
    assert entry.nbytes == 4
    bundle = Bundle.open(tmp_path / "m")
    bundle.verify()
    np.testing.assert_array_equal(tensor_bytes(bundle, "big"), data["big"])


def test_verify_reports_progress(tmp_path: Path) -> None:
    write_bundle(tmp_path / "m")
    calls: list[tuple[int, int, str]] = []
    bundle = Bundle.open(tmp_path / "m")
    bundle.verify(lambda *call: calls.append(call))
    total = bundle.weights_bytes + 12
    assert calls[-1][:2] == (total, total)
    assert all(0 <= done <= total == of for done, of, _ in calls)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


@pytest.mark.parametrize(
    ("layout", "dtype", "group", "shape", "nbytes"),
    [
        ("tile16", "q4", 32, (16, 64), 576),
        ("tile16", "q4", 32, (17, 65), 2 * 2 * 576),
        ("tile16", "q4", 64, (1, 1), 1088),
        ("tile16", "q4", 128, (16, 257), 2 * 2112),
        ("tile16", "int8", 32, (16, 64), 1088),
        ("tile16", "int8", 128, (1, 1), 4160),
        ("tile16", "f16", 0, (16, 3), 128),
        ("tile16", "f32", 0, (33, 3), 3 * 192),
        ("plain", "f32", 0, (33,), 132),
        ("tile16", "q4m", 32, (16, 65), 2 * 640),
        ("tile16", "q5", 32, (17, 64), 2 * 704),
        ("tile16", "q4k", 32, (17, 512), 2 * 2 * 2368),
        ("tile16", "q5k", 32, (16, 256), 2880),
        ("tile16", "q6", 16, (16, 256), 3392),
        ("tile16", "iq4k", 32, (1, 256), 2240),
        ("neuron", "q4", 32, (5, 3, 64), 5 * 3 * 64),
        ("neuron", "q4", 32, (5, 3, 128), 5 * 3 * 128),
        ("neuron", "int8", 128, (5, 3, 129), 5 * 3 * 320),
        ("neuron", "q2", 128, (5, 3, 256), 5 * 3 * 128),
    ],
)
def test_bytes_of_a_tensor(layout: str, dtype: str, group: int, shape: tuple[int, ...], nbytes: int) -> None:
    assert WeightType(dtype, group, layout).nbytes(shape) == nbytes


@pytest.mark.parametrize(
    ("layout", "dtype", "group", "shape", "sentence"),
    [
        ("rows", "q4", 32, (1, 1), "layout 'rows' is unknown; this version reads tile16, neuron, plain."),
        ("tile16", "q3", 32, (1, 1), "type 'q3' does not exist in layout tile16; it holds q4, int8, f16, f32, q4m,"),
        ("tile16", "q6", 32, (1, 1), "group size 32 is unknown; q6 has groups of 16."),
        ("tile16", "q4k", 32, (1, 255), "shape [1, 255] does not fit type q4k, whose rows are whole blocks of 256 col"),
        ("neuron", "q6", 16, (1, 3, 256), "type 'q6' does not exist in layout neuron; it holds q4, int8, q2."),
        ("neuron", "f16", 0, (1, 3, 1), "type 'f16' does not exist in layout neuron; it holds q4, int8, q2."),
        ("neuron", "q2", 32, (1, 3, 64), "group size 32 is unknown in layout neuron; q2 has groups of 64 or 128."),
        ("tile16", "q4", 48, (1, 1), "group size 48 is unknown; q4 has groups of 32, 64 or 128."),
        ("tile16", "f16", 32, (1, 1), "group size 32 makes no sense for f16; it must be 0."),
        ("tile16", "q4", 32, (1,), "shape [1] does not fit layout tile16."),
        ("neuron", "q4", 32, (1, 4, 1), "shape [1, 4, 1] does not fit layout neuron."),
        ("plain", "f32", 0, (0,), "shape [0] is out of range; each dimension is from 1 to 2147483647."),
        ("tile16", "f32", 0, (2**31, 1), "shape [2147483648, 1] is out of range"),
        ("neuron", "int8", 32, (2**31 - 1, 3, 2**31 - 1), "more than a 64-bit offset can address."),
    ],
)
def test_a_tensor_that_cannot_be(layout: str, dtype: str, group: int, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(BundleError) as caught:
        WeightType(dtype, group, layout).nbytes(shape)
    assert sentence in str(caught.value)


def test_config_round_trip() -> None:
    config = replace(
        CONFIG, rope=RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=8192),
        windows=(16,), bos_token_id=1, eos_token_ids=(2, 3), tie_word_embeddings=True, rms_norm_eps=1e-6,
    )
    text = json.dumps(asdict(config))
    assert config_from_json(json.loads(text)) == config
    assert isinstance(config_from_json(json.loads(text)), ModelConfig)


@pytest.mark.timing
def test_opening_a_large_models_bundle_takes_under_20_ms(tmp_path: Path) -> None:
    """The table of a 7B model (32 layers), with tiny tensors: opening it compares no checksum of weights."""
    weight_type = WeightType("q4", 32)
    config = replace(CONFIG, num_hidden_layers=32)
    with BundleWriter(tmp_path / "m", config, Quantisation(), overwrite=True) as writer:
        for i in range(32):
            for part in ("qkv", "o", "gate_up", "down", "attention_norm", "ffn_norm"):
                writer.add(f"layers.{i}.{part}", weight_type, (16, 64), bytes(576))
    Bundle.open(tmp_path / "m").close()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        Bundle.open(tmp_path / "m").close()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02
