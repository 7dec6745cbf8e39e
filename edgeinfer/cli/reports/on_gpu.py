"""Behaviour on a GPU with a published profile, as reported by `estimate`, `plan`, `run` and `bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ... import backends
from ...errors import UsageError
from ..output import whose_object

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Traffic

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
        self._describe, self._config, self._kv = describe, config, kv
        self._known: tuple[ModelDescription, Executor] | None = None

    def on(self, profile: DeviceProfile) -> tuple[ModelDescription, Executor] | None:
        """Return the model without passes and its executor on an NVIDIA card; None for other devices."""
        from ...llm.executors import executor_of

        if (card := devices.served(profile)) is None:
            return None
        if self._known is None:
            model = self._describe()
            self._known = model, executor_of(profile, model.graph, self._config, self._kv)
        model, found = self._known
        return model, found._replace(profile=card) if found.planner else found


def gpu_here() -> DeviceProfile | None:
    """Return the profile of this machine's first GPU; None if there is no driver or no profile of that name."""
    try:
        return devices.gpu_profile(backends.read_gpu().name)
    except UsageError:
        return None


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
