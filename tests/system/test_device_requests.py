"""Requests on onnxruntime's CPU provider: everything above the runner works or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import provider_of
from edgeinfer.bundle import Bundle
from edgeinfer.cli.output import figures
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.llm.api import LLM
from edgeinfer.llm.open import opened_on, session
from edgeinfer.memory_planner import DEVICE, Region
from edgeinfer.quality.evaluate import OUTPUT_ROWS, evaluate, token_stream
from edgeinfer.runner import Runner
from edgeinfer.text import Tokenizer
from tests.helpers.sessions import TINY, tokens, write_model
from tests.helpers.tasks import held, within

pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
PROMPT = "Once upon a time"


def opened(device: str, **options: Any) -> LLM:
    return LLM("demo", **{"ctx": 192, "threads": 1, "kv": "f32", "device": device, **options})


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LLM, LLM]]:
    """The demo on our own kernels, and on onnxruntime."""
    with opened("cpu", max_sequences=4, beams=4) as ours, opened("onnx-cpu", max_sequences=4, beams=4) as theirs:
        yield ours, theirs


def agree(ours: LLM, theirs: LLM, found: list[int], want: list[int], prompt: list[int], penalty: float = 1.0,
          bias: dict[int, float] | None = None) -> bool:
    """Return whether two greedy texts are the same up to a token of which neither runner is sure."""
    if found == want:
        return True
    same = next((i for i, (a, b) in enumerate(zip(found, want, strict=False)) if a != b), min(len(found), len(want)))
    return lead(ours.runner, prompt, want[:same], penalty, bias or {})[1] < 1e-2


def lead(runner: Runner, prompt: list[int], text: list[int], penalty: float,
         bias: dict[int, float]) -> tuple[int, float]:
    """The token that greedy requests choose after a text, and by how much it leads, of changed logits."""
    sequence = runner.new_sequence()
    logits = runner.prefill(sequence, prompt + text).reshape(-1).copy()
    runner.release(sequence)
    seen = np.unique(prompt + text)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    for token, value in bias.items():
        logits[token] += value
    second, first = np.partition(logits, -2)[-2:]
    return int(logits.argmax()), float(first - second)


def test_the_line_of_statistics_has_the_memory_of_the_gpu(both: tuple[LLM, LLM]) -> None:
    done = both[1].complete(PROMPT, max_tokens=2)
    assert "GPU" not in figures(done, both[1].plan, 1000)
    planned = replace(both[1].plan, regions=(Region("kv", 3_000_000, "", DEVICE),))
    assert "| GPU 2.0 MB of 3.0 MB planned |" in figures(done, planned, 1000, 2_000_000)


def test_greedy_texts_of_f32_models_are_those_of_our_kernels(tmp_path: Path) -> None:
    path = write_model(tmp_path, TINY, "f32")
    with LLM(path, ctx=128, threads=1, kv="f32") as ours, LLM(path, ctx=128, threads=1, device="onnx-cpu") as theirs:
        for seed in range(6):
            prompt = tokens(9 + seed, seed)
            want, found = (llm.complete(prompt, temperature=0, max_tokens=40).token_ids for llm in (ours, theirs))
            assert agree(ours, theirs, list(found), list(want), prompt), seed


def divergence(path: Path, text: str) -> Any:
    """Of our kernels, with KV in f32, from onnxruntime on the same bundle."""
    config = RuntimeConfig(ctx=192, threads=1, kv="f32", outputs=OUTPUT_ROWS)
    provider = provider_of("onnx-cpu")
    assert provider
    with ExitStack() as stack:
        ours = session(stack.enter_context(Bundle.open(path)), config, None, None)
        stack.callback(ours.close)
        theirs = opened_on(provider, stack.enter_context(Bundle.open(path)), config, None, None, stack)[0]
        tokenizer = Tokenizer.open(path, {"bos_token_id": ours.model.bos_token_id})
        found = evaluate(ours, token_stream(tokenizer, text), reference=theirs, window=128).divergence
    print(found)
    return found


def test_the_divergence_between_the_two_runners(both: tuple[LLM, LLM]) -> None:
    """Mean KLD of at most 1e-3: our kernels quantise activations, onnxruntime does not."""
    text = "\f".join(both[0].generate(PROMPT, seed=seed, max_tokens=120) for seed in range(3))
    found = divergence(both[0].path, text)
    assert 0 < found.kld_mean <= 1e-3 and found.same_top > 0.97


@pytest.mark.parametrize("name", ["fables-5m-silu", "fables-5m-relu", "fables-draft"])
def test_the_divergence_on_real_models(name: str, shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    convert(shared_data(f"models/{name}"), tmp_path / "b", weights="q4")
    text = (Path(__file__).parents[1] / "data" / "box_of_robbers.txt").read_text(encoding="utf-8")[:3000]
    assert 0 < divergence(tmp_path / "b", text).kld_mean <= 1e-3


@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"seed": 5}, {"seed": 7, "n": 3}, {"seed": 1, "temperature": 1.3, "top_k": 0, "top_p": 0.8},
    {"beams": 4, "n": 2, "length_penalty": 0.7}, {"temperature": 0, "repetition_penalty": 1.3, "stop": "park"},
    {"temperature": 0, "logit_bias": {262: -100.0}, "logprobs": 3},
], ids=str)
def test_requests(options: dict[str, Any], both: tuple[LLM, LLM]) -> None:
    """Everything above the runner works; where nothing is close, the texts are those of our kernels."""
    ours, theirs = (llm.complete(PROMPT, max_tokens=24, **options) for llm in both)
    assert ours.finish_reason == theirs.finish_reason and len(ours.choices) == len(theirs.choices)
    if options.get("temperature") == 0:
        prompt, want = both[0].tokenizer.encode(PROMPT), list(ours.token_ids)
        changes = options.get("repetition_penalty", 1.0), options.get("logit_bias", {})
        for i, token in enumerate(want):
            chosen, gap = lead(both[0].runner, prompt, want[:i], *changes)
            assert chosen == token or gap < 1e-2, i
        assert agree(*both, list(theirs.token_ids), want, prompt, *changes)
    else:
        assert ours.token_ids[:8] == theirs.token_ids[:8]
    assert both[1].runner.kv.pool.n_free == 4  # type: ignore[attr-defined]


def test_looked_up_draft_tokens_do_not_change_a_text(both: tuple[LLM, LLM]) -> None:
    ids = both[0].tokenizer.encode(PROMPT + ", the cat and the dog. The cat and the dog. The cat and")
    want = both[1].complete(ids, temperature=0, max_tokens=40, speculate="off").token_ids
    done = both[1].complete(ids, temperature=0, max_tokens=40, speculate="lookup")
    assert done.token_ids == want and done.speculation and done.speculation.drafter == "lookup"
    assert done.speculation.walks and done.speculation.drafted


def test_a_draft_model_runs_on_the_same_device(tmp_path: Path) -> None:
    """Two samples, within one plan; the texts are those without draft tokens."""
    small = write_model(tmp_path, replace(TINY, num_hidden_layers=1), "int8")
    options: dict[str, Any] = {"ctx": 96, "threads": 1, "device": "onnx-cpu", "max_sequences": 2}
    request: dict[str, Any] = {"seed": 4, "n": 2, "max_tokens": 40, "ignore_eos": True}
    with LLM(write_model(tmp_path), **options, speculate="off") as llm:
        want = [choice.token_ids for choice in llm.complete(tokens(12), **request).choices]
    with LLM(write_model(tmp_path), **options, speculate="draft", draft=small) as llm:
        assert {"kv", "draft_kv", "draft_prepacked"} <= {region.name for region in llm.plan.regions}
        for _ in range(2):
            done = llm.complete(tokens(12), **request)
            assert [choice.token_ids for choice in done.choices] == want
            assert done.speculation and done.speculation.drafter == "draft" and done.speculation.drafted


def test_chats_with_slots_compute_their_prompts_again(both: tuple[LLM, LLM]) -> None:
    """A slot is one sequence's: there are no blocks for the next request to share."""
    for _ in both[1].stream(PROMPT, temperature=0, max_tokens=8, reuse=True):
        pass
    stream = both[1].stream(PROMPT + ", there", temperature=0, max_tokens=4, reuse=True)
    text = "".join(stream)
    assert stream.completion.cached_tokens == 0 and not both[1].runner.caches_prefixes
    assert text == both[1].generate(PROMPT + ", there", temperature=0, max_tokens=4)


