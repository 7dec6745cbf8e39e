"""A pytest plugin for llama.cpp's tests of its server: which tests apply, and where paths and texts differ."""

from __future__ import annotations

import re
from typing import Any

import pytest

NATIVE = "llama.cpp's own /completion: fields of its answers (timings, stop_type, tokens, completion_probabilities)"
SLOTS = "slots, which edgeinfer does not have: sequences share a pool"
ROUTER = "llama.cpp's router: models as processes, their downloads, presets, events and sleep"
MTMD = "images, audio and video"
OTHERS = "another model: a reranker, an encoder, a GGUF file, an adapter or a template that is downloaded"
TIMINGS = "llama.cpp's additions to OpenAI's API: timings, progress, verbose, json_schema, counting tokens"
INPUTS = "inputs that mix texts, token ids and objects, or are empty, which OpenAI's API does not have"
PREFILL = "an assistant's message at the end is continued, or two of them refused, by llama.cpp's templates"
TEMPLATES = "chat templates that llama.cpp is started with, and paths and fields that show their prompts"
BIASES = "logit_bias of texts, and as a list of pairs"
PARTS = "parts of a message are joined by line breaks; edgeinfer joins them as they are"
METRICS = "names and meaning of llama.cpp's metrics; edgeinfer has vLLM's"
TOOLS = "MCP servers, a proxy and tools that the server runs itself"
OWN = "a choice of llama.cpp's: several addresses, aliases, tags, static files, paths of the page, error texts"
COUNTS = "token counts of another tokenizer, or of a prefix cache that is not made of blocks"
NOT_APPLICABLE: tuple[tuple[str, str], ...] = (
    (r"test_(router|sleep|proxy|stream|compat_gcp|lora|slot_save|kv_keep_only_active)\.py", ROUTER),
    (r"test_(mcp_servers|tools_builtin)\.py|cors_proxy|with_tools_enabled|cors_origins_localhost", TOOLS),
    (r"test_vision_api\.py|mtmd|local_media|vision|with_image|json_prompt|multimodal", MTMD),
    (r"test_(rerank|infill|speculative|template)\.py|split_model", OTHERS),
    (r"test_metrics\.py", METRICS),
    (r"test_(ctx_shift|ignore_eos)\.py|server_props|server_slots", SLOTS),
    (r"test_completion\.py::test_(completion\[|completion_stream\[|n_probs|completion_response_fields|"
     r"completion_unified|completion_prompt_cache|cache_vs|cancel_request|completion_with_tokens_input|"
     r"completion_stream_vs_non_stream)", NATIVE),
    (r"test_completion\.py::test_logit_bias\[(?!True-True)", BIASES),
    (r"thinking_history", TEMPLATES),
    (r"timings|telemetry|return_progress|verbose_debug|json_schema\[|input_tokens|token_count", TIMINGS),
    (r"chat_template|apply_chat|This is not a chat template", TEMPLATES),
    (r"chat_completion\[.*Whillicter", PARTS),
    (r"invalid_chat_completion_req\[messages7\]|empty_messages", PREFILL),
    (r"embedding_(mixed_input\[(-False|input(3|5|7|8|9|10)-)|content_text)|pooling_none", INPUTS),
    (r"embedding_usage|cached_tokens", COUNTS),
    (r"multiple_addresses|aliases_and_tags|no_ui|static_assets|cors_options", OWN),
)
"""Pattern of the id of a test, and why it does not apply; the first that matches counts."""
TEXTS = ("test_chat_completion", "test_chat_completion_stream", "test_chat_completion_with_openai_library",
         "test_completion_with_openai_library", "test_completion_stream_with_openai_library",
         "test_responses_with_openai_library", "test_responses_stream_with_openai_library")
"""Tests that expect a text of llama.cpp's random numbers; everything else of them is checked."""
PATHS = ("/chat/completions", "/embeddings", "/models", "/responses")
"""Paths that llama-server has without /v1, too."""
FIELDS = {"n_predict": "max_tokens", "prompt": "prompt", "seed": "seed", "temperature": "temperature",
          "logit_bias": "logit_bias"}
"""Fields of /completion that /v1/completions has."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests that do not apply."""
    for item in items:
        reason = next((why for pattern, why in NOT_APPLICABLE if re.search(pattern, item.nodeid)), None)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionstart() -> None:
    """Replace functions that the tests call: no downloads, and paths and fields as OpenAI has them."""
    import utils  # type: ignore[import-not-found]

    process: Any = utils.ServerProcess
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    url, asked = process.make_url, process.make_request
    process.make_url = lambda self, path, *more: url(self, f"/v1{path}" if path in PATHS else path, *more)

    def make_request(self: Any, method: str, path: str, data: Any = None, *more: Any, **named: Any) -> Any:
        if method != "POST" or path not in ("/completion", "/completions"):
            return asked(self, method, path, data, *more, **named)
        body = {"max_tokens": self.n_predict or 64, **{FIELDS[name]: data[name] for name in data if name in FIELDS}}
        found = asked(self, method, "/v1/completions", body, *more, **named)
        if found.status_code == 200:
            found.body["content"] = found.body["choices"][0]["text"]
        return found

    process.make_request = make_request


@pytest.fixture(autouse=True)
def texts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any text where a test expects one of llama.cpp's."""
    if getattr(request.function, "__name__", "") in TEXTS:
        monkeypatch.setattr(request.module, "match_regex", lambda pattern, text: isinstance(text, str))
