"""Tensors that share an allocation in weights.bin, as the matrices of an MoE model's experts do: each expert is in one
piece.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, BundleWriter, Quantisation, file_offsets, weights_file_bytes
from edgeinfer.bundle.format import TensorLayout, end_of_file
from edgeinfer.errors import BundleError
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.quant import WeightType
from edgeinfer.runtime import planner_of
from tests.helpers.bundles import CONFIG, alter_header, tensor_bytes
from tests.helpers.sessions import session, write_model
from tests.models.test_expert_slots import LARGER, MOE
from tests.models.test_gpt_oss import MOE as BIASED

F32 = WeightType("f32")
SHAPES = {"up": (3 * 32, 5), "down": (3 * 16, 7)}
OWN = {name: rows * columns * 4 // 3 for name, (rows, columns) in SHAPES.items()}
STRIDE = sum(OWN.values())


def written(path: Path, **changes: Any) -> dict[str, np.ndarray]:
    """A bundle of a vector, and two tensors that three experts share."""
    rng = np.random.default_rng(0)
    data = {name: rng.integers(0, 256, 3 * nbytes, dtype=np.uint8) for name, nbytes in OWN.items()}
    shared = {"pieces": 3, "stride": STRIDE, **changes}
    with BundleWriter(path, CONFIG, Quantisation()) as writer:
        writer.add("norm", WeightType("f32", 0, "plain"), (5,), np.ones(20, np.uint8))
        for name, shape in SHAPES.items():
            writer.add(name, F32, shape, (data[name][at : at + 100] for at in range(0, len(data[name]), 100)), **shared)
        writer.add("last", WeightType("f32", 0, "plain"), (5,), np.ones(20, np.uint8))
    return data


def test_experts_lie_in_one_piece_each_and_tensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    data = written(tmp_path / "m")
    with Bundle.open(tmp_path / "m") as bundle:
        bundle.verify()
        place = bundle.tensors["up"].offset
        for e in range(3):
            own = [data[name].reshape(3, -1)[e] for name in SHAPES]
            assert (bundle.weights[place + e * STRIDE :][:STRIDE] == np.concatenate(own)).all()
        for name, want in data.items():
            assert (tensor_bytes(bundle, name) == want).all()


@pytest.mark.parametrize("at", [0, OWN["up"], STRIDE - 1, 3 * STRIDE - 1])
def test_damage_is_found_in_every_piece(tmp_path: Path, at: int) -> None:
    written(tmp_path / "m")
    with Bundle.open(tmp_path / "m") as bundle:
        at += bundle.tensors["up"].offset
    with open(tmp_path / "m" / "weights.bin", "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    with Bundle.open(tmp_path / "m") as bundle, pytest.raises(BundleError, match=r"the tensor '(up|down)' is damaged"):
        bundle.check_contents()


ROOM = "pieces of .* which do not fit beside each other"


@pytest.mark.parametrize(("change", "match"), [
    (lambda up, down: up.update(stride=STRIDE - 64), ROOM),
    (lambda up, down: down.update(pieces=6), ROOM),
    (lambda up, down: up.update(pieces=7), ROOM),
    (lambda up, down: (up.update(stride=2 * STRIDE), down.update(stride=2 * STRIDE)),
     "'last' does not follow on tensors that share an allocation and fill it"),
    (lambda up, down: down.update(offset=down["offset"] + 64), "starts at byte"),
    (lambda up, down: up.update(pieces=0), "'up' has 0 pieces, 1088 bytes apart, which is out of range"),
    (lambda up, down: up.update(stride=2**62), "bytes apart, which is out of range"),
    (lambda up, down: up.update(pieces=3.0), r"tensors\[1\].pieces is not of type int"),
    (lambda up, down: up.pop("stride"), r"tensors\[1\] lacks the field 'stride'"),
])
def test_offsets_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[..., object], match: str) -> None:
    written(tmp_path / "m")
    alter_header(tmp_path / "m", lambda header: change(*header["tensors"][1:3]))
    with pytest.raises(BundleError, match=match):
        Bundle.open(tmp_path / "m")


def test_a_writer_refuses_them_too(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="tensor 'up' has 3 pieces of 640 bytes, 512 apart, which do not fit"):
        written(tmp_path / "m", stride=512)
    with pytest.raises(BundleError, match="tensor 'last' does not follow on"):
        written(tmp_path / "m", stride=STRIDE + 64)
    assert not list(tmp_path.glob("m*"))


def test_moe_models_of_old_bundles_are_to_be_converted_again(tmp_path: Path) -> None:
    path = write_model(tmp_path, MOE)

    def apart(header: dict[str, Any]) -> None:
        for row in header["tensors"]:
            row.pop("pieces", 0)
            row.pop("stride", 0)
        end = 0
        for row in header["tensors"]:
            row["offset"] = -(-end // 64) * 64
            end = row["offset"] + row["nbytes"]

    alter_header(path, apart)
    with pytest.raises(BundleError, match="the matrices of an expert are not contiguous, as in older bundles; convert"):
        Bundle.open(path)


def moved(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Put a bundle's tensors elsewhere, with all bytes and checksums as they belong to them."""
    with Bundle.open(path) as bundle:
        contents = {name: tensor_bytes(bundle, name).tobytes() for name in bundle.tensors}

    def place(header: dict[str, Any]) -> None:
        layout, rows = TensorLayout(), header["tensors"]
        change(rows)
        for row in rows:
            row["offset"] = layout.add(row["nbytes"], row.get("pieces", 0), row.get("stride", 0))
        header["weights_bytes"] = end_of_file(layout.end)
        data = np.zeros(header["weights_bytes"], np.uint8)
        for row in rows:
            pieces = np.frombuffer(contents[row["name"]], np.uint8).reshape(row.get("pieces", 1), -1)
            for i, piece in enumerate(pieces):
                data[row["offset"] + i * row.get("stride", 0) :][: len(piece)] = piece
        (path / "weights.bin").write_bytes(data.tobytes())

    alter_header(path, place)


