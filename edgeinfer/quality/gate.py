"""The quality gate: the approximations that may be enabled automatically, and the verdict on requested ones.

The divergences of techniques do not add up, so a setting comprises all of them, and only a measurement of exactly that
setting with exactly these weights counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import MAX_KLD, RuntimeConfig
from ..registry import Technique, recipe_with, techniques
from .measurements import MIN_TOKENS, Measurement, Setting, measured_identity, read_quality

if TYPE_CHECKING:
    from ..bundle import Bundle


def find(known: Iterable[Measurement], setting: Setting, bundle: Bundle) -> Measurement | None:
    """Return the measurement that decides about a setting of these weights, or None if it was not measured.

    That is the worst: the one with the largest mean divergence, whatever its text. Of several of the same text and
    protocol the last one counts. Those of fewer than `MIN_TOKENS` count only if there is no other.
    """
    weights = measured_identity(bundle)
    last = {one.subject: one for one in known if one.setting == setting and one.weights == weights}
    return max(last.values(), key=lambda one: (one.tokens >= MIN_TOKENS, one.kld_mean), default=None)


def objection(known: Iterable[Measurement], setting: Setting, bundle: Bundle, max_kld: float = MAX_KLD) -> str:
    """Return why a setting may not be chosen without being requested; empty if it may."""
    if setting.exact:
        return ""
    if max_kld <= 0:
        return f"--max-kld {max_kld:g} allows none"
    found = find(known, setting, bundle)
    if found is None:
        return f"not measured with {setting}"
    if found.tokens < MIN_TOKENS:
        return f"measured on {found.tokens} tokens{found.of_text} only; {MIN_TOKENS} are the least that count"
    if found.kld_mean > max_kld:
        return f"KLD {found.kld_mean:.4f} over {found.tokens} tokens{found.of_text} is above --max-kld {max_kld:g}"
    return ""


class Judged(NamedTuple):
    """Approximations that may be added to a run that did not request them."""

    enabled: tuple[RuntimeConfig, ...]
    """The config with approximations that were measured within the bound, those with the most of them first."""
    switched_off: tuple[str, ...]
    """The flags of others, each with the reason, omitting combinations of which a subset was already refused."""


def judge(bundle: Bundle, config: RuntimeConfig, max_kld: float = MAX_KLD) -> Judged:
    """Say which approximations a run may use without being asked, and why not the others.

    Candidates have data in the bundle and are not in the recipe; only combinations measured within the bound are
    enabled.

    Raises
    ------
    BundleError
        As `read_quality`.
    """
    said = {step.name for step in config.recipe.steps}
    free = [one for one in techniques()
            if one.by_itself and one.part and one.part.name in bundle.parts and one.name not in said]
    known = read_quality(bundle) if free and max_kld > 0 else []
    within: list[RuntimeConfig] = []
    refused: dict[tuple[Technique, ...], str] = {}
    for some in (some for n in range(1, len(free) + 1) for some in combinations(free, n)):
        options = {one.options[0].name: one.by_itself for one in some}
        found = replace(config, recipe=recipe_with(config.recipe, **options))
        why = objection(known, Setting.of_run(found), bundle, max_kld)
        if not why:
            within.append(found)
        elif not any(set(less) < set(some) for less in refused):
            refused[some] = f"{' '.join(f'{one.options[0].flag} {one.by_itself}' for one in some)} ({why})"
    within.sort(key=lambda one: -len(one.recipe.steps))
    return Judged(tuple(within), tuple(refused.values()))


def of_run(bundle: Bundle, config: RuntimeConfig) -> dict[str, Any] | None:
    """Return the report of a run's approximations, or None without any.

    Raises `BundleError` as `read_quality`.
    """
    setting = Setting.of_run(config)
    if setting.exact:
        return None
    found = find(read_quality(bundle), setting, bundle)
    return {"setting": dict(setting.values), "kld_mean": None if found is None else found.kld_mean,
            "said": f"{setting}: {'not measured' if found is None else found}"}
