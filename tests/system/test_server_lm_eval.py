"""lm_eval's `local-completions` against the server: the log-likelihoods of `edgeinfer eval`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
from edgeinfer.text import Tokenizer
from tests.helpers.command_line import edgeinfer
from tests.helpers.serving import Running, serving

WINDOW = 256
TEXTS = (
    "Once upon a time there was a fox who lived in a deep wood. One day he saw a crow with a piece of cheese.",
    "A lion was asleep in the sun when a mouse ran over his face. The lion woke up and caught it in his paw.",
    "The sun and the wind could not agree which of them was the stronger, so they tried it on a man with a coat. " * 3,
)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving({"demo": "demo"}) as one:
        yield one


def client(running: Running, **settings: Any) -> Any:
    """Return lm_eval's client with the tokenizer of the server's model, which transformers need not read."""
    module = pytest.importorskip("lm_eval.models.openai_completions")
    tokenizer: Tokenizer = running.llm().tokenizer

    class Client(module.LocalCompletionsAPI):  # type: ignore[misc, name-defined]
        prefix_token_id = tokenizer.bos_id

        def tok_encode(self, string: str, **others: Any) -> list[int]:
            return tokenizer.encode(string, add_bos=True)[1:]

    one = Client(base_url=f"{running.url}/v1/completions", model="demo", tokenizer_backend="none",
                 max_length=WINDOW + 1, **settings)
    one.tokenizer, one.tokenized_requests = tokenizer, True
    return one


def requests(*arguments: tuple[str, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.mark.parametrize("settings", [{}, {"batch_size": 4}, {"num_concurrent": 3}], ids=["each", "batches", "at once"])
def test_it_finds_the_perplexity_of_eval(running: Running, tmp_path: Path, settings: dict[str, Any]) -> None:
    ending = running.llm().complete("The fox said:", temperature=0, max_tokens=WINDOW)
    assert ending.finish_reason == "stop", "behind it the model ends, and the end token has a log-probability, too"
    texts = (*TEXTS, f"The fox said:{ending.text}")
    found = client(running, **settings).loglikelihood_rolling(requests(*((text,) for text in texts)),
                                                              disable_tqdm=True)
    nll, tokens = 0.0, 0
    for number, text in enumerate(texts):
        file = tmp_path / f"{number}.txt"
        file.write_text(text)
        told = json.loads(edgeinfer("eval", "demo", "--text", file, "--window", WINDOW, "--json").out)
        assert found[number] == pytest.approx(-told["nll_per_token"] * told["tokens"], rel=1e-4)
        nll, tokens = nll + told["nll_per_token"] * told["tokens"], tokens + told["tokens"]
    assert math.exp(-sum(found) / tokens) == pytest.approx(math.exp(nll / tokens), rel=1e-4)


def test_it_scores_the_greedy_continuation_as_greedy(running: Running) -> None:
    prompt = "Once upon a time there"
    text = running.llm().generate(prompt, temperature=0, max_tokens=8)
    (best, greedy), (_, other) = client(running).loglikelihood(
        requests((prompt, text), (prompt, " were nine green engines")), disable_tqdm=True)
    assert greedy and not other
    encode = running.llm().tokenizer.encode
    ids, n = encode(prompt + text)[1:], len(encode(prompt)) - 1  # lm_eval's have no beginning of text
    (score,) = running.llm().score(ids[:n], [ids[n:]])
    assert best == pytest.approx(sum(score.logprobs), rel=1e-4)
