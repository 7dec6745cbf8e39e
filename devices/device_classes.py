"""Constants of the estimator: those of a profile, else those of its class (classes.toml), and how far off they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from edgeinfer.base.dataclass import dataclass

from .cores import cores_gbs
from .profile import PROCESSORS, DeviceProfile
from .toml_files import read_toml

CALIBRATED, UNKNOWN = "this machine, calibrated", "unknown"
CALIBRATED_ERROR, CALIBRATED_PREFILL_ERROR = 0.10, 0.15
"""Half-width of the 80 % band if the constants come from runs of this machine: of decoding, and of prompts."""
MEDIAN_TO_BAND, WIDEST = 1.9, 0.6
"""80 % of normal errors are within this many times their median; and no band says more than this."""
OWN_ERROR = 0.25
"""The same if the profile has a decoding speed observed on this device: other models and programs differ."""


OURS = "edgeinfer"
"""Name of the program whose speed is wanted unless another is named."""
OWN_OBSERVED, OWN_DERIVED = 0.35, 0.45
"""Half-widths of the bands of edgeinfer's speed on processors where another program was measured, and none."""
OWN_PROMPTS = {"mfu": 0.46, "mfu_attention": 0.15, "activation_cost": 400.0}
"""Prompts of edgeinfer on processors that were not probed: between llama.cpp's 0.2 of the peak and the 0.74 that a
probed processor reached; attention and the values between matrices are those of the probed one."""

GPU_SHARPNESS, CORES_SHARPNESS = 4.0, 2.5
"""Exponents that join the two limits of decoding: where both are as low, less than either is reached."""
NO_DOT_PRODUCTS, WIDE_CODES = 0.5, 1.4
"""Bytes in a cycle of a GPU without dot products, an assumption, and of cores with codes of 8 bits and more, a fit."""

EXPERTS_ERROR = 0.3
"""The least half-width for mixtures of experts on GPUs."""

NO_CONSTANTS = "constants"
"""Source of a probed profile that says why it has no constants of its own."""


@dataclass(frozen=True)
class Constants:
    """Constants of one device, ready to use; by default nothing is lost and nothing takes time beside the limits."""

    f_w: float = 1.0
    """Share of the bandwidth that reading weights reaches."""
    t0_ms: float = 0.0
    """Fixed time of a token, for 32 layers."""
    token_ms: float = 0.0
    """Additional fixed time of a token: Python and sampling, independent of the model."""
    sequence_ms: float = 0.0
    """The same for each sequence of a step."""
    f_kv: float = 1.0
    """Share of the bandwidth that attention reaches on keys and values."""
    attention_ms: float = 0.0
    """Time of 1e9 operations of attention in decoding, beside the reading: heads that share keys and values cost it."""
    mfu: float = 1.0
    """Share of the peak that the matrices of prompts reach."""
    mfu_attention: float = 1.0
    """Share of the peak that attention reaches in prompts."""
    activation_cost: float = 0.0
    """Operations of the peak that take as long as the work on one value between the matrices of a prompt."""
    program: str = "some program"
    """Program whose speed the constants describe."""
    peak: str = "int8"
    """Peak that mfu refers to: int8 or f32."""
    error: float = 0.0
    prefill_error: float = 0.0
    basis: str = UNKNOWN
    error_source: str = ""


@cache
def classes() -> dict[str, dict[str, Any]]:
    """Classes by name, as classes.toml has them; ``unknown`` is among them."""
    return read_toml(Path(__file__).with_name("classes.toml"))


