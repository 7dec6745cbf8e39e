"""Stop strings, however the text is cut."""

from __future__ import annotations

import random

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.text import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher, text = StopStrings(stops), ""
    for piece in pieces:
        emitted, stopped = matcher.push(piece)
        text += emitted
        if stopped:
            return text + matcher.flush(), True
    return text + matcher.flush(), False


def naive(stops: list[str], text: str) -> tuple[str, bool]:
    """Look after every character whether a stop string ends there; the longest one is dropped."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def test_holds_back_only_what_may_become_a_stop_string() -> None:
    stops = StopStrings(["</s>", "User:"])
    assert stops.push("Hello <") == ("Hello ", False)
    assert stops.push("b> Us") == ("<b> ", False)
    assert stops.push("e it") == ("Use it", False)
    assert stops.push("!</") == ("!", False)
    assert stops.push("s> more") == ("", True)
    assert stops.stopped and stops.push("x") == ("", True) and stops.flush() == ""


def test_flush_gives_what_was_held() -> None:
    stops = StopStrings(["\n\n"])
    assert stops.push("a\n") == ("a", False)
    assert (stops.flush(), stops.flush()) == ("\n", "")


def test_no_stop_strings_pass_everything() -> None:
    assert StopStrings().push("text") == ("text", False)


def test_any_cut_of_any_text_agrees_with_the_naive_search() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        text = "".join(rng.choices("abc", weights=[4, 4, 1], k=rng.randrange(20)))
        pieces, rest = [], text
        while rest:
            n = rng.randrange(1, 5)
            pieces.append(rest[:n])
            rest = rest[n:]
        assert run(stops, pieces) == naive(stops, text), (stops, pieces)


@pytest.mark.parametrize("stop", ["", 3])
def test_empty_stop_strings_are_refused(stop: object) -> None:
    with pytest.raises(UsageError, match="none of them empty"):
        StopStrings([stop])  # type: ignore[list-item]
