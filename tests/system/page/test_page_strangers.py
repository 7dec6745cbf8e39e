"""Text of strangers on the chat page executes nothing, loads nothing, and takes no long time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from tests.helpers.chat_page import Chat
from tests.helpers.command_line import ROOT

pytestmark = pytest.mark.slow
SOURCE = ROOT / "edgeinfer" / "server" / "page.html"
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
    assert time.monotonic() - began < 50  # minutes, if the time is quadratic


def test_code_is_copied_as_it_is(opened: Callable[..., Chat]) -> None:
    chat = opened(permissions=["clipboard-read", "clipboard-write"])
    chat.answers("Look:\n\n```python\nif a < b:\n    print('x')\n```\n")
    chat.send("Code")
    chat.page.locator(".code").get_by_role("button", name="Copy").click()
    chat.page.locator(".code button path[d^='m4 10.5']").wait_for()
    assert chat.page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('x')"
