"""OpenAI's files: /v1/files, kept in a folder until they are deleted; those of a key are seen by that key alone."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..base.cache_dir import make_directories
from ..base.files import open_plain, replacement
from ..base.lock import DestinationLock
from ..errors import DestinationError
from .errors import FAILED, NOT_FOUND, ApiError
from .http import Call, Events, Reply, encode, new_id
from .models import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PURPOSES = ("batch", "batch_output")
MAX_FILES = 1000
"""Files of a key."""
NAME_CHARS = 255
HEAD_BYTES = 4096
"""Headers of a field of a form."""
PIECE_BYTES = 1 << 18
"""Bytes of a file that are sent at a time."""
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary="?([^";,\s]{1,70})"?', re.IGNORECASE)
_FIELD = re.compile(rb'content-disposition:\s*form-data;.*?\bname="([^"\r\n]*)"(?:.*?\bfilename="([^"\r\n]*)")?',
                    re.IGNORECASE)


class Kept(msgspec.Struct):
    """A file of the folder, as it is described beside it."""

    id: str
    owner: str
    """Salt of the key whose it is."""
    filename: str
    purpose: str
    created_at: int


class Store:
    """Files and descriptions of batches in a folder, which is made when the first comes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: DestinationLock | None = None

    def claim(self) -> bool:
        """Take the folder for this server, and return whether it was not ours; raises `ApiError` if another has it."""
        if new := self._lock is None:
            lock = DestinationLock(self.path("server"))
            try:
                lock.acquire()
            except DestinationError:
                raise ApiError(503, "Another server keeps its files in the same folder; start this one with another "
                                    "--batch-dir.", FAILED, code="storage") from None
            except OSError as error:
                raise _unwritten(error) from None
            self._lock = lock
        return new

    def release(self) -> None:
        """Leave the folder to others."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def path(self, name: str) -> Path:
        """Return the path of a file or description."""
        make_directories(self.folder)
        return self.folder / name

    def write(self, name: str, value: Any) -> None:
        """Write a description, whole or not at all."""
        try:
            with replacement(self.path(f"{name}.json")) as file:
                file.write(encode(value))
        except OSError as error:
            raise _unwritten(error) from None

    def read(self, name: str, kind: Any, what: str) -> Any:
        """Return a description; raises `ApiError` if it does not exist."""
        try:
            if _ID.fullmatch(name):
                with open_plain(self.folder / f"{name}.json") as file:
                    return msgspec.json.decode(file.read(), type=kind)
        except (OSError, msgspec.DecodeError):
            pass
        raise missing(what, name)

    def all(self, prefix: str, kind: Any, owner: str | None) -> list[Any]:
        """Return the descriptions of a kind, the latest first; those of a key, or of all."""
        found = [one for name in self._names(prefix) if (one := self._readable(name, kind)) is not None]
        return sorted((one for one in found if owner in (None, one.owner)), key=lambda one: (-one.created_at, one.id))

    def _names(self, prefix: str) -> Iterator[str]:
        if self.folder.is_dir():
            yield from (path.stem for path in self.folder.glob(f"{prefix}*.json"))

    def _readable(self, name: str, kind: Any) -> Any:
        try:
            return self.read(name, kind, "")
        except ApiError:
            return None

    def add(self, owner: str, filename: str, purpose: str, data: bytes | None = None) -> Kept:
        """Create a file; without data the caller writes it."""
        kept = Kept(new_id("file-"), owner, filename, purpose, int(time.time()))
        if data is not None:
            try:
                with replacement(self.path(f"{kept.id}.jsonl")) as file:
                    file.write(data)
            except OSError as error:
                raise _unwritten(error) from None
        self.write(kept.id, kept)
        return kept

    def find(self, name: str, owner: str) -> Kept:
        """Return a file of a key; raises `ApiError` where it has none of this name."""
        kept: Kept = self.read(name, Kept, "file")
        if kept.owner != owner:
            raise missing("file", name)
        return kept

    def content(self, kept: Kept) -> Path:
        """Return where a file is."""
        return self.path(f"{kept.id}.jsonl")

    def delete(self, kept: Kept) -> None:
        """Delete a file."""
        self.content(kept).unlink(missing_ok=True)
        self.forget(kept.id)

    def forget(self, name: str) -> None:
        """Delete a description."""
        self.path(f"{name}.json").unlink(missing_ok=True)

    def shown(self, kept: Kept) -> dict[str, Any]:
        """Return a file as the API shows it."""
        path = self.content(kept)
        return {"id": kept.id, "object": "file", "bytes": path.stat().st_size if path.exists() else 0,
                "created_at": kept.created_at, "filename": kept.filename, "purpose": kept.purpose,
                "status": "processed"}


def missing(what: str, name: str) -> ApiError:
    """Return the error for a file or batch that is not there."""
    return ApiError(404, f"There is no {what} {name[:80]!r}.", NOT_FOUND, code="not_found")


def _unwritten(error: OSError) -> ApiError:
    return ApiError(507, f"The file cannot be kept: {error.strerror or error}.", FAILED, code="storage")


async def upload(call: Call) -> Reply:
    """Keep a file of requests."""
    fields = _form(call)
    purpose = fields.get("purpose", ("", b""))[1].decode("utf-8", "replace")
    if purpose != "batch":
        raise ApiError(400, f"purpose is {purpose[:40]!r}; this server keeps files for batch alone.", param="purpose")
    if "file" not in fields:
        raise ApiError(400, "The form has no file; send one with the name file.", param="file")
    filename, data = fields["file"]
    if not data:
        raise ApiError(400, "The file is empty; it has one JSON object on each line.", param="file")
    store, owner = call.server.batches.store, call.salt.hex()
    call.server.batches.claim()
    await in_thread(lambda: call.server.batches.check_files(owner, 1))
    kept = await in_thread(lambda: store.add(owner, filename[:NAME_CHARS] or "requests.jsonl", purpose, data))
    return Reply(store.shown(kept))


async def files(call: Call) -> Reply:
    """List the files of a key."""
    store, owner, purpose = call.server.batches.store, call.salt.hex(), call.query.get("purpose")
    found = await in_thread(lambda: [store.shown(one) for one in store.all("file-", Kept, owner)
                                     if purpose in (None, one.purpose)])
    return Reply(page(call, found))


async def file(call: Call) -> Reply:
    """Describe a file."""
    store = call.server.batches.store
    return Reply(store.shown(store.find(call.params["name"], call.salt.hex())))


async def content(call: Call) -> Events:
    """Return the bytes of a file in pieces, as the answers of a batch may be more than the memory has room for."""
    store = call.server.batches.store
    kept = store.find(call.params["name"], call.salt.hex())
    held = contextlib.AsyncExitStack()
    try:
        file = held.enter_context(open_plain(store.content(kept)))
    except OSError:  # of a batch that has not written it yet
        raise missing("content of", kept.id) from None

    async def pieces() -> AsyncIterator[bytes]:
        while data := await in_thread(lambda: file.read(PIECE_BYTES)):
            yield data

    return Events(pieces(), lambda error: b"", held, "application/jsonl")


async def delete(call: Call) -> Reply:
    """Delete a file."""
    store = call.server.batches.store
    kept = store.find(call.params["name"], call.salt.hex())
    call.server.batches.claim()  # or the server that has the folder may be reading it
    call.server.batches.check_unused(kept.id)
    store.delete(kept)
    return Reply({"id": kept.id, "object": "file", "deleted": True})


def page(call: Call, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a part of a list, as `limit` and `after` of the query ask for it."""
    after, limit = call.query.get("after"), call.query.get("limit", "100")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_FILES:
        raise ApiError(400, f"limit is {limit[:40]!r}; it is from 1 to {MAX_FILES}.", param="limit")
    ids = [one["id"] for one in found]
    first = ids.index(after) + 1 if after in ids else 0
    part = found[first:first + int(limit)]
    return {"object": "list", "data": part, "first_id": part[0]["id"] if part else None,
            "last_id": part[-1]["id"] if part else None, "has_more": first + len(part) < len(found)}


