"""`plan`, `estimate` and `recommend` for programs: the commands' reports as frozen objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import registry
from ..base.dataclass import dataclass
from ..base.validation import TEXT, checked, choice
from ..config import DEFAULT_DRAFT_TOKENS, MAX_KLD, Recipe, RuntimeConfig
from ..errors import UsageError
from ..registry import RULES, UNITS
from .lengths import KEYWORDS, check_lengths, lengths_of
from .modes import MODES
from .reports.recommendation import DEFAULT_CTX, DEFAULT_SPEED, SPEED

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile

LOCAL = "local"


@dataclass(frozen=True)
class Region:
    """Memory of a plan with one purpose."""

    name: str
    bytes: int
    kind: str
    """mapped, private, reserve or device."""
    reason: str


@dataclass(frozen=True)
class Prediction:
    """Predicted speed of a model on a device. Bands hold 80 % of measurements."""

    device: str
    """Name of the profile."""
    program: str
    """Program that the estimate is for; `unit` is the hardware: cpu, gpu or npu."""
    unit: str
    ctx: int
    decode_tok_per_s: float
    """Tokens per second at the end of the context; `low` and `high` are its band."""
    low: float
    high: float
    prompt: int
    prefill_tok_per_s: float | None
    """Speed of the prompt; None if the device's peak is not known, as is `ttft_ms`."""
    ttft_ms: float | None
    tpot_ms: float
    """Time of a token in the middle of the answer, else at the end of the context."""
    total_ms: float | None
    """Time of prompt and answer; None without an answer or if the prompt's time is not known."""
    answer: int | None
    """Tokens of the answer, fewer than asked for where the context is full; None without an answer."""
    fits: bool
    total_bytes: int
    """Memory of the run."""
    basis: str
    """Origin of the constants."""
    joules_per_token: float | None
    """Energy of a token at the end of the context; None where no power figure of the device is published."""
    notes: tuple[str, ...]
    """Remarks on the context and the answer."""


