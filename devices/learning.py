"""The local profile learns: runs of this machine, kept beside its profile, from which its constants are solved again.

The probe's own constants take part as a few runs that they would predict, so a handful of runs of one model bends
them but cannot tear them apart; the more runs there are, the less they count. A new probe starts over.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from edgeinfer.base.dataclass import dataclass
from edgeinfer.base.files import open_plain, replacement
from edgeinfer.base.strict_json import parse_json
from edgeinfer.errors import EdgeInferError

from .calibration import LAYERS, DecodeRun, PromptRun, solve_constants
from .device_classes import Constants, constants_of
from .profile import DeviceProfile
from .store import local_path, local_profile, save_profile
from .type_costs import drawn_gbs

SWITCH = "EDGEINFER_LEARN"
"""Environment variable; 0 keeps the local profile as the probe saved it."""
MIN_RUNS = 12
"""Runs of decoding that take the place of a probe which found no constants."""
MAX_RUNS = 64
"""Runs of each kind that are kept, the newest."""
FAR_OFF = 1.5
"""A run that took this many times longer or shorter than predicted was disturbed, or is of another kind."""
MIN_BYTES = 32e6
"""Weights below this may stay in the caches, and say nothing of the memory."""
MIN_OPERATIONS = 5e9
"""Prompts of fewer operations are mostly waiting."""
MAX_FILE_BYTES = 1 << 20
TYPICAL = ((30, 1.1e8, 2.3e4, 2.1e8, 6.9e4, 2.5e5), (22, 6.5e8, 2.4e4, 1.9e9, 1.8e5, 6.5e5),
           (32, 3.8e9, 2.7e5, 1.3e10, 5.2e5, 2.1e6))
"""Layers, bytes of weights, of KV a position, operations of matrices, of attention a position, values between matrices:
of 135M, 1.1B, 7B models whose times the probe's constants stand for."""
DEPTHS, PROMPT = (0, 4096), 512
Run = TypeVar("Run", DecodeRun, PromptRun)


@dataclass
class _Runs:
    """Contents of the file."""

    probe: str | None
    """When the profile was probed that the runs belong to."""
    base: dict[str, float]
    """Constants that the probe found."""
    decodes: list[DecodeRun] = field(default_factory=list)
    prompts: list[PromptRun] = field(default_factory=list)


def may_learn() -> bool:
    """Return whether runs may change the local profile: it exists, and EDGEINFER_LEARN is not 0."""
    return os.environ.get(SWITCH) != "0" and local_path().is_file()


def learn(decodes: Iterable[DecodeRun], prompts: Iterable[PromptRun]) -> DeviceProfile | None:
    """Keep runs of this machine and solve the constants of its profile again.

    Runs that are far from the profile's prediction are left out: others used the machine, or the model stayed in the
    caches. Nothing raises: a run is not to fail because its speed cannot be written down.

    Returns
    -------
    DeviceProfile or None
        The new profile; None if nothing was learned.
    """
    if not may_learn():
        return None
    try:
        profile = local_profile()
        if profile is None:
            return None
        runs = _read(_runs_path(), profile)
        constants = constants_of(profile)
        kept = [run for run in decodes if _plausible_decode(run, constants)]
        kept_prompts = [run for run in prompts if _plausible_prompt(run, constants)]
        if not kept and not kept_prompts:
            return None
        runs.decodes = [*runs.decodes, *kept][-MAX_RUNS:]
        runs.prompts = [*runs.prompts, *kept_prompts][-MAX_RUNS:]
        _write(_runs_path(), runs)
        if "f_w" not in runs.base and len(runs.decodes) < MIN_RUNS:
            return None
        learned = with_runs(profile, runs.base, runs.decodes, runs.prompts)
        save_profile(learned, local_path())
        return learned
    except (EdgeInferError, OSError):
        return None


def with_runs(
    profile: DeviceProfile, base: Mapping[str, float], decodes: list[DecodeRun], prompts: list[PromptRun]
) -> DeviceProfile:
    """Return a profile whose constants are solved from runs, and from those that its `base` constants stand for."""
    plain = constants_of(replace(profile, constants=base, sources={}))
    typical = _typical(plain, profile)
    solved = solve_constants([*decodes, *typical[0]], [*prompts, *typical[1]])
    for name in ("attention_ms", "token_ms"):
        if name in base:  # where the runs show none there is none: the others were solved with it
            solved.setdefault(name, 0.0)
    said = f"probe and {len(decodes)} runs of decoding, {len(prompts)} prompts of this machine"
    drawn = drawn_gbs(profile.figures, profile.bandwidth_gbs, solved.get("f_w", plain.f_w))
    return replace(profile, constants={**base, **solved}, sources={**profile.sources, **dict.fromkeys(solved, said)},
                   effective_gbs=None if profile.effective_gbs is None else drawn)


