"""The pool of workers: which row goes where, and rows whose worker is lost."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
import edgeinfer.cluster
from edgeinfer.cluster import Pool, WorkerLost
from edgeinfer.cluster.pool import in_common
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.server import Answered, Row


def row(number: int, key: bytes = b"") -> Row:
    return Row(number, 0, 0, f"r{number}", "/v1/completions", None, "", key)


class Fake:
    """A worker that answers with its name, and is lost when it is told to be."""

    def __init__(self, name: str, reopens: bool = True):
        self.name, self.reopens, self.had = name, reopens, list[bytes]()
        self.lost: Callable[[bytes], bool] = lambda body: False
        self.n = self.most = 0

    async def post(self, url: str, body: bytes) -> Answered:
        self.n += 1
        self.most = max(self.most, self.n)
        self.had.append(body)
        await asyncio.sleep(0)
        self.n -= 1
        if self.lost(body):
            raise WorkerLost("killed")
        return Answered(200, self.name.encode(), {})

    async def reopen(self) -> None:
        await asyncio.sleep(0)
        if not self.reopens:
            raise WorkerLost("no such node")


def run(pool: Callable[[list[str]], Pool], work: Callable[[Pool], Awaitable[Any]]) -> tuple[Any, list[str]]:
    said = list[str]()

    async def main() -> Any:
        made = pool(said)
        try:
            return await asyncio.wait_for(work(made), 20)
        finally:
            await made.close()

    return asyncio.run(main()), said


def test_rows_that_begin_alike_stay_with_a_worker() -> None:
    workers = [Fake("a"), Fake("b")]

    async def work(pool: Pool) -> None:
        for i in range(40):
            await pool.post(row(i, (b"fox", b"crow")[i % 2] * 3), b"%d" % (i % 2))

    run(lambda said: Pool(workers, 4, said.append), work)
    assert sorted(map(frozenset, (set(one.had) for one in workers)), key=sorted) == [{b"0"}, {b"1"}]


def test_no_worker_has_more_rows_than_it_may() -> None:
    workers = [Fake("a"), Fake("b")]

    async def work(pool: Pool) -> list[Answered]:
        return await asyncio.gather(*(pool.post(row(i, b"same"), b"x") for i in range(50)))

    found, _ = run(lambda said: Pool(workers, 3, said.append), work)
    assert len(found) == 50 and [one.most for one in workers] == [3, 3]


def test_rows_of_a_lost_worker_are_answered_and_it_comes_back() -> None:
    workers = [Fake("a"), Fake("b")]
    kills = iter([True, True, False, True])
    workers[0].lost = lambda body: next(kills, False)

    async def work(pool: Pool) -> list[Answered]:
        return await asyncio.gather(*(pool.post(row(i), b"%d" % i) for i in range(60)))

    found, said = run(lambda said: Pool(workers, 4, said.append), work)
    assert [one.status for one in found] == [200] * 60 and Counter(one.body for one in found)[b"a"] > 4
    assert set(said) == {"a is lost (killed); others continue its requests.", "a is back."}


def test_a_worker_that_does_not_come_back_leaves_all_to_the_others() -> None:
    workers = [Fake("a", reopens=False), Fake("b")]
    workers[0].lost = lambda body: True

    async def work(pool: Pool) -> list[Answered]:
        return await asyncio.gather(*(pool.post(row(i), b"%d" % i) for i in range(20)))

    found, said = run(lambda said: Pool(workers, 2, said.append), work)
    assert {one.body for one in found} == {b"b"} and len(found) == 20
    assert said == ["a is lost (killed); others continue its requests.", "a does not come back (no such node)."]


def test_the_run_ends_where_nobody_is_left_or_a_row_ends_workers() -> None:
    async def work(pool: Pool) -> None:
        await pool.post(row(7), b"x")

    for reopens, sentence in ((False, "No worker is left; the same command continues"),
                              (True, "5 workers ended while they had line 7 of the input; remove that line")):
        worker = Fake("a", reopens)
        worker.lost = lambda body: True
        with pytest.raises(EdgeInferError, match=sentence):
            run(lambda said, one=worker: Pool([one], 2, said.append), work)  # type: ignore[misc]


def test_common_beginnings() -> None:
    assert [in_common(*pair) for pair in ((b"", b"a"), (b"ab", b"ab"), (b"abc", b"abd"), (b"x", b"y"))] == [0, 2, 2, 0]


def test_ray_is_imported_where_it_is_used_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in Path(edgeinfer.cluster.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else \
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.split(".")[0] == "ray"], path
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="needs the package ray; install it with: pip install"), \
            edgeinfer.cluster.connected("local"):
        pass
