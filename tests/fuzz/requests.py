"""Target: requests to the server, with damaged bodies and damaged headers."""

from __future__ import annotations

import contextlib
import json
import random
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from edgeinfer import LLM
from tests.helpers.serving import Answered, chat_model, serving, until

from . import mutate
from .base import Target, WrongTokensError, well_told

FUNCTION = {"name": "look", "description": "Look at it.", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
TOOLS = [{"type": "function", "function": FUNCTION}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
CALLED = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}]},
    {"role": "tool", "tool_call_id": "1", "content": "9"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "boolean"}}}
SAMPLING = {"seed": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 9, "min_p": 0.1, "presence_penalty": 0.1,
            "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"9": 1.0}, "stop": ["x"], "n": 2}
OPTIONS = {"num_predict": 3, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "seed": 1, "stop": ["x"],
           "repeat_penalty": 1.1, "num_ctx": 64}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {"messages": MESSAGES, "max_tokens": 3, **SAMPLING},
        {"model": "demo", "messages": CALLED, "tools": TOOLS, "tool_choice": "required", "max_completion_tokens": 3},
        {"messages": CALLED, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}},
         "parallel_tool_calls": False, "max_tokens": 3, **STREAM},
        {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "response_format": SCHEMA},
        {"messages": MESSAGES, "max_tokens": 3, "regex": "[a-z]+", "chat_template_kwargs": {"enable_thinking": True},
         "reasoning_effort": "low", "metadata": {"a": "b"}, "user": "me", "store": False, "modalities": ["text"]}),
    "/v1/completions": (
        {"prompt": "Once upon a time", "max_tokens": 3, "echo": True, "logprobs": 2, **SAMPLING},
        {"model": "demo", "prompt": ["Once", "Twice"], "max_tokens": 3, **STREAM},
        {"prompt": [5, 17, 80], "max_tokens": 3, "best_of": 1, "ignore_eos": True, "grammar": 'root ::= "a"+'},
        {"prompt": [[5, 17], [80]], "max_tokens": 0, "echo": True, "logprobs": 1}),
    "/v1/responses": (
        {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 3, "text": {"format": {"type": "text"}},
         "reasoning": {"effort": "low"}, "store": False, "truncation": "disabled", "include": []},
        {"model": "demo", "stream": True, "max_output_tokens": 3, "tools": [{"type": "function", **FUNCTION}],
         "tool_choice": "auto", "input": [
             {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
             {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"n": 1}'},
             {"type": "function_call_output", "call_id": "1", "output": "9"}]}),
    "/v1/embeddings": (
        {"input": ["Once", "Twice"], "encoding_format": "base64", "pooling": "last"},
        {"model": "demo", "input": [5, 17], "dimensions": 256, "user": "me"}),
    "/v1/rerank": (
        {"query": "a cat", "documents": ["a dog", {"text": "a cat"}], "top_n": 1, "return_documents": True},),
    "/tokenize": ({"content": "Once", "add_special": True, "parse_special": False, "with_pieces": True},),
    "/detokenize": ({"tokens": [5, 17, 80], "model": "demo"},),
    "/api/chat": (
        {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "options": OPTIONS, "format": "json",
         "stream": False, "keep_alive": "5m", "think": False},
        {"model": "demo", "messages": CALLED, "tools": TOOLS, "options": OPTIONS}),
    "/api/generate": (
        {"model": "demo", "prompt": "Once", "system": "Be brief.", "options": OPTIONS},
        {"model": "demo:latest", "prompt": "Once", "raw": True, "stream": False, "options": OPTIONS,
         "format": {"type": "boolean"}}),
    "/api/embed": ({"model": "demo", "input": ["Once", "Twice"], "truncate": True},),
    "/api/show": ({"model": "demo", "verbose": True},),
    "/v1/messages": (
        {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}], "system": "Be brief.",
         "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 9, "metadata": {"user_id": "me"}},
        {"model": "demo", "max_tokens": 3, "stream": True, "thinking": {"type": "disabled"},
         "tools": [{"name": "look", "input_schema": FUNCTION["parameters"]}],
         "tool_choice": {"type": "tool", "name": "look"}, "messages": [
             {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
             {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"n": 1}}]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "9"}]}]}),
    "/v1/messages/count_tokens": ({"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "system": [
        {"type": "text", "text": "Be brief."}]},),
}
"""Valid bodies of every path that reads one."""
HEADERS = ("Host", "Origin", "Authorization", "x-api-key", "Content-Type", "Content-Length", "Transfer-Encoding",
           "Expect", "Connection", "Upgrade", "Accept-Encoding", "Content-Encoding", "Cookie", "X-Forwarded-For", "",
           "é", "Range", "a b", "X" * 500, "Access-Control-Request-Method")
VALUES = ("", "0", "-1", "1", "9" * 30, "1e3", "+1", "chunked", "gzip", "100-continue", "close", "keep-alive", "h2c",
          "Bearer ", "Bearer key-number-one", "Basic eDp5", "localhost", "evil.example.org", "[::1]:80", "[", ":",
          "null", "https://evil.example.org", "é", "\udcff", "\0", "a\rb", "x" * 70_000, "application/xml", "bytes=0-")
METHODS = ("POST", "POST", "POST", "GET", "HEAD", "OPTIONS", "PUT", "TRACE", "CONNECT", "post", "", "é")
PATHS = ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fetc%2fpasswd", "/v1/models/%00", "//v1/models", "/\xff",
         "/v1/completions/", "/v1/completions?a=b", "/" + "x" * 9000, "http://evil.example.org/v1/models", "*", "", "%",
         "/v1/models/%ff%fe", "/health", "/metrics", "/openapi.json", "/status", "/api/tags")
