"""Replicas whose prompts onnxruntime computes: their texts, what they say of it, and what is kept for later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
from edgeinfer.cluster.job import Job, Speeds
from edgeinfer.cluster.on_ray import prefilling
from tests.helpers.command_line import edgeinfer
from tests.helpers.replicas import OPTIONS, Within, opener
from tests.helpers.serving import Running, chat_model, serving, until
from tests.helpers.sessions import HYBRID, KIMI, write_model

COMPLETIONS = "/v1/completions"
HEADER = "edgeinfer-arithmetic"
BODY: dict[str, Any] = {"prompt": "A fox saw a crow " * 12, "temperature": 0, "max_tokens": 24, "ignore_eos": True,
                        "logprobs": 0}

OWN = {name: value for name, value in BODY.items() if name != "prompt"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def three(model: str) -> list[Within]:
    """One replica on onnxruntime, which is to compute all prompts, and two that answer."""
    found = [Within(model, "device", **prefilling(OPTIONS, "onnx-cpu")), Within(model, "a"), Within(model, "b")]
    for i, one in enumerate(found):
        one.facts = one.facts._replace(speeds=Speeds(1.0 if i else 1e-5, 1e-3, 1e-9))
    return found


@pytest.fixture
def running(model: str, three: list[Within]) -> Iterator[Running]:
    with serving({"chat": model}, opener(three, [], helping=1)) as found:
        yield found


def values(answer: Any) -> tuple[str, list[float]]:
    choice = answer.json["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_answers_begin_after_prompts_of_onnxruntime_and_say_so(running: Running, three: list[Within]) -> None:
    found = running.ask(COMPLETIONS, BODY)
    right = three[1].llm.complete(BODY["prompt"], **OWN)
    text, logprobs = values(found)
    assert found.headers[HEADER] == "onnxruntime CPUExecutionProvider (prompt)"
    assert text == right.text and right.logprobs
    assert max(abs(a - b.logprob) for a, b in zip(logprobs, right.logprobs, strict=True)) < 0.1
    assert found.json["usage"]["completion_tokens"] == 24
    assert len(three[0].prompts) == 1 and not three[0].jobs
    streamed = running.ask(COMPLETIONS, {**BODY, "stream": True})
    assert streamed.headers[HEADER].endswith("(prompt)")
    assert "".join(event["choices"][0]["text"] for event in streamed.events if event["choices"]) == text
    states = running.ask("/status").json["models"][0]["replicas"]
    received, expected = (sum(one[name] for one in states) for name in ("received_bytes", "expected_bytes"))
    assert expected < received < expected + 1000 * 2
    assert until(lambda: all(one.free for one in three) and not len(three[0]._serving.handing))


def test_its_blocks_are_not_taken_for_those_of_other_prompts(running: Running, three: list[Within]) -> None:
    for _ in range(2):
        running.ask(COMPLETIONS, BODY)
    assert [one.llm.runner.prefix_blocks for one in three[1:]] == [0, 0]
    several = running.ask(COMPLETIONS, {**BODY, "n": 2, "temperature": 0.8, "seed": 3})  # computed where it is answered
    assert HEADER not in several.headers and len(three[0].prompts) == 2
    cached = sum(one.llm.runner.prefix_blocks for one in three[1:])
    assert cached >= several.json["usage"]["prompt_tokens"] // 16
    assert HEADER not in running.ask(COMPLETIONS, {**BODY, "prompt": [300]}).headers  # nothing to compute before it


def test_a_device_that_is_lost_leaves_prompts_to_those_that_answer(running: Running, three: list[Within]) -> None:
    three[0].lost_after, three[0].reopens = lambda job, tokens: True, False
    right = three[1].llm.complete(BODY["prompt"], **OWN)
    first, second = running.ask(COMPLETIONS, BODY), running.ask(COMPLETIONS, BODY)
    assert values(first)[0] == values(second)[0] == right.text
    assert values(first)[1] == [one.logprob for one in right.logprobs or ()] == values(second)[1]
    assert HEADER in first.headers and HEADER not in second.headers


def test_a_request_that_did_not_say_so_never_goes_to_a_device(running: Running, three: list[Within]) -> None:
    """A replica is lost whose prompt was computed where it is answered; the next one has no such prompt either."""
    slow, fast = Speeds(1.0, 1e-3, 1e-9), Speeds(1e-9, 1e-9, 1.0)
    engine = running.server.models.first.model.engine
    for place in engine.places:
        place.speeds = slow if place.helps else fast
    died = list[int]()

    def dies(job: Job, tokens: int) -> bool:
        if died or tokens < 4:
            return False
        died.append(job.key)
        for place in engine.places:
            place.speeds = fast if place.helps else slow
        return True

    for one in three[1:]:
        one.lost_after = dies
    found = running.ask(COMPLETIONS, {**BODY, "stream": True, "max_tokens": 60})
    right = three[1].llm.complete(BODY["prompt"], max_tokens=60, temperature=0, ignore_eos=True)
    assert died and HEADER not in found.headers and not three[0].prompts
    assert "".join(event["choices"][0]["text"] for event in found.events if event["choices"]) == right.text


def test_without_those_that_answer_a_device_does_not(running: Running, three: list[Within]) -> None:
    for one in three[1:]:
        one.reopens, one.lost_after = False, lambda job, tokens: True
    found = running.ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 8})
    assert found.status == 503 and "No replica is left" in found.error
    assert not three[0].jobs


def test_its_plan_is_printed(model: str, three: list[Within]) -> None:
    done = edgeinfer("plan", model, "--prefill-device", "onnx-cpu", "--ctx", "512", "-t", "1", "--json")
    plan = three[0].llm.plan
    assert done.code == 0 and done.json["total_bytes"] == plan.total_bytes
    assert [one["bytes"] for one in done.json["regions"]] == [one.nbytes for one in plan.regions]
    for arguments, sentence in ((("onnx-cpu", "--machine", "rpi5"), "only for this machine; leave out --machine rpi5"),
                                (("onnx-cpu", "--nodes", "rpi5,rpi5"), "--nodes rpi5,rpi5 has no effect"),
                                (("onnx-cpu", "--compare"), "--compare has no effect"),
                                (("onnx-cpu", "--device", "cuda"), "--device cuda has no effect"),
                                (("onnx-cpu", "--serve", "--max-sequences", 8), "--serve has no effect"),
                                (("onnx-cpu", "--max-sequences", 8), "--max-sequences 8 has no effect")):
        done = edgeinfer("plan", model, "--prefill-device", *arguments)
        assert done.code == 2 and sentence in done.sentence, done
    for machine, sentence in (("rpi5", "needs an NVIDIA GPU, and --machine rpi5 is none"), ("rtx4090", "")):
        done = edgeinfer("plan", "llama-3.1-8b", "--prefill-device", "cuda", "--machine", machine, "--json")
        assert sentence in done.sentence if sentence else done.json["device"] == "rtx4090"


def test_what_a_device_cannot_do_is_refused_before_anything_starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    recurrent, latent = str(write_model(folder, HYBRID)), str(write_model(folder, KIMI))
    apart = ("--prefill", "1", "--decode", "1", "--prefill-device")
    for model, arguments, sentence in (
            ("demo", ("--prefill-device", "onnx-cpu"), "is for replicas that compute prompts; add --prefill"),
            ("demo", (*apart, "gpu"), "--prefill-device is 'gpu'; choose one of onnx-cpu, cuda"),
            ("demo", (*apart, "cpu"), "--prefill-device is 'cpu'; choose one of onnx-cpu, cuda"),
            ("demo", (*apart, "onnx-cpu", "--attention", "top:8"), "it has no pass attention:top=8: leave it out, or "
             "leave --prefill-device out."),
            ("demo", (*apart, "onnx-cpu", "--mlock"), "--mlock is not available on device onnx-cpu"),
            (recurrent, (*apart, "onnx-cpu"), "computes no prompts of"), (latent, (*apart, "onnx-cpu"), "no prompts")):
        done = edgeinfer("serve", model, *arguments)
        assert done.code == 2 and sentence in done.sentence, done.sentence
