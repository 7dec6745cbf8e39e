"""From a bundle to a sparse one: the files written, refusals, and the quality on a real ReLU model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, read_predictor, read_statistics
from edgeinfer.calibration.hooks import open_plain
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import CancelledError, RequestError
from edgeinfer.models import demo_path
from edgeinfer.quality.evaluate import Stream, token_stream
from edgeinfer.quality.gate import find, objection
from edgeinfer.quality.measurements import read_quality
from edgeinfer.runner import Segment
from edgeinfer.sparse import LAMBDAS, Tally, choose, ffns, parts, predicted, sparsify
from edgeinfer.sparse.fitting import Fitted
from edgeinfer.text import Tokenizer
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import TINY

MODEL = replace(TINY, vocab_size=300, hidden_act="relu", intermediate_size=80)
WORDS = np.random.default_rng(5).integers(97, 123, 2600, dtype=np.uint8).tobytes().decode()
STREAM = Stream(tuple(range(3, 259)) * 9, (True,) * 2304, 2304)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundles")
    for layout in ("tile16", "neuron"):
        write_random_bundle(MODEL, root / layout, ffn_layout=layout)
    write_random_bundle(replace(MODEL, hidden_act="silu"), root / "silu")
    (root / "text.txt").write_text(WORDS, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def sparse(bundles: Path) -> tuple[Path, dict[str, Any]]:
    """Made of a bundle in tiles by the command line, and its report."""
    made = edgeinfer("sparsify", bundles / "tile16", bundles / "sparse", "--text", bundles / "text.txt", "--max-kld",
                     0.01, "--json", "--threads", 1)
    assert made.code == 0, made.err
    return bundles / "sparse", made.json


def test_the_weights_are_those_of_the_source_in_order_of_heat(bundles: Path, sparse: tuple[Path, Any]) -> None:
    with Bundle.open(bundles / "tile16") as source, Bundle.open(sparse[0]) as made:
        made.verify()
        statistics = read_statistics(made)
        assert statistics is not None
        for before, after in zip(*(ffns(graph_of(bundle)) for bundle in (source, made)), strict=True):
            old, new = parts(source, before), parts(made, after)
            order = statistics.order[after.layer]
            assert np.array_equal(old.gate[order], new.gate) and np.array_equal(old.up[order], new.up)
            np.testing.assert_allclose(old.down[order], new.down, atol=0.15 * np.abs(old.down).max())
            fired = statistics.fired[after.layer]
            assert np.all(np.diff(fired[:20]) <= statistics.tokens // 50) and fired[0] > fired[-1]
        assert {entry.name for entry in made.header.files} > {entry.name for entry in source.header.files}
        assert not (sparse[0] / "work").exists()


def graph_of(bundle: Bundle):  # type: ignore[no-untyped-def]
    from edgeinfer.graph import build_graph, expected_types

    return build_graph(bundle.config, expected_types(bundle.types))


def test_the_report_says_what_it_costs_and_the_gate_knows(sparse: tuple[Path, dict[str, Any]]) -> None:
    path, report = sparse
    assert report["enabled"] is (report["kld_mean"] <= 0.01) and report["predictor"] == "lowrank"
    assert report["down_error"] > 0 and report["source_kld"] > 0 and report["read_share"] > 0
    assert len(report["layers"]) == 2 and all(0 < layer["density"] < 1 for layer in report["layers"])
    with Bundle.open(path) as bundle:
        (known,) = read_quality(bundle)
        assert known.kld_mean == report["kld_mean"] and find([known], known.setting, bundle) == known
        assert not objection([known], known.setting, bundle, known.kld_mean)
        assert objection([known], known.setting, bundle, known.kld_mean / 2)


@pytest.mark.slow
def test_by_neuron_no_weight_is_rounded_again(bundles: Path, tmp_path: Path) -> None:
    for kind in ("sign", "threshold"):
        with Bundle.open(bundles / "neuron") as source:
            made = sparsify(source, tmp_path / kind, STREAM, kind=kind, threads=1, max_kld=1e-12)
        assert made.down_error == 0 and made.against_source.divergence is not None
        assert made.against_source.divergence.kld_mean < 1e-5  # another order of sums, rounded to other codes at times
        assert not made.enabled and "times the bound of 1e-12" in made.reason
        with Bundle.open(tmp_path / kind) as bundle:
            predictor = read_predictor(bundle)
            assert predictor is not None and predictor.kind == kind
            statistics = read_statistics(bundle)
            assert statistics is not None
            with Bundle.open(bundles / "neuron") as source:
                for old, new in zip(*(ffns(graph_of(b)) for b in (source, bundle)), strict=True):
                    order = statistics.order[new.layer]
                    for a, b in zip(parts(source, old), parts(bundle, new), strict=True):
                        assert np.array_equal(a[order], b)


def test_a_predictor_that_chooses_all_changes_no_bit(bundles: Path) -> None:
    opened = open_plain(bundles / "neuron", 64, 1, outputs=8)
    networks, ids = ffns(opened.graph), list(range(3, 11))
    scores = [lambda x, n=ffn.neurons: np.ones((len(x), n), np.float32) for ffn in networks]

    def logits(threshold: float) -> tuple[bytes, list[Tally]]:
        runner, tallies = predicted(opened, networks, scores, [np.full(1, threshold, np.float32)] * 2)
        sequence = runner.new_sequence()
        out = runner.forward([Segment(sequence, ids, range(8))]).tobytes()
        runner.release(sequence)
        return out, tallies

    sequence = opened.new_sequence()
    dense = opened.forward([Segment(sequence, ids, range(8))]).tobytes()
    opened.release(sequence)
    every, tallies = logits(0)
    none, other = logits(2)
    assert every == dense != none
    assert [(t.recall, t.read_share, t.skipped) for t in tallies] == [(1, 1, 0)] * 2
    assert [(t.recall, t.read_share, t.skipped) for t in other] == [(0, 0, 1)] * 2
    runner, _ = predicted(opened, networks, scores, [np.zeros(1, np.float32)] * 2)
    with pytest.raises(RequestError, match="A predictor is simulated in forward passes of two tokens or more"):
        runner.forward([Segment(runner.new_sequence(), [5])])
    opened.close()


def test_the_highest_lambda_within_the_bound_is_chosen() -> None:
    choices = (np.arange(len(LAMBDAS), dtype=np.float32)[:, None],)
    fitted = Fitted(None, choices)  # type: ignore[arg-type]

    for within in range(len(LAMBDAS) + 1):
        def divergence(i: int, within: int = within) -> float:
            return 0.01 if i >= within else 0.02

        fitted = Numbered(None, choices)  # type: ignore[arg-type]
        assert choose(fitted, divergence, 0.01) == min(within, len(LAMBDAS) - 1)  # type: ignore[arg-type]


class Numbered(Fitted):
    """Its predictors are their lambdas' numbers."""

    def at(self, i: int) -> Any:
        """The number."""
        return i


