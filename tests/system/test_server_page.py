"""The chat page in a real browser: Debian's chromium, or another one of its kind, driven by playwright."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import convert
from edgeinfer.graph import read_config
from tests.helpers.checkpoints import make_checkpoint, random_tensors, tiny_config
from tests.helpers.command_line import PYTHON, ROOT, environment

pytestmark = pytest.mark.slow
SOURCE = ROOT / "edgeinfer" / "server" / "page.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CTX = 16384
START_S, ANSWER_MS = 120.0, 60_000
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
HOSTILE = """\
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><svg onload="window.hacked = 3">

[click](javascript:window.hacked=4) [tab](java\tscript:window.hacked=5) [data](data:text/html,<script>1</script>)
![picture](https://example.com/picture.png) https://example.com/"onclick="window.hacked=6 <https://example.com>
[good](https://example.com/a?b=c) **bold <b>not</b>** *em* `<i>code</i>` snake_case_name 2 * 3 * 4

# <iframe src="https://example.com"></iframe>

| a | <img src=https://example.com/x.png> |
|---|---|
| [x](vbscript:1) | `b` |

> quoted <style>body { display: none }</style>

1. one
   - <object data="https://example.com"></object>

```html"><script>
</code></pre><script>window.hacked = 7</script>
```
"""


def test_the_page_is_one_file_that_loads_nothing_and_writes_no_html() -> None:
    text = SOURCE.read_text("utf-8")
    assert len(re.findall(r"<script\b", text)) == len(re.findall(r"<style\b", text)) == 1
    assert not re.findall(r"\bsrc=|@import|url\(|srcdoc|<link(?! rel=\"icon\" href=\"data:)", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


# -- the server and the browser ---------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template that takes milliseconds for a token, and whose greedy text has no end."""
    directory = tmp_path_factory.mktemp("chat")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
             "num_key_value_heads": 4, "max_position_embeddings": CTX}
    head = random_tensors(read_config(tiny_config(**shape)))["lm_head.weight"]
    head[:4] = np.zeros_like(head[:4])
    source = make_checkpoint(directory / "checkpoint", tensors={"lm_head.weight": head}, **shape)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    convert(source, directory / "bundle", weights="f32")
    return directory / "bundle"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[str]:
    with process_serving(tmp_path_factory.mktemp("server") / "log", "--model", f"chat={chat_model}") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra 'reference')")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)} is on the path")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program)
        yield started
        started.close()


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
        """Let this text be what models answer from now on."""
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


@pytest.fixture
def opened(browser: Any, server: str) -> Iterator[Callable[..., Chat]]:
    """Open the page in a profile of its own; checked at the end."""
    found = []

    def open_page(url: str = server, ready: bool = True, **options: Any) -> Chat:
        context = browser.new_context(**{"viewport": WIDE, **options})
        chat = Chat(context.new_page(), url)
        found.append((context, chat))
        if ready:
            chat.open()
        return chat

    yield open_page
    for context, chat in found:
        chat.check()
        context.close()


@pytest.fixture
def chat(opened: Callable[..., Chat]) -> Chat:
    return opened()


# -- talking ----------------------------------------------------------------------------------------------------------


def test_a_text_streams_with_its_speed_and_the_memory(chat: Chat) -> None:
    chat.page.get_by_text("demo has no chat template: it continues what you write.").wait_for()
    field = chat.page.get_by_label("Message", exact=True)
    field.fill("Once upon a time")
    chat.page.keyboard.press("Shift+Enter")
    assert field.input_value() == "Once upon a time\n"
    chat.send("Once upon a time")
    question, answer = chat.texts
    assert question == "Once upon a time" and len(answer) > 20 and field.input_value() == ""
    lengths = chat.page.evaluate("window.lengths")
    assert len({one for one in lengths if one}) >= 3 and lengths == sorted(lengths), "the text did not come in pieces"
    assert re.search(r"^\d+ tokens · [\d.]+ tokens/s · first after \d+\.\d\d s", chat.page.locator(
        ".assistant .tools span").text_content())
    assert re.fullmatch(r"Memory\d+ MB, \d+ MB planned", chat.page.locator("#memory").text_content().strip())
    assert chat.page.title() == "Once upon a time – edgeinfer"


