"""The programs of examples/ run with the demo model, and stay short."""

from __future__ import annotations

import http.client
import json
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgeinfer.llm.api import LLM
from tests.helpers.command_line import environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("no checkout: the examples are not installed", allow_module_level=True)


def example(name: str, *arguments: str, given: str) -> str:
    """Return what an example prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, env=environment(),
                          cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_under_60_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


def test_classify_labels_each_line_with_its_share() -> None:
    lines = example("classify.py", "demo", " happy", " sad", given="The fox ate.\n\nThe king wept.\n").splitlines()
    assert [line.split("\t")[2] for line in lines] == ["The fox ate.", "The king wept."]
    assert all(line.split("\t")[0] in ("happy", "sad") and 0.5 <= float(line.split("\t")[1]) <= 1 for line in lines)


def test_chat_answers_until_an_empty_line() -> None:
    said = example("chat.py", "demo", given="Once upon a time\nThe fox\n\nnot read\n")
    assert said.count("> ") == 3 and len(said) > 100


def test_the_web_handler_streams_and_refuses() -> None:
    serve = runpy.run_path(str(EXAMPLES / "web_handler.py"))["serve"]
    with LLM("demo", ctx=256) as llm:
        server = serve(llm, 0)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            def post(body: str) -> tuple[int, str]:
                connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
                connection.request("POST", "/", body)
                answer = connection.getresponse()
                status, text = answer.status, answer.read().decode()
                connection.close()
                return status, text

            options = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
            assert post(json.dumps(options)) == (200, llm.generate(**options))
            assert post("{")[0] == 400 and post("[]")[0] == 400 and post("{}")[0] == 400
            status, text = post(json.dumps({"prompt": "Once", "temperature": "hot"}))
            assert status == 400 and "temperature" in text
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
