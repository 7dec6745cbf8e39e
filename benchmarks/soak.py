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
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import machine, publish, row, table
from benchmarks.soaking import LIMIT, STORY, Soak
from edgeinfer import LLM
from edgeinfer.engine import Completion

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
class Case(NamedTuple):
    """A request, its outcome alone, and the seconds that it took."""

    prompt: str
    options: dict[str, Any]
    outcome: Any
    seconds: float


def outcome(done: Completion) -> Any:
    """Return the values that must not differ."""
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


class RequestSoak(Soak):
    """One open model and the disturbances of its requests."""

    def __init__(self, llm: LLM, known: list[Case]):
        super().__init__(psutil.Process(), 6)
        self.llm, self.cases = llm, known
        self.streams = [case for case in known if case.options.get("n", 1) == 1]

    def disturbances(self) -> Sequence[Callable[[], None]]:
        """Return the kinds of events."""
        return self._cancel, self._cancel_reader, self._abandon, self._close

    def compare(self) -> str:
        """Run a request; returns the difference of its outcome from that of an undisturbed run."""
        case = self.draw(self.cases)
        found = outcome(self.llm.complete(case.prompt, **case.options))
        return "" if found == case.outcome else f"{case.options} after {case.prompt!r}: {found}, alone {case.outcome}"

    def lost(self) -> int:
        """Return how many KV blocks are not free although no request is there."""
        gc.collect()
        self.llm.runner.drop_prefixes()
        return self.llm.runner.n_blocks - self.llm.runner.free_blocks

    def _cancel(self) -> None:
        """Cancel an unread request at any moment from before its start to after its end."""
        case = self.draw(self.cases)
        request = self.llm.request(case.prompt, case.options)
        request.start_whole()
        self._sleep(case)
        request.cancel()
        self._ended("cancelled", request.finish().finish_reason)

    def _cancel_reader(self) -> None:
        """Cancel a stream from another thread than the one that reads it."""
        case = self.draw(self.streams)
        stream = self.llm.stream(case.prompt, **case.options)
        timer = threading.Timer(self._delay(case), stream.cancel)
        timer.start()
        for _ in stream:
            pass
        timer.join()
        self._ended("cancelled", stream.completion.finish_reason)

    def _abandon(self) -> None:
        """Drop a stream that is read in part."""
        case = self.draw(self.streams)
        stream = self.llm.stream(case.prompt, **case.options)
        for _ in range(self.draw((0, 1, 3, 20))):
            next(stream, "")
        self.note("abandoned")  # its end comes later

    def _close(self) -> None:
        """Close a stream that is read in part."""
        case = self.draw(self.streams)
        stream = self.llm.stream(case.prompt, **case.options)
        next(stream, "")
        self._sleep(case)
        stream.close()
        self._ended("closed", stream.completion.finish_reason)

    def _delay(self, case: Case) -> float:
        return self.chance() * 2 * case.seconds

    def _sleep(self, case: Case) -> None:
        time.sleep(self._delay(case))

    def _ended(self, event: str, reason: str | None) -> None:
        self.note(event)
        self.note("ended early", reason == "cancelled")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--document", type=Path)
    given = parser.parse_args()
    known = cases(given.model, 48)
    with LLM(given.model, ctx=512, threads=1, max_sequences=6, kv_tokens=448) as llm:
        soak = RequestSoak(llm, known)
        soak.run(given.events, 60 * given.minutes)
        lost, preemptions = soak.lost(), llm._engine.preemptions
    events = [soak.events[kind] for kind in ("cancelled", "abandoned", "closed", "ended early")]
    found = row(f"{given.minutes:g}", *events, *soak.row(), preemptions, lost)
    head = ("minutes | cancelled | abandoned | closed | ended early | survivors | other outcomes than alone | "
            "memory after warm-up | growth at most | preemptions | blocks lost")
    publish(f"{machine()}.\n\n" + table(head, [found]), given.document, "soak")
    for wrong in soak.wrong[:3]:
        print(wrong, file=sys.stderr)
    return int(bool(soak.wrong) or lost > 0 or soak.growth[1] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
