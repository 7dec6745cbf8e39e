"""/v1/files and /v1/batches with OpenAI's own client: whole, cancelled and interrupted batches."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from edgeinfer import LLM
from edgeinfer.server.batch import InProcess, opened
from edgeinfer.server.batches import Batch, Batches
from edgeinfer.server.errors import ApiError
from edgeinfer.server.files import Store
from tests.helpers.command_line import edgeinfer
from tests.helpers.serving import Running, serving, until

KEYS = ("key-of-the-first", "key-of-the-second")
COMPLETIONS = "/v1/completions"
needs_client = pytest.mark.skipif(find_spec("openai") is None, reason="OpenAI's client is not installed")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serving({"demo": "demo"}, batch_dir=str(tmp_path / "kept"), api_keys=KEYS, max_file=1 << 20) as one:
        yield one


def client(running: Running, key: str = KEYS[0]) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def line(i: int, url: str = COMPLETIONS, **body: Any) -> str:
    asked = {"prompt": f"Fox {i}", "seed": i, "max_tokens": 12, **body}
    return json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": asked}) + "\n"


def created(api: Any, text: str, **asked: Any) -> Any:
    file = api.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", **asked)


def over(api: Any, name: str) -> Any:
    assert until(lambda: api.batches.retrieve(name).status in ("completed", "failed", "cancelled", "expired"))
    return api.batches.retrieve(name)


def answers(text: str) -> dict[str, Any]:
    found = [json.loads(one) for one in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one["response"] for one in found}


@needs_client
def test_a_batch_from_upload_to_answers(running: Running, tmp_path: Path) -> None:
    api = client(running)
    text = "".join(line(i) for i in range(30)) + line(30, max_tokens=0) + line(31, prompt="fox " * 2000)
    (given := tmp_path / "in.jsonl").write_text(text)
    done = over(api, created(api, text, metadata={"of": "tests"}).id)
    assert (done.status, done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == \
        ("completed", 32, 30, 2)
    assert done.metadata == {"of": "tests"} and done.in_progress_at <= done.finalizing_at <= done.completed_at
    found = answers(api.files.content(done.output_file_id).text)
    wrong = answers(api.files.content(done.error_file_id).text)
    assert {one["status_code"] for one in wrong.values()} == {400} and set(wrong) == {"r30", "r31"}
    assert edgeinfer("batch", given, tmp_path / "out.jsonl", "-t", "1", "--ctx", "512").code == 0
    own = answers((tmp_path / "out.jsonl").read_text())
    assert {name: one["body"]["choices"] for name, one in found.items()} == \
        {name: one["body"]["choices"] for name, one in own.items() if one["status_code"] == 200}
    assert [one.id for one in api.batches.list()] == [done.id]
    assert {one.purpose for one in api.files.list()} == {"batch", "batch_output"}
    assert api.files.retrieve(done.input_file_id).bytes == len(text)
    api.files.delete(done.input_file_id)
    assert len(list(api.files.list())) == 2


@needs_client
def test_a_batch_that_is_cancelled_keeps_its_answers(running: Running) -> None:
    import openai

    api = client(running)
    first = created(api, "".join(line(i, max_tokens=200, ignore_eos=True) for i in range(400)))
    second = created(api, line(0))
    assert until(lambda: api.batches.retrieve(first.id).request_counts.completed > 5)
    with pytest.raises(openai.ConflictError, match="is used by batch_"):
        api.files.delete(first.input_file_id)
    assert api.batches.cancel(first.id).status == "cancelling"
    done = over(api, first.id)
    assert done.status == "cancelled" and 5 < done.request_counts.completed < 400
    assert len(answers(api.files.content(done.output_file_id).text)) == done.request_counts.completed
    assert over(api, second.id).status == "completed" and over(api, second.id).error_file_id is None
    with pytest.raises(openai.ConflictError, match=r"is over \(cancelled\)"):
        api.batches.cancel(first.id)


@needs_client
@pytest.mark.slow
def test_another_server_goes_on(tmp_path: Path) -> None:
    kept: dict[str, Any] = dict(batch_dir=str(tmp_path / "kept"))
    with serving({"demo": "demo"}, **kept) as running:
        api = client(running)
        first = created(api, text := "".join(line(i, max_tokens=150, ignore_eos=True) for i in range(150)))
        second = created(api, line(7))
        assert until(lambda: api.batches.retrieve(first.id).request_counts.completed > 10)
        with serving({"demo": "demo"}, **kept) as other:  # of the same folder
            found = other.ask("/v1/batches", {"input_file_id": first.input_file_id, "endpoint": COMPLETIONS})
            assert found.status == 503 and "Another server keeps its files in the same folder" in found.error
    with serving({"demo": "demo"}, **kept) as running:
        api = client(running)
        done = over(api, first.id)
        assert done.status == "completed" and done.request_counts.completed == 150
        found = answers(api.files.content(done.output_file_id).text)
        assert over(api, second.id).status == "completed"
    with LLM("demo", ctx=512) as llm:
        for i in (0, 75, 149):
            assert found[f"r{i}"]["body"]["choices"][0]["text"] == llm.generate(
                f"Fox {i}", seed=i, max_tokens=150, ignore_eos=True)
    assert len(found) == 150 and text


@needs_client
def test_what_is_refused(running: Running) -> None:
    import openai

    api, other = client(running), client(running, KEYS[1])
    file = api.files.create(file=("../../in.jsonl", line(0).encode()), purpose="batch")
    assert file.filename == "in.jsonl" and not list(other.files.list()) and not list(other.batches.list())
    for call, sentence in (
            (lambda: other.files.retrieve(file.id), "There is no file"),
            (lambda: api.files.content("file-" + "0" * 24), "There is no file"),
            (lambda: api.files.retrieve("..%2f..%2fetc"), "There is no|nothing at"),
            (lambda: api.batches.retrieve("batch_" + "0" * 24), "There is no batch"),
            (lambda: api.files.create(file=("a", b"x"), purpose="fine-tune"), "purpose is 'fine-tune'"),
            (lambda: api.files.create(file=("a", b""), purpose="batch"), "The file is empty"),
            (lambda: api.files.create(file=("a", b"x" * (2 << 20)), purpose="batch"), "at most 1048576 are taken"),
            (lambda: api.batches.create(input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h"),
             "endpoint is '/v1/moderations'"),
            (lambda: api.batches.create(input_file_id=file.id, endpoint=COMPLETIONS,
                                        completion_window="1h"), "completion_window is '1h'; it is 24h"),
            (lambda: other.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"),
             "There is no file")):
        with pytest.raises(openai.APIStatusError, match=sentence):
            call()
    for text, sentence in (("{", "Line 1 of .* is not JSON"), (line(0) + line(0), "has the custom_id of line 1"),
                           (line(0, url="/v1/embeddings"), "Line 1 has the url '/v1/embeddings'")):
        done = over(api, created(api, text).id)
        assert done.status == "failed" and done.output_file_id is None
        assert re.search(sentence, done.errors.data[0].message)
    for body in (b"", b"--x\r\n\r\nab"):
        found = running.ask("/v1/files", body, content_type="multipart/form-data; boundary=x",
                            authorization=f"Bearer {KEYS[0]}")
        assert found.status == 400 and "The form" in found.error


def test_nothing_is_kept_before_it_is_used(tmp_path: Path) -> None:
    with serving({"demo": "demo"}, batch_dir=str(tmp_path / "kept")) as running:
        assert running.ask("/v1/batches").json["data"] == running.ask("/v1/files").json["data"] == []
        assert not (tmp_path / "kept").exists()


def test_files_that_are_wrong_or_empty_of_answers(running: Running) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    form = {"content_type": "multipart/form-data; boundary=x", **key}
    begin = time.monotonic()
    found = running.ask("/v1/files", b"--x\r\n" + b"content-disposition: form-data;" * 30_000 + b"\r\n\r\nab\r\n--x--",
                        **form)
    assert found.status == 400 and "more than 4096 bytes" in found.error
    assert time.monotonic() - begin < 100  # minutes, if the time is quadratic
    for limit in ("%C2%B2", "9" * 5000, "0"):
        found = running.ask(f"/v1/files?limit={limit}", **key)
        assert found.status == 400 and "it is from 1 to 1000" in found.error
    data = b"preamble\r\n--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--x\r\n" \
           b"Content-Disposition: form-data; name=\"file\"; filename=\"a\"\r\nContent-Type: a/b\r\n\r\n" \
           + line(0, max_tokens=500, ignore_eos=True).encode() + b"\r\n--y\r\n\r\n--x--\r\n"
    file = running.ask("/v1/files", data, **form).json
    content = running.ask(f"/v1/files/{file['id']}/content", **key)
    assert content.body.endswith(b"\r\n--y\r\n") and content.headers["content-type"] == "application/jsonl"
    assert len(content.body) == file["bytes"]
    (running.server.batches.store.folder / f"{file['id']}.jsonl").unlink()
    assert running.ask(f"/v1/files/{file['id']}/content", **key).status == 404


async def never(self: Any, row: Any, body: bytes) -> Any:
    """Answer nothing: a batch that runs is not over, however fast the machine is."""
    await asyncio.sleep(1000)


@needs_client
def test_a_batch_without_answers_has_no_files(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.server.batches.Patient.post", never)
    api = client(running)
    first = created(api, line(0))
    assert until(lambda: api.batches.retrieve(first.id).output_file_id is not None)
    api.batches.cancel(first.id)
    done = over(api, first.id)
    assert done.status == "cancelled"
    assert done.output_file_id is None and done.error_file_id is None
    assert {one.purpose for one in api.files.list()} == {"batch"}


def test_a_server_without_the_folder_leaves_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.server.batches.Patient.post", never)
    kept: dict[str, Any] = dict(batch_dir=str(tmp_path / "kept"))
    data = b"--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--x\r\n" \
           b"content-disposition: form-data; name=\"file\"\r\n\r\n" + b"".join(
               line(i).encode() for i in range(9)) + b"\r\n--x--"
    with ExitStack() as stack:
        with serving({"demo": "demo"}, **kept) as running:
            file = running.ask("/v1/files", data, content_type="multipart/form-data; boundary=x").json["id"]
            batch = running.ask("/v1/batches", {"input_file_id": file, "endpoint": COMPLETIONS}).json["id"]
            other = stack.enter_context(serving({"demo": "demo"}, **kept))
            for path, method in ((f"/v1/files/{file}", "DELETE"), (f"/v1/batches/{batch}/cancel", "POST")):
                found = other.ask(path, None, method)
                assert found.status == 503 and "Another server keeps its files" in found.error
        assert other.ask(f"/v1/batches/{batch}").json["status"] == "in_progress"
        assert other.ask(f"/v1/batches/{batch}/cancel", None, "POST").json["status"] == "cancelled"
        assert other.ask(f"/v1/files/{file}", None, "DELETE").json["deleted"]


@needs_client
def test_no_batch_begins_while_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = threading.Event()

    async def slow(self: Any, row: Any, body: bytes) -> Any:
        assert not ending.is_set()
        try:
            await asyncio.sleep(1000)
        finally:
            while not ending.is_set():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)

    async def closing(self: Batches, close: Any = Batches.close) -> None:
        ending.set()
        await close(self)

    monkeypatch.setattr("edgeinfer.server.batches.Patient.post", slow)
    monkeypatch.setattr(Batches, "close", closing)
    with serving({"demo": "demo"}, batch_dir=str(tmp_path / "kept")) as running:
        api = client(running)
        first, second = created(api, line(0)), created(api, line(1))
        assert until(lambda: api.batches.retrieve(first.id).status == "in_progress")
        assert api.batches.cancel(first.id).status == "cancelling"
    kept = running.server.batches.store
    assert [kept.read(one.id, Batch, "").status for one in (first, second)] == ["cancelled", "validating"]


@needs_client
def test_a_batch_whose_end_cannot_be_noted_keeps_no_other_waiting(running: Running, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    api, full = client(running), list[str]()
    write = Store.write

    def writing(self: Store, name: str, value: Any) -> None:
        if isinstance(value, Batch) and value.status == "completed" and not full:
            full.append(name)
            raise ApiError(507, "The file cannot be kept: No space left on device.", "server_error", code="storage")
        write(self, name, value)

    monkeypatch.setattr(Store, "write", writing)
    first, second = created(api, line(0)), created(api, line(1))
    assert over(api, second.id).status == "completed" and full == [first.id]
    assert any(f"The batch {first.id} is completed, which cannot be noted: The file" in one for one in running.log)


def test_two_uploads_are_in_memory_and_further_ones_wait(running: Running) -> None:
    head = f"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEYS[0]}\r\n" \
           "content-type: multipart/form-data; boundary=x\r\ncontent-length: 100\r\n\r\n--x"
    slow = [running.connect() for _ in range(2)]
    for one in slow:
        one.sendall(head.encode())
    assert until(running.server.uploads.locked)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(running.ask, "/v1/files", b"", authorization=f"Bearer {KEYS[0]}")
        assert until(lambda: bool(running.server.uploads._waiters)) and not third.done()
        assert running.ask("/v1/files", authorization=f"Bearer {KEYS[0]}").json["data"] == []
        slow[0].close()
        assert third.result(120).status == 400
    slow[1].close()
    assert until(lambda: not running.server.uploads.locked())


@needs_client
def test_files_that_batches_write_count_and_old_batches_are_forgotten(running: Running, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    import openai

    api, other = client(running), client(running, KEYS[1])
    monkeypatch.setattr("edgeinfer.server.batches.MAX_FILES", 5)
    monkeypatch.setattr("edgeinfer.server.batches.MAX_BATCHES", 2)
    held = threading.Event()
    answer = InProcess.post

    async def waits(self: Any, row: Any, body: bytes) -> Any:
        while not held.is_set():
            await asyncio.sleep(0.01)
        return await answer(self, row, body)

    monkeypatch.setattr("edgeinfer.server.batch.InProcess.post", waits)
    first = created(api, line(0))
    file = first.input_file_id
    second = api.batches.create(input_file_id=file, endpoint=COMPLETIONS, completion_window="24h")
    for call in (lambda: api.batches.create(input_file_id=file, endpoint=COMPLETIONS, completion_window="24h"),
                 lambda: api.files.create(file=("a", b"x"), purpose="batch")):
        with pytest.raises(openai.BadRequestError, match="has 5 files, including 2 for each unfinished batch"):
            call()
    assert created(other, line(1)).status == "validating"
    held.set()
    assert over(api, second.id).status == "completed"
    third = api.batches.create(input_file_id=file, endpoint=COMPLETIONS, completion_window="24h")
    kept = {one.id for one in api.batches.list()}
    assert len(kept) == 2 and third.id in kept and over(api, third.id).status == "completed"
    gone, = {first.id, second.id} - kept
    with pytest.raises(openai.NotFoundError, match=f"There is no batch '{gone}'"):
        api.batches.retrieve(gone)


def test_answers_of_a_former_server_are_read_in_a_thread() -> None:
    entered, left = threading.Event(), threading.Event()

    class Slow:
        def __enter__(self) -> None:
            entered.set()
            left.wait(120)

        def __exit__(self, *exc: object) -> None:
            closed.append(True)

    closed = list[bool]()

    async def use() -> None:
        async with opened(Slow()):  # type: ignore[arg-type]
            raise AssertionError("it was cancelled before")

    async def main() -> None:
        task = asyncio.ensure_future(use())
        while not entered.is_set():
            await asyncio.sleep(0.001)  # the loop goes on meanwhile
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done() and not closed
        left.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert closed == [True]
