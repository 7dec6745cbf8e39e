"""Names of a bundle's parts in recipes, so that a graph can be built from a recipe alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgeinfer.config import Recipe, Step
from edgeinfer.errors import UsageError
from edgeinfer.registry import technique

if TYPE_CHECKING:
    from .reader import Bundle

def named(recipe: Recipe, bundle: Bundle) -> Recipe:
    """Return the recipe with kind, rank and the like of the bundle's predictor, or screen, where its steps need one.

    If there is none, a step that names none stays, and is refused.

    Raises
    ------
    BundleError
        A part cannot be read; its settings alone are.
    UsageError
        A step names another predictor, or screen, than the bundle has.
    """
    return Recipe(tuple(_named(step, bundle) for step in recipe.steps))


def _named(step: Step, bundle: Bundle) -> Step:
    if not (one := technique(step.name)) or not one.part or one.exact(dict(step.settings)):
        return step
    given: dict[str, str | float] = dict(step.settings)
    own = one.part.read(bundle)
    if any(given[name] != own.get(name) for name in one.part.shown if name in given):
        has = " of rank ".join(str(own[name]) for name in ("kind", "rank") if name in own) or "none"
        raise UsageError(f"The recipe asks for {step}, but the {one.part.name} of {bundle.path} is {has}; leave "
                         f"{' and '.join(one.part.shown)} out.")
    return replace(step, settings=tuple((given | own).items()))
