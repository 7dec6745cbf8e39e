"""The choice of a replica for a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.cluster.job import Facts, Identity, Speeds
from edgeinfer.cluster.router import Load, Need, blocks_of, choose

BLOCK = 16


def load(name: str, prompt: float = 0.001, decode: float = 0.01, sequences: int = 4, blocks: int = 100) -> Load:
    config: Any = SimpleNamespace(max_sequences=sequences)
    plan: Any = SimpleNamespace(kv_blocks=blocks)
    model: Any = None
    return Load(name, Facts(config, plan, model, BLOCK, True, "avx2", Identity("1", "b", "a"), Speeds(prompt, decode)))


def need(ids: list[int], new: int = 32) -> Need:
    return Need(blocks_of(ids), len(ids), new)


def test_blocks_are_those_of_all_tokens_before() -> None:
    one, other = blocks_of(range(40)), blocks_of([99, *range(1, 40)])
    assert len(one) == 2 and not set(one) & set(other)
    assert blocks_of(range(33)) == one and blocks_of(range(40), b"key") != one


def test_conversations_stay_where_their_beginning_is() -> None:
    loads, homes = [load("a"), load("b"), load("c")], dict[int, list[str]]()
    history = {i: [1000 * i + n for n in range(48)] for i in range(9)}
    for key in range(90):
        i = key % 9
        found = choose(loads, asked := need(history[i]))
        found.begin(key, asked)
        found.end(key)
        history[i] += [7] * 20
        found.has(blocks_of(history[i]))
        homes.setdefault(i, []).append(found.name)
    assert all(len(set(names)) == 1 for names in homes.values())
    assert {one.sent for one in loads} == {30}


def test_a_long_wait_costs_more_than_a_short_beginning() -> None:
    loads = [load("a"), load("b")]
    loads[0].has(blocks_of(range(64)))
    assert choose(loads, need(list(range(80)))).name == "a"
    loads[0].begin(1, need([5] * 1000))  # a second of prompts, and 64 ms are saved
    assert choose(loads, need(list(range(80)))).name == "b"
    assert choose(loads, need(list(range(40)))).name == "b"
    loads[0].progress(1, 1)
    assert choose(loads, need(list(range(80)))).name == "a"


def test_a_full_replica_is_waited_for_as_long_as_its_texts_take() -> None:
    one = load("a", sequences=2)
    assert one.wait() == 0
    for key, new in enumerate((100, 20)):
        one.begin(key, need([1], new))
        one.progress(key, 0)
    assert one.wait() == pytest.approx(20 * 0.01 * 1.5)
    one.end(1)
    assert one.wait() == 0


def test_fast_replicas_get_more() -> None:
    loads = [load("laptop", 0.0002, 0.005), load("board", 0.0006, 0.015)]
    for key in range(16):
        choose(loads, asked := need([key] * 20)).begin(key, asked)
    assert loads[0].sent > 2 * loads[1].sent > 0


def test_speeds_follow_what_was_measured() -> None:
    one = load("a")
    for _ in range(50):
        one.learn_link(1e-8)
    one.learn(Speeds(0.002, 0.03))
    one.learn(None)
    one.learn(Speeds(0.0, 0.0))  # it was opened again, and had only a short prompt since
    assert one.speeds == Speeds(0.002, 0.03, pytest.approx(1e-8, rel=0.01))


def test_beginnings_that_the_cache_has_dropped_are_forgotten() -> None:
    one = load("a", blocks=3)
    first = list(range(48))
    one.has(blocks_of(first))
    assert one.cached(need(first)) == 47  # the last token is computed in any case
    one.has(blocks_of([9] * 32))
    assert one.cached(need(first)) == 0
    one.has(blocks_of(first))
    one.lose()
    assert one.cached(need(first)) == 0 and not one.there
