"""Gemma 4: KV that layers share, heads by kind of layer, and a table that stays in its file."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe
from edgeinfer.converters import convert, write_random_bundle
from edgeinfer.errors import BundleError, CheckpointError, EdgeInferError, UnsupportedModelError
from edgeinfer.graph import Attention, ExpertsConfig, ModelConfig, TokenRows, build_graph, read_config, requested_types
from edgeinfer.kernels import abi
from edgeinfer.models.describe import describe
from edgeinfer.registry import recipe_with
from edgeinfer.runner.pruning import Schedule
from tests.helpers import golden_cases
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import SPLIT, logits_of, scored, session, tokens
from tests.models.test_models_golden import TOLERANCE, difference

FIELDS = golden_cases.config_of("gemma4")
SMALL = replace(read_config(FIELDS), max_position_embeddings=1024)
"""Layers 4 and 6 read the K and V of layer 1, layer 5 those of layer 3."""
SHARES = {4: 1, 5: 3, 6: 1}


def with_windows(config: ModelConfig, window: int) -> ModelConfig:
    return replace(config, windows=tuple(window if w else 0 for w in config.windows))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma4") / "m"
    write_random_bundle(with_windows(SMALL, 40), path, "q4", 32)
    return path


@pytest.mark.parametrize("experts", [None, ExpertsConfig(9, 3, 38)])
def test_threads_and_chunks(experts: ExpertsConfig | None, model: Path, tmp_path: Path) -> None:
    if experts:
        model = tmp_path / "m"
        write_random_bundle(replace(with_windows(SMALL, 40), experts=experts), model, "q4", 32)
    rows = []
    for threads, chunk in ((1, 512), (1, 7), (3, 64)):
        with session(model, ctx=2 * SPLIT, threads=threads, prefill_chunk=chunk) as opened:
            rows.append(logits_of(opened, tokens(SPLIT + 31), n_decoded=4))
    assert np.ptp(rows[0]) > 0
    assert all(row.tobytes() == rows[0].tobytes() for row in rows)


@pytest.mark.parametrize("name", ["gemma4", "gemma4-keys-as-values", "gemma4-mixture-rows"])
def test_every_instruction_is_what_its_reference_says(name: str, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    write_random_bundle(read_config(golden_cases.config_of(name)), tmp_path / "m", "int8", 32)
    with session(tmp_path / "m", ctx=64, prefill_chunk=16) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(20))
        opened.decode([sequence], [5])


# -- KV of other layers ------------------------------------------------------------------------------------------------


def test_layers_that_read_other_keys_have_none_of_their_own(model: Path) -> None:
    with session(model) as opened:
        attention = {op.layer: op for op in opened.graph.ops if isinstance(op, Attention)}
        assert {i: op.kv.layer for i, op in attention.items() if op.kv and op.kv.layer != i} == SHARES
        assert sorted(opened.plan.kv_layers) == [0, 1, 2, 3]
        names = {weight.name: weight.shape[0] for weight in opened.graph.weights}
        assert names["layers.1.qkv"] == (6 + 2 * 2) * 22 and names["layers.4.qkv"] == 6 * 22
        assert "layers.4.k_norm" not in names and names["layers.4.gate_up"] == 2 * names["layers.3.gate_up"] - 16 * 2
        stored = {key: abi.kv_head_bytes("int8", size) // 16 * 2 for key, size in (("short", 14), ("long", 22))}
    described = describe(model)
    assert described.kv_bytes_per_position["int8"] == 3 * stored["short"] + stored["long"]
    assert described.kv_bytes_unshared["int8"] == 4 * stored["short"] + 3 * stored["long"]


@pytest.mark.parametrize(("ctx", "n"), [(128, 70), (640, 400)])
def test_sequences_that_fork_end_early_and_are_kept(model: Path, tmp_path: Path, ctx: int, n: int) -> None:
    """The longer ones have blocks of windowed layers in a pool of their own, others read some of these layers."""
    ids, ways = tokens(n), [tokens(5, seed) for seed in (1, 2)]
    with session(model, ctx=ctx, max_sequences=3, outputs=8) as opened:
        assert bool(opened.plan.windowed) == (ctx == 640)
        plain = [scored(opened, ids + way)[-5:] for way in ways]
        one = opened.new_sequence()
        opened.prefill(one, ids)
        other = opened.fork(one)
        rows = [opened.decode([one, other], list(pair)).copy() for pair in zip(*ways, strict=True)]
        for i in (0, 1):
            np.testing.assert_array_equal(np.stack(rows)[:, i], plain[i])
        opened.truncate(one, n)
        opened.save(one, tmp_path / "cache")
        opened.release(other)
        back = opened.load(tmp_path / "cache")
        for sequence in (one, back):
            again = [opened.decode([sequence], [token])[0].copy() for token in ways[1]]
            np.testing.assert_array_equal(np.stack(again), plain[1])


def test_rows_of_values_are_chosen_of_other_layers_too(model: Path) -> None:
    """If all rows are selected, the bits are those of attention; otherwise they differ."""
    found = {}
    for attention in ("exact", "eps:0", "top:2"):
        with session(model, ctx=512, recipe=recipe_with(Recipe.parse("fuse_input"), attention=attention)) as opened:
            found[attention] = logits_of(opened, tokens(200), n_decoded=3)
    np.testing.assert_array_equal(found["eps:0"], found["exact"])
    assert np.abs(found["top:2"] - found["exact"]).max() > 1e-3


def test_prompts_are_not_pruned(model: Path, tmp_path: Path) -> None:
    lazy = Schedule.parse("keep=0.7,0.5")
    with pytest.raises(UnsupportedModelError, match=r"share the K and V of earlier ones, .*leave --lazy out"), \
            session(model, lazy=lazy):
        pass
    alone = tmp_path / "rows"
    write_random_bundle(replace(SMALL, kv_layers=(), ffn_sizes=()), alone, "q4", 32)
    with pytest.raises(UnsupportedModelError, match=r"More than one tensor .* goes from layer to layer"), \
            session(alone, lazy=lazy):
        pass


# -- the table ---------------------------------------------------------------------------------------------------------


def test_a_table_stays_in_its_file_unless_nothing_is_mapped(model: Path) -> None:
    ids, rows = tokens(40), {}
    for mapped in (True, False):
        with session(model, ctx=64, mmap=mapped) as opened:
            plan, op = opened.plan, next(op for op in opened.graph.ops if isinstance(op, TokenRows))
            rows[mapped] = scored(opened, ids)
            nbytes = opened.graph.types[op.table.name].nbytes(op.table.shape)
            names = [region.name for region in plan.regions]
            assert plan.filed_bytes == (nbytes if mapped else 0) and ("rows" in names) == mapped
            if mapped:
                assert plan.region("weights").nbytes + nbytes == opened.bundle.weights_bytes
                assert op.reads(opened.graph.types)[0].token == nbytes / SMALL.layer_input_vocab
            else:
                assert plan.allocations[op.table.name].region == "resident" and "weights" not in names
    np.testing.assert_array_equal(*rows.values())


def test_where_layers_are_streamed_the_table_stays_in_its_file(model: Path) -> None:
    ids, options = tokens(40), {"ctx": 64, "prefill_chunk": 16}
    with session(model, **options) as opened:
        plain, most = scored(opened, ids), opened.plan.total_bytes
    for less in range(0, 600_000, 5000):
        with session(model, budget_bytes=most - less, **options) as opened:
            if opened.plan.parts:
                assert opened.plan.filed_bytes and opened.plan.region("resident").nbytes
                np.testing.assert_array_equal(scored(opened, ids), plain)
                break
    else:
        raise AssertionError("no budget streams layers")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says which pages of a file are in memory")
def test_pages_of_the_table_are_read_when_a_token_wants_them(tmp_path: Path) -> None:
    config = replace(SMALL, num_hidden_layers=2, kv_layers=(), ffn_sizes=(), windows=(), ropes=(), head_dims=(22,) * 2,
                     kv_heads=(), vocab_size=5000, layer_input=512, layer_input_vocab=10_000)
    write_random_bundle(config, tmp_path / "m", "f32")

    def of_table(length: int) -> tuple[int, int]:
        """Length and resident bytes of the part of the mapping that is read here and there."""
        maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        own = [one for one in maps if str(tmp_path) in one and re.search(r"VmFlags:.* rr( |$)", one, re.M)]
        found = [int(re.search(rf"(?m)^{name}: +(\d+) kB", one)[1]) * 1024 for name in ("Size", "Rss")  # type: ignore
                 for one in own]
        return (found[0], found[1]) if found else (0, 0)

    with session(tmp_path / "m", ctx=64, threads=2) as opened:
        nbytes = opened.plan.filed_bytes
        size, before = of_table(nbytes)
        assert nbytes == 10_000 * 4 * 1024 and 0.99 * nbytes < size <= nbytes and before < nbytes / 4
        sequence = opened.new_sequence()
        opened.prefill(sequence, [7, 2000, 4500])
        assert before < of_table(nbytes)[1] < nbytes / 2
        assert opened.plan.region("rows").nbytes < nbytes / 50


# -- plan and estimate -------------------------------------------------------------------------------------------------


def test_the_plan_of_a_large_one() -> None:
    """E2B: 12 of 15 layers with heads of 256 and 3 of 512; 35 layers would have 28 and 7."""
    small, large = abi.kv_head_bytes("int8", 256) // 16, abi.kv_head_bytes("int8", 512) // 16
    report = edgeinfer("plan", "gemma-4-e2b", "--ctx", 4096, "--budget", "8GB", "--json").json
    assert report["fits"] and report["kv_bytes_per_position"] == 12 * small + 3 * large
    assert report["kv_bytes_unshared"] == 28 * small + 7 * large
    regions = {region["name"]: region for region in report["regions"]}
    assert report["filed_bytes"] == 262144 * 5184 and regions["rows"]["bytes"] == 4096 * 3 * 4096
    assert regions["rows"]["kind"] == "mapped" and regions["weights"]["bytes"] < 1.6e9
    assert report["total_bytes"] == sum(region["bytes"] for region in report["regions"]) < 2e9
    text = edgeinfer("plan", "gemma-4-e2b", "--ctx", 4096, "--budget", "8GB").out
    assert "KV       9276 bytes per token, 21644 without shared K and V" in text
    assert "4096 rows x 5184 B, 1.36 GB stay in the file" in text


def test_a_token_reads_a_row_of_the_table() -> None:
    described = describe("gemma-4-e2b")
    rows = [read.token for op in described.graph.ops if isinstance(op, TokenRows)
            for read in op.reads(described.graph.types)]
    assert rows == [5184] and described.bytes_per_token < 1.6e9 and described.parameters > 4.6e9


def test_the_plan_of_the_moe() -> None:
    """26B-A4B: a token reads 8 of 128 experts of 30 layers beside the rest, 4.5 bits a weight with their scales."""
    described = describe("gemma-4-26b-a4b")
    expert = 3 * 2816 * 704 * 4.5 / 8
    assert described.all_bytes_per_pass - described.bytes_per_token == pytest.approx(30 * 120 * expert, rel=0.02)
    text = edgeinfer("plan", "gemma-4-26b-a4b", "--ctx", 4096, "--budget", "6GB").out
    assert re.search(r"kept experts 1\d{3} \(6\.00 GB\), 5\d\d MB from storage for each token", text)


# -- configs and checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "config.json lacks 'num_experts'"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts is 5; it must be .* 1 to 4"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "config.json lacks 'moe_intermediate_size'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is "),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7, but no .* layer before the last ones"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"layer_types": ["full_attention"]}, "it must list 7 types"),
        ({"vocab_size_per_layer_input": 98}, "vocab_size_per_layer_input is 98; it must be at least vocab_size, 99"),
        ({"num_global_key_value_heads": 4, "attention_k_eq_v": True}, "one has 4"),
        ({"per_layer_config": {"1": {"head_dim": 30}, "4": {"head_dim": 22}}}, "layers of one kind have heads of one"),
        ({"per_layer_config": {"1": {"window": 30}}}, "window is 30"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, "it must be default"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.01}}},
         "two dimensions turn at least"),
        ({"altup_num_inputs": 4}, "altup_num_inputs is 4"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgeInferError, match=message):
        read_config({**FIELDS, **changes})


def test_sizes_of_layers_one_by_one_mean_the_same() -> None:
    """As transformers 5 writes them."""
    listed = {str(i): {"head_dim": 22} for i in (1, 4, 6)}
    fields = {name: value for name, value in FIELDS.items() if name != "global_head_dim"}
    assert read_config({**fields, "per_layer_config": listed}) == read_config(FIELDS)
    padded = {name.zfill(2): value for name, value in listed.items()}  # as of more than ten layers
    assert read_config({**fields, "per_layer_config": padded}) == read_config(FIELDS)
    with pytest.raises(UnsupportedModelError, match="per_layer_config: 1 is "):
        read_config({**fields, "per_layer_config": {**listed, **padded}})


def test_unread_matrices_are_left_out(tmp_path: Path) -> None:
    """Published files have K and V of all layers."""
    case = golden_cases.load("gemma4")
    own = {name: value for name, value in case.tensors.items() if re.search(r"layers\.1\.self_attn\.(k|v)_", name)}
    extra = {name.replace(".1.", ".4."): value for name, value in own.items()}
    checkpoint = golden_cases.write_checkpoint(case._replace(tensors={**case.tensors, **extra}), tmp_path / "c")
    report = convert(checkpoint, tmp_path / "b", weights="f16")
    assert "3 tensors of K and V" in report.remarks[0] and "read those of layers before" in report.remarks[0]
    with session(tmp_path / "b", kv="f32", outputs=16) as opened:
        assert difference(scored(opened, case.ids), case.logits) < TOLERANCE
    other = {**case.tensors, "model.layers.9.self_attn.k_proj.weight": next(iter(extra.values()))}
    with pytest.raises(CheckpointError, match=r"layers\.9\.self_attn\.k_proj\.weight .* is not part of a gemma4_text"):
        convert(golden_cases.write_checkpoint(case._replace(tensors=other), tmp_path / "d"), tmp_path / "e")


def test_what_hears_and_sees_is_left_out(tmp_path: Path) -> None:
    case = golden_cases.load("gemma4-wrapped")
    report = convert(golden_cases.write_checkpoint(case, tmp_path / "c"), tmp_path / "b", weights="f16")
    assert "tensors of what hears and sees pictures" in report.remarks[0]
    with Bundle.open(tmp_path / "b") as bundle:
        assert bundle.config.model_type == "gemma4_text" and bundle.config.kv_layers == (0, 1, 0, 1)


def test_what_sees_in_files_of_the_unified_model_is_left_out(tmp_path: Path) -> None:
    """Files call it vision_embedder, transformers embed_vision."""
    case = golden_cases.load("gemma4-unified-wrapped")
    stored = {re.sub(r"embed_vision\.(p(atch|os)_)", r"vision_embedder.\1", name): value
              for name, value in case.tensors.items()}
    assert any("vision_embedder" in name for name in stored)
    convert(golden_cases.write_checkpoint(case._replace(tensors=stored), tmp_path / "c"), tmp_path / "b", weights="f16")
    with session(tmp_path / "b", kv="f32", outputs=16) as opened:
        assert difference(scored(opened, case.ids), case.logits) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_layers": [0, 1, 2, 3, 1, 3]}, "kv_layers has 6 entries for 7 layers"),
        ({"kv_layers": [0, 1, 2, 3, 1, 3, 4]}, "lets layer 6 read layer 4"),
        ({"kv_layers": [0, 1, 2, 3, 6, 3, 6]}, "lets layer 4 read layer 6"),
        ({"kv_layers": [0, 1, 2, 3, 0, 3, 1]}, "lets layer 4 read layer 0"),
        ({"head_dims": [14, 0, 14, 14, 22, 14, 22]}, "head_dims has 0"),
        ({"kv_heads": [2, 2, 2, 2, 2, 2, 4]},
         "kv_heads has 4, of which config.num_attention_heads 6 is not a multiple"),
        ({"keys_as_values": [7]}, "keys_as_values has layer 7 of 7"),
        ({"layer_input_vocab": 3}, "a table needs a row for each of 99 tokens"),
    ],
)  # fmt: skip
def test_headers_that_fit_no_model_are_refused(changes: dict[str, Any], message: str, model: Path, tmp_path: Path
                                               ) -> None:
    from edgeinfer.bundle.config_json import config_from_json

    header = json.loads((model / "bundle.json").read_text())["config"]
    assert config_from_json(header) == with_windows(SMALL, 40)
    with pytest.raises(BundleError, match=message):
        config_from_json({**header, **changes})


def test_a_graph_without_room_for_its_rotation_is_refused() -> None:
    rope = replace(SMALL.rope, span=8)
    with pytest.raises(UnsupportedModelError, match=r"rope\.span is 8; it must be even, and no less than"):
        build_graph(replace(SMALL, rope=rope), requested_types())
