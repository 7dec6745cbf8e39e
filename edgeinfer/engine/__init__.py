"""The engine: requests that take turns at a runner, generation and sampling."""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

if TYPE_CHECKING:
    from .beams import BeamSearch
    from .completion import Choice, Completion, Score, SpeculationReport, TokenLogprob, TopLogprob
    from .costs import Times
    from .draft_model import DraftModel
    from .drafting import Drafter
    from .generation import Generation, too_long
    from .lookup import PromptLookup
    from .requests import Request, RequestQueue, Stream
    from .sampling import Sampled, Sampler
    from .scoring import Scoring
    from .self_draft import SelfDraft
    from .speculation import Speculation

__all__ = ["BeamSearch", "Choice", "Completion", "DraftModel", "Drafter", "Generation", "PromptLookup", "Request",
           "RequestQueue", "Sampled", "Sampler", "Score", "Scoring", "SelfDraft", "Speculation", "SpeculationReport",
           "Stream", "Times", "TokenLogprob", "TopLogprob", "too_long"]
__getattr__ = lazily(__name__, {
    "beams": "BeamSearch", "completion": "Choice Completion Score SpeculationReport TokenLogprob TopLogprob",
    "costs": "Times", "draft_model": "DraftModel", "drafting": "Drafter", "generation": "Generation too_long",
    "lookup": "PromptLookup", "requests": "Request RequestQueue Stream", "sampling": "Sampled Sampler",
    "scoring": "Scoring", "self_draft": "SelfDraft", "speculation": "Speculation",
})
