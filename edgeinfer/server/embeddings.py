"""Embeddings and reranking: /v1/embeddings, /v1/rerank."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

from .answers import outcome
from .errors import ApiError
from .http import Call, Reply
from .models import Served, in_thread
from .sampling import only, prompts_of
from .types import EmbeddingRequest, RerankRequest

MOST_TEXTS = 2048
"""Texts of one request, as OpenAI has it."""


async def embed(call: Call) -> Reply:
    """Return the embeddings of texts."""
    call.prompt_field = "input"
    body = call.read(EmbeddingRequest)
    only("encoding_format", body.encoding_format, ("float", "base64"))
    only("pooling", body.pooling, ("mean", "last"))
    texts = prompts_of(body.input, "input", MOST_TEXTS)
    async with call.server.models.using(body.model) as served:
        call.note["model"] = served.name
        hidden = served.model.runner.model.hidden_size
        only("dimensions", body.dimensions, (hidden,))
        rows, n_tokens = await embedded(served, texts, body.pooling)
    data = [{"object": "embedding", "index": i, "embedding": base64.b64encode(row.astype("<f4").tobytes()).decode()
             if body.encoding_format == "base64" else row.tolist()} for i, row in enumerate(rows)]
    return Reply({"object": "list", "data": data, "model": served.name,
                  "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}})


async def embedded(served: Served, texts: Sequence[str | list[int]], pooling: str) -> tuple[list[Any], int]:
    """Return a row for each text, and how many tokens all have."""
    llm = served.model

    def prepare() -> list[Any]:
        return [llm.embed_request(one, pooling) for one in texts]

    requests = await in_thread(prepare)
    try:
        rows = [await outcome(one) for one in requests]
    finally:
        for one in requests:
            one.cancel()
    return rows, sum(len(one.task.prompt_ids) for one in requests)


async def rerank(call: Call) -> Reply:
    """Return documents with the most relevant first."""
    call.prompt_field = "documents"
    body = call.read(RerankRequest)
    given = [one if isinstance(one, str) else one.get("text") for one in body.documents]
    documents = [one for one in given if isinstance(one, str) and one]
    if not documents or len(documents) < len(given):
        raise ApiError(400, "documents must be a list of texts, or of objects with a text.", param="documents")
    if body.top_n is not None and body.top_n < 1:
        raise ApiError(400, f"top_n is {body.top_n}; it must be 1 or more.", param="top_n")
    async with call.server.models.using(body.model) as served:
        call.note["model"] = served.name
        requests = await in_thread(lambda: served.model.rerank_requests(body.query, documents))
        try:
            scores = await asyncio.gather(*map(outcome, requests))
        finally:
            for one in requests:
                one.cancel()
        found = served.model.ranked(scores)
    n_tokens = sum(len(one.task.prompt_ids) for one in requests)
    results = [{"index": one.index, "relevance_score": one.score,
                **({"document": {"text": documents[one.index]}} if body.return_documents else {})}
               for one in found[: body.top_n]]
    return Reply({"object": "list", "model": served.name, "results": results,
                  "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens}})
