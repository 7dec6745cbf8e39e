"""Time of a forward pass in which parts of prompts share the weights with sequences that decode."""

from __future__ import annotations

import math
from functools import cache

from .estimator import constants_for, decode_terms, prefill_terms
from .profile import DeviceProfile
from .several_rows import weights_ms
from .traffic import Traffic


class MixedSteps:
    """Times of the steps of an engine on a device.

    Parameters
    ----------
    profile : DeviceProfile
    traffic : Traffic
    depth : int
        Positions before the token that each sequence decodes.
    computed : float
        Share of a prompt's tokens times layers that is computed, where prompts are pruned.

    Attributes
    ----------
    has_prompts : bool
        False if the device's peak, or the model's operations, are not known.
    """

    def __init__(self, profile: DeviceProfile, traffic: Traffic, depth: int, computed: float = 1.0):
        self._profile, self._traffic, self._depth, self._computed = profile, traffic, depth, computed
        self._constants = constants_for(profile, traffic)
        self._decoding, self._weights, self._alone = cache(self._decode), cache(self._read), cache(self._prompt)
        self.has_prompts = bool(self._alone(1))

    def milliseconds(self, decoding: int, prompt: int = 0, before: int = 0) -> float:
        """Return the time of one step.

        Parameters
        ----------
        decoding : int
            Sequences that get a token.
        prompt : int
            Tokens of a prompt; 0 only where a sequence decodes.
        before : int
            Tokens of the prompt that earlier steps computed.
        """
        if not prompt:
            return math.fsum(self._decoding(decoding).values())
        alone = self._alone(prompt)
        attention = alone["prefill_attention"] * self._growth(prompt, before)
        stored = alone.get("prefill_streaming", 0.0)
        if not decoding:
            return math.fsum(alone.values()) - alone["prefill_attention"] + attention
        beside = self._decoding(decoding)
        own = math.fsum(ms for name, ms in beside.items() if name not in ("weights", "sparse_ffn", "streaming"))
        return (own + max(stored, beside.get("streaming", 0.0)) + self._weights(decoding, prompt) + attention
                + alone["prefill_activations"])

    def limited_by_arithmetic(self, decoding: int) -> bool:
        """Return whether arithmetic takes longer than reading in a step without prompts."""
        reading = self._reading(decoding)
        arithmetic = math.sqrt(max(0.0, self._weights(decoding, 0) ** 2 - reading**2))
        return arithmetic >= reading + self._decoding(decoding).get("kv", 0.0)

    def _growth(self, prompt: int, before: int) -> float:
        """Return the attention of prompt tokens after others, over that of the same at the beginning."""
        first = self._traffic.attention_operations_of(prompt, 0)
        return self._traffic.attention_operations_of(prompt, before) / first if first else 1.0

    def _decode(self, decoding: int) -> dict[str, float]:
        return decode_terms(self._profile, self._traffic, self._constants, self._depth, decoding)

    def _prompt(self, tokens: int) -> dict[str, float]:
        return prefill_terms(self._profile, self._traffic, self._constants, 0, tokens, self._computed)

    def _read(self, decoding: int, prompt: int) -> float:
        """Return the milliseconds of the weights for the rows of both; tokens of prompts need no head."""
        rows, traffic = decoding + prompt, self._traffic
        operations = traffic.operations - traffic.head_operations * prompt / rows
        return weights_ms(self._profile, self._constants, operations, self._reading(rows), rows)

    def _reading(self, rows: int) -> float:
        nbytes = self._traffic.of_several(rows).weight_bytes
        return nbytes / (self._constants.f_w * self._profile.bandwidth_gbs) / 1e6