def test_a_conversation_with_its_system_message_reaches_a_chat_model(chat: Chat) -> None:
    chat.page.get_by_label("Model").select_option("chat")
    chat.set(System_message="Be brief.", Maximum_tokens="4", Temperature="0", Top_p="0.5", Seed="3")
    chat.send("Hello")
    chat.send("And now?")
    first, second = chat.bodies("/v1/chat/completions")
    assert first == {
        "model": "chat", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "top_p": 0.5,
        "max_tokens": 4, "seed": 3,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "user"]
    assert "cut off at the limit of tokens" in chat.page.locator(".assistant .tools span").last.text_content()


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_an_answer_here_and_on_the_server(chat: Chat, how: str) -> None:
    chat.page.get_by_label("Model").select_option("chat")
    chat.set(Temperature="0")
    chat.send("Hello", wait=False)
    chat.page.wait_for_function("() => window.lengths.at(-1) > 20")
    if how == "button":
        chat.page.get_by_role("button", name="Stop").click()
    else:
        chat.page.keyboard.press("Escape")
    chat.wait()
    text = chat.texts[-1]
    assert "stopped" in chat.page.locator(".assistant .tools span").text_content()
    end = time.monotonic() + 5
    while running(chat):
        assert time.monotonic() < end, "the server still works on an answer that was stopped"
        time.sleep(0.05)
    assert chat.texts[-1] == text


def running(chat: Chat) -> int:
    """Requests at work on the server."""
    state = chat.page.request.get(chat.url + "/status").json()
    return sum(one["running"] + one["waiting"] for one in state["models"])


def test_regenerate_asks_again_and_the_seed_is_the_servers(chat: Chat) -> None:
    chat.set(Seed="7", Maximum_tokens="40")
    chat.send("Once upon a time")
    first = chat.texts
    again(chat)
    assert chat.texts == first
    chat.set(Seed="8")
    again(chat)
    assert len(chat.texts) == 2 and chat.texts[0] == first[0] and chat.texts[1] != first[1]
    assert len(chat.bodies("/v1/completions")) == 3


def again(chat: Chat) -> None:
    chat.page.get_by_role("button", name="Regenerate").last.click()
    chat.wait()


def test_an_edited_message_is_sent_in_place_of_the_old_one(chat: Chat) -> None:
    chat.set(Maximum_tokens="8")
    chat.send("Once upon a time")
    chat.send("The end came")
    assert len(chat.texts) == 4
    chat.page.locator(".user").first.hover()
    chat.page.get_by_role("button", name="Edit").first.click()
    chat.page.get_by_label("Edited message").fill("There was a cat")
    chat.page.keyboard.press("Enter")
    chat.wait()
    assert len(chat.texts) == 2 and chat.texts[0] == "There was a cat" and chat.titles == ["There was a cat"]
    assert chat.bodies("/v1/completions")[-1]["prompt"] == "There was a cat"


def test_history_survives_a_reload_and_a_deletion_can_be_undone(chat: Chat) -> None:
    chat.set(Maximum_tokens="8")
    chat.send("Once upon a time")
    first = chat.texts
    chat.page.get_by_role("link", name="New conversation").click()
    chat.send("There was a dog")
    second = chat.texts
    chat.page.reload()
    chat.page.get_by_text("There was a dog").last.wait_for()
    assert chat.titles == ["There was a dog", "Once upon a time"] and chat.texts == second
    chat.page.get_by_role("link", name="Once upon a time").click()
    assert chat.texts == first
    chat.page.get_by_role("button", name="Delete Once upon a time").click()
    assert chat.titles == ["There was a dog"] and chat.texts == []
    chat.page.get_by_role("button", name="Undo").click()
    assert len(chat.titles) == 2 and chat.texts == first
    chat.page.get_by_role("button", name="Delete Once upon a time").click()
    chat.page.reload()
    chat.page.get_by_role("link", name="There was a dog").wait_for()
    assert chat.titles == ["There was a dog"]


def test_a_model_that_is_not_yet_open_is_asked_and_its_answer_remembered(chat: Chat) -> None:
    chat.allowed = "status of 400"
    chat.page.route("**/status", lambda route: route.fulfill(json={
        "version": "0", "ready": True, "models": [], "planned_bytes": 2_000_000_000, "resident_bytes": 1_000_000_000}))
    chat.open()
    assert "1.0 GB, 2.0 GB planned" in chat.page.locator("#memory").text_content()
    chat.set(Maximum_tokens="8")
    chat.send("Once upon a time")
    chat.send("and then")
    assert all(chat.texts) and len(chat.texts) == 4
    assert len(chat.bodies("/v1/chat/completions")) == 1 and len(chat.bodies("/v1/completions")) == 2


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_error_is_the_servers_sentence(chat: Chat) -> None:
    chat.allowed = "status of 400"
    chat.set(Top_p="0", Maximum_tokens="8")
    chat.send("Once upon a time")
    sentence = chat.page.locator(".assistant .error").text_content()
    assert "top_p is 0" in sentence and sentence.endswith("."), sentence
    chat.set(Top_p="")
    again(chat)
    assert chat.page.locator(".assistant .error").is_hidden() and chat.texts[1]


