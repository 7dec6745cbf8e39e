"""Demands of a model on a machine, in plain numbers: bytes and operations, per token and per position of context.

The estimator reads only this object; it knows no model. A description of a model (a bundle, a config.json, a shape)
fills it in. Per position means: for each token of context that a new token attends to, all layers together.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError
from edgeinfer.graph.topn_cost import TopNCost

from .neurons import GATES
from .type_costs import TypeShares


@dataclass(frozen=True)
class Traffic:
    """Bytes and operations of one token of decoding, and of prompts. GB are 1e9 bytes elsewhere; here all is bytes."""

    weight_bytes: float
    """Weights with their scales that one token reads, if nothing is skipped: linear layers, norms, head; of a mixture
    of experts the active ones. Rows of the embedding are left out."""
    layers: int
    """Transformer layers; the fixed time of a token grows with them."""
    operations: float = 0.0
    """Multiplications and additions of the matrices for one token, head included: 2 x weights used."""
    head_operations: float = 0.0
    """Part of `operations` that belongs to the head; a prompt needs it once, not once a token."""
    kv_bytes: float = 0.0
    """Keys and values with their scales that a token reads per position, in the layers that see all positions."""
    window_kv_bytes: float = 0.0
    """The same in the layers that see at most `window` positions."""
    window: int = 0
    """Positions that the windowed layers see; 0 if there are none."""
    state_bytes: float = 0.0
    """Recurrent state that a token reads and writes, whatever the context."""
    attention_operations: float = 0.0
    """Multiplications and additions of attention per token and position (4 x heads x head size x layers), in the layers
    that see all positions."""
    window_attention_operations: float = 0.0
    """The same in the windowed layers."""
    activation_values: float = 0.0
    """Values that go into and come out of the layers' matrices for one token: work of prompts that grows with the width
    of a model, not with its square."""
    prefill_weight_bytes: float = 0.0
    """Weights that a forward pass over many prompt tokens reads; 0 is `weight_bytes`. A mixture of experts reads all of
    them."""
    parameters: float = 0.0
    """Weights of the model, embedding and head included (of an MoE model those active for a token): the pure figure of
    the ceiling takes `pure_bits` for each. 0 if unknown."""
    types: TypeShares = ()
    """Types of the matrices, with their shares of `weight_bytes` and of `operations`; without them all are q4."""
    pure_bits: float = 4.0
    """Bits of a weight's code, without scales."""
    kv_values: float = 0.0
    """Keys and values per position, all layers: the pure figure takes `pure_kv_bits` for each. 0 if unknown."""
    pure_kv_bits: float = 8.0
    """Bits of a key's or a value's code, without scales."""
    value_bytes: float = 0.0
    """Part of `kv_bytes` that is V of which decoded tokens read chosen rows; 0 if all is read."""
    topn: TopNCost | None = None
    """Selection of its rows, which determines how many are read at any depth."""
    score_bytes: float = 0.0
    """Bytes per position that are written and read for the choice."""
    ffn_bytes: float = 0.0
    """Part of `weight_bytes` whose rows may be skipped (a sparse feed-forward network)."""
    active_share: float = 1.0
    """Share of `ffn_bytes` that is read, from 0 to 1; 1 is dense."""
    row_bytes: float = 0.0
    """Contiguous bytes of one neuron's piece in memory; 0 if nothing is skipped."""
    neuron_layers: tuple[tuple[str, float], ...] = ()
    """Layers with FFNs stored neuron by neuron, which share `ffn_bytes` evenly: how each runs (off, exact, predict; or
    it
    is in tiles), and the share of its neurons that is computed whole. Predictors are part of `weight_bytes`."""
    gate_share: float = GATES
    """Share of gates in the bytes of neurons; they are read before the active neurons are known."""
    flash_bytes: float = 0.0
    """Bytes that a token reads from storage (cold weights that miss the cache)."""
    flash_chunk_bytes: float = 0.0
    """Contiguous bytes of one such read; 0 is one long read."""

    streamed_bytes: float = 0.0
    """Weights that a token reads from storage in order, ahead of use: they cost the time that computing does not
    hide."""
    prompt_stored_bytes: float = 0.0
    """Weights that a forward pass over many prompt tokens reads from storage, ahead of use."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in ("neuron_layers", "topn", "types"):
                continue
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise UsageError(f"Traffic: {field.name} is {value!r}; it must be a finite number of 0 or more.")
        checks = (
            ("layers", self.layers >= 1, "1 or more"),
            ("active_share", self.active_share <= 1, "from 0 to 1"),
            ("ffn_bytes", self.ffn_bytes <= self.weight_bytes, f"at most weight_bytes, {self.weight_bytes}"),
            ("head_operations", self.head_operations <= self.operations, f"at most operations, {self.operations}"),
            ("row_bytes", self.active_share == 1 or self.row_bytes > 0, "above 0 where active_share is below 1"),
        )
        for name, good, want in checks:
            if not good:
                raise UsageError(f"Traffic: {name} is {getattr(self, name)!r}; it must be {want}.")

    @property
    def experts(self) -> bool:
        """True if a token chooses some of several experts."""
        return bool(self.ffn_bytes) and self.prefill_weight_bytes > self.weight_bytes

    @property
    def skipped_bytes(self) -> float:
        """Part of `ffn_bytes` that is not read."""
        if not self.neuron_layers:
            return self.ffn_bytes * (1 - self.active_share)
        read = {"off": lambda density: 1.0, "predict": float, "tiles": lambda density: 1.0,
                "exact": lambda density: self.gate_share + (1 - self.gate_share) * density}
        whole = math.fsum(read[mode](density) for mode, density in self.neuron_layers) / len(self.neuron_layers)
        return self.ffn_bytes * (1 - whole)

    def of_several(self, tokens: int) -> Traffic:
        """Return the traffic of a pass over several tokens: of a mixture of experts they choose independently, so that
        each reads experts that those before it did not choose; else weights are read once for all."""
        every = self.prefill_weight_bytes - self.weight_bytes + self.ffn_bytes
        if tokens == 1 or self.prefill_weight_bytes <= self.weight_bytes or not self.ffn_bytes:
            return self
        share = self.ffn_bytes / every
        chosen = 1 - (1 - share) ** tokens
        return replace(self, weight_bytes=self.weight_bytes + every * (chosen - share), ffn_bytes=every * chosen,
                       flash_bytes=self.flash_bytes * chosen / share)

    def left_out_at(self, depth: float) -> float:
        """Bytes of V that a decoded token does not read, because it chooses rows; those of a mean are read."""
        return self.value_bytes * (depth - self.topn.rows(depth)) if self.topn else 0.0

    def kv_bytes_at(self, depth: float) -> float:
        """Bytes of keys and values that a token reads with `depth` positions of context."""
        return self.kv_bytes * depth + self.window_kv_bytes * min(depth, self.window) - self.left_out_at(depth)

    def sequence_bytes_at(self, depth: float) -> float:
        """Bytes that a token reads and writes of its own sequence, at a depth: keys and values, and state."""
        return self.kv_bytes_at(depth) + self.state_bytes

    def attention_operations_of(self, prompt: int, depth: int) -> float:
        """Operations of attention for a whole prompt after `depth` positions; token i sees depth + i positions."""
        seen = prompt * depth + prompt * (prompt + 1) / 2
        before = min(max(self.window - depth, 0), prompt)  # tokens that see less than a whole window
        windowed = before * depth + before * (before + 1) / 2 + (prompt - before) * self.window
        return self.attention_operations * seen + self.window_attention_operations * windowed
