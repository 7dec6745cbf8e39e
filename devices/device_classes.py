"""Constants of the estimator with their errors: from the profile, else from its class (classes.toml)."""

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
"""Half-widths of the 80 % band if the constants come from runs on this machine: decoding, prompts."""
MEDIAN_TO_BAND, WIDEST = 1.9, 0.6
"""Ratio of the 80 % band to the median error, for normal errors; largest half-width of any band."""
OWN_ERROR = 0.25
"""Half-width of the 80 % band if a decoding speed was observed on this device, with another model or program."""


OURS = "edgeinfer"
"""Program that an estimate is for unless another is named."""
OWN_OBSERVED, OWN_DERIVED = 0.35, 0.45
"""Half-widths of the 80 % bands of edgeinfer on processors with and without measurements of another program."""
OWN_PROMPTS = {"mfu": 0.46, "mfu_attention": 0.15, "activation_cost": 400.0}
"""Constants of edgeinfer's prompt speed on processors that were not probed. `mfu` is between the 0.2 of llama.cpp and
the 0.74 of a probed processor; the others are those of the probed one."""

GPU_SHARPNESS, CORES_SHARPNESS = 4.0, 2.5
"""Exponents of the soft minimum of decoding's two limits, memory bandwidth and issue rate."""
NO_DOT_PRODUCTS, WIDE_CODES = 0.5, 1.4
"""Factors of the bytes per cycle: of a GPU without int8 dot products (assumed), of cores with codes of 8 bits or more
(fitted)."""

EXPERTS = ("experts_issue", "experts_ms", "recurrent_ms")
"""Constants of mixtures of experts, which classes share."""
EXPERTS_ERROR = 0.155
"""Least half-width of the 80 % band for MoE models on GPUs."""

NO_CONSTANTS = "constants"
"""Key in the sources of a probed profile of the reason why it has no constants of its own."""


BANDWIDTH_MOVED = "bandwidth_moved"
"""Figure of a probed profile: the share by which the bandwidth changed during the probe, and may change again."""


@dataclass(frozen=True)
class Constants:
    """Constants of one device; the defaults are an ideal device, which reaches its limits without fixed costs."""

    f_w: float = 1.0
    """Share of the bandwidth that reading weights reaches."""
    t0_ms: float = 0.0
    """Fixed time of a token, for 32 layers."""
    token_ms: float = 0.0
    """Additional fixed time of a token for Python and sampling, independent of the model."""
    sequence_ms: float = 0.0
    """Additional fixed time of each sequence of a step."""
    f_kv: float = 1.0
    """Share of the bandwidth that attention reaches on keys and values."""
    attention_ms: float = 0.0
    """Time of 1e9 operations of attention in decoding, in addition to reading: the cost of heads that share K and V."""
    mfu: float = 1.0
    """Share of the peak that the matrices of prompts reach."""
    mfu_attention: float = 1.0
    """Share of the peak that attention reaches in prompts."""
    activation_cost: float = 0.0
    """Operations of the peak that take as long as the work on one value between the matrices of a prompt."""
    few_rows: float = 0.0
    """Share of the peak that matrices of up to 16 rows reach; 0 if it was not measured."""
    unhidden: float = 0.0
    """Share of the reading of weights that arithmetic of several rows does not hide."""
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
    """Return the classes of classes.toml by name, ``unknown`` included, with the constants that they share."""
    tables = read_toml(Path(__file__).with_name("classes.toml"))
    for table in tables.values():
        if shared := table.get("experts_of"):
            table |= {key: tables[shared][key] for key in EXPERTS if key in tables[shared]}
    return tables


