"""Text in and out: tokenizers, streaming detokenisation, chat templates, stop strings."""

from .chat import FOLDER, ChatTemplate
from .stops import StopStrings
from .stream import StreamDecoder
from .tokenizer import Tokenizer

__all__ = ["FOLDER", "ChatTemplate", "StopStrings", "StreamDecoder", "Tokenizer"]
