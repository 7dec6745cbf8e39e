"""`serve --split --ray`: layers on the nodes of a Ray cluster give the texts of one process, also after a loss."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import psutil
import pytest

pytest.importorskip("starlette")
from edgeinfer import LLM
from edgeinfer.cluster import Ray, Stored, connected, stages
from edgeinfer.cluster.connection import LOCAL, environment
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import EdgeInferError, UsageError
from tests.helpers.ray_nodes import three_nodes
from tests.helpers.serving import Running, chat_model, serving, until
from tests.system.test_replicas import COMPLETIONS
from tests.system.test_split_serve import TEXTS, all_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning"),
              pytest.mark.skipif(find_spec("ray") is None, reason="extra 'cluster' is not installed"),
              pytest.mark.skipif(sys.platform == "win32", reason="Ray's processes are POSIX here")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start three nodes on this machine."""
    with environment(LOCAL), three_nodes() as one:
        yield one


@pytest.fixture(scope="module")
def ray(cluster: Any) -> Iterator[Ray]:
    with connected(cluster.address) as one:
        yield one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat_model(tmp_path_factory.mktemp("chat"))


def opener(ray: Ray, split: str, said: list[str]) -> Any:
    def opened(source: str, left: int | None) -> LLM:
        return LLM(source, ctx=512, threads=1, max_sequences=8, max_queue=256, fill_budget=True,
                   split=ray.split(split, Stored(source, None, None), said.append))

    return opened


def hosts() -> list[int]:
    """Return the processes of stages that belong to this test's cluster."""
    return [one.pid for one in psutil.Process().children(recursive=True) if is_host(one)]


def is_host(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it ends meanwhile
        return "ray::StageHost" in " ".join(process.cmdline())
    return False


def layers(running: Running) -> list[tuple[int, int]]:
    return [(stage.info.first, stage.info.last) for stage in running.llm().runner.stages]


def test_the_texts_of_one_process(cluster: Any, ray: Ray, model: str) -> None:
    said = list[str]()
    with serving({"chat": model}) as running:
        right = all_of(running)
    with serving({"chat": model}, opener(ray, "auto", said)) as running:
        assert len(layers(running)) == 3 and len(hosts()) == 2
        assert len(set(stage.where for stage in running.llm().runner.stages)) >= 2
        assert all(psutil.Process(one).nice() == psutil.Process().nice() for one in hosts())
        assert all_of(running) == right
        os.kill(hosts()[0], signal.SIGKILL)
        began = time.monotonic()
        path, body = TEXTS[0]
        while (found := running.ask(path, body)).status != 200:
            assert "has ended" in found.error and time.monotonic() - began < 120
        assert all_of(running) == right and until(running.free)
    assert until(lambda: not hosts())


def test_one_node_has_several_stages_if_they_are_listed(ray: Ray, model: str) -> None:
    with serving({"chat": model}, opener(ray, "0,1,2,3-4", [])) as running:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        assert running.ask(COMPLETIONS, body).status == 200
        assert layers(running) == [(0, 0), (1, 1), (2, 2), (3, 4)] and len(hosts()) == 3
    assert until(lambda: not hosts())


def test_a_stage_whose_memory_ray_lacks_is_refused(ray: Ray, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "START_SECONDS", 3.0)
    stage = stages.NodeStage(ray._ray, ray.nodes[0])
    try:
        with pytest.raises(EdgeInferError, match=r"cannot start: of the .* 17\.59 TB are not free; end what"):
            stage.open(Stored(model, None, None), RuntimeConfig(ctx=512), 0, 1, 1 << 44)
    finally:
        stage.close()
    assert until(lambda: not hosts())


def test_what_is_refused_leaves_no_process_behind(ray: Ray, model: str, tmp_path: Any) -> None:
    for split, source, error, message in (
            ("0-1,3-4", model, UsageError, "leaves out layers 2 to 2"),
            ("0-1,2-4", str(tmp_path / "none"), EdgeInferError, r"The stage on node [0-9.]+: .*none"),
            ("0-1,2-4", "demo", UsageError, "has another bundle; give all stages the same")):
        with pytest.raises(error, match=message):
            LLM(model, ctx=512, threads=1, split=ray.split(split, Stored(source, None, None), print))
    with mock.patch.object(stages, "__version__", "0.0.1"), \
            pytest.raises(EdgeInferError, match=r"has edgeinfer [0-9.a-z]+, and this machine 0\.0\.1; install"):
        LLM(model, ctx=512, threads=1, split=ray.split("auto", Stored(model, None, None), print))
    with pytest.raises(UsageError, match="sized by its tokens"):
        LLM(model, ctx=512, kv_memory="1MB", split=ray.split("auto", Stored(model, None, None), print))
    assert until(lambda: not hosts())
