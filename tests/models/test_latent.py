"""Latent attention from checkpoint to logits: the same bits however a pass is made, what KV takes, GGUF, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import DRAFT_HEAD_FILE
from edgeinfer.bundle.arrays import open_arrays
from edgeinfer.converters import convert
from edgeinfer.errors import EdgeInferError, UnsupportedModelError, UsageError
from edgeinfer.graph import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig, read_config
from edgeinfer.models.describe import describe
from edgeinfer.registry import recipe_with
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runner.pruning import Schedule
from tests.golden_parts import DEEPSEEK, GLM
from tests.helpers import golden_cases
from tests.helpers.draft_heads import with_head
from tests.helpers.pruned import run
from tests.helpers.sessions import TINY, scored, session, tokens, write_model
from tests.models.test_experts import by_expert, trace
from tests.models.test_gguf_families import write
from tests.models.test_models_golden import TOLERANCE, difference

MODEL = replace(
    TINY, model_type="glm4_moe_lite", hidden_size=52, num_attention_heads=5, num_key_value_heads=1, head_dim=54,
    rotary_dim=6, attention_scale=0.3, latent=LatentConfig(20, 10, 16), rope=RopeConfig(300.0),
    experts=ExpertsConfig(6, 2, 24, scores="sigmoid", scale=1.8, groups=2, active_groups=1, group_best=2,
                          shared_size=40, shared_gate=False, choice_bias=True, dense_layers=(0,)))
FILES = ("deepseek-v2", "glm4-moe-lite")
"""Cases of which GGUF files are made."""
PLAIN = replace(MODEL, model_type="deepseek_v2", latent=LatentConfig(0, 10, 16))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("config", "weights", "kv"), [
    (MODEL, "q4", "int8"), (PLAIN, "q4", "int8"), (MODEL, "q4", "f16"), (PLAIN, "f32", "f32"),
])
def test_threads_and_chunks(config: ModelConfig, weights: str, kv: str, models: Path) -> None:
    path = write_model(models, config, weights)
    whole = trace(path, prefill_chunk=512, kv=kv)
    for threads, chunk in ((1, 1), (2, 7), (2, 64)):
        assert trace(path, threads=threads, prefill_chunk=chunk, kv=kv) == whole


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("config", "weights", "kv"), [(MODEL, "q4", "int8"), (PLAIN, "f32", "f32")])
def test_every_instruction_beside_its_reference(config: ModelConfig, weights: str, kv: str, models: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(models, config, weights)
    plain = trace(path, prefill_chunk=40, kv=kv)
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    assert trace(path, prefill_chunk=40, kv=kv) == plain


@pytest.mark.parametrize("kv", ["int8", "f16"])
def test_trees_forks_and_caches(kv: str, models: Path, tmp_path: Path) -> None:
    """Draft tokens in a tree, a path that is kept, a sequence that is saved and one that is parted: as in a chain."""
    path, parents, ids = write_model(models, PLAIN), [-1, 0, 0, 1, 1, 2, 4], tokens(7, seed=5)
    with session(path, kv=kv, threads=2, ctx=512, max_sequences=4, outputs=16) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(253))
        chain, tree = opened.fork(sequence), opened.fork(sequence)
        kept = [0, 1, 4, 6]
        rows = opened.forward([Segment(tree, ids, tuple(range(7)), DECODE, parents)])
        found = [rows[node].tobytes() for node in kept]
        opened.accept(tree, 253, kept)
        rows = opened.forward([Segment(chain, [ids[node] for node in kept], tuple(range(4)), DECODE)])
        assert [row.tobytes() for row in rows] == found
        then = [opened.decode([chain], [token])[0].tobytes() for token in (3, 4, 5)]
        assert [opened.decode([tree], [token])[0].tobytes() for token in (3, 4, 5)] == then
        opened.save(tree, tmp_path / "cache")
        opened.release(tree)
        loaded = opened.load(tmp_path / "cache")
        assert opened.decode([loaded], [8])[0].tobytes() == opened.decode([chain], [8])[0].tobytes()


def test_prompts_are_pruned_by_latent_keys(models: Path) -> None:
    """A schedule that keeps all is exact; one that does not gives other logits, the same for any threads and chunks."""
    path, ids, half = write_model(models, PLAIN), tokens(120), Schedule((0.4,), (1,))
    whole = run(path, ids)
    assert run(path, ids, lazy=Schedule((1.0,), (1,))) == whole
    pruned = run(path, ids, lazy=half)
    assert pruned != whole
    assert run(path, ids, lazy=half, threads=2, prefill_chunk=13) == pruned


# -- what KV takes -----------------------------------------------------------------------------------------------------


def test_a_position_takes_one_latent_key() -> None:
    """576 values and, in int8, two scales, in place of 16 heads of 192 and 128 (DeepSeek-V2-Lite), 20 of 256 (GLM)."""
    for name, layers, heads in (("deepseek-v2-lite", 27, 16 * (192 + 128)), ("glm-4.7-flash", 47, 20 * 512)):
        described = describe(name)
        assert described.kv_bytes_per_position == {"int8": layers * 580, "f16": layers * 1152, "f32": layers * 2304}
        assert described.kv_values_per_position == layers * 576
        assert layers * heads / described.kv_values_per_position > 8


def test_a_plan_has_keys_alone(models: Path) -> None:
    with session(write_model(models, MODEL), ctx=512) as opened:
        layer = opened.plan.kv_layers[1]
        assert layer.stride == 16 * 64 + 64  # 54 elements, padded, and scales
        assert opened.plan.kv_block_bytes == layer.stride
        assert opened.executor.regions["kv"].nbytes >= 2 * layer.stride * opened.plan.kv_blocks


# -- GGUF --------------------------------------------------------------------------------------------------------------


def in_file(case: golden_cases.GoldenCase, c: ModelConfig, split: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors as llama.cpp's converter writes them; kv_b in two, or in one as before April 2025."""
    gguf = pytest.importorskip("gguf")
    e, latent, own = c.experts, c.latent, case.config
    assert e and latent
    rank, nope, heads = own["kv_lora_rank"], own["qk_nope_head_dim"], c.num_attention_heads
    drafts, out = own.get("num_nextn_predict_layers", 0), {}
    blocks = c.num_hidden_layers + drafts
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, blocks)
    of_drafts = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, blocks)  # older packages have them there alone
    for name, stored in case.tensors.items():
        values = stored.astype(np.float32)
        if split and "kv_b_proj" in name:
            parts = values.reshape(heads, nope + latent.value_dim, rank)
            out[names.get_name(name.replace("kv_b", "k_b"), (".weight",))] = parts[:, :nope].swapaxes(1, 2)
            out[names.get_name(name.replace("kv_b", "v_b"), (".weight",))] = parts[:, nope:]
            continue
        for part, array in by_expert(name, values, ("gate_proj", "up_proj", "down_proj")).items():
            if ".experts." in part:
                layer, _, number = part.partition(".experts.")
                merged = f"{layer}.experts.{number.partition('.')[2]}"
                out.setdefault(names.get_name(merged, (".weight",)), []).append(array)
            elif part.endswith("correction_bias"):
                out[f"blk.{part.split('.')[2]}.exp_probs_b.bias"] = array
            else:
                ends = (".weight", ".bias")
                out[names.get_name(part, ends) or of_drafts.get_name(part, ends)] = array
    out = {name: np.stack(values) if isinstance(values, list) else values for name, values in out.items()}
    sizes: dict[str, Any] = {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size, "vocab_size": c.vocab_size,
        "block_count": blocks, "feed_forward_length": c.intermediate_size, "attention.head_count": heads,
        "attention.head_count_kv": 1 if split else heads, "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.kv_lora_rank": rank, "rope.dimension_count": c.rope_dim, "rope.freq_base": c.rope.theta,
        "attention.key_length": rank + c.rope_dim if split else nope + c.rope_dim,
        "attention.value_length": rank if split else latent.value_dim, "leading_dense_block_count": len(e.dense_layers),
        "expert_count": e.total, "expert_used_count": e.active, "expert_feed_forward_length": e.intermediate_size,
        "expert_shared_count": own["n_shared_experts"], "expert_weights_scale": e.scale,
        "expert_weights_norm": e.normalise, "expert_gating_func": 2 if e.scores == "sigmoid" else 1,
    }
    if drafts:
        sizes["nextn_predict_layers"] = drafts
    if latent.q_rank:
        sizes["attention.q_lora_rank"] = latent.q_rank
    if split:
        sizes |= {"attention.key_length_mla": nope + c.rope_dim, "attention.value_length_mla": latent.value_dim}
    if e.groups > 1:
        sizes |= {"expert_group_count": e.groups, "expert_group_used_count": e.active_groups}
    return {f"deepseek2.{key}": value for key, value in sizes.items()}, out


