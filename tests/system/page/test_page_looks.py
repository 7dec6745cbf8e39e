"""Looks of the chat page: a phone, light and dark, names of all that can be used."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers.chat_page import Chat

pytestmark = pytest.mark.slow
PHONE = {"width": 360, "height": 740}


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
