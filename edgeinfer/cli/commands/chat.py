"""`edgeinfer chat`: the chat on a terminal with a model on a server."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ...errors import UsageError
from .. import options


def chat(
    url: Annotated[str, typer.Argument(metavar="URL", show_default=False,
                                       help="Server with OpenAI's API, such as http://localhost:8080.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="Model of the server.  [default: its first one]",
                                       show_default=False)] = "",
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.", show_default=False)] = None,
    api_key: Annotated[str | None, options.option(
        "--api-key", metavar="KEY", help="Key that the server asks for.", show_default=False,
        variable="EDGEINFER_API_KEY")] = None,
) -> int:
    """Chat with a model that a server runs.

    The chat is that of 'edgeinfer run': /help lists its commands, /set changes temperature and other settings, Ctrl-C
    stops the answer, Ctrl-D leaves. The server may be 'edgeinfer serve' or any other with OpenAI's API.

    \b
    Examples:
      edgeinfer chat http://localhost:8080
      edgeinfer chat https://models.example.org --model small --api-key KEY
    """
    from ...base.api_client import ApiClient
    from ..chat.line_editor import draws, editing_reader, plain_reader
    from ..chat.loop import talk
    from ..chat.remote import RemoteConversation

    if sys.stdin is None:
        raise UsageError("There is no standard input to read messages from; use /v1/chat/completions of the server.")
    conversation = RemoteConversation(ApiClient(url, api_key or os.environ.get("EDGEINFER_API_KEY")), model, system, {})
    return talk(conversation, editing_reader() if draws() else plain_reader())
