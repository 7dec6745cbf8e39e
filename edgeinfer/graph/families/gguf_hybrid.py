"""Metadata of recurrent layers in GGUF files, as the fields of a config.json."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedModelError
from .gguf_metadata import GgufMetadata

LINEAR, FULL = "linear_attention", "full_attention"
TENSORS_OF_SCAN = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out",
                   "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
"""GGUF's names of the tensors of Mamba 2's module."""


def delta_fields(m: GgufMetadata) -> dict[str, Any]:
    """Sizes of gated delta rules, and which layers have them; blocks after the last layer draft."""
    layers = m.layers_without_drafts()
    said, period = m.get("attention.recurrent_layers"), m.get("full_attention_interval") or 4
    flags = m.by_layer(said, "attention.recurrent_layers") if said is not None else [
        (i + 1) % period != 0 for i in range(layers)]
    heads = m.get("ssm.time_step_rank")
    return {"num_hidden_layers": layers, "layer_types": [LINEAR if flag else FULL for flag in flags[:layers]],
            "linear_num_key_heads": m.get("ssm.group_count"), "linear_num_value_heads": heads,
            "linear_key_head_dim": m.get("ssm.state_size"), "linear_value_head_dim": _each(m, heads),
            "linear_conv_kernel_dim": m.get("ssm.conv_kernel")}


def scan_fields(m: GgufMetadata) -> dict[str, Any]:
    """Sizes of Mamba 2's scans; the tensors present tell which have a bias."""
    heads = m.get("ssm.time_step_rank")
    has = {name.split(".", 2)[-1] for name in m.tensors}
    return {"mamba_n_heads": heads, "mamba_d_head": _each(m, heads), "mamba_d_state": m.get("ssm.state_size"),
            "mamba_n_groups": m.get("ssm.group_count"), "mamba_d_conv": m.get("ssm.conv_kernel"),
            "mamba_conv_bias": not has or "ssm_conv1d.bias" in has, "mamba_proj_bias": "ssm_in.bias" in has}


def _each(m: GgufMetadata, heads: Any) -> int:
    """Elements of a head."""
    width = m.get("ssm.inner_size")
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1 or width < 1 or width % heads:
        raise UnsupportedModelError(f"The metadata have {width!r:.20} as ssm.inner_size and {heads!r:.20} as "
                                    "ssm.time_step_rank, of which the first must be a multiple; download the file "
                                    "again.")
    return width // heads


def kv_heads(m: GgufMetadata) -> tuple[list[int], int]:
    """Return the key-value heads of each layer, 0 where it has no attention, and their number in the others."""
    each = m.by_layer(m.get("attention.head_count_kv"), "attention.head_count_kv")
    if len({*each} - {0}) > 1:
        raise UnsupportedModelError(f"The metadata have {each!r:.60} as attention.head_count_kv; layers with attention "
                                    "must have the same number.")
    return each, max(each) or 1