def with_family(table: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """Return a class's constants with those of a generation in place of the general ones."""
    families = classes()[shared]["families"] if (shared := table.get("families_of")) else table.get("families", {})
    return {**table, **families.get(family, {})}


def constants_of(profile: DeviceProfile, table: Mapping[str, Any] | None = None, bits: float = 4.0,
                 experts: bool = False, recurrent: bool = False) -> Constants:
    """Return the constants to use for a device.

    A constant of the profile takes precedence. Next, if the profile has a measured decoding bandwidth, f_w is its share
    of the device's bandwidth, and f_kv keeps its ratio to f_w. The others are those of the class and its generation;
    `_bandwidth_share` adjusts f_w to the device. t0_ms is scaled from `t0_clock_ghz` to the device's clock.

    Parameters
    ----------
    profile : DeviceProfile
    table : mapping, optional
        Constants that replace those of the profile's class (for fits).
    bits : float
        Bits of a weight's code: 8 and more need less unpacking for each byte.
    experts : bool
        True if a token reads some of several experts, which GPUs do more slowly: their multiprocessors ask for fewer
        bytes in a cycle (`experts_issue`), and routing takes time (`experts_ms`).
    recurrent : bool
        True if some layers of such a model are recurrent, whose many small kernels take `recurrent_ms`.
    """
    known = profile.device_class in classes()
    table = with_family(table or classes()[profile.device_class if known else UNKNOWN], profile.family or profile.isa)
    values = _values(profile, table, bits, experts, recurrent)
    prefill_error = table["prefill_error"]
    if profile.measured is not None and "f_w" in profile.constants:
        basis = CALIBRATED
        error = _calibrated_error(profile, "decode_error", CALIBRATED_ERROR)
        prefill_error = _calibrated_error(profile, "prompt_error", CALIBRATED_PREFILL_ERROR)
        source = profile.sources.get("f_w", "runs of this machine")
        if (moved := profile.figures.get(BANDWIDTH_MOVED, 0.0)) > error:
            error, source = min(moved, WIDEST), f"{source}; the bandwidth changed by {moved:.0%} during the probe"
    else:
        error, basis = table["error"], f"class {profile.device_class}" if known else UNKNOWN
        source = profile.sources.get(NO_CONSTANTS, table["error_source"])
        if NO_CONSTANTS in profile.sources:
            error, prefill_error = max(error, WIDEST), max(prefill_error, WIDEST)
        elif known and (profile.effective_gbs is not None or "f_w" in profile.constants):
            error, source = min(error, OWN_ERROR), "decoding was measured on this device with other models and programs"
    if experts and table.get("experts_ms") and basis != CALIBRATED:
        error, source = max(error, EXPERTS_ERROR), f"{source}; mixtures of experts differ more"
    program = profile.runtime or next((name for name, gbs in profile.programs.items() if gbs == profile.effective_gbs),
                                      table.get("program", Constants.program))
    if profile.runtime == OURS and basis != CALIBRATED and profile.device_class in PROCESSORS:
        values |= OWN_PROMPTS
        prefill_error = WIDEST
        error = max(error, OWN_OBSERVED if profile.effective_gbs is not None else OWN_DERIVED)
        source = ("edgeinfer was not measured there; it is assumed to reach the bandwidth of another program"
                  if profile.effective_gbs is not None else
                  "edgeinfer was not measured there; derived from its cores and its memory")
        if table.get("thread_ms") and "t0_ms" not in profile.constants:
            source += ", without the barriers of its threads, which are known of llama.cpp alone"
    return Constants(**values, program=program, peak=table["peak"], error=error, prefill_error=prefill_error,
                     basis=basis, error_source=source)


def _values(profile: DeviceProfile, table: Mapping[str, Any], bits: float, experts: bool,
            recurrent: bool) -> dict[str, float]:
    """Return a device's constants, which those of edgeinfer's own speed may replace."""
    values = {name: float(table[name]) for name in ("f_w", "t0_ms", "f_kv", "mfu", "mfu_attention")}
    rest = ("token_ms", "sequence_ms", "activation_cost", "attention_ms")
    values |= {name: float(table.get(name, 0.0)) for name in rest}
    if "t0_ms" not in profile.constants:
        values["t0_ms"] = _fixed_ms(profile, table, experts, recurrent)
    share, values["f_w"] = values["f_w"], _bandwidth_share(profile, table, bits)
    if profile.device_class in PROCESSORS:
        values["f_kv"] *= values["f_w"] / share
    if profile.effective_gbs is not None:
        seen = profile.effective_gbs / profile.bandwidth_gbs
        values["f_kv"] *= seen / values["f_w"]
        values["f_w"] = seen
    if experts and (issue := table.get("experts_issue")) and "issue_bytes_per_clock" in table:
        of_experts = {**table, "issue_bytes_per_clock": table["issue_bytes_per_clock"] * issue}
        values["f_w"] *= _bandwidth_share(profile, of_experts, bits) / _bandwidth_share(profile, table, bits)
    return {**values, **profile.constants}


def _fixed_ms(profile: DeviceProfile, table: Mapping[str, Any], experts: bool, recurrent: bool) -> float:
    """Return the fixed time of a token, for 32 layers; that of threads is known only for other programs' barriers."""
    fixed = float(table["t0_ms"])
    if clock := profile.figures.get("clock_ghz"):
        fixed *= (table.get("t0_clock_ghz", clock) / clock) ** table.get("t0_power", 1.0)
    if profile.runtime != OURS:
        fixed += float(table.get("thread_ms", 0.0)) * sum(number for number, _ in profile.processor.values())
    if experts:
        fixed += float(table.get("experts_ms", 0.0)) + recurrent * float(table.get("recurrent_ms", 0.0))
    return fixed


def _bandwidth_share(profile: DeviceProfile, table: Mapping[str, Any], bits: float) -> float:
    """Return the share of the bandwidth that reading weights reaches: a soft minimum of memory and unit.

    Error correction in the same memory (`ecc_share`), joined dies and a processor that shares the GPU's memory reduce
    the memory's limit. The unit's limit is bytes per cycle: of multiprocessors `issue_bytes_per_clock`, half of it
    without int8 dot products; of cores the value in cores.toml.
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
    """Return the half-width for a calibrated machine, wider if other load made the probe's runs disagree."""
    return min(max(least, MEDIAN_TO_BAND * profile.figures.get(figure, 0.0)), WIDEST)
