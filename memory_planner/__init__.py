"""Placement of every byte: regions, lifetimes, budgets and the pool of KV blocks. Nothing here allocates."""

from .alternatives import Alternative, Placer, alternatives, cold, kept_experts, largest_ctx, streamed
from .blocks import BlockPool, shared_blocks
from .budget import available_bytes, default_threads, process_budget, serving_share
from .budget_fit import fit, fits, fitting, refusal
from .cold import ColdPlan, masked
from .expert_slots import MAX_READ_BYTES, MIN_READ_BYTES, PAGE_BYTES, READ_BYTES, READERS, ExpertsPlan, moes
from .kv_pool import largest
from .lifetimes import Placement, place_activations
from .plan import DEVICE, RESIDENT, STREAM_BUFFERS, MemoryPlan, Region, Request
from .planner import PYTHON_RESERVE_BYTES, VOCABULARY_RESERVE_BYTES, DraftMemory, Planner, scratch, sizes_of
from .pool_budget import fill_budget, largest_pool, pool_error, within
from .reasons import held_words
from .request import (
    budget_of,
    default_ctx,
    draft_config,
    draft_memory_of,
    fills,
    in_memory,
    own_pool,
    resolve,
    to_request,
)
from .shared_allocations import extents
from .state import SLOT_UNIT
from .stream_layers import stream
from .weights import mapped_spans
from .windows import MARGIN_TOKENS, Windowed

__all__ = [
    "DEVICE", "MARGIN_TOKENS", "MAX_READ_BYTES", "MIN_READ_BYTES", "PAGE_BYTES", "PYTHON_RESERVE_BYTES", "READERS",
    "READ_BYTES", "RESIDENT", "SLOT_UNIT", "STREAM_BUFFERS", "VOCABULARY_RESERVE_BYTES", "Alternative", "BlockPool",
    "ColdPlan", "DraftMemory", "ExpertsPlan", "MemoryPlan", "Placement", "Placer", "Planner", "Region", "Request",
    "Windowed", "alternatives", "available_bytes", "budget_of", "cold", "default_ctx", "default_threads",
    "draft_config", "draft_memory_of", "extents", "fill_budget", "fills", "fit", "fits", "fitting", "held_words",
    "in_memory", "kept_experts", "largest", "largest_ctx", "largest_pool", "mapped_spans", "masked", "moes", "own_pool",
    "place_activations", "pool_error", "process_budget", "refusal", "resolve", "scratch", "serving_share",
    "shared_blocks", "sizes_of", "stream", "streamed", "to_request", "within",
]
