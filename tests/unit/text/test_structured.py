"""The form of a text where its grammar fails: drafts end there, and the text itself says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import RequestError
from edgeinfer.text import Constraint, GrammarCompiler
from edgeinfer.text.structured import MAX_FORCED


class Failing:
    """Stands for a matcher that takes two tokens and fails at its limits on the next mask."""

    def __init__(self, forced: int = 0) -> None:
        self._taken, self._failed, self._forced = 0, False, forced

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return self._failed

    def get_error(self) -> str:
        return "Too many\n items <non-verbose/>"

    def validate_tokens(self, ids: list[int]) -> int:
        return len(ids)

    def consume_token(self, token_id: int) -> bool:
        self._taken += 1
        return True

    def rollback(self, n: int) -> bool:
        self._taken -= n
        return not self._failed

    def unsafe_compute_mask_ptr(self, address: int, nbytes: int) -> None:
        self._failed = self._failed or self._taken == 2

    def compute_ff_tokens(self) -> list[int]:
        return [7] * self._forced


def test_nothing_may_follow_where_the_grammar_fails_within_a_draft_and_the_text_says_why() -> None:
    constraint = Constraint(Failing(), 99)
    masks = [np.ones(4, np.uint32) for _ in range(3)]
    constraint.prepare_draft([5, 6, 7], masks)
    assert masks[0].any() and not masks[1].any() and not masks[2].any()
    constraint.accept(5)
    with pytest.raises(RequestError, match=r"^The form of the text cannot be followed: Too many items$"):
        constraint.mask()


def test_a_form_that_forces_too_much_is_no_draft_and_ends_the_text() -> None:
    constraint = Constraint(Failing(MAX_FORCED + 1), 99)
    constraint.mask()
    assert constraint.forced(8) == []
    constraint.accept(7)
    with pytest.raises(RequestError, match=rf"cannot be followed: it forces {MAX_FORCED + 1} tokens in a row"):
        constraint.mask()
    assert Constraint(Failing(MAX_FORCED), 99).forced(8) == [7] * 8


class Vocabulary:
    """Stands for a tokenizer of single bytes."""

    vocab_size, bos_id, special_ids = 258, None, frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text: str, add_bos: bool) -> list[int]:
        return list(text.encode())


def test_ends_that_have_no_logit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed (extra 'structured')")
    tokenizer: Any = Vocabulary()
    GrammarCompiler(tokenizer, 257, [256, 900])

    def refuse(*given: object, **more: object) -> None:
        raise ValueError("no\n such vocabulary")

    monkeypatch.setattr(llguidance, "LLTokenizer", refuse)
    with pytest.raises(RequestError, match=r"^Texts of a given form need a tokenizer that llguidance can use, and it "
                                           r"refuses this one: no such vocabulary$"):
        GrammarCompiler(tokenizer, 257, [256])