def test_a_server_with_a_key_asks_for_it(opened: Callable[..., Chat], tmp_path: Path) -> None:
    with process_serving(tmp_path / "log", EDGEINFER_API_KEY="key-of-this-test") as url:
        chat = opened(url, ready=False)
        chat.allowed, page = "status of 401", chat.page
        page.goto(url)
        for given, reason in (("another", "The API key is missing"), ("key-of-this-test", "is none of this server's")):
            page.locator("#reason").filter(has_text=reason).wait_for()
            page.get_by_label("API key").fill(given)
            page.get_by_role("button", name="Save").click()
        page.locator("#model option").first.wait_for(state="attached")
        chat.send("Once upon a time")
        assert chat.texts[1]
        assert "key-of-this-test" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_server_that_is_gone_is_told(opened: Callable[..., Chat], tmp_path: Path) -> None:
    with process_serving(tmp_path / "log") as url:
        chat = opened(url)
    chat.allowed = "ERR_CONNECTION_REFUSED"
    chat.send("Once upon a time")
    assert chat.page.locator(".assistant .error").text_content() == "The server does not answer; is it still running?"
    assert chat.texts[0] == "Once upon a time"


def test_damaged_history_does_not_stop_the_page(chat: Chat) -> None:
    chat.page.evaluate("""() => {
        localStorage.setItem("edgeinfer.chat.a", "{");
        localStorage.setItem("edgeinfer.chat.b", JSON.stringify({id: "b", messages: [{content: "x"}, 1]}));
        localStorage.setItem("edgeinfer.chat.c", JSON.stringify({id: "c", messages: [{content: "sound"}]}));
        localStorage.setItem("edgeinfer.settings", "nonsense");
    }""")
    chat.open()
    chat.page.get_by_text("A conversation that this browser keeps is damaged, and is not shown.").wait_for()
    assert chat.titles == ["sound"]


# -- text of strangers ------------------------------------------------------------------------------------------------


def test_hostile_text_executes_nothing(chat: Chat) -> None:
    chat.answers(HOSTILE, reasoning=HOSTILE)
    chat.send(HOSTILE)
    chat.page.get_by_text("Reasoning").click()
    chat.page.reload()  # what was kept is drawn as well
    chat.wait()
    log = chat.page.locator("#log")
    assert chat.page.evaluate("window.hacked") is None
    assert log.locator("script, img, iframe, object, style, embed, form, input").count() == 0
    links = log.locator("a").evaluate_all("all => all.map(one => one.href)")
    assert links and all(one.startswith("https://example.com/") for one in links)
    assert log.locator("a").evaluate_all("all => all.every(one => one.rel.includes('noopener'))")
    attributes = log.locator("*").evaluate_all("all => all.flatMap(one => one.getAttributeNames())")
    assert not [one for one in attributes if one.startswith("on")]
    text = chat.texts[1]
    for part in ("<script>window.hacked = 1</script>", "[click](javascript:window.hacked=4)", "snake_case_name",
                 "2 * 3 * 4", "<iframe"):
        assert part in text
    answer = chat.page.locator(".assistant > .text")
    assert answer.locator("pre").text_content() == "</code></pre><script>window.hacked = 7</script>"
    assert answer.locator("strong").text_content() == "bold <b>not</b>"
    assert answer.locator("p code").text_content() == "<i>code</i>"
    assert answer.locator("td").count() == 2 and answer.locator("ol > li > ul > li").count() == 1


def test_html_is_refused_by_the_policy_itself(chat: Chat) -> None:
    chat.allowed = "policy|TrustedHTML|Content Security Policy"
    refused = chat.page.evaluate("""() => {
        try { document.body.innerHTML = "<p>x"; return ""; } catch (error) { return error.name; }
    }""")
    assert refused == "TypeError"
    chat.page.evaluate("""() => {
        const picture = document.createElement("img");
        picture.src = "https://example.com/x.png";
        document.body.append(picture);
    }""")
    with chat.page.expect_console_message(lambda one: one.text == "policy connect-src"):
        chat.page.evaluate("() => { fetch('https://example.com').catch(() => {}); }")
    assert "policy img-src" in chat.faults
    tried = [one for one in chat.requests if one.url.startswith("https://example.com")]
    assert all("csp" in str(one.failure) for one in tried)
    chat.requests.clear()


