"""Embeddings and reranking: /v1/embeddings, /v1/rerank."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CancelledError
from .answers import outcome
from .errors import UNAVAILABLE, ApiError
from .http import Call, Reply
from .models import Served, in_thread
from .sampling import at_least_one, only, prompts_of
from .types import EmbeddingRequest, RerankRequest

if TYPE_CHECKING:
    from ..engine import Request

T = TypeVar("T")
MAX_TEXTS = 2048
"""Texts of one request, as OpenAI has it."""


async def embed(call: Call) -> Reply:
    """Return the embeddings of texts."""
    call.prompt_field = "input"
    body = call.read(EmbeddingRequest)
    only("encoding_format", body.encoding_format, ("float", "base64"))
    only("pooling", body.pooling, ("mean", "last"))
    texts = prompts_of(body.input, "input", MAX_TEXTS)
    async with call.server.models.using(body.model) as served:
        hidden = served.model.runner.model.hidden_size
        only("dimensions", body.dimensions, (hidden,))
        rows, n_tokens = await embedded(call, served, texts, body.pooling)
    data = [{"object": "embedding", "index": i, "embedding": base64.b64encode(row.astype("<f4").tobytes()).decode()
             if body.encoding_format == "base64" else row.tolist()} for i, row in enumerate(rows)]
    return Reply({"object": "list", "data": data, "model": served.name,
                  "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}})


async def embedded(call: Call, served: Served, texts: Sequence[str | list[int]], pooling: str
                   ) -> tuple[list[Any], int]:
    """Return a row for each text, and how many tokens all have."""
    call.note["model"] = served.name
    requests = await in_thread(lambda: [served.model.embed_request(one, pooling) for one in texts])
    return await _outcomes(call, served, requests), sum(len(one.task.prompt_ids) for one in requests)


async def _outcomes(call: Call, served: Served, requests: Sequence[Request[T]]) -> list[T]:
    """Return the outcomes of requests, of which no more wait than can run at once: the queue is for all clients."""
    def end() -> None:
        for one in requests:
            one.cancel()

    call.count(prompt_tokens=sum(len(one.task.prompt_ids) for one in requests))
    loop, seconds = asyncio.get_running_loop(), call.server.config.request_seconds
    over = loop.call_later(seconds, end)
    at_once, found = int(served.model.runner.config.max_sequences), list[T]()
    try:
        for start in range(0, len(requests), at_once):
            found += await asyncio.gather(*map(outcome, requests[start:start + at_once]))
    except CancelledError:
        if loop.time() < over.when():
            raise
        raise ApiError(503, f"The texts took more than {seconds:g} s (--request-timeout); send fewer at a time.",
                       UNAVAILABLE, code="timeout") from None
    finally:
        over.cancel()
        end()
    return found


async def rerank(call: Call) -> Reply:
    """Return documents with the most relevant first."""
    call.prompt_field = "documents"
    body = call.read(RerankRequest)
    given = [one if isinstance(one, str) else one.get("text") for one in body.documents]
    documents = [one for one in given if isinstance(one, str) and one]
    if not documents or len(documents) < len(given):
        raise ApiError(400, "documents must be a list of texts, or of objects with a text.", param="documents")
    if len(documents) > MAX_TEXTS:
        raise ApiError(400, f"documents has {len(documents)} texts; at most {MAX_TEXTS} are taken.", param="documents")
    at_least_one("top_n", body.top_n)
    async with call.server.models.using(body.model) as served:
        call.note["model"] = served.name
        requests = await in_thread(lambda: served.model.rerank_requests(body.query, documents))
        found = served.model.ranked(await _outcomes(call, served, requests))
    n_tokens = sum(len(one.task.prompt_ids) for one in requests)
    results = [{"index": one.index, "relevance_score": one.score,
                **({"document": {"text": documents[one.index]}} if body.return_documents else {})}
               for one in found[: body.top_n]]
    return Reply({"object": "list", "model": served.name, "results": results,
                  "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}})
