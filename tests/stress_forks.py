"""Tests of forked processes, for stress.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from edgeinfer.errors import EdgeInferError
from edgeinfer.runtime import Session
from tests.helpers.sessions import logits_of, session, tokens


def fork(bundle: Path) -> None:
    """A forked child has no threads: it says so, and its end neither waits for them nor touches its parent's."""
    with session(bundle, threads=2) as opened:
        expected = logits_of(opened, tokens(20)).tobytes()
        stop = threading.Event()
        other = session(bundle, threads=2)
        running = threading.Thread(target=_run_until, args=(other.__enter__(), stop))
        running.start()
        child = os.fork()
        if child == 0:
            try:
                opened.prefill(opened.new_sequence(), [1])
            except EdgeInferError as error:
                sys.exit(0 if "was forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert logits_of(opened, tokens(20)).tobytes() == expected
        stop.set()
        running.join()
        other.__exit__(None, None, None)


class _SlowImport:
    """Finds nothing; while the module of this name is looked for it tells so, and takes its time."""

    def __init__(self, name: str):
        self.name, self.reached = name, threading.Event()

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.name:
            self.reached.set()
            time.sleep(0.3)


def fork_importing(bundle: Path) -> None:
    """A child of a process in which another thread imports: its locks must not be taken for ever in the child."""
    from edgeinfer.llm.api import LLM

    opened = LLM("demo", ctx=64, threads=1)
    slow = _SlowImport("edgeinfer.engine.speculation.prompt_lookup")
    assert slow.name not in sys.modules
    sys.meta_path.insert(0, slow)
    running = threading.Thread(target=lambda: opened.generate("Once", max_tokens=8, temperature=0))
    running.start()
    assert slow.reached.wait(120)
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # ends a child that hangs
        for use in (lambda: opened.generate("Once"), lambda: opened.chat([{"role": "user", "content": "Hi"}])):
            try:
                use()
            except EdgeInferError as error:
                assert "was forked" in str(error) or "no chat template" in str(error), error
        opened.close()
        with LLM("demo", ctx=64, threads=1) as own:
            os._exit(0 if own.generate("Once", max_tokens=3, temperature=0) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    running.join()
    opened.close()


def fork_holding(bundle: Path) -> None:
    """A child of a process in which another thread holds the locks of a tokenizer, a template and standard error."""
    from edgeinfer.models import demo_path
    from edgeinfer.text import ChatTemplate, Tokenizer
    from edgeinfer.text.libraries import held_back_stderr

    template, held = ChatTemplate({"default": "{{ messages[0].content }}"}, {}), threading.Event()

    def hold() -> None:
        with template._lock, held_back_stderr():
            held.set()
            time.sleep(0.3)

    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(120)
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        assert template.render([{"role": "user", "content": "Hi"}]) == "Hi"
        Tokenizer.open(demo_path())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    holding.join()
    assert template.render([{"role": "user", "content": "Hi"}]) == "Hi"


def _run_until(opened: Session, stop: threading.Event) -> None:
    while not stop.is_set():
        logits_of(opened, tokens(200))
