"""Guided decoding: JSON, JSON schemas, regular expressions and grammars, as masks over the vocabulary.

llguidance (https://github.com/guidance-ai/llguidance) compiles the grammars and computes which tokens may come next. It
is an optional package (extra ``structured``).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..base.text_form import JSON_OBJECT, JSON_SCHEMA, REGEX, TextForm
from ..errors import FormError, RequestError, UsageError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

MAX_ITEMS, MAX_STATES, MAX_FUEL = 20_000, 100_000, 1_000_000
"""Limits of llguidance on a grammar: items in a row of its parser, states of its lexer, and steps to make them."""
MAX_FORCED = 4096
"""Most forced tokens in a row: each step looks at all of them."""
KEPT_FORMS = 32
"""Compiled grammars that are kept for requests to come."""
JSON_OPTIONS = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}", "lenient": False, "coerce_one_of": False}
"""Options of llguidance, which override a schema's ``x-guidance``. Between the parts of JSON stands a space, or a new
line with its indent: without a limit small models write nothing else. Unsupported keywords are refused."""
WORD_BITS = 32


class GrammarCompiler:
    """Compiles grammars for guided decoding with one model.

    Parameters
    ----------
    tokenizer : Tokenizer
    vocab_size : length of the model's logits
    eos_ids : tokens that end a text

    Raises
    ------
    RequestError
        llguidance cannot use the tokenizer.
    UsageError
        llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]):
        llguidance = _llguidance()
        self._vocab_size = vocab_size
        ends = sorted(i for i in eos_ids if i < vocab_size)  # a tokenizer may have more ids than the model has logits
        try:
            vocabulary = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, ends))
            self._tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=ends or None)
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError("Texts of a given form need a tokenizer that llguidance can use, and it refuses this "
                               f"one: {' '.join(str(error).split())[:300]}") from None
        self._limits = llguidance.LLParserLimits(max_items_in_row=MAX_ITEMS, initial_lexer_fuel=MAX_FUEL,
                                                 max_lexer_states=MAX_STATES, verbose_errors=False)
        self._compiled: OrderedDict[TextForm, Any] = OrderedDict()

    def begin(self, form: TextForm) -> Constraint:
        """Return the constraint of a new text; raises `FormError` for a form that is invalid or too large."""
        matcher = self._compiled.pop(form, None)
        if matcher is None:
            matcher = self._compile(form)
        self._compiled[form] = matcher
        while len(self._compiled) > KEPT_FORMS:
            self._compiled.popitem(last=False)
        return Constraint(matcher.deep_copy(), self._vocab_size)

    def _compile(self, form: TextForm) -> Any:
        llguidance = _llguidance()
        matchers = llguidance.LLMatcher
        try:
            if form.kind == JSON_OBJECT:
                grammar = matchers.grammar_from_json_schema({"type": "object"}, overrides=JSON_OPTIONS)
            elif form.kind == JSON_SCHEMA:
                grammar = matchers.grammar_from_json_schema(form.source, overrides=JSON_OPTIONS)
            elif form.kind == REGEX:
                grammar = matchers.grammar_from_regex(form.source)
            else:
                grammar = llguidance.grammar_from("gbnf" if "::=" in form.source else "lark", form.source)
        except (ValueError, RecursionError) as error:
            raise _refused(form, str(error)) from None
        matcher = matchers(self._tokenizer, grammar, log_level=0, limits=self._limits)
        forced = matcher.compute_ff_tokens()
        if matcher.is_error():
            raise _refused(form, _why(matcher))
        if len(forced) > MAX_FORCED:
            raise _refused(form, _too_many(forced))
        return matcher


