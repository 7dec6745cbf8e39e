"""Behaviour on a GPU with a published profile, as reported by `estimate`, `plan`, `run` and `bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ... import backends
from ...errors import UsageError
from ..output import not_ours, whose_object

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Traffic

    from ...backends import Sizes
    from ...config import RuntimeConfig
    from ...llm.executors import Executor
    from ...models.description import ModelDescription

PROMPT = 512


class Cards:
    """Returns the executor of a model on one device after another; the model is lowered for NVIDIA's cards once.

    Parameters
    ----------
    describe : callable
        Describes the model without passes.
    config : RuntimeConfig
    kv : str or None
        Type of the KV cache, where one was requested.
    """

    def __init__(self, describe: Callable[[], ModelDescription], config: RuntimeConfig, kv: str | None):
        self._config, self._kv = config, kv
        self._model = cache(describe)
        self._known: dict[bool, Executor] = {}

    def on(self, profile: DeviceProfile, sequences: int | None = None) -> tuple[ModelDescription, Executor] | None:
        """Return the model without passes and its executor on an NVIDIA card; None for other devices.

        By default the sequences are those of the settings. One has a slot and several have pages, so that there are two
        lowered models at most.
        """
        from ...llm.executors import executor_of

        if (card := devices.served(profile)) is None:
            return None
        model, config = self._model(), replace(self._config, max_sequences=sequences or self._config.max_sequences)
        several = config.max_sequences > 1
        if several not in self._known:
            self._known[several] = executor_of(profile, model.graph, config, self._kv)
        if not (found := self._known[several]).planner:
            return model, found
        return model, found._replace(profile=card, config=replace(found.config, max_sequences=config.max_sequences))


def gpu_here() -> DeviceProfile | None:
    """Return the profile of this machine's first GPU; None if there is no driver or no profile of that name."""
    try:
        return devices.gpu_profile(backends.read_gpu().name)
    except UsageError:
        return None


def remark(found: dict[str, Any], profile: DeviceProfile, sizes: Sizes | None = None, refused: str = "") -> str:
    """Return the sentences on a speed: whose it is, and what a lowered model reads beyond its bundle."""
    return " ".join(filter(None, [not_ours(found, profile, refused), *(sizes.notes if sizes else ())]))


def speed_object(profile: DeviceProfile, traffic: Traffic, ctx: int, sequences: int,
                 computed: float = 1.0) -> dict[str, Any]:
    """Return the `estimate` of `plan`: speed with full contexts, and with empty ones."""
    full, empty = (devices.estimate(profile, traffic, depth, min(PROMPT, ctx), computed=computed, sequences=sequences)
                   for depth in (ctx, 0))
    return {
        "device": profile.name, "depth": ctx, "sequences": sequences, "decode_tok_per_s": full.decode_tok_per_s,
        "low": full.low, "high": full.high, "decode_tok_per_s_empty": empty.decode_tok_per_s,
        "prefill_tok_per_s": empty.prefill_tok_per_s, "prompt": empty.prompt, "ttft_ms": empty.ttft_ms,
        "basis": full.basis, "error_source": full.error_source, **whose_object(full),
    }
