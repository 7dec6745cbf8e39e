"""The engine: requests of many threads that share forward passes, generation and sampling."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .beams import BeamSearch
    from .candidate import Delta
    from .completion import Choice, Completion, Score, SpeculationReport, TokenLogprob, TopLogprob
    from .embedding import Embedding
    from .engine import MAX_QUEUE, Engine
    from .generation import Generation
    from .pass_times import SHARED_STEP, PassTimes
    from .progress import Progress
    from .request import Request, Stream
    from .sampler import Sampled, Sampler
    from .scoring import Scoring
    from .speculation.controller import Speculation
    from .speculation.costs import Times
    from .speculation.draft_model import DraftModel
    from .speculation.drafter import Drafter
    from .speculation.prompt_lookup import PromptLookup
    from .speculation.self_draft import DraftHead, SelfDraft
    from .step import run_alone
    from .task import Task, too_long
    from .token_budget import MAX_ITL, TokenBudget, urgency

__all__ = ["MAX_ITL", "MAX_QUEUE", "SHARED_STEP", "BeamSearch", "Choice", "Completion", "Delta", "DraftHead",
           "DraftModel", "Drafter", "Embedding", "Engine", "Generation", "PassTimes", "Progress", "PromptLookup",
           "Request", "Sampled", "Sampler", "Score", "Scoring", "SelfDraft", "Speculation", "SpeculationReport",
           "Stream", "Task", "Times", "TokenBudget", "TokenLogprob", "TopLogprob", "run_alone", "too_long", "urgency"]
__getattr__ = lazily(__name__, {
    "beams": "BeamSearch", "candidate": "Delta", "progress": "Progress",
    "completion": "Choice Completion Score SpeculationReport TokenLogprob TopLogprob",
    "speculation.costs": "Times", "speculation.draft_model": "DraftModel", "speculation.drafter": "Drafter",
    "speculation.prompt_lookup": "PromptLookup", "generation": "Generation", "pass_times": "SHARED_STEP PassTimes",
    "engine": "MAX_QUEUE Engine", "token_budget": "MAX_ITL TokenBudget urgency", "embedding": "Embedding",
    "request": "Request Stream", "step": "run_alone", "task": "Task too_long", "sampler": "Sampled Sampler",
    "scoring": "Scoring", "speculation.self_draft": "DraftHead SelfDraft", "speculation.controller": "Speculation",
})
