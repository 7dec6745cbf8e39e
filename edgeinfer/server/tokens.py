"""Tokens of texts and texts of tokens: /tokenize, /detokenize."""

from __future__ import annotations

from .errors import ApiError
from .http import Call, Reply
from .models import in_thread
from .sampling import check_ids
from .types import DetokenizeRequest, TokenizeRequest


async def tokenize(call: Call) -> Reply:
    """Return the tokens of a text."""
    body = call.read(TokenizeRequest)
    text = body.prompt if body.content is None else body.content
    if text is None:
        raise ApiError(400, "content is missing; give the text.", param="content")
    async with call.server.models.using(body.model) as served:
        tokenizer = served.model.tokenizer
        ids = await in_thread(lambda: tokenizer.encode(text, add_bos=body.add_special,
                                                       parse_special=body.parse_special))
        tokens = [{"id": one, "piece": tokenizer.token_text(one)} for one in ids] if body.with_pieces else ids
        return Reply({"tokens": tokens, "count": len(ids), "max_model_len": served.room})


async def detokenize(call: Call) -> Reply:
    """Return the text of tokens."""
    body = call.read(DetokenizeRequest)
    async with call.server.models.using(body.model) as served:
        check_ids(body.tokens, served, "tokens")
        text = await in_thread(lambda: served.model.tokenizer.decode(body.tokens, skip_special=False))
        return Reply({"content": text, "prompt": text})
