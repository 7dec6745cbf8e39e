"""`bench --speculate`: texts are replayed as they are, the arithmetic of draft tokens, and refusals."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from edgeinfer.bench import Replayed, measure_speculation
from edgeinfer.bench.speculation import StatedProposals, gain, pays_from
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.engine import DraftHead, DraftModel, Speculation, Times
from edgeinfer.runtime import DraftHeadPlan, Session
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import HYBRID, TINY, session, tokens, write_model

PROMPT, TEXT = tokens(9), tokens(60, seed=1)


@pytest.fixture
def runner(tmp_path: Path):
    with session(write_model(tmp_path), threads=1, draft_tokens=7, outputs=16) as opened:
        yield opened


@pytest.mark.parametrize("right", [1.0, 0.5, 0.0])
def test_a_text_is_replayed_with_any_drafter(runner: Session, right: float) -> None:
    assert Replayed(runner, PROMPT, TEXT).run().token_ids == tuple(TEXT)
    drafter = StatedProposals((*PROMPT, *TEXT), right, TINY.vocab_size)
    found = Replayed(runner, PROMPT, TEXT, Speculation(drafter, Times(), 3, 16, fixed=True)).run()
    assert found.token_ids == tuple(TEXT) and found.speculation
    share = found.speculation.accepted / found.speculation.drafted
    assert {1.0: share == 1, 0.5: 0.1 < share < 0.5, 0.0: share == 0}[right]  # after a wrong one all are for nothing


def test_a_draft_is_as_right_as_it_is_said_to_be(runner: Session) -> None:
    drafter = DraftModel(runner, TINY.vocab_size)  # a model may draft for itself: what it computes does not matter
    found = Replayed(runner, PROMPT, TEXT[:30], Speculation(drafter, Times(), 1, 16, fixed=True), right=0.7).run()
    assert found.token_ids == tuple(TEXT[:30]) and found.speculation
    assert 0.4 < found.speculation.accepted / found.speculation.drafted < 0.95


def test_from_where_draft_tokens_pay() -> None:
    flat, steep = {n: 1.0 for n in range(1, 9)}, {n: float(n) for n in range(1, 9)}
    assert gain(flat, 0.0, 0.5, 2) == 1.75 and gain(steep, 0.0, 1.0, 3) == 1.0
    assert pays_from(flat, 0.0) == 0.01 and pays_from(steep, 0.0) is None
    assert pays_from({n: 1.0 + 0.25 * (n > 1) for n in range(1, 9)}, 0.25) == pytest.approx(0.5, abs=0.02)


def test_what_is_measured(runner: Session) -> None:
    found = measure_speculation(runner, None, 5, 1, 0.8)
    assert set(found.seconds) >= {1, 2, 4, 8, 16} and found.draft_seconds is None and found.stated
    assert found.stated["accept"] == 0.8 and found.stated["gain"] > 0 and set(found.pays_from) == {"lookup"}


def test_a_head_drafts_the_text(tmp_path: Path) -> None:
    bundle = Bundle.open(write_model(tmp_path, HYBRID))
    plan = DraftHeadPlan.of_bundle(bundle)
    with closing(Session(bundle, RuntimeConfig(ctx=256, threads=1, draft_tokens=7, outputs=16),
                         draft_memory=plan.draft_memory)) as own, closing(plan.open(own)) as head:
        found = measure_speculation(own, None, 5, 1, 0.8, head)
        assert found.mtp_seconds and not found.self_seconds and set(found.pays_from) == {"lookup", "mtp"}
        replayed = Replayed(own, PROMPT, TEXT, Speculation(DraftHead(own, head), Times(), 2, 16, fixed=True), 0.7).run()
        assert replayed.speculation and 0.4 < replayed.speculation.accepted / replayed.speculation.drafted < 0.9
        assert list(replayed.token_ids) == list(TEXT)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    path = str(write_model(tmp_path))
    arguments = ("bench", path, "-p", "0", "-n", "2", "-r", "1", "--no-startup", "--speculate")
    out = edgeinfer(*arguments, "--accept", "0.5", "--draft", path, "--json").json["speculation"]
    assert out["ratios"]["1"] == 1 and out["draft_ms"] > 0 and out["stated"]["accept"] == 0.5
    assert set(out["pays_from"]) == {"lookup", "draft", "self"} and out["self_ms"] > 0
    said = edgeinfer(*arguments).out
    assert "tokens of a forward pass" in said and "lookup:" in said
    for wrong, words in ((["--accept", "1.5", "--speculate"], "from 0 to 1"), (["--accept", "0.5"], "--speculate")):
        refused = edgeinfer("bench", path, *wrong)
        assert refused.code == 2 and words in refused.err
