"""`edgeinfer serve --replicas` on Ray: the texts of one process, while replicas are killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import psutil
import pytest

pytest.importorskip("starlette")
from edgeinfer.cluster import PREFILL_SEQUENCES, Ray, RemoteModel, connected
from edgeinfer.cluster.router import Load
from edgeinfer.errors import EdgeInferError
from tests.helpers.command_line import PYTHON, ROOT, edgeinfer, environment
from tests.helpers.serving import chat_model, serving, until
from tests.system.test_replicas import all_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning"),
              pytest.mark.skipif(find_spec("ray") is None, reason="extra 'cluster' is not installed"),
              pytest.mark.skipif(sys.platform == "win32", reason="Ray's processes are POSIX here")]
OPTIONS: dict[str, Any] = dict(ctx=512, threads=1, budget=None, max_sequences=8, max_queue=256, fill_budget=None)


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    with connected("local", cpus=3) as one:
        yield one
    with warnings.catch_warnings():  # of the processes that Ray has started, which it does not wait for
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def right(model: str) -> list[Any]:
    with serving({"chat": model}) as running:
        return all_of(running)


def engines() -> list[int]:
    """Return the processes of the replicas of this process's cluster."""
    return [one.pid for one in psutil.Process().children(recursive=True) if is_engine(one)]


def is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it ends meanwhile
        return "ray::Engine" in " ".join(process.cmdline())
    return False


def killing(right: Callable[[], bool], n: int) -> None:
    """Kill one of several replicas every two seconds, and ask for all again until n are killed."""
    ended, killed = threading.Event(), list[int]()

    def kill() -> None:
        while not ended.wait(2.0):
            if len(pids := engines()) > 1:
                os.kill(one := random.choice(pids), signal.SIGKILL)
                killed.append(one)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while len(killed) < n:
            assert right()
    finally:
        ended.set()
        killer.join()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_texts_of_one_process_on_replicas(ray: Ray, model: str, right: list[Any], n: int) -> None:
    said = list[str]()

    def opened(source: str, left: int | None) -> Any:
        found = asyncio.run(ray.replicas(n, "chat", source, OPTIONS))
        return RemoteModel(source, list(found), 256, said.append, lambda: ray.end(found))

    with serving({"chat": model}, opened) as running:
        assert all_of(running) == right and not said
        if n < 2:
            return
        killing(lambda: all_of(running) == right, 3)
    assert sum("is lost (" in one for one in said) >= 1 and until(lambda: not engines())


