"""Energy of tokens in an estimate, where a device has a power figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Estimate

FIELD = ("where the device has a power figure: `watts` (published), `of` (the part that it is of), `source`, "
         "`decoding_watts` and `joules_per_token` with `low` and `high`, `wh_per_1000_tokens`, `prompt_joules`, and of "
         "prompt and answer `total_wh` (null without -n or where the prompt's time is not known); else null")
JOULES_OF_WH = 3600.0


def energy_object(profile: DeviceProfile, found: Estimate, ttft_ms: float | None,
                  answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the energy of tokens at the end of the context; None where no power is known.

    Parameters
    ----------
    profile : DeviceProfile
    found : Estimate
        With the context full.
    ttft_ms : float, optional
        Of the prompt in an empty context.
    answer : dict, optional
        Times of a prompt and an answer.
    """
    from edgeinfer.devices import power_of

    power = power_of(profile)
    if power is None:
        return None
    spread = (found.high - found.low) / 2 / found.decode_tok_per_s
    value, low, high = power.joules(found.decode_tok_per_s, min(spread, 0.9))
    prompt = None if ttft_ms is None else power.prompt * ttft_ms / 1000
    total = None
    if answer and answer["ttft_ms"] is not None:
        decoding = power.decoding * answer["tpot_ms"] * (answer["tokens"] - 1)
        total = (power.prompt * answer["ttft_ms"] + decoding) / 1000 / JOULES_OF_WH
    return {"watts": power.watts, "of": power.title, "source": power.source, "decoding_watts": power.decoding,
            "joules_per_token": value, "low": low, "high": high, "wh_per_1000_tokens": 1000 * value / JOULES_OF_WH,
            "prompt_joules": prompt, "total_wh": total}


def energy_rows(out: dict[str, Any], asked: bool) -> Iterator[tuple[str, str]]:
    """Yield the rows of the report for people, where energy was asked about or a whole answer."""
    found = out["energy"]
    if not (asked or out["answer"]):
        return
    if not found:
        if asked:
            yield "energy", f"no power figure of {out['device_title']} is published"
        return
    whole = "" if found["total_wh"] is None else f"; {out['answer']['tokens']} tokens after {out['prompt']} take " \
        f"{found['total_wh']:.2g} Wh"
    yield "energy", (f"{found['joules_per_token']:.2g} J a token ({found['low']:.2g} to {found['high']:.2g}), "
                     f"{found['wh_per_1000_tokens']:.2g} Wh for 1000{whole}; at {found['decoding_watts']:.3g} of "
                     f"{found['watts']:.3g} W ({found['of']})")
    if asked:
        yield "", found["source"]
