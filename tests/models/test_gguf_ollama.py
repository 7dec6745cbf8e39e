"""GGUF files with the names of ollama's own converter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeinfer.converters import convert
from edgeinfer.converters.gguf.ollama_names import as_llama_cpp
from edgeinfer.errors import CheckpointError
from tests.helpers import gguf_files, golden_cases
from tests.models.test_gpt_oss import logits_of, replace_limit


@pytest.mark.parametrize("fused", [False, True])
def test_gpt_oss(fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With q, k and v, and gates and ups, in tensors of their own or in one."""
    case, plain = golden_cases.load("gpt-oss"), gguf_files.tensors_of

    def tensors_of(checkpoint: object) -> dict[str, np.ndarray]:
        out = plain(checkpoint)  # type: ignore[arg-type]
        for name in list(out) if fused else []:
            if "ffn_gate_exps" in name:
                both = [out.pop(name), out.pop(name.replace("gate", "up"))]
                out[name.replace("gate", "gate_up")] = np.stack(both, axis=2).reshape(
                    both[0].shape[0], -1, *both[0].shape[2:])
            if "attn_q." in name:
                out[name.replace("attn_q", "attn_qkv")] = np.concatenate(
                    [out.pop(name.replace("attn_q", "attn_" + part)) for part in "qkv"])
        words = {"attn_output": "attn_out", "post_attention_norm": "ffn_norm", "attn_sinks.weight": "attn_sinks"}
        for word, theirs in words.items():
            out = {name.replace(word, theirs): values for name, values in out.items()}
        return out

    monkeypatch.setattr(gguf_files, "tensors_of", tensors_of)
    monkeypatch.setattr(gguf_files, "architecture", lambda config: "gptoss")
    gguf_files.write_gguf(tmp_path / "m.gguf", golden_cases.write_checkpoint(case, tmp_path / "hf"), fields={
        "gptoss.rope.scaling.factor": 4.0, "gptoss.rope.scaling.original_context_length": 16,
        "gptoss.attention.sliding_window": case.config["sliding_window"]})
    convert(tmp_path / "m.gguf", tmp_path / "bundle")
    replace_limit(tmp_path / "bundle", case.config["swiglu_limit"])
    found = logits_of(tmp_path / "bundle", case.ids)
    assert np.abs(found - case.logits).max() / np.abs(case.logits).max() < 1e-5


@pytest.mark.parametrize(("name", "case"), [("qwen25vl", "qwen2-tied"), ("qwen3vl", "qwen3")])
def test_qwen_that_sees(name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = golden_cases.load(case)
    monkeypatch.setattr(gguf_files, "architecture", lambda config: name)
    gguf_files.write_gguf(
        tmp_path / "m.gguf", golden_cases.write_checkpoint(golden, tmp_path / "hf"),
        fields={f"{name}.rope.mrope_section": [2, 1, 1], f"{name}.vision.block_count": 32,
                f"{name}.vision.rope.freq_base": 10000.0, f"{name}.vision.fullatt_block_indexes": [7, 15]},
        extra=dict.fromkeys(("v.blk.0.attn_q.weight", "v.patch_embd_0.weight"), np.ones((4, 4), np.float32)))
    convert(tmp_path / "m.gguf", tmp_path / "bundle")
    found = logits_of(tmp_path / "bundle", golden.ids)
    assert np.abs(found - golden.logits).max() / np.abs(golden.logits).max() < 1e-5


def test_what_sees_beside_the_text_model_is_left_out() -> None:
    fields = {"general.architecture": "gemma3", "gemma3.vision.block_count": 27, "gemma3.mm.tokens_per_image": 256,
              "gemma3.rope.local.freq_base": 10000.0, "gemma3.block_count": 34, "tokenizer.ggml.model": "llama"}
    found, tensors = as_llama_cpp(fields, {"v.blk.0.attn_k.weight": 1, "mm.mm_input_projection.weight": 2,
                                           "blk.0.attn_k.weight": 3})
    assert tensors == {"blk.0.attn_k.weight": 3}
    assert found == {"general.architecture": "gemma3", "gemma3.rope.freq_base_swa": 10000.0, "gemma3.block_count": 34,
                     "tokenizer.ggml.model": "llama"}


def test_other_names_of_gemma_4() -> None:
    _, tensors = as_llama_cpp({"general.architecture": "gemma4"}, {
        "blk.3.ffn_gate_inp.per_expert_scale": 1, "blk.3.layer_scalar": 2, "a.conv1d.0.weight": 3})
    assert tensors == {"blk.3.ffn_down_exps.scale": 1, "blk.3.layer_output_scale.weight": 2}


@pytest.mark.parametrize(("fields", "tensors"), [
    ({"general.architecture": "gptoss", "gptoss.block_count": 2, "gpt-oss.block_count": 3}, {}),
    ({"general.architecture": "gptoss"}, {"blk.0.attn_out.weight": 1, "blk.0.attn_output.weight": 2}),
])
def test_what_a_file_has_by_both_names_is_refused(fields: dict[str, object], tensors: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"A GGUF file has '.*' twice, by ollama's name and by llama.cpp's"):
        as_llama_cpp(fields, tensors)
