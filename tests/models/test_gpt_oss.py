"""gpt-oss beside its golden logits: MXFP4 checkpoints, GGUF files, the same bits however a forward pass is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.errors import CheckpointError, UnsupportedModelError, UsageError
from edgeinfer.graph import ExpertsConfig, build_graph, read_config, requested_types
from edgeinfer.models.describe import describe
from edgeinfer.registry import recipe_with
from edgeinfer.runner.pruning import Schedule
from edgeinfer.runtime.prompt_pruning import importance
from tests.golden_parts import GPT_OSS
from tests.helpers import golden_cases
from tests.helpers.bundles import weights_of
from tests.helpers.gguf_files import write_gguf
from tests.helpers.packers import mxfp4, raw_parts, write_config, write_raw
from tests.helpers.sessions import TINY, scored, session, tokens, write_model

CONFIG = {**GPT_OSS, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
          "num_attention_heads": 6, "num_key_value_heads": 2, "experts_per_token": 2, "initial_context_length": 16,
          "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                           "truncate": False}, "rope_theta": 150.0}  # fmt: skip
"""Rows of whole groups of 32, with the fields of the published config."""
MOE = replace(TINY, model_type="gpt_oss", hidden_act="swiglu_oai", hidden_act_limit=0.5, attention_sinks=True,
                  attention_bias=True, attention_output_bias=True, windows=(40, 0),
                  experts=ExpertsConfig(9, 3, 40, bias=True))


def small(directory: Path) -> golden_cases.GoldenCase:
    """The small model's tensors, as float16."""
    config, tensors = read_config(CONFIG), {}
    for weight in build_graph(config, requested_types("f32")).weights:
        for source in weight.sources:
            if not source.each:
                name = source.name.replace(".mlp.gate.", ".mlp.router.")
                tensors[name] = golden_cases.weights(name, source.stored)
    for i in range(2):
        module = f"model.layers.{i}.mlp.experts."
        for part, shape in {"gate_up_proj": (5, 96, 128), "down_proj": (5, 64, 96)}.items():
            tensors[module + part] = golden_cases.weights(module + part, shape)
            tensors[module + part + "_bias"] = golden_cases.weights(module + part + "_bias", (5, shape[2]))
    return golden_cases.GoldenCase("made", CONFIG, tensors, [], np.zeros(0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A checkpoint in MXFP4, the same in floats, and values of its experts as (experts, outputs, inputs)."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    case, values = small(folder), {}
    golden_cases.write_checkpoint(case, folder / "packed")
    raw = raw_parts(folder / "packed" / "model.safetensors")
    for name in [name for name in case.tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        n, inputs, outputs = case.tensors[name].shape
        packed, values[name] = mxfp4(np.random.default_rng(len(values)), (n, outputs, inputs))
        packed["_scales"] = (*packed["_scales"][:2], (np.frombuffer(packed["_scales"][2], "u1") - 4).tobytes())
        values[name] /= 16
        del raw[name]
        raw |= {name + end: part for end, part in packed.items()}
        case.tensors[name] = np.ascontiguousarray(values[name].swapaxes(1, 2)).astype(np.float16)
    write_raw(folder / "packed" / "model.safetensors", raw)
    write_config(folder / "packed", quantization_config={
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                            "model.embed_tokens", "lm_head"]})
    return folder / "packed", golden_cases.write_checkpoint(case, folder / "floats"), values


def logits_of(path: Path, prompt: list[int] | None = None, **options: Any) -> np.ndarray:
    with session(path, **{"kv": "f32", "outputs": 16, **options}) as opened:
        return scored(opened, prompt or tokens(40, vocab_size=99))


def test_codes_of_mxfp4_are_kept(checkpoint: tuple[Path, Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    """Every value is the checkpoint's; logits are those of the same values in floats, but for rounded activations."""
    packed, floats, values = checkpoint
    report = convert(packed, tmp_path / "bundle")
    stacked = [tensor for tensor in report.tensors if ".experts_" in tensor.name and "bias" not in tensor.name]
    assert len(stacked) == 4 and all(tensor.exact and tensor.dtype == "mxfp4" for tensor in stacked)
    found, module = weights_of(tmp_path / "bundle"), "model.layers.1.mlp.experts."
    both = found["layers.1.experts_gate_up"].reshape(5, 4, 2, 16, 96)
    for part in (0, 1):
        np.testing.assert_array_equal(both[:, :, part].reshape(5, 64, 96), values[module + "gate_up_proj"][:, part::2])
    np.testing.assert_array_equal(found["layers.1.experts_down"].reshape(5, 96, 64), values[module + "down_proj"])
    convert(floats, tmp_path / "floats", weights="f32")
    convert(packed, tmp_path / "anew", weights="f32")
    want, got, anew = (logits_of(tmp_path / name) for name in ("floats", "bundle", "anew"))
    np.testing.assert_array_equal(anew, want)
    assert np.abs(got - want).max() / np.abs(want).max() < 0.05
    with Bundle.open(tmp_path / "bundle") as bundle:
        nbytes = bundle.weights_bytes
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text((packed / "config.json").read_text())
    assert describe(packed).weight_bytes == describe(tmp_path / "alone").weight_bytes == nbytes


def test_a_gguf_file_has_the_logits_of_its_checkpoint(tmp_path: Path) -> None:
    case = golden_cases.load("gpt-oss")
    write_gguf(tmp_path / "model.gguf", golden_cases.write_checkpoint(case, tmp_path / "hf"), fields={
        "gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 4.0,
        "gpt-oss.rope.scaling.original_context_length": 16})
    convert(tmp_path / "model.gguf", tmp_path / "bundle")
    limit = replace_limit(tmp_path / "bundle", case.config["swiglu_limit"])
    assert limit == 7.0  # which files do not hold
    found = logits_of(tmp_path / "bundle", case.ids)
    assert np.abs(found - case.logits).max() / np.abs(case.logits).max() < 1e-5


def replace_limit(bundle: Path, limit: float) -> float:
    """Give a bundle another limit; gives its own."""
    from tests.helpers.bundles import alter_header

    before = []

    def alter(header: dict[str, Any]) -> None:
        before.append(header["config"]["hidden_act_limit"])
        header["config"]["hidden_act_limit"] = limit

    alter_header(bundle, alter)
    return float(before[0])


def test_experts_of_a_gguf_file_in_mxfp4_keep_their_codes(tmp_path: Path) -> None:
    checkpoint = golden_cases.write_checkpoint(small(tmp_path), tmp_path / "hf")
    values = write_gguf(tmp_path / "model.gguf", checkpoint, {"_exps": "MXFP4", "attn_": "Q8_0"}, fields={
        "gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 4.0,
        "gpt-oss.rope.scaling.original_context_length": 16})
    report = convert(tmp_path / "model.gguf", tmp_path / "bundle")
    assert {tensor.dtype for tensor in report.tensors if tensor.name.endswith(("experts_gate_up", "experts_down"))
            } == {"mxfp4"}
    down = weights_of(tmp_path / "bundle")["layers.0.experts_down"].reshape(5, 96, 64)
    np.testing.assert_array_equal(down, values["blk.0.ffn_down_exps.weight"])


def trace(path: Path, **options: Any) -> bytes:
    """Logits of a prompt's end and of tokens after it."""
    with session(path, **options) as opened:
        sequence = opened.new_sequence()
        bits = opened.prefill(sequence, tokens(150)).tobytes()
        for token in tokens(4, seed=1):
            bits += opened.decode([sequence], [token])[0].tobytes()
    return bits


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("weights", ["q4", "f32"])
def test_threads_chunks_and_references(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path, MOE, weights)
    whole = trace(path, prefill_chunk=512)
    for threads, chunk in ((1, 1), (2, 7), (3, 64)):
        assert trace(path, threads=threads, prefill_chunk=chunk) == whole, f"{threads} threads, chunks of {chunk}"
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    assert trace(path, prefill_chunk=40) == whole


def test_bytes_of_a_token_are_those_of_its_experts(tmp_path: Path) -> None:
    """Biases too."""
    path = write_model(tmp_path, MOE)
    with session(path) as opened:
        graph, experts = opened.graph, MOE.experts
        assert experts
        active = {w.name: experts.active / experts.total for w in graph.weights if ".experts_" in w.name}
        want = sum(graph.types[w.name].nbytes(w.shape) * active.get(w.name, 1.0) for w in graph.weights
                   if w.kind != "embedding")
    assert len(active) == 8 and describe(path).bytes_per_token == pytest.approx(want)


def test_rows_of_v_are_not_chosen(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="those of gpt_oss do not, for its heads have sinks; leave attention out"), \
            session(write_model(tmp_path, MOE), recipe=recipe_with(attention="top:8")):
        pass


def test_prompts_are_pruned_by_weights_that_sinks_share(tmp_path: Path) -> None:
    """The share of a head that goes to its sink goes to no token."""
    path = write_model(tmp_path, replace(MOE, windows=()), "f32")
    with session(path, kv="f32", ctx=256, lazy=Schedule.parse("keep=0.5", "1")) as opened:
        sequence = opened.new_sequence()
        assert opened.prefill(sequence, tokens(200)).any()
        op = next(op for op in opened.graph.ops if op.name == "attention")
        bare, n = replace(op, sinks=None), op.heads * op.head_dim
        q = np.random.default_rng(0).standard_normal((1, n)).astype(np.float32)
        with_sinks, without = (importance(opened, sequence, one, 0, q, 200) for one in (op, bare))
    assert (with_sinks < without).all() and with_sinks.sum() > 0


@pytest.mark.parametrize(("fields", "error", "message"), [
    ({"swiglu_alpha": 2.0}, UnsupportedModelError, r"swiglu_alpha is 2\.0.*only 1\.702 is supported"),
    ({"experts_per_token": 3}, CheckpointError, "num_experts_per_tok is 2 and experts_per_token 3; they must agree"),
    ({"swiglu_limit": 0}, CheckpointError, "swiglu_limit is 0; it must be a number above 0"),
])
def test_fields_that_mean_other_mathematics_are_refused(fields: dict[str, Any], error: type[Exception], message: str
                                                        ) -> None:
    with pytest.raises(error, match=message):
        read_config({**CONFIG, **fields})


def test_configs_without_a_rotation_have_the_published_one() -> None:
    config = read_config({key: value for key, value in GPT_OSS.items() if key != "rope_parameters"})
    rope = config.rope
    assert (rope.kind, rope.factor, rope.theta, rope.truncate) == ("yarn", 32, 150000, False)
    assert config.windows == (7, 0, 7, 0)
