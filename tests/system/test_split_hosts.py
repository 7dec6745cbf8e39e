"""The side of a node that holds layers (`cluster.stages.StageHost`), without Ray: answers, refusals, order."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from edgeinfer.cluster.stages import Failure, NodeFacts, StageHost, Stored, facts_there
from edgeinfer.config import RuntimeConfig
from edgeinfer.pipeline import Part, StageInfo, StageSegment, plain_config
from edgeinfer.runner import PROMPT

DEMO = Stored("demo", None, None)


def opened(first: int = 0, last: int = 1) -> StageHost:
    host = StageHost()
    info = host.open(DEMO, plain_config(RuntimeConfig(ctx=64, kv_tokens=64, threads=1, max_sequences=2)), first, last)
    assert isinstance(info, StageInfo) and (info.first, info.last) == (first, last)
    return host


def part(sequence: int, n: int) -> Part:
    return Part([StageSegment(sequence, list(range(1, n + 1)), [], PROMPT)], begins=[(sequence, n)])


def test_a_host_carries_out_calls_and_says_what_failed_in_the_next_answer() -> None:
    host = opened()
    assert host.call(1, "open", (1,), False) is None
    rows = host.run(2, part(1, 20), None)
    assert isinstance(rows, np.ndarray) and rows.shape == (20, 256)
    host.call(3, "commit", ([(1, list(range(1, 21)), PROMPT)],), False)
    full = host.run(4, part(1, 60), None)
    assert isinstance(full, Failure) and full.kind == "RequestError"
    assert host.call(5, "truncate", (9, 0), False) is None, "no such sequence"
    said = host.call(6, "blocks", (), True)
    assert isinstance(said, Failure) and "A stage of the pipeline failed (KeyError: 9)" in said.sentence
    assert host.call(7, "blocks", (), True)[0] == 4


def test_calls_out_of_order_and_unknown_ones_are_refused() -> None:
    host = opened()
    for number, name, message in ((2, "blocks", "arrived out of order"), (1, "info", "has no call 'info'")):
        found = host.call(number, name, (), True)
        assert isinstance(found, Failure) and message in found.sentence
    unopened: Any = StageHost().call(1, "blocks", (), True)
    assert "arrived out of order" in unopened.sentence


def test_a_part_that_was_given_up_is_cancelled() -> None:
    host = opened()
    host.call(1, "open", (1,), False)
    host.give_up(2)
    found = host.run(2, part(1, 20), None)
    assert isinstance(found, Failure) and found.kind == "CancelledError"
    host.call(3, "abort", ([(1, 0)],), False)
    assert isinstance(host.run(4, part(1, 20), None), np.ndarray)


def test_what_a_node_cannot_open_is_a_sentence(tmp_path: Any) -> None:
    host = StageHost()
    facts = facts_there(DEMO, None, "int8")
    assert isinstance(facts, NodeFacts) and facts.room > 0 and facts.threads >= 1
    missing = Stored(str(tmp_path / "none"), None, None)
    config = plain_config(RuntimeConfig(ctx=64))
    for found in (facts_there(missing, None, "int8"), host.open(missing, config, 0, 1)):
        assert isinstance(found, Failure) and found.kind == "ModelNotFoundError" and "none" in found.sentence
    assert "the model has 0 to 4" in host.open(DEMO, config, 0, 9).sentence  # type: ignore[union-attr]
    waiting = threading.Thread(target=host.watch, daemon=True)
    waiting.start()
    time.sleep(0.01)
    assert waiting.is_alive()
    host._end.set()
    waiting.join(120)
