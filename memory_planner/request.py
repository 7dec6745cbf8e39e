"""Resolution of a user's settings into a request for the planner: every open field is filled in."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import RequestError
from edgeinfer.graph import ModelConfig
from edgeinfer.kernels import abi
from edgeinfer.registry import in_use, settled

from .budget import default_threads, process_budget, serving_share
from .plan import MemoryPlan, Request
from .planner import DraftMemory, Planner

DEFAULT_CTX = 4096
MAX_VERIFIED = 16
"""Rows of logits for draft tokens of several sequences together: forward passes of more tokens do not pay."""
RESIDENT = (("*", "resident"), ("rows", "resident"))
"""Homes of weights without mapped ones."""


def default_ctx(model: ModelConfig) -> int:
    """Context of a run that does not say: the model's, at most 4096.

    Where a longer context changes the rotation of all positions (dynamic scaling), that of the training.
    """
    trained = model.rope.original_max_position_embeddings if model.rope.kind == "dynamic" else DEFAULT_CTX
    return min(model.max_position_embeddings, DEFAULT_CTX, trained)


def resolve(config: RuntimeConfig, model: ModelConfig) -> RuntimeConfig:
    """Fill in open fields: context, threads, rows of logits.

    Raises
    ------
    RequestError
        If the context requested is longer than the model's.
    """
    longest = model.max_position_embeddings
    if config.ctx is not None and config.ctx > longest:
        raise RequestError(f"The context of {config.ctx} tokens is longer than the model's {longest}; lower --ctx.")
    ctx = config.ctx or default_ctx(model)
    return replace(config, ctx=ctx, threads=config.threads or default_threads(),
                   prefill_chunk=min(config.prefill_chunk, ctx), outputs=_outputs(config),
                   techniques=settled(config.techniques, model.num_hidden_layers))


def to_request(config: RuntimeConfig, ctx: int | None = None, kv: str | None = None) -> Request:
    """Return the request for a configuration without open fields, with another context or KV type if given."""
    ctx = ctx or config.ctx or DEFAULT_CTX
    outputs = _outputs(config)
    tokens = max(min(config.prefill_chunk, ctx), config.max_sequences, outputs)
    residency = () if config.mmap else RESIDENT
    pool, windows = (ctx, 1) if fills(config) else (config.kv_tokens, config.kv_windows)
    return Request(ctx, kv or config.kv, config.threads or 1, tokens, outputs, config.max_sequences, config.mlock,
                   residency, own_tokens=config.own_tokens, techniques=in_use(config), kv_tokens=pool,
                   kv_windows=windows, kv_memory=config.kv_memory, state_memory=config.state_memory)


def own_pool(config: RuntimeConfig) -> bool:
    """Return whether the KV pool has a size of its own."""
    return config.kv_tokens is not None or config.kv_memory is not None


def fills(config: RuntimeConfig) -> bool:
    """Return whether the KV pool gets the rest of the budget; its request has the least, one context."""
    return config.fill_budget and not own_pool(config)


def in_memory(request: Request) -> Request:
    """Return the request with weights in memory of the process, where no pages of a mapped file are taken away.

    Tables of which a token reads a row stay in the file, unless nothing is to be mapped.
    """
    return replace(request, residency=RESIDENT[:1 + (RESIDENT[1] in request.residency)])


DRAFT = "draft"
"""Option by which a run has a draft model."""
_BEHIND = 32
"""Tokens of a prompt that sequences of a draft may have for themselves: it ends the prompts of all texts together."""


def draft_memory_of(draft: Planner) -> DraftMemory:
    """Let plans have room for a draft model, which follows the same texts in sequences of its own."""
    def both(plan: MemoryPlan) -> MemoryPlan:
        return plan.with_draft(draft.plan(to_draft_request(plan.request)))

    return DraftMemory(both, {DRAFT: "none"})


def to_draft_request(request: Request) -> Request:
    """Return the request for the draft model of a run: it reads the same texts and samples one token of each at a time.
    """
    residency = RESIDENT if RESIDENT[0] in request.residency else ()
    own = None if request.own_tokens is None else request.own_tokens + _BEHIND
    pool = None if request.kv_tokens is None else min(
        request.kv_tokens + request.sequences * (_BEHIND + abi.BLOCK_TOKENS),
        request.full_pool.kv_blocks * abi.BLOCK_TOKENS)
    windows = None if request.kv_tokens is None else request.windows
    return replace(request, outputs=request.sequences, residency=residency, hot=(), slots=0, expert_slots=0,
                   own_tokens=own, techniques=(), kv_tokens=pool, kv_windows=windows, state_memory=None)


def draft_config(plan: MemoryPlan, budget_bytes: int) -> RuntimeConfig:
    """Return the configuration of the draft model in a plan that has room for it."""
    request = to_draft_request(plan.request)
    return RuntimeConfig(request.ctx, request.kv, None, budget_bytes, request.tokens, request.sequences,
                         own_tokens=request.own_tokens, kv_tokens=request.kv_tokens, kv_windows=request.kv_windows,
                         mlock=request.mlock, mmap=not request.residency)


def _outputs(config: RuntimeConfig) -> int:
    """Rows of logits: one for each sequence, and with draft tokens one after each of them."""
    checked = 1 + config.draft_tokens
    sequences = config.verified_sequences or config.max_sequences
    return max(config.outputs, config.max_sequences, min(sequences * checked, max(checked, MAX_VERIFIED)))


def budget_of(config: RuntimeConfig) -> int:
    """Return the limit in bytes: the one requested, else the available memory, or most of it for a run that
    takes all."""
    if config.budget_bytes is not None:
        return config.budget_bytes
    return serving_share(process_budget()) if fills(config) else process_budget()
