"""Expressions of pre-tokenizers: which characters their matches can contain one after the other."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, pre_tokenizers

from edgeinfer.converters.gguf.words import WORDS
from edgeinfer.graph import GPT2
from edgeinfer.text.patterns import matches_each, separates

LETTERS, ENDS = "abkszABé吾ぁ가", " .\n,"
PATTERNS = sorted({pattern for words in WORDS.values() for pattern in (*words.splits, GPT2) if pattern != "digits"})


@pytest.mark.parametrize(("pattern", "separate"), [
    (r"\p{L}+", True), (r" ?\p{L}+|\s+(?!\S)", True), (r"\p{N}{1,3}", True), (r"(?i:'s|'t)| ?[^\s\p{L}]+", True),
    (r"[[a-z]A-Z]+", True), (r"\s?+\p{L}++", True), (r"(?:[.,]\p{L}*)", True),
    (r"(?i:'s)? ?[^\s\p{L}]+", False), (r"\w+ \w+", False), (r"(?:\w+ ?)+", False), (r"(\w|\s){2}", False),
    (r"a(x|)[.]", False), ("[[a-z] ]+", False),
    (r"\p{L}+(?!\S)", False), (r"\p{L}+$", False), (r"\p{L}+(?=x)", False), (r"(?<=a)b", False), (r"\bx", False),
    (r"(?>a)", False), (r"(a)\1", False), (r"\x{61}", False), (r"\p{N}*", False), (r"a)", False), ("[a", False),
    ("(" * 3000 + ")" * 3000, False),
])
def test_matches_with_an_end_behind_a_letter(pattern: str, separate: bool) -> None:
    assert separates(pattern, LETTERS, ENDS) == separate


def test_each_letter_is_a_match_by_itself() -> None:
    assert matches_each(r" ?\p{L}+", LETTERS) and matches_each(r"\s?[a-z]|[^\s]", LETTERS)
    assert not matches_each(r"[a-z]+", LETTERS) and not matches_each(r"\s\p{L}+", LETTERS)
    assert not matches_each(r"\p{L}\p{L}", LETTERS)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_matches_does_not_depend_on_what_is_behind_a_cut(pattern: str) -> None:
    """Texts are split as a whole and in two parts, at each place between a letter and an end."""
    separate = separates(pattern, LETTERS, ENDS)
    split, chance, same = pre_tokenizers.Split(Regex(pattern), "removed"), random.Random(5), True
    for _ in range(60):
        text = "".join(chance.choice(LETTERS + 2 * ENDS + "'1$s") for _ in range(14))
        left = {i for piece, (a, b) in split.pre_tokenize_str(text) for i in range(a, b)}
        for at in range(1, len(text)):
            if text[at - 1] in LETTERS and text[at] in ENDS:
                parts = {i for piece, (a, b) in split.pre_tokenize_str(text[:at]) for i in range(a, b)}
                parts |= {at + i for piece, (a, b) in split.pre_tokenize_str(text[at:]) for i in range(a, b)}
                same = same and parts == left
    assert same or not separate
