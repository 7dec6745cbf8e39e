"""The chat with a model on a server: a conversation whose answers come over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...base.api_client import ApiClient
from ...engine import Completion
from ...errors import EdgeInferError, RequestError
from .conversation import DEFAULTS, SETTINGS, Conversation

if TYPE_CHECKING:
    from ..progress import ProgressLine


class RemoteConversation(Conversation):
    """A conversation with a model that a server with OpenAI's API runs.

    Parameters
    ----------
    client : ApiClient
    model : name of the model on the server; empty for its first one
    system, options : as for `Conversation`

    Raises
    ------
    EdgeInferError
        The server cannot be reached, or has no such model.
    """

    def __init__(self, client: ApiClient, model: str, system: str | None, options: dict[str, Any]):
        self._client, self._answer = client, None
        served = client.ask("/v1/models")["data"]
        found = next((one for one in served if model in ("", one["id"])), None)
        if found is None:
            raise RequestError(f"{client.url} has no model {model!r}; choose one of "
                               f"{', '.join(one['id'] for one in served)}.")
        self._ctx = found.get("max_model_len")
        self._start(found["id"], _chats(client, found["id"]), system, options)

    _answer: RemoteAnswer | None

    def ask(self, text: str, progress: ProgressLine) -> Any:
        """Return the answer to a message as it comes."""
        wanted = {field: self.options[field] for field in SETTINGS.values() if self.options.get(field) is not None}
        body = {**wanted, "model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        if "stop" in body:
            body["stop"] = list(body["stop"])
        if self.template:
            self._answer = RemoteAnswer(self._client, "/v1/chat/completions", {
                **body, "messages": self._messages(self.turns, text)})
        else:
            body = {"max_tokens": DEFAULTS["max_tokens"], **body, "prompt": self._text(self.turns, text)}
            self._answer = RemoteAnswer(self._client, "/v1/completions", body)
        return self._answer

    def cancel(self) -> None:
        """End the answer that is being written."""
        if self._answer is not None:
            self._answer.cancelled.set()

    def used(self) -> str:
        """Return how full the context is, as the end of a line."""
        done = self.last if self.turns else None
        used = done.prompt_tokens + done.completion_tokens if done else 0
        return f"{used:,} tokens, " if self._ctx is None else f"{used:,} of {self._ctx:,} tokens, "

    @property
    def ctx(self) -> int:
        """Tokens of the context; 0 if the server does not say."""
        return int(self._ctx or 0)

    def larger(self) -> None:
        """Return None: the context is the server's."""

    no_larger = "The server may have been started with a smaller context than the model has (serve --ctx)."

    def full(self, done: Completion) -> bool:
        """Return whether an answer has filled the context."""
        return self._ctx is not None and done.prompt_tokens + done.completion_tokens >= self._ctx

    def too_many(self, text: str) -> int | None:
        """Return how many of the oldest turns are to go: the server alone knows how many tokens they have."""
        return max(len(self.turns) // 2, 1) if self.turns else None

    def statistics(self, done: Completion) -> Iterator[str]:
        """Yield a line about an answer."""
        speed = "" if done.tok_per_s is None else f" | {done.tok_per_s:.1f} tok/s"
        first = "" if done.ttft_ms is None else f"TTFT {done.ttft_ms:.1f} ms"
        yield f"{first}{speed} | {done.prompt_tokens} prompt + {done.completion_tokens} new tokens"


def _chats(client: ApiClient, name: str) -> bool:
    """Return whether a model has a chat template: edgeinfer and ollama say so, and of others it is assumed."""
    try:
        return bool(client.ask("/api/show", {"model": name})["template"])
    except (EdgeInferError, KeyError, TypeError, ValueError):
        return True


class RemoteAnswer:
    """The text of an answer, piece by piece."""

    def __init__(self, client: ApiClient, path: str, body: dict[str, Any]):
        self.cancelled = threading.Event()
        self._events = client.events(path, body)
        self._texts: list[str] = []
        self._times = [time.perf_counter()]
        self._usage: dict[str, int] = {}
        self._reason = ""

    def __iter__(self) -> Iterator[str]:
        for event in self._events:
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {}
                text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
                self._reason = choice.get("finish_reason") or self._reason
                if text:
                    self._times.append(time.perf_counter())
                    if not delta.get("reasoning_content"):  # which the model does not read again
                        self._texts.append(text)
                    yield text
            if self.cancelled.is_set():
                self.close()
                return

    def close(self) -> None:
        """End the answer."""
        self._reason = "cancelled"
        self._events.close()  # type: ignore[attr-defined]

    @property
    def completion(self) -> Completion:
        """The outcome, as far as the server has said it."""
        times, n = self._times, self._usage.get("completion_tokens", len(self._times) - 1)
        seconds = times[-1] - times[1] if len(times) > 2 else 0.0
        speed = (n - 1) / seconds if n > 1 and seconds else None
        first = 1000 * (times[1] - times[0]) if len(times) > 1 else None
        return Completion("".join(self._texts), (), self._usage.get("prompt_tokens", 0), 0, n, first,
                          1000 / speed if speed else None, speed, self._reason or "stop", 0, None, ())
