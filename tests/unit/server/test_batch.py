"""Files of a batch: lines that are no requests, the order of prompts, and outputs that are continued or refused."""

from __future__ import annotations

import errno
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
from edgeinfer.errors import DestinationError, RequestError
from edgeinfer.server import Answered, Results, Row, Rows, line_of
from edgeinfer.server.batch import rows as rows_module


def line(custom_id: str = "a", prompt: Any = "Once", **more: Any) -> dict[str, Any]:
    """Return a request."""
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}} | more


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    return path


@pytest.mark.parametrize(("wrong", "sentence"), [
    ("{", "Line 2 of .* is not JSON: Expecting property name"),
    ('{"custom_id": "b", "custom_id": "b"}', "Line 2 of .* is not JSON: a name occurs twice in one object"),
    ("[1, 2]", r"Line 2 of .* has \[1,2\], and a request is an object"),
    ({"custom_id": "b", "url": "/v1/completions", "body": {}}, "has no method; a request has custom_id, method, url"),
    (line("b", priority=1), "has the field 'priority'; a request has custom_id, method, url, body"),
    (line(), "has the custom_id of line 1, 'a'"),
    (line(""), "has the custom_id ''; it is a text of 1 to 512 characters"),
    (line(7), "has the custom_id 7; it is a text"),  # type: ignore[arg-type]
    (line("b", method="GET"), "has the method 'GET'; it is POST"),
    (line("b", url="/v1/responses"), "has the url '/v1/responses'; it is one of /v1/chat/completions, /v1/completions"),
    (line("b", url=["/v1/completions"]), "has the url .*; it is one of"),
    (line("b", body=[]), r"has the body \[\]; it is an object"),
    (line("b", body={"prompt": "x", "stream": True}), "has stream in its body; the answers of a batch are whole"),
    (line("b", body={"model": 3}), "has the model 3; it is a text"),
])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, wrong: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        Rows(written(tmp_path, line(), wrong))


def test_inputs_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"Cannot read .*missing: No such file or directory"):
        Rows(tmp_path / "missing")
    with pytest.raises(RequestError, match=r"Cannot read .*: Is a directory"):
        Rows(tmp_path)
    with pytest.raises(RequestError, match="has no requests; write one JSON object on each line"):
        Rows(written(tmp_path, "", "  "))
    with pytest.raises(RequestError, match="has more than 2 requests; divide it"):
        Rows(written(tmp_path, line("a"), line("b"), line("c")), most=2)
    monkeypatch.setattr(rows_module, "LINE_BYTES", 100)
    with pytest.raises(RequestError, match=r"Line 2 of .* is longer than 100 B, the most that a request may have"):
        Rows(written(tmp_path, line(), line("b", "x" * 100)))


def test_prompts_that_begin_alike_are_neighbours(tmp_path: Path) -> None:
    fox, crow = "The fox. " * 20, "The crow. " * 20
    given = [line(f"{i}", (fox, crow)[i % 2] + str(i)) for i in range(6)]
    chats = [line(f"c{i}", url="/v1/chat/completions", body={"messages": [
        {"role": "system", "content": (fox, crow)[i % 2]}, {"role": "user", "content": str(i)}]}) for i in range(4)]
    with Rows(written(tmp_path, *(one for pair in zip(given, [*chats, "", ""], strict=True) for one in pair))) as rows:
        kinds = [(row.url, int(row.custom_id.strip("c")) % 2) for row in rows.all]
        assert sum(before != after for before, after in pairwise(kinds)) == 3
        assert all(json.loads(rows.body(row)) in [one["body"] for one in (*given, *chats)] for row in rows.all)


def test_an_input_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, line("a"), line("b"))
    with Rows(path) as rows:
        written(tmp_path, line("a"), line("c"))
        assert json.loads(rows.body(rows.all[0])) == {"prompt": "Once"}
        with pytest.raises(RequestError, match=r"Line 2 of .* has changed since it was checked"):
            rows.body(rows.all[1])


def answers(folder: Path, rows: list[Row], *statuses: int) -> Path:
    """Write answers to the first rows."""
    path = folder / "out.jsonl"
    with Results(path, rows, "demo") as results:
        for row, status in zip(rows, statuses, strict=False):
            results.write(row.custom_id, status, line_of(results.id_of(row, "demo"), row,
                                                         Answered(status, b'{"a":1}', {})))
    return path


@pytest.fixture
def three(tmp_path: Path) -> list[Row]:
    with Rows(written(tmp_path, line("a"), line("b", "Twice"), line("c", "Thrice"))) as rows:
        return rows.all


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_line_is_cut_and_whole_ones_are_kept(tmp_path: Path, three: list[Row], cut: int) -> None:
    path = answers(tmp_path, three, 200, 400)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:cut])
    with Results(path, three, "demo") as results:
        assert results.done == {one.custom_id for one in three[:2]} and results.failed == 1
        assert path.read_bytes() == whole
        found = [json.loads(one) for one in whole.splitlines()]
    assert [one["custom_id"] for one in found] == [one.custom_id for one in three[:2]]
    assert [one["response"]["status_code"] for one in found] == [200, 400]
    assert found[0]["response"]["body"] == {"a": 1} and found[0]["error"] is None


@pytest.mark.parametrize("text", ["A letter of mine", "A letter\nof mine\n", '{"id": 3}\n', '{"id":"other"}\n', "\n"])
def test_a_file_of_others_is_refused_and_stays(tmp_path: Path, three: list[Row], text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(DestinationError, match=r"Line 1 of .* answers no request of this input and model"), \
            Results(path, three, "demo"):
        pass
    assert path.read_text() == text


def test_answers_to_other_requests_are_refused(tmp_path: Path, three: list[Row]) -> None:
    path = answers(tmp_path, three, 200, 200)
    whole = path.read_bytes()
    with Rows(written(tmp_path, line("a"), line("b", "Changed"), line("c", "Changed"))) as changed:
        others = changed.all
    for rows, model in ((others, "demo"), (three, "other"), (three[:1], "demo")):
        with pytest.raises(DestinationError, match="answers no request of this input and model; name another output"), \
                Results(path, rows, model):
            pass
    path.write_bytes(whole * 2)
    with pytest.raises(DestinationError, match="Line 3 of "), Results(path, three, "demo"):
        pass
    assert path.read_bytes() == whole * 2


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, three: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    path = answers(tmp_path, three, 200)
    whole, write = path.read_bytes(), os.write

    def full(handle: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[:len(data) - 10])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DestinationError, match=r"Cannot write .*: No space left on device; the same command continues"):
        _continue(path, three)
    assert path.read_bytes() == whole


def _continue(path: Path, rows: list[Row]) -> None:
    with Results(path, rows, "demo") as results:
        results.write(rows[1].custom_id, 200, b'{"id":"' + b"x" * 100 + b'"}')


def test_outputs_that_cannot_be_written(tmp_path: Path, three: list[Row]) -> None:
    with pytest.raises(DestinationError, match=r"Cannot write .*: Is a directory"), Results(tmp_path, three, "demo"):
        pass
    path = answers(tmp_path, three, 200)
    with Results(path, three, "demo"), pytest.raises(DestinationError, match="is being written by another process"), \
            Results(path, three, "demo"):
        pass