def apart(rows: list[dict[str, Any]]) -> None:
    """The experts' matrices of the last layer each in a place of its own; the columns last, so that strides reach
    beyond the file's end."""
    shared = [row for row in rows if row.get("pieces")][-2:]
    for row in shared:
        row["stride"] = row["nbytes"] // row["pieces"]
    rows.append(rows.pop(rows.index(shared[1])))


def in_turns(rows: list[dict[str, Any]]) -> None:
    """Two matrices in pieces between each other's."""
    pair = [next(row for row in rows if row["name"] == f"layers.0.{name}") for name in ("qkv", "o")]
    rows.remove(pair[1])
    rows.insert(rows.index(pair[0]) + 1, pair[1])
    for row in pair:
        row.update(pieces=3, stride=sum(one["nbytes"] for one in pair) // 3)


def columns_first(rows: list[dict[str, Any]]) -> None:
    """The matrices of an expert in the other order."""
    first = next(i for i, row in enumerate(rows) if row.get("pieces"))
    rows[first : first + 2] = rows[first : first + 2][::-1]


@pytest.mark.parametrize("change", [apart, in_turns, columns_first])
def test_offsets_other_than_those_of_the_graph_are_refused(tmp_path: Path, change: Any) -> None:
    """All are sound by themselves; kernels would read beside them, or after the end of the file."""
    path = write_model(tmp_path, MOE)
    moved(path, change)
    with Bundle.open(path) as bundle:
        bundle.verify()
    with pytest.raises(BundleError, match=r"share an allocation are not those of a .* model"), session(path):
        pass


@pytest.mark.parametrize("config", [MOE, LARGER, BIASED], ids=["plain", "shared", "biased"])
def test_a_plan_without_a_bundle_is_that_of_the_bundle(tmp_path: Path, config: Any) -> None:
    path = write_model(tmp_path, config)
    with Bundle.open(path) as bundle:
        graph = build_graph(bundle.config, expected_types(bundle.types))
        assert file_offsets(graph) == {name: entry.offset for name, entry in bundle.tensors.items()}
        assert weights_file_bytes(graph) == bundle.weights_bytes
        assert {name: entry.stride for name, entry in bundle.tensors.items() if entry.stride} == graph.strides
        assert planner_of(bundle).weight_bytes == bundle.weights_bytes
