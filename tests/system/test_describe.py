"""Descriptions of models: the same figures from a bundle, a config.json, a checkpoint; exact to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.errors import BundleError, CheckpointError, ModelNotFoundError, UsageError
from edgeinfer.models.describe import describe, describe_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.hub_server import serve
from tests.helpers.sessions import session

ROOT = Path(__file__).resolve().parents[2]
CASES = [(family, weights, group) for family in ("llama", "mistral", "qwen2", "qwen3")
         for weights, group in (("q4", 32), ("q4", 128), ("int8", 64), ("f16", 32), ("f32", 32))]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("family", "weights", "group_size"), CASES)
@pytest.mark.parametrize("tied", [False, True])
def test_config_alone_equals_the_converted_bundle(
    tmp_path: Path, family: str, weights: str, group_size: int, tied: bool
) -> None:
    """Wide enough that tensors of 1 MiB, which start on 64 KiB, are among them."""
    checkpoint = make_checkpoint(tmp_path / "c", family, tie_word_embeddings=tied, hidden_size=144,
                                 intermediate_size=2020, vocab_size=2100, tokenizer=False)
    convert(checkpoint, tmp_path / "b", weights=weights, group_size=group_size)
    alone = tmp_path / "alone.json"
    alone.write_bytes((checkpoint / "config.json").read_bytes())
    bundle = describe(tmp_path / "b")
    assert bundle.weight_bytes == (tmp_path / "b" / "weights.bin").stat().st_size
    for source in (checkpoint, checkpoint / "config.json", alone):
        described = describe(source, weights, group_size)
        assert described.weight_bytes == bundle.weight_bytes
        assert described.bytes_per_token == bundle.bytes_per_token
        assert described.kv_bytes_per_position == bundle.kv_bytes_per_position
        assert described.graph == replace(bundle.graph, config=described.config)  # token ids come with the checkpoint
        assert described.quantisation == bundle.quantisation
    with Bundle.open(tmp_path / "b") as opened:
        stored = sum(t.nbytes for t in opened.tensors.values())
    assert stored <= bundle.weight_bytes and bundle.parameters == describe(checkpoint).parameters


def test_a_bundle_as_if_converted_anew(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c")
    convert(checkpoint, tmp_path / "b", weights="int8", group_size=64)
    own = describe(tmp_path / "b")
    assert (own.quantisation.weights, own.quantisation.group_size) == ("int8", 64)
    other = describe(tmp_path / "b", weights="q4")
    assert other.weight_bytes == describe(checkpoint, "q4", 64).weight_bytes < own.weight_bytes
    assert other.source.endswith("as if converted again")


def test_bytes_per_token_are_what_the_program_reads(tmp_path: Path) -> None:
    convert(make_checkpoint(tmp_path / "c"), tmp_path / "b")
    with session(tmp_path / "b", ctx=32) as opened:
        assert describe(tmp_path / "b").bytes_per_token == opened.program.bytes_read
        per_position = opened.plan.kv_block_bytes * opened.model.num_hidden_layers / 16
        assert describe(tmp_path / "b").kv_bytes_per_position["int8"] == per_position


def test_llama_2_7b_as_people_compute_it() -> None:
    """6.738 G weights; K and V 2 x layers x width, a byte each."""
    llama = describe("Llama-2-7B")
    assert llama.parameters == 6_738_415_616 and llama.active_parameters == llama.parameters
    assert llama.pure_weight_bytes(4) == pytest.approx(3.37e9, rel=0.001)
    assert llama.kv_values_per_position * 8192 == 2 << 30 and llama.kv_values_per_position * 32768 == 8 << 30
    assert llama.kv_bytes_per_position["f16"] == 2 * llama.kv_values_per_position
    assert llama.kv_bytes_per_position["int8"] == llama.kv_values_per_position + 2 * 2 * 32 * 32
    assert llama.operations_per_token == 2 * (6_738_415_616 - 32000 * 4096 - 65 * 4096)
    assert llama.head_operations == 2 * 32000 * 4096
    assert 4.4 < 8 * llama.bytes_per_token / (llama.operations_per_token / 2) < 4.7  # bits, with scales and int8 head


def test_the_demo_and_names_in_any_case() -> None:
    assert describe("demo").source.startswith("bundle ")
    assert describe("QWEN3-8b").parameters == describe("qwen3-8b").parameters


def test_known_names_of_the_hub_are_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-0.6b").mkdir()  # a directory that holds no model is not what is meant
    assert describe("qwen3-0.6b").source == "built-in shape, as Qwen/Qwen3-0.6B"


FETCH = """
import sys
from edgeinfer.models.describe import describe
from edgeinfer.errors import EdgeInferError

try:
    described = describe(sys.argv[1])
    print(described.weight_bytes, described.source)
except EdgeInferError as error:
    print(type(error).__name__, error)
