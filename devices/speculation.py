"""Speculative decoding before anything is loaded: the time of a pass that verifies draft tokens, and its yield."""

from __future__ import annotations

import math

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError

from .estimator import constants_for, decode_terms
from .profile import DeviceProfile
from .random_reads import storage_gbs
from .several_rows import activations_ms, peak_of, weights_ms
from .traffic import Traffic

MEASURED_SHARE = 0.01
"""Precision of the acceptance from which on drafting pays."""


@dataclass(frozen=True)
class Drafted:
    """Passes that verify draft tokens of a second model."""

    draft_tokens: int
    """Number of draft tokens of a pass."""
    tokens_per_pass: float
    """Mean number that a pass yields, the model's own one included."""
    draft_ms: float
    """Time of all draft tokens of a pass."""
    verify_ms: float
    """Time of the pass that verifies them."""
    token_ms: float
    """Time of a token without drafts."""

    @property
    def gain(self) -> float:
        """Speed as a multiple of that without drafts."""
        return self.tokens_per_pass * self.token_ms / (self.draft_ms + self.verify_ms)

    @property
    def cost(self) -> float:
        """Time of drafting and verifying beyond a token, as a share of a token's."""
        return (self.draft_ms + self.verify_ms) / self.token_ms - 1


def tokens_per_pass(acceptance: float, draft_tokens: int) -> float:
    """Return the mean yield of a pass: each draft token counts if all before it were accepted.

    The tokens are taken to be accepted independently of each other (Leviathan, Kalman and Matias, Fast Inference from
    Transformers via Speculative Decoding, 2023).

    Raises
    ------
    UsageError
        The acceptance is not from 0 to 1.
    """
    if not 0 <= acceptance <= 1:
        raise UsageError(f"An acceptance of {acceptance:g} is impossible; it is the share of draft tokens that are "
                         "accepted, from 0 to 1, such as 0.7.")
    return draft_tokens + 1.0 if acceptance == 1 else (1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance)


def pass_ms(profile: DeviceProfile, traffic: Traffic, depth: int, tokens: int) -> float:
    """Return the milliseconds of a pass over several tokens of one text.

    Weights, keys and values are read once for all; arithmetic grows with the tokens (`weights_ms`). Each token of a
    mixture of experts adds experts that those before it did not choose.

    Parameters
    ----------
    profile : DeviceProfile
    traffic : Traffic
        Of one token.
    depth : int
        Positions before the first token.
    tokens : int
    """
    constants = constants_for(profile, traffic)
    terms = decode_terms(profile, traffic.of_several(tokens), constants, depth)
    streaming = terms.pop("streaming", None)
    terms["weights"] = weights_ms(profile, constants, traffic.operations, terms["weights"], tokens)
    if tokens > 1:
        terms["activations"] = activations_ms(profile, constants, traffic.activation_values, tokens)
    if depth and peak_of(profile, constants):
        terms["kv"] += (tokens - 1) * constants.attention_ms * traffic.attention_operations_of(1, depth) / 1e9
    whole = math.fsum(terms.values())
    if streaming is None:
        return whole
    return max(whole, traffic.streamed_bytes / storage_gbs(profile, 0) / 1e6)


def drafted(profile: DeviceProfile, traffic: Traffic, draft: Traffic, depth: int, acceptance: float,
            most: int) -> Drafted:
    """Return the fastest number of draft tokens, up to `most`, and its gain.

    Parameters
    ----------
    profile : DeviceProfile
    traffic, draft : Traffic
        Of a token of the model, and of the draft model, which reads a context of its own.
    depth : int
    acceptance : float
        Share of draft tokens that are accepted.
    most : int
    """
    token, one = pass_ms(profile, traffic, depth, 1), pass_ms(profile, draft, depth, 1)
    return max((Drafted(n, tokens_per_pass(acceptance, n), n * one, pass_ms(profile, traffic, depth, n + 1), token)
                for n in range(1, most + 1)), key=lambda found: found.gain)


def least_acceptance(profile: DeviceProfile, traffic: Traffic, draft: Traffic, depth: int, most: int) -> float | None:
    """Return the acceptance from which on drafting pays; None if it never does."""
    steps = (MEASURED_SHARE * i for i in range(round(1 / MEASURED_SHARE) + 1))
    return next((share for share in steps if drafted(profile, traffic, draft, depth, min(share, 1.0), most).gain > 1),
                None)
