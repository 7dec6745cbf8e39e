"""JSON object of `edgeinfer estimate`: one device with the curve over the context, or all devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ...registry import Reported, in_use, prompt_share, reports
from ..output import REFUSED, whose_object
from .drafting import draft_object, lookup_object
from .energy import energy_object
from .explain import explained
from .neurons import neurons_object
from .on_gpu import remark
from .questions import Questions
from .run_on import Run, memory_of_users, run_on
from .storage import break_even_object, neuron_bytes, skipping_object, storage_object
from .users import Memory, users_asked

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Estimate

    from ...config import RuntimeConfig
    from ...models.description import ModelDescription
    from .on_gpu import Cards

Drafting = tuple[float, float | None]
"""Tokens that a pass yields, and the cost of drafting as a share of a token; None assumes it."""


def estimate_object(
    model: ModelDescription, profile: DeviceProfile, ctx: int, prompt: int, kv: str, drafting: Drafting,
    asked: RuntimeConfig, sequences: int = 1, cards: Cards | None = None, questions: Questions | None = None,
) -> dict[str, Any]:
    """Return the JSON object of one device, with the curve over the context."""
    run, questions = run_on(model, profile, ctx, kv, asked, sequences, cards), questions or Questions()
    each = prompt + questions.reply
    memory = memory_of_users(run, partial(cards.on, profile) if cards else None, ctx, sequences, each)
    model, profile = run.model, run.profile
    speculation = _speculation(run, ctx, questions)
    if speculation and speculation["draft"]:
        drafting = speculation["tokens_per_pass"], speculation["cost"]
    depths = [depth for depth in (0, *(2**n for n in range(8, 25))) if depth < ctx] + [ctx]
    shared = _model_object(run, ctx, prompt, asked)
    computed = _computed(run, prompt, asked)
    curve = [devices.estimate(profile, run.traffic, depth, prompt, *drafting, computed, sequences) for depth in depths]
    contexts = [{"depth": item.depth, "decode_tok_per_s": item.decode_tok_per_s, "low": item.low, "high": item.high}
                for item in curve]
    further = _asked(run, questions, memory, prompt, computed, lambda depth, together: devices.estimate(
        profile, run.traffic, depth, prompt, *drafting, computed, together))
    return {
        **shared, **_device_object(run, curve[-1], curve[0]), **_drafting_object(drafting),
        "contexts": contexts, "kv_read": _kv_read(run, ctx),
        "explain": explained(model, profile, run.traffic, run.kv, ctx, prompt, run.card) if questions.explain else None,
        "break_even": None if run.card else break_even_object(model, profile),
        "neurons": neurons_object(model, profile),
        "storage_named": bool(questions.storage), "limited": asked.budget_bytes is not None,
        "storage": storage_object(model, profile, run.traffic, run.plan, ctx, questions.storage),
        "skipping": _skipping(run, ctx, questions), "speculation": speculation,
        **further, "energy": energy_object(profile, curve[-1], curve[0].ttft_ms, further["answer"]),
        "energy_asked": questions.energy, "notes": list(questions.notes),
    }


def _asked(run: Run, questions: Questions, memory: Memory, prompt: int, computed: float,
           estimate: Callable[[int, int], Estimate]) -> dict[str, Any]:
    """Return the answers to further questions: the time of a whole answer, and the speed for several users."""
    from edgeinfer.devices import MixedSteps

    tokens = questions.reply
    depth = prompt + tokens // 2
    return {"answer": _answer(estimate, prompt, tokens) if questions.answer else None,
            "users": users_asked(questions.users, MixedSteps(run.profile, run.traffic, depth, computed),
                                 lambda users: estimate(depth, users), prompt, tokens, memory, questions.bounds,
                                 questions.plots)}


def _skipping(run: Run, ctx: int, questions: Questions) -> dict[str, Any] | None:
    """Return whether leaving out zero rows pays, if that was asked."""
    if questions.sparsity is None or run.mode == REFUSED:
        return None
    rows = questions.row_bytes or neuron_bytes(run.model)
    return skipping_object(run.model, run.profile, run.traffic, ctx, questions.sparsity, rows)


def _speculation(run: Run, ctx: int, questions: Questions) -> dict[str, Any] | None:
    """Return the gain of drafting, if that was asked."""
    if draft := questions.draft:
        if run.card:
            both, own = run.card.beside(draft.as_stored, draft.traffic(run.kv))
            memory: tuple[float, bool] = both.device_bytes, run.card.fits(run.profile, both)
        else:
            own = draft.traffic(run.kv)
            total = run.unstreamed_bytes + draft.weight_bytes + own.sequence_bytes_at(ctx)
            memory = total, total <= run.budget_bytes
        return draft_object(run.profile, run.traffic, draft, own, ctx, questions.acceptance, questions.draft_tokens,
                            memory, questions.plots)
    return lookup_object(run.profile, run.traffic, ctx) if questions.lookup else None


def _answer(estimate: Callable[[int, int], Estimate], prompt: int, tokens: int) -> dict[str, Any]:
    """Return the time of a prompt and an answer; a token's is that in the middle of the answer."""
    first, tpot = estimate(0, 1).ttft_ms, 1000 / estimate(prompt + tokens // 2, 1).decode_tok_per_s
    return {"tokens": tokens, "ttft_ms": first, "tpot_ms": tpot,
            "total_ms": None if first is None else first + tpot * (tokens - 1)}


def all_devices_object(
    model: ModelDescription, profiles: list[DeviceProfile], ctx: int, prompt: int, kv: str, drafting: Drafting,
    asked: RuntimeConfig, sequences: int = 1, cards: Cards | None = None, questions: Questions | None = None,
) -> dict[str, Any]:
    """Return the JSON object of all devices."""
    found, shared, questions = [], None, questions or Questions()
    for profile in profiles:
        run = run_on(model, profile, ctx, kv, asked, sequences, cards)
        if shared is None and not run.refused and run.device_bytes is None:
            shared = _model_object(run, ctx, prompt, asked)
        computed = _computed(run, prompt, asked)
        full, empty = (devices.estimate(run.profile, run.traffic, depth, prompt, *drafting, computed, sequences)
                       for depth in (ctx, 0))
        row = _device_object(run, full, empty)
        found.append({**row, "ceiling_tok_per_s": empty.peak_tok_per_s,  # of all speeds of the row
                      "skipping": _skipping(run, ctx, questions)})
    return {**(shared or {}), "notes": list(questions.notes), "devices": found}


def _computed(run: Run, prompt: int, asked: RuntimeConfig) -> float:
    """Return the share of the prompt that is computed."""
    return prompt_share(in_use(asked), prompt, 0, run.model.layers)


def _drafting_object(drafting: Drafting) -> dict[str, Any]:
    accepted, cost = drafting
    return {"accepted": accepted, "draft_cost": devices.DRAFT_SHARE * (accepted - 1) if cost is None else cost,
            "draft_cost_assumed": cost is None and accepted > 1}


def _model_object(run: Run, ctx: int, prompt: int, asked: RuntimeConfig) -> dict[str, Any]:
    """Return the fields that do not depend on the device's speed."""
    model, kept, kv = run.model, run.windows, run.kv
    share, quantisation = (kept["kv_bytes"] / kept["whole_bytes"] if kept else 1), model.quantisation
    return {
        "model": model.name, "source": model.source, "ctx": ctx, "prompt": prompt, "kv": kv,
        "weights": quantisation.weights, "group_size": quantisation.group_size, "layers": model.layers,
        "max_ctx_of_model": model.config.max_position_embeddings, "weight_bytes": run.weight_bytes,
        "bundle_bytes": model.weight_bytes,
        "weight_bytes_read": round(run.traffic.weight_bytes if run.card else model.bytes_per_token), "windows": kept,
        "kv_bytes": kept["kv_bytes"] if kept else ctx * run.position_bytes,
        "total_bytes": run.total_bytes, "unstreamed_bytes": run.unstreamed_bytes,
        **reports(Reported("estimate", asked, model=model, prompt=prompt)),
        "pure": {"weight_bytes": round(model.pure_weight_bytes()),
                 "kv_bytes": round(ctx * model.kv_values_per_position * share), "parameters": model.parameters},
        "bits_per_weight": 8 * run.weight_bytes / model.parameters,
        "file_types": model.file_types or None, "file_note": model.file_note,
    }


def _kv_read(run: Run, ctx: int) -> dict[str, Any]:
    """Return the bytes of K and of V that a token at the end of the context reads, and the depth from which top-n
    attention pays."""
    model, profile = run.model, run.profile
    traffic = run.traffic if run.card else model.traffic(run.kv)
    longest = max(ctx, model.config.max_position_embeddings)
    left_out = traffic.left_out_at(ctx)
    each = (traffic.kv_bytes_at(ctx) + left_out) / 2
    chosen = traffic.value_bytes > 0
    return {"key_bytes": round(each), "value_bytes": round(each - left_out), "chosen": chosen,
            "crossover_depth": devices.crossover(profile, traffic, longest) if chosen else None,
            "longest_depth": longest, "assumed": _assumption() if chosen else ""}


def _assumption() -> str:
    """Return the note on the blocks of V that are read."""
    from ...graph.topn_cost import SHARED, SKEW

    return (f"assumed: normal scores with a standard deviation of {SKEW:g}, {SHARED:.0%} of whose variance the rows of "
            "a block have in common")


def _device_object(run: Run, full: Estimate, empty: Estimate) -> dict[str, Any]:
    """Return the fields that depend on the device: a token at the end of the context, a prompt in an empty one."""
    profile = run.profile
    prompt_terms = {key: value for key, value in empty.terms.items() if key.startswith("prefill")}
    token_terms = {key: value for key, value in full.terms.items() if not key.startswith("prefill")}
    return {
        "device": profile.name, "device_title": profile.title, "device_class": profile.device_class,
        "bandwidth_gbs": profile.bandwidth_gbs, "effective_gbs": profile.effective_gbs,
        "sequences": full.sequences, "memory_bytes": profile.memory_bytes,
        "budget_bytes": run.budget_bytes, "fits": run.mode != REFUSED,
        "mode": run.mode, "reading": None if run.mode in ("resident", REFUSED) else run.counted, "run_kv": run.kv,
        "total_bytes": run.total_bytes, "device_bytes": run.device_bytes,
        "process_budget_bytes": run.limit_bytes if run.card else None,
        "decode_tok_per_s": full.decode_tok_per_s, "low": full.low, "high": full.high,
        "decode_empty_tok_per_s": empty.decode_tok_per_s,
        "ceiling_tok_per_s": full.ceiling_tok_per_s, "prefill_tok_per_s": empty.prefill_tok_per_s,
        "prefill_low": empty.prefill_low, "prefill_high": empty.prefill_high, "ttft_ms": empty.ttft_ms,
        "bytes_per_token": round(full.bytes_per_token), "terms_ms": {**token_terms, **prompt_terms},
        "basis": full.basis, "error": full.error, "error_source": full.error_source, **whose_object(full),
        "remark": remark(whose_object(full), profile, run.card.sizes if run.card else None, run.refused),
    }