@dataclass(frozen=True)
class Planned:
    """Memory of a model on a device, and whether it fits."""

    model: str
    device: str | None
    """Name of the profile; None for this machine."""
    fits: bool | None
    mode: str
    """Residency of the weights: resident, streamed and so on, or refused."""
    ctx: int
    total_bytes: int
    budget_bytes: int | None
    device_bytes: int | None
    """Memory of a discrete GPU; None for other devices."""
    max_ctx: int | None
    """Longest context that fits."""
    regions: tuple[Region, ...]
    decode_tok_per_s: float | None
    """Speed with a full context; None if this machine was not probed."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Recommended:
    """A model that fits a device and is fast enough there."""

    model: str
    """Name of the built-in shape; `called` is that of the model."""
    called: str
    weights: str
    """Most exact type that fits and is fast enough."""
    parameters: int
    total_bytes: int
    decode_tok_per_s: float
    """Speed with half the context filled; `low` and `high` are its band."""
    low: float
    high: float
    ttft_ms: float | None
    """Time to first token after a prompt of 2000 tokens."""


def plan(model: str, machine: str | None = None, *, ctx: int | None = None, weights: str | None = None,
         kv: str = RuntimeConfig.kv, budget: str | int | None = None, unit: str | None = None,
         runtime: str | None = None, storage: str | None = None) -> Planned:
    """Plan the memory of a model; nothing is loaded.

    Parameters
    ----------
    model : str
        Whatever ``edgeinfer plan`` takes.
    machine : str, optional
        Name of a device; by default this machine.
    ctx : int, optional
        Context in tokens.
    weights : str, optional
        Type of the weights.
    kv : str
        Type of the KV cache.
    budget : str or int, optional
        Such as "4GiB"; by default the memory of the device.
    unit, runtime, storage : str, optional
        As ``--unit``, ``--runtime`` and ``--storage``.

    Raises
    ------
    EdgeInferError
        The error in one sentence.
    """
    from ..models.describe import describe
    from .commands.plan import executor_for, planned_here
    from .reports.plan_device import planned_on

    for name, value in (("model", model), ("kv", kv)):
        checked(name, value, RULES[name])
    (ctx,) = check_lengths(KEYWORDS[:1], ctx)
    device = _device(machine, unit, runtime, storage)
    if device and storage and device.own_memory:
        raise UsageError(f"storage {storage} has no effect {MODES['plan']['card'].where}; leave it out.")
    drafting = registry.drafting(_defaults("plan"))
    size = None if budget is None else checked("budget", budget, RULES["budget"])
    config = _config("plan", ctx=ctx, kv=kv, budget_bytes=size, draft_tokens=drafting.rows)
    stored = _weights(weights), None
    found = executor_for(None, device, model, stored, config, _card_kv(kv))
    if found and found.planner:
        out = planned_on(found, describe(model, *stored, Recipe(())), drafting)
    else:
        out = planned_here(model, stored, config, MAX_KLD, device, drafting, found.refused if found else "")
    speed = out["estimate"]
    return Planned(
        model, out["device"], out["fits"], out["mode"], out["ctx"], out["total_bytes"], out["budget_bytes"],
        out.get("device_bytes"), out["max_ctx"], tuple(Region(**region) for region in out["regions"]),
        speed and speed["decode_tok_per_s"], tuple(out["notes"]))


def estimate(model: str, machine: str = LOCAL, *, ctx: int | None = None, prompt: int | None = None,
             answer: int | None = None, weights: str | None = None, kv: str = RuntimeConfig.kv, unit: str | None = None,
             runtime: str | None = None, storage: str | None = None) -> Prediction:
    """Predict the speed of a model on a device; nothing is loaded.

    Parameters
    ----------
    model, machine, ctx, weights, kv, unit, runtime, storage
        As those of `plan`.
    prompt : int, optional
        Tokens of the prompt; by default 512.
    answer : int, optional
        Tokens of the answer whose time is predicted.

    Raises
    ------
    EdgeInferError
        The error in one sentence.
    """
    from ..models.describe import describe
    from .reports.estimate_object import estimate_object
    from .reports.on_gpu import Cards
    from .reports.questions import Questions

    for name, value in (("model", model), ("kv", kv)):
        checked(name, value, RULES[name])
    ctx, prompt, answer = check_lengths(KEYWORDS, ctx, prompt, answer)
    device = _device(LOCAL if machine is None else machine, unit, runtime, storage)
    assert device
    config = _config("estimate", kv=kv, draft_tokens=DEFAULT_DRAFT_TOKENS)
    described = describe(model, _weights(weights), None, config.recipe, device)
    lengths = lengths_of(described.config, ctx, prompt, answer, KEYWORDS)
    cards = Cards(lambda: describe(model, weights, None, Recipe(())), config, _card_kv(kv))
    config = replace(config, recipe=described.recipe)
    out = estimate_object(described, device, lengths.ctx, lengths.prompt, kv, (1.0, None), config, 1, cards,
                          Questions(answer=answer).within(lengths))
    times: dict[str, Any] = out["answer"] or {"tpot_ms": 1000 / out["decode_tok_per_s"], "total_ms": None}
    return Prediction(
        out["device"], out["program"], out["unit"], lengths.ctx, out["decode_tok_per_s"], out["low"], out["high"],
        out["prompt"], out["prefill_tok_per_s"], out["ttft_ms"], times["tpot_ms"], times["total_ms"], lengths.answer,
        out["fits"], out["device_bytes"] or out["total_bytes"], out["basis"],
        out["energy"] and out["energy"]["joules_per_token"], lengths.notes)


def recommend(machine: str = LOCAL, *, ctx: int = DEFAULT_CTX, min_speed: float = DEFAULT_SPEED, use: str = "chat",
              unit: str | None = None, runtime: str | None = None) -> tuple[Recommended, ...]:
    """Return the models that fit a device and are fast enough there, the largest first.

    Parameters
    ----------
    machine, unit, runtime
        As those of `plan`.
    ctx : int
        Context in tokens.
    min_speed : float
        Least tokens per second.
    use : {"chat", "code", "rag"}

    Raises
    ------
    EdgeInferError
        The error in one sentence.
    """
    from ..models.uses import USES
    from .reports.recommendation import models_for

    checked("use", use, choice(USES))
    checked("min_speed", min_speed, SPEED)
    (length,) = check_lengths(KEYWORDS[:1], ctx)
    device = _device(LOCAL if machine is None else machine, unit, runtime)
    assert device
    fields = Recommended.__dataclass_fields__
    return tuple(Recommended(**{name: row[name] for name in fields})
                 for row in models_for(device, length or DEFAULT_CTX, min_speed, use))


def _device(machine: str | None, unit: str | None, runtime: str | None, storage: str | None = None
            ) -> DeviceProfile | None:
    from edgeinfer.devices import chosen, equipped, load_profile

    for name, value in (("machine", machine), ("runtime", runtime), ("storage", storage)):
        if value is not None:
            checked(name, value, TEXT)
    if unit is not None:
        checked("unit", unit, choice(UNITS))
    if machine is None:
        if unit or runtime or storage:
            raise UsageError("unit, runtime and storage select among the facts about a device; name a machine.")
        return None
    return equipped(chosen(load_profile(machine), unit, runtime), storage)


def _weights(kind: str | None) -> str | None:
    return None if kind is None else checked("weights", kind, RULES["weights"])


def _defaults(command: str) -> dict[str, Any]:
    """Return the options of techniques as they are where none is given."""
    return {one.name: one.default for one in registry.options(command)}


def _config(command: str, **values: Any) -> RuntimeConfig:
    return registry.configured(RuntimeConfig(**values), _defaults(command))


def _card_kv(kv: str) -> str | None:
    """Return the type of the KV cache for a card: its own, unless another than the default was asked for."""
    return None if kv == RuntimeConfig.kv else kv
