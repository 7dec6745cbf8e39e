"""From an HTTP request to a call of a handler, and from its outcome to an answer; a client that leaves ends both."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from ..base.strict_json import parse_json
from ..errors import FormError, PromptError
from .body import ClientLeft, body_of
from .errors import ApiError, api_error, busy, ending

if TYPE_CHECKING:
    from .server import Server

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")
SSE, NDJSON = "text/event-stream; charset=utf-8", "application/x-ndjson"
encode = msgspec.json.encode
_names = random.Random()
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)


class Call:
    """One request.

    Attributes
    ----------
    server : Server
    body : bytes
    headers : dict of str
        Names in lower case.
    params : dict of str
        Parts of the path.
    salt : bytes
        Of the client's key: the prefix cache is shared among its requests alone.
    note : dict
        The request's entry in the log.
    query : dict of str
        Of the address.
    fields : collection of str
        Names in the body.
    prompt_field, form_field : str
        Fields of the body that hold the prompt and the form of the answer.
    reply_headers : dict of str
        Further headers of the answer.
    """

    def __init__(self, server: Server, scope: Scope, body: bytes):
        self.server, self.body = server, body
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.params: Mapping[str, str] = scope.get("path_params", {})
        self.salt: bytes = scope["state"]["salt"]
        self.note: dict[str, Any] = scope["state"]["note"]
        self.prompt_field, self.form_field = "messages", "response_format"
        self.query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        self.fields: Collection[str] = ()
        self.reply_headers: dict[str, str] = {}

    def count(self, **tokens: int) -> None:
        """Add to the figures in the log: a request may have several prompts."""
        for name, n in tokens.items():
            self.note[name] = self.note.get(name, 0) + n

    def read(self, kind: type[T]) -> T:
        """Return the body as an object of a type; raises `ApiError` for one that is not JSON or not of this type."""
        try:
            value = parse_json(self.body or b"{}", unique=True)
        except ValueError as error:
            raise ApiError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
        self.fields = value if isinstance(value, dict) else ()
        return converted(value, kind)


class Reply:
    """An answer that is one JSON object, or text of another type."""

    def __init__(self, value: Any, status: int = 200, kind: str = "application/json",
                 headers: Mapping[str, str] | None = None):
        self.status, self.kind, self.headers = status, kind, dict(headers or {})
        self.body: bytes = value if isinstance(value, bytes) else encode(value)


class Events:
    """An answer in pieces, as they come.

    Parameters
    ----------
    pieces : parts of the body
    failure : an error as a piece
    held : closed after the last piece, or when the client has left
    kind : media type
    """

    def __init__(self, pieces: AsyncIterator[bytes], failure: Callable[[ApiError], bytes],
                 held: contextlib.AsyncExitStack, kind: str = SSE):
        self.pieces, self.failure, self.held, self.kind = pieces, failure, held, kind


Handler = Callable[[Call], Awaitable["Reply | Events"]]


def converted(value: Any, kind: type[T]) -> T:
    """Return JSON's value as an object of a type; raises `ApiError` that names the field which is wrong."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        found = _PLACE.match(str(error))
        assert found
        what, where = found["what"], found["where"] or ""
        if unknown := _UNKNOWN.match(what):
            where = f"{where}.{unknown['name']}" if where else unknown["name"]
            raise ApiError(400, f"{where[:200]!r} is not a field of this server's API; omit it.", param=where[:200],
                           code="unknown_parameter") from None
        raise ApiError(400, f"{what[:300]} in {f'{where[:200]!r}' if where else 'the body'}.",
                       param=where[:200] or None, code="invalid_type") from None


def failure(error: Exception, call: Call | None) -> ApiError:
    """Return the answer for an error, with the field of the request that is wrong."""
    found = api_error(error)
    if call and isinstance(error, PromptError):
        found.param = call.prompt_field
    if call and isinstance(error, FormError):
        found.param, found.message = call.form_field, f"{call.form_field}: {found.message}"
    if call and found.param is None and (first := found.message.partition(" ")[0]) in call.fields:
        found.param = first
    return found


