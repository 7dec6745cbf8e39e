"""Requests from one thread that run together: batches, asyncio, embeddings, rankings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer import LLM, AsyncLLM
from edgeinfer.errors import CancelledError, RequestError, UsageError
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import free_blocks
from tests.helpers.tasks import held

PROMPTS = ["Once upon a time", "The fox and the crow", "There was a king", "A little bird"]
GREEDY = {"temperature": 0.0, "max_tokens": 20}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", ctx=256, threads=1, max_sequences=4) as opened:
        yield opened


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_gives_what_each_prompt_gets_alone(llm: LLM) -> None:
    want = [llm.generate(prompt, **GREEDY) for prompt in PROMPTS]
    found = llm.batch(PROMPTS * 5, **GREEDY)
    assert [done.text for done in found] == want * 5
    assert llm.batch([], **GREEDY) == []
    assert llm.batch(iter([[5, 6], "Once"]), max_tokens=1)[0].prompt_tokens == 2


def test_a_batch_with_a_wrong_prompt_is_refused_whole(llm: LLM) -> None:
    with pytest.raises(RequestError, match="The prompt is empty"):
        llm.batch(["Once", ""], **GREEDY)
    with pytest.raises(UsageError, match="prompts is 'Once'; it must be a list of texts or of lists of token ids"):
        llm.batch("Once", **GREEDY)  # type: ignore[arg-type]
    assert llm.generate(PROMPTS[0], **GREEDY)


def test_common_beginnings_are_computed_once(llm: LLM) -> None:
    system = "The king and the queen lived in a castle by the sea. " * 4
    found = llm.batch([f"{system} User {user} asks." for user in range(8)], **GREEDY)
    common = len(llm.tokenizer.encode(system)) // 16 * 16
    assert [done.cached_tokens for done in found] == [0, *[common] * 7]


def test_ten_turns_reuse_all_full_blocks(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Tell me a tale of a wolf.")
    cached, held = [], 0
    for turn in range(10):
        done = llm.complete(ids, reuse=True, temperature=0, max_tokens=9, ignore_eos=True)
        cached.append(done.cached_tokens == held)
        held = (len(ids) + 8) // 16 * 16  # the last token of an answer is never run
        ids = [*ids, *done.token_ids, *llm.tokenizer.encode(f" Turn {turn}.", add_bos=False)]
    assert all(cached[1:])


def test_a_prefix_file_outlives_the_model(tmp_path: Path) -> None:
    file, prompt = tmp_path / "prefixes.kv", "The king and the queen lived in a castle by the sea. " * 3
    with LLM("demo", ctx=256, threads=1, prefix_file=file) as model:
        first = model.complete(prompt, reuse=True, **GREEDY)
    with LLM("demo", ctx=256, threads=1, prefix_file=file) as model:
        again = model.complete(prompt, reuse=True, **GREEDY)
        model.close()
        written = file.read_bytes()
    assert first.cached_tokens == 0 and again.cached_tokens == (first.prompt_tokens - 1) // 16 * 16
    assert again.token_ids == first.token_ids and file.read_bytes() == written
    run = ("run", "demo", prompt, "--temp", "0", "-n", "20", "--json", "--prefix-file", file)
    assert edgeinfer(*run).json["token_ids"] == list(first.token_ids)
    damaged = written[: len(written) // 2]
    file.write_bytes(damaged)
    refused = edgeinfer(*run)
    assert refused.code == 1 and "is damaged or cut short" in refused.err and file.read_bytes() == damaged


# -- answers that go on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.4}, {"temperature": 0.0, "stop": "She"},
    {"temperature": 0.9, "seed": 4, "logprobs": 2},
])
def test_an_answer_goes_on_behind_tokens_of_another_run(llm: LLM, options: dict[str, object]) -> None:
    whole = llm.complete(PROMPTS[0], max_tokens=30, **options)  # type: ignore[arg-type]
    for n in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        on = llm.complete(PROMPTS[0], max_tokens=30, generated=whole.token_ids[:n], **options)  # type: ignore[arg-type]
        assert on.token_ids == whole.token_ids and on.text == whole.text and on.finish_reason == whole.finish_reason
    with pytest.raises(RequestError, match="40 generated tokens cannot be taken over by a request for 1 texts of up"):
        llm.complete(PROMPTS[0], max_tokens=30, generated=[5] * 40)


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_asyncio_gives_the_same_texts(llm: LLM) -> None:
    want = [llm.generate(prompt, **GREEDY) for prompt in PROMPTS]

    async def streamed(model: AsyncLLM, prompt: str) -> str:
        return "".join([piece async for piece in model.stream(prompt, **GREEDY)])

    async def main() -> None:
        async with AsyncLLM("demo", ctx=256, threads=1, max_sequences=4) as model:
            assert await asyncio.gather(*[model.generate(prompt, **GREEDY) for prompt in PROMPTS * 3]) == want * 3
            assert await asyncio.gather(*[streamed(model, prompt) for prompt in PROMPTS * 3]) == want * 3
            scores = await model.score("The fox was very", [" hungry", " green"])
            assert scores == model.llm.score("The fox was very", [" hungry", " green"])
            with pytest.raises(RequestError, match="The prompt is empty"):
                await model.generate("")

    asyncio.run(main())


def test_a_cancelled_task_and_a_stream_that_is_left_end_their_requests() -> None:
    async def main() -> None:
        async with AsyncLLM("demo", ctx=512, threads=1, max_sequences=2) as model:
            with held(model.llm, after=9):
                task = asyncio.create_task(model.generate("Once", max_tokens=400, ignore_eos=True))
                stream = model.stream("The", max_tokens=400, ignore_eos=True)
                async for _ in stream:
                    break
                task.cancel()
            await stream.aclose()  # type: ignore[attr-defined]
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await model.generate("Once", max_tokens=2)
            model.llm.runner.drop_prefixes()
            assert free_blocks(model.llm.runner) == model.llm.plan.kv_blocks

    asyncio.run(main())


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_embeddings_have_the_rows_before_the_head(llm: LLM) -> None:
    found, last = llm.embed(PROMPTS), llm.embed(PROMPTS, pooling="last", normalize=False)
    assert found.shape == last.shape == (4, llm.runner.model.hidden_size) and found.dtype == np.float32
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert np.array_equal(found, llm.embed([llm.tokenizer.encode(prompt) for prompt in PROMPTS]))
    single = np.concatenate([llm.embed([prompt]) for prompt in PROMPTS])
    assert np.array_equal(single, found)
    assert llm.embed([]).shape == (0, llm.runner.model.hidden_size)
    for wrong, why in (({"pooling": "max"}, "pooling is 'max'; choose one of mean, last"),
                       ({"normalize": 3}, "normalize is 3")):
        with pytest.raises(UsageError, match=why):
            llm.embed(PROMPTS, **wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="The prompt is empty"):
        llm.embed([""])


def test_embeddings_do_not_depend_on_chunks_or_company() -> None:
    text = "The wolf and the lamb met at the river. " * 6
    with LLM("demo", ctx=256, threads=1, prefill_chunk=16, max_sequences=4) as model:
        requests = [model.request(prompt, GREEDY) for prompt in PROMPTS]
        for request in requests:
            request.start_whole()
        beside = model.embed([text, PROMPTS[0]])
        texts = [request.finish().text for request in requests]
        model.runner.drop_prefixes()
        assert free_blocks(model.runner) == model.plan.kv_blocks
    with LLM("demo", ctx=256, threads=1) as model:
        assert texts == [model.generate(prompt, **GREEDY) for prompt in PROMPTS]
        assert np.allclose(model.embed([text, PROMPTS[0]]), beside, atol=1e-6)


@pytest.mark.slow
@pytest.mark.reference
def test_embeddings_are_transformers_hidden_states(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.helpers.checkpoints import make_checkpoint

    checkpoint = make_checkpoint(tmp_path / "model")
    with LLM(checkpoint, weights="f32", kv="f32", ctx=64) as model:
        ids = [1, 5, 9, 17, 33, 2]
        mean, last = model.embed([ids], normalize=False)[0], model.embed([ids], pooling="last", normalize=False)[0]
    reference = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        rows = reference(torch.tensor([ids])).last_hidden_state[0].numpy()
    assert np.allclose(mean, rows.mean(0), atol=1e-5) and np.allclose(last, rows[-1], atol=1e-5)


def test_a_cancelled_embedding_says_so(llm: LLM) -> None:
    request = llm.embed_request(PROMPTS[0])
    request.cancel()
    with pytest.raises(CancelledError, match="cancelled before its embedding was computed"):
        request.finish()


def test_a_ranking_wants_single_tokens_for_yes_and_no(llm: LLM) -> None:
    with pytest.raises(RequestError, match="The tokenizer encodes 'yes' as 2 tokens, and rerank compares single ones"):
        llm.rerank("Who is old?", ["The king is old."])


def test_documents_are_ranked_by_the_probability_of_yes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    yes, no = llm.tokenizer.encode(" the", add_bos=False)[-1], llm.tokenizer.encode(" a", add_bos=False)[-1]
    monkeypatch.setattr(LLM, "_answer_id", lambda self, word: {"yes": yes, "no": no}[word])
    documents = ["The king is old.", "A dog ran to", "They saw"]
    found = llm.rerank("Who is old?", documents)
    assert sorted(one.index for one in found) == [0, 1, 2]
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    prompt = llm._judging("Who is old?", documents[found[0].index], "Given a web search query, retrieve relevant "
                          "passages that answer the query")
    best = llm.score(prompt, [[yes], [no]])
    for_it, against = (np.exp(one.logprob) for one in best)
    assert found[0].score == pytest.approx(for_it / (for_it + against))


