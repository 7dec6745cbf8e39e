"""Text in and out: tokenizers, streaming detokenisation, chat templates, stop strings."""

from ..base.lazy_import import lazily
from .chat import FOLDER, ChatTemplate
from .stops import StopStrings
from .stream import StreamDecoder
from .tokenizer import FILES as TOKENIZER_FILES
from .tokenizer import Tokenizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .structured import Constraint, GrammarCompiler

__all__ = ["FOLDER", "TOKENIZER_FILES", "ChatTemplate", "Constraint", "GrammarCompiler", "StopStrings", "StreamDecoder",
           "Tokenizer"]
__getattr__ = lazily(__name__, {"structured": "Constraint GrammarCompiler"})
