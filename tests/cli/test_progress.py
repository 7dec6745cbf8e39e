"""Progress: when a bar or a line is shown, and its text. The clock is the test's."""

from __future__ import annotations

import io
import re
import sys

import pytest

from edgeinfer.base.process import say
from edgeinfer.cli import progress
from edgeinfer.cli.progress import ProgressLine
from edgeinfer.errors import UsageError
from edgeinfer.llm.api import LLM


class Screen(io.StringIO):
    """Standard error, on a terminal or not."""

    def __init__(self, terminal: bool):
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def shown(self) -> str:
        """Return the text written since the last call, without control sequences."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue())
        self.seek(0)
        self.truncate()
        return text


class Clock:
    """Stands for the module time."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def told_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it: other tests are not told of stages that take long on a busy machine."""
    monkeypatch.setattr(progress, "TOLD_SECONDS", 2.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "TICK_SECONDS", 3600.0)  # no thread draws
    return clock


def screen(monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str = "xterm") -> Screen:
    shown = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "80")
    return shown


@pytest.mark.parametrize(("terminal", "term"), [(False, "xterm"), (True, "dumb")])
def test_off_a_terminal_there_is_a_line_every_ten_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, terminal: bool, term: str
) -> None:
    shown = screen(monkeypatch, terminal, term)
    with ProgressLine() as tell:
        for second in range(31):
            clock.now = 100.0 + second
            tell("convert", second * 10**7, 10**9, "tensor")
    assert shown.shown().splitlines() == [
        "edgeinfer: converting ...", "edgeinfer: converting: 12 % of 1.00 GB, 10 MB/s, 1:28 left",
        "edgeinfer: converting: 22 % of 1.00 GB, 10 MB/s, 1:18 left", "edgeinfer: converting took 30.0 s"]


def test_what_is_short_says_nothing_off_a_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, False)
    with ProgressLine() as tell:
        for clock.now in (100.0, 100.9, 101.8):
            tell("convert", 1, 2, "")
    assert shown.shown() == ""


def test_another_process_that_compiles_is_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, False)
    with ProgressLine() as tell:
        for clock.now in (100.0, 103.0, 113.0):
            tell("compile", 0, 0, "")
        clock.now = 123.0
        tell("compile", 1, 3, "")
    assert shown.shown().splitlines() == [
        "edgeinfer: waiting for the process that compiles the kernels ...",
        "edgeinfer: waiting for the process that compiles the kernels: 13 s so far",
        "edgeinfer: compiling kernels: 1 of 3 kernels, 20 s left", "edgeinfer: compiling kernels took 23.0 s"]


def test_a_terminal_has_a_bar_which_goes_away(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, True)
    with ProgressLine() as tell:
        tell("compile", 0, 40, "")
        assert shown.shown() == ""
        clock.now += 4
        tell("compile", 8, 40, "linear")
        clock.now += 1
        tell("compile", 10, 40, "linear")
        line = shown.shown().splitlines()[-1]
        assert line.startswith("compiling kernels ━") and line.endswith(" 10 of 40 kernels  15 s left")
        assert len(line) <= 80
        say("a sentence.")
        assert "edgeinfer: a sentence.\n" in shown.shown()
        clock.now += 5
        tell("load", 1, 2, "")
        assert "edgeinfer: compiling kernels took 10.0 s\n" in shown.shown()
    assert "took" not in shown.shown()  # no time worth telling


def test_what_goes_wrong_leaves_no_bar_and_no_sentence(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, True)
    with pytest.raises(ValueError), ProgressLine() as tell:
        tell("load", 1, 2, "")
        assert "loading weights" in shown.shown()
        raise ValueError
    say("after it.")
    assert "took" not in (text := shown.shown()) and text.endswith("edgeinfer: after it.\n")


@pytest.mark.parametrize(("tokens", "after", "expected"), [(256, 1.0, True), (256, 0.4, False), (900, 1.0, False)])
def test_a_prompt_that_takes_two_seconds_has_a_bar(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tokens: int, after: float, expected: bool
) -> None:
    shown = screen(monkeypatch, True)
    with ProgressLine() as tell:
        tell("prompt", 0, 1000, "")
        clock.now += after
        tell("prompt", tokens, 1000, "")
        text = shown.shown()
        assert ("reading the prompt" in text) == expected
        if expected:
            assert "25 % of 1,000 tokens 256 tok/s 3 s left" in text
        tell("prompt", 1000, 1000, "")
        assert "took" not in shown.shown()
        say("done.")
        assert shown.shown() == "edgeinfer: done.\n"


def test_the_time_left_of_a_prompt_knows_that_later_tokens_take_longer(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n tokens take n / 100 + (n / 100)^2 seconds: 1000 take 110 and 2000 take 420."""
    shown = screen(monkeypatch, False)
    with ProgressLine() as tell:
        for tokens in range(0, 1001, 100):
            clock.now = 100.0 + tokens / 100 + (tokens / 100) ** 2
            tell("prompt", tokens, 2000, "")
    assert shown.shown().splitlines()[-1].endswith("5.0 tok/s, 5:10 left")


def test_a_thread_draws_while_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.001)
    shown = screen(monkeypatch, True)
    with ProgressLine() as tell:
        tell("load", 0, 2, "")
        shown.shown()
        while "so far" not in shown.getvalue():  # the suite's own limit ends it
            pass
        tell("prompt", 2, 2, "")
        while tell._thread:
            pass


@pytest.mark.parametrize("lazy", [None, "keep=0.5,0.25"])
def test_a_request_reports_its_prompt(lazy: str | None) -> None:
    told: list[tuple[str, int, int, str]] = []
    with LLM("demo", threads=1, prefill_chunk=16, lazy=lazy) as llm:
        ids = [5 + i % 50 for i in range(300)]
        llm.generate(ids, max_tokens=1, progress=lambda *call: told.append(call))
        assert {call[0] for call in told} == {"prompt"} and {call[2] for call in told} == {300}
        done = [call[1] for call in told]
        assert done == sorted(done) and done[0] == 0 and done[-1] == 300 and len(done) > 10
        with pytest.raises(UsageError, match="progress is 3; it must be a function"):
            llm.generate(ids, progress=3)


def test_stages_of_a_probe_have_names_and_units_or_none(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, False)
    with ProgressLine() as tell:
        for stage in ("neurons", "calibration"):
            for seconds in (0, 3, 11):
                clock.now += seconds
                tell(stage, 1, 2, "")
    lines = shown.shown().splitlines()
    assert "edgeinfer: measuring FFNs: 50 %, 14 s so far" in lines
    assert "edgeinfer: running random models: 1 of 2 models, 14 s so far" in lines
