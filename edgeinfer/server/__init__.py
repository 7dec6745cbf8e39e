"""The HTTP server: OpenAI's, ollama's and Anthropic's APIs over the engine (extra ``server``)."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .models import Models
    from .program import bound, serve
    from .server import Server, application
    from .settings import ServerConfig

__all__ = ["Models", "Server", "ServerConfig", "application", "bound", "serve"]
__getattr__ = lazily(__name__, {"models": "Models", "program": "bound serve", "server": "Server application",
                                "settings": "ServerConfig"})