@pytest.mark.parametrize("text", [
    "*" * 20_000, "`" * 20_000, "[" * 20_000, "> " * 5000, "- " * 5000, "|-" * 10_000 + "x", "_a" * 10_000,
    "|\n|" * 5000, "**a*" * 5000, "-" * 20_000 + "x"], ids=lambda text: f"{text[:4]}{text[-1]}")
def test_text_made_to_take_long_does_not(chat: Chat, text: str) -> None:
    chat.answers(text)
    chat.send("x", wait=False)
    began = time.monotonic()
    chat.wait()
    assert time.monotonic() - began < 10


def test_code_is_copied_as_it_is(opened: Callable[..., Chat]) -> None:
    chat = opened(permissions=["clipboard-read", "clipboard-write"])
    chat.answers("Look:\n\n```python\nif a < b:\n    print('x')\n```\n")
    chat.send("Code")
    chat.page.locator(".code").get_by_role("button", name="Copy").click()
    chat.page.locator(".code button path[d^='m4 10.5']").wait_for()
    assert chat.page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('x')"


# -- looks ------------------------------------------------------------------------------------------------------------


def test_a_phone_has_no_sideways_scrolling(opened: Callable[..., Chat]) -> None:
    chat = opened(viewport=PHONE, is_mobile=True, has_touch=True)
    wide = "x" * 300
    chat.answers(f"{wide}\n\n```\n{wide}\n```\n\n|{wide}|b|\n|---|---|\n|c|{wide}|\n\n> {wide}\n\n- {wide}\n\n`{wide}`",
                 reasoning=wide)
    chat.page.get_by_label("Message", exact=True).fill(wide)
    chat.page.get_by_role("button", name="Send").tap()
    chat.wait()
    chat.page.get_by_text("Reasoning").tap()
    assert overflow(chat) == []
    chat.page.get_by_role("button", name="Conversations").tap()
    chat.page.get_by_role("link", name="New conversation").wait_for()
    chat.page.wait_for_timeout(300)
    assert overflow(chat) == []
    chat.page.get_by_role("link", name="New conversation").tap()
    chat.page.get_by_role("link", name="New conversation").wait_for(state="hidden")
    chat.page.get_by_role("button", name="Settings").tap()
    assert overflow(chat) == []


def overflow(chat: Chat) -> list[str]:
    """Elements that reach out of the window, unless they are in something that scrolls or is hidden."""
    assert chat.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return chat.page.evaluate("""() => {
        const scrolls = one => one && one.id !== "scroll" && (
            /auto|scroll/.test(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
        return [...document.querySelectorAll("body *")].filter(one => {
            const {left, right} = one.getBoundingClientRect();
            return Math.max(right, left + one.scrollWidth) > innerWidth + 1 && !one.closest("#chats a") &&
                one.checkVisibility({visibilityProperty: true}) && !scrolls(one);
        }).map(one => one.outerHTML.slice(0, 80));
    }""")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_have_contrast(opened: Callable[..., Chat], scheme: str) -> None:
    chat = opened(color_scheme=scheme)
    chat.answers("Text with a [link](https://example.com) and\n\n> a quote.", reasoning="Thought.")
    chat.send("Hello")
    back = luminance(chat.page.locator("body").evaluate("one => getComputedStyle(one).backgroundColor"))
    assert back > 0.8 if scheme == "light" else back < 0.05
    for selector in ("#log .text", ".text a", ".text blockquote", "summary", "#hint", ".tools span", ".error"):
        colour = chat.page.locator(selector).last.evaluate("one => getComputedStyle(one).color")
        bright, dark = sorted((back, luminance(colour)), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, selector


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it, of a colour that CSS wrote."""
    parts = [int(one) / 255 for one in re.findall(r"\d+", colour)[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_all_that_can_be_used_has_a_name(chat: Chat) -> None:
    chat.answers("Text\n\n```\ncode\n```", reasoning="Thought.")
    chat.send("Hello")
    nameless = chat.page.locator("button, a, input, select, textarea, summary").evaluate_all("""all => all.filter(
        one => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length)
    ).map(one => one.outerHTML)""")
    assert nameless == []
