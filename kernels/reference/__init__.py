"""NumPy references: the memory that each kernel must leave, computed from memory as it was before.

`REFERENCES[name](InstructionView(instruction, ctx))` returns a list of `Expected`; the kernel runs; `compare` says
whether memory holds it. The mathematics is in functions of plain arrays (`linear_values` and the like), which specify
the kernels; the references only find the arrays in memory. Integer results are exact; floats agree within
`TOLERANCES`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..abi import NEURON_TYPES
from ..catalogue import KV, SCREENED, WEIGHTS
from .attention.attention import attend, attention_reference, merge_reference
from .attention.attention_scores import scores_reference as attention_scores_reference
from .attention.attention_select import select_reference
from .attention.attention_values import values_reference
from .attention.store_latent import store_latent_reference
from .elementwise import (
    quantise_rows,
    quantize_reference,
    rms_norm,
    rms_norm_f32_reference,
    rms_norm_q8_reference,
)
from .embedding import embed_reference
from .expected import Expected, compare
from .experts.experts import (
    experts_down_reference,
    experts_gated_reference,
    experts_input_f32_reference,
    experts_input_q8_reference,
    sigmoid_gate_reference,
)
from .experts.experts_resolve import experts_resolve_reference
from .experts.route import choose_experts, route_reference, sort_routes_reference
from .gather import gather_reference
from .matmul import ACTIVATION_FUNCTIONS, gated_reference, gated_values, linear_reference, linear_values
from .neuron_ffn.ffn import neuron_down_reference, neuron_gated_reference
from .neuron_ffn.neuron_mask import scores_reference, signs_reference
from .neuron_ffn.neuron_resolve import Cache, resolve, resolve_reference
from .norms import norm_f32_reference, norm_q8_reference
from .q8 import Q8Block, q8_blocks, read_q8, write_q8
from .recurrent.causal_conv import causal_conv_reference
from .recurrent.gated_norm import gated_norm_reference
from .recurrent.state_rules import delta_step, journal_reference, rule_reference, scan_step
from .rope import rope_store_reference, rotate
from .sampling.sample import EDIT, blocks_reference, choose_reference, edit_reference
from .screen import head_reference, least_reference, maxima_reference, reach
from .stream import stream_release_reference
from .tolerances import TOLERANCES
from .values import activate_reference, positions_reference
from .view import InstructionView

Reference = Callable[[InstructionView], list[Expected]]

REFERENCES: dict[str, Reference] = {
    "quantize": quantize_reference,
    "rms_norm_f32": rms_norm_f32_reference,
    "rms_norm_q8": rms_norm_q8_reference,
    "gather_outputs": gather_reference,
    "norm_f32": norm_f32_reference,
    "norm_q8": norm_q8_reference,
    "activate": activate_reference,
    "add_positions": positions_reference,
    "route": route_reference,
    "sort_routes": sort_routes_reference,
    "experts_input_q8": experts_input_q8_reference,
    "experts_input_f32": experts_input_f32_reference,
    "experts_resolve": experts_resolve_reference,
    "sigmoid_gate": sigmoid_gate_reference,
    "attention_merge": merge_reference,
    "attention_select": select_reference,
    "neuron_mask_scores": scores_reference,
    "neuron_mask_signs": signs_reference,
    "neuron_resolve": resolve_reference,
    "causal_conv": causal_conv_reference,
    "delta_rule": rule_reference(True),
    "delta_rule_rows": rule_reference(True, by_row=True),
    "selective_scan": rule_reference(False),
    "state_journal": journal_reference,
    "gated_norm": gated_norm_reference,
    "screen_maxima": maxima_reference,
    "sample_edit": edit_reference,
    "sample_blocks": blocks_reference,
    "sample_choose": choose_reference,
    "stream_release": stream_release_reference,
}
for _weights in WEIGHTS:
    _stored = _weights.partition("_g")[0], int(_weights.partition("_g")[2] or 0)
    REFERENCES[f"linear_{_weights}"] = linear_reference(*_stored)
    REFERENCES[f"gated_{_weights}"] = gated_reference(*_stored)
    REFERENCES[f"experts_gated_{_weights}"] = experts_gated_reference(*_stored)
    REFERENCES[f"experts_down_{_weights}"] = experts_down_reference(*_stored)
    REFERENCES[f"embed_{_weights}"] = embed_reference(*_stored)
for _weights in SCREENED:
    _stored = _weights.partition("_g")[0], int(_weights.partition("_g")[2])
    REFERENCES[f"screen_least_{_weights}"] = least_reference(*_stored)
    REFERENCES[f"head_{_weights}"] = head_reference(*_stored)
for _dtype in NEURON_TYPES:
    REFERENCES[f"neuron_gated_{_dtype}"] = neuron_gated_reference(_dtype)
    REFERENCES[f"neuron_down_{_dtype}"] = neuron_down_reference(_dtype)
for _kv in KV:
    REFERENCES[f"rope_store_{_kv}"] = rope_store_reference(_kv)
    REFERENCES[f"store_latent_{_kv}"] = store_latent_reference(_kv)
    REFERENCES[f"attention_{_kv}"] = attention_reference(_kv)
    REFERENCES[f"attention_scores_{_kv}"] = attention_scores_reference(_kv)
    REFERENCES[f"attention_values_{_kv}"] = values_reference(_kv)
"""The reference of each kernel, by the kernel's name."""

__all__ = ["ACTIVATION_FUNCTIONS", "EDIT", "REFERENCES", "TOLERANCES", "Cache", "Expected", "InstructionView",
           "Q8Block", "attend", "choose_experts", "compare", "delta_step", "gated_values", "linear_values", "q8_blocks",
           "quantise_rows", "reach", "read_q8", "resolve", "rms_norm", "rotate", "scan_step", "write_q8"]
