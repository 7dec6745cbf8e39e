"""The Python API on the embedded model: text, streams, statistics, samples, prompt caches, and refusals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import (
    BundleError,
    CancelledError,
    RequestError,
    UsageError,
)
from edgeinfer.llm.api import LLM
from edgeinfer.runtime import Session
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.sessions import free_blocks, on_device
from tests.helpers.tasks import within

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 24}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module", params=["cpu", "onnx-cpu", pytest.param("pages", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    if request.param != "cpu":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    with on_device(request.param) as options:
        model = LLM("demo", ctx=256, max_sequences=4, threads=1, **options)
    with model:
        yield model


@pytest.fixture(scope="module")
def chat_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    from edgeinfer.converters import convert

    directory = tmp_path_factory.mktemp("chat")
    source = make_checkpoint(directory / "checkpoint")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    convert(source, directory / "bundle", weights="f32")
    with LLM(directory / "bundle", threads=1) as model:
        yield model


# -- text -------------------------------------------------------------------------------------------------------------


def test_generate_continues_a_text(llm: LLM) -> None:
    text = llm.generate(PROMPT, **GREEDY)
    assert text.startswith(", there was a little girl")
    ids = llm.tokenizer.encode(PROMPT)
    assert text == llm.generate(ids, **GREEDY) == llm.generate(np.array(ids), **GREEDY)


def test_a_stream_gives_the_same_text_in_pieces(llm: LLM) -> None:
    stream = llm.stream(PROMPT, **GREEDY)
    with pytest.raises(RequestError, match="The stream has not ended; read it to its end or close it"):
        _ = stream.completion
    pieces = list(stream)
    assert len(pieces) >= 2 and all(pieces)  # one after the prompt, then one a forward pass
    assert "".join(pieces) == llm.generate(PROMPT, **GREEDY) == stream.completion.text
    assert next(stream, None) is None


def test_a_completion_has_its_figures(llm: LLM) -> None:
    done = llm.complete(PROMPT, **GREEDY)
    assert done.completion_tokens == len(done.token_ids) == 24
    assert done.prompt_tokens == len(llm.tokenizer.encode(PROMPT)) and done.cached_tokens == 0
    assert done.finish_reason == "length"
    assert done.ttft_ms and done.tpot_ms and done.tok_per_s
    assert done.tok_per_s == pytest.approx(1000 / done.tpot_ms)
    assert done.logprobs is None and len(done.choices) == 1
    assert done.text == llm.tokenizer.decode([*llm.tokenizer.encode(PROMPT), *done.token_ids])[len(PROMPT) :]
    assert "choices" not in repr(done)


def test_under_two_tokens_there_is_no_time_per_token(llm: LLM) -> None:
    one, none = llm.complete(PROMPT, max_tokens=1), llm.complete(PROMPT, max_tokens=0)
    assert one.ttft_ms and one.tpot_ms is None and one.tok_per_s is None
    assert none.ttft_ms is None and none.text == "" and none.token_ids == () and none.finish_reason == "length"


def test_the_same_seed_gives_the_same_text_and_a_sampled_one_is_reported(llm: LLM) -> None:
    first = llm.complete(PROMPT, max_tokens=40, temperature=1.0)
    again = llm.complete(PROMPT, max_tokens=40, temperature=1.0, seed=first.seed)
    other = llm.complete(PROMPT, max_tokens=40, temperature=1.0)
    assert first.token_ids == again.token_ids and first.seed == again.seed
    assert other.seed != first.seed and other.token_ids != first.token_ids


@pytest.mark.parametrize("stop", ["girl", "little girl named", ["zebra", "was a"]])
def test_a_stop_string_ends_the_text_and_never_leaks(llm: LLM, stop: str | list[str]) -> None:
    whole = llm.generate(PROMPT, **GREEDY)
    stops = [stop] if isinstance(stop, str) else stop
    expected = min(whole.split(text)[0] for text in stops if text in whole)
    stream = llm.stream(PROMPT, stop=stop, **GREEDY)
    shown = ""
    for piece in stream:
        shown += piece
        assert expected.startswith(shown)
    assert shown == expected == stream.completion.text
    assert stream.completion.finish_reason == "stop"
    assert whole.startswith(llm.tokenizer.decode([*llm.tokenizer.encode(PROMPT), *stream.completion.token_ids])[16:])


def test_text_held_back_for_a_stop_string_is_given_at_the_end(llm: LLM) -> None:
    whole = llm.generate(PROMPT, **GREEDY)
    assert llm.generate(PROMPT, stop=whole[-4:] + "!?", **GREEDY) == whole


def test_an_end_token_ends_the_text(llm: LLM) -> None:
    forced = {1: 1e9}
    done = llm.complete(PROMPT, logit_bias=forced, **GREEDY)
    assert done.finish_reason == "stop" and done.token_ids == () and done.text == "" and done.ttft_ms is None
    ignored = llm.complete(PROMPT, logit_bias=forced, ignore_eos=True, temperature=0, max_tokens=3)
    assert ignored.token_ids == (1, 1, 1) and ignored.finish_reason == "length" and ignored.text == ""


def test_a_full_context_ends_the_text(llm: LLM) -> None:
    ids = (llm.tokenizer.encode(PROMPT) * 60)[:250]
    done = llm.complete(ids, ignore_eos=True, max_tokens=100)
    assert done.finish_reason == "length" and done.prompt_tokens + done.completion_tokens == 256
    full = llm.complete([*ids, 5, 5, 5, 5, 5, 5], max_tokens=100)
    assert full.finish_reason == "length" and full.completion_tokens == 0


def test_logprobs_name_the_likeliest_tokens(llm: LLM) -> None:
    done = llm.complete(PROMPT, logprobs=3, **GREEDY)
    assert done.logprobs is not None and len(done.logprobs) == 24
    for item, token_id in zip(done.logprobs, done.token_ids, strict=True):
        assert item.token_id == token_id and item.top[0] == (token_id, item.text, item.logprob)
        assert [one.logprob for one in item.top] == sorted((one.logprob for one in item.top), reverse=True)
        assert item.top[0].token_id == token_id and item.top[0].text == item.text
        assert len(item.top) == 3 and item.logprob < 0
    assert "".join(item.text for item in done.logprobs).strip() == done.text.strip()


def test_scores_are_the_log_probabilities_of_generated_text(llm: LLM) -> None:
    done = llm.complete(PROMPT, logprobs=2, **GREEDY)
    assert done.logprobs is not None
    other = [done.token_ids[0], done.logprobs[1].top[1].token_id]
    same, changed, short = llm.score(PROMPT, [done.token_ids, other, [done.token_ids[0]]])
    exact = isinstance(llm.runner, Session)  # onnxruntime's bits depend on how many tokens a step has
    expected = [item.logprob for item in done.logprobs]
    assert list(same.logprobs) == (expected if exact else pytest.approx(expected, abs=1e-4))
    assert same.greedy and short.greedy and not changed.greedy
    assert same.logprob == pytest.approx(sum(expected)) and same.mean_logprob == pytest.approx(same.logprob / 24)
    assert changed.logprobs[1] == pytest.approx(done.logprobs[1].top[1].logprob, abs=1e-4)
    assert changed.token_ids == tuple(other) and changed.text is None
    assert llm.generate(PROMPT, **GREEDY) == done.text and free_blocks(llm.runner) == llm.plan.kv_blocks


def test_continuations_are_tokenised_as_text_that_goes_on(llm: LLM) -> None:
    likely, unlikely = llm.score(PROMPT, [", there was", " zebra zebra"])
    assert likely.text == ", there was" and likely.logprob > unlikely.logprob
    assert [*llm.tokenizer.encode(PROMPT), *likely.token_ids] == llm.tokenizer.encode(f"{PROMPT}, there was")


@pytest.mark.parametrize(("continuations", "message"), [
    ([], "There is no continuation to score; give at least one"), ([" a", ""], "The prompt is empty|Continuation 1 is"),
    ([[]], "Continuation 0 is empty; give text or token ids"), ([[99999]], "Continuation 0: Token id 99999"),
    ([[5] * 300], r"Continuation 0 has more than the \d+ tokens that the context of 256 leaves after"),
    (" good", "continuations is ' good'; it must be a list of texts or of lists of token ids"),
    (3, "continuations is 3; it must be a list of texts"), ([3], "The prompt is a int; it must be text or token ids"),
])
def test_continuations_that_cannot_be_scored(llm: LLM, continuations: object, message: str) -> None:
    with pytest.raises((RequestError, UsageError), match=message):
        llm.score(PROMPT, continuations)  # type: ignore[arg-type]


def test_a_cancelled_score_says_so(llm: LLM) -> None:
    request = llm.score_request(PROMPT, [[5, 6]])
    request.cancel()
    with pytest.raises(CancelledError, match="The request was cancelled before all continuations were scored"):
        request.finish()
    assert free_blocks(llm.runner) == llm.plan.kv_blocks


def test_options_can_be_one_object(llm: LLM) -> None:
    config = GenerationConfig(temperature=0, max_tokens=24)
    assert llm.generate(PROMPT, config=config) == llm.generate(PROMPT, **GREEDY)
    assert llm.complete(PROMPT, config=config, max_tokens=2, seed=None).completion_tokens == 2
    assert "".join(llm.stream(PROMPT, config=config)) == llm.generate(PROMPT, **GREEDY)
    with pytest.raises(UsageError, match=r"config is \{'n': 1\}; it must be a GenerationConfig"):
        llm.generate(PROMPT, config={"n": 1})  # type: ignore[typeddict-item]
    with pytest.raises(UsageError, match="Unknown option 'temprature'; did you mean 'temperature'"):
        llm.generate(PROMPT, config=config, temprature=0)  # type: ignore[call-arg]


def test_samples_share_the_prompt_and_differ(llm: LLM) -> None:
    done = llm.complete(PROMPT, n=4, seed=7, max_tokens=30, temperature=1.0)
    texts = [choice.text for choice in done.choices]
    assert len(set(texts)) == 4 and done.text == texts[0]
    assert done.completion_tokens == sum(len(choice.token_ids) for choice in done.choices)
    assert texts[0] == llm.generate(PROMPT, seed=7, max_tokens=30, temperature=1.0)
    assert done.tok_per_s and done.tpot_ms and done.tok_per_s > 1500 / done.tpot_ms
    assert free_blocks(llm.runner) == llm.plan.kv_blocks


def test_samples_end_on_their_own(llm: LLM) -> None:
    done = llm.complete(PROMPT, n=4, seed=3, max_tokens=100, temperature=1.0, stop=".")
    assert {choice.finish_reason for choice in done.choices} == {"stop"}
    assert len({len(choice.token_ids) for choice in done.choices}) > 1
    greedy = llm.complete(PROMPT, n=3, **GREEDY)
    assert len({choice.text for choice in greedy.choices}) == 1


# -- reuse ------------------------------------------------------------------------------------------------------------


def whole_blocks(llm: LLM, n: int) -> int:
    """Tokens of n that the prefix cache has for a prompt that begins with them: in KV blocks, where the model has any.
    """
    return n - n % llm.runner.block_tokens if llm.runner.caches_prefixes else 0


def test_a_request_continues_the_last_one_and_gives_the_same_text(llm: LLM) -> None:
    first = llm.complete(PROMPT, reuse=True, temperature=0, max_tokens=60)
    grown = PROMPT + first.text + " She"
    again = llm.complete(grown, reuse=True, **GREEDY)
    run = first.prompt_tokens + first.completion_tokens - 1
    assert first.cached_tokens == 0 and again.cached_tokens == whole_blocks(llm, run) and run == 64
    fresh = llm.complete(grown, **GREEDY)
    assert fresh.cached_tokens == 0 and fresh.token_ids == again.token_ids
    assert free_blocks(llm.runner) == llm.plan.kv_blocks


def test_a_prompt_cache_is_saved_loaded_and_outgrown(llm: LLM, tmp_path: Path) -> None:
    if llm.runner.isa.startswith("onnxruntime"):
        pytest.skip("prompt caches are refused there (tests/system/test_device_requests.py)")
    file = tmp_path / "prompt.kv"
    first = llm.complete(PROMPT, prompt_cache=file, **GREEDY)
    written = file.read_bytes()
    again = llm.complete(PROMPT, prompt_cache=file, **GREEDY)
    assert again.cached_tokens == first.prompt_tokens - 1 and again.text == first.text
    assert file.read_bytes() == written
    longer = llm.complete(PROMPT + first.text, prompt_cache=file, **GREEDY)
    assert longer.cached_tokens == first.prompt_tokens and len(file.read_bytes()) > len(written)
    assert llm.complete("The fox", prompt_cache=file, **GREEDY).cached_tokens == 1  # the beginning-of-text token
    file.write_bytes(written[:-1])
    with pytest.raises(BundleError, match="is damaged or cut short; give another file"):
        llm.complete(PROMPT, prompt_cache=file)
    assert llm.generate(PROMPT, **GREEDY) == first.text  # the failure left nothing behind


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_renders_the_template_and_reuses_the_last_turn(chat_llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = chat_llm.chat_ids(messages)
    assert chat_llm.tokenizer.decode(ids, skip_special=False) == "<|user|>hello<|end|><|assistant|>"
    answer = chat_llm.chat(messages, max_tokens=12, temperature=0)
    assert answer == chat_llm.generate(ids, max_tokens=12, temperature=0)
    chat_llm.chat(messages, max_tokens=12, temperature=0)
    stream = chat_llm.chat_stream(messages, max_tokens=12, temperature=0)
    assert "".join(stream) == answer
    assert stream.completion.cached_tokens == whole_blocks(chat_llm, len(ids) - 1) == 16


def test_chat_needs_a_template(llm: LLM) -> None:
    with pytest.raises(RequestError, match="The model demo has no chat template; generate continues a text instead"):
        llm.chat([{"role": "user", "content": "hello"}])


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "The prompt is empty; give some text or at least one token id."),
        ([], "The prompt is empty; give some text or at least one token id."),
        ([1, 4096], "Token id 4096 of the prompt is outside the vocabulary; ids are from 0 to 4095."),
        ([-1], "Token id -1 of the prompt is outside the vocabulary"),
        ([1, "a"], "The prompt holds 'a', which is not a token id."),
        ([1.0], "The prompt holds 1.0, which is not a token id."),
        ([5] * 257, r"The prompt has 257 tokens, more than the context of 256; open the model with a larger context "
         r"\(--ctx, at most 1024\)."),
        ([5] * 2000, "The prompt has 2000 tokens, more than the context of 256; the model takes 1024 at most, so"),
        (b"bytes", "The prompt is a bytes; it must be text or token ids."),
        (5, "The prompt is a int; it must be text or token ids."),
        ("\ud800", "holds half of a surrogate pair"),
    ],
)
def test_a_prompt_that_cannot_be_run(llm: LLM, prompt: object, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.generate(prompt)  # type: ignore[arg-type]


def test_options_that_cannot_be_served(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"Unknown option 'temprature'; did you mean 'temperature'\?"):
        llm.generate(PROMPT, temprature=1)
    with pytest.raises(UsageError, match="top_p is 2; it must be above 0 and at most 1"):
        llm.generate(PROMPT, top_p=2)
    with pytest.raises(RequestError, match="5 samples were asked for, but the model is open for 4; open it"):
        llm.complete(PROMPT, n=5)
    with pytest.raises(RequestError, match="A stream returns one sample, and n is 2; use complete"):
        llm.stream(PROMPT, n=2)
    with pytest.raises(RequestError, match="logit_bias names token 4096; ids are from 0 to 4095"):
        llm.generate(PROMPT, logit_bias={4096: 1.0})


def slowly(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let forward passes take so long that no text of 200 tokens ends before it is told to."""

    def late(plain: Callable[..., Any], *how: Any, **more: Any) -> Any:
        time.sleep(0.05)
        return plain(*how, **more)

    for name in ("forward", "decode"):
        monkeypatch.setattr(llm.runner, name, partial(late, getattr(llm.runner, name)))


