"""The engine: requests that take turns at a runner, generation and sampling."""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

if TYPE_CHECKING:
    from .completion import Choice, Completion, TokenLogprob
    from .generation import Generation
    from .requests import Request, RequestQueue, Stream
    from .sampling import Sampled, Sampler

__all__ = ["Choice", "Completion", "Generation", "Request", "RequestQueue", "Sampled", "Sampler", "Stream",
           "TokenLogprob"]
__getattr__ = lazily(__name__, {
    "completion": "Choice Completion TokenLogprob", "generation": "Generation",
    "requests": "Request RequestQueue Stream", "sampling": "Sampled Sampler",
})
