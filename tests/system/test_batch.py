"""`edgeinfer batch`: the texts of the server's handlers, runs that are killed and continued, and refusals."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")
from edgeinfer import LLM
from tests.helpers.command_line import PYTHON, edgeinfer, environment

ONE = ("-t", "1", "--ctx", "512")


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """Return a request."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def completion(i: int, **more: Any) -> dict[str, Any]:
    """Return one of many requests."""
    return line(f"r{i}", prompt=f"Once upon a time there was fox {i}", seed=i, ignore_eos=True, max_tokens=24, **more)


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    """Return status and body of each answer by its id; every id is there once."""
    found = [json.loads(one) for one in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: (one["response"]["status_code"], one["response"]["body"]) for one in found}


@pytest.mark.slow
def test_answers_are_those_of_the_model_and_refusals_are_lines(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    given = [completion(i, model="demo") for i in range(12)]
    given += [line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "A"}]),
              line("embed", "/v1/embeddings", input=["A fox", "A crow"]), line("long", prompt="fox " * 900),
              line("odd", prompt="A", colour="red"), line("list", prompt=["A fox"] * 20, max_tokens=4, temperature=0)]
    done = edgeinfer("batch", written(tmp_path, *given), out, "--json", *ONE, "--max-sequences", "4")
    assert done.code == 0, done.err
    found = answers(out)
    assert {name: status for name, (status, _) in found.items() if status != 200} == {
        "chat": 400, "long": 400, "odd": 400}
    assert "no chat template" in found["chat"][1]["error"]["message"]
    assert found["long"][1]["error"]["code"] == "context_length_exceeded"
    assert "'colour' is not a field" in found["odd"][1]["error"]["message"]
    assert (done.json["requests"], done.json["before"], done.json["failed"]) == (17, 0, 3)
    assert done.json["completion_tokens"] == 12 * 24 + 20 * 4 and done.json["tok_per_s"] > 0
    assert "out.jsonl has 17 answers, of which 3 have another status than 200; 17 in " in done.err
    with LLM("demo", ctx=512, threads=1) as llm:
        for one in given[:12]:
            options = {name: value for name, value in one["body"].items() if name not in ("prompt", "model")}
            assert found[one["custom_id"]][1]["choices"][0]["text"] == llm.generate(one["body"]["prompt"], **options)
        rows = llm.embed(["A fox", "A crow"]).tolist()
    assert [one["embedding"] for one in found["embed"][1]["data"]] == rows
    assert len({one["text"] for one in found["list"][1]["choices"]}) == 1 == len(set(map(str, rows))) - 1
    again = edgeinfer("batch", tmp_path / "in.jsonl", out, "--json")
    assert again.code == 0 and (again.json["before"], again.json["failed"], again.json["tok_per_s"]) == (17, 3, None)


def test_common_beginnings_are_computed_once(tmp_path: Path) -> None:
    tales = [f"{animal} lived in the old forest, and one day it went out to see the world. " * 3
             for animal in ("A fox", "A crow", "A bear")]
    given = [line(f"r{i}", prompt=f"{tales[i % 3]} {i}", max_tokens=2) for i in range(60)]
    done = edgeinfer("batch", written(tmp_path, *given), tmp_path / "out.jsonl", "--json", *ONE, "--max-sequences", "4")
    assert done.code == 0 and done.json["cached_tokens"] > 0.7 * done.json["prompt_tokens"]


