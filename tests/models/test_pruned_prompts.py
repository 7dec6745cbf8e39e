"""Prompts in stages: exact where all tokens continue, pruned the same bits however they are computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bench.results import PROMPT as PROMPT_TEST
from edgeinfer.bench.results import Case
from edgeinfer.bench.traffic import instruction_bytes, instruction_operations
from edgeinfer.config import Recipe
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.graph import MatMul, ModelConfig, RopeConfig
from edgeinfer.registry import recipe_with
from edgeinfer.runner import Segment
from edgeinfer.runner.pruning import Schedule
from tests.helpers.pruned import ALL, HALF, MODEL, answer, run, written
from tests.helpers.sessions import WINDOWED, session, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_where_all_tokens_go_on_the_bits_are_those_of_the_plain_prompt(model: Path, kv: str) -> None:
    ids = tokens(540)
    plain = run(model, ids, kv=kv, prefill_chunk=64)
    for chunk, threads in ((512, 1), (64, 2), (7, 3)):
        assert run(model, ids, kv=kv, prefill_chunk=chunk, threads=threads, lazy=ALL) == plain
    assert run(model, ids[:120], kv=kv, prefill_chunk=1, lazy=ALL) == run(model, ids[:120], kv=kv)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_a_pruned_prompt_has_the_same_bits_for_any_threads_and_chunk(model: Path, kv: str) -> None:
    ids = tokens(540)
    first = run(model, ids, kv=kv, prefill_chunk=64, lazy=HALF)
    assert first[0] != run(model, ids, kv=kv, prefill_chunk=64)[0]
    for chunk, threads in ((512, 1), (33, 2), (7, 3)):
        assert run(model, ids, kv=kv, prefill_chunk=chunk, threads=threads, lazy=HALF) == first


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("config", "layout"), [
    (MODEL, "neuron"), (replace(WINDOWED, num_hidden_layers=5, windows=(0, 300, 40, 0, 40)), "tile16"),
    (replace(MODEL, model_type="qwen3", hidden_act="relu2", tie_word_embeddings=True), "tile16"),
    (replace(MODEL, model_type="qwen2", hidden_act="gelu", attention_bias=True), "tile16"),
    (replace(MODEL, model_type="ministral3", ropes=(1,) * MODEL.num_hidden_layers, local_rope=RopeConfig(
        kind="query_scale", factor=0.3, original_max_position_embeddings=100)), "tile16")])
def test_architectures_and_layouts_go_through_in_stages(config: ModelConfig, layout: str, tmp_path: Path) -> None:
    path, ids = written(tmp_path, config, ffn_layout=layout), tokens(330)
    assert run(path, ids, lazy=ALL) == run(path, ids)
    assert run(path, ids, lazy=HALF, prefill_chunk=50) == run(path, ids, lazy=HALF)


def test_instructions_agree_with_their_references_behind_a_pruned_prompt(model: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts and decoding: the program's pruned rows agree with the flags."""
    expected = None
    for check in ("0", "1"):
        monkeypatch.setenv("EDGEINFER_CHECK", check)
        with session(model, ctx=320, prefill_chunk=80, max_sequences=2, lazy=HALF) as opened:
            assert opened.executor.check == (check == "1")
            sequence = opened.new_sequence()
            opened.prefill(sequence, tokens(270))
            found = answer(opened, sequence, 2)
            assert expected in (None, found)
            expected = found


def test_a_token_goes_through_each_layer_once_at_most(model: Path) -> None:
    """A pruned prompt computes the reported share, and never more than the plain one."""
    with session(model, ctx=256, prefill_chunk=32, lazy=HALF) as opened:
        sequence, forward = opened.new_sequence(), opened.forward_range
        done = np.zeros((len(opened.program.instructions), 130), int)

        def counted(segment: Segment, first: int, stop: int, offset: int, cancel: Any, rows: Any) -> Any:
            done[first:stop, rows] += 1
            return forward(segment, first, stop, offset, cancel, rows)

        opened.forward_range = counted
        opened.prefill(sequence, tokens(130))
        layers = [instruction.op.layer for instruction in opened.program.instructions]
        work = [done[layers.index(layer)].sum() for layer in range(5)]
        assert done.max() == 1 and work == [130, 130, 65, 65, 33]
        last = opened.prefill_strategy.last
        assert last.tokens == (130, 65, 33) and last.share == sum(work) / (5 * 130)


