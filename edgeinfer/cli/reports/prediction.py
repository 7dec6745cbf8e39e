"""Predicted beside measured, after each `run` and `bench`, on a machine that was probed; and updates of the profile.

Nothing here may fail or slow down a run: without a profile of this machine, or with one of other threads, there is no
prediction, and that is all.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ...base.dataclass import dataclass
from ...config import CPU, CUDA
from ...errors import EdgeInferError
from ...registry import Settings, prompt_share, settled
from .on_gpu import gpu_here

if TYPE_CHECKING:
    from edgeinfer.devices import DecodeRun, DeviceProfile, PromptRun, Traffic

    from ...config import RuntimeConfig
    from ...engine import Completion
    from ...models.description import ModelDescription

MIN_TOKENS = 16
"""Generated tokens, and tokens of a prompt, from which on a time is worth learning from."""
MAX_SWITCHES = 20.0
"""Times a second that other programs may take a processor away from a thread before a run counts as disturbed."""
MAX_SPREAD = 0.2
"""Standard deviation of a test's repetitions over their mean, above which the test counts as disturbed."""


@dataclass(frozen=True)
class Predictor:
    """A model on this machine."""

    profile: DeviceProfile
    traffic: Traffic
    techniques: Settings = ()
    """Techniques of the run that are not passes, settled for the model."""

    def decode(self, depth: int, bandwidth_gbs: float | None = None, sequences: int = 1) -> dict[str, Any]:
        """Return tokens per second after `depth` positions; with the bandwidth of the moment where that was read."""
        found = devices.estimate(self._at(bandwidth_gbs, None), self.traffic, depth, sequences=sequences)
        return {"t_per_s": found.decode_tok_per_s, "low": found.low, "high": found.high}

    def prompt(self, depth: int, tokens: int, peak_gops: float | None = None) -> dict[str, Any] | None:
        """Return tokens per second of a prompt, pruned ones included; None if the profile has no peak."""
        found = devices.estimate(self._at(None, peak_gops), self.traffic, depth, tokens,
                                 computed=self.computed(depth, tokens))
        if found.prefill_tok_per_s is None:
            return None
        return {"t_per_s": found.prefill_tok_per_s, "low": found.prefill_low, "high": found.prefill_high}

    def computed(self, depth: int, tokens: int) -> float:
        """Return the share of a prompt's tokens times layers that is computed."""
        return prompt_share(self.techniques, tokens, depth, self.traffic.layers)

    @property
    def on_gpu(self) -> bool:
        """True if the profile is that of a GPU, and readings of this machine's memory say nothing of it."""
        return self.profile.device_class == devices.SERVED

    @property
    def teaches(self) -> bool:
        """True if the profile learns from runs: not if FFNs skip neurons, rows of V are selected or prompts are pruned,
        because bytes and operations are then assumptions; nor from runs on a GPU."""
        return not (self.on_gpu or self.techniques or self.traffic.neuron_layers or self.traffic.value_bytes)

    @property
    def basis(self) -> dict[str, Any]:
        """Basis of the figures."""
        found = devices.estimate(self.profile, self.traffic)
        return {"basis": found.basis, "error": found.error, "error_source": found.error_source}

    def decode_run(self, depth: float, seconds: float, bandwidth_gbs: float | None = None) -> DecodeRun:
        """Return a measurement in the form that the profile stores: bytes as the memory alone would deliver them in
        the time of the model's types."""
        asked, gbs = self.traffic, bandwidth_gbs or self.profile.bandwidth_gbs
        reading, _ = devices.costs_of(self.profile.figures, gbs, asked.types)
        return devices.DecodeRun(asked.layers, asked.weight_bytes * reading, asked.kv_bytes_at(depth), seconds, gbs,
                                 asked.attention_operations_of(1, int(depth)))

    def prompt_run(self, depth: int, tokens: int, seconds: float, peak_gops: float | None = None) -> PromptRun | None:
        """Return a measurement of a prompt as the profile learns it, its operations as many with q4 as take that long;
        None if there is no peak to compare with."""
        peak = peak_gops or self.profile.int8_peak_gops
        if not peak:
            return None
        asked = self.traffic
        _, arithmetic = devices.costs_of(self.profile.figures, self.profile.bandwidth_gbs, asked.types)
        operations = (asked.operations - asked.head_operations) * tokens + asked.head_operations
        attention = asked.attention_operations_of(tokens, depth)
        return devices.PromptRun(asked.layers, operations * arithmetic, attention, seconds, peak,
                                 asked.activation_values * tokens)

    def _at(self, bandwidth_gbs: float | None, peak_gops: float | None) -> DeviceProfile:
        return replace(self.profile, bandwidth_gbs=bandwidth_gbs or self.profile.bandwidth_gbs,
                       int8_peak_gops=peak_gops or self.profile.int8_peak_gops)


