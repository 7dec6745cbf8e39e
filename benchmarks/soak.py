"""Requests that are cancelled, abandoned and closed at random moments, while others must get their texts.

    python benchmarks/soak.py [--minutes 20] [--events 2000] [--document docs/measurements/batching.md]

One model stays open, with a KV pool that is too small for all requests, so that they are preempted. Each event disturbs
one request and begins up to six others beside it. These survive, and must get the tokens and log-probabilities that
they got alone. In the end every KV block must be free, and the resident memory must have stayed within 8 MB of what it
was after the first fifth of the time. The exit code is 1 if any of this does not hold.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, row, table
from edgeinfer import LLM
from edgeinfer.engine import Completion

LIMIT = 8e6
"""Bytes by which the resident memory may grow after the warm-up."""
WARM_UP = 0.2
"""Share of the time after which memory is compared."""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
STORY = "The king and the queen lived in a castle by the sea, and a fox came to see them every day. "


class Case(NamedTuple):
    """A request, its outcome alone, and the seconds that it took."""

    prompt: str
    options: dict[str, Any]
    outcome: Any
    seconds: float


def outcome(done: Completion) -> Any:
    """Return what may not differ."""
    return [(one.token_ids, one.text, one.finish_reason, one.score, one.logprobs) for one in done.choices]


def cases(model: str, n: int) -> list[Case]:
    """Return requests of all kinds, each run alone."""
    chance, found = random.Random(1), []
    with LLM(model, ctx=512, threads=1, beams=2) as llm:
        for number in range(n):
            prompt = STORY * chance.choice((0, 0, 1, 3, 5)) + f"Tale {chance.randrange(9)}:"
            options: dict[str, Any] = {
                "max_tokens": chance.choice((1, 10, 120, 150)), "seed": number, "reuse": chance.random() < 0.7,
                "temperature": chance.choice((0.0, 0.9)), "frequency_penalty": chance.choice((0.0, 0.5)),
                "logprobs": chance.choice((None, None, 2)), "n": chance.choice((1, 1, 1, 2)),
            }
            if number % 8 == 3:
                options = {"beams": 2, "n": 2, "max_tokens": 20}
            elif number % 8 == 5 and find_spec("llguidance"):
                options.update(response_format=SCHEMA, n=1)
            began = time.perf_counter()
            done = llm.complete(prompt, **options)
            found.append(Case(prompt, options, outcome(done), time.perf_counter() - began))
    return found


class Soak:
    """One open model and what happens to its requests."""

    def __init__(self, llm: LLM, known: list[Case]):
        self.llm, self.cases = llm, known
        self.streams = [case for case in known if case.options.get("n", 1) == 1]
        self.events, self.survivors, self.wrong = Counter[str](), 0, list[str]()
        self._chance, self._numbers, self._counting = random.Random(2), count(), threading.Lock()
        self._rss: list[int] = []

    def run(self, events: int, seconds: float) -> None:
        """Spread events over the time, and look at the memory meanwhile."""
        process, began = psutil.Process(), time.monotonic()
        kinds = (self._cancel, self._cancel_reader, self._abandon, self._close)
        with ThreadPoolExecutor(8) as pool:
            for number in range(events):
                works: list[Callable[[], None]] = [self._chance.choice(kinds)]
                works += [self._survive] * self._chance.randrange(7)
                self._chance.shuffle(works)
                running = [pool.submit(work) for work in works]
                time.sleep(max(began + (number + 1) * seconds / events - time.monotonic(), 0))
                for done in wait(running).done:
                    done.result()
                self._rss.append(process.memory_info().rss)

    @property
    def growth(self) -> tuple[float, float]:
        """Resident memory after the warm-up, and how much more it was at most later on, in bytes."""
        first = int(len(self._rss) * WARM_UP)
        before = statistics.median(self._rss[first : first + max(len(self._rss) // 50, 1)])
        return before, max(self._rss[first:]) - before

    def lost(self) -> int:
        """Return how many KV blocks are not free although no request is there."""
        gc.collect()
        self.llm.runner.drop_prefixes()
        return self.llm.runner.n_blocks - self.llm.runner.free_blocks

    def _survive(self) -> None:
        case = self._draw(self.cases)
        found = outcome(self.llm.complete(case.prompt, **case.options))
        with self._counting:
            self.survivors += 1
            if found != case.outcome:
                self.wrong.append(f"{case.options} after {case.prompt!r}: {found}, alone {case.outcome}")

    def _cancel(self) -> None:
        """Cancel an unread request at any moment from before its start to after its end."""
        case = self._draw(self.cases)
        request = self.llm.request(case.prompt, case.options)
        request.start_whole()
        self._sleep(case)
        request.cancel()
        self._note("cancelled", request.finish().finish_reason)

    def _cancel_reader(self) -> None:
        """Cancel a stream from another thread than the one that reads it."""
        case = self._draw(self.streams)
        stream = self.llm.stream(case.prompt, **case.options)
        timer = threading.Timer(self._delay(case), stream.cancel)
        timer.start()
        for _ in stream:
            pass
        timer.join()
        self._note("cancelled", stream.completion.finish_reason)

    def _abandon(self) -> None:
        """Drop a stream that is read in part."""
        case = self._draw(self.streams)
        stream = self.llm.stream(case.prompt, **case.options)
        for _ in range(self._draw((0, 1, 3, 20))):
            next(stream, "")
        self._note("abandoned", "")  # its end comes later

    def _close(self) -> None:
        """Close a stream that is read in part."""
        case = self._draw(self.streams)
        stream = self.llm.stream(case.prompt, **case.options)
        next(stream, "")
        self._sleep(case)
        stream.close()
        self._note("closed", stream.completion.finish_reason)

    def _draw(self, of: Any) -> Any:
        with self._counting:
            return self._chance.choice(of)

    def _delay(self, case: Case) -> float:
        with self._counting:
            return self._chance.random() * 2 * case.seconds

    def _sleep(self, case: Case) -> None:
        time.sleep(self._delay(case))

    def _note(self, event: str, reason: str) -> None:
        with self._counting:
            self.events[event] += 1
            self.events["ended early"] += reason == "cancelled"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--document", type=Path)
    given = parser.parse_args()
    known = cases(given.model, 48)
    with LLM(given.model, ctx=512, threads=1, max_sequences=6, kv_tokens=448) as llm:
        soak = Soak(llm, known)
        soak.run(given.events, 60 * given.minutes)
        lost, preemptions = soak.lost(), llm._engine.preemptions
    before, grown = soak.growth
    events = [soak.events[kind] for kind in ("cancelled", "abandoned", "closed", "ended early")]
    found = row(f"{given.minutes:g}", *events, soak.survivors, len(soak.wrong), preemptions, lost,
                f"{before / 1e6:.0f} MB", f"{grown / 1e6:.1f} MB")
    head = ("minutes | cancelled | abandoned | closed | ended early | survivors | other outcomes than alone | "
            "preemptions | blocks lost | memory after warm-up | growth at most")
    publish(f"{machine()}.\n\n" + table(head, [found]), given.document, "soak")
    for wrong in soak.wrong[:3]:
        print(wrong, file=sys.stderr)
    return int(bool(soak.wrong) or lost > 0 or grown > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
