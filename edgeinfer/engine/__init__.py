"""The engine: requests that take turns at a runner, generation and sampling."""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

if TYPE_CHECKING:
    from .beams import BeamSearch
    from .completion import Choice, Completion, TokenLogprob
    from .draft_model import DraftModel
    from .generation import Generation, too_long
    from .requests import Request, RequestQueue, Stream
    from .sampling import Sampled, Sampler

__all__ = ["BeamSearch", "Choice", "Completion", "DraftModel", "Generation", "Request", "RequestQueue", "Sampled",
           "Sampler", "Stream", "TokenLogprob", "too_long"]
__getattr__ = lazily(__name__, {
    "beams": "BeamSearch", "completion": "Choice Completion TokenLogprob", "draft_model": "DraftModel",
    "generation": "Generation too_long",
    "requests": "Request RequestQueue Stream", "sampling": "Sampled Sampler",
})