@pytest.fixture
def made_up_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no replica tell of its speeds, which the test makes up."""
    monkeypatch.setattr(Load, "learn", lambda *_: None)


@pytest.mark.usefixtures("made_up_speeds")
def test_prompts_that_are_computed_apart_change_no_text(ray: Ray, model: str, right: list[Any]) -> None:
    found = asyncio.run(ray.replicas(3, "chat", model, OPTIONS, prefill=1))
    assert all(1e-12 < one.facts.speeds.link < 1e-6 for one in found[1:])
    for i, one in enumerate(found):
        one.facts = one.facts._replace(speeds=one.facts.speeds._replace(prompt=1.0 if i else 1e-5))

    def opened(source: str, left: int | None) -> Any:
        return RemoteModel(source, list(found), 256, said.append, lambda: ray.end(found), helping=1)

    said = list[str]()
    with serving({"chat": model}, opened) as running:
        assert all_of(running) == right and not said
        states = running.ask("/status").json["models"][0]["replicas"]
        assert all(one["expected_bytes"] > 1 << 20 for one in states[1:])
        killing(lambda: all_of(running) == right, 2)


@pytest.mark.usefixtures("made_up_speeds")
def test_prompts_of_a_device(ray: Ray, model: str) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    with pytest.raises(EdgeInferError, match="--prefill 1 with --prefill-device cuda needs as many GPUs, and Ray kn"):
        asyncio.run(ray.replicas(2, "chat", model, OPTIONS, prefill=1, device="cuda"))
    found = asyncio.run(ray.replicas(2, "chat", model, OPTIONS, prefill=1, device="onnx-cpu"))
    assert [one.facts.device for one in found] == ["onnx-cpu", "cpu"]
    assert found[0].facts.plan.request.sequences == PREFILL_SEQUENCES
    for i, one in enumerate(found):
        one.facts = one.facts._replace(speeds=one.facts.speeds._replace(prompt=1.0 if i else 1e-5))

    def opened(source: str, left: int | None) -> Any:
        return RemoteModel(source, list(found), 256, said.append, lambda: ray.end(found), helping=1)

    body = {"prompt": "A fox saw a crow " * 12, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    said, path = list[str](), "/v1/completions"
    with serving({"chat": model}) as one, serving({"chat": model}, opened) as running:
        right = one.ask(path, body).json["choices"][0]["text"]
        first = running.ask(path, body)
        assert first.headers["edgeinfer-arithmetic"] == "onnxruntime CPUExecutionProvider (prompt)" and not said
        received = running.ask("/status").json["models"][0]["replicas"][1]["received_bytes"]
        assert received >= found[1].facts.plan.sequence_bytes(60)
        found[0]._ray.kill(found[0]._actor, no_restart=False)
        second = running.ask(path, body)
        assert first.json["choices"][0]["text"] == second.json["choices"][0]["text"] == right
        assert until(lambda: len(said) >= 2, 60) and said[-1].endswith("is back."), said


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server, and return its process and address."""
    process = subprocess.Popen([*PYTHON, "serve", "demo", "--port", "0", "-t", "1", "--ctx", "512", *arguments],
                               stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment())
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"at http://([0-9.:]+)$", line):
            return process, found[1]
    raise AssertionError(process.wait())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_leaves_no_process_behind(number: int) -> None:
    process, address = started("--replicas", "2")
    body = json.dumps({"prompt": "Once", "max_tokens": 4, "temperature": 0}).encode()
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n%s"
                           % (len(body), body))
        assert b" 200 OK" in connection.makefile("rb").readline()
    if number == signal.SIGTERM:
        done = edgeinfer("bench", "--serve", f"http://{address}", "--concurrency", "1,2", "-p8", "-n4", "--json")
        assert done.code == 0 and [one["concurrency"] for one in done.json["serving"]] == [1, 2]
    children = psutil.Process(process.pid).children(recursive=True)
    assert sum(map(is_engine, children)) == 2
    process.send_signal(number)
    assert process.wait(60) == (0 if number == signal.SIGTERM else -number)
    assert process.stderr is not None
    process.stderr.close()
    if number == signal.SIGKILL:  # Ray's agents notice after a minute
        children = [one for one in children if is_engine(one) or "Agent" not in one.name()]
    assert not psutil.wait_procs(children, 30)[1]


def test_what_is_refused() -> None:
    for arguments, sentence in (
            (("--replicas", "0"), "--replicas is 0; it is from 1 to 1024, or auto for one on each node."),
            (("--prefill", "1"), "--prefill and --decode go together and without --replicas, each from 1 on"),
            (("--prefill", "1", "--decode", "0"), "--prefill and --decode go together"),
            (("--prefill", "1", "--decode", "1", "--replicas", "2"), "--prefill and --decode go together and without"),
            (("--replicas", "²"), "--replicas is ²; it is from 1 to 1024"),
            (("--replicas", "some"), "--replicas is some; it is from 1 to 1024"),
            (("--replicas", "2", "--model", "a=demo"), "--replicas and --ray do not go with --model; serve each"),
            (("--ray", "local", "--device", "onnx-cpu"), "do not go with --device onnx-cpu; replicas run"),
            (("--ray", "here"), "--ray is 'here'; write it as HOST:PORT")):
        done = edgeinfer("serve", "demo", *arguments)
        assert done.code == 2 and sentence in done.sentence


def test_more_replicas_than_memory() -> None:
    began = time.monotonic()
    done = subprocess.run([*PYTHON, "serve", "demo", "--port", "0", "--replicas", "3", "--budget", "300MB"], cwd=ROOT,
                          env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "cannot open the model: The run needs" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and time.monotonic() - began < 60
