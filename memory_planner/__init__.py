"""Where every byte lives: regions, lifetimes, budgets and the pool of KV blocks. Nothing here allocates."""

from .blocks import BlockPool
from .budget import available_bytes, check_budget, default_threads
from .lifetimes import Placement, place_activations
from .plan import SPLIT_TOKENS, MemoryPlan, Region, Request, make_plan

__all__ = [
    "SPLIT_TOKENS",
    "BlockPool",
    "MemoryPlan",
    "Placement",
    "Region",
    "Request",
    "available_bytes",
    "check_budget",
    "default_threads",
    "make_plan",
    "place_activations",
]
