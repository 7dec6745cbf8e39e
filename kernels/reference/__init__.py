"""NumPy twins: what each kernel must leave in memory, computed from memory as it was before.

`TWINS[name](RecordView(record, ctx))` gives a list of `Expected`; the kernel runs; `compare` says whether memory holds
it. The mathematics stands in functions of plain arrays (`linear_reference` and the like), which specify the kernels;
the twins only find the arrays in memory. Integer results are exact; floats agree within `TOLERANCES`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..abi import NEURON_TYPES
from ..catalogue import KV, SCREENED, WEIGHTS
from .attention import attend, attention_twin, merge_twin
from .attention_scores import scores_twin as attention_scores_twin
from .attention_select import select_twin
from .attention_values import values_twin
from .draw import EDIT, blocks_twin, choose_twin, edit_twin
from .elementwise import (
    embed_twin,
    gather_twin,
    quantise_rows,
    quantize_twin,
    rms_norm,
    rms_norm_f32_twin,
    rms_norm_q8_twin,
)
from .expected import Expected, compare
from .experts import (
    experts_down_twin,
    experts_gated_twin,
    experts_input_f32_twin,
    experts_input_q8_twin,
    sigmoid_gate_twin,
)
from .experts_resolve import experts_resolve_twin
from .latent import store_latent_twin
from .linear import ACTIVATION_FUNCTIONS, gated_reference, gated_twin, linear_reference, linear_twin
from .neuron import neuron_down_twin, neuron_gated_twin
from .neuron_mask import scores_twin, signs_twin
from .neuron_resolve import Cache, resolve, resolve_twin
from .norms import norm_f32_twin, norm_q8_twin
from .q8 import Q8Block, q8_blocks, read_q8, write_q8
from .rope import rope_store_twin, rotate
from .route import choose_experts, route_twin, sort_routes_twin
from .screen import head_twin, least_twin, maxima_twin, reach
from .stream import stream_release_twin
from .tolerances import TOLERANCES
from .values import activate_twin, positions_twin
from .view import RecordView

Twin = Callable[[RecordView], list[Expected]]

TWINS: dict[str, Twin] = {
    "quantize": quantize_twin,
    "rms_norm_f32": rms_norm_f32_twin,
    "rms_norm_q8": rms_norm_q8_twin,
    "gather_outputs": gather_twin,
    "norm_f32": norm_f32_twin,
    "norm_q8": norm_q8_twin,
    "activate": activate_twin,
    "add_positions": positions_twin,
    "route": route_twin,
    "sort_routes": sort_routes_twin,
    "experts_input_q8": experts_input_q8_twin,
    "experts_input_f32": experts_input_f32_twin,
    "experts_resolve": experts_resolve_twin,
    "sigmoid_gate": sigmoid_gate_twin,
    "attention_merge": merge_twin,
    "attention_select": select_twin,
    "neuron_mask_scores": scores_twin,
    "neuron_mask_signs": signs_twin,
    "neuron_resolve": resolve_twin,
    "screen_maxima": maxima_twin,
    "draw_edit": edit_twin,
    "draw_blocks": blocks_twin,
    "draw_choose": choose_twin,
    "stream_release": stream_release_twin,
}
for _weights in WEIGHTS:
    _stored = _weights.partition("_g")[0], int(_weights.partition("_g")[2] or 0)
    TWINS[f"linear_{_weights}"] = linear_twin(*_stored)
    TWINS[f"gated_{_weights}"] = gated_twin(*_stored)
    TWINS[f"experts_gated_{_weights}"] = experts_gated_twin(*_stored)
    TWINS[f"experts_down_{_weights}"] = experts_down_twin(*_stored)
    TWINS[f"embed_{_weights}"] = embed_twin(*_stored)
for _weights in SCREENED:
    _stored = _weights.partition("_g")[0], int(_weights.partition("_g")[2])
    TWINS[f"screen_least_{_weights}"] = least_twin(*_stored)
    TWINS[f"head_{_weights}"] = head_twin(*_stored)
for _dtype in NEURON_TYPES:
    TWINS[f"neuron_gated_{_dtype}"] = neuron_gated_twin(_dtype)
    TWINS[f"neuron_down_{_dtype}"] = neuron_down_twin(_dtype)
for _kv in KV:
    TWINS[f"rope_store_{_kv}"] = rope_store_twin(_kv)
    TWINS[f"store_latent_{_kv}"] = store_latent_twin(_kv)
    TWINS[f"attention_{_kv}"] = attention_twin(_kv)
    TWINS[f"attention_scores_{_kv}"] = attention_scores_twin(_kv)
    TWINS[f"attention_values_{_kv}"] = values_twin(_kv)
"""The twin of each kernel, by the kernel's name."""

__all__ = ["ACTIVATION_FUNCTIONS", "EDIT", "TOLERANCES", "TWINS", "Cache", "Expected", "Q8Block", "RecordView",
           "attend", "choose_experts", "compare", "gated_reference", "linear_reference", "q8_blocks", "quantise_rows",
           "reach", "read_q8", "resolve", "rms_norm", "rotate", "write_q8"]
