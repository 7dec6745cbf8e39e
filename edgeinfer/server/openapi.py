"""The OpenAPI description of the server, made from the types of its requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from .. import __version__
from . import anthropic, batches, ollama_types, types
from .http import Handler

BODIES: dict[str, type] = {
    "/v1/chat/completions": types.ChatRequest, "/v1/completions": types.CompletionRequest,
    "/v1/responses": types.ResponsesRequest, "/v1/embeddings": types.EmbeddingRequest,
    "/v1/rerank": types.RerankRequest, "/tokenize": types.TokenizeRequest, "/detokenize": types.DetokenizeRequest,
    "/api/chat": ollama_types.ChatBody, "/api/generate": ollama_types.GenerateBody,
    "/api/embed": ollama_types.EmbedBody,
    "/api/show": ollama_types.ShowBody, "/v1/messages": anthropic.Body,
    "/v1/messages/count_tokens": anthropic.Counted, "/v1/batches": batches.CreateBody,
}
"""Type of the body that each path reads."""
REFUSED = ("400", "401", "403", "404", "408", "413", "429", "503")


def description(routes: Iterable[tuple[str, str, Handler]]) -> dict[str, Any]:
    """Return the description of routes: method, path and handler of each."""
    schemas, components = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    bodies = dict(zip(BODIES, schemas, strict=True))
    paths: dict[str, Any] = {}
    for method, path, handler in routes:
        operation: dict[str, Any] = {
            "summary": (handler.__doc__ or "").strip().splitlines()[0],
            "responses": {"200": {"description": "The answer."},
                          **{status: {"description": "The error in one sentence."} for status in REFUSED}}}
        if path in bodies and method == "POST":
            needed = any(one.required for one in msgspec.structs.fields(BODIES[path]))
            operation["requestBody"] = {"required": needed, "content": {"application/json": {"schema": bodies[path]}}}
        if "{name" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path.replace("{name:path}", "{name}"), {})[method.lower()] = operation
    return {"openapi": "3.1.0", "info": {"title": "edgeinfer", "version": __version__}, "paths": paths,
            "components": {"schemas": components}}
