"""benchmarks/oversubscription.py with programs that only pretend: turns, ratios, the table."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks import oversubscription
from benchmarks.oversubscription import LLAMA, OURS, Crew, Rounds, measure, report, row, together
from benchmarks.peers.worker import Worker, WorkerError

PEERS = Path(oversubscription.__file__).parent / "peers"
FAKE = """
import sys, time
sys.path.insert(0, {peers!r})
from serving import Runner, serve
began = []
runner = Runner(100, lambda ids: time.sleep(0.01 * len(ids)), lambda n: None)
def run_for(**request):
    began.append(request["at"])
    return runner.run_for(**request)
serve({{"load": lambda path, threads: {{"version": "1.2.3"}}, "context": lambda ctx: {{}}, "run": runner.run,
       "run_for": run_for, "began": lambda: {{"began": began}}}})
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    path = tmp_path / "fake.py"
    path.write_text(FAKE.format(peers=str(PEERS)))
    return [sys.executable, str(path)]


@pytest.mark.timing
def test_work_lasts_as_long_as_asked_and_begins_together(fake: list[str]) -> None:
    with Worker("a", fake) as first, Worker("b", fake) as second:
        began = time.time()
        speeds = together([first, second], "tg", 0.3)
        assert time.time() - began >= 0.3 + oversubscription.START_SECONDS
        assert len(speeds) == 2 and all(20 < speed <= 100 for speed in speeds)  # 10 ms a token, or more
        assert first.ask("began") == second.ask("began")


def test_prompts_count_whole(fake: list[str]) -> None:
    with Worker("a", fake) as worker:
        speed = worker.ask("run_for", kind="pp", tokens=5, at=0.0, seconds=0.12)["tok_per_s"]
        assert 20 < speed <= 100


class Scripted:
    """A worker whose speed is given."""

    def __init__(self, speed: float):
        self.speed, self.asked = speed, 0

    def ask(self, do: str, **request: object) -> dict[str, float]:
        assert do == "run_for"
        self.asked += 1
        return {"tok_per_s": self.speed}


def test_each_program_is_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(oversubscription, "wait_for_calm", lambda patience, most: waited.append(patience))
    crews = {OURS: Crew(Scripted(10), Scripted(8), Scripted(5)), LLAMA: Crew(Scripted(4), Scripted(2), Scripted(1))}
    measured = measure(crews, "tg", rounds=3, seconds=1, patience=7)
    assert waited == [7] * 6
    assert measured[OURS] == Rounds([10] * 3, [18] * 3, [5] * 3)
    assert measured[OURS].ratios("together") == [1.8] * 3 and measured[LLAMA].ratios("crowded") == [0.25] * 3
    lines = [row("small", "tg", side, rounds) for side, rounds in measured.items()]
    assert lines[0] == f"| small | tg64 | {OURS} | 10.0 | 1.80 (1.80 to 1.80) | 0.50 (0.50 to 0.50) |"
    page = report(lines, {OURS: "1", LLAMA: "2"}, 2, 3)
    assert "edgeinfer 1, llama.cpp 2. 2 threads are one per core" in page and "| 4 threads |" in page
    assert page.endswith("\n".join(lines) + "\n")


def test_the_command_measures_both_programs(
    fake: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oversubscription, "start", lambda side, python: Worker(side, fake))
    monkeypatch.setattr(oversubscription.Models, "bundle", lambda self, shape, group: tmp_path)
    monkeypatch.setattr(oversubscription.Models, "gguf", lambda self, python, shape, kind: tmp_path)
    monkeypatch.setattr(oversubscription, "TOKENS", {"tg": 4, "pp": 2})
    command = ["--llama-cpp-python", "python", "--workdir", str(tmp_path), "-r", "1", "--seconds", "0.05",
               "--patience", "0", "--shape", "smollm2-135m", "--output", str(tmp_path / "page.md")]
    assert oversubscription.main(command) == 0
    page = (tmp_path / "page.md").read_text()
    for test in ("tg4", "pp2"):
        for side in (OURS, LLAMA):
            assert f"| smollm2-135m | {test} | {side} |" in page


def test_a_program_that_fails_ends_it_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(side: str, python: str) -> Worker:
        raise WorkerError(f"{side} cannot be started (nowhere).")

    monkeypatch.setattr(oversubscription, "start", refuse)
    monkeypatch.setattr(oversubscription.Models, "bundle", lambda self, shape, group: tmp_path)
    monkeypatch.setattr(oversubscription.Models, "gguf", lambda self, python, shape, kind: tmp_path)
    assert oversubscription.main(["--llama-cpp-python", "python", "--workdir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "edgeinfer cannot be started (nowhere).\n"