def file_of(name: str, path: Path, split: bool, kinds: dict[str, str] | None = None, head: bool = False, **fields: Any
            ) -> golden_cases.GoldenCase:
    case = with_head(golden_cases.load(name)) if head else golden_cases.load(name)
    sizes, tensors = in_file(case, read_config(case.config), split)
    write(path, {**sizes, **{f"deepseek2.{key}": value for key, value in fields.items()}}, tensors, "deepseek2", kinds)
    return case


@pytest.mark.parametrize("split", [True, False], ids=["two", "one"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_logits_of_its_checkpoint(name: str, split: bool, tmp_path: Path) -> None:
    case = file_of(name, tmp_path / "m.gguf", split)
    convert(tmp_path / "m.gguf", tmp_path / "bundle")
    with session(tmp_path / "bundle", kv="f32", threads=2, outputs=16) as opened:
        assert opened.model.model_type == ("deepseek_v2" if name == "deepseek-v2" else "deepseek_v3")
        assert difference(scored(opened, case.ids), case.logits) < TOLERANCE
    assert describe(tmp_path / "m.gguf").weight_bytes == describe(tmp_path / "bundle").weight_bytes


@pytest.mark.parametrize("split", [True, False], ids=["two", "one"])
def test_a_head_that_drafts_is_the_checkpoints(split: bool, tmp_path: Path) -> None:
    """The block after the last, which the file counts among the layers, and what is around it."""
    case = file_of("glm4-moe-lite", tmp_path / "m.gguf", split, head=True)
    convert(golden_cases.write_checkpoint(case, tmp_path / "hf"), tmp_path / "checkpoint", weights="f32")
    report = convert(tmp_path / "m.gguf", tmp_path / "file")
    assert not any("predict further tokens" in remark for remark in report.remarks)
    expected, found = (open_arrays(tmp_path / name / DRAFT_HEAD_FILE) for name in ("checkpoint", "file"))
    assert found[0]["types"] == expected[0]["types"] and len(found[1]) == 21
    assert {name: array.tobytes() for name, array in found[1].items()} == {
        name: array.tobytes() for name, array in expected[1].items()}
    with session(tmp_path / "file", kv="f32", threads=2, outputs=16) as opened:
        assert opened.model.num_hidden_layers == 3
        assert difference(scored(opened, case.ids), case.logits) < TOLERANCE


@pytest.mark.parametrize("drafts", [3, 2**32 - 1, "x"])
def test_more_layers_that_draft_than_layers_are_refused(drafts: Any, tmp_path: Path) -> None:
    file_of("glm4-moe-lite", tmp_path / "m.gguf", True, nextn_predict_layers=drafts)
    with pytest.raises(UnsupportedModelError, match=r"nextn_predict_layers is .*; it must be below the 3 layers"):
        convert(tmp_path / "m.gguf", tmp_path / "bundle")


def test_the_stretch_of_yarn_is_that_of_the_config(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite's: mscale is mscale_all_dim, which a file has times 0.1."""
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 16}
    file_of("deepseek-v2", tmp_path / "m.gguf", True, **{
        "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.0707})
    wanted = read_config({**DEEPSEEK, "rope_theta": 300.0, "rope_scaling": yarn})
    found = describe(tmp_path / "m.gguf").config
    assert found.rope == wanted.rope
    assert found.attention_scale == pytest.approx(wanted.attention_scale, rel=1e-9) != 0.25


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "message"), [
    ({**DEEPSEEK, "kv_lora_rank": 40}, "kv_lora_rank is 40, .*; it must be a multiple of 16"),
    ({**DEEPSEEK, "qk_rope_head_dim": 5}, "qk_nope_head_dim is 10 and qk_rope_head_dim 5; both must be even"),
    ({**DEEPSEEK, "num_key_value_heads": 1}, "num_key_value_heads is 1, .*; with latent attention it is"),
    ({**DEEPSEEK, "norm_topk_prob": True}, "norm_topk_prob is True"),
    ({**DEEPSEEK, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    ({**DEEPSEEK, "n_shared_experts": None}, "n_shared_experts is None"),
    ({**GLM, "n_group": 3}, "n_group is 3, of which 8 experts are not a multiple"),
    ({**GLM, "mlp_layer_types": ["dense"]}, "mlp_layer_types is .*; it must list 3"),
])
def test_configs_that_no_graph_can_have(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgeInferError, match=message):
        read_config(config)


def test_rows_of_v_cannot_be_chosen(models: Path) -> None:
    with pytest.raises(UsageError, match=r"chooses rows of V, and this model stores none.*leave --attention out"), \
            session(write_model(models, MODEL), recipe=recipe_with(attention="top:8")):
        pass


def test_layers_that_draft_further_tokens_are_left_out(tmp_path: Path) -> None:
    case = golden_cases.load("glm4-moe-lite")
    tensors = {**case.tensors, "model.layers.3.eh_proj.weight": np.ones((4, 4), np.float16)}
    config = {**case.config, "num_nextn_predict_layers": 1}
    checkpoint = golden_cases.write_checkpoint(case._replace(tensors=tensors, config=config), tmp_path / "model")
    report = convert(checkpoint, tmp_path / "bundle")
    assert any("1 tensors of layers that predict further tokens" in remark for remark in report.remarks)
    case = golden_cases.load("deepseek-v2")
    tensors = {**case.tensors, "model.layers.3.eh_proj.weight": np.ones((4, 4), np.float16)}
    with pytest.raises(EdgeInferError, match=r"eh_proj.weight .* is not part of a deepseek_v2 model"):
        convert(golden_cases.write_checkpoint(case._replace(tensors=tensors), tmp_path / "other"), tmp_path / "no")
