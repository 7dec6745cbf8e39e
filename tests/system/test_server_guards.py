"""Guards of the server: keys, hosts, origins, limits, clients that leave, and its end."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from edgeinfer.errors import UsageError
from tests.helpers.command_line import edgeinfer
from tests.helpers.serving import Running, serving, until
from tests.helpers.tasks import held

KEYS = ("key-number-one", "key-number-two")
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 8}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving({"demo": "demo"}, api_keys=KEYS, max_body=4096, max_requests=4, max_queue=64,
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


def test_slow_requests() -> None:
    with serving({"demo": "demo"}, read_seconds=0.5) as one:
        with one.connect() as connection:  # one byte of the headers and no more
            connection.sendall(b"P")
            assert connection.recv(100) == b""
        for _ in range(20):  # a body that does not come; this thread may be too slow for the headers already
            with one.connect() as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
                if found := connection.recv(100):
                    break
        assert found.startswith(b"HTTP/1.1 408")


def test_large_requests(guarded: Running) -> None:
    found = guarded.ask(COMPLETIONS, {**SHORT, "prompt": "a" * 5000}, **bearer())
    assert found.status == 413 and "at most 4096" in found.error
    with guarded.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000)
        assert b"400" in connection.recv(100)


def test_a_key_has_so_many_requests_at_once(guarded: Running) -> None:
    with ThreadPoolExecutor(12) as pool:
        with held(guarded.llm()):
            asked = [pool.submit(guarded.ask, COMPLETIONS, LONG, **bearer()) for _ in range(12)]
            assert until(lambda: sum(one.done() for one in asked) == 8)
        found = [one.result() for one in asked]
    refused = [one for one in found if one.status == 429]
    assert len(refused) == 8 and {one.status for one in found} == {200, 429}
    assert refused[0].headers["retry-after"] == "1" and "(--max-requests)" in refused[0].error
    assert until(lambda: not guarded.server.n_requests)
    assert guarded.ask(COMPLETIONS, SHORT, **bearer()).status == 200 and until(guarded.free)


def test_a_full_queue() -> None:
    with serving({"demo": "demo"}, max_queue=1) as one, ThreadPoolExecutor(24) as pool:
        with held(one.llm()):
            asked = [pool.submit(one.ask, COMPLETIONS, LONG) for _ in range(24)]
            assert until(lambda: any(answer.done() for answer in asked))
        assert {answer.result().status for answer in asked} == {200, 429}
        assert until(one.free)


def test_a_request_ends_when_its_time_is_over() -> None:
    with serving({"demo": "demo"}, request_seconds=0.01) as one:
        with ThreadPoolExecutor(1) as pool:
            with held(one.llm()):
                asked = pool.submit(one.ask, COMPLETIONS, LONG)
                answers = one.server.answers
                assert until(lambda: any(answer._request.task.cancellation.asked for answer in tuple(answers)))
            found = asked.result().json
        assert found["choices"][0]["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] < LONG["max_tokens"] and until(one.free)
        late = one.ask("/v1/embeddings", {"input": ["word " * 100] * 500})
        assert late.status == 503 and "took more than 0.01 s (--request-timeout); send fewer" in late.error
        assert until(one.free)


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
    assert until(guarded.free)
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
