"""Predictor and statistics of a bundle: they are read as written, and those of another model or shape are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import (
    PREDICTOR_TYPE,
    Bundle,
    BundleWriter,
    Predictor,
    Statistics,
    named,
    read_predictor,
    read_statistics,
    weights_identity,
)
from edgeinfer.bundle.arrays import open_arrays, pack_arrays
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.models.describe import describe
from edgeinfer.registry import recipe_with
from edgeinfer.runtime import plan_run
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import TINY, session

N, H, LAYERS = TINY.intermediate_size, TINY.hidden_size, TINY.num_hidden_layers


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    write_random_bundle(TINY, root / "m", ffn_layout="neuron")
    return root / "m"


def predictor(kind: str = "lowrank", rank: int = 5) -> Predictor:
    ones = tuple(np.ones(N, np.float32) for _ in range(LAYERS))
    if kind == "sign":
        return Predictor(kind, 0, signs=tuple(np.full((N, 1), 7, np.uint64) for _ in ones), thresholds=ones)
    if kind == "threshold":
        return Predictor(kind, 0, thresholds=tuple(one[:1] for one in ones))
    inner, outer = (np.zeros(PREDICTOR_TYPE.nbytes(shape), np.uint8) for shape in ((rank, H), (N, rank)))
    return Predictor(kind, rank, inner=(inner,) * LAYERS, outer=(outer,) * LAYERS, thresholds=ones)


def statistics() -> Statistics:
    order = np.arange(N, dtype=np.int32)[::-1].copy()
    return Statistics(9, (np.full(N, 3),) * LAYERS, (np.ones(N, np.float32),) * LAYERS, (order,) * LAYERS)


def bundle_with(plain: Path, path: Path, content: Callable[[str], bytes], part: str = "predictor") -> Path:
    """The bundle again with a part, whatever it holds."""
    with Bundle.open(plain) as bundle, BundleWriter(path, TINY, bundle.header.quantisation) as writer:
        for entry in bundle.header.tensors:
            writer.add(entry.name, entry.type, entry.shape, bundle.weights[entry.offset :][: entry.nbytes])
        writer.add_file(part + ".bin", content(weights_identity(bundle.header.tensors)), part)
    return path


@pytest.mark.parametrize("kind", ["sign", "lowrank", "threshold"])
def test_a_predictor_comes_back(plain: Path, tmp_path: Path, kind: str) -> None:
    made = predictor(kind)
    path = bundle_with(plain, tmp_path / "m", lambda weights: b"".join(made.pack(weights)))
    with Bundle.open(path) as bundle:
        bundle.verify()
        found = read_predictor(bundle)
        assert found is not None and (found.kind, found.rank, found.nbytes) == (kind, made.rank, made.nbytes)
        for name in ("signs", "inner", "outer", "thresholds"):
            for a, b in zip(getattr(made, name), getattr(found, name), strict=True):
                assert a.dtype == b.dtype and np.array_equal(a, b)
                assert b.ctypes.data % 64 == 0 and not b.flags.writeable
        assert read_statistics(bundle) is None


def test_statistics_come_back(plain: Path, tmp_path: Path) -> None:
    path = bundle_with(plain, tmp_path / "m", lambda weights: b"".join(statistics().pack(weights)), "statistics")
    with Bundle.open(path) as bundle:
        found = read_statistics(bundle)
        assert found is not None and found.tokens == 9 and found.order[0][0] == N - 1 and found.fired[1].sum() == 3 * N
        assert read_predictor(bundle) is None


def _nan(array: np.ndarray) -> np.ndarray:
    out = array.copy()
    out[0] = np.nan
    return out


def _infinite_scale(matrix: np.ndarray) -> np.ndarray:
    out = matrix.copy()
    out[-64:].view(np.float16)[0] = np.inf
    return out


def changed(**fields: object) -> Callable[[str], bytes]:
    return lambda weights: b"".join(replace(predictor(), **fields).pack(weights))


GOOD = predictor()
BAD: dict[str, tuple[Callable[[str], bytes], str]] = {
    "another model": (lambda weights: b"".join(GOOD.pack("0" * 64)), "was made for other weights; make it again"),
    "kind": (changed(kind="oracle"), "is of the unknown kind 'oracle'; the kinds are sign, lowrank, threshold"),
    "rank": (changed(rank=H + 1), f"has the rank {H + 1}, which no lowrank predictor of this model has"),
    "no rank": (changed(rank=0), "has the rank 0, which no lowrank"),
    "other rank": (changed(rank=H), r"layers.0.inner has shape \[1088\] of uint8; the model needs"),
    "shape": (changed(thresholds=(np.ones(N - 1, np.float32),) * LAYERS), r"thresholds has shape \[71\] of float32"),
    "type": (changed(thresholds=(np.ones(N, np.int32),) * LAYERS), "has shape .* of int32; the model needs"),
    "layers": (changed(inner=GOOD.inner * 2), "has the array 'layers.2.inner'; it does not belong to this model"),
    "a layer less": (changed(inner=GOOD.inner[:1]), "lacks the array 'layers.1.inner'"),
    "nan": (changed(thresholds=(_nan(GOOD.thresholds[0]),) * LAYERS), "thresholds has values that are not finite"),
    "infinite": (changed(inner=(_infinite_scale(GOOD.inner[0]),) * LAYERS), "inner has values that are not finite"),
    "short": (lambda weights: b"".join(GOOD.pack(weights))[:-1], "ends within the array 'layers.1.thresholds'"),
    "long": (lambda weights: b"".join(GOOD.pack(weights)) + b"\0", "bytes of arrays; its table lists"),
    "no table": (lambda weights: b"hello", "is not a file of arrays"),
    "huge table": (lambda weights: b"\xff" * 64, "is not a file of arrays"),
    "statistics": (lambda weights: b"".join(statistics().pack(weights)), "does not have the fields of a predictor"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_what_does_not_fit_is_refused_on_opening(plain: Path, tmp_path: Path, name: str) -> None:
    content, sentence = BAD[name]
    path = bundle_with(plain, tmp_path / "m", content)
    with pytest.raises(BundleError, match=sentence) as raised, session(path):
        pass
    assert str(raised.value).startswith("Cannot use the bundle") and "\n" not in str(raised.value)
    with Bundle.open(path) as bundle, pytest.raises(BundleError, match=sentence):
        bundle.verify()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokens": 0}, "says it is of 0 tokens"),
        ({"tokens": 2}, "a neuron of layer 0 fired 3 times in 2 tokens"),
        ({"order": (np.zeros(N, np.int32),) * LAYERS}, "the order of layer 0 does not name each neuron once"),
        ({"largest": (np.full(N, np.inf, np.float32),) * LAYERS}, "largest has values that are not finite numbers"),
    ],
)
def test_statistics_that_cannot_be(plain: Path, tmp_path: Path, fields: dict[str, object], sentence: str) -> None:
    made = replace(statistics(), **fields)  # type: ignore[arg-type]
    path = bundle_with(plain, tmp_path / "m", lambda weights: b"".join(made.pack(weights)), "statistics")
    with pytest.raises(BundleError, match=sentence), session(path):
        pass


def table(rows: object, version: int = 1) -> bytes:
    text = json.dumps({"version": version, "about": {}, "arrays": rows}).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (table([], 2), "has version 2, made by a newer edgeinfer; upgrade"),
        (table(3), "is not a file of arrays"),
        (table([3]), "lists an array that is not a JSON object"),
        (table([{"name": "a"}]), "lacks the field 'kind'"),
        (table([{"name": "a", "kind": "f32", "shape": [1], "offset": 0, "b": 1}]), "has the unknown field 'b'"),
        (table([{"name": "a", "kind": "object", "shape": [1], "offset": 0}]), "without a usable name, kind or offset"),
        (table([{"name": "a", "kind": ["f32"], "shape": [1], "offset": 0}]), "without a usable name, kind or offset"),
        (table([{"name": "a", "kind": "f32", "shape": [-1], "offset": 0}]), "the array 'a' has no usable shape"),
        (table([{"name": "a", "kind": "f32", "shape": [2**40, 2**40], "offset": 0}]), "has no usable shape"),
        (table([{"name": "a", "kind": "u8", "shape": [1] * 100, "offset": 0}]) + b"1", "has no usable shape"),
        (table([{"name": "a" * 999, "kind": "u8", "shape": [1], "offset": 0}]), r"ends within the array 'a{60}'"),
        (table([{"name": "a", "kind": "f32", "shape": [1], "offset": 64}]), "not after the one before it"),
        (table([{"name": "a", "kind": "f32", "shape": [1], "offset": 0}]), "ends within the array 'a'"),
        ((56).to_bytes(8, "little") + b"{" * 56, "has a table that is not valid JSON"),
    ],
)
def test_hostile_tables(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "part.bin").write_bytes(content)
    with pytest.raises(BundleError, match=sentence):
        open_arrays(tmp_path / "part.bin")


def test_arrays_of_all_kinds(tmp_path: Path) -> None:
    arrays = {kind: np.arange(5).astype(kind) for kind in ("u1", "i4", "i8", "u8", "f4")}
    (tmp_path / "part.bin").write_bytes(b"".join(pack_arrays({"a": 1}, arrays)))
    about, found = open_arrays(tmp_path / "part.bin")
    assert about == {"a": 1} and all(np.array_equal(found[name], array) for name, array in arrays.items())
    with pytest.raises(BundleError, match=r"missing.bin: No such file"):
        open_arrays(tmp_path / "missing.bin")


@pytest.mark.parametrize("fields", [{"rank": "5"}, {"rank": [1]}, {"rank": 5.0}, {"rank": 10**30}, {"rank": True},
                                    {"kind": ["lowrank"]}, {"kind": ""}, {"kind": "sign"}])
def test_a_graph_is_made_of_no_kind_and_rank_that_cannot_be(
    plain: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    path = bundle_with(plain, tmp_path / "m", changed(**fields))
    with pytest.raises(BundleError, match=r"is of the unknown kind|has the rank"), \
            session(path, recipe=recipe_with(sparse="predict")):
        pass


@pytest.mark.parametrize("asked", ["kind=sign", "kind=lowrank,rank=4", "kind=threshold", "rank=6", "rank=5.5"])
def test_a_recipe_that_asks_for_another_predictor_than_there_is(plain: Path, tmp_path: Path, asked: str) -> None:
    path = bundle_with(plain, tmp_path / "m", lambda weights: b"".join(GOOD.pack(weights)))
    for model, has in ((path, "lowrank of rank 5"), (plain, "none")):
        with pytest.raises(UsageError, match=rf"the predictor of .* is {has}; leave kind and rank out"), \
                session(model, recipe=Recipe.parse(f"sparse:mode=predict,{asked}")):
            pass


def test_what_a_predictor_is_completes_a_recipe(plain: Path, tmp_path: Path) -> None:
    path = bundle_with(plain, tmp_path / "m", lambda weights: b"".join(GOOD.pack(weights)))
    with Bundle.open(path) as bundle:
        for asked in ("", ",kind=lowrank", ",kind=lowrank,rank=5", ",kind=lowrank,rank=5.0"):
            whole = named(Recipe.parse("sparse:mode=predict" + asked), bundle)
            assert str(whole) == "sparse:mode=predict,kind=lowrank,rank=5"


def test_info_names_the_predictor(plain: Path, tmp_path: Path) -> None:
    made = predictor("lowrank")
    path = bundle_with(plain, tmp_path / "m", lambda weights: b"".join(made.pack(weights)))
    assert edgeinfer("info", path, "--json").json["predictor"] == {"kind": "lowrank", "rank": 5, "bytes": made.nbytes}
    assert "predictor     lowrank of rank 5" in edgeinfer("info", path).out
    assert edgeinfer("info", plain, "--json").json["predictor"] is None


def test_only_a_run_looks_through_a_predictor(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describing a model, perhaps beside a run, must not load all pages of its predictor."""
    path = bundle_with(plain, tmp_path / "m", lambda weights: b"".join(predictor().pack(weights)))
    looked: list[object] = []
    monkeypatch.setattr("edgeinfer.bundle.parts.check_scales", lambda *args: looked.append(args))
    recipe = recipe_with(sparse="predict")
    assert describe(path, recipe=recipe).sparse and not looked
    with Bundle.open(path) as bundle:
        plan_run(bundle, RuntimeConfig(ctx=64, recipe=recipe))
    assert looked