"""


def from_hub(url: str, home: Path, model: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment.update(HF_ENDPOINT=url, HF_HOME=str(home), HF_HUB_DISABLE_TELEMETRY="1", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", FETCH, model], env=environment, capture_output=True, text=True,
                          cwd=home, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_of_a_model_on_the_hub_only_the_config_is_fetched(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "served")
    expected = describe(folder).weight_bytes
    with serve(folder, "some/model") as hub:
        assert from_hub(hub.url, tmp_path, "some/model") == f"{expected} config.json of some/model on the hub"
        asked = {request.rsplit("/", 1)[1] for request in hub.requests}
        assert asked == {"config.json"}
        assert from_hub(hub.url, tmp_path, "other/model") == (
            "ModelNotFoundError The hub has no model other/model, or it is private: check the name, or log in.")
        (folder / "config.json").unlink()
        answer = from_hub(hub.url, tmp_path / "served", "some/model")
        assert answer.startswith(("CheckpointError The model some/model", "ModelNotFoundError The hub has no model"))


def test_damaged_and_missing_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sentence in [
        ("lama-2-70", "Unknown model 'lama-2-70'; did you mean 'llama-2-70b'"),
        ("zzz", r"Unknown model 'zzz'\. Give a GGUF file, .* shape such as llama-2-7b; 'edgeinfer plan --list' lists"),
    ]:
        with pytest.raises(ModelNotFoundError, match=sentence):
            describe(name)
    (tmp_path / "nowhere").symlink_to("missing")
    for name, sentence in [
        ("", "The name of the model is empty"), ("./zzz", "There is no file or directory './zzz'"),
        ("zzz.gguf", "There is no file or directory 'zzz.gguf'"),
        ("nowhere", "nowhere is neither a file nor a directory, or a link that leads nowhere"),
    ]:
        with pytest.raises(ModelNotFoundError, match=sentence):
            describe(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"empty is neither a bundle .* nor a checkpoint"):
        describe(tmp_path / "empty")
    good = json.loads((make_checkpoint(tmp_path / "c") / "config.json").read_text())
    for text, sentence in [
        (b"", "config.json is empty; download it again"), (b"{", "is not valid JSON"), (b"[1]", "is not a JSON object"),
        (b"\xff\xfe", "is not valid JSON"), (b"[" * 100_000, "is not valid JSON"),
        (json.dumps({**good, "hidden_size": -3}).encode(), "hidden_size is -3; it must be a whole number from 1"),
        (json.dumps({**good, "num_hidden_layers": 10**9}).encode(), "num_hidden_layers is 1000000000; it must be"),
        (json.dumps({k: v for k, v in good.items() if k != "vocab_size"}).encode(), "lacks 'vocab_size'"),
    ]:
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(CheckpointError, match=sentence):
            describe(tmp_path / "config.json")
    (tmp_path / "mine.json").write_text(json.dumps({**good, "hidden_size": -3}))
    with pytest.raises(CheckpointError, match=r"mine.json, as a config.json: hidden_size is -3; it must be"):
        describe(tmp_path / "mine.json")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bundle.json").write_text("{}")
    with pytest.raises(BundleError, match="Cannot open the bundle"):
        describe(tmp_path / "b")
    with pytest.raises(UsageError, match="weights is 'q1'; choose one of q4, int8, f16, f32"):
        describe("demo", weights="q1")
    with pytest.raises(UsageError, match="group_size is 48; choose one of 32, 64, 128"):
        describe("llama-2-7b", group_size=48)


def test_more_experts_than_any_model_has_are_refused_at_once() -> None:
    config = {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16,
              "num_attention_heads": 4, "num_key_value_heads": 4,
              "num_hidden_layers": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-5,
              "num_local_experts": 4096}  # fmt: skip
    with pytest.raises(CheckpointError, match=r"config\.json: 4096 layers of 4096 experts are more than 262144"):
        describe_config(config, "x", "here")


def test_traffic_for_the_estimator() -> None:
    llama, gemma, mixtral = (describe(name).traffic("f16") for name in ("llama-2-7b", "gemma-3-1b", "mixtral-8x7b"))
    described = describe("llama-2-7b")
    assert llama.weight_bytes == llama.prefill_weight_bytes == described.bytes_per_token
    assert llama.kv_bytes_at(4096) == 4096 * described.kv_bytes_per_position["f16"]
    assert (llama.layers, llama.window, llama.operations) == (32, 0, described.operations_per_token)
    assert llama.parameters == 6_738_415_616 and llama.kv_values == 2 * 32 * 4096
    assert llama.ffn_bytes / llama.weight_bytes == pytest.approx(3 * 11008 / (3 * 11008 + 4 * 4096), rel=0.06)
    a_layer = 2 * 2 * 256  # one KV head of 256, two bytes each
    assert gemma.kv_bytes_at(10_000) == 4 * a_layer * 10_000 + 22 * a_layer * 512
    assert gemma.attention_operations * 22 == gemma.window_attention_operations * 4
    assert mixtral.prefill_weight_bytes > 3 * mixtral.weight_bytes
    assert mixtral.parameters == pytest.approx(12.88e9, rel=0.001)


def test_a_network_by_neuron_is_counted_once(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", hidden_size=64, intermediate_size=96)
    convert(checkpoint, tmp_path / "n", ffn_layout="neuron")
    tiles, neurons = describe(checkpoint), describe(tmp_path / "n")
    assert neurons.parameters == tiles.parameters
    assert neurons.operations_per_token == pytest.approx(tiles.operations_per_token)
    assert neurons.active_parameters == tiles.active_parameters
    assert neurons.ffn_bytes == sum(e.nbytes for e in Bundle.open(tmp_path / "n").tensors.values() if "ffn" in e.name
                                    and len(e.shape) == 3)  # fmt: skip
    with session(tmp_path / "n", ctx=32) as opened:
        assert neurons.bytes_per_token == pytest.approx(opened.program.bytes_read, rel=0.02)
    assert neurons.all_bytes_per_pass == pytest.approx(neurons.bytes_per_token)
