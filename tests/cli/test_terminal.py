"""The command line on a terminal: chat, Ctrl-C, progress. A pseudo-terminal stands for the person."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from edgeinfer.converters import convert
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import PYTHON, ROOT, edgeinfer, environment, listening, without_stages
from tests.helpers.slow_model import CTX, write_slow_bundle
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")

CANCEL_MS = 100
BUSY_MS = 1500
"""Room for a machine that is busy with something else; the time itself is printed."""
NEVER_ENDS = "2=-inf"
"""Forbids the slow model's end token."""
SLOWLY = "{% if messages[-1].content == 'slow' %}{% set a = 'x' * 100000 %}{% set b, c = a ~ 'y', a ~ 'z' %}" \
    "{% for i in range(550) %}{% for j in range(550) %}{% if b == c %}{% endif %}{% endfor %}{% endfor %}{% endif %}"
"""Compares long texts for some seconds."""
TEMPLATE = SLOWLY + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def compiled(model: Path | str) -> None:
    """Compile a model's kernels first: the limits here are those of a program that finds them."""
    assert edgeinfer("run", model, "x", "-n", 1).code == 0


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    compiled("demo")


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


@pytest.fixture(scope="module")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    source = make_checkpoint(directory / "checkpoint")
    (source / "chat_template.jinja").write_text(TEMPLATE)
    convert(source, directory / "bundle", weights="f32")
    compiled(directory / "bundle")
    return directory / "bundle"


@pytest.fixture(scope="module")
def slow_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled(bundle := write_slow_bundle(tmp_path_factory.mktemp("slow") / "bundle"))
    return bundle


@pytest.mark.timing
def test_ctrl_c_while_a_message_is_prepared_returns_to_the_prompt(
    chat_bundle: Path, terminals: list[Terminal]
) -> None:
    terminal = Terminal("run", chat_bundle, "-n", 8, "--temp", 0, "-t", 1)
    terminals.append(terminal)
    terminal.prompted()
    terminal.type("slow\n")
    time.sleep(0.3)
    terminal.type("\x03")
    terminal.expect(r"\(stopped\)")
    terminal.prompted()
    terminal.type("hello\n")
    terminal.expect("\n> ")
    terminal.type("/exit\n")
    assert terminal.ended() == 0


