"""Turn a text, token ids or messages into the tokens of a prompt; each can be cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.process import check_process
from ..base.validation import OBJECT, checked, shown
from ..errors import RequestError, UsageError
from .options import Messages, Prompt

if TYPE_CHECKING:
    from ..engine import Engine
    from ..runner import Cancellation
    from ..text import ChatTemplate, Tokenizer

_SURELY_READ = 32_768
"""Characters of a prompt that are tokenised whatever the context."""


class Prompts:
    """The part of `LLM` that makes prompts."""

    name: str
    path: Path
    chat_template: ChatTemplate | None
    _tokenizer: Tokenizer | None
    _engine: Engine
    _preparing: set[Cancellation]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `RequestError` for a bundle without one."""
        if self._tokenizer is None:
            raise RequestError(f"The bundle {self.path} has no tokenizer; give token ids instead of text.")
        return self._tokenizer

    def chat_ids(self, messages: Messages, /, tools: Messages | None = None, **template_options: Any) -> list[int]:
        """Return the tokens of a conversation up to the beginning of the answer; raises as `chat`."""
        if self.chat_template is None:
            raise RequestError(f"The model {self.name} has no chat template; generate continues a text instead.")
        with self._preparation() as stopped:
            text = self.chat_template.render(messages, tools=tools, **template_options, stopped=stopped)
            return self._encoded(text, stopped, add_bos=False, parse_special=True, leading_space=True)

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a text to continue; raises `RequestError` if it is longer than the context."""
        with self._preparation() as stopped:
            return self._encoded(text, stopped)

    def _continuation_ids(self, text: str) -> list[int]:
        """Return the tokens of a text that continues after a prompt."""
        with self._preparation() as stopped:
            return self._encoded(text, stopped, add_bos=False)

    @property
    def most_prompt_bytes(self) -> int:
        """Bytes of text beyond which no prompt fits the context, whatever they are."""
        return max(_SURELY_READ, self.tokenizer.bytes_per_token() * int(self._engine.runner.config.ctx or 0))

    def _ids(self, prompt: Prompt) -> Iterable[int]:
        if not isinstance(prompt, str):
            if isinstance(prompt, (bytes, bytearray, memoryview, Mapping, Set)) or not hasattr(prompt, "__iter__") \
                    or getattr(prompt, "shape", None) == ():
                raise RequestError(f"The prompt is a {type(prompt).__name__}; it must be text or token ids.")
            return prompt
        if not prompt:
            raise RequestError("The prompt is empty; give some text or at least one token id.")
        return self.prompt_ids(prompt)

    def _encoded(self, text: str, stopped: Callable[[], bool], **how: bool) -> list[int]:
        """Tokenise a prompt, but no more of it than tells that it is too long."""
        from ..engine import too_long

        runner = self._engine.runner
        ctx = int(runner.config.ctx or 0)
        if len(text) > _SURELY_READ and len(text) > self.most_prompt_bytes:
            least = len(text) // self.tokenizer.bytes_per_token()
            raise too_long(f"has {len(text)} characters, at least {least} tokens", least, runner)
        ids = self.tokenizer.encode(text, **how, most=4 * ctx, stopped=stopped)
        if len(ids) > 4 * ctx:
            raise too_long(f"has more than {4 * ctx} tokens", 4 * ctx + 1, runner)
        return ids

    @contextmanager
    def _preparation(self) -> Iterator[Callable[[], bool]]:
        """Return a function that a prompt's preparation polls: whether `cancel` or `close` has come since it began."""
        from ..runner import Cancellation

        check_process(self._engine.process)  # forked: holders of the tokenizer's or template's locks do not exist here
        wish = Cancellation()
        self._preparing.add(wish)
        try:
            yield lambda: wish.asked
        finally:
            self._preparing.discard(wish)


def template_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the template among the options of a chat, and the other options."""
    rest = dict(options)
    given = rest.pop("template_options", None)
    named = {} if given is None else checked("template_options", given, OBJECT)
    for name in named:
        if not isinstance(name, str) or name in ("messages", "tools", "stopped"):
            raise UsageError(f"template_options names {shown(name)}; its names must be text, and none of messages, "
                             "tools and stopped, which have their own meaning.")
    return dict(named), rest