def test_prompt_caches_are_refused(both: tuple[LLM, LLM], tmp_path: Path) -> None:
    """Before the prompt is computed, whether or not the file is there."""
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^This model cannot keep prompts in files; leave the prompt cache "):
            both[1].stream(PROMPT, prompt_cache=tmp_path / "cache", max_tokens=4)
        (tmp_path / "cache").write_text("x")
    assert both[1].generate(PROMPT, max_tokens=2, temperature=0)


def test_a_cancelled_stream_and_a_closed_model() -> None:
    with opened("onnx-cpu") as llm:
        with held(llm, after=5) as hold:
            stream = llm.stream(PROMPT, temperature=0, max_tokens=100, ignore_eos=True)
            next(stream)
            assert hold.entered.wait(120)
            llm.cancel()
        list(stream)
        assert stream.completion.finish_reason == "cancelled" and 0 < stream.completion.completion_tokens < 90
        with held(llm, after=5) as hold, ThreadPoolExecutor(1) as pool:
            stream = llm.stream(PROMPT, temperature=0, max_tokens=100, ignore_eos=True)
            text = next(stream)
            assert hold.entered.wait(120)
            closing = pool.submit(llm.close)
            assert within(120, lambda: stream._request.task.cancellation.asked)
            hold.go_on.set()
            closing.result()
        assert stream.completion.finish_reason == "cancelled" and stream.completion.completion_tokens < 90
        assert text + "".join(stream) == stream.completion.text
        with pytest.raises(RequestError, match="The model is run by onnxruntime CPUExecutionProvider, which gives no "
                                               "embeddings and no access to its layers; open it with device cpu"):
            _ = llm.session


@pytest.mark.parametrize(("options", "said"), [
    ({"kv": "int8"}, "--kv int8 is not available on device onnx-cpu"),
    ({"attention": "eps:0.1"}, "has no pass attention"), ({"lazy": "keep=0.5"}, "--lazy is not available"),
    ({"speculate": "self"}, "speculate is 'self', and device onnx-cpu runs no part of a model by itself"),
    ({"recipe": "fuse_input+early_exit:layers=2"}, "has no pass early_exit"),
    ({"device": "x"}, "device is 'x'; choose"),
    ({"device": 3}, "device is 3; it must be text"),
])
def test_llm_refuses_what_the_device_cannot_do(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said), opened("onnx-cpu", **options) if "device" not in options \
            else opened(options["device"]):
        pass
