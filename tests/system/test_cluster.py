"""Workers on Ray: the answers of one process, whatever is killed, and nodes that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("msgspec")
from edgeinfer.base.cache_dir import cache_root
from edgeinfer.bundle import Bundle
from edgeinfer.cluster import Pool, Ray, actor, connected, on_ray
from edgeinfer.cluster.job import Identity
from edgeinfer.cluster.on_ray import _refuse_unlike
from edgeinfer.errors import EdgeInferError
from edgeinfer.models import demo_path
from edgeinfer.server import SERVER_BYTES, Answered, Row, Rows, answer_all
from tests.helpers.command_line import edgeinfer, process
from tests.helpers.serving import until
from tests.system.test_cluster_serve import is_engine

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning"),
              pytest.mark.skipif(find_spec("ray") is None, reason="extra 'cluster' is not installed"),
              pytest.mark.skipif(sys.platform == "win32", reason="Ray's processes are POSIX here")]
OPTIONS: dict[str, Any] = dict(ctx=512, threads=1, budget=None, max_sequences=4, max_queue=1 << 20, fill_budget=None)


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    with connected("local", cpus=2) as one:
        yield one
    with warnings.catch_warnings():  # of the processes that Ray has started, which it does not wait for
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("requests") / "in.jsonl"
    path.write_text("".join(json.dumps({
        "custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {
            "prompt": f"Once there was fox {i}", "seed": i, "max_tokens": 32, "ignore_eos": True, "logprobs": 0}})
        + "\n" for i in range(150)))
    return path


@pytest.fixture(scope="module")
def right(given: Path) -> dict[str, Any]:
    """Return the choices of one process without Ray."""
    out = given.with_name("one.jsonl")
    assert edgeinfer("batch", given, out, "-t", "1", "--ctx", "512").code == 0
    return choices(out)


def choices(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one["response"]["body"]["choices"] for one in found}


def engines() -> list[int]:
    """Return the processes of the workers of this process's cluster."""
    return [one.pid for one in psutil.Process().children(recursive=True) if is_engine(one)]


def test_killed_workers_lose_nothing(ray: Ray, given: Path, right: dict[str, Any],
                                     capfd: pytest.CaptureFixture[str]) -> None:
    found, said, killed = dict[str, Any](), list[str](), list[int]()

    def write(row: Row, answered: Answered) -> None:
        assert answered.status == 200 and row.custom_id not in found
        found[row.custom_id] = json.loads(answered.body)["choices"]
        if len(found) in (20, 60, 100):
            killed.append(engines()[-1 if len(found) == 60 else 0])
            os.kill(killed[-1], signal.SIGKILL)

    async def run(rows: Rows) -> None:
        pool = Pool(opened := await ray.open(2, "demo", "demo", OPTIONS), 8, said.append)
        assert len(engines()) == 2
        try:
            await answer_all(rows.all, rows.body, pool, 16, write)
        finally:
            await pool.close()
            ray.end(opened)

    with Rows(given) as rows:
        asyncio.run(run(rows))
    assert found == right and len(set(killed)) == 3 and not capfd.readouterr().out
    assert until(lambda: not engines())
    assert sum("is lost (" in one for one in said) >= 2


def test_ray_listens_on_this_machine_alone(ray: Ray) -> None:
    addresses = set[str]()
    for one in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # of an earlier test
            addresses |= {each.laddr.ip for each in one.net_connections("inet") if each.status == psutil.CONN_LISTEN}
    assert addresses and addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_workers_of_one_node_share_its_memory(ray: Ray) -> None:
    async def plans(budget: int | None) -> list[int]:
        workers = await ray.open(2, "demo", "demo", {**OPTIONS, "budget": budget, "fill_budget": True, "ctx": None})
        for one in workers:
            await one.learn_facts()
        ray.end(workers)
        found = [one.facts.plan.total_bytes for one in workers]
        assert [one.nbytes - SERVER_BYTES for one in workers] == found  # planned before it is opened
        return found

    for budget in (400 << 20, None):
        found = asyncio.run(plans(budget))
        assert sum(found) <= (budget or psutil.virtual_memory().available * 1.2)
    with pytest.raises(EdgeInferError, match=r"worker \d on 127.0.0.1 cannot open the model: .*needs .*the budget"):
        asyncio.run(plans(20 << 20))


