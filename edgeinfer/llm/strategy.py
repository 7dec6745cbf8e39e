"""Strategy for a sparse model: dense or sparse, in memory, from storage or streamed; the fastest that fits.

Every permitted strategy is planned and its speed predicted: from this machine's profile or, on a machine that was not
probed, from an assumed one that only serves to compare them. A strategy that turned out slower than the dense one is
recorded in the cache and not chosen automatically again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.cache_dir import cache_root, make_directories
from ..base.files import open_plain, replacement
from ..base.strict_json import parse_json
from ..base.units import format_size
from ..config import MAX_KLD, Recipe
from ..errors import BudgetError, EdgeInferError, RequestError
from ..quality.gate import Judged, judge
from ..quality.measurements import Setting, measured_identity
from ..registry import placer, technique

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile
    from edgeinfer.memory_planner import DraftMemory, MemoryPlan

    from ..bundle import Bundle
    from ..config import RuntimeConfig
    from ..runtime import SparseFfn

ASSUMED_GBS, ASSUMED_STORAGE_GBS, ASSUMED_READS_GBS = 20.0, 1.0, 0.3
"""Bandwidths of memory, of long reads from storage and of scattered ones, assumed for a machine that was not probed."""
MAX_BYTES = 1 << 16
SPARSE = "sparse"
"""Name of the strategy with an approximation, and all weights in memory."""
REFUSED = "refused"


class Strategy(NamedTuple):
    """One strategy for running a model, and its predicted speed."""

    name: str
    """resident, sparse, sparse from flash, experts from flash, or streamed."""
    config: RuntimeConfig
    plan: MemoryPlan
    tok_per_s: float
    """Speed in an empty context."""
    read_bytes: float
    """Bytes read from storage for a token."""
    at_depth: Callable[[int], float]
    """Tokens per second after this many positions."""
    sparse: SparseFfn | None
    """Modes of its sparse FFNs."""

    def __str__(self) -> str:
        read = f", {format_size(round(self.read_bytes))} from storage per token" if self.read_bytes else ""
        return f"{self.name} (about {self.tok_per_s:.3g} tok/s{read})"

    @property
    def key(self) -> str:
        """Key of its instruction in the cache; the speed of reading from storage depends on the budget as well."""
        budget = f"; budget={self.config.budget_bytes}" if self.read_bytes else ""
        return f"{self.name}; {Setting.of_run(self.config)}; threads={self.config.threads}{budget}"


class Choice(NamedTuple):
    """The chosen strategy, and the alternatives."""

    strategy: Strategy
    others: tuple[Strategy, ...]
    """The next best first."""
    refused: tuple[str, ...]
    """Rejected strategies, each with the reason."""
    basis: str
    """Basis of the predictions."""
    probed: bool
    """True if they are good for more than comparing."""

    def sentence(self) -> str:
        """Describe the chosen strategy, the reason, and the runner-up."""
        then = f"; next best: {self.others[0]}" if self.others else ""
        left = f". Rejected: {'; '.join(self.refused)}" if self.refused else ""
        return f"Running {self.strategy}, the fastest that fits by {self.basis}{then}{left}."

    def report(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        rows = [{"name": strategy.name, "tok_per_s": strategy.tok_per_s, "read_bytes": strategy.read_bytes}
                for strategy in (self.strategy, *self.others)]
        return {**rows[0], "others": rows[1:], "refused": list(self.refused), "basis": self.basis,
                "said": self.sentence()}


def choose(bundle: Bundle, config: RuntimeConfig, max_kld: float | None = None,
           draft_memory: DraftMemory | None = None) -> Choice:
    """Return the fastest way to run a bundle: as it was requested, or with approximations within `max_kld`.

    A draft takes `draft_memory` of the budget.

    A recipe with other passes, or without the usual ones, says all that is to be done: nothing is added to it.

    Raises
    ------
    BudgetError
        Nothing fits; of the run as it was requested.
    BundleError
        As `quality.read_quality`.
    """
    profile, basis = _profile()
    known = _slower(bundle)
    others = tuple(step for step in config.recipe.steps if not technique(step.name))
    plain = Recipe(others) == Recipe()
    judged = judge(bundle, config, MAX_KLD if max_kld is None else max_kld) if plain else Judged((), ())
    strategies, refused, first = [], list(judged.switched_off), None
    for wanted in (config, *judged.enabled):
        try:
            strategies.append(_strategy(bundle, wanted, profile, draft_memory))
        except BudgetError as error:
            first = first or error
            plan: MemoryPlan = error.plan  # type: ignore[assignment]
            needs = format_size(plan.total_bytes)
            refused.append(f"{'as it is' if wanted is config else Setting.of_run(wanted)} ({needs} needed)")
    if first and not strategies:
        raise first
    # a slow one before none
    found = [strategy for strategy in strategies if strategy.config is config
             or strategy.key not in known] or strategies
    for strategy in strategies:
        if strategy not in found:
            flags = " ".join(f"{one.options[0].flag} {one.by_itself}" for step in strategy.config.recipe.steps
                             if step not in config.recipe.steps and (one := technique(step.name)))
            refused.append(f"{strategy.name}, which gave {known[strategy.key]:.3g} tok/s when it was last used; "
                           f"{flags} uses it "
                           "again")
    found.sort(key=lambda strategy: -strategy.tok_per_s)
    return Choice(found[0], tuple(found[1:]), tuple(refused), basis, basis != ASSUMED)


def strategy_report(bundle: Bundle, config: RuntimeConfig, max_kld: float | None,
                    draft_memory: DraftMemory | None = None) -> tuple[Choice | None, dict[str, Any] | None]:
    """Return the choice of `run`, and its report; neither if a bundle has nothing to choose from."""
    if not bundle.approximates:
        return None, None
    try:
        found = choose(bundle, config, max_kld, draft_memory)
    except (BudgetError, RequestError) as error:  # the latter of a context that the model does not have
        return None, {"name": REFUSED, "tok_per_s": None, "read_bytes": None, "others": [], "refused": [],
                      "basis": None, "said": str(error)}
    return found, found.report()


ASSUMED = f"assumed speeds ({ASSUMED_GBS:g} GB/s of memory, {ASSUMED_STORAGE_GBS:g} of storage; 'edgeinfer devices " \
          "--probe' measures this machine's)"


def _profile() -> tuple[DeviceProfile, str]:
    from edgeinfer.devices import Curve, DeviceProfile, local_profile

    try:
        profile = local_profile()
    except EdgeInferError:
        profile = None
    if profile and profile.storage_sequential_gbs and profile.storage_random:
        return profile, f"the profile of {profile.name}"
    reads = Curve(((4096, ASSUMED_READS_GBS),))
    return DeviceProfile("assumed", "assumed", "x86-laptop", 1 << 34, ASSUMED_GBS, None, os.cpu_count() or 1, "generic",
                         storage_sequential_gbs=ASSUMED_STORAGE_GBS, storage_random=reads), ASSUMED


def _strategy(bundle: Bundle, config: RuntimeConfig, profile: DeviceProfile,
              draft_memory: DraftMemory | None) -> Strategy:
    """Plan one way and predict its speed; raises `BudgetError` if it does not fit."""
    from dataclasses import replace

    from edgeinfer.devices import estimate
    from edgeinfer.memory_planner import RESIDENT

    from ..models.describe import describe
    from ..runtime import plan_run

    planned = plan_run(bundle, config, placer(bundle.config, bundle), draft_memory)
    plan, reads = planned.plan, profile.storage_random
    traffic = replace(describe(bundle.path, recipe=planned.recipe).traffic(config.kv),
                      streamed_bytes=plan.streamed_bytes)
    name = SPARSE if plan.mode == RESIDENT and not Setting.of_run(config).exact else plan.mode
    waiting, read_bytes = 0.0, float(plan.streamed_bytes)
    one = technique(plan.technique)
    if one and (found := one.reads(plan, bundle, profile)) and found[0]:
        read_bytes, chunk = found
        waiting = read_bytes / (reads.at(max(1, round(chunk))) if reads else profile.storage_sequential_gbs or 1) / 1e9

    def at_depth(depth: int) -> float:
        return 1 / (1 / estimate(profile, traffic, depth).decode_tok_per_s + waiting)

    return Strategy(name, config, plan, at_depth(0), read_bytes, at_depth, planned.sparse)


# -- settings slower than the dense program ---------------------------------------------------------------------------


def learn(bundle: Bundle, choice: Choice, tok_per_s: float, depth: int) -> str | None:
    """Record of how fast a choice was after this many positions; return a sentence where that switches it off.

    It does where it was an approximation, and slower than the best exact way is predicted to be there, on a probed
    machine.
    """
    dense = next((strategy for strategy in choice.others if Setting.of_run(strategy.config).exact), None)
    if not choice.probed or dense is None or Setting.of_run(choice.strategy.config).exact:
        return None
    expected = dense.at_depth(depth)
    if tok_per_s >= expected:
        return None
    path, known = _remembered(bundle), _slower(bundle)
    try:
        make_directories(path.parent)
        with replacement(path) as file:
            file.write(json.dumps({**known, choice.strategy.key: tok_per_s}, indent=1).encode())
    except OSError:
        return None
    return (f"{choice.strategy.name} gave {tok_per_s:.3g} tok/s, less than the {expected:.3g} predicted for "
            f"{dense.name}; it is no longer used automatically.")


def _remembered(bundle: Bundle) -> Path:
    return cache_root() / "quality" / measured_identity(bundle)[:32] / "slower.json"


def _slower(bundle: Bundle) -> dict[str, float]:
    """Return the contents of the file; a file that cannot be read counts as empty."""
    try:
        with open_plain(_remembered(bundle)) as file:
            data = parse_json(file.read(MAX_BYTES))
    except (OSError, ValueError):
        return {}
    good = isinstance(data, dict) and all(
        type(speed) in (int, float) and 0 <= speed <= sys.float_info.max for speed in data.values())
    return data if good else {}
