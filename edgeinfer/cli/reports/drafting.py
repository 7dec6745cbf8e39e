"""Speculative decoding in an estimate: a draft model with its own cost, and prompt lookup by kind of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ...base.units import format_size
from ..output import speed

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Traffic

    from ...models.description import ModelDescription

FIELD = ("with --draft or --speculate lookup: `plain_tok_per_s`; of a draft model `draft`, `acceptance` "
         "(`acceptance_assumed`), `draft_tokens` of a pass that are fastest, `tokens_per_pass`, `draft_ms`, "
         "`verify_ms`, `gain`, `pays_from` (least acceptance, null if none), `total_bytes` of both models and `fits`, "
         "with --html `by_acceptance`; of lookup `texts`: per kind `text`, `tokens_per_pass` as measured, "
         "`decode_tok_per_s`, `gain`; else null")
ASSUMED_ACCEPTANCE = 0.7
"""Acceptance of a small model of the same family, in the middle of those measured
(docs/measurements/speculation.md)."""
LOOKUP = {"edited code": 5.29, "worked examples": 1.35, "prose": 1.06}
"""Tokens of a pass with prompt lookup, as measured with 7 draft tokens (docs/measurements/speculation.md)."""
LOOKUP_ROWS = 7


def draft_object(profile: DeviceProfile, traffic: Traffic, draft: ModelDescription, own: Traffic, ctx: int,
                 acceptance: float | None, most: int, memory: tuple[float, bool], plots: bool = False
                 ) -> dict[str, Any]:
    """Return the gain of a draft model.

    Parameters
    ----------
    profile : DeviceProfile
    traffic : Traffic
        Of the run without it.
    draft : ModelDescription
    own : Traffic
        Of the draft.
    ctx : int
    acceptance : float, optional
        Share of draft tokens that are accepted.
    most : int
        Draft tokens of a pass.
    memory : tuple
        Bytes of both models, and whether they fit.
    plots : bool
        True if the speed by acceptance is wanted too.
    """
    share = ASSUMED_ACCEPTANCE if acceptance is None else acceptance
    found = devices.drafted(profile, traffic, own, ctx, share, most)
    shares = [step / 10 for step in range(11)] if plots else []
    others = [(share, devices.drafted(profile, traffic, own, ctx, share, most)) for share in shares]
    return {
        "plain_tok_per_s": 1000 / found.token_ms, "draft": draft.name, "acceptance": share,
        "acceptance_assumed": acceptance is None, "draft_tokens": found.draft_tokens,
        "tokens_per_pass": found.tokens_per_pass, "draft_ms": found.draft_ms, "verify_ms": found.verify_ms,
        "cost": found.cost, "gain": found.gain, "decode_tok_per_s": 1000 * found.gain / found.token_ms,
        "pays_from": devices.least_acceptance(profile, traffic, own, ctx, most),
        "total_bytes": round(memory[0]), "fits": memory[1], "texts": None,
        "by_acceptance": [{"acceptance": share, "decode_tok_per_s": 1000 * one.gain / one.token_ms}
                          for share, one in others] or None,
    }


def lookup_object(profile: DeviceProfile, traffic: Traffic, ctx: int) -> dict[str, Any]:
    """Return the gain of prompt lookup, by kind of text: passes verify more rows where it finds more."""
    token, full = devices.pass_ms(profile, traffic, ctx, 1), devices.pass_ms(profile, traffic, ctx, LOOKUP_ROWS + 1)
    most, texts = max(LOOKUP.values()), []
    for text, yielded in LOOKUP.items():
        whole = token + (full - token) * (yielded - 1) / (most - 1)
        texts.append({"text": text, "tokens_per_pass": yielded, "decode_tok_per_s": 1000 * yielded / whole,
                      "gain": yielded * token / whole})
    return {"plain_tok_per_s": 1000 / token, "draft": None, "texts": texts}


def drafting_rows(found: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield the rows of the report for people."""
    if not found:
        return
    if found["texts"]:
        said = ", ".join(f"{speed(each['decode_tok_per_s'])} in {each['text']} ({each['gain']:.2g} x)"
                         for each in found["texts"])
        yield "lookup", f"{speed(found['plain_tok_per_s'])} tokens/s without; with prompt lookup {said}"
        return
    verdict = "pays" if found["gain"] > 1.02 else "does not pay"
    point = "at no acceptance" if found["pays_from"] is None else f"from an acceptance of {found['pays_from']:.2f} on"
    yield "draft", (f"{verdict}: {speed(found['decode_tok_per_s'])} tokens/s instead of "
                    f"{speed(found['plain_tok_per_s'])} with {found['draft']}; it pays {point}")
    assumed = " (assumed; --acceptance sets it)" if found["acceptance_assumed"] else ""
    fits = "" if found["fits"] else ", which does not fit"
    yield "", (f"{found['draft_tokens']} draft tokens a pass in {found['draft_ms']:.3g} ms, verified in "
               f"{found['verify_ms']:.3g} ms, yield {found['tokens_per_pass']:.2f} at an acceptance of "
               f"{found['acceptance']:.2g}{assumed}; both models take {format_size(found['total_bytes'])}{fits}")