def refused(bundles: Path, *arguments: object, source: str = "tile16") -> str:
    made = edgeinfer("sparsify", bundles / source, bundles / "none", *arguments)
    assert made.code != 0 and not (bundles / "none").exists()
    assert not [path.name for path in bundles.iterdir() if path.name.startswith(".none") and path.is_dir()]
    return made.err.splitlines()[-1]


def test_what_is_refused(bundles: Path, sparse: tuple[Path, Any], tmp_path: Path) -> None:
    text = ("--text", bundles / "text.txt")
    assert "no-such.txt cannot be read" in refused(bundles, "--text", tmp_path / "no-such.txt")
    (tmp_path / "short.txt").write_text("a few words", encoding="utf-8")
    assert "tokens, too few to learn from; give 2048 at least" in refused(bundles, "--text", tmp_path / "short.txt")
    assert "is sparse already; give the checkpoint" in refused(bundles, *text, source="sparse")
    assert "silu is not 0 below; use --predictor threshold" in refused(
        bundles, *text, "--predictor", "sign", source="silu")
    assert "--predictor is 'oracle'; choose one of sign" in refused(bundles, *text, "--predictor", "oracle")
    assert "--max-kld is 0; it must be above 0" in refused(bundles, *text, "--max-kld", 0)
    assert "rank is 99; it must be from 1 to hidden_size, 36" in refused(bundles, *text, "--rank", 99)
    assert "rank is 5, but a sign predictor has none" in refused(bundles, *text, "--rank", 5, "--predictor", "sign")
    assert "epochs is 3, but a sign predictor" in refused(bundles, *text, "--epochs", 3, "--predictor", "sign")
    assert "epochs is 101; it must be from 0 to 100" in refused(bundles, *text, "--epochs", 101)
    assert "--epochs 3 is for them; give one of the two" in refused(bundles, *text, "--epochs", 3, "--head")
    demo = edgeinfer("sparsify", "demo", bundles / "none", "--text", tmp_path / "short.txt")
    assert demo.code == 1 and "too few to learn from" in demo.err
    again = edgeinfer("sparsify", bundles / "tile16", bundles / "tile16", *text, "--overwrite")
    assert again.code == 2 and "is the source itself; choose another name" in again.err
    (bundles / "file").write_bytes(b"")
    assert edgeinfer("sparsify", bundles / "tile16", bundles / "file", *text).code == 1


