"""Runs whose decoded tokens choose rows of V: exact where everything is wanted, the same text however they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bench.results import GENERATE, Case
from edgeinfer.bench.results import PROMPT as PROMPT_TEST
from edgeinfer.bench.traffic import instruction_bytes
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.errors import BundleError, RequestError, UnsupportedModelError, UsageError
from edgeinfer.graph import SelectedAttention
from edgeinfer.graph.topn_cost import TopNCost
from edgeinfer.llm.api import LLM
from edgeinfer.models import demo_path
from edgeinfer.quality.measurements import Setting
from edgeinfer.registry import recipe_with
from edgeinfer.runner import DECODE, PROMPT, Segment, Sequence
from edgeinfer.runner.pruning import Schedule
from edgeinfer.runtime import Session
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import WINDOWED, session, tokens, write_model

PROMPT_IDS = tokens(700, seed=1)
WORDS = tokens(40, seed=2)


def of(attention: str, **settings: str) -> Recipe:
    recipe = recipe_with(attention=attention)
    if not settings:
        return recipe
    step = recipe.steps[-1]
    return Recipe((*recipe.steps[:-1], replace(step, settings=(*step.settings, *settings.items()))))


def decoded(opened: Session, ids: list[int] = WORDS, prompt: list[int] = PROMPT_IDS) -> np.ndarray:
    """Logits after the prompt and after each token that is decoded after it."""
    sequence = opened.new_sequence()
    rows = [opened.prefill(sequence, prompt).copy()]
    rows += [opened.decode([sequence], [token])[0].copy() for token in ids]
    opened.release(sequence)
    return np.stack(rows)


def run(path: Path, attention: str, instead: str = "mean", **options: Any) -> np.ndarray:
    with session(path, ctx=1024, recipe=of(attention, instead=instead) if attention != "exact" else Recipe(),
                 **options) as opened:
        return decoded(opened)


def divergence(exact: np.ndarray, rows: np.ndarray) -> float:
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=1, keepdims=True)
            for x in (exact, rows))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_where_everything_is_wanted_nothing_changes(tmp_path: Path, kv: str) -> None:
    """A share of 0 and a number no less than the context have the bits of attention, whatever stands for the rest."""
    path = write_model(tmp_path)
    exact = run(path, "exact", kv=kv)
    for instead in ("nothing", "scale", "mean"):
        for attention in ("eps:0", "top:1000"):
            np.testing.assert_array_equal(run(path, attention, instead, kv=kv), exact)


def test_where_everything_is_wanted_a_trained_model_says_the_same() -> None:
    """Through steps of 8-bit activations rounding alone moved the demo model's predictions by a KLD of 0.00005."""
    exact, *others = (run(demo_path(), attention) for attention in ("exact", "eps:0", "top:1024", "eps:0.1"))
    for rows in others[:2]:
        assert divergence(exact, rows) < 1e-6
    assert divergence(exact, others[2]) > 1e-5


@pytest.mark.parametrize("attention", ["eps:0.3", "top:3"])
def test_what_is_left_out_shows_and_threads_and_chunks_do_not(tmp_path: Path, attention: str) -> None:
    path = write_model(tmp_path)
    rows = run(path, attention)
    assert not np.array_equal(run(path, "exact")[1:], rows[1:])
    for options in ({"threads": 2}, {"threads": 3, "prefill_chunk": 7}, {"prefill_chunk": 512}):
        np.testing.assert_array_equal(run(path, attention, **options), rows)


