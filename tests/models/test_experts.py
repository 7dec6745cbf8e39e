"""Mixtures of experts from checkpoint to logits: every form of a checkpoint, the same bits however a pass is made."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bench import Case, bytes_per_token
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.errors import BundleError, CheckpointError, UnsupportedModelError
from edgeinfer.graph import ExpertsConfig, ModelConfig, build_graph, read_config, requested_types
from edgeinfer.models.describe import describe
from tests.golden_parts import DEEPSEEK, GLM, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from tests.helpers import golden_cases
from tests.helpers.bundles import alter_header, weights_of
from tests.helpers.gguf_files import write_gguf
from tests.helpers.sessions import TINY, scored, session, tokens, write_model

MOE = replace(TINY, model_type="qwen3_moe", experts=ExpertsConfig(9, 3, 40))
SHARED = replace(TINY, model_type="qwen2_moe", num_hidden_layers=3, attention_bias=True,
                 experts=ExpertsConfig(5, 2, 24, normalise=False, shared_size=50, dense_layers=(1,)))
PROMPT = tokens(150)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def trace(path: Path, **options: Any) -> bytes:
    """Logits of a prompt's end and of tokens after it."""
    with session(path, **options) as opened:
        sequence = opened.new_sequence()
        logits = opened.prefill(sequence, PROMPT)
        bits = logits.tobytes()
        for token in tokens(6, seed=1):
            bits += opened.decode([sequence], [token])[0].tobytes()
    return bits


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("config", [MOE, SHARED], ids=["mixture", "shared"])
@pytest.mark.parametrize(("weights", "group"), [
    ("q4", 32), ("int8", 32), pytest.param("int8", 64, marks=pytest.mark.slow), ("f16", 32), ("f32", 32)])
def test_threads_and_chunks(config: ModelConfig, weights: str, group: int, models: Path) -> None:
    path = write_model(models, config, weights, group)
    whole = trace(path, prefill_chunk=512)
    for threads, chunk in ((1, 1), (2, 7), (3, 64), (2, 512)):
        assert trace(path, threads=threads, prefill_chunk=chunk) == whole, f"{threads} threads, chunks of {chunk}"