def with_family(table: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """Return a class's constants with those of a generation in place of the general ones."""
    families = classes()[shared]["families"] if (shared := table.get("families_of")) else table.get("families", {})
    return {**table, **families.get(family, {})}


def constants_of(profile: DeviceProfile, table: Mapping[str, Any] | None = None, bits: float = 4.0,
                 experts: bool = False) -> Constants:
    """Return the constants to use for a device.

    A constant of the profile comes first. If the profile says what decoding draws, that share of the bandwidth comes
    next, and f_kv keeps its ratio to f_w. The rest is the class's, and its generation's; `_drawn` changes its f_w by
    figures of the device. t0_ms holds at `t0_clock_ghz`, for it is spent in kernels that wait for no memory.

    Parameters
    ----------
    profile : DeviceProfile
    table : mapping, optional
        Constants instead of those of the profile's class (for fits).
    bits : float
        Of a weight's code: those of 8 and more take less unpacking for each byte.
    experts : bool
        Whether a token reads some of several experts, which GPUs read more slowly (`experts` of a class).
    """
    known = profile.device_class in classes()
    table = with_family(table or classes()[profile.device_class if known else UNKNOWN], profile.family or profile.isa)
    values = {name: float(table[name]) for name in ("f_w", "t0_ms", "f_kv", "mfu", "mfu_attention")}
    rest = ("token_ms", "sequence_ms", "activation_cost", "attention_ms")
    values |= {name: float(table.get(name, 0.0)) for name in rest}
    if clock := profile.figures.get("clock_ghz"):
        values["t0_ms"] *= (table.get("t0_clock_ghz", clock) / clock) ** table.get("t0_power", 1.0)
    share, values["f_w"] = values["f_w"], _drawn(profile, table, bits)
    if profile.device_class in PROCESSORS:
        values["f_kv"] *= values["f_w"] / share
    if profile.effective_gbs is not None:
        seen = profile.effective_gbs / profile.bandwidth_gbs
        values["f_kv"] *= seen / values["f_w"]
        values["f_w"] = seen
    if few := experts and table.get("experts"):
        values["f_w"] *= few
    values.update(profile.constants)
    prefill_error = table["prefill_error"]
    if profile.measured is not None and "f_w" in profile.constants:
        basis = CALIBRATED
        error = _calibrated_error(profile, "decode_error", CALIBRATED_ERROR)
        prefill_error = _calibrated_error(profile, "prompt_error", CALIBRATED_PREFILL_ERROR)
        source = profile.sources.get("f_w", "runs of this machine")
    else:
        error, basis = table["error"], f"class {profile.device_class}" if known else UNKNOWN
        source = profile.sources.get(NO_CONSTANTS, table["error_source"])
        if NO_CONSTANTS in profile.sources:
            error, prefill_error = max(error, WIDEST), max(prefill_error, WIDEST)
        elif known and (profile.effective_gbs is not None or "f_w" in profile.constants):
            error, source = min(error, OWN_ERROR), "decoding was measured on this device with other models and programs"
    if few and basis != CALIBRATED:
        error, source = max(error, EXPERTS_ERROR), f"{source}; mixtures of experts differ more"
    program = profile.runtime or next((name for name, gbs in profile.programs.items() if gbs == profile.effective_gbs),
                                      table.get("program", Constants.program))
    if profile.runtime == OURS and basis != CALIBRATED and profile.device_class in PROCESSORS:
        values |= OWN_PROMPTS
        prefill_error = WIDEST
        error = max(error, OWN_OBSERVED if profile.effective_gbs is not None else OWN_DERIVED)
        source = ("edgeinfer was not measured there; its kernels are taken to draw what another program drew"
                  if profile.effective_gbs is not None else
                  "edgeinfer was not measured there; derived from its cores and its memory")
    return Constants(**values, program=program, peak=table["peak"], error=error, prefill_error=prefill_error,
                     basis=basis, error_source=source)


def _drawn(profile: DeviceProfile, table: Mapping[str, Any], bits: float) -> float:
    """Return the share of the bandwidth that weights draw: what the memory delivers, and what the unit asks for.

    Error correction in the same memory (`ecc_share`), two dies that are joined and a processor beside the GPU leave
    less of the memory. A unit asks for so many bytes in a cycle: its multiprocessors for `issue_bytes_per_clock`, half
    as many without dot products of int8, its cores for those of cores.toml.
    """
    figures = profile.figures
    share = float(table["f_w"]) * figures.get("ecc_share", 1.0)
    if figures.get("dies", 1) > 1:
        share *= table.get("joined", 1.0)
    if figures.get("shared"):
        share *= table.get("shared", 1.0)
    limit, sharpness = 0.0, GPU_SHARPNESS
    if (issue := table.get("issue_bytes_per_clock")) and (clock := figures.get("clock_ghz")):
        limit = issue * clock * profile.cores * (1.0 if profile.int8_peak_gops else NO_DOT_PRODUCTS)
    elif profile.device_class in PROCESSORS:
        limit = cores_gbs(profile.processor, table.get("groups")) * (WIDE_CODES if bits >= 8 else 1.0)
        sharpness = CORES_SHARPNESS
    if not limit:
        return share
    return float((share**-sharpness + (limit / profile.bandwidth_gbs) ** -sharpness) ** (-1 / sharpness))


def _calibrated_error(profile: DeviceProfile, figure: str, least: float) -> float:
    """Return the band of a calibrated machine, wider if other users' load made the probe's own runs disagree."""
    return min(max(least, MEDIAN_TO_BAND * profile.figures.get(figure, 0.0)), WIDEST)
