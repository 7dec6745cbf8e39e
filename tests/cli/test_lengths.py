"""Lengths of a prompt, an answer and a context: `estimate`, `plan` and the page say what `run` does with them."""

from __future__ import annotations

import pytest

from edgeinfer import estimate, plan
from edgeinfer.cli.reports.plan_page import plan_page
from edgeinfer.cli.reports.recommendation import print_devices
from tests.helpers.command_line import edgeinfer

SHAPE = ("llama-3.1-8b", "--machine", "m4 16gb")
CUT = "An answer of 128 tokens does not fit a context of 600: run stops it after 88, behind a prompt of 512; " \
    "lower -n, or give --ctx 640."


def test_an_answer_ends_where_the_context_is_full() -> None:
    out = edgeinfer("estimate", *SHAPE, "-c", 600, "-p", 512, "-n", 128, "--json").json
    exact = edgeinfer("estimate", *SHAPE, "-c", 600, "-p", 512, "-n", 88, "--json").json
    assert out["notes"] == [CUT] and out["answer"] == exact["answer"] and not exact["notes"]
    assert CUT in " ".join(edgeinfer("estimate", *SHAPE, "-c", 600, "-p", 512, "-n", 128).out.split())
    users = edgeinfer("estimate", *SHAPE, "-c", 600, "-p", 512, "--users", 2, "--json").json
    assert users["users"]["answer"] == 88 and users["notes"] == [CUT] and users["answer"] is None
    nodes = edgeinfer("estimate", SHAPE[0], "--nodes", "rpi5 16gb,m4", "-c", 600, "-p", 512, "--json").json
    assert nodes["answer"] == 88 and nodes["notes"] == [CUT]
    found = estimate("llama-3.1-8b", "m4 16gb", ctx=600, prompt=512, answer=128)
    assert found.answer == 88 and found.notes[0].endswith("; lower answer, or give ctx 640.")
    assert b"run stops it after 88, behind a prompt of 512" in plan_page({"ctx": "600", "answer": "128"})[0]


def test_it_is_as_a_run_has_it() -> None:
    done = edgeinfer("run", "demo", "Once", "-c", 10, "-n", 50, "--json").json
    asked = ("-c", 10, "-p", done["prompt_tokens"], "-n", 50)
    out = edgeinfer("estimate", "demo", "--machine", "rpi5", *asked, "--json").json
    assert done["finish_reason"] == "length" and done["completion_tokens"] == out["answer"]["tokens"] == 8


@pytest.mark.parametrize(("asked", "sentence"), [
    (["-p", "5000"], "-p 5000 does not fit a context of 4096 tokens; lower it, or give --ctx 5000."),
    (["-p", "5000", "-n", "200"], "-p 5000 does not fit a context of 4096 tokens; lower it, or give --ctx 5200."),
    (["-p", "200000"], "does not fit a context of 4096 tokens; lower it; the model takes 131072 tokens at most."),
    (["-c", "512", "-p", "512", "-n", "1"], "-p 512 leaves no room for an answer in a context of 512 tokens; lower it"),
    (["-n", "0"], "-n is 0; it must be from 1 to 16777216 tokens."),
    (["-c", "16777217"], "--ctx is 16777217; it must be from 1 to 16777216 tokens."),
])
def test_a_prompt_without_room_is_refused(asked: list[str], sentence: str) -> None:
    done = edgeinfer("estimate", *SHAPE, *asked)
    assert done.code == 2 and sentence in done.sentence and not done.out


def test_a_context_that_the_model_does_not_have_is_said() -> None:
    said = "The context of 200000 tokens exceeds the model's 131072, so run refuses it."
    for command in (("estimate", *SHAPE), ("plan", *SHAPE), ("plan", SHAPE[0], "--machine", "rtx4090"),
                    ("plan", *SHAPE, "--compare")):
        out = edgeinfer(*command, "-c", 200000, "--json")
        assert said in out.json["notes"], command
        assert said in " ".join(edgeinfer(*command, "-c", 200000).out.split())
    assert said in estimate("llama-3.1-8b", "m4", ctx=200000).notes
    assert said in plan("llama-3.1-8b", "m4", ctx=200000).notes
    assert said.encode().replace(b"'", b"&#x27;") in plan_page({"model": "llama-3.1-8b", "ctx": "200000"})[0]
    refused = edgeinfer("recommend", SHAPE[0], "--all-devices", "-c", 200000)
    assert refused.code == 2
    assert refused.sentence == "--ctx is 200000, and llama-3.1-8b takes 131072 tokens at most; lower it."


def test_a_plan_says_where_a_run_stops() -> None:
    said = "An answer of 5000 tokens does not fit a context of 4096: run stops it; lower -n, or give --ctx 5001."
    for command in (("plan", *SHAPE), ("plan", SHAPE[0], "--nodes", "rpi5 16gb,rpi5 16gb")):
        assert said in edgeinfer(*command, "-n", 5000, "--json").json["notes"]
        assert said not in edgeinfer(*command, "-n", 4095, "--json").json["notes"]
    assert said in " ".join(edgeinfer("plan", SHAPE[0], "--nodes", "rpi5 16gb,m4", "-n", 5000).out.split())


def test_absurd_memory_is_refused_and_little_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    described = ("--bandwidth", "50", "--cores", "8", "--class", "laptop", "--memory")
    for command in (("recommend",), ("plan", SHAPE[0]), ("estimate", SHAPE[0])):
        assert "--memory is 900000000000000 bytes; a device has 64 MiB to 64 TiB." in edgeinfer(
            *command, *described, "900TB").sentence
    row = {"memory_bytes": 512 << 20, "title": "Board", "model": "smollm2-135m", "weights": "q4", "device": "board",
           "decode_tok_per_s": 9.0, "low": 8.0, "high": 10.0, "program": "edgeinfer", "unit": "cpu"}
    print_devices({"devices": [row], "model": "smollm2-135m", "ctx": 512, "min_speed": 5.0})
    shown = capsys.readouterr().out
    assert "The least memory is 0.5 GB: Board runs smollm2-135m" in shown and "board   0.5" in shown


def test_memory_for_recurrent_layers_of_a_model_without_them_is_remarked() -> None:
    said = "--state-memory has no effect, because the model has no recurrent layers."
    assert said in edgeinfer("plan", *SHAPE, "--state-memory", "1MB", "--json").json["notes"]
    assert said not in edgeinfer("plan", "lfm2-1.2b", *SHAPE[1:], "--state-memory", "1GiB", "--json").json["notes"]


def test_a_variable_for_samples_gives_way_to_questions_about_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = edgeinfer("estimate", *SHAPE, "--users", 2, "--json").json
    monkeypatch.setenv("EDGEINFER_SAMPLES", "4")
    assert edgeinfer("estimate", *SHAPE, "--json").json["sequences"] == 4
    assert edgeinfer("estimate", *SHAPE, "--users", 2, "--json").json == plain
