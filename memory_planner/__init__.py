"""Where every byte lives: regions, lifetimes, budgets and the pool of KV blocks. Nothing here allocates."""

from .alternatives import Alternative, alternatives, check_budget, largest_ctx, refusal
from .blocks import BlockPool
from .budget import available_bytes, default_threads, process_budget
from .lifetimes import Placement, place_activations
from .plan import SPLIT_TOKENS, MemoryPlan, Planner, Region, Request, scratch
from .request import default_ctx, resolve, to_request

__all__ = ["SPLIT_TOKENS", "Alternative", "BlockPool", "MemoryPlan", "Placement", "Planner", "Region", "Request",
           "alternatives", "available_bytes", "check_budget", "default_ctx", "default_threads", "largest_ctx",
           "place_activations", "process_budget", "refusal", "resolve", "scratch", "to_request"]
