"""Models of the hub, against a server on this machine: downloads, the cache, and each failure."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.converters import convert, fetch
from edgeinfer.converters.hub.download import _shape
from edgeinfer.errors import ModelNotFoundError
from edgeinfer.graph import builtin_shapes
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.hub_server import COMMIT, Hub, serve
from tests.helpers.tasks import within

ROOT = Path(__file__).resolve().parents[2]
FETCH = """
import json, sys
from edgeinfer.converters import fetch
from edgeinfer.converters.hub import download
from edgeinfer.errors import EdgeInferError

calls = []
download.ATTEMPT_SECONDS = float(sys.argv.pop(1))
try:
    path = fetch(sys.argv[1], *sys.argv[2:], progress=lambda *call: calls.append(call))
    print(json.dumps({"path": str(path), "calls": calls}))
except EdgeInferError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = make_checkpoint(tmp_path / "served", shards=2)
    for name in ("modeling.py", "pytorch_model.bin", "consolidated.safetensors", "LICENSE"):
        (folder / name).write_text(name)
    with serve(folder, "some/model") as hub:
        yield hub


def fetched(hub: Hub, home: Path, *arguments: str, offline: bool = False, seconds: int = 120) -> dict[str, Any]:
    """`fetch` in a process of its own, because the hub's client reads the environment when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment.update(HF_ENDPOINT=hub.url, HF_HOME=str(home), HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="*", no_proxy="*")
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, "-c", FETCH, str(seconds), *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, **({"said": done.stderr} if done.stderr else {})}


def test_download_cache_and_conversion(hub: Hub, tmp_path: Path) -> None:
    result = fetched(hub, tmp_path / "home", "some/model")
    path = Path(result["path"])
    names = sorted(p.name for p in path.iterdir())
    assert names == [
        "LICENSE", "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    ]
    assert not [r for r in hub.requests if "modeling.py" in r or ".bin" in r or "consolidated" in r]
    for name in names:
        assert (path / name).read_bytes() == (hub.folder / name).read_bytes()
    done = [call[0] for call in result["calls"]]
    assert done == sorted(done) and all(call[0] <= call[1] for call in result["calls"])
    if done:  # older clients count files only
        size = sum((path / name).stat().st_size for name in names)
        assert result["calls"][-1] == [size, size, "some/model"]
    convert(path, tmp_path / "bundle")

    hub.requests.clear()
    assert fetched(hub, tmp_path / "home", "some/model", offline=True)["path"] == str(path)
    assert hub.requests == []
    assert fetched(hub, tmp_path / "home", "some/model", COMMIT)["path"] == str(path)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("arguments", "answer", "kind", "message"),
    [
        (["some/other"], None, "ModelNotFoundError",
         "The hub has no model some/other, or it is private: check the name, or log in."),
        (["some/model", "nope"], None, "ModelNotFoundError", "The model some/model has no revision 'nope' on the hub."),
        (["some/model"], (403, "GatedRepo", "ask first"), "ModelNotFoundError",
         "The model some/model requires permission: accept its terms on the hub, then log in with "
         "`hf auth login` or set HF_TOKEN."),
        (["some/model"], (500, "", "broken"), "CheckpointError",
         "The model some/model is not in the hub's cache, and the hub cannot be reached (it answers with the error "
         "500): connect, or give a directory."),
    ],
)
def test_refusals(
    hub: Hub, tmp_path: Path, arguments: list[str], answer: tuple[int, str, str] | None, kind: str, message: str
) -> None:
    hub.error = answer
    assert fetched(hub, tmp_path / "home", *arguments) == {"error": kind, "message": message}


def test_offline_and_not_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    result = fetched(hub, tmp_path / "home", "some/model", offline=True)
    assert result == {"error": "CheckpointError", "message": "The model some/model is not in the hub's cache, and "
                      "HF_HUB_OFFLINE forbids access to the hub: unset it, or give a directory."}
    assert hub.requests == []


@contextmanager
def silent_server(how: str) -> Iterator[tuple[str, list[socket.socket]]]:
    """An address without answers, and the connections that it got."""
    connections: list[socket.socket] = []
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        if how != "closed":
            listener.listen(0 if how == "no connection is made" else 50)
        if how == "accepts and says nothing":

            def accept() -> None:
                with suppress(OSError):
                    while True:
                        connections.append(listener.accept()[0])

            threading.Thread(target=accept, daemon=True).start()
        elif how == "no connection is made":  # the queue of connections is full: packets are dropped
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
        listener.close()
        for connection in connections:
            connection.close()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("how", "why"),
    [("closed", "no connection"), ("accepts and says nothing", "no answer within 1 s"),
     pytest.param("no connection is made", "no answer within 1 s",
                  marks=pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse connections")),
     ("no such name", "no connection")],
)
def test_without_a_hub_one_attempt_and_one_sentence(hub: Hub, tmp_path: Path, how: str, why: str) -> None:
    with silent_server(how) as (url, connections):
        hub.url = "http://nowhere.invalid" if how == "no such name" else url
        result = fetched(hub, tmp_path / "home", "Qwen/Qwen2.5-0.5B-Instruct", seconds=1)
        if how == "no such name" and "no answer" in result["message"]:
            why = "no answer within 1 s"  # a resolver may take long to say so
        assert result == {
            "error": "CheckpointError",
            "message": f"The model Qwen/Qwen2.5-0.5B-Instruct is not in the hub's cache, and the hub cannot be reached "
                       f"({why}): connect, or give a directory; its shape is built in: edgeinfer plan qwen2.5-0.5b, "
                       "edgeinfer estimate qwen2.5-0.5b.",
        }
        assert within(120, lambda: len(connections) == (how == "accepts and says nothing"))


@pytest.mark.slow
def test_what_is_in_the_cache_is_used_without_a_hub(hub: Hub, tmp_path: Path) -> None:
    path = fetched(hub, tmp_path / "home", "some/model")["path"]
    with silent_server("accepts and says nothing") as (url, connections):
        hub.url = url
        result = fetched(hub, tmp_path / "home", "some/model", seconds=1)
        assert within(120, lambda: len(connections) == 1)
        assert result["path"] == path and result["said"] == (
            "edgeinfer: the hub cannot be reached (no answer within 1 s); some/model is the copy in its cache\n"
        )
        assert fetched(hub, tmp_path / "home", "some/model", offline=True) == {"path": path, "calls": result["calls"]}
        assert len(connections) == 1


@pytest.mark.parametrize(
    ("repo_id", "shape"),
    [("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"), ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
     ("someone/qwen3-8b", "qwen3-8b"), ("some/model", ""), ("some/llama-2-70b-x", "llama-2-70b")],
)
def test_the_shape_of_the_same_name(repo_id: str, shape: str) -> None:
    if shape and shape not in builtin_shapes():
        pytest.skip("no such shape")
    want = shape and f"; its shape is built in: edgeinfer plan {shape}, edgeinfer estimate {shape}"
    assert _shape(repo_id) == want


def test_a_model_without_config(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "config.json").unlink()
    result = fetched(hub, tmp_path / "home", "some/model")
    assert result["message"] == "The model some/model on the hub has no config.json, so it is no checkpoint."


def test_other_failures_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.converters.hub.download._silence", lambda *_: "")

    def broken(*_: object, **__: object) -> str:
        raise ValueError("the pipe is\nbroken")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(Exception, match=r"^Cannot download some/model: the pipe is\.$"):
        fetch("some/model")


@pytest.mark.parametrize("name", ["", "a/b/c", "no spaces/here", "../x/y"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="is not the name of a model on the hub; names look like owner/model"):
        fetch(name)