class Constraint:
    """The state of guided decoding for one text.

    Attributes
    ----------
    words : uint32 array
        One bit for each token, set if it may come next, lowest bit of a word first; valid from `prepare` to the next
        `accept`.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self.words: NDArray[np.uint32] = np.zeros(-(-vocab_size // WORD_BITS), np.uint32)
        self._known = False
        self._refused = ""
        """Reason for which the text cannot continue."""

    def prepare(self) -> None:
        """Compute the mask of the next token; it is empty if the form cannot be followed (`check`)."""
        if not self._known:
            self._fill(self.words)
            self._known = True

    def mask(self) -> NDArray[np.uint32]:
        """Return the tokens that may come next, as bits."""
        self.prepare()
        self.check()
        return self.words

    def check(self) -> None:
        """Raise `FormError` if the form cannot be followed, such as one that takes too much time or memory."""
        if self._refused or self._matcher.is_error():
            raise self._failure()

    def _fill(self, words: NDArray[np.uint32]) -> None:
        """Compute a mask; it is empty where the grammar fails at it, for instance at its limits."""
        if not self._refused and not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if not self._matcher.is_error():
                return
        words[:] = 0

    def _failure(self) -> FormError:
        return FormError(f"The form of the text cannot be followed: {self._refused or _why(self._matcher)}")

    def accept(self, token_id: int) -> bool:
        """Append a token that may come next; returns whether the text is complete: nothing can follow."""
        if not self._matcher.consume_token(token_id):
            raise self._failure()
        self._known = False
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def forced(self, most: int) -> list[int]:
        """Return the tokens that must come next, `most` at most; none if there is a choice.

        If they exceed `MAX_FORCED`, the next mask is empty, and `check` raises. Must not raise: other requests share
        this step.
        """
        found = self._matcher.compute_ff_tokens()
        if len(found) > MAX_FORCED:
            self._refused, self._known, found = _too_many(found), False, []
        return list(found[:most])

    def possible(self, proposal: Items[int]) -> int:
        """Return the number of leading draft tokens that the grammar allows."""
        return 0 if self._matcher.is_stopped() else int(self._matcher.validate_tokens(list(proposal)))

    def prepare_draft(self, proposal: Items[int], masks: Items[NDArray[np.uint32]]) -> None:
        """Compute the mask of the next token, and those after each token of a draft that is `possible`.

        Must not raise: other requests share this step.
        """
        self.prepare()
        for token_id, words in zip(proposal, masks, strict=True):
            self._matcher.consume_token(token_id)
            self._fill(words)
        self._matcher.rollback(len(proposal))

    def drafting(self) -> Callable[[int], NDArray[np.uint32] | None]:
        """Begin a draft: returns a function that takes the next draft token and returns the mask after it."""
        self.prepare()  # a draft begins under this mask
        matcher = self._matcher.deep_copy()

        def mask_after(token_id: int) -> NDArray[np.uint32] | None:
            words = np.zeros_like(self.words)
            if not matcher.is_stopped() and matcher.consume_token(token_id) and not matcher.is_stopped():
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            return words

        return mask_after

    def fork(self) -> Constraint:
        """Return an independent copy."""
        other = Constraint(self._matcher.deep_copy(), 0)
        other.words, other._known = self.words.copy(), self._known
        return other


class _Vocabulary:
    """A tokenizer in the form that llguidance expects: the bytes of each token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: list[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)

        self._of_byte = {token: i for i, token in reversed([*enumerate(self.tokens)]) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """Return tokens of exactly these bytes: some tokenizers replace characters, as SentencePiece does U+2581."""
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        ids = self._tokenizer.encode(data.decode("utf-8", "replace"), add_bos=False)
        if b"".join(self.tokens[i] for i in ids) != data and all(data[i : i + 1] in self._of_byte
                                                                  for i in range(len(data))):
            return [self._of_byte[data[i : i + 1]] for i in range(len(data))]
        return ids


_EXCERPT = re.compile(r"\n *\d+ \| ")
"""Beginning of the grammar's lines, which llguidance repeats after its error."""


def _refused(form: TextForm, why: str) -> FormError:
    reason = _EXCERPT.split(why, maxsplit=1)[0]
    return FormError(f"The {form.kind.replace('_', ' ')} cannot be used: {' '.join(reason.split())[:300]}")


def _too_many(forced: Items[int]) -> str:
    return f"it forces {len(forced)} tokens in a row, and at most {MAX_FORCED} are taken; shorten its literals."


def _why(matcher: Any) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:300]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UsageError("Texts of a given form need the package llguidance; install it with: "
                         "pip install 'edgeinfer[structured]'") from None
    return llguidance
