"""Sources of weights: each step, alone and after others, against NumPy on the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgeinfer.converters import Checkpoint
from edgeinfer.converters.checkpoint.sources import SourceReader
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Source, Weight
from tests.helpers.checkpoints import make_checkpoint

rng = np.random.default_rng(5)
TENSORS = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {
    "m": (24, 20), "v": (24,), "r": (24,), "c": (20,), "s": (3, 24, 20), "vs": (2, 24), "e": (2, 3, 24, 20),
}.items()}  # fmt: skip
M, V, S = (Source(name, TENSORS[name].shape) for name in ("m", "v", "s"))
R, C = (Source(name, TENSORS[name].shape) for name in ("r", "c"))
m, v, s, r, c = (TENSORS[name] for name in "mvsrc")
ONE = np.float32(1)


def halves(x: np.ndarray, d: int) -> np.ndarray:
    """Even rows of each head before the odd ones, in loops."""
    order = [h + i for h in range(0, len(x), d) for i in [*range(0, d, 2), *range(1, d, 2)]]
    return x[order]


def runs(x: np.ndarray, step: int, first: int, run: int) -> np.ndarray:
    return np.concatenate([x[i + first : i + first + run] for i in range(0, len(x), step)])


CASES: dict[str, tuple[Source, np.ndarray]] = {
    "whole": (M, m),
    "vector": (V, v),
    "rows": (M.rows(5, 17), m[5:17]),
    "rows of rows": (M.rows(5, 17).rows(3, 5), m[8:10]),
    "elements": (V.rows(3, 9), v[3:9]),
    "item": (S.item(2), s[2]),
    "item of items": (Source("e", (2, 3, 24, 20)).item(1).item(2), TENSORS["e"][1, 2]),
    "stacked vector": (Source("vs", (2, 24)).item(1).rows(2, 9), TENSORS["vs"][1, 2:9]),
    "transposed": (M.transposed(), m.T),
    "transposed item, columns": (S.item(1).transposed().rows(4, 13), s[1, :, 4:13].T),
    "transposed back": (M.transposed().rows(1, 7).transposed(), m[:, 1:7]),
    "every second": (M.every(2, first=1), m[1::2]),
    "runs": (M.every(6, first=1, run=2), runs(m, 6, 1, 2)),
    "transposed runs": (M.transposed().every(5, first=2, run=3), runs(m.T, 5, 2, 3)),
    "halves": (M.rope_halves(8), halves(m, 8)),
    "halves of a vector": (V.rope_halves(6), halves(v, 6)),
    "halves of rows": (M.rows(8, 24).rope_halves(4), halves(m[8:24], 4)),
    "halves, transposed": (M.transposed().rope_halves(10), halves(m.T, 10)),
    "scaled": (M.scaled(0.3), m * np.float32(0.3)),
    "one more": (V.plus(1).scaled(0.7), (v + ONE) * np.float32(0.7)),
    "scaled, then one more": (V.scaled(0.7).plus(1), v * np.float32(0.7) + ONE),
    "row factors": (M.scaled(R), m * r[:, None]),
    "column factors": (M.scaled(C, "columns"), m * c),
    "vector factors": (V.scaled(R), v * r),
    "folded norm": (M.scaled(C.plus(1), "columns").rows(3, 9), (m * (c + ONE))[3:9]),
    "factors, then all else": (S.item(1).scaled(R).transposed().rope_halves(4), halves((s[1] * r[:, None]).T, 4)),
    "factors of what is left": (M.rope_halves(12).scaled(R).rows(7, 20), (halves(m, 12) * r[:, None])[7:20]),
    "halved factors": (M.scaled(R.rope_halves(4)), m * halves(r, 4)[:, None]),
    "transposed factors": (M.transposed().scaled(C).scaled(R, "columns"), m.T * c[:, None] * r),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sources") / "hf", tensors=dict(TENSORS))


def reader(opened: Checkpoint, source: Source) -> SourceReader:
    weight = Weight("w", source.shape, "matrix", (source,))
    return SourceReader(opened, SimpleNamespace(weights=(weight,)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [1 << 22, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_numpys(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int) -> None:
    """By blocks of rows and of columns of several sizes, whatever is read at a time."""
    monkeypatch.setattr("edgeinfer.converters.checkpoint.sources.BLOCK_WEIGHTS", limit)
    source, want = CASES[name]
    assert source.shape == want.shape
    want = want.reshape(len(want), -1)
    with Checkpoint.open(checkpoint) as opened:
        read = reader(opened, source)
        for step in (1, 5, 100):
            ends = [(a, min(a + step, len(want))) for a in range(0, len(want), step)]
            rows = [read.rows(source, a, b) for a, b in ends]
            assert {block.dtype for block in rows} == {np.dtype(np.float32)}
            np.testing.assert_array_equal(np.concatenate(rows), want)
            ends = [(a, min(a + step, want.shape[1])) for a in range(0, want.shape[1], step)]
            np.testing.assert_array_equal(np.hstack([read.columns(source, a, b) for a, b in ends]), want)
        assert read.total == sum(TENSORS[part.name].nbytes for part in source.parts)


REFUSED: list[tuple[Callable[[], Source], str]] = [
    (lambda: M.rows(20, 25), "The tensor m of shape [24, 20] has no rows 20 to 24; config.json "
     "and the architecture do not fit together."),
    (lambda: M.rows(-1, 5), "has no rows -1 to 4; "),
    (lambda: M.rows(5, 5), "has no rows 5 to 4; "),
    (lambda: S.item(1).rows(0, 25), "The part [24, 20] of the tensor s of shape [3, 24, 20] has no rows 0 to 24; "),
    (lambda: S.item(3), "has no item 3; "),
    (lambda: V.item(0), "has no item 0; "),
    (lambda: M.scaled(2).item(0), "has no item 0; "),
    (lambda: S.rows(0, 1), "is stacked: choose an item first; "),
    (lambda: S.scaled(2), "is stacked: choose an item first; "),
    (lambda: V.transposed(), "is not a matrix; "),
    (lambda: S.transposed(), "is not a matrix; "),
    (lambda: M.every(5), "has no rows 0 to 0 in each 5; "),
    (lambda: M.every(4, first=3, run=2), "has no rows 3 to 4 in each 4; "),
    (lambda: M.every(4, first=-1), "has no rows -1 to -1 in each 4; "),
    (lambda: M.rope_halves(16), "has no heads of 16 rows in pairs; "),
    (lambda: M.rope_halves(3), "has no heads of 3 rows in pairs; "),
    (lambda: M.scaled(C), "has no rows for the [20] factors of c; "),
    (lambda: M.scaled(R, "columns"), "has no columns for the [24] factors of r; "),
    (lambda: V.scaled(R, "columns"), "has no columns for the [24] factors of r; "),
    (lambda: M.scaled(R, "cols"), "has no cols for the [24] factors of r; "),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_steps_that_do_not_fit(make: Callable[[], Source], sentence: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        make()
    assert sentence in str(caught.value)


def test_sources_are_small_and_comparable() -> None:
    """A description, whatever the size of what it describes."""
    large = Source("w", (1 << 20, 8)).every(2).rope_halves(64).scaled(Source("n", (8,)).plus(1), "columns")
    assert large == Source("w", (1 << 20, 8)).every(2).rope_halves(64).scaled(Source("n", (8,)).plus(1), "columns")
    assert len({large, large.plus(0)}) == 2
    assert [part.name for part in large.parts] == ["w", "n"]
    assert len(repr(large)) < 600