@pytest.mark.parametrize("weights", ["q4", "f32"])
def test_a_sequence_has_the_same_bits_in_a_batch(weights: str, models: Path) -> None:
    path, prompts = write_model(models, MOE, weights), [tokens(20 + i, seed=i) for i in range(5)]
    with session(path, max_sequences=5, threads=2) as opened:
        alone = []
        for prompt in prompts:
            sequence = opened.new_sequence()
            opened.prefill(sequence, prompt)
            alone.append([opened.decode([sequence], [token])[0].copy() for token in (3, 5, 8)])
            opened.release(sequence)
        sequences = [opened.new_sequence() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            opened.prefill(sequence, prompt)
        for step, token in enumerate((3, 5, 8)):
            rows = opened.decode(sequences, [token] * len(prompts))
            for row, own in zip(rows, alone, strict=True):
                np.testing.assert_array_equal(row, own[step])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("config", [MOE, SHARED], ids=["mixture", "shared"])
def test_every_instruction_beside_its_reference(config: ModelConfig, models: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    for weights in ("q4", "int8", "f16"):
        path = write_model(models, config, weights)
        plain = trace(path, prefill_chunk=40)
        monkeypatch.setenv("EDGEINFER_CHECK", "1")
        assert trace(path, prefill_chunk=40) == plain
        monkeypatch.delenv("EDGEINFER_CHECK")


def test_a_token_reads_its_experts_alone(models: Path) -> None:
    """Program, description and bench count the same bytes; a plan has all of them."""
    path = write_model(models, MOE)
    described = describe(path)
    experts = MOE.experts
    assert experts
    with session(path) as opened:
        graph = opened.graph
        stacked = sum(graph.types[w.name].nbytes(w.shape) for w in graph.weights if w.kind == "experts")
        others = sum(graph.types[w.name].nbytes(w.shape) for w in graph.weights
                     if w.kind not in ("experts", "embedding"))
        active = stacked * experts.active / experts.total
        assert described.bytes_per_token == pytest.approx(others + active)
        kv = 2 * opened.plan.kv_layers[0].stride // 16  # of one position
        assert bytes_per_token(opened, Case("tg", 1)) == pytest.approx(others + active + kv, rel=0.02)
        assert opened.plan.region("weights").nbytes > others + stacked
    size = experts.intermediate_size * MOE.hidden_size * 3 * MOE.num_hidden_layers
    assert described.parameters - described.active_parameters == pytest.approx(size * (experts.total - experts.active))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def by_expert(name: str, array: np.ndarray, parts: tuple[str, str, str]) -> dict[str, np.ndarray]:
    """Tensors of each expert from those that transformers 5 has for all."""
    module, _, part = name.partition(".experts.")
    gate, up, down = parts
    if part == "gate_up_proj":
        gates, ups = np.split(array, 2, axis=1)
        return {f"{module}.experts.{i}.{which}.weight": np.ascontiguousarray(values[i])
                for which, values in ((gate, gates), (up, ups)) for i in range(len(array))}
    if part and array.ndim == 3:
        return {f"{module}.experts.{i}.{down}.weight": array[i] for i in range(len(array))}
    return {name: array}


IN_FILES = ("mixtral", "qwen3-moe", "qwen3-moe-heads", "qwen2-moe", "olmoe", "granitemoe", "granitemoeshared",
            "qwen3-vl-moe-wrapped")
"""Cases of which GGUF files are made."""
GRANITE = {
    "granitemoe.embedding_scale": 7.0, "granitemoe.residual_scale": 0.3, "granitemoe.attention.scale": 0.5,
    "granitemoe.logit_scale": 4.0, "granitemoe.attention.layer_norm_rms_epsilon": 1e-2}
FIELDS: dict[str, dict[str, Any]] = {
    "granitemoe": GRANITE, "granitemoeshared": GRANITE,
    "qwen3-moe-heads": {"qwen3moe.attention.key_length": None, "qwen3moe.attention.value_length": None},
    "qwen3-vl-moe-wrapped": {"qwen3vlmoe.n_deepstack_layers": 1}}
FORMS = {
    "mixtral": (("w1", "w3", "w2"), {".mlp.": ".block_sparse_moe."}),
    "qwen3-moe": (("gate_proj", "up_proj", "down_proj"), {}),
    "qwen2-moe-dense-layer": (("gate_proj", "up_proj", "down_proj"), {}),
}


def sums_of(bundle: Path) -> list[tuple[str, str]]:
    with Bundle.open(bundle) as opened:
        return [(entry.name, entry.sha256) for entry in opened.header.tensors]


@pytest.mark.parametrize("name", sorted(FORMS))
def test_tensors_by_expert_are_those_of_all(name: str, tmp_path: Path) -> None:
    """As published checkpoints have them, and in a GGUF file."""
    case, (parts, renamed) = golden_cases.load(name), FORMS[name]
    together = golden_cases.write_checkpoint(case, tmp_path / "together")
    apart: dict[str, np.ndarray] = {}
    for tensor, array in case.tensors.items():
        for own, values in by_expert(tensor, array, parts).items():
            for old, new in renamed.items():
                own = own.replace(old, new)
            apart[own] = values
    golden_cases.write_checkpoint(case._replace(tensors=apart), tmp_path / "apart")
    convert(together, tmp_path / "one", weights="q4")
    convert(tmp_path / "apart", tmp_path / "two", weights="q4")
    assert sums_of(tmp_path / "one") == sums_of(tmp_path / "two")


def test_stacks_with_inputs_first_are_turned(tmp_path: Path) -> None:
    """As transformers writes Qwen3-VL-MoE: (experts, inputs, outputs)."""
    case = golden_cases.load("qwen3-vl-moe-wrapped")
    turned = {name: np.ascontiguousarray(array.swapaxes(1, 2)) if ".experts." in name else array
              for name, array in case.tensors.items()}
    assert turned.keys() == case.tensors.keys() and sum(".experts." in name for name in turned) == 4
    convert(golden_cases.write_checkpoint(case, tmp_path / "plain"), tmp_path / "one", weights="q4")
    convert(golden_cases.write_checkpoint(case._replace(tensors=turned), tmp_path / "turned"), tmp_path / "two",
            weights="q4")
    assert sums_of(tmp_path / "one") == sums_of(tmp_path / "two")


@pytest.mark.parametrize("name", IN_FILES)
def test_a_gguf_file_has_the_logits_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    case = golden_cases.load(name)
    checkpoint = golden_cases.write_checkpoint(case, tmp_path / "checkpoint")
    write_gguf(tmp_path / "model.gguf", checkpoint, fields=FIELDS.get(name), arch="qwen3vlmoe" if "vl" in name else "")
    convert(tmp_path / "model.gguf", tmp_path / "bundle")
    with session(tmp_path / "bundle", kv="f32", threads=2, outputs=16) as opened:
        logits = scored(opened, case.ids)
    assert np.abs(logits - case.logits).max() / np.abs(case.logits).max() < 1e-5


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_codes_of_stacked_experts_are_kept(model_type: str, kind: str, tmp_path: Path) -> None:
    """Every value is the file's: those of the checkpoint as the package dequantises them, bit by bit."""
    own = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE}[model_type]
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
             "intermediate_size": 160, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    config = {**own, **{key: value for key, value in sizes.items() if key in own or key == "head_dim"}}
    graph = build_graph(read_config(config), requested_types("f32"))
    tensors = {}
    for weight in graph.weights:
        for source in weight.sources:
            if source.each:
                continue
            tensors[source.name] = golden_cases.weights(source.name, source.stored)
    experts = read_config(config).experts
    assert experts
    for i in range(config["num_hidden_layers"]):
        module, n, size = f"model.layers.{i}.mlp.experts.", experts.total, experts.intermediate_size
        tensors[module + "gate_up_proj"] = golden_cases.weights(module + "1", (n, 2 * size, 96))
        tensors[module + "down_proj"] = golden_cases.weights(module + "2", (n, 96, size))
    case = golden_cases.GoldenCase("made", config, tensors, [], np.zeros(0))
    checkpoint = golden_cases.write_checkpoint(case, tmp_path / "checkpoint")
    values = write_gguf(tmp_path / "model.gguf", checkpoint, {"_exps": kind, "_shexp": kind, "attn_": kind})
    report = convert(tmp_path / "model.gguf", tmp_path / "bundle")
    stacked = [tensor for tensor in report.tensors if ".experts_" in tensor.name]
    assert all(tensor.exact for tensor in stacked) and len(stacked) == 2 * config["num_hidden_layers"]
    n, size, rows = experts.total, experts.intermediate_size, math.ceil(experts.intermediate_size / 16)
    found = weights_of(tmp_path / "bundle")
    both = found["layers.0.experts_gate_up"].reshape(n, rows, 2, 16, -1)
    down = found["layers.0.experts_down"].reshape(n, 96, -1)
    for part, which in enumerate(("gate", "up")):
        np.testing.assert_array_equal(both[:, :, part].reshape(n, 16 * rows, -1)[:, :size],
                                      values[f"blk.0.ffn_{which}_exps.weight"])
    np.testing.assert_array_equal(down, values["blk.0.ffn_down_exps.weight"])


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    case = golden_cases.load("qwen3-moe")
    tensors = {own: values for name, array in case.tensors.items()
               for own, values in by_expert(name, array, ("gate_proj", "up_proj", "down_proj")).items()}
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    checkpoint = golden_cases.write_checkpoint(case._replace(tensors=tensors), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight"):
        convert(checkpoint, tmp_path / "bundle")


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "fields", "message"), [
    (MIXTRAL, {"num_experts_per_tok": 6}, "num_experts_per_tok is 6; it must be a whole number from 1 to 5"),
    (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0; it must be a whole number from 1 to 4096"),
    (QWEN3_MOE, {"mlp_only_layers": [2]}, r"mlp_only_layers is \[2\]; it must list layers from 0 to 1"),
    (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers is 1; it must list layers"),
    (QWEN3_MOE, {"num_local_experts": 3}, r"num_experts is \d+ and num_local_experts 3; they must agree"),
    (QWEN3_MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; it must be true or false"),
    (MIXTRAL, {"num_hidden_layers": 4096, "num_local_experts": 4096},
     "4096 layers of 4096 experts are more than 262144 experts"),
])
def test_numbers_that_no_moe_has_are_refused(config: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**config, **fields})


def test_either_name_of_the_number_of_experts_counts() -> None:
    n, other = QWEN3_MOE["num_experts"], {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    for config in (QWEN3_MOE, {**other, "num_local_experts": n}, {**QWEN3_MOE, "num_local_experts": n}):
        found = read_config(config).experts
        assert found and found.total == n


def test_windows_of_qwen2_moe() -> None:
    """Every second layer below `max_window_layers` where nothing lists them, if `use_sliding_window` is on."""
    fields = {**QWEN2_MOE, "num_hidden_layers": 5, "sliding_window": 7, "max_window_layers": 3}
    assert read_config(fields).windows == ()
    assert read_config({**fields, "use_sliding_window": True}).windows == (7, 0, 7, 0, 0)
    listed = ["full_attention"] * 4 + ["sliding_attention"]
    assert read_config({**fields, "use_sliding_window": True, "layer_types": listed}).windows == (0, 0, 0, 0, 7)
    with pytest.raises(CheckpointError, match="layer_types has sliding_attention, but sliding_window is None"):
        read_config({**fields, "layer_types": listed})


@pytest.mark.parametrize("config", [
    {**QWEN2_MOE, "mlp_only_layers": [0, 1]}, {**QWEN3_MOE, "decoder_sparse_step": 3},
    {**DEEPSEEK, "first_k_dense_replace": 3}, {**DEEPSEEK, "first_k_dense_replace": 9},
    {**GLM, "mlp_layer_types": 3 * ["dense"]}], ids=lambda config: config["model_type"])
def test_a_model_whose_layers_are_all_dense_has_no_experts(config: dict[str, Any]) -> None:
    graph = build_graph(read_config(config), requested_types("q4"))
    assert graph.config.experts is None
    assert not any(weight.kind in ("experts", "router") for weight in graph.weights)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("total", 5000, "config.experts.total is 5000; it must be from 1 to 4096"),
    ("active", 10, "config.experts.active is 10; it must be from 1 to 9"),
    ("group_best", 3, "config.experts.group_best is 3; it must be from 1 to 2"),
    ("scores", "tanh", "scores is 'tanh'; there are softmax and sigmoid"),
    ("groups", 2, "3 of 9 experts in 2 groups cannot be chosen"),
])
def test_bundles_with_other_numbers_are_refused(name: str, value: Any, message: str, models: Path, tmp_path: Path
                                                ) -> None:
    made = Path(shutil.copytree(write_model(models, MOE), tmp_path / "bundle"))
    alter_header(made, lambda header: header["config"]["experts"].update({name: value}))
    with pytest.raises((BundleError, UnsupportedModelError), match=message), session(made):
        pass