def make_predictor(bundle: Path, config: RuntimeConfig, threads: int | None, isa: str,
                   streamed_bytes: int = 0, device: str = CPU) -> Predictor | None:
    """Return a predictor, or None: this machine was not probed, or with other threads or instructions, or there is no
    profile of its GPU where that runs the model.

    Nor is there one for a model whose layers are streamed, of which a profile is to learn nothing.
    """
    try:
        profile = gpu_here() if device == CUDA else None if streamed_bytes else _probed(threads, isa)
        if profile is None:
            return None
        from ...models.describe import describe

        described = describe(bundle, recipe=config.recipe)
        traffic = described.traffic(config.kv) if device != CUDA else _on_gpu(described, config)
        return Predictor(profile, traffic, settled(config.techniques, described.layers))
    except (EdgeInferError, OSError):
        return None


def _on_gpu(model: ModelDescription, config: RuntimeConfig) -> Traffic:
    """Return the traffic of a model as CUDA runs it."""
    from edgeinfer.memory_planner import to_request

    from ...backends import PROVIDERS, device_planner

    planner, taken = device_planner(model.as_stored, config, PROVIDERS[CUDA], config.kv)
    return planner.lower(to_request(taken)).traffic(model.traffic(taken.kv), taken.kv)


def _probed(threads: int | None, isa: str) -> DeviceProfile | None:
    profile = devices.local_profile() if devices.local_path().is_file() else None
    return profile if profile and profile.cores == threads and profile.isa == isa else None


def run_estimate(predictor: Predictor | None, completion: Completion) -> dict[str, Any] | None:
    """Return predicted beside measured of a request; None without a prediction or a second token."""
    if predictor is None:
        return None
    tokens, cached = completion.prompt_tokens - completion.cached_tokens, completion.cached_tokens
    out: dict[str, Any] = {**predictor.basis, "decode": None, "prompt": None}
    if completion.plain_tpot_ms and len(completion.choices) == 1 and completion.score is None:
        depth = completion.prompt_tokens + completion.completion_tokens // 2
        out["decode"] = beside(predictor.decode(depth), 1000 / completion.plain_tpot_ms)
    elif predictor.on_gpu and completion.score is None and completion.plain_tpot_ms and completion.tok_per_s:
        depth, n = completion.prompt_tokens + len(completion.token_ids) // 2, len(completion.choices)
        without_speculation = completion.tok_per_s * (completion.tpot_ms or 0) / completion.plain_tpot_ms
        out["decode"] = beside(predictor.decode(depth, sequences=n), without_speculation)
    if completion.ttft_ms and tokens > 0:
        out["prompt"] = beside(predictor.prompt(cached, tokens), 1000 * tokens / completion.ttft_ms)
    return out


def learn_from_run(predictor: Predictor | None, completion: Completion, disturbed: bool) -> None:
    """Let the local profile learn from a request that nothing disturbed."""
    several = len(completion.choices) != 1 or completion.score is not None
    if predictor is None or disturbed or several or not predictor.teaches:
        return
    decodes, prompts = [], []
    tokens = completion.prompt_tokens - completion.cached_tokens
    if completion.plain_tpot_ms and completion.completion_tokens >= MIN_TOKENS:
        depth = completion.prompt_tokens + completion.completion_tokens / 2
        decodes.append(predictor.decode_run(depth, completion.plain_tpot_ms / 1000))
    if completion.ttft_ms and tokens >= 4 * MIN_TOKENS:
        run = predictor.prompt_run(completion.cached_tokens, tokens, completion.ttft_ms / 1000)
        prompts += [run] if run else []
    devices.learn(decodes, prompts)


class Disturbances:
    """Counts how often other programs took a processor away from this one since it was made."""

    def __init__(self) -> None:
        self._before = _switches()

    def disturbed(self, seconds: float, threads: int) -> bool:
        """Return whether that was often, for a run of this many seconds; not if the system does not say."""
        return _switches() - self._before > MAX_SWITCHES * max(seconds, 0.5) * threads


def _switches() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def sentence(out: dict[str, Any] | None) -> str | None:
    """Return a request's prediction in one line; None if there is nothing to compare."""
    if out is None:
        return None
    parts = []
    for name, key in (("decode", "decode"), ("prompt", "prompt")):
        item = out[key]
        if item is not None:
            parts.append(f"{name} {item['t_per_s']:.1f} tok/s ({item['low']:.1f} to {item['high']:.1f}), measured "
                         f"{item['measured']:.1f} ({item['miss']:+.0%})")
    return f"estimated: {'; '.join(parts)}; {out['basis']}" if parts else None


def beside(predicted: dict[str, Any] | None, measured: float) -> dict[str, Any] | None:
    """Return a prediction with the measured value; `miss` is predicted over measured, less one."""
    if predicted is None:
        return None
    return {**predicted, "measured": measured, "miss": predicted["t_per_s"] / measured - 1}
