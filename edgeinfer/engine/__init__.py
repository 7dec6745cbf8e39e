"""The engine: requests that take turns at a runner, generation and sampling."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .beams import BeamSearch
    from .completion import Choice, Completion, Score, SpeculationReport, TokenLogprob, TopLogprob
    from .generation import Generation, too_long
    from .requests import Request, RequestQueue, Stream
    from .sampler import Sampled, Sampler
    from .scoring import Scoring
    from .speculation.controller import Speculation
    from .speculation.costs import Times
    from .speculation.draft_model import DraftModel
    from .speculation.drafter import Drafter
    from .speculation.prompt_lookup import PromptLookup
    from .speculation.self_draft import SelfDraft

__all__ = ["BeamSearch", "Choice", "Completion", "DraftModel", "Drafter", "Generation", "PromptLookup", "Request",
           "RequestQueue", "Sampled", "Sampler", "Score", "Scoring", "SelfDraft", "Speculation", "SpeculationReport",
           "Stream", "Times", "TokenLogprob", "TopLogprob", "too_long"]
__getattr__ = lazily(__name__, {
    "beams": "BeamSearch", "completion": "Choice Completion Score SpeculationReport TokenLogprob TopLogprob",
    "speculation.costs": "Times", "speculation.draft_model": "DraftModel", "speculation.drafter": "Drafter",
    "speculation.prompt_lookup": "PromptLookup", "generation": "Generation too_long",
    "requests": "Request RequestQueue Stream", "sampler": "Sampled Sampler",
    "scoring": "Scoring", "speculation.self_draft": "SelfDraft", "speculation.controller": "Speculation",
})
