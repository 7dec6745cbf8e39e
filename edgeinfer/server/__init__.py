"""The HTTP server: OpenAI's, ollama's and Anthropic's APIs over the engine (extra ``server``)."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .batch import Answered, Answerer, InProcess, Results, Row, Rows, answer_all, line_of, private_server
    from .models import Models
    from .program import bound, serve
    from .server import Server, application
    from .settings import ServerConfig

__all__ = ["Answered", "Answerer", "InProcess", "Models", "Results", "Row", "Rows", "Server", "ServerConfig",
           "answer_all", "application", "bound", "line_of", "private_server", "serve"]
__getattr__ = lazily(__name__, {
    "batch": "Answered Answerer InProcess Results Row Rows answer_all line_of private_server", "models": "Models",
    "program": "bound serve", "server": "Server application", "settings": "ServerConfig"})
