"""Importance matrices of llama.cpp, in both forms, and files that are none."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgeinfer.converters import by_imatrix, read_imatrix
from edgeinfer.converters.checkpoint.directory import Checkpoint
from edgeinfer.errors import CheckpointError, UsageError
from edgeinfer.graph import build_graph, read_config, requested_types
from tests.helpers.checkpoints import tiny_config

DATA = Path(__file__).parents[3] / "data"
SQUARES = np.arange(1, 9, dtype=np.float32)


def write_new(path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    writer = gguf.GGUFWriter(path, arch="imatrix")
    writer.add_array("imatrix.datasets", ["tales.txt"])
    for name, (sums, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts.astype(np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def older(entries: dict[str, np.ndarray], calls: int = 3, text: bytes = b"tales.txt") -> bytes:
    data = struct.pack("<i", len(entries))
    for name, values in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        data += (values * calls).astype("<f4").tobytes()
    return data + struct.pack("<ii", calls, len(text)) + text


def config(**more):  # type: ignore[no-untyped-def]
    return read_config(tiny_config(**more), None)


def of(path: Path, **more):  # type: ignore[no-untyped-def]
    """The statistics of each weight of a tiny model, by name."""
    settings = config(**more)
    found = by_imatrix(path)(Checkpoint(path, settings, {}, {}))
    return found, {weight.name: found.of(weight) for weight in build_graph(settings, requested_types("q4")).weights}


def test_both_forms_are_read(tmp_path: Path) -> None:
    new = read_imatrix(write_new(tmp_path / "new.gguf", {"blk.0.ffn_up.weight": (SQUARES * 5, np.array([5]))}))
    (tmp_path / "old.dat").write_bytes(older({"blk.0.ffn_up.weight": SQUARES}))
    old = read_imatrix(tmp_path / "old.dat")
    for one in (new, old):
        assert one.text == "tales.txt" and list(one.entries) == ["blk.0.ffn_up.weight"]
        np.testing.assert_allclose(one.entries["blk.0.ffn_up.weight"].mean_square, [SQUARES])
    assert new.entries["blk.0.ffn_up.weight"].counts.tolist() == [5]


def test_files_that_llama_imatrix_wrote() -> None:
    """Both forms of one run, over fables-draft and a committed text."""
    new, old = (read_imatrix(DATA / f"fables-draft-imatrix.{form}") for form in ("gguf", "dat"))
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert new.entries.keys() == old.entries.keys() == {f"blk.{i}.{part}.weight" for i in range(3) for part in parts}
    assert new.text == old.text == "box_of_robbers.txt"
    for name, entry in new.entries.items():
        assert entry.mean_square.shape == (1, 384 if "down" in name else 128)
        assert entry.counts == 4096 and old.entries[name].counts == 8  # tokens, and windows of 512
        np.testing.assert_allclose(old.entries[name].mean_square, entry.mean_square, rtol=1e-5)


def test_entries_find_their_matrices(tmp_path: Path) -> None:
    hidden, inner = config().hidden_size, config().intermediate_size
    squares = np.arange(hidden, dtype=np.float32) + 1
    (tmp_path / "old.dat").write_bytes(older({"blk.0.attn_q.weight": squares, "blk.1.ffn_down.weight": np.ones(inner)}))
    calibration, found = of(tmp_path / "old.dat")
    assert calibration.method == "importance" and calibration.text == "tales.txt"
    assert (found["layers.0.qkv"][0].mean_square == squares).all() and found["layers.0.qkv"][0].covariance is None
    assert found["layers.1.down"] and found["layers.0.down"] is None
    assert "says nothing of the inputs of" in calibration.remarks[0] and "rounded plainly" in calibration.remarks[0]


def test_an_expert_that_no_token_chose_gets_the_mean_of_the_others(tmp_path: Path) -> None:
    more = {"num_local_experts": 3, "num_experts_per_tok": 2}
    hidden = config(model_type="mixtral", **more).hidden_size
    sums = np.stack([np.full(hidden, 4), np.full(hidden, 8), np.zeros(hidden)])
    path = write_new(tmp_path / "new.gguf", {"blk.0.ffn_gate_exps.weight": (sums, np.array([4, 4, 0]))})
    _, found = of(path, model_type="mixtral", **more)
    values = [one.mean_square[0] for one in found["layers.0.experts_gate_up"]]
    assert values == [1, 2, 1.5]
    assert [one.tokens for one in found["layers.0.experts_gate_up"]] == [4, 4, 0]


@pytest.mark.parametrize("data, said", [
    (b"", "cut short at its 0 bytes"), (b"\x01\x00", "cut short"), (b"plain text of no matrix", "not a count of"),
    (older({"a": SQUARES})[:30], "cut short at its 30 bytes"), (older({"a": SQUARES * np.nan}), "no mean squares"),
    (older({"a": -SQUARES}), "no mean squares"), (older({"a": SQUARES}, calls=0), "has no sums of squares"),
])
def test_what_is_none_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "bad.dat").write_bytes(data)
    with pytest.raises(CheckpointError, match=said):
        read_imatrix(tmp_path / "bad.dat")


def test_a_model_in_gguf_is_none(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch="llama")
    writer.add_tensor("output_norm.weight", SQUARES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="has no sums of squares; make one with llama-imatrix"):
        read_imatrix(tmp_path / "model.gguf")


def test_counts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    sums = np.stack([SQUARES, SQUARES])
    path = write_new(tmp_path / "new.gguf", {"blk.0.ffn_up.weight": (sums, np.array([1, 2, 3]))})
    with pytest.raises(CheckpointError, match="2 rows of sums and 3 counts"):
        read_imatrix(path)


def test_one_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_imatrix(tmp_path / "none.dat")


def test_that_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "names.dat").write_bytes(older({"v.blk.0.attn_q.weight": SQUARES}))
    with pytest.raises(UsageError, match=r"another model: none of its 1 entries, such as v\.blk\.0\.attn_q"):
        of(tmp_path / "names.dat")
    (tmp_path / "shape.dat").write_bytes(older({"blk.0.attn_q.weight": SQUARES}))
    with pytest.raises(UsageError, match=r"another model: its entry blk.0.attn_q.weight is of 1 x 8 inputs"):
        of(tmp_path / "shape.dat")
