"""A cluster of several nodes, one of which is taken away or has other things than the rest."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
from edgeinfer.cluster import Pool, connected
from edgeinfer.cluster.connection import LOCAL, environment
from edgeinfer.server import Answered, Row, Rows, answer_all
from tests.helpers.command_line import edgeinfer
from tests.helpers.command_line import environment as variables
from tests.helpers.ray_nodes import three_nodes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning"),
              pytest.mark.skipif(find_spec("ray") is None, reason="extra 'cluster' is not installed"),
              pytest.mark.skipif(sys.platform == "win32", reason="Ray's processes are POSIX here")]
OPTIONS: dict[str, Any] = dict(ctx=512, threads=1, budget=None, max_sequences=4, max_queue=1 << 20, fill_budget=None)
N = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start three nodes on this machine."""
    with environment(LOCAL), three_nodes() as one:
        yield one


def test_a_wrong_token_is_refused_at_once(cluster: Any, tmp_path: Path) -> None:
    (given := tmp_path / "in.jsonl").write_text(json.dumps({
        "custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}))
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "edgeinfer", "batch", given, tmp_path / "out.jsonl", "--ray",
                           cluster.address], env=variables(RAY_AUTH_TOKEN="f" * 64), capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 1 and "does not take this token; copy ~/.ray/auth_token of its head" in done.stderr
    assert done.stderr.count("\n") == 1 and time.monotonic() - began < 30
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_node_that_is_taken_away_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    (given := tmp_path / "in.jsonl").write_text("".join(json.dumps({
        "custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {
            "prompt": f"Once there was fox {i}", "seed": i, "max_tokens": 64, "ignore_eos": True}}) + "\n"
        for i in range(N)))
    assert edgeinfer("batch", given, right := tmp_path / "right.jsonl", "-t", "1", "--ctx", "512").code == 0
    found, said = dict[str, Any](), list[str]()

    def write(row: Row, answered: Answered) -> None:
        assert answered.status == 200 and row.custom_id not in found
        found[row.custom_id] = json.loads(answered.body)["choices"]
        if len(found) == N // 6:
            cluster.remove_node(sorted(cluster.worker_nodes, key=id)[0], allow_graceful=False)

    async def run(rows: Rows) -> None:
        with connected(cluster.address) as ray:
            assert len(ray.nodes) == 3
            pool = Pool(await ray.open(None, "demo", "demo", OPTIONS), 8, said.append)
            try:
                await answer_all(rows.all, rows.body, pool, 24, write)
            finally:
                await pool.close()

    with Rows(given) as rows:
        asyncio.run(run(rows))
    assert found == {one["custom_id"]: one["response"]["body"]["choices"]
                     for one in map(json.loads, right.read_text().splitlines())}
    assert sum("is lost (" in one for one in said) == 1