def test_a_worker_reserves_its_plan_and_not_its_budget(ray: Ray) -> None:
    """Each has a budget of all the memory that Ray gives, and both are there."""
    workers = asyncio.run(ray.open(2, "demo", "demo", {**OPTIONS, "budget": 2 * ray.nodes[0].memory}))
    ray.end(workers)
    assert 0 < workers[0].nbytes == workers[1].nbytes < 400 << 20


class Other:
    """Another program of the cluster, which has most of its memory."""


def test_a_process_may_take_longer_to_start_than_memory_to_be_found(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "START_SECONDS", 0.3)
    assert until(lambda: ray._free(ray.nodes[0]) > ray.nodes[0].memory * 0.99)
    ray.end(asyncio.run(ray.open(2, "demo", "demo", OPTIONS)))


def test_more_than_ray_gives_is_refused(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "START_SECONDS", 4.0)
    most = ray.nodes[0].memory
    other = ray._ray.remote(Other).options(num_cpus=0, memory=most - (200 << 20)).remote()
    ray._ray.get(other.__ray_ready__.remote())
    with pytest.raises(EdgeInferError, match=r"worker \d on .* cannot start: Ray gives .* of which .* for all 3 are "
                                             "not free; lower --budget"):
        asyncio.run(ray.open(3, "demo", "demo", OPTIONS))
    ray._ray.kill(other)
    assert until(lambda: not engines())


def test_a_bundle_that_a_node_does_not_see_goes_there_once(ray: Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                          ) -> None:
    shutil.copytree(demo_path(), source := tmp_path / "mine")
    monkeypatch.setattr(on_ray, "seen", lambda path: False)
    said = list[str]()
    monkeypatch.setattr(ray, "_say", said.append)
    with Bundle.open(source) as bundle:
        there = cache_root() / "bundles" / f"sent-{bundle.identity}"
    shutil.rmtree(there, ignore_errors=True)
    try:
        workers = [asyncio.run(ray.open(2, "demo", str(source), {**OPTIONS, "budget": 400 << 20})) for _ in range(2)]
        assert {one.asked[1] for each in workers for one in each} == {str(there)}
        assert [one.partition(" ")[2] for one in said] == [f"does not see {source}; 3.8 MB go there."]
    finally:
        shutil.rmtree(there)


def test_a_model_that_a_node_cannot_open(ray: Ray) -> None:
    for source, sentence in (("no-such-model", "worker 1 on .* cannot open the model: .*no-such-model"),):
        with pytest.raises(EdgeInferError, match=sentence):
            asyncio.run(ray.open(1, "demo", source, OPTIONS))


def test_nodes_that_are_unlike_are_refused(ray: Ray) -> None:
    one, workers = Identity("1", "b" * 64, "fma"), asyncio.run(ray.open(2, "demo", "demo", OPTIONS))
    for other, what in ((one._replace(version="2"), "edgeinfer 2"), (one._replace(bundle="c" * 64), "the bundle cccc"),
                        (one._replace(arithmetic="aarch64 neon 3f2a"),
                                                            "the instruction set aarch64 neon, and the worker 1")):
        with pytest.raises(EdgeInferError, match=f"The worker 2 on .* has {what}.* so that their texts would differ"):
            _refuse_unlike([(workers[0], one), (workers[1], other)])


def test_the_command(given: Path, right: dict[str, Any]) -> None:
    out = given.with_name("ray.jsonl")
    done = process("batch", given, out, "--ray", "local", "--workers", "2", "-t", "1", "--ctx", "512", "--json")
    assert done.code == 0, done.err
    assert choices(out) == right and done.json["completion_tokens"] == 150 * 32


def test_what_is_refused(given: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for arguments, sentence in (
            (("--workers", "2"), "--workers is 2; it needs --ray, and is from 1 to 1024"),
            (("--ray", "local", "--workers", "0"), "--workers is 0; it needs --ray"),
            (("--ray", "local", "--device", "onnx-cpu"), "--ray runs edgeinfer's own kernels, and --device is"),
            (("--ray", "here"), "--ray is 'here'; write it as HOST:PORT, such as 192.168.1.10:6379, or local."),
    ):
        done = edgeinfer("batch", given, out, *arguments)
        assert done.code == 2 and sentence in done.sentence
    done = edgeinfer("batch", given, out, "--ray", "127.0.0.1:1")
    assert done.code == 1 and "Cannot connect to Ray at 127.0.0.1:1: Connection refused; start it" in done.sentence
    assert not out.exists()
