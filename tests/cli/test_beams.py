"""Beam search on the command line: output, plans, and contradicting options."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.command_line import edgeinfer

PROMPT = "Once upon a time"
BEAMS = ["--beams", 4, "-n", 8, "-t", 1, "-c", 64]
pytestmark = pytest.mark.usefixtures("no_variables")


def test_the_text_comes_at_the_end() -> None:
    done = edgeinfer("run", "demo", PROMPT, *BEAMS)
    assert done.code == 0 and done.out.startswith(",") and done.out.count("\n") == 1
    assert "5 prompt + 8 new tokens | finish: length | score -0." in done.err and "seed" not in done.err
    assert done.out == edgeinfer("run", "demo", PROMPT, *BEAMS, "--temp", 0, "--no-stats").out


def test_samples_are_the_best_beams() -> None:
    report = edgeinfer("run", "demo", PROMPT, *BEAMS, "--samples", 3, "--json", "--length-penalty", 0.5).json
    scores = [choice["score"] for choice in report["choices"]]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True) and report["score"] == scores[0]
    assert report["text"] == report["choices"][0]["text"] and report["completion_tokens"] == 24
    plain = edgeinfer("run", "demo", PROMPT, *BEAMS, "--json").json
    assert plain["token_ids"] == report["token_ids"] and "choices" not in plain
    assert plain["score"] * 8 == pytest.approx(report["score"] * 8**0.5)
    shown = edgeinfer("run", "demo", PROMPT, *BEAMS, "--samples", 2)
    assert shown.out.startswith(f"--- 1 of 2\n{report['text']}\n--- 2 of 2\n")
    assert edgeinfer("run", "demo", PROMPT, "-n", 2, "-c", 64, "--json").json["score"] is None


def test_the_plan_is_that_of_the_run() -> None:
    plan = edgeinfer("plan", "demo", *BEAMS[:-2], "-c", 512, "--json").json
    run = edgeinfer("run", "demo", PROMPT, *BEAMS[:-2], "-c", 512, "--json").json
    assert plan["total_bytes"] == run["planned_bytes"]
    kv = next(region for region in plan["regions"] if region["name"] == "kv")
    assert "(a prompt once, 4 x 8 tokens)" in kv["reason"]
    samples = edgeinfer("plan", "demo", "--samples", 4, "-c", 512, "--json").json
    assert kv["bytes"] < 0.35 * next(region["bytes"] for region in samples["regions"] if region["name"] == "kv")


@pytest.mark.parametrize(("flags", "sentence"), [
    (["--temp", "0.7"], "--temp 0.7 applies to sampling, and --beams does not sample; use one or the "
                        "other."),
    (["--top-k", "5"], "--top-k 5 applies to sampling"), (["--seed", "5"], "--seed 5 applies to sampling"),
    (["--repeat-penalty", "1.2"], "--repeat-penalty 1.2 applies to sampling"),
    (["--samples", "5"], "n is 5, and a search with 4 beams has as many results; lower n or raise beams."),
    (["--beams", "17"], "--beams is 17; it must be from 2 to 16, or 1 for no beam search."),
    (["--beams", "0"], "--beams is 0; it must be from 2 to 16"),
    (["--beams", "1", "--length-penalty", "2"], "length_penalty is 2.0, and it applies to beam search alone"),
    (["--length-penalty", "nan"], "--length-penalty is nan; it must be from -10 to 10."),
    (["-n", "60", "-c", "16", "--prompt-cache", ""], "--prompt-cache is ''"),
])  # fmt: skip
def test_what_contradicts_beams_is_refused(flags: list[str], sentence: str) -> None:
    done = edgeinfer("run", "demo", PROMPT, *BEAMS, *flags)
    assert done.code == 2 and done.out == "" and done.sentence.startswith(sentence)


def test_plan_refuses_other_numbers_of_beams() -> None:
    assert edgeinfer("plan", "demo", "--beams", 17).sentence.startswith("--beams is 17; it must be from 2 to 16")


def test_a_chat_has_no_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("edgeinfer.cli.commands.run.read_prompt", lambda prompt: None)
    monkeypatch.setattr("edgeinfer.cli.chat.loop.chat", lambda llm, system, raw, options: asked.append(options) or 0)
    assert edgeinfer("run", "demo", "--beams", 4).sentence == "--beams needs a PROMPT, or a pipe as standard input."
    monkeypatch.setenv("EDGEINFER_BEAMS", "4")
    assert edgeinfer("run", "demo", "-c", 64).code == 0 and asked[0]["beams"] == 1


def test_variables_contradict_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = edgeinfer("run", "demo", PROMPT, *BEAMS, "--json").json
    monkeypatch.setenv("EDGEINFER_TEMP", "0.3")
    monkeypatch.setenv("EDGEINFER_SEED", "3")
    assert edgeinfer("run", "demo", PROMPT, *BEAMS, "--json").json["token_ids"] == searched["token_ids"]
    monkeypatch.setenv("EDGEINFER_BEAMS", "4")
    monkeypatch.setenv("EDGEINFER_LENGTH_PENALTY", "2")
    rest = [PROMPT, "-n", 8, "-t", 1, "-c", 64, "--json"]
    assert edgeinfer("run", "demo", *rest).json["score"] == pytest.approx(searched["score"] / 8)
    sampled = edgeinfer("run", "demo", *rest, "--temp", 0.5).json
    assert sampled["score"] is None and sampled["seed"] == 3
    assert edgeinfer("run", "demo", *rest, "--speculate", "lookup").json["speculation"]["drafter"] == "lookup"
    plan = edgeinfer("plan", "demo", "-c", 64, "--json", "--speculate", "lookup").json
    assert "a prompt once" not in next(region["reason"] for region in plan["regions"] if region["name"] == "kv")
    monkeypatch.setenv("EDGEINFER_SPECULATE", "lookup")
    searched = edgeinfer("run", "demo", *rest).json
    assert searched["score"] is not None and searched["speculation"] is None
    refused = edgeinfer("run", "demo", PROMPT, *BEAMS, "--speculate", "lookup")
    assert refused.sentence.startswith("--speculate lookup and --beams exclude each other")
