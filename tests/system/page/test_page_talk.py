"""Talking on the chat page: streams, stop, regenerate, edit, history; and what goes wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.chat_page import Chat, process_serving

pytestmark = pytest.mark.slow


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
    for _ in range(3):  # on a busy machine a page may be drawn so seldom that an answer is complete the first time
        if len({one for one in lengths if one}) >= 3:
            break
        chat.page.evaluate("window.lengths = []")
        chat.send("And then")
        lengths = chat.page.evaluate("window.lengths")
    assert len({one for one in lengths if one}) >= 3 and lengths == sorted(lengths), "the text did not come in pieces"
    assert re.search(r"^\d+ tokens · [\d.]+ tokens/s · first after \d+\.\d\d s", chat.page.locator(
        ".assistant .tools span").last.text_content())
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
    end = time.monotonic() + 60
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
    chat.again()
    assert chat.texts == first
    chat.set(Seed="8")
    chat.again()
    assert len(chat.texts) == 2 and chat.texts[0] == first[0] and chat.texts[1] != first[1]
    assert len(chat.bodies("/v1/completions")) == 3


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
    chat.again()
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