def test_leaving_a_loop_ends_the_request_and_gives_the_blocks_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(PROMPT, max_tokens=2, temperature=0)
    slowly(llm, monkeypatch)
    for _piece in llm.stream(PROMPT, max_tokens=200):
        break
    assert within(60, lambda: free_blocks(llm.runner) == llm.plan.kv_blocks)
    stream = llm.stream(PROMPT, max_tokens=200, ignore_eos=True)
    text = next(stream)
    assert llm.generate(PROMPT, max_tokens=2, temperature=0) == expected  # beside a stream that is open
    stream.close()
    assert free_blocks(llm.runner) == llm.plan.kv_blocks
    assert stream.completion.finish_reason == "cancelled" and stream.completion.token_ids
    assert text + "".join(stream) == stream.completion.text and next(stream, None) is None
    assert llm.generate(PROMPT, max_tokens=2, temperature=0) == expected


def test_a_stream_ends_where_its_model_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", ctx=256) as llm:
        slowly(llm, monkeypatch)
        stream = llm.stream(PROMPT, max_tokens=200, ignore_eos=True)
        text = next(stream)
    assert stream.completion.finish_reason == "cancelled"
    assert text + "".join(stream) == stream.completion.text and next(stream, None) is None


def test_memory_stays_where_the_plan_says(llm: LLM) -> None:
    assert {"weights", "kv", "logits"} <= {region.name for region in llm.plan.regions}
    assert llm.plan.total_bytes == sum(region.bytes for region in llm.plan.regions)