def test_sequences_trees_and_prompts_side_by_side_have_the_logits_of_each_alone(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    parents, proposals = [-1, 0, 0, 1, 2], tokens(5, seed=6)
    with session(path, ctx=1024, recipe=of("top:3"), threads=2, max_sequences=4, outputs=32) as opened:
        alone = decoded(opened, WORDS[:1])[1]
        paths = {2: [0, 2], 3: [0, 1, 3], 4: [0, 2, 4]}
        chains = {node: decoded(opened, [proposals[i] for i in path])[-1] for node, path in paths.items()}
        together = decoded(opened, WORDS[:6])

        def prompted() -> Sequence:
            sequence = opened.new_sequence()
            opened.prefill(sequence, PROMPT_IDS)
            return sequence

        first, chain, tree, late = prompted(), prompted(), prompted(), opened.new_sequence()
        prompt = opened.prefill(late, PROMPT_IDS[:20]).copy()
        opened.truncate(late, 0)
        rows = opened.forward([
            Segment(first, WORDS[:1], (0,), DECODE), Segment(late, PROMPT_IDS[:20], (19,), PROMPT),
            Segment(tree, proposals, tuple(range(5)), DECODE, parents),
            Segment(chain, WORDS[:6], tuple(range(6)), DECODE)])
        np.testing.assert_array_equal(rows[0], alone)
        np.testing.assert_array_equal(rows[1], prompt)
        for node, expected in chains.items():
            np.testing.assert_array_equal(rows[2 + node], expected)
        np.testing.assert_array_equal(rows[7:], together[1:])
        fork = opened.fork(first)  # means follow forks, and what was forgotten
        opened.truncate(first, 650)
        again = opened.decode([first], [WORDS[0]])[0].copy()
        other = decoded(opened, WORDS[:1], PROMPT_IDS[:650])[1]
        np.testing.assert_array_equal(again, other)
        np.testing.assert_array_equal(opened.decode([fork], [WORDS[1]])[0], together[2])


def test_prompt_caches_know_whether_rows_were_left_out(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    with session(path, ctx=1024, recipe=of("top:3"), max_sequences=3) as opened, session(path, ctx=1024) as exact:
        sequence = opened.new_sequence()
        opened.prefill(sequence, PROMPT_IDS)
        opened.save(sequence, tmp_path / "prompt")
        expected = opened.decode([sequence], [5])[0].copy()
        opened.save(sequence, tmp_path / "decoded")
        loaded = opened.load(tmp_path / "prompt")
        np.testing.assert_array_equal(opened.decode([loaded], [5])[0], expected)
        assert len(exact.load(tmp_path / "prompt")) == 700
        with pytest.raises(BundleError, match="was saved by another model"):
            exact.load(tmp_path / "decoded")
        assert len(opened.load(tmp_path / "decoded")) == 701


def test_windowed_and_first_layers_stay_exact(tmp_path: Path) -> None:
    with session(write_model(tmp_path, WINDOWED), ctx=1024, recipe=of("top:3")) as opened:
        chosen = [op.layer for op in opened.graph.ops if isinstance(op, SelectedAttention)]
        assert chosen == [0] and opened.selects
    recipe = Recipe.parse("attention:top=3,exact=1")
    with session(write_model(tmp_path), ctx=64, recipe=recipe) as opened:
        assert [op.layer for op in opened.graph.ops if isinstance(op, SelectedAttention)] == [1]


def test_more_tokens_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    with session(write_model(tmp_path), ctx=64, recipe=of("eps:0.1"), outputs=2) as opened:
        assert "scores of 2 tokens" in opened.plan.region("scratch").reason
        sequence = opened.new_sequence()
        with pytest.raises(RequestError, match=r"^3 tokens in decode role are more than the 2 .*; raise outputs\.$"):
            opened.forward([Segment(sequence, [1, 2, 3], (2,), DECODE)])
        assert opened.forward([Segment(sequence, [1, 2, 3], (2,), PROMPT)]).shape == (1, 99)


def test_the_plan_has_room_for_scores(tmp_path: Path) -> None:
    """Of each place for each head: 4 bytes, and a little for each block, split and choice."""
    path = write_model(tmp_path)
    with session(path, ctx=1024) as plain, session(path, ctx=1024, recipe=of("top:8")) as opened:
        more = opened.plan.region("scratch").bytes - plain.plan.region("scratch").bytes
        assert more == 6 * 4416 + 2 * (4 * 16 + 64)  # rows of 4 splits; means


@pytest.mark.parametrize("text", ["top:0", "top:-3", "top:1.5", "top:", "eps:1.01", "eps:-1", "eps:nan", "eps:x",
                                  "some", "", "top:٣", "eps:٠.٥", "top:1_0", "eps:0_1", "eps:²"])
def test_other_choices_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^attention is '.*'; choose exact, eps:X with X from 0 to 1, or top:N"):
        recipe_with(attention=text)


@pytest.mark.parametrize(("recipe", "message"), [
    ("attention", "either eps or top"),
    ("attention:eps=0.1,top=4", "either eps or top"),
    ("attention:eps=2", "attention is eps:2; choose exact, eps:X"),
    ("attention:top=0", "attention is top:0; choose exact, eps:X"),
    ("attention:top=3,instead=zero", "instead 'zero'; choose one of nothing, scale, mean"),
    ("attention:top=3,exact=9", "exact 9; the first layers that stay exact are from 0 to 2"),
    ("attention:top=3+attention:eps=0", "has the pass attention twice"),
])
def test_recipes_that_make_no_sense_are_refused(tmp_path: Path, recipe: str, message: str) -> None:
    with pytest.raises((UsageError, UnsupportedModelError), match=message), \
            session(write_model(tmp_path), ctx=64, recipe=Recipe.parse(recipe)):
        pass


def test_a_replacement_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"instead \['mean'\]; choose one of nothing, scale, mean"), \
            session(write_model(tmp_path), ctx=64, recipe=of("eps:0.1", instead=["mean"])):  # type: ignore[arg-type]
        pass


def test_the_gate_knows_the_setting() -> None:
    config = RuntimeConfig(recipe=recipe_with(attention="eps:0.01"))
    assert str(Setting.of_run(config)) == "kv=int8 passes=attention:eps=0.01"
    assert Setting.of_run(RuntimeConfig(recipe=recipe_with(config.recipe, attention="exact"))).exact


def test_draft_tokens_and_samples_have_the_text_of_one(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
    text = "Once upon a time, there was a little girl. Once upon a time, there was a little"
    with LLM("demo", attention="top:2", speculate="off") as llm:
        plain = llm.generate(text, **asked)
        assert llm.session.selects and not llm.approximated
    with LLM("demo", attention="top:2", speculate="lookup", max_sequences=2) as llm:
        assert llm.generate(text, **asked) == plain
        samples = llm.complete(text, n=2, **asked)
        assert [sample.text for sample in samples.choices] == [plain, plain]


def test_the_estimate_tells_k_from_v_and_where_choosing_pays() -> None:
    asked = ("estimate", "llama-2-7b", "--machine", "phone-lpddr5x-8533", "--ctx", 8192)
    whole, chosen = (edgeinfer(*asked, *more, "--json").json for more in ((), ("--attention", "eps:0.01")))
    assert whole["kv_read"] == {"key_bytes": whole["kv_bytes"] // 2, "value_bytes": whole["kv_bytes"] // 2,
                                "chosen": False, "crossover_depth": None, "longest_depth": 8192, "assumed": ""}
    read = chosen["kv_read"]
    assert read["key_bytes"] == whole["kv_read"]["key_bytes"] > 3 * read["value_bytes"]
    assert 256 < read["crossover_depth"] < 8192
    assert whole["bytes_per_token"] - chosen["bytes_per_token"] == whole["kv_read"]["value_bytes"] - read["value_bytes"]
    assert chosen["decode_tok_per_s"] > whole["decode_tok_per_s"] and "choosing" in chosen["terms_ms"]
    assert edgeinfer(*asked, "--attention", "top:" + "9" * 400, "--json").json["kv_read"]["crossover_depth"] is None
    shared = edgeinfer("estimate", "tinyllama-1.1b", *asked[2:], "--attention", "eps:0.01").out
    assert "does not pay within 8192 positions; assumed: normal scores" in " ".join(shared.split())


@pytest.mark.parametrize("command", ["run", "plan", "estimate", "bench", "info"])
def test_commands_refuse_other_choices_in_one_sentence(command: str) -> None:
    further = {"run": ["hello"], "estimate": ["--machine", "rpi5"]}.get(command, [])
    out = edgeinfer(command, "demo", *further, "--attention", "top:0")
    assert out.code == 2 and not out.out
    assert out.err == "edgeinfer: --attention is 'top:0'; choose exact, eps:X with X from 0 to 1, or top:N with N of " \
                      "1 or more.\n"


@pytest.mark.parametrize("instead", ["scale", "mean"])
def test_the_bytes_of_a_profile_are_those_of_k_and_of_what_is_chosen(tmp_path: Path, instead: str) -> None:
    with session(write_model(tmp_path), ctx=1024, recipe=of("top:2", instead=instead)) as opened:
        case = Case(GENERATE, 1, 900)
        kv = {instruction.kernel: instruction_bytes(opened, case, instruction)
              for instruction in opened.program.instructions
              if instruction.op and instruction.op.kv and not instruction.op.kv.stores}
        access = next(op.kv for op in opened.graph.ops if isinstance(op, SelectedAttention))
        half = 901 * access.position_bytes("int8") / 2
        assert kv["attention_scores_int8"] == half and kv["attention_int8"] == 0
        rows = TopNCost(0.0, 2, 3, mean=instead == "mean").rows(901)
        assert kv["attention_values_int8"] == pytest.approx(half * rows / 901)
        prompt = Case(PROMPT_TEST, 16, 0)
        assert sum(instruction_bytes(opened, prompt, instruction) for instruction in opened.program.instructions
                   if instruction.kernel.startswith("attention")) == 2 * 16 * access.position_bytes("int8")


def test_with_pruned_prompts(tmp_path: Path) -> None:
    """Rows that a layer lacks are never selected: all others give plain attention, a part gives reproducible bits.

    Blocks without a row shift the others, which share the scales of their rounded weights; floats have no such scales.
    """
    path = write_model(tmp_path)
    lazy = Schedule((0.3,), (1,))
    plain = run(path, "exact", lazy=lazy)
    assert not np.array_equal(plain, run(path, "exact"))
    assert divergence(plain, run(path, "eps:0", "scale", lazy=lazy)) < 1e-4
    exact = run(path, "exact", lazy=lazy, kv="f32")
    for attention, instead in (("eps:0", "scale"), ("eps:0", "mean"), ("top:1000", "nothing")):
        np.testing.assert_array_equal(run(path, attention, instead, lazy=lazy, kv="f32"), exact)
    some = run(path, "top:3", lazy=lazy)
    assert not np.array_equal(some[1:], plain[1:])
    np.testing.assert_array_equal(run(path, "top:3", lazy=lazy, threads=3, prefill_chunk=7), some)