def test_chat_with_a_template(chat_bundle: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal("run", chat_bundle, "-n", 8, "--temp", 0, "-t", 1, "--system", "be kind")
    terminals.append(terminal)
    terminal.expect("/help lists commands, Ctrl-D leaves")
    terminal.expect("> ")
    terminal.type("/stats\n")
    terminal.expect("No answer yet.")
    terminal.type("hello\n")
    terminal.expect("\n> ")
    terminal.type("/stats\n")
    first = terminal.expect(r"(\d+) prompt \+ \d new tokens.*memory.*\n")
    terminal.type("and again\n")
    terminal.expect("\n> ")
    terminal.type("/stats\n")
    second = terminal.expect(r"(\d+) \((\d+) cached\) prompt \+ \d new tokens.*\n")
    prompt, cached = map(int, re.findall(r"(\d+) \((\d+) cached\)", second)[0])
    assert cached >= int(re.findall(r"(\d+) prompt \+", first)[0]) - 1 and prompt > cached
    terminal.type("/help\n")
    for command in ("/set NAME VALUE", "/stats", "/clear", "/bye", "Ctrl-C"):
        terminal.expect(command)
    terminal.type("/clera\n")
    terminal.expect(r"There is no command /clera; did you mean /clear\?")
    terminal.type("/zzz\n")
    terminal.expect("There is no command /zzz; /help lists the commands.")
    terminal.type("/clear\n")
    terminal.expect("Started a new conversation.")
    terminal.type("hello\n")
    terminal.expect("\n> ")
    terminal.type("/stats\n")
    assert re.findall(r"(\d+) \(", terminal.expect(r"tokens.*\n"))[0] == re.findall(r"(\d+) prompt \+", first)[0]
    terminal.type("/exit\n")
    assert terminal.ended() == 0


def test_chat_without_a_template_continues_one_text(terminals: list[Terminal]) -> None:
    terminal = Terminal("run", "demo", "-n", 12, "--temp", 0, "-t", 1)
    terminals.append(terminal)
    terminal.expect("demo has no chat template and continues your text; /help lists commands")
    terminal.expect("> ")
    terminal.type("Once upon a time\n")
    assert ", there was a little girl" in terminal.expect("\n> ")
    terminal.type("She said\n")
    terminal.expect("\n> ")
    terminal.type("/stats\n")
    terminal.expect(r"2\d \(1\d cached\) prompt \+ 12 new tokens")
    terminal.type("x" * 3000 + "\n")
    terminal.expect(r"This message alone fills the context of 1024 tokens\. Options:\n")
    terminal.expect("  send a shorter message")
    terminal.prompted()
    terminal.type("\x04")
    assert terminal.ended() == 0


@pytest.mark.slow
def test_a_full_context_says_what_helps_and_the_chat_goes_on(terminals: list[Terminal]) -> None:
    terminal = Terminal("run", "demo", "-c", 64, "-n", 24, "--temp", 0, "-t", 1)
    terminals.append(terminal)
    terminal.prompted()
    for message in ("Once upon a time", "She said", "And then"):
        terminal.type(f"{message}\n")
        terminal.expect("\n> ")
    terminal.type("The end\n")
    terminal.expect("This message and the 3 turns before it leave no room for an answer")
    terminal.expect("/drop +forget the (oldest turn|. oldest turns) of 3 and answer")
    terminal.expect(r"-c 128 +/save FILE and /bye, then edgeinfer run demo -c 128 \(takes")
    terminal.type("/drop\n")
    terminal.expect("Forgot the .*oldest turns?; . left.\n.+\n")
    terminal.type("/show\n")
    terminal.expect(r"context +\d\d of 64 tokens, . turns?")
    terminal.type("/bye\n")
    assert terminal.ended() == 0


def test_a_chat_is_changed_saved_and_gone_on_with(
    chat_bundle: Path, terminals: list[Terminal], tmp_path: Path
) -> None:
    file, other = tmp_path / "conversation.json", tmp_path / "notes.txt"
    other.write_text("mine")
    for steps in (
        [("/set temp 0", r"temp is 0\."), ("/set parameter num_predict 3", "max-tokens is 3"),
         ("/set temp hot", r"temperature is 'hot'; it must be a number, 0 or more\."),
         ("/set tmep 1", r"There is no setting tmep; did you mean temp\?"),
         ("/system be brief", "The system message is set"),
         ('"""\nhello', r"\.\.\. "), ('there"""', "\n> "), (f"/save {file}", "Saved 1 turn;"),
         (f"/save {other}", "exists and is not a saved conversation"), ("/save", "/save needs a file name: /save FILE"),
         ("/set temp default", "temp is 0.7")],
        [(f"/load {other}", "is not a conversation that /save has written"), ("/load gone", "There is no file gone"),
         (f"/load {file}", "Loaded 1 turn"), ("/show", r"system +be brief\n"),
         ("/drop \u00b2", "/drop takes a number of turns, as in /drop 2, or nothing."),
         ("/drop 0", "/drop takes a number of turns"),
         ("/drop 5", "Forgot the oldest turn; 0 left"),
         ("/drop", "There is no turn to drop"), ("/set temp default", "temp is 0.7")],
    ):
        terminal = Terminal("run", chat_bundle, "-n", 8, "-t", 1)
        terminals.append(terminal)
        terminal.prompted()
        for typed, expected in steps:
            terminal.type(f"{typed}\n")
            terminal.expect(expected)
        terminal.type("/bye\n")
        assert terminal.ended() == 0
    saved = json.loads(file.read_text())
    assert saved["turns"][0][0] == "hello\nthere" and saved["system"] == "be brief"
    assert saved["options"]["temperature"] == 0 and saved["options"]["max_tokens"] == 3


def test_what_is_pasted_is_one_message(terminals: list[Terminal], tmp_path: Path) -> None:
    """An editor that samples: bracketed paste, Alt-Enter and three quotes; the plan names its memory."""
    file = tmp_path / "conversation.json"
    terminal = Terminal("run", "demo", "-n", 4, "--temp", 0, "-t", 1, TERM="xterm")
    terminals.append(terminal)
    terminal.expect(r"\x1b\[\?2004h")  # the editor is ready for a paste
    for typed in ("\x1b[200~The fox\r\nsaw it.\x1b[201~\r", "one\x1b\rtwo\r", '"""\rthree\rfour"""\r'):
        terminal.type(typed)
        terminal.expect(r"\x1b\[\?2004l[^\x1b]*\n")
        terminal.expect(r"\x1b\[\?2004h")
    for typed, shown in (("/stats", "memory peak"), (f"/save {file}", "Saved 3 turns")):
        terminal.type(f"{typed}\r")
        terminal.expect(shown)
        terminal.expect(r"\x1b\[\?2004h")  # between two prompts the terminal itself would take Ctrl-D
    terminal.type("\x04")
    assert terminal.ended() == 0
    messages = [message for message, _ in json.loads(file.read_text())["turns"]]
    assert messages == ["The fox\nsaw it.", "one\ntwo", "three\nfour"]
    assert "\x1b[6n" not in terminal.shown  # the terminal is not asked for its cursor: its answer would be typed text


@pytest.mark.slow
def test_a_budget_without_room_for_the_editor_reads_lines(terminals: list[Terminal]) -> None:
    planned = edgeinfer("plan", "demo", "-t", 1, "--json").json["total_bytes"]
    terminal = Terminal("run", "demo", "-t", 1, "--budget", f"{planned // 10**6 + 5}MB", TERM="xterm")
    terminals.append(terminal)
    terminal.expect("the message editor takes 14 MB, more than the budget of .* leaves")
    terminal.expect("> ")
    terminal.type("/bye\n")
    assert terminal.ended() == 0


def test_a_system_message_needs_a_template(terminals: list[Terminal]) -> None:
    terminal = Terminal("run", "demo", "--system", "be kind")
    terminals.append(terminal)
    terminal.expect("A system message needs a chat template, and this model has none; put it in your first")
    assert terminal.ended() == 2


@pytest.mark.timing
def test_ctrl_c_stops_the_answer_and_not_the_chat(slow_bundle: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal("run", slow_bundle, "-n", CTX, "-c", CTX, "-t", 1, "--logit-bias", NEVER_ENDS)
    terminals.append(terminal)
    terminal.prompted()
    terminal.type("\x03")
    terminal.expect(r"\(Ctrl-D or /bye leaves\)")
    terminal.prompted()
    for _ in range(2):
        terminal.type("hello\n")
        terminal.expect("hello\n")
        time.sleep(0.4)
        began = time.monotonic()
        terminal.type("\x03")
        terminal.expect(r"\(stopped\)")
        elapsed_ms = 1000 * (time.monotonic() - began)
        print(f"the answer stopped {elapsed_ms:.0f} ms after Ctrl-C")
        assert elapsed_ms < BUSY_MS
        terminal.prompted()
    terminal.type("/exit\n")
    assert terminal.ended() == 0


def computed(pid: int, seconds: float) -> None:
    """Wait until a process has had the processor for so long; on a busy machine that takes longer."""
    deadline, process = time.monotonic() + 120, psutil.Process(pid)
    with contextlib.suppress(psutil.Error):
        while sum(process.cpu_times()[:2]) < seconds and time.monotonic() < deadline:
            time.sleep(0.05)


@pytest.mark.parametrize("during", ["prompt", "answer"])
@pytest.mark.timing
def test_ctrl_c_ends_a_run_with_what_there_is(slow_bundle: Path, during: str) -> None:
    prompt = "a" * (CTX - 2000) if during == "prompt" else "a"
    command = [*PYTHON, "run", str(slow_bundle), "-n", str(CTX), "-c", str(CTX), "--json", "-t", "1"]
    command += ["--logit-bias", NEVER_ENDS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        preexec_fn=listening,
    ) as child:
        assert child.stdin and child.stdout and child.stderr
        child.stdin.write(prompt.encode())
        child.stdin.close()
        computed(child.pid, 2.0)
        assert child.poll() is None, child.stderr.read()
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        report = json.loads(child.stdout.readline())
        elapsed_ms = 1000 * (time.monotonic() - began)
        print(f"during the {during}: reported {elapsed_ms:.0f} ms after Ctrl-C (the promise is {CANCEL_MS})")
        assert elapsed_ms < BUSY_MS
        assert report["finish_reason"] == "cancelled", report
        assert (report["completion_tokens"] == 0) == (during == "prompt")
        assert child.wait(600) == 1 and without_stages(child.stderr.read().decode()) == ""


SLOWLY = """
import time
from edgeinfer.converters import packing

def packed(*given, packed=packing._packed, calls=[]):
    calls.append(given)
    for _ in range(2 if len(calls) < 4 else 6000):
        time.sleep(0.1)
    yield from packed(*given)

packing._packed = packed
"""
"""Lets conversions take some time, and then wait for their end."""


@pytest.mark.slow
def test_ctrl_c_during_a_conversion_leaves_nothing(tmp_path: Path, terminals: list[Terminal]) -> None:
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=3)
    (tmp_path / "source" / "sitecustomize.py").write_text(SLOWLY)
    terminal = Terminal("convert", source, tmp_path / "bundle", TERM="xterm", PYTHONPATH=f"{source}:{ROOT}")
    terminals.append(terminal)
    terminal.expect(r"converting .*\d+ % of [0-9.]+ [kM]B")
    terminal.type("\x03")
    terminal.expect(r"edgeinfer: Interrupted\.")
    assert terminal.ended() == 1 and "Traceback" not in terminal.shown
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_clearing_the_cache_asks(tmp_path: Path, terminals: list[Terminal]) -> None:
    (tmp_path / "bundles" / "tiny").mkdir(parents=True)
    for answer, code in [("n", 1), ("y", 0)]:
        terminal = Terminal("cache", "clear", EDGEINFER_CACHE=str(tmp_path))
        terminals.append(terminal)
        terminal.expect(r"Delete 1 entry \(0 B\) of .*\? \[y/N\] ")
        terminal.type(f"{answer}\n")
        assert terminal.ended() == code
        assert (tmp_path / "bundles" / "tiny").exists() == (answer == "n")


def test_sentences_are_folded_between_words_on_a_narrow_terminal(terminals: list[Terminal]) -> None:
    terminal = Terminal("run", "demo", "x", "--budget", "50MB", columns=40)
    terminals.append(terminal)
    assert terminal.ended() == 3
    lines = terminal.shown.splitlines()
    sentence = lines[next(i for i, line in enumerate(lines) if line.startswith("edgeinfer: ")):]
    assert len(sentence) > 2 and max(map(len, sentence)) <= 40
    assert " ".join(sentence).endswith("so no model fits; raise --budget.")
