"""The choice of a format by the chat template."""

from __future__ import annotations

from functools import lru_cache

from .answer_format import AnswerFormat
from .deepseek import DeepSeek
from .gemma import FunctionGemma, Gemma
from .harmony import Harmony
from .json_calls import Hermes, Llama
from .markup import Glm, QwenCoder
from .mistral import Mistral

FORMATS: tuple[type[AnswerFormat], ...] = (Harmony, Gemma, FunctionGemma, DeepSeek, Mistral, Glm, QwenCoder, Hermes,
                                           Llama)
"""Formats in the order in which they are tried: several have ``<tool_call>``."""


class Plain(Hermes):
    """The format of models whose chat template has no tools.

    Calls are read and forced as Hermes writes them, as vLLM's users choose for such models, and which a
    model can be told in its system message.
    """

    name = "plain"
    special = False


@lru_cache(maxsize=16)
def format_of(template_source: str) -> AnswerFormat:
    """Return the format of a model's answers.

    Parameters
    ----------
    template_source : source of its chat template (the one for tools, where there are several); empty for none
    """
    return next((kind for kind in FORMATS if kind.recognises(template_source)), Plain)(template_source)
