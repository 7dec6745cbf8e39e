"""Schedules of pruning: their rules, and every face that takes one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.cli.chat.loop import Chat, Conversation
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import RequestError, UsageError
from edgeinfer.graph import Attention
from edgeinfer.kernels import abi
from edgeinfer.llm.api import LLM
from edgeinfer.quality.measurements import Setting
from edgeinfer.runner.pruning import Schedule, calibrated
from edgeinfer.runtime import Session
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import TINY, config_of, tokens

TEXT = "keep=0.5,0.25"
MODEL = replace(TINY, num_hidden_layers=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "bundle"
    write_random_bundle(MODEL, path)
    return path


def asked(lazy: Any, layers: str | None = None) -> Schedule | None:
    return dict(config_of(lazy=lazy, lazy_layers=layers).techniques).get("lazy")


@pytest.mark.parametrize(("text", "layers", "sentence"), [
    ("keep=1.2", None, "keep is 1.2 at one boundary; shares are above 0 and at most 1."),
    ("keep=0.5,0", None, "keep is 0 at one boundary; shares are above 0 and at most 1."),
    ("keep=0.3,0.5", None, "keep grows from 0.3 to 0.5; pruned tokens are never revived, so no share may be "
                           "larger than the one before."),
    ("keep=0.5", "1,2", "1 shares are given for 2 boundaries between layers; give one for each."),
    ("keep=0.5,0.2", "2,2", "The boundary after layer 2 comes after 2; number layers from 1, each boundary after the "
                            "one before."),
    ("keep=0.5,0.2", "0,2", "The boundary after layer 0 comes after 0; number layers from 1, each boundary after the "
                            "one before."),
    ("keep=-0.5", None, "The pruning schedule 'keep=-0.5' cannot be read; write keep=SHARE,SHARE,..., as in "
                        "keep=0.7,0.5,0.35."),
    ("0.5", None, "The pruning schedule '0.5' cannot be read; write keep=SHARE,SHARE,..., as in keep=0.7,0.5,0.35."),
    ("keep=0.5", "one", "The boundaries 'one' are not numbers of layers, as in 9,18,27."),
    (None, "3", "--lazy-layers is 3, and without --lazy no prompt is pruned; add --lazy."),
    ("off", "3", "--lazy-layers is 3, and --lazy off prunes no prompt; use one or the other."),
    ("keep=٠.٥", None, "The pruning schedule 'keep=٠.٥' cannot be read; write keep=SHARE,SHARE,..., as in "
                       "keep=0.7,0.5,0.35."),
])
def test_what_makes_no_schedule_is_refused(text: str | None, layers: str | None, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        asked(text, layers)
    assert str(refused.value).removeprefix("lazy_layers: ").removeprefix("lazy: ") == sentence


@pytest.mark.parametrize(("layers", "n_layers", "sentence"), [
    ((3, 5), 5, "The boundary after layer 5 has no layer after it; the model has 5."),
    ((), 2, "A schedule with 2 boundaries has 3 stages, and the model has 2 layers; give fewer shares."),
    ((), 1, "A schedule with 2 boundaries has 3 stages, and the model has 1 layers; give no schedule."),
])
def test_a_schedule_that_a_model_has_no_layers_for_is_refused(layers: tuple[int, ...], n_layers: int,
                                                              sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        Schedule((0.5, 0.25), layers).placed(n_layers)
    assert str(refused.value) == sentence


def test_boundaries_that_are_not_given() -> None:
    places = {(3, 30): (9, 18, 27), (3, 32): (10, 19, 29), (3, 22): (7, 13, 20), (1, 30): (9,), (2, 5): (2, 3),
              (4, 5): (1, 2, 3, 4), (9, 30): (3, 6, 9, 12, 15, 18, 21, 24, 27)}
    for (n, n_layers), layers in places.items():
        assert Schedule((0.5,) * n).placed(n_layers).layers == layers
    for n_layers in range(2, 40):
        for n in range(1, n_layers):
            layers = Schedule((0.5,) * n).placed(n_layers).layers
            assert all(a < b for a, b in zip((0, *layers), (*layers, n_layers), strict=True))
    assert [Schedule((0.5, 0.2), (1, 3)).stage(layer) for layer in range(5)] == [0, 1, 1, 2, 2]


def test_schedules_are_taken_as_text_and_by_themselves() -> None:
    made = Schedule([np.float64(0.5), 1 / 4], [np.int64(2), 4])
    assert made == Schedule.parse(TEXT, "2,4") and str(made) == "keep=0.5,0.25 after layers 2,4"
    assert Schedule.parse(str(small := Schedule((0.5, 0.00002)))) == small  # what is printed can be given
    assert asked(TEXT) == asked(Schedule((0.5, 0.25))) == Schedule((0.5, 0.25)) and asked("off") is None is asked(None)
    for wrong in (3, "all", (0.5,)):
        with pytest.raises(UsageError, match=r"^lazy"):
            asked(wrong)
    with pytest.raises(UsageError, match=r"^keep of a pruning schedule is 'ab'; it must be a list of shares\.$"):
        Schedule("ab")


def test_a_schedule_is_part_of_a_setting() -> None:
    """One that keeps everything approximates nothing."""
    lazy = Setting.of_run(config_of(lazy=Schedule((0.5,), (2,))))
    assert not lazy.exact and str(lazy) == "kv=int8 lazy=keep=0.5 after layers 2 passes=none"
    assert Setting.of_run(config_of(lazy=Schedule((1.0,), (2,)))) == Setting.of_run(RuntimeConfig())
    assert Setting.of_run(RuntimeConfig()).exact


def flags_of(session: Session) -> list[tuple[int, int, tuple[str, int]]]:
    """Layer, flags and what it lacks, of each attention of a program."""
    return [(instruction.op.layer, instruction.flags & abi.FLAG_PRUNED, instruction.operands[6])
            for instruction in session.program.instructions
            if isinstance(instruction.op, Attention) and not instruction.step]


def test_an_open_model_prunes_prompts_and_goes_on(model: Path, tmp_path: Path) -> None:
    """Samples, beams, draft tokens, a prompt cache and longer prompts: the same as without these."""
    ids, greedy = tokens(140), {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with LLM(model, lazy=TEXT, ctx=256, speculate="off") as llm:
        plain = llm.complete(ids, **greedy)
        assert llm.session.prefill_strategy.last.tokens == (140, 70, 35)
        assert dict(llm.session.config.techniques)["lazy"].layers == (2, 3)
        assert llm.complete(ids, **greedy, prompt_cache=tmp_path / "cache").token_ids == plain.token_ids
        again = llm.complete(ids, **greedy, prompt_cache=tmp_path / "cache")
        assert again.token_ids == plain.token_ids and again.cached_tokens == 139
        turn = llm.complete(ids, **greedy, reuse=True)
        longer = [*ids, *turn.token_ids, 3]
        on = llm.complete(longer, **greedy, reuse=True)
        assert on.cached_tokens == 0  # what was pruned is not what another prompt would have computed
        assert on.token_ids == llm.complete(longer, **greedy).token_ids
    with LLM(model, lazy=Schedule((0.5, 0.25)), ctx=256, max_sequences=4) as llm:
        assert llm.complete(ids, **greedy).token_ids == plain.token_ids  # draft tokens of what stood before
        for choice in llm.complete(ids, **greedy, n=3).choices:
            assert choice.token_ids == plain.token_ids
        best = llm.complete(ids, max_tokens=6, beams=4, ignore_eos=True)
        assert len(best.token_ids) == 6
    with LLM(model, lazy=TEXT, ctx=256, speculate="self",
             draft=Recipe.parse("fuse_input+early_exit:layers=4")) as llm:
        assert llm.complete(ids, **greedy).token_ids == plain.token_ids
        own, proposals = (flags_of(session) for session in (llm.session, llm.draft))
        assert proposals == own[:4] and [bool(flags) for _, flags, _ in own] == [False, False, True, True, True]
    with LLM(model, ctx=256, speculate="off") as llm:
        assert llm.session.prefill_strategy is None
        assert llm.complete(ids[:50], **greedy).token_ids


def test_what_a_prompt_will_take() -> None:
    """Tokens in each stage, and their share of tokens times layers: those that always continue, and short prompts."""
    schedule = Schedule((0.5, 0.01), (1, 3))
    assert schedule.tokens(200) == (200, 100, 17) and schedule.tokens(200, 7) == (200, 100, 16)
    assert schedule.tokens(63) == (63,) and schedule.share((63,), 5) == 1
    assert schedule.share((200, 100, 17), 5) == (200 + 2 * 100 + 2 * 17) / 1000
    assert schedule.outlook(200, 5)["said"] == "keep=0.5,0.01 after layers 1,3: of 200 tokens 100, 17 continue, 43% " \
                                               "of the tokens' layers are computed"
    assert "63 tokens are too few to prune" in schedule.outlook(63, 5)["said"]


def test_plan_and_estimate_predict_the_pruned_prompt(model: Path) -> None:
    for command, of in (("plan", lambda report: report["estimate"]), ("estimate", lambda report: report)):
        asked = (command, "llama-2-7b", "--machine", "rpi5", "--ctx", "4096")
        plain, pruned = edgeinfer(*asked, "--json").json, edgeinfer(*asked, "--lazy", "keep=0.5,0.25", "--json").json
        assert plain["lazy"] is None and pruned["lazy"]["tokens"] == [512, 256, 128]
        share = pruned["lazy"]["share"]
        assert share < of(pruned)["ttft_ms"] / of(plain)["ttft_ms"] < share + 0.05
        assert of(pruned)["decode_tok_per_s"] == of(plain)["decode_tok_per_s"]
        said = " ".join(edgeinfer(*asked, "--lazy", "keep=0.5,0.25").out.split())
        assert f"{pruned['lazy']['said']}; assumed: a layer takes time as it has tokens" in said


def test_boundaries_in_a_variable_give_way_where_nothing_is_pruned(model: Path, monkeypatch) -> None:
    monkeypatch.setenv("EDGEINFER_LAZY_LAYERS", "2,4")
    assert "aux" not in edgeinfer("plan", model, "--lazy", "off").out
    assert edgeinfer("plan", model, "--lazy", "off", "--lazy-layers", "2,4").code == UsageError.exit_code


def test_layers_that_a_recipe_leaves_out_are_none_of_a_schedule(model: Path) -> None:
    for command in ("plan", "estimate"):
        short = command, model, "--machine", "rpi5", "--recipe", "early_exit:layers=3"
        assert "continue, 83% of" in " ".join(edgeinfer(*short, "--lazy", "keep=0.5", "--lazy-layers", "2").out.split())
        done = edgeinfer(*short, "--lazy", "keep=0.5,0.4,0.3")
        assert done.code == UsageError.exit_code and "has 4 stages, and the model has 3 layers" in done.err


def test_a_chat_says_what_was_pruned(model: Path, capsys) -> None:
    with LLM(model, lazy=TEXT, ctx=256, speculate="off") as llm:
        conversation = Conversation(llm, None, True, {"max_tokens": 4})
        conversation.keep("a word", llm.complete(tokens(140), max_tokens=4))
        Chat(conversation).take("/stats")
        assert str(llm.session.prefill_strategy.last) in " ".join(capsys.readouterr().err.split())
        assert llm.session.prefill_strategy.last.share < 1


def test_bad_schedules_end_a_command_in_one_sentence(model: Path) -> None:
    for arguments, sentence in (
            (["run", model, "hi", "--lazy", "keep=2"], "keep is 2 at one boundary"),
            (["plan", model, "--lazy", TEXT, "--lazy-layers", "4,9"], "The boundary after layer 9 has no layer"),
            (["bench", model, "--lazy", "keep=0.1,0.2"], "keep grows from 0.1 to 0.2"),
            (["eval", model, "--text", __file__, "--lazy", TEXT], "--lazy prunes prompts of 64 tokens and more"),
    ):
        done = edgeinfer(*arguments)
        assert done.code == UsageError.exit_code and sentence in done.sentence


def test_a_plan_names_aux_cache_flags_and_scratch(model: Path) -> None:
    done = edgeinfer("plan", model, "--lazy", TEXT, "--ctx", "512", "--json")
    regions = {region["name"]: region for region in done.json["regions"]}
    reason = regions["aux"]["reason"]
    assert "512 prompt tokens" in reason and "to choose which tokens continue" in reason
    assert "bytes say which prompt tokens later layers lack" in regions["kv"]["reason"]


def test_a_calibration_finds_the_most_pruned_of_those_that_diverge_little() -> None:
    tried = []

    def divergence(schedule: Schedule) -> float:
        tried.append(schedule)
        return (1 - schedule.keep[0]) ** 2

    found = calibrated((2, 4), divergence, 0.0901)
    assert found == Schedule((0.7, 0.49), (2, 4)) and found in tried and len(tried) <= 7
    assert calibrated((2,), lambda schedule: 0.0, 0.0) == Schedule((0.01,), (2,))
    assert calibrated((1, 2, 3), lambda schedule: 0.0, 0.0).keep == (0.01, 1e-4, 1e-4)  # and no share of 0
    with pytest.raises(RequestError, match=r"^Even keep=0\.99 after layers 3 diverges by 1\.00000, and the target is "):
        calibrated((3,), lambda schedule: 1.0, 0.5)


def test_a_schedule_is_measured_and_what_runs_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgeinfer.quality.measurements.cache_root", lambda: tmp_path / "cache")
    text = tmp_path / "text"
    text.write_text("The king had three daughters, and the youngest of them was the wisest of all. " * 12)
    how = ("eval", "demo", "--text", text, "-c", 150, "--decode", 100, "--tokens", 300, "--json")
    measured = edgeinfer(*how, "--lazy", "keep=0.5", "--lazy-layers", "2").json
    assert measured["setting"] == {"kv": "int8", "passes": "none", "lazy": "keep=0.5 after layers 2"}
    assert 0 < measured["kld_mean"] < 1
    found = edgeinfer(*how, "--lazy-target", measured["kld_mean"] + 1e-6, "--lazy-layers", "2").json
    assert found["kld_mean"] <= measured["kld_mean"] + 1e-6
    schedule = found["setting"]["lazy"].partition(" ")[0]
    assert float(schedule.removeprefix("keep=")) <= 0.5
    done = edgeinfer("run", "demo", "Once upon a time there was a king. " * 20, "-n", 4, "--lazy", schedule,
                     "--lazy-layers", "2", "--json")
    assert done.json["quality"]["kld_mean"] == found["kld_mean"] and not done.json["quality"]["by_itself"]
    n, kept = done.json["lazy"]["tokens"]
    assert n == done.json["prompt_tokens"] > 100 and kept < n
    short = edgeinfer("run", "demo", "Once upon a time", "-n", 4, "--lazy", schedule)
    assert "fewer than 64, so all of them went through all layers" in short.err
    assert edgeinfer(*how, "--lazy-target", "0.1", "--lazy", TEXT).sentence.startswith("--lazy-target finds the shares")