def _typical(constants: Constants, profile: DeviceProfile) -> tuple[list[DecodeRun], list[PromptRun]]:
    """Make runs that take exactly the time that constants predict."""
    decodes, prompts = [], []
    peak = profile.int8_peak_gops or 1.0
    for layers, weights, kv, matrices, attention, values in TYPICAL:
        for depth in DEPTHS:
            decode = DecodeRun(layers, weights, kv * depth, 1.0, profile.bandwidth_gbs, attention * depth)
            decodes.append(replace(decode, seconds=decode_seconds(decode, constants)))
            seen = PROMPT * depth + PROMPT * (PROMPT + 1) / 2
            prompt = PromptRun(layers, matrices * PROMPT, attention * seen, 1.0, peak, values * PROMPT)
            prompts.append(replace(prompt, seconds=prompt_seconds(prompt, constants)))
    return decodes, prompts


def decode_seconds(run: DecodeRun, constants: Constants) -> float:
    """Predict the time of a token from constants, with the bandwidth of the moment."""
    bandwidth = run.bandwidth_gbs * 1e9
    return ((constants.token_ms + constants.t0_ms * run.layers / LAYERS) / 1e3
            + run.weight_bytes / (constants.f_w * bandwidth) + run.kv_bytes / (constants.f_kv * bandwidth)
            + constants.attention_ms * run.attention_operations / 1e12)


def prompt_seconds(run: PromptRun, constants: Constants) -> float:
    """Predict the time of a prompt from constants, with the peak of the moment."""
    peak = run.int8_peak_gops * 1e9
    return ((constants.token_ms + constants.t0_ms * run.layers / LAYERS) / 1e3 + run.operations / (constants.mfu * peak)
            + run.attention_operations / (constants.mfu_attention * peak)
            + constants.activation_cost * run.values / peak)


def fit_errors(
    constants: Mapping[str, Any], decodes: Iterable[DecodeRun], prompts: Iterable[PromptRun]
) -> dict[str, float]:
    """Return the errors of constants on runs: median relative errors, `decode_error` and `prompt_error`.

    Rounding is no error: a single run that the constants were fitted to leaves 2e-16.
    """
    known = Constants(**constants)
    errors = {"decode_error": [decode_seconds(run, known) / run.seconds for run in decodes],
              "prompt_error": [prompt_seconds(run, known) / run.seconds for run in prompts]}
    return {name: round(statistics.median(abs(ratio - 1) for ratio in ratios), 6) for name, ratios in errors.items()}


def _plausible_decode(run: DecodeRun, constants: Constants) -> bool:
    return run.weight_bytes >= MIN_BYTES and _near(run.seconds, decode_seconds(run, constants))


def _plausible_prompt(run: PromptRun, constants: Constants) -> bool:
    return run.operations >= MIN_OPERATIONS and _near(run.seconds, prompt_seconds(run, constants))


def _near(seconds: float, predicted: float) -> bool:
    return seconds > 0 and predicted / FAR_OFF <= seconds <= predicted * FAR_OFF


def _runs_path() -> Path:
    return local_path().with_suffix(".runs.json")


def _read(path: Path, profile: DeviceProfile) -> _Runs:
    """The runs so far; none if they belong to an older probe, or the file is not one of edgeinfer's."""
    fresh = _Runs(profile.measured, dict(profile.constants))
    try:
        with open_plain(path) as file:
            data = parse_json(file.read(MAX_FILE_BYTES + 1))  # a longer one is cut, and no JSON
        base = {name: float(value) for name, value in data["base"].items()}
        runs = _Runs(data["probe"], base, _parsed(DecodeRun, data["decodes"]), _parsed(PromptRun, data["prompts"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return fresh
    return runs if runs.probe == profile.measured else fresh


def _parsed(kind: type[Run], rows: list[dict[str, Any]]) -> list[Run]:
    names = [item.name for item in fields(kind)]
    found = [kind(int(row["layers"]), *(float(row[name]) for name in names[1:])) for row in rows[-MAX_RUNS:]]
    if any(not 0 <= getattr(run, name) < 1e18 for run in found for name in names):
        raise ValueError("a run with impossible figures")
    return found


def _write(path: Path, runs: _Runs) -> None:
    """Write the runs, whole or not at all."""
    with replacement(path) as file:
        file.write(json.dumps(asdict(runs)).encode())