def _form(call: Call) -> dict[str, tuple[str, bytes]]:
    """Return file name and content of each field of a form; raises `ApiError` for another body."""
    boundary = _BOUNDARY.match(call.headers.get("content-type", ""))
    if boundary is None:
        raise ApiError(400, "The body is not a form; send multipart/form-data with purpose and file.",
                       code="invalid_form")
    found = dict[str, tuple[str, bytes]]()
    for head, data in _parts(call.body, b"--" + boundary[1].encode("latin-1")):
        if (field := _FIELD.search(head)) is None:
            raise ApiError(400, "The form has a part without a name.", code="invalid_form")
        filename = os.path.basename((field[2] or b"").decode("utf-8", "replace"))
        found[field[1].decode("utf-8", "replace")] = filename, data
    return found


def _parts(body: bytes, line: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield headers and content of the parts of a form, of which only the content is copied."""
    at = 0 if body.startswith(line) else body.find(b"\r\n" + line) + 2
    if at == 1:
        raise ApiError(400, "The form ends too early.", code="invalid_form")
    while not body.startswith(b"--", at := at + len(line)):
        if (end := body.find(b"\r\n" + line, at)) < 0:
            raise ApiError(400, "The form ends too early.", code="invalid_form")
        begin = body.find(b"\r\n\r\n", at, min(end, at + HEAD_BYTES))
        if begin < 0:  # a longer head would be searched in more than linear time
            raise ApiError(400, f"The form has a part without headers, or with more than {HEAD_BYTES} bytes of them.",
                           code="invalid_form")
        yield body[at:begin], body[begin + 4:end]
        at = end + 2
