"""Requests of OpenAI's API as types: unknown fields and wrong types are refused by name."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

Text = str | list[str]
Prompts = str | list[str | int | list[int]]
"""A text, several, the tokens of one, or of several; `sampling.prompts_of` tells them apart."""


class Request(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests that generate text."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Contents of a stream besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(Request, kw_only=True):
    """Fields of chat and text completions."""

    seed: int | None = None
    n: int | None = None
    stop: Text | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None


class ChatRequest(Sampled, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    store: bool | None = None
    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class CompletionRequest(Sampled, kw_only=True):
    """Body of /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class ResponsesText(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Form of a response's text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesReasoning(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Reasoning of a response; no model here writes summaries of it, whatever is asked for."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Request, kw_only=True):
    """Body of /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    store: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: bool | None = None
    include: list[str] | None = None
    max_tool_calls: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/embeddings."""

    input: Prompts
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: str = "mean"


class RerankRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/rerank."""

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /tokenize."""

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None
