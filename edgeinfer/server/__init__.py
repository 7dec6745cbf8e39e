"""The HTTP server: OpenAI's, ollama's and Anthropic's APIs over the engine (extra ``server``)."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .answers import Arrivals
    from .batch import Answered, Answerer, InProcess, Results, Row, Rows, answer_all, line_of
    from .models import SERVER_BYTES, Models, in_thread
    from .private import private_server
    from .program import bound, serve
    from .server import Server
    from .settings import ServerConfig

__all__ = ["SERVER_BYTES", "Answered", "Answerer", "Arrivals", "InProcess", "Models", "Results", "Row", "Rows",
           "Server", "ServerConfig", "answer_all", "bound", "in_thread", "line_of", "private_server", "serve"]
__getattr__ = lazily(__name__, {
    "answers": "Arrivals", "batch": "Answered Answerer InProcess Results Row Rows answer_all line_of",
    "models": "SERVER_BYTES Models in_thread", "private": "private_server", "program": "bound serve",
    "server": "Server", "settings": "ServerConfig"})
