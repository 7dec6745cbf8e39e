"""GLM-4.5 and its successors in GGUF files, with a head for further tokens, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import DRAFT_HEAD_FILE
from edgeinfer.bundle.arrays import open_arrays
from edgeinfer.converters import convert
from edgeinfer.errors import EdgeInferError
from edgeinfer.graph import read_config
from edgeinfer.models.describe import describe
from tests.golden_parts import GLM4_MOE
from tests.helpers import golden_cases
from tests.helpers.bundles import weights_of
from tests.helpers.draft_heads import with_head
from tests.helpers.sessions import scored, session
from tests.models.test_experts import by_expert
from tests.models.test_gguf_families import metadata, write
from tests.models.test_models_golden import TOLERANCE, difference

CASES = ("glm4-moe", "glm4-moe-plain")


def file_of(name: str, path: Path, **fields: Any) -> golden_cases.GoldenCase:
    """Write a case with a head, as llama.cpp's converter does; n_group and topk_group are not in files."""
    gguf = pytest.importorskip("gguf")
    case = with_head(golden_cases.load(name))
    case = case._replace(config={**case.config, "n_group": 1})
    c, own = read_config(case.config), case.config
    assert c.experts
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, c.num_hidden_layers + 1)
    tensors: dict[str, Any] = {}
    for tensor, values in case.tensors.items():
        for part, array in by_expert(tensor, values.astype(np.float32), ("gate_proj", "up_proj", "down_proj")).items():
            layer, stacked, number = part.partition(".experts.")
            if stacked:
                merged = f"{layer}.experts.{number.partition('.')[2]}"
                tensors.setdefault(names.get_name(merged, (".weight",)), []).append(array)
            elif part.endswith("correction_bias"):
                tensors[f"blk.{part.split('.')[2]}.exp_probs_b.bias"] = array
            else:
                tensors[names.get_name(part, (".weight", ".bias"))] = array
    tensors = {key: np.stack(values) if isinstance(values, list) else values for key, values in tensors.items()}
    more = {"block_count": c.num_hidden_layers + 1, "nextn_predict_layers": 1, "expert_count": c.experts.total,
            "expert_used_count": c.experts.active, "expert_feed_forward_length": c.experts.intermediate_size,
            "expert_shared_count": own["n_shared_experts"], "expert_gating_func": 2,
            "leading_dense_block_count": own["first_k_dense_replace"], "expert_weights_scale": c.experts.scale,
            "expert_weights_norm": c.experts.normalise, **fields}
    write(path, {**metadata(case, c, "glm4moe"), **{f"glm4moe.{key}": value for key, value in more.items()}}, tensors,
          "glm4moe")
    return case


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_checkpoint(name: str, tmp_path: Path) -> None:
    """The weights and those of the head are equal bit for bit, and so is the config."""
    case = file_of(name, tmp_path / "m.gguf")
    convert(golden_cases.write_checkpoint(case, tmp_path / "hf"), tmp_path / "checkpoint", weights="f32")
    report = convert(tmp_path / "m.gguf", tmp_path / "file")
    assert not any("predict further tokens" in remark for remark in report.remarks)
    expected, found = (open_arrays(tmp_path / made / DRAFT_HEAD_FILE) for made in ("checkpoint", "file"))
    assert found[0]["types"] == expected[0]["types"] and found[1].keys() == expected[1].keys()
    weights = weights_of(tmp_path / "checkpoint"), weights_of(tmp_path / "file")
    for wanted, values in ((expected[1], found[1]), weights):
        assert {key: array.tobytes() for key, array in values.items()} == {
            key: array.tobytes() for key, array in wanted.items()}
    assert describe(tmp_path / "m.gguf").weight_bytes == describe(tmp_path / "file").weight_bytes
    if name == "glm4-moe-plain":  # which has one group of experts
        with session(tmp_path / "file", kv="f32", outputs=16) as opened:
            assert difference(scored(opened, case.ids), case.logits) < TOLERANCE


@pytest.mark.parametrize(("key", "value", "message"), [
    ("expert_gating_func", 1, r"expert_gating_func is 1, .*only 2 \(sigmoid\)"),
    ("nextn_predict_layers", 4, "nextn_predict_layers is 4, .*below the 4 layers"),
    ("rope.dimension_count", 5, "5 of the 14 dimensions of a head turn"),
])
def test_metadata_that_no_graph_can_have(key: str, value: Any, message: str, tmp_path: Path) -> None:
    file_of("glm4-moe", tmp_path / "m.gguf", **{key: value})
    with pytest.raises(EdgeInferError, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "bundle")


@pytest.mark.parametrize(("fields", "message"), [
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"), ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
    ({"use_qk_norm": 1}, "use_qk_norm is 1; it must be true or false"),
    ({"partial_rotary_factor": 0.25}, "3 of the 14 dimensions of a head turn"),
])
def test_configs_that_no_graph_can_have(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgeInferError, match=message):
        read_config({**GLM4_MOE, "rope_theta": 300.0, **fields})
