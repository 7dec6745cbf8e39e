"""The chat page in a browser, as a person uses it, and the server that gives it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import PYTHON, ROOT, environment

START_S, ANSWER_MS = 120.0, 60_000


@contextmanager
def process_serving(log: Path, *arguments: object, **variables: str) -> Iterator[str]:
    """Run a server on a free port; gives its address."""
    for name in ("msgspec", "prometheus_client", "starlette", "uvicorn"):
        pytest.importorskip(name, reason=f"{name} is not installed (extra 'server')")
    command = [*PYTHON, "serve", "demo", "--port", "0", "--drain", "0.1", *map(str, arguments)]
    with log.open("wb") as file, \
            subprocess.Popen(command, stderr=file, env=environment(**variables), cwd=ROOT) as child:
        try:
            end = time.monotonic() + START_S
            while not (found := re.search(r"Serving demo.* at (http://\S+)", log.read_text("utf-8"))):
                assert child.poll() is None and time.monotonic() < end, log.read_text("utf-8")
                time.sleep(0.05)
            yield found[1]
        finally:
            child.terminate()
    assert child.returncode == 0, log.read_text("utf-8")[-2000:]


class Chat:
    """The page in a browser, as a person uses it.

    Attributes
    ----------
    page : playwright's page
    allowed : str
        Pattern of console messages that a test provokes; any other error fails it.
    """

    def __init__(self, page: Any, url: str):
        self.page, self.url, self.allowed = page, url, "(?!)"
        self.faults: list[str] = []
        self.requests: list[Any] = []
        page.set_default_timeout(ANSWER_MS)
        page.on("console", lambda one: one.type in ("error", "warning") and self.faults.append(one.text))
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda one: self.requests.append(one))
        page.add_init_script("""
            addEventListener("securitypolicyviolation", event => console.error("policy " + event.violatedDirective));
            window.lengths = [];
            addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
                const text = document.querySelector("#log .message:last-child > .text");
                if (text) window.lengths.push(text.textContent.length);
            }).observe(document.getElementById("log"), {childList: true, subtree: true, characterData: true}));
        """)

    def open(self) -> None:
        """Load the page and wait until it knows the models."""
        self.page.goto(self.url)
        self.page.locator("#model option").first.wait_for(state="attached")
        self.page.locator("#memory").wait_for(state="attached")

    def check(self) -> None:
        """No error was logged, no policy violated, and nothing asked of another origin."""
        assert [one for one in self.faults if not re.search(self.allowed, one)] == []
        elsewhere = [one.url for one in self.requests if not one.url.startswith((self.url + "/", "data:image/svg+xml"))]
        assert elsewhere == []

    def send(self, text: str, wait: bool = True) -> None:
        """Send a message with the keyboard and wait for the end of the answer."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until no answer is on its way."""
        self.page.locator("#log[aria-busy=false] .message:last-child.assistant .tools button").first.wait_for(
            state="attached")

    def again(self) -> None:
        """Let the last question be answered again."""
        self.page.get_by_role("button", name="Regenerate").last.click()
        self.wait()

    @property
    def texts(self) -> list[str]:
        """The messages on screen."""
        return self.page.locator("#log .user > .body, #log .assistant > .text").all_text_contents()

    @property
    def titles(self) -> list[str]:
        """The conversations in the list."""
        return self.page.locator("#chats a").all_text_contents()

    def set(self, **values: str) -> None:
        """Change settings by their labels."""
        self.page.get_by_role("button", name="Settings").click()
        for label, value in values.items():
            self.page.get_by_label(label.replace("_", " ")).fill(value)
        self.page.get_by_role("button", name="Save").click()

    def answers(self, text: str, reasoning: str = "") -> None:
        """Set the answer of models from now on."""
        deltas = [{"reasoning_content": reasoning}] * bool(reasoning)
        deltas += [{"content": text[i:i + 9]} for i in range(0, len(text), 9)]
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": one}]} for one in deltas]
        events.append({"choices": [], "usage": {"completion_tokens": len(deltas)}})
        body = "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n"
        self.page.route(re.compile("/v1/(chat/)?completions$"), lambda route: route.fulfill(
            status=200, content_type="text/event-stream", body=body))

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """The requests sent to a path."""
        return [json.loads(one.post_data) for one in self.requests if one.url == self.url + path]
