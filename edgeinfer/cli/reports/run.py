"""The JSON object of `edgeinfer run`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ... import registry
from ...base.process import peak_rss_bytes
from . import decision

if TYPE_CHECKING:
    from ...engine import Choice, Completion, SpeculationReport, TokenLogprob
    from ...llm import LLM

JSON_FIELDS = {
    "run": {
        "model": "as given",
        "text": "generated text of the first sample, or of the best beam",
        "token_ids": "its tokens, without the end token",
        "score": "of the best beam: the sum of its tokens' log-probabilities, the end token's too, over their number "
        "to the power of the length penalty; null without --beams",
        "prompt_tokens": "tokens of the prompt, with the beginning-of-text token",
        "cached_tokens": "prompt tokens that came from the prompt cache",
        "completion_tokens": "generated tokens of all samples, without end tokens",
        "finish_reason": "stop, length (max tokens or full context) or cancelled",
        "seed": "of the random choices; the same seed gives the same text",
        "ttft_ms": "from the request to the first token; null without one",
        "tpot_ms": "time per token after the first; null under 2 tokens",
        "tok_per_s": "tokens per second after the first, all samples together; null under 2 tokens",
        "load_ms": "opening the model",
        "ttft_process_ms": "from the start of the process to the first text; null with several samples or beams",
        "planned_bytes": "the memory plan's total",
        "device_bytes": "of a GPU's memory: `planned`, and `measured` as taken since the model was opened; else null",
        "peak_rss_bytes": "peak memory of the process; null if the system does not report it",
        "isa": "instruction set, or the provider of onnxruntime",
        "threads": "worker threads",
        "ctx": "context in tokens",
        "kv": "type of the KV cache",
        "estimate": "after a probe: `decode` and `prompt`, each with `t_per_s`, `low`, `high` as predicted and "
        "`measured` (of decoding with draft tokens: the speed without them, by `gain` of `speculation`), "
        "`miss`; `basis`, `error`, `error_source`; else null",
        "offload": "where weights do not fit and are read from storage: `decision` (streamed, sparse from flash, or "
        "experts from flash), `walks`, `flash_bytes` read in them, `flash_bytes_per_token` (streamed: of a forward "
        "pass, which draft tokens and samples share; else of a token that was run, a draft token or not), "
        "`io_wait_ms`, `direct` (past the page cache); `layers` that are streamed; or `hot_share` of the neurons, "
        "which is in memory, and `hit_rate` of the cache of the others; or `kept_share` of the experts, which the "
        "cache holds, and its `hit_rate`; else null",
        "quality": "where the run approximates: `setting`, `kld_mean` as measured or null, `said`, `by_itself`: "
        "whether it was added automatically; else null",
        "decision": decision.FIELD,
        **registry.fields("run"),
        "speculation": "unless --speculate off: `drafter`, `state` (on; off, where it was measured to be slower; idle, "
        "where there was nothing to draft), `walks` that verified draft tokens, `drafted`, `accepted`, "
        "`accepted_per_position`, `tokens_per_walk`, and `gain`: speed over that without draft tokens; the last two "
        "null without a forward pass",
        "logprobs": "with --logprobs: per token `token_id`, `text`, `logprob`, `top`",
        "choices": "with several samples: per sample `index`, `text`, `token_ids`, `finish_reason`, `logprobs`, "
        "`score`; the best beams first",
    },
}
"""Fields of the JSON object, by command."""


def run_object(llm: LLM, completion: Completion, load_ms: float, first_ms: float | None) -> dict[str, Any]:
    """Return the JSON object of a run; `first_ms` is the age of the process when the first text was there."""
    config = llm.runner.config
    out: dict[str, Any] = {
        "model": llm.name, "text": completion.text, "token_ids": completion.token_ids, "score": completion.score,
        "prompt_tokens": completion.prompt_tokens, "cached_tokens": completion.cached_tokens,
        "completion_tokens": completion.completion_tokens, "finish_reason": completion.finish_reason,
        "seed": completion.seed, "ttft_ms": completion.ttft_ms, "tpot_ms": completion.tpot_ms,
        "tok_per_s": completion.tok_per_s, "load_ms": load_ms, "ttft_process_ms": first_ms,
        "device_bytes": None if (used := llm.runner.device_used_bytes) is None else
        {"planned": llm.plan.device_bytes, "measured": used},
        "planned_bytes": llm.plan.total_bytes, "peak_rss_bytes": peak_rss_bytes(), "isa": llm.runner.isa,
        "threads": config.threads, "ctx": config.ctx, "kv": config.kv,
    }
    if completion.logprobs is not None:
        out["logprobs"] = [logprob_object(item) for item in completion.logprobs]
    if len(completion.choices) > 1:
        out["choices"] = [choice_object(choice) for choice in completion.choices]
    return out


def speculation_object(found: SpeculationReport | None) -> dict[str, Any] | None:
    """Return the effect of draft tokens as a JSON object; None if drafting was off."""
    return asdict(found) if found else None


def choice_object(choice: Choice) -> dict[str, Any]:
    """Return one sample as a JSON object."""
    out: dict[str, Any] = {
        "index": choice.index, "text": choice.text, "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason, "score": choice.score,
    }
    if choice.logprobs is not None:
        out["logprobs"] = [logprob_object(item) for item in choice.logprobs]
    return out


def logprob_object(item: TokenLogprob) -> dict[str, Any]:
    """Return one token's log-probability as a JSON object."""
    top = [one._asdict() for one in item.top]
    return {"token_id": item.token_id, "text": item.text, "logprob": item.logprob, "top": top}
