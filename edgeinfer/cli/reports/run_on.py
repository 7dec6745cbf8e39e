"""A run on a device, as `plan` has it: who runs the model there, its memory, and what a token reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..output import REFUSED
from .users import Memory
from .windows import windows_object

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Traffic
    from edgeinfer.memory_planner import MemoryPlan

    from ...backends import OnCard
    from ...config import RuntimeConfig
    from ...llm.executors import Executor
    from ...models.description import ModelDescription
    from .on_gpu import Cards


class Run(NamedTuple):
    """A run on a device, as `plan` has it."""

    model: ModelDescription
    profile: DeviceProfile
    """Profile of the device in the form in which edgeinfer uses it, if it can."""
    kv: str
    total_bytes: int
    """Memory of the process."""
    unstreamed_bytes: int
    """The same with all weights in memory."""
    mode: str
    """Residency of the weights, or refused."""
    windows: dict[str, Any] | None
    traffic: Traffic
    counted: bool = True
    """True if that includes bytes read from storage."""
    refused: str = ""
    """Why CUDA does not run the model on the card."""
    plan: MemoryPlan | None = None
    """Plan of a run on our kernels; None if none fits."""
    limit_bytes: int | None = None
    """Memory limit of the process, if one was given."""
    card: OnCard | None = None
    """The run, if it is on a card with memory of its own."""

    @property
    def budget_bytes(self) -> int:
        """Memory that the run may take: the given limit, else that of the device; on a card the card's."""
        return self.limit_bytes if self.limit_bytes and not self.card else self.profile.usable_bytes

    @property
    def device_bytes(self) -> int | None:
        """Memory of a discrete GPU; None for other devices."""
        return self.card.plan.device_bytes if self.card else None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as the device holds them."""
        return self.card.plan.region("weights").nbytes if self.card else self.model.weight_bytes

    @property
    def position_bytes(self) -> int:
        """Bytes of K and V of a position in all layers."""
        return self.card.position_bytes if self.card else self.model.kv_bytes_per_position[self.kv]


def run_on(model: ModelDescription, profile: DeviceProfile, ctx: int, kv: str, asked: RuntimeConfig, sequences: int,
           cards: Cards | None) -> Run:
    """Return the run that `plan` plans for a device."""
    from edgeinfer.memory_planner import RESIDENT, to_request

    from ...llm.executors import placed, stored_traffic
    from .plan_object import threads_on

    exact, found = (cards.on(profile) if cards else None) or (None, None)
    if exact and found and found.profile and (card := found.on_card(exact, ctx)):
        total, mode = card.plan.total_bytes, RESIDENT if card.fits(found.profile) else REFUSED
        return Run(exact, found.profile, card.config.kv, total, total, mode, None, card.traffic,
                   limit_bytes=asked.budget_bytes, card=card)
    config = replace(asked, ctx=ctx, kv=kv, threads=asked.threads or threads_on(profile), max_sequences=sequences,
                     budget_bytes=asked.budget_bytes or profile.usable_bytes)
    plan, within = model.planner.plan(to_request(config)), placed(model, model.planner, config, profile)
    traffic = within and stored_traffic(model, within, profile, kv)
    total = (within or plan).total_bytes
    return Run(model, profile, kv, total, plan.total_bytes, within.mode if within else REFUSED,
               windows_object(plan), traffic or model.traffic(kv), traffic is not None or within is None,
               found.refused if found else "", within, asked.budget_bytes)


def memory_of_users(run: Run, on: Callable[[int], tuple[ModelDescription, Executor] | None] | None, ctx: int,
                    sequences: int, each: int) -> Memory:
    """Return the memory of several users, each with so many tokens.

    Parameters
    ----------
    run : Run
    on : callable, optional
        `Cards.on` of the device: returns the model and its executor for a number of sequences.
    ctx, sequences : int
        Of the run.
    each : int
        Tokens of a user.
    """
    @cache
    def of(users: int) -> float:
        if run.card and on and (found := on(users)) and (other := found[1].on_card(found[0], each)):
            return other.plan.device_bytes
        own = run.traffic.sequence_bytes_at(each)
        return run.unstreamed_bytes - sequences * run.traffic.sequence_bytes_at(ctx) + users * own

    return Memory(of, run.budget_bytes)