def test_dense_models_and_other_types_are_refused(bundles: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.sparse.making.dense_layers", lambda *_, **__: ([0, 1], "these curves"))
    sentence = refused(bundles, "--text", bundles / "text.txt")
    assert "The model's neurons fire for 5" in sentence or "The model's neurons fire for 4" in sentence
    assert sentence.endswith("It runs as it is, dense.")
    write_random_bundle(MODEL, tmp_path / "f32", "f32")
    made = edgeinfer("sparsify", tmp_path / "f32", tmp_path / "none", "--text", bundles / "text.txt")
    assert made.code == 1 and "are f32, and the layout by neuron exists only in q4, int8, q2 (q2 in groups" in made.err


def test_kernels_that_compile_are_told_of(bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int, str]] = []

    def compiles(*_: Any, progress: Callable[[int, int, str], None], **__: Any) -> None:
        progress(1, 40, "linear")
        raise CancelledError("Enough.")

    monkeypatch.setattr("edgeinfer.sparse.making.open_plain", compiles)
    with Bundle.open(bundles / "neuron") as source, pytest.raises(CancelledError):
        sparsify(source, tmp_path / "made", STREAM, on_progress=lambda *what: told.append(what))
    assert told == [("compile", 1, 40, "linear")]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("stage", ["capture", "write", "factors", "thresholds", "lambda"])
def test_whatever_ends_it_nothing_is_left(bundles: Path, tmp_path: Path, stage: str) -> None:
    def told(now: str, *_: object) -> None:
        if now == stage:
            raise CancelledError("The run was cancelled.")

    with Bundle.open(bundles / "neuron") as source, pytest.raises(CancelledError):
        sparsify(source, tmp_path / "made", STREAM, threads=1, on_progress=told)
    assert [path.name for path in tmp_path.iterdir()] in ([], [".made.lock"])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kld", "skipped", "share"), [("lowrank", 0.005, 0.9, 0.3), ("sign", 0.01, 0.75, 0.4)])
def test_quality_on_a_real_model(shared_data: Callable[[str], Path], tmp_path: Path, kind: str, kld: float,
                                 skipped: float, share: float) -> None:
    """The end of a book that the model never saw: inactive neurons skipped, bytes read with the predictor included."""
    text = shared_data("text/held_out/heldout_american_fairy_tales.txt").read_text(encoding="utf-8")
    stream = token_stream(Tokenizer.open(demo_path()), text, max_tokens=8_000)
    with Bundle.open(demo_path()) as source:
        made = sparsify(source, tmp_path / "sparse", stream, kind=kind, max_kld=kld)
    total = sum(made.layers, Tally())
    assert made.result.divergence is not None and made.result.divergence.kld_mean <= 1.2 * kld  # of other tokens
    assert total.skipped >= skipped and made.read_share <= share, (total.skipped, made.read_share)


def test_a_full_disk_is_told_before_any_work(bundles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(bundles)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    sentence = refused(bundles, "--text", bundles / "text.txt")
    assert " kB, but its disk has only 10 kB free" in sentence


def test_held_out_texts_are_measured_and_the_worst_decides(bundles: Path, tmp_path: Path) -> None:
    n = len(STREAM.ids)
    other = Stream(STREAM.ids[n // 2 :][:900], STREAM.counted[n // 2 :][:900], 900, "other.txt")
    with Bundle.open(bundles / "neuron") as source:
        made = sparsify(source, tmp_path / "made", STREAM, threads=1, held_out=[other], kind="sign")
        with pytest.raises(RequestError, match=r"The held-out text few\.txt has 10 tokens, too few to measure"):
            sparsify(source, tmp_path / "few", STREAM, held_out=[Stream(STREAM.ids[:10], (True,) * 10, 10, "few.txt")])
    assert [name for name, _ in made.held_out] == ["other.txt"] and not made.warning
    klds = [one.divergence.kld_mean for one in (made.result, made.held_out[0][1]) if one.divergence]
    assert made.worst == max(klds) and made.enabled == (max(klds) <= made.max_kld)
    with Bundle.open(tmp_path / "made") as bundle:
        assert [(one.text, one.kld_mean) for one in read_quality(bundle)][1] == ("other.txt", klds[1])
    alone = replace(made, held_out=())
    assert "--held-out FILE" in alone.warning and alone.worst == klds[0]
    over = replace(made, held_out=(("verse.txt", made.result),), max_kld=klds[0] / 2, enabled=False)
    assert f"KLD {klds[0]:.5f} on verse.txt is 2.00 times the bound" in over.reason