KNOWN = {200, 400, 401, 403, 404, 405, 408, 413, 429}
"""Statuses that a server may give which is neither loading nor about to end."""
WHOLE = ("The body is not JSON: ", "The prompt has ")
"""Begin of errors that are not of one field."""
SECONDS = 60.0


class Requests(Target):
    """Requests to every path of a server in this process."""

    weight = 3.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._held = contextlib.ExitStack()
        model = chat_model(directory)
        self.server = self._held.enter_context(serving(
            {"demo": model}, lambda source, left: LLM(source, budget=left, ctx=512, threads=1, max_sequences=8),
            max_body=100_000, read_seconds=1.0, request_seconds=20.0))
        self.expected = self._text()
        answers = [self.server.ask(path, body) for path, bodies in BODIES.items() for body in bodies]
        self.refused = {self.message(answer) for answer in answers if answer.status != 200}
        """Refusals of valid bodies: the demo cannot rank documents."""

    def close(self) -> None:
        """End the server."""
        self._held.close()

    def _text(self) -> str:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        return str(self.server.ask("/v1/completions", body).json["choices"][0]["text"])

    def canary(self) -> None:
        text = self._text()
        if text != self.expected:
            raise WrongTokensError(f"{text!r} instead of {self.expected!r}")
        if not until(self.server.free):
            raise WrongTokensError("a request still holds blocks")

    def run(self, rng: random.Random) -> bool:
        path = rng.choice(tuple(BODIES))
        original = rng.choice(BODIES[path])
        self.server.log.clear()
        kind = rng.randrange(10)
        if kind == 0:
            return self.check(self.send(damaged_head(rng, path, json.dumps(original).encode())))
        if kind == 1:
            return self.check(self.send(request(path, mutate.data(rng, json.dumps(original).encode()))))
        body = mutate.tree(rng, original, most=rng.choice((1, 1, 3)))
        return self.check(self.send(request(path, json.dumps(body).encode())), differences(original, body))

    def send(self, data: bytes) -> Answered | None:
        """Send bytes, and return the answer; None where the server closes the connection without one."""
        self.input_bytes = len(data)
        method = data[:5].split(b" ")[0].decode("latin-1")
        with self.server.connect() as connection:
            connection.settimeout(SECONDS)
            with contextlib.suppress(OSError):  # it may answer before it has read all, and close
                connection.sendall(data)
            try:
                found = HTTPResponse(connection, method=method)
                found.begin()
                return Answered(found.status, found.read(), {k.lower(): v for k, v in found.getheaders()})
            except TimeoutError:
                raise AssertionError(f"no answer within {SECONDS} s to {data[:300]!r}") from None
            except (HTTPException, ConnectionError):
                return None

    def check(self, found: Answered | None, changed: set[str] | None = None) -> bool:
        """Return whether a request was served; raises for an answer that is none of ours.

        Parameters
        ----------
        found : Answered or None
        changed : fields of a valid body that were changed, one of which a refusal has to name
        """
        told = "\n".join(self.server.log)
        if "Traceback" in told:
            raise AssertionError(told[-1500:])
        if found is None:
            return False
        if found.status not in KNOWN:
            raise AssertionError(f"{found.status}: {found.body[:600]!r} {told[-300:]}")
        if found.status == 200:
            return True
        if not found.body:  # of a HEAD request
            return False
        message = self.message(found)
        if not well_told(message):
            raise AssertionError(f"{message!r} is nothing to show")
        if found.status == 400 and changed and message not in self.refused and not message.startswith(WHOLE):
            told = f"{message} {self.param(found)}"
            if not any(name in told or repr(name) in told for name in changed):
                raise AssertionError(f"{sorted(changed)} changed, and {told!r} does not name it")
        return False

    @staticmethod
    def param(found: Answered) -> str:
        """Return the field that an error of OpenAI's API names."""
        error = found.json["error"]
        return str(error.get("param")) if isinstance(error, dict) else ""

    @staticmethod
    def message(found: Answered) -> str:
        """Return the text of an error."""
        error = found.json["error"]
        return str(error["message"] if isinstance(error, dict) else error)


def differences(original: dict[str, Any], body: Any) -> set[str]:
    """Return the fields of two bodies that differ."""
    if not isinstance(body, dict):
        return set()
    left, right = ({name: json.dumps(value) for name, value in one.items()} for one in (original, body))
    return {name for name in {*left, *right} if left.get(name) != right.get(name)}


def request(path: str, body: bytes) -> bytes:
    """Return the bytes of a request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def damaged_head(rng: random.Random, path: str, body: bytes) -> bytes:
    """Return the bytes of a request with other headers, another first line, or damage to the bytes of either."""
    whole = request(path, body)
    lines = whole.split(b"\r\n\r\n")[0].split(b"\r\n")
    for _ in range(rng.randint(1, 3)):
        name, value = rng.choice(HEADERS), rng.choice(VALUES)
        if (kind := rng.randrange(5)) == 0:
            method, target = rng.choice(METHODS), rng.choice((path, *PATHS))
            lines[0] = f"{method} {target} {rng.choice(('HTTP/1.1', 'HTTP/1.0', 'HTTP/9.9', ''))}".encode()
        elif kind == 1:
            lines.append(lines[rng.randrange(len(lines))])
        elif kind == 2 and len(lines) > 1:
            at = rng.randrange(1, len(lines))
            lines[at] = lines[at].split(b":")[0] + b": " + value.encode("utf-8", "surrogateescape")
        elif kind == 3:
            lines += [b"X-%d: y" % i for i in range(rng.choice((1, 100, 3000)))]
        else:
            lines.append(f"{name}: {value}".encode("utf-8", "surrogateescape"))
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    return (mutate.data(rng, head) if rng.random() < 0.3 else head) + body
