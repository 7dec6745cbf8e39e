"""Hooks and what is captured with them, against the model's own logits and plain NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.calibration.hooks import HookedRunner, View, open_plain
from edgeinfer.calibration.statistics import Covariance, Firing, Largest, Rows, capture, in_groups
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.kernels import abi
from edgeinfer.runner import DECODE, PROMPT, Segment
from edgeinfer.sparse import ffns, parts
from tests.helpers.sessions import TINY, session, tokens

MODEL = replace(TINY, hidden_act="relu")
IDS = tokens(100)


@pytest.fixture(scope="module", params=["tile16", "neuron"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    write_random_bundle(MODEL, root / "m", ffn_layout=request.param)
    return root / "m"


def scores_of(runner, ids: list[int]) -> np.ndarray:  # type: ignore[no-untyped-def]
    sequence = runner.new_sequence()
    rows = np.concatenate([logits.copy() for _, logits in runner.score(sequence, ids)])
    runner.release(sequence)
    return rows


@pytest.mark.parametrize("threads", [1, 2])
def test_stops_change_no_bit_and_see_what_the_matmuls_see(path: Path, threads: int) -> None:
    opened = open_plain(path, 128, threads, outputs=40, chunk=40)
    networks, seen = ffns(opened.graph), []

    def look(i: int):  # type: ignore[no-untyped-def]
        weights = parts(opened.bundle, networks[i])

        def hook(view: View) -> None:
            x, f = view.values(networks[i].x), view.floats(networks[i].f)
            reference = np.maximum(x @ weights.gate.T, 0) * (x @ weights.up.T)
            np.testing.assert_allclose(f, reference, rtol=1e-4, atol=1e-5)
            seen.append((i, view.tokens))

        return hook

    hooked = scores_of(HookedRunner(opened, {ffn.op: [look(i)] for i, ffn in enumerate(networks)}), IDS)
    assert seen == [(i, n) for n in (40, 40, 20) for i in (0, 1)]
    assert hooked.tobytes() == scores_of(opened, IDS).tobytes()
    opened.close()


def test_statistics_are_those_of_numpy_whatever_the_chunk(path: Path) -> None:
    found = []
    for chunk, threads in ((64, 1), (7, 2)):
        opened = open_plain(path, 64, threads, chunk=chunk)
        ffn = ffns(opened.graph)[1]
        width = ffn.x.width
        fired, largest, rows, whole = Firing(ffn.f), Largest(ffn.f), Rows(ffn.x, 1000), Covariance(ffn.x)
        kept, few = Rows(ffn.f, 1000), Rows(ffn.f, 30)
        blocks = [Covariance(ffn.x, range(a, min(a + 16, width))) for a in range(0, width, 16)]
        done: list[int] = []
        capture(opened, IDS, {ffn.op: [fired, largest, rows, kept, few, whole, *blocks]},
                progress=lambda n, total, item, done=done: done.append(n))  # type: ignore[misc]
        assert done[-1] == fired.tokens == whole.tokens == len(IDS) and len(rows.rows) == len(IDS)
        assert fired.counts.tolist() == (kept.rows != 0).sum(axis=0).tolist() and fired.counts.sum() > 0
        assert np.array_equal(few.rows, kept.rows[:30])
        assert np.array_equal(largest.values, np.abs(kept.rows).max(axis=0))
        np.testing.assert_allclose(whole.mean, rows.rows.T @ rows.rows / len(IDS), rtol=1e-4, atol=1e-6)
        joined = np.concatenate([block.mean for block in blocks])
        np.testing.assert_allclose(joined, whole.mean, rtol=1e-5, atol=1e-7)
        found.append((fired.counts.tobytes(), rows.rows.tobytes()))
        opened.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("role", [PROMPT, DECODE])
def test_the_role_is_what_was_asked_for_and_not_the_number_of_tokens(path: Path, role: int) -> None:
    opened = open_plain(path, 64, 1, chunk=5)
    roles: list[int] = []
    words = opened._tables.tokens.view(np.int64).reshape(-1, abi.TOKEN_BYTES // 8)
    op = ffns(opened.graph)[0].op
    capture(opened, IDS[:11], {op: [lambda view: roles.extend(words[: view.tokens, abi.TOKEN_ROLE // 8].tolist())]},
            role=role)
    opened.close()
    assert roles == [role] * 11


def test_what_is_written_is_what_the_model_goes_on_with(path: Path) -> None:
    opened = open_plain(path, 128, 1, outputs=40, chunk=40)
    networks = ffns(opened.graph)

    def silence(ffn):  # type: ignore[no-untyped-def]
        def hook(view: View) -> None:
            view.floats(ffn.f)[:] = 0

        return hook

    plain = scores_of(opened, IDS)
    silent = scores_of(HookedRunner(opened, {ffn.op: [silence(ffn)] for ffn in networks}), IDS)
    assert np.abs(plain - silent).max() > 0.01
    opened.close()


def test_what_cannot_be_hooked(path: Path) -> None:
    left_out = "recipe fuse_input leaves operations out where a forward pass has one token"
    with session(path) as opened, pytest.raises(UsageError, match=left_out):
        HookedRunner(opened, {})
    opened = open_plain(path, 64, 1, chunk=8)
    ffn = ffns(opened.graph)[0]
    with pytest.raises(UsageError, match=r"no operation (neuron_)?gated"):
        HookedRunner(opened, {replace(ffn.op, layer=7): []})
    with pytest.raises(RequestError, match="The text has no token to take statistics of"):
        capture(opened, [], {})
    hooked = HookedRunner(opened, {ffn.op: [lambda view: view.floats(ffn.x)]})
    with pytest.raises(RequestError, match="2 sequences are run together; hooks take one"):
        hooked.forward([Segment(hooked.new_sequence(), [1]), Segment(hooked.new_sequence(), [1])])
    sequence = hooked.new_sequence()
    with pytest.raises(UsageError, match="is not stored in f32, so it cannot be changed in place"):
        hooked.forward([Segment(sequence, [1, 2])])
    assert len(sequence) == 0 and not sequence.blocks and not sequence.reserved
    opened.close()


def test_groups_take_what_fits() -> None:
    assert list(in_groups([3, 3, 3, 9, 1], int, 6)) == [[3, 3], [3], [9], [1]]