FEW = """
import asyncio, itertools, sys
from edgeinfer.cli import main
from edgeinfer.server.batch import InProcess

async def few(self, row, body, post=InProcess.post, made=itertools.count(), most=int(sys.argv.pop(1))):
    while next(made) >= most:
        await asyncio.sleep(1)
    return await post(self, row, body)

InProcess.post = few
main()
"""
"""The program, which answers some requests and then waits: it has not ended when a signal comes late."""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
@pytest.mark.slow
def test_a_run_killed_four_times_has_every_id_once(tmp_path: Path) -> None:
    n, random_seconds = 600, random.Random(4)
    given, out = written(tmp_path, *(completion(i) for i in range(n))), tmp_path / "out.jsonl"
    arguments = ["batch", str(given), str(out), *ONE]
    command, few, seen = [*PYTHON, *arguments], [sys.executable, "-c", FEW, "100", *arguments], [0]
    for _ in range(4):
        child = subprocess.Popen(few, env=environment(), stderr=subprocess.DEVNULL)
        while not (out.exists() and out.read_bytes().count(b"\n") > seen[-1]) and child.poll() is None:
            time.sleep(0.005)
        time.sleep(random_seconds.uniform(0, 0.1))
        child.send_signal(signal.SIGKILL)
        child.wait()
        seen.append(out.read_bytes().count(b"\n"))
    assert seen == sorted(set(seen)) and seen[-1] < n
    with open(out, "ab") as file:
        file.write(b'{"id":"batch_req_12')
    last = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert f"has {n} answers ({seen[-1]} from former runs)" in last.stderr
    found = answers(out)
    assert set(found) == {f"r{i}" for i in range(n)}
    with LLM("demo", ctx=512, threads=1) as llm:
        for i in range(0, n, 7):
            options = {name: value for name, value in completion(i)["body"].items() if name != "prompt"}
            text = llm.generate(completion(i)["body"]["prompt"], **options)
            assert found[f"r{i}"][1]["choices"][0]["text"] == text


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_whole_lines(tmp_path: Path, number: signal.Signals) -> None:
    from tests.helpers.command_line import listening

    given, out = written(tmp_path, *(completion(i) for i in range(5000))), tmp_path / "out.jsonl"
    child = subprocess.Popen([sys.executable, "-c", FEW, "1000", "batch", str(given), str(out), *ONE],
                             env=environment(), text=True, stderr=subprocess.PIPE, preexec_fn=listening)
    while not (out.exists() and out.read_bytes().count(b"\n") > 3) and child.poll() is None:
        time.sleep(0.005)
    child.send_signal(number)
    _, said = child.communicate(timeout=600)
    assert child.returncode != 0 and "of 5,000 requests are in" in said and "Traceback" not in said
    found = answers(out)
    assert 3 < len(found) < 5000 and all(body["usage"]["completion_tokens"] == 24 for _, body in found.values())
    assert [one.name for one in tmp_path.iterdir() if one.name not in ("in.jsonl", "out.jsonl")] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits of files are POSIX")
def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    given, out = written(tmp_path, *(completion(i) for i in range(40))), tmp_path / "out.jsonl"
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
            "from edgeinfer.cli import main; main()")
    done = subprocess.run([sys.executable, "-c", code, "batch", str(given), str(out), *ONE], env=environment(),
                          capture_output=True, text=True)
    assert done.returncode == 1 and "Cannot write" in done.stderr and "File too large; the same command" in done.stderr
    assert "Traceback" not in done.stderr and 0 < len(answers(out)) < 40


@pytest.mark.parametrize(("lines", "arguments", "sentence", "code"), [
    ([completion(0), completion(0)], (), "Line 2 of in.jsonl has the custom_id of line 1, 'r0'.", 1),
    ([completion(0, model="demo"), completion(1, model="b")], (), "Line 2 of in.jsonl names the model 'b', and line 1 "
     "'demo'; give each model a file of its own.", 1),
    ([completion(0, model="gpt")], ("--model", "demo"), "Line 1 of in.jsonl names the model 'gpt', and this one is "
     "'demo'; if it is to answer, add --name gpt.", 2),
    ([completion(0)], ("--max-sequences", "0"), "--max-sequences is 0; it must be from 1 to 64.", 2),
])
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]],
                         arguments: tuple[str, ...], sentence: str, code: int) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, *lines)
    done = edgeinfer("batch", "in.jsonl", "out.jsonl", *arguments)
    assert (done.code, done.sentence) == (code, sentence) and not Path("out.jsonl").exists()


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    done = edgeinfer("batch", written(tmp_path, completion(0)), tmp_path / "no" / "out.jsonl", *ONE)
    assert done.code == 1 and f"there is no folder {tmp_path / 'no'}; create it first." in done.sentence
    assert not (tmp_path / "no").exists()


def test_the_input_is_no_output(tmp_path: Path) -> None:
    path = written(tmp_path, completion(0))
    done = edgeinfer("batch", path, path)
    assert done.code == 2 and "is the input; name another file for the answers" in done.sentence


def test_a_name_that_the_lines_use(tmp_path: Path) -> None:
    given, out = written(tmp_path, completion(0, model="gpt")), tmp_path / "out.jsonl"
    assert edgeinfer("batch", given, out, "--model", "demo", "--name", "gpt", *ONE).code == 0
    assert answers(out)["r0"][1]["model"] == "gpt"
