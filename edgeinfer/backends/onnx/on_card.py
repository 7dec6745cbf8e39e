"""A run on a card with memory of its own: what it takes there, whether it fits, and what a token reads."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from edgeinfer.base.dataclass import dataclass
from edgeinfer.memory_planner import MemoryPlan, to_request

from .fitting import device_fits, draft_planner
from .known_sizes import known_config
from .slabs import FLOATS

if TYPE_CHECKING:
    from edgeinfer.config import RuntimeConfig
    from edgeinfer.devices import DeviceProfile, Traffic
    from edgeinfer.graph import Graph

    from .planning import DevicePlanner
    from .sizes import Sizes


@dataclass(frozen=True)
class OnCard:
    """A run on a card, whether or not it fits.

    `estimate`, `recommend` and `plan --compare` ask it, of whose planner `plan` prints the regions.
    """

    planner: DevicePlanner
    config: RuntimeConfig
    """Settings as the device takes them, with a context. The budget limits the process beside the card."""
    bundle: Traffic
    """Traffic of the model's bundle."""

    @classmethod
    def known(cls, planner: DevicePlanner, bundle: Traffic, ctx: int, budget: int | None = None) -> OnCard:
        """Return the run of one sequence with the settings that a run has by default."""
        return cls(planner, known_config(planner, ctx, budget), bundle)

    @cached_property
    def plan(self) -> MemoryPlan:
        """Memory of the process and of the card."""
        return self.planner.plan(to_request(self.config))

    @property
    def sizes(self) -> Sizes:
        """Sizes of the model as it is lowered."""
        return self.planner.lower(to_request(self.config))

    def fits(self, card: DeviceProfile, plan: MemoryPlan | None = None) -> bool:
        """Return whether a card holds the run, or another plan, and the process beside it within its budget."""
        return device_fits(plan or self.plan, self.config.budget_bytes, card.memory_bytes)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes and operations of a token."""
        return self.sizes.traffic(self.bundle, self.config.kv)

    @property
    def position_bytes(self) -> int:
        """Bytes of K and V of a position in all layers that have their own."""
        return 2 * self.sizes.kv_width * FLOATS[self.config.kv]().itemsize

    def beside(self, draft: Graph, bundle: Traffic) -> tuple[MemoryPlan, Traffic]:
        """Return the plan of the run with a draft model beside it, and the draft's traffic.

        Parameters
        ----------
        draft : Graph
            Without passes.
        bundle : Traffic
            Of the draft's bundle.
        """
        planner, config = draft_planner(self.planner, self.config, draft)
        own = OnCard(planner, config, bundle)
        return self.plan.with_draft(own.plan), own.traffic
