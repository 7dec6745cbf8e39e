"""Guards of the server: keys, hosts, origins, limits, clients that leave, and its end."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from edgeinfer.base.process import python_command
from edgeinfer.errors import UsageError
from tests.helpers.command_line import edgeinfer
from tests.helpers.serving import Running, serving, until

KEYS = ("key-number-one", "key-number-two")
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 8}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving({"demo": "demo"}, api_keys=KEYS, max_body=4096, read_seconds=0.5, max_requests=4, max_queue=64,
                 cors_origins=("https://chat.example.org",)) as one:
        yield one


def bearer(key: str = KEYS[0]) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# -- who may ask -------------------------------------------------------------------------------------------------------


def test_keys(guarded: Running) -> None:
    assert guarded.ask(COMPLETIONS, SHORT).status == 401
    wrong = guarded.ask(COMPLETIONS, SHORT, **bearer("key-number-three"))
    assert wrong.status == 401 and wrong.json["error"]["code"] == "invalid_api_key"
    assert guarded.ask("/v1/models").status == guarded.ask("/metrics").status == 401
    assert guarded.ask(COMPLETIONS, SHORT, **bearer()).status == 200
    assert guarded.ask(COMPLETIONS, SHORT, x_api_key=KEYS[1]).status == 200
    assert guarded.ask("/health").status == 200


def test_keys_share_no_prefixes(guarded: Running) -> None:
    body = {**SHORT, "prompt": "The king and the queen lived in a castle by the sea. " * 4}

    def cached(key: str) -> int:
        usage = guarded.ask(COMPLETIONS, body, **bearer(key)).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEYS[0]) == 0 and cached(KEYS[0]) > 32 and cached(KEYS[1]) == 0


def test_other_hosts_and_origins_are_refused(guarded: Running) -> None:
    found = guarded.ask(COMPLETIONS, SHORT, Host="evil.example.org", **bearer())
    assert found.status == 403 and "'evil.example.org'" in found.error
    assert guarded.ask("/health", Host=f"LocalHost:{guarded.port}").status == 200
    found = guarded.ask(COMPLETIONS, SHORT, Origin="https://evil.example.org", **bearer())
    assert found.status == 403 and "--cors-origin" in found.error
    found = guarded.ask(COMPLETIONS, SHORT, Origin="https://chat.example.org", **bearer())
    assert found.status == 200 and found.headers["access-control-allow-origin"] == "https://chat.example.org"
    found = guarded.ask(COMPLETIONS, SHORT, Origin="https://chat.example.org")  # the page can read why
    assert found.status == 401 and found.headers["access-control-allow-origin"] == "https://chat.example.org"
    asked = {"Origin": "https://chat.example.org", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}
    assert guarded.ask(COMPLETIONS, method="OPTIONS", **asked).status == 200


def test_open_addresses_need_a_key(tmp_path: Path) -> None:
    from edgeinfer.server import ServerConfig

    with pytest.raises(UsageError, match=r"--host 0\.0\.0\.0 is open to other machines; add --api-key, or --insecure"):
        ServerConfig(host="0.0.0.0")
    with pytest.raises(UsageError, match="An API key has 5 characters; a key has at least 8"):
        ServerConfig(api_keys=("short",))
    with pytest.raises(UsageError, match=r"--cors-origin is 'https://a\.org/'; write it as browsers do"):
        ServerConfig(cors_origins=("https://a.org/",))
    assert ServerConfig(host="0.0.0.0", insecure=True, cors_origins=("*", "null", "https://a.org:8")).insecure
    assert edgeinfer("serve", "--api-key-file", tmp_path / "none").code == 2


# -- limits ------------------------------------------------------------------------------------------------------------


def test_large_and_slow_requests(guarded: Running) -> None:
    found = guarded.ask(COMPLETIONS, {**SHORT, "prompt": "a" * 5000}, **bearer())
    assert found.status == 413 and "at most 4096" in found.error
    with guarded.connect() as connection:  # one byte of the headers and no more
        connection.sendall(b"P")
        assert connection.recv(100) == b""
    with guarded.connect() as connection:  # a body that does not come
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-number-one"
                           b"\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    with guarded.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000)
        assert b"400" in connection.recv(100)


def test_a_key_has_so_many_requests_at_once(guarded: Running) -> None:
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda _: guarded.ask(COMPLETIONS, LONG, **bearer()), range(12)))
    refused = [one for one in found if one.status == 429]
    assert refused and {one.status for one in found} == {200, 429}
    assert refused[0].headers["retry-after"] == "1" and "(--max-requests)" in refused[0].error
    assert guarded.ask(COMPLETIONS, SHORT, **bearer()).status == 200 and guarded.free()


def test_a_full_queue() -> None:
    with serving({"demo": "demo"}, max_queue=1) as one, ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda _: one.ask(COMPLETIONS, LONG), range(24)))
        assert {answer.status for answer in found} == {200, 429}
        assert one.free()


def test_a_request_ends_when_its_time_is_over() -> None:
    with serving({"demo": "demo"}, request_seconds=0.01) as one:
        found = one.ask(COMPLETIONS, LONG).json
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] < LONG["max_tokens"] and one.free()
        late = one.ask("/v1/embeddings", {"input": ["word " * 100] * 500})
        assert late.status == 503 and "took more than 0.01 s (--request-timeout); send fewer" in late.error
        assert one.free()


def test_what_is_no_http_is_one_line_of_the_log(guarded: Running, capfd: pytest.CaptureFixture[str]) -> None:
    def logged(status: int) -> int:
        return [json.loads(line)["status"] for line in tuple(guarded.log)].count(status)

    before = logged(400), logged(499)
    with guarded.connect() as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert b"The request is not HTTP" in connection.makefile("rb").read()
    with guarded.connect() as connection:  # leaves within its body
        connection.sendall(request(SHORT)[:-5])
    assert until(lambda: (logged(400), logged(499)) == (before[0] + 1, before[1] + 1))
    assert capfd.readouterr().err == ""


# -- clients that leave ------------------------------------------------------------------------------------------------


def request(body: Any, path: str = COMPLETIONS) -> bytes:
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_are_free_after_a_client_has_left(guarded: Running, stream: bool) -> None:
    with guarded.connect() as connection:
        connection.sendall(request({**LONG, "stream": stream}))
        assert until(lambda: bool(guarded.server.answers))
        if stream:
            connection.recv(200)
    assert until(guarded.free, 5)
    assert until(lambda: '"finish_reason":"cancelled"' in guarded.log[-1] or '"status":499' in guarded.log[-1])


def test_a_slow_reader_slows_only_itself(guarded: Running) -> None:
    want = guarded.ask(COMPLETIONS, SHORT, **bearer()).json["choices"]
    with guarded.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(request({**LONG, "max_tokens": 100, "stream": True, "logprobs": 20}))
        time.sleep(0.05)
        assert guarded.ask(COMPLETIONS, SHORT, **bearer()).json["choices"] == want
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(4096)
    assert until(guarded.free)


def test_random_leaving_loses_nothing(guarded: Running) -> None:
    """Clients leave at any moment, send half of a body, or garbage; those that stay get their texts."""
    want = guarded.ask(COMPLETIONS, SHORT, **bearer()).json["choices"]

    def leave(i: int) -> None:
        whole = request({**LONG, "stream": i % 2 == 0})
        with guarded.connect() as connection:
            connection.sendall(whole[: len(whole) - (i % 5) * 9] if i % 3 else b"\x00\xff" * 50)
            time.sleep(0.002 * (i % 7))
            if i % 4 == 0:
                connection.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(leave, range(60)))
    assert until(guarded.free) and not [line for line in guarded.log if "Traceback" in line]
    assert until(lambda: not guarded.server.n_requests)
    assert guarded.ask(COMPLETIONS, SHORT, **bearer()).json["choices"] == want


# -- the program -------------------------------------------------------------------------------------------------------


class Program:
    """`edgeinfer serve` in a process of its own."""

    def __init__(self, *arguments: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command, path = python_command("edgeinfer", "serve", *arguments, "--port", str(self.port))
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, "PYTHONPATH": path})
        self.running = Running(None, self.port, [])

    def ready(self) -> bool:
        try:
            return self.running.ask("/health").status == 200
        except OSError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


def test_it_starts_answers_and_drains() -> None:
    program = Program("demo", "--drain", "600")
    try:
        assert until(program.ready, 60)
        with ThreadPoolExecutor(2) as pool:
            last = pool.submit(program.running.ask, COMPLETIONS, {**LONG, "n": 8, "max_tokens": 300, "temperature": 1})
            assert until(lambda: program.running.ask("/status").json["models"][0]["running"] > 0)
            program.process.send_signal(signal.SIGTERM)
            drained = until(lambda: program.running.ask("/health").status == 503)
            assert drained and last.result().json["usage"]["completion_tokens"] == 8 * 300
        code, errors = program.end()
    finally:
        program.kill()
    assert code == 0 and errors.count("edgeinfer: ") == 5 and "Traceback" not in errors


@pytest.mark.slow
def test_what_does_not_end_in_time_is_told_so() -> None:
    program = Program("demo", "--drain", "0.1")
    try:
        assert until(program.ready, 60)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(program.running.ask, "/v1/embeddings", {"input": ["word " * 100] * 900})
            assert until(lambda: program.running.ask("/status").json["models"][0]["running"] > 0)
            program.process.send_signal(signal.SIGTERM)
            assert asked.result().status == 503 and "about to end" in asked.result().error
        code, errors = program.end()
    finally:
        program.kill()
    assert code == 0 and "Traceback" not in errors


def ask_in_vain(running: Running) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        running.ask(COMPLETIONS, {**LONG, "n": 16, "max_tokens": 900})


@pytest.mark.slow
def test_a_second_signal_ends_at_once() -> None:
    program = Program("demo")
    try:
        assert until(program.ready, 60)
        asking = threading.Thread(target=ask_in_vain, args=(program.running,))
        asking.start()
        assert until(lambda: program.running.ask("/status").json["models"][0]["running"] > 0)
        program.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        program.process.send_signal(signal.SIGINT)
        assert program.end()[0] == 1
        asking.join()
    finally:
        program.kill()


def test_what_cannot_be_served_ends_with_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = edgeinfer("serve", "demo", "--port", str(taken.getsockname()[1]))
    assert found.code == 2 and "Cannot listen on 127.0.0.1 port" in found.err
    assert edgeinfer("serve", "demo", "--lazy", "keep=0.5", "--port", "0").code == 2
    small = edgeinfer("serve", "demo", "--budget", "40MB", "--port", "0")
    assert small.code == 3 and "edgeinfer: " in small.err
    assert edgeinfer("serve", "no-such-model", "--port", "0").code == 1
    assert "--max-sequences is 0" in edgeinfer("serve", "demo", "--max-sequences", "0", "--port", "0").err
    for flag, value in ("--port", "99999"), ("--drain", "-1"), ("--max-queue", "0"), ("--read-timeout", "inf"):
        found = edgeinfer("serve", "demo", flag, value)
        assert found.code == 2 and f"edgeinfer: {flag} is " in found.err
