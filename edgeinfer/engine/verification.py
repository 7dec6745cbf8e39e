"""Runs that verify the draft tokens of a sample."""

from __future__ import annotations

from typing import NamedTuple

from .candidate import Sample
from .sampler import Sampler
from .task import Run


class Draft(NamedTuple):
    """A sample and the draft tokens that a forward pass verifies for it."""

    sample: Sample
    proposal: list[int]
    samplers: list[Sampler]
    """Samplers of the token after the sample's last one, and after each draft token."""


def verification(run: Run, proposal: list[int]) -> Run:
    """Return the run of a sample's last token and draft tokens after it, instead of its last token alone."""
    sample = run.owner
    proposal, masks, prepare = sample.draft(proposal)
    ids, samplers = (sample.last_id, *proposal), sample.sampler.following(proposal, masks)
    return run._replace(ids=ids, last=False, each=True, specs=[sampler.address for sampler in samplers],
                        owner=Draft(sample, proposal, samplers), whole=True, prepare=prepare)
