"""The gate for approximations, and the protocol that measures them as a run uses them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.errors import BundleError, RequestError, UsageError
from edgeinfer.graph import approximates, without_approximations
from edgeinfer.models import demo_path
from edgeinfer.quality.evaluate import Evaluation, Stream, evaluate, token_stream
from edgeinfer.quality.gate import find, objection
from edgeinfer.quality.measurements import (
    Measurement,
    Setting,
    from_json,
    measured_identity,
    measurement,
    read_quality,
    remember,
    to_json,
)
from edgeinfer.runner import DECODE, PROMPT
from edgeinfer.runtime import Session
from edgeinfer.text import Tokenizer
from tests.helpers.command_line import edgeinfer

NARROW_PASS = "tests.helpers.narrow_attention.narrow:window=6"
NARROW = f"fuse_input+{NARROW_PASS}"
TEXT = "Once upon a time there was a king who had three daughters, and the youngest of them was the wisest. " * 3


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measurement:
    """A measurement of the demo bundle, and a cache of its own to keep it in."""
    monkeypatch.setattr("edgeinfer.quality.measurements.cache_root", lambda: tmp_path / "cache")
    with Bundle.open(demo_path()) as bundle:
        weights = measured_identity(bundle)
    return Measurement(Setting.of(kv="int8", passes="x:n=1"), 0.01, 0.1, 0.9, 12.0, 11.0, 100, "decode", "0" * 64,
                       weights, "generic")


def test_a_setting_is_all_techniques_together(made: Measurement) -> None:
    with Bundle.open(demo_path()) as bundle:
        known = [made]
        assert not objection(known, made.setting, bundle)
        assert objection(known, made.setting, bundle, 0.009) == "KLD 0.0100 over 100 tokens is above --max-kld 0.009"
        assert objection(known, made.setting, bundle, 0) == "--max-kld 0 allows none"
        for other in (Setting.of(kv="f16", passes="x:n=1"), Setting.of(kv="int8", passes="x:n=1+y"),
                      Setting.of(kv="int8", passes="x:n=2")):
            assert objection(known, other, bundle) == f"not measured with {other}"
            assert find(known, other, bundle) is None
        exact = Setting.of(kv="int8", passes="none")
        assert exact.exact and not objection([], exact, bundle)
        assert str(made).startswith("KLD 0.01000 mean, 0.1000 for the worst 1 %")
        assert str(made.setting) == "kv=int8 passes=x:n=1"
        assert objection([replace(made, weights="0" * 64)], made.setting, bundle)


def test_the_worst_measurement_decides(made: Measurement) -> None:
    """Whatever text was measured last; the same text measured again takes the place of what it gave before."""
    worse = replace(made, kld_mean=0.5, text="verse.txt", text_sha256="1" * 64)
    few = replace(made, kld_mean=0.9, tokens=99, text_sha256="2" * 64)
    again = replace(worse, kld_mean=0.015, version="later")
    with Bundle.open(demo_path()) as bundle:
        for known in ([made, worse], [worse, made], [worse, made, few]):
            assert find(known, made.setting, bundle) == worse
            assert objection(known, made.setting, bundle) == \
                "KLD 0.5000 over 100 tokens of verse.txt is above --max-kld 0.02"
        assert find([worse, made, again], made.setting, bundle) == again
        assert objection([few], made.setting, bundle) == "measured on 99 tokens only; 100 are the least that count"


def test_a_full_cache_keeps_the_worst(made: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.quality.measurements.MAX_KEPT", 3)
    with Bundle.open(demo_path()) as bundle:
        for i, kld in enumerate((0.01, 0.5, 0.02, 0.03, 0.01)):
            remember(bundle, replace(made, kld_mean=kld, text_sha256=str(i)))
        assert [one.kld_mean for one in read_quality(bundle)] == [0.5, 0.03, 0.01]


def test_files_of_measurements_without_names_of_texts_are_read(made: Measurement) -> None:
    rows = json.loads(to_json([made]))
    del rows["measurements"][0]["text"]
    assert from_json(json.dumps(rows).encode()) == [made]


def test_what_was_measured_is_kept_in_the_cache(made: Measurement, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    with Bundle.open(demo_path()) as bundle:
        assert read_quality(bundle) == []
        remember(bundle, made)
        remember(bundle, replace(made, kld_mean=0.002, text_sha256="1" * 64))
        assert [one.kld_mean for one in read_quality(bundle)] == [0.01, 0.002]
        (file,) = (tmp_path / "cache" / "quality").rglob("*.json")
        file.write_bytes(b"{")
        assert read_quality(bundle) == []
        monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
        listed = edgeinfer("cache", "list", "--json").json
        assert [entry["name"] for entry in listed["quality"]] == [made.weights[:32]]


def test_a_cache_that_cannot_be_written_keeps_nothing(made: Measurement, monkeypatch: pytest.MonkeyPatch,
                                                      tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr("edgeinfer.quality.measurements.cache_root", lambda: tmp_path / "file" / "cache")
    with Bundle.open(demo_path()) as bundle:
        remember(bundle, made)
        assert read_quality(bundle) == []


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"measurements": 3}, {"measurements": [3]}, {"kld_mean": "0"}, {"kld_mean": -1.0},
     {"kld_mean": float("nan")}, {"tokens": 1.5}, {"setting": {"kv": 1}}, {"setting": []}, {"more": 1},
     {"kld_mean": 10**400}, {"isa": "\x1b[2J"}],
)
def test_hostile_files_of_measurements(made: Measurement, change: dict[str, object]) -> None:
    assert from_json(to_json([made])) == [made]
    data = json.loads(to_json([made]))
    (data if "version" in change or "measurements" in change else data["measurements"][0]).update(change)
    with pytest.raises(ValueError, match=r"measurement|setting|JSON|constant"):
        from_json(json.dumps(data).encode())


def test_names_in_a_setting_are_free(made: Measurement) -> None:
    named_so = replace(made, setting=Setting((("cls", "x"), ("self", "y"))))
    assert from_json(to_json([named_so])) == [named_so]


def test_a_measurement_needs_a_reference() -> None:
    with pytest.raises(BundleError, match="needs a reference"):
        measurement(Setting(), Evaluation(1, 1, 1.0), "", protocol="", stream=Stream((), (), 0), isa="")


def test_recipes_know_what_approximates() -> None:
    recipe = Recipe.parse(NARROW)
    assert [approximates(step) for step in recipe.steps] == [False, True]
    assert without_approximations(recipe) == Recipe() and str(without_approximations(recipe)) == "fuse_input"
    off = Recipe.parse("tests.helpers.narrow_attention.narrow:window=0")
    assert without_approximations(off) == off
    assert Setting.of_run(RuntimeConfig(kv="f16", recipe=recipe)) == Setting.of(
        kv="f16", passes="tests.helpers.narrow_attention.narrow:window=6")
    with pytest.raises(UsageError, match="which does not exist"):
        without_approximations(Recipe.parse("nothing"))


class Watched(Session):
    """Records the runs."""

    def forward(self, segments, cancel=None):  # type: ignore[no-untyped-def]
        """As a session."""
        self.seen.append([(len(segment.ids), segment.role, len(segment.outputs)) for segment in segments])
        return super().forward(segments, cancel)


def test_decoding_is_measured_as_a_run_decodes() -> None:
    tokenizer = Tokenizer.open(demo_path())
    stream = token_stream(tokenizer, TEXT, max_tokens=50)
    opened = Watched(Bundle.open(demo_path()), RuntimeConfig(ctx=64, threads=1, outputs=64))
    opened.seen = []  # type: ignore[attr-defined]
    result = evaluate(opened, stream, window=20, prompt=12)
    n = len(stream.ids) - 1  # predictions: windows of 20, 20 and the rest
    assert opened.seen == [  # type: ignore[attr-defined]
        [(12, PROMPT, 1)], *[[(1, DECODE, 1)]] * 8, [(12, PROMPT, 1)], *[[(1, DECODE, 1)]] * 8]
    assert n == 50 and result.tokens == 16
    nll = []
    for start in range(0, n, 20):
        sequence = opened.new_sequence()
        fed = stream.ids[start : min(start + 20, n)]
        (_, logits), = opened.score(sequence, list(fed))
        for i in range(12, len(fed)):
            row = logits[i].astype(np.float64)
            nll.append(np.log(np.exp(row - row.max()).sum()) + row.max() - row[stream.ids[start + i + 1]])
        opened.release(sequence)
    assert result.nll_per_token == pytest.approx(np.mean(nll), rel=1e-9)
    everything = evaluate(opened, stream, window=20, prompt=0)
    assert everything.tokens == 50
    assert everything.nll_per_token == pytest.approx(evaluate(opened, stream, window=20).nll_per_token, rel=1e-9)
    with pytest.raises(RequestError, match="A prompt of 20 tokens leaves nothing of a window of 20 to decode"):
        evaluate(opened, stream, window=20, prompt=20)
    with pytest.raises(RequestError, match="The text is too short"):
        evaluate(opened, stream, window=64, prompt=60)
    with pytest.raises(UsageError, match="prompt is -1; it must be 0 or more"):
        evaluate(opened, stream, window=20, prompt=-1)
    opened.close()


def test_eval_compares_an_approximation_with_the_model_itself(made: Measurement, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    asked = ("eval", "demo", "--text", tmp_path / "text.txt", "-c", 32, "--tokens", 60, "--json")
    plain = edgeinfer(*asked, "--decode", 8).json
    assert plain["setting"] == {"kv": "int8", "passes": "none"} and plain["kld_mean"] is None
    assert plain["protocol"] == "windows of 32, prompts of 8, the others one by one"
    found = edgeinfer(*asked, "--decode", 8, "--recipe", NARROW).json
    assert found["kld_mean"] > 0.001 and found["reference_perplexity"] == plain["perplexity"]
    assert found["setting"]["passes"] == NARROW_PASS and found["tokens"] == plain["tokens"]
    with Bundle.open(demo_path()) as bundle:
        (kept,) = read_quality(bundle)
        assert kept.kld_mean == found["kld_mean"] and dict(kept.setting.values) == found["setting"]
        setting = Setting.of_run(RuntimeConfig(recipe=Recipe.parse(NARROW)))
        assert find(read_quality(bundle), setting, bundle) == kept
        assert asdict(kept)["tokens"] == found["tokens"]
    other = edgeinfer(*asked).json
    assert other["setting"] is other["protocol"] is None


def test_run_says_what_an_approximation_was_measured_to_cost(made: Measurement) -> None:
    asked = ("run", "demo", "Once", "-n", 2, "--temp", 0, "-t", 1)
    assert edgeinfer(*asked, "--json").json["quality"] is None
    approximate = edgeinfer(*asked, "--recipe", NARROW)
    said = f"Approximate, kv=int8 passes={NARROW_PASS}: not measured.\n"
    assert f"edgeinfer: {said}" in approximate.err
    assert "Approximate" not in edgeinfer(*asked, "--recipe", "none").err
    with Bundle.open(demo_path()) as bundle:
        remember(bundle, replace(made, setting=Setting.of(kv="int8",
                                                          passes="tests.helpers.narrow_attention.narrow:window=6")))
    assert "window=6: KLD 0.01000 mean, 0.1000 for the worst 1 %, over 100" in edgeinfer(*asked, "--recipe", NARROW).err
    report = edgeinfer(*asked, "--recipe", NARROW, "--json").json["quality"]
    assert report["kld_mean"] == 0.01 and report["setting"] == {"kv": "int8", "passes": NARROW_PASS}