class Endpoint:
    """Serves one path: reads the body within limits, calls the handler, and sends its answer.

    Parameters
    ----------
    server : Server
    handler : coroutine function
    failed : an error in the object of the path's API
    public : whether it answers while the server is loading or ending
    limit : setting that limits the size of the body
    """

    def __init__(self, server: Server, handler: Handler, failed: Callable[[ApiError], object], public: bool = False,
                 limit: str = "max_body"):
        self.server, self.handler, self.failed, self.public = server, handler, failed, public
        self._limit = limit
        self._turn: contextlib.AbstractAsyncContextManager[Any] = \
            server.uploads if limit == "max_file" else contextlib.nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        started, call = False, None

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if not self.public:
                self.server.check_ready()
            async with self._turn:
                call = Call(self.server, scope, await body_of(scope, receive, self.server.config, self._limit))
                with self._counted(call):
                    await _until_gone(receive, self._answer(call, sending))
        except ClientLeft:
            return
        except asyncio.CancelledError:  # the server ends, and the time to drain is over
            if not started:
                await respond(send, Reply(self.failed(ending()), 503))
        except Exception as error:
            found = failure(error, call)
            self._note(scope["state"]["note"], found, error)
            if not started:
                await respond(send, Reply(self.failed(found), found.status, headers=found.headers))

    async def reply(self, call: Call) -> Reply:
        """Return the answer to a request without a connection, and no stream."""
        try:
            self.server.check_ready()
            with self._counted(call):
                answer = await self.handler(call)
            assert isinstance(answer, Reply)
            return answer
        except Exception as error:
            found = failure(error, call)
            self._note(call.note, found, error)
            return Reply(self.failed(found), found.status)

    def _note(self, note: dict[str, Any], found: ApiError, error: Exception) -> None:
        note["error"] = found.logged or found.message
        if found.status == 500 and error is not found:
            self.server.log_failure(error)

    @contextlib.contextmanager
    def _counted(self, call: Call) -> Any:
        """Count the request as one of its key's."""
        if self.public:
            yield
            return
        counts, most = self.server.requests, self.server.config.max_requests
        if counts[call.salt] >= most:
            raise busy(f"{most} requests of this key are running or waiting, the maximum (--max-requests).")
        counts[call.salt] += 1
        try:
            yield
        finally:
            counts[call.salt] -= 1
            if not counts[call.salt]:
                del counts[call.salt]

    async def _answer(self, call: Call, send: Send) -> None:
        answer = await self.handler(call)
        if isinstance(answer, Reply):
            answer.headers.update(call.reply_headers)
            await respond(send, answer)
            return
        async with answer.held:
            await send({"type": "http.response.start", "status": 200, "headers": [
                (b"content-type", answer.kind.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"),
                *((name.encode(), value.encode()) for name, value in call.reply_headers.items()),
            ]})
            try:
                async for piece in answer.pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception as error:
                found = failure(error, call)
                self._note(call.note, found, error)
                await send({"type": "http.response.body", "body": answer.failure(found), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def respond(send: Send, reply: Reply) -> None:
    """Send an answer that is complete."""
    headers = {"content-type": reply.kind, "content-length": str(len(reply.body)), **reply.headers}
    await send({"type": "http.response.start", "status": reply.status,
                "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})


async def _until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Wait for some work, and cancel it when the client has left."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        task.cancel()
        gone.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


ALIVE = b": the answer is being computed\n\n"
"""A comment in a stream of events that has nothing to tell."""


def event(value: Any, name: str = "") -> bytes:
    """Return a server-sent event with a JSON object."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + encode(value) + b"\n\n"


def new_id(prefix: str) -> str:
    """Return a name that no other object has: of Python's own generator, as the system's would make others wait."""
    return f"{prefix}{_names.getrandbits(96):024x}"
