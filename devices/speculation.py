"""Speculative decoding before anything is loaded: the time of a pass that verifies draft tokens, and its yield."""

from __future__ import annotations

import math

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError

from .device_classes import constants_of
from .estimator import decode_terms, peak_of
from .profile import PROCESSORS, DeviceProfile
from .random_reads import storage_gbs
from .traffic import Traffic

CORES = (*PROCESSORS, "local")
FEW_ROWS, FEW_ROWS_FAST, FAST = 0.46, 0.28, ("avxvnni", "avx512vnni", "neon_i8mm")
"""Shares of the int8 peak that passes of 2 to 16 tokens reach on processors, where prompts reach 0.74: weights are
unpacked for every few rows. It weighs more where dot products are fast. AVX2 and AVX-512 VNNI were measured
(docs/measurements/speculation.md); the other two are taken to be like the latter."""
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

    Weights, keys and values are read once for all; arithmetic grows with the tokens, and near the border of both their
    squares are added. On processors few rows reach a smaller share of the peak than prompts
    (`FEW_ROWS`). Each token of a mixture of experts adds experts that those before it did not choose.

    Parameters
    ----------
    profile : DeviceProfile
    traffic : Traffic
        Of one token.
    depth : int
        Positions before the first token.
    tokens : int
    """
    constants = constants_of(profile)
    terms = decode_terms(profile, traffic.of_several(tokens), constants, depth)
    streaming = terms.pop("streaming", None)
    if tokens > 1 and (peak := peak_of(profile, constants)):
        share = FEW_ROWS_FAST if profile.isa in FAST else FEW_ROWS
        mfu = min(constants.mfu, share) if profile.device_class in CORES else constants.mfu
        arithmetic = tokens * traffic.operations / (mfu * peak) / 1e6
        terms["weights"] = math.hypot(terms["weights"], arithmetic)
        if depth:
            attention = traffic.attention_operations_of(1, depth)
            terms["kv"] += (tokens - 1) * constants.attention_ms * attention / 1e9
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
