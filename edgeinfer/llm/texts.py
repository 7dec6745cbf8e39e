"""Texts and answers to conversations, whole, piece by piece, or of many prompts together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..base.validation import checked
from .requests import TEXTS_OR_IDS, Requests, reusing, run_together

if TYPE_CHECKING:
    from ..engine import Completion, Stream
    from .options import ChatOptions, Messages, Prompt, RequestOptions, Unpack


class Texts(Requests):
    """The part of `LLM` that generates text."""

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> str:
        """Return the continuation of a text as it is; for a model trained on conversations see `chat`.

        Parameters
        ----------
        prompt : str, or token ids
        options : fields of `GenerationConfig` (``max_tokens``, ``temperature``, ``stop``, ...), and those of `stream`;
            or ``config``, a `GenerationConfig`, in which options given by name replace its fields

        Raises
        ------
        RequestError
            The prompt is empty, longer than the context, or holds a token id outside the vocabulary.
        UsageError
            An option is unknown, of a wrong type or out of its range. None stands for the default.
        ClosedError
            The model was closed.
        """
        return self.complete(prompt, **options).text

    def complete(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """Generate as `generate` does, and return tokens, times, seed, finish reason, log-probabilities and all
        samples.

        A request that `cancel` ends returns the text generated so far, with finish_reason ``cancelled``.
        """
        return self.request(prompt, options).finish()

    def batch(self, prompts: Iterable[Prompt], **options: Unpack[RequestOptions]) -> list[Completion]:
        """Return the outcomes of several prompts, which run together as far as `max_sequences` and memory allow.

        The texts are those of `complete`, whatever runs beside them.

        Parameters
        ----------
        prompts : texts or lists of token ids, as many as there are
        options : as for `complete`, for all of them; `reuse` is on, so that the common prefix of prompts is computed
            once

        Raises
        ------
        RequestError
            One of the prompts cannot be run; the others are cancelled.
        """
        listed = checked("prompts", prompts, TEXTS_OR_IDS)
        requests = (self.request(one, reusing(options)) for one in listed)
        return run_together(requests, 2 * self.runner.config.max_sequences)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """Generate as `generate` does, piece by piece.

        Parameters
        ----------
        prompt : str, or token ids
        options : fields of `GenerationConfig`, of which `n` must be 1, and

            * ``reuse`` (bool): start from the common beginning with the last request that had this option, instead of
              computing it again; the text is the same, unless a predictor has decoded a part of that beginning or it
              was pruned;
            * ``prompt_cache`` (path): start from the prompt saved there, and save this one;
            * ``generated`` (token ids): continue after these tokens of the answer, as the run that generated them would
              have; only new text is given;
            * ``progress`` (callable): called with ("prompt", done, total, "") in tokens while the prompt is processed.

        Returns
        -------
        Stream
            Iterator of str; closing it ends the request, and `Stream.completion` then has the outcome.
        """
        from ..engine import Stream

        return Stream(self.request(prompt, options, stream=True))

    def chat(self, messages: Messages, *, tools: Messages | None = None, **options: Unpack[ChatOptions]) -> str:
        """Return the answer to a conversation, rendered with the model's chat template.

        Parameters
        ----------
        messages : each with ``role`` and ``content``
        tools : JSON schemas of functions that the model may call, for templates that know them
        options : as for `stream`, and ``template_options``: a mapping of settings that the template knows; `reuse` is
            on, so that a turn computes only new tokens

        Raises
        ------
        RequestError
            The model has no chat template, or the messages are not of this form.
        TokenizerError
            The template refuses these messages.
        """
        return self.chat_request(messages, tools, options).finish().text

    def chat_stream(self, messages: Messages, *, tools: Messages | None = None,
                    **options: Unpack[ChatOptions]) -> Stream:
        """Generate as `chat` does, piece by piece."""
        from ..engine import Stream

        return Stream(self.chat_request(messages, tools, options, stream=True))