def test_a_prompt_that_is_no_list_of_tokens_is_refused(model: Path) -> None:
    with session(model, ctx=128, lazy=HALF) as opened:
        sequence = opened.new_sequence()
        for ids in (None, 5, [1.5] * 100):
            with pytest.raises(RequestError, match="they must be integers"):
                opened.prefill(sequence, ids)  # type: ignore[arg-type]
        assert opened.prefill(sequence, iter(tokens(70))).any()  # type: ignore[arg-type]


def test_rows_of_a_range_are_checked(model: Path) -> None:
    with session(model, ctx=160) as opened:
        sequence = opened.new_sequence()
        opened.reserve(sequence, 40)
        for rows in ([3, 2], [-1, 2], [1], [2, 2]):
            with pytest.raises(RequestError, match="cannot be those of 2 tokens"):
                opened.forward_range(Segment(sequence, [1, 2]), 0, 3, rows=np.array(rows))
        with pytest.raises(RequestError, match="reserve more"):
            opened.forward_range(Segment(sequence, [1, 2]), 0, 3, rows=np.array([3, 40]))


def test_boundaries_behind_an_early_exit_are_refused(model: Path) -> None:
    recipe = Recipe.parse("fuse_input+early_exit:layers=3")
    with session(model, ctx=128, recipe=recipe, lazy=Schedule((0.5,), (2,))) as opened:
        opened.prefill(opened.new_sequence(), tokens(100))
        last = opened.prefill_strategy.last
        assert last.tokens == (100, 50) and last.share == pytest.approx(250 / 300)
    with pytest.raises(UsageError, match=r"^The boundary after layer 4 has no layer after it; the model has 3\.$"), \
            session(model, ctx=128, recipe=recipe, lazy=HALF):
        pass


def test_benchmarks_count_what_went_through(model: Path) -> None:
    case = Case(PROMPT_TEST, 128, 0)
    with session(model, ctx=256) as plain, session(model, ctx=256, lazy=HALF) as opened:
        opened.prefill(opened.new_sequence(), tokens(128))
        for layer, share in enumerate((1, 1, 0.5, 0.5, 0.25)):
            work, read = ([sum(count(each, case, instruction) for instruction in each.program.instructions
                               if isinstance(instruction.op, MatMul) and instruction.op.layer == layer)
                           for each in (opened, plain)] for count in (instruction_operations, instruction_bytes))
            assert work[0] == share * work[1] > 0
            assert read[0] == read[1] / (1 if share == 1 else 2) > 0  # chunks of 64


def test_the_plan_names_what_pruning_takes(model: Path) -> None:
    with session(model, ctx=256) as plain, session(model, ctx=256, lazy=HALF) as opened:
        names = {region.name: region for region in opened.plan.regions}
        assert "aux" not in {region.name for region in plain.plan.regions}
        own = opened.prefill_strategy._aux.base.nbytes
        assert own == 256 * 4 * MODEL.hidden_size  # the rest is for what choosing takes
        assert names["aux"].nbytes > 256 * 4 * MODEL.hidden_size and str(HALF) in names["aux"].reason
        flags = 2 * 16 * opened.plan.kv_blocks
        assert names["kv"].nbytes == plain.plan.region("kv").nbytes + flags and f"{flags} bytes" in names["kv"].reason


@pytest.mark.parametrize("kv", ["int8", "f32"])
def test_decoding_with_chosen_rows_of_v_behind_a_pruned_prompt(model: Path, kv: str) -> None:
    """Missing rows are neither selected nor counted in a mean.

    With int8 KV a weight has 7 bits and a scale for a few of the blocks that are read, and these differ if blocks are
    left out.
    """
    ids = tokens(400)
    plain = np.frombuffer(run(model, ids, kv=kv, lazy=HALF)[2], np.float32)
    above, most = (run(model, ids, kv=kv, lazy=HALF, recipe=recipe_with(attention=all_))
                   for all_ in ("eps:0", "top:640"))
    assert above == most and (kv == "int8" or most[2] == plain.tobytes())
    np.testing.assert_allclose(np.frombuffer(most[2], np.float32), plain, atol=0.03 * np.abs(plain).max())
    few = recipe_with(attention="top:16")
    first = run(model, ids, kv=kv, lazy=HALF, recipe=few)
    assert first[2] != plain.tobytes()
    assert run(model, ids, kv=kv, lazy=HALF, recipe=few, threads=3, prefill_chunk=33) == first
