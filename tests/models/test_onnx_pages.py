"""The runner on onnxruntime with KV in pages: passes in one call, shared and copied pages, and requests over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import BudgetError, CancelledError, ClosedError, EdgeInferError, RequestError, UsageError
from edgeinfer.llm.api import LLM
from edgeinfer.runner import DECODE, Cancellation, Segment
from tests.helpers.command_line import edgeinfer
from tests.helpers.onnx_models import difference, expected
from tests.helpers.onnx_pages import PAGE, PAGED
from tests.helpers.sessions import TINY, WINDOWED, free_blocks, logits_of, running, scored, tokens, write_model

F32 = 1e-5
"""Of the largest logit."""


@contextmanager
def pages(folder: Path, config: Any = TINY, **options: Any) -> Iterator[Any]:
    """A runner whose pages all come back."""
    with running(write_model(folder, config), "pages", **{"ctx": 96, "prefill_chunk": 16, **options}) as opened:
        yield opened


def last(opened: Any, ids: list[int]) -> np.ndarray:
    """The oracle's logits after a text."""
    return np.asarray(expected(opened.bundle, ids)[-1])


def calls(opened: Any) -> list[dict[str, np.ndarray]]:
    """Return and forget the model's inputs since the last call."""
    found = list(opened.sessions.model.calls)
    opened.sessions.model.calls.clear()
    return found


@pytest.mark.parametrize("config", [TINY, WINDOWED, replace(TINY, model_type="qwen3", head_dim=16)],
                         ids=["llama", "mistral with windows", "qwen3 with fused norms"])
def test_prompts_decodes_and_scores_are_the_oracles(config: Any, tmp_path: Path) -> None:
    """A prompt of six chunks, token by token after it, and rows of several chunks; up to a full context."""
    ids = tokens(96, 3)
    with pages(tmp_path, config, outputs=7) as opened:
        want = expected(opened.bundle, ids)
        assert difference(logits_of(opened, ids, 6), want[89:]) < F32
        assert difference(scored(opened, ids), want) < F32
        with pytest.raises(RequestError, match="1 tokens after 96 tokens do not fit the context of 96"):
            sequence = opened.new_sequence()
            opened.prefill(sequence, ids)
            opened.decode([sequence], [1])


def test_a_pass_of_prompts_draft_tokens_and_decodes_is_one_call(tmp_path: Path) -> None:
    """Rows come in the order of segments and of their outputs; lengths differ, and one text crosses into a page."""
    with pages(tmp_path, max_sequences=4, outputs=8, prefill_chunk=48) as opened:
        before = [tokens(9, 1), tokens(14, 2), tokens(33, 6)]
        held = [opened.new_sequence() for _ in range(4)]
        for sequence, ids in zip(held, before, strict=False):
            opened.prefill(sequence, ids)
        calls(opened)
        new = [tokens(1, 3), tokens(5, 4), tokens(1, 5), tokens(30, 7)]
        rows = opened.forward([Segment(held[0], new[0], (0,), DECODE), Segment(held[1], new[1], (4, 0, 2), DECODE),
                            Segment(held[2], new[2], (0,), DECODE), Segment(held[3], new[3], (29,))])
        (call,) = calls(opened)
        assert call["cumulative_sequence_length"].tolist() == [0, 1, 6, 7, 37]
        assert call["past_seqlens"].tolist() == [9, 14, 33, 0] and call["block_table"].shape == (4, 3)
        proposed = expected(opened.bundle, before[1] + new[1])
        want = np.stack([last(opened, before[0] + new[0]), *proposed[[18, 14, 16]], last(opened, before[2] + new[2]),
                         last(opened, new[3])])
        assert difference(rows, want) < F32
        opened.truncate(held[1], 15)
        assert opened.forward([Segment(held[0], [1, 2, 3])]).shape == (0, TINY.vocab_size)
        opened.truncate(held[0], 10)
        rows = opened.decode([held[1], held[0]], [6, 7])
        want = np.stack([last(opened, [*before[1], new[1][0], 6]), last(opened, [*before[0], *new[0], 7])])
        assert difference(rows, want) < F32, "what was forgotten is written over"


def test_steps_are_bound_once_for_each_number_of_sequences_and_width(tmp_path: Path) -> None:
    """Widths are powers of two, or what a context takes; whoever is in a step, and in which order."""
    with pages(tmp_path, max_sequences=2) as opened:
        first, second = opened.new_sequence(), opened.new_sequence()
        texts = [tokens(3, 1), tokens(20, 2)]
        for sequence, ids in zip((first, second), texts, strict=True):
            opened.prefill(sequence, ids)
        for token in tokens(92, 3):
            opened.decode([first], [token])
        assert sorted(opened._calls._steps) == [(1, 1), (1, 2), (1, 4), (1, 6)]
        opened.truncate(first, 40)
        for step in range(8):
            order = [(first, 0), (second, 1)] if step % 2 else [(second, 1), (first, 0)]
            new = tokens(2, 10 + step)
            if step == 0:
                texts[0] = list(first.tokens)
            rows = opened.decode([sequence for sequence, _ in order], new)
            for (_, i), token, row in zip(order, new, rows, strict=True):
                texts[i].append(token)
                assert difference(row, last(opened, texts[i])) < F32, (step, i)
        assert sorted(opened._calls._steps) == [(1, 1), (1, 2), (1, 4), (1, 6), (2, 4)]


def test_without_graphs_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.onnx_pages.PAGED", PAGED._replace(graphs=False))
    with pages(tmp_path) as opened:
        ids = tokens(30, 4)
        assert difference(logits_of(opened, ids, 5)[-1], last(opened, ids)) < F32
        assert not opened.sessions.model.recorded


def test_forks_share_pages_and_copy_the_one_that_they_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(tmp_path, max_sequences=3) as opened:
        copied: list[tuple[int, int]] = []
        copy = opened.kv._copy
        monkeypatch.setattr(opened.kv, "_copy", lambda *given: (copied.append(given), copy(*given)))
        ids, free = tokens(40, 8), free_blocks(opened)
        first = opened.new_sequence()
        opened.prefill(first, ids)
        second, third = opened.fork(first), opened.fork(first)
        assert free - free_blocks(opened) == 3 and first.blocks == second.blocks == third.blocks and not copied
        held = [first, second, third]
        rows = opened.decode(held, [4, 5, 6])
        assert difference(rows, np.stack([last(opened, [*ids, token]) for token in (4, 5, 6)])) < F32
        assert len(copied) == 2 and {source for source, _ in copied} == {third.blocks[2]}, "the last holder writes it"
        assert free - free_blocks(opened) == 5 and len({sequence.blocks[2] for sequence in held}) == 3
        assert difference(opened.decode(held[1:], [7, 8])[0], last(opened, [*ids, 5, 7])) < F32 and len(copied) == 2
        opened.truncate(second, 32)  # whole pages are shared on, and nothing is copied
        rows = opened.decode([second], [9])
        assert difference(rows[0], last(opened, [*ids[:32], 9])) < F32 and len(copied) == 2
        for sequence in held:
            opened.release(sequence)
        assert free_blocks(opened) == free


def test_random_forks_cuts_and_passes_are_the_oracles(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with pages(tmp_path, max_sequences=4, ctx=64, prefill_chunk=64, outputs=4) as opened:
        alive = [opened.new_sequence()]
        for _ in range(60):
            one = alive[rng.integers(len(alive))]
            match rng.integers(4):
                case 0 if len(alive) < 4:
                    alive.append(opened.fork(one))
                case 1:
                    opened.truncate(one, int(rng.integers(len(one) + 1)))
                case 2 if len(alive) > 1:
                    alive.remove(one)
                    opened.release(one)
                case _:
                    new = [(each, rng.integers(0, 99, rng.integers(1, 15)).tolist()) for each in alive]
                    new = [(each, ids) for each, ids in new if len(each) + len(ids) <= 64]
                    if new:
                        rows = opened.forward([Segment(each, ids, (len(ids) - 1,)) for each, ids in new])
                        for (each, _), row in zip(new, rows, strict=True):
                            assert difference(row, last(opened, each.tokens)) < F32
            named = np.bincount([page for each in alive for page in each.blocks], minlength=opened.plan.kv_blocks)
            assert free_blocks(opened) == int((named == 0).sum())


def test_twenty_sequences_come_and_go_in_padded_steps(tmp_path: Path) -> None:
    """Logits are those of each sequence by itself, beside idle rows, which all write to the page that no one has."""
    rng, sizes = np.random.default_rng(6), set[int]()
    with pages(tmp_path, max_sequences=20, ctx=48, outputs=20) as opened:
        alive = list[Any]()
        for count in (1, 9, 20, 13, 5):
            while len(alive) > count:
                opened.release(alive.pop(int(rng.integers(len(alive)))))
            while len(alive) < count:
                alive.append(opened.new_sequence() if rng.integers(2) or not alive else opened.fork(alive[0]))
                if not alive[-1].tokens:
                    opened.prefill(alive[-1], tokens(int(rng.integers(1, 34)), count))
            calls(opened)
            rows = opened.decode(alive, rng.integers(0, TINY.vocab_size, count).tolist())
            sizes.add(len(calls(opened)[0]["past_seqlens"]))
            for each, row in zip(alive, rows, strict=True):
                assert difference(row, last(opened, each.tokens)) < F32
        assert sizes == {1, 6, 12, 16, 20}


def test_out_of_pages(tmp_path: Path) -> None:
    """A sequence that finds no page leaves those it took; pages of sequences that were never released come back."""
    with pages(tmp_path, max_sequences=3, ctx=96, own_tokens=8) as opened:
        assert opened.plan.kv_blocks == 5 + 3 * 2 and opened.block_tokens == PAGE
        held = [opened.new_sequence() for _ in range(3)]
        for sequence in held[:2]:
            opened.prefill(sequence, tokens(80, 8))
        assert opened.room(held[:1], 96) == 16 and opened.room(held[:2], 96) == 0
        with pytest.raises(RequestError, match=r"All 11 KV blocks of 16 tokens are in use; open the model with a "
                                               r"larger ctx or kv_memory, more max_sequences or own_tokens, or release "
                                               r"a "):
            opened.prefill(held[2], tokens(20, 1))
        assert len(held[2].blocks) == 1 and len(held[2]) == 16, "a chunk went through"
        opened.release(held[2])
        assert free_blocks(opened) == 1
        assert difference(opened.decode(held[:1], [3])[0], last(opened, [*tokens(80, 8), 3])) < F32
        del held[1], sequence
        assert difference(opened.prefill(held[1], tokens(60, 2)), last(opened, tokens(60, 2))) < F32


def test_cancelled_failed_and_closed_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(tmp_path) as opened:
        cancel, sequence, ids, free = Cancellation(), opened.new_sequence(), tokens(40), free_blocks(opened)
        opened.prefill(sequence, ids)
        run = opened.sessions.model.run_with_iobinding

        def cancelling(*given: Any) -> None:
            run(*given)
            cancel.cancel()

        with monkeypatch.context() as patch:
            patch.setattr(opened.sessions.model, "run_with_iobinding", cancelling)
            with pytest.raises(CancelledError, match="The run was cancelled"):
                opened.prefill(sequence, tokens(40, 5), cancel)
        assert len(sequence) == 56 and free - free_blocks(opened) == 4, "a chunk went through, with its page alone"
        opened.truncate(sequence, 40)

        def lost(*given: Any) -> None:
            raise RuntimeError("CUDA failure 700: an illegal memory access\nwas encountered")

        with monkeypatch.context() as patch:
            patch.setattr(opened.sessions.model, "run_with_iobinding", lost)
            with pytest.raises(EdgeInferError, match=r"^onnxruntime failed on CPUExecutionProvider, which"):
                opened.prefill(sequence, tokens(20, 5))
        assert free - free_blocks(opened) == 3
        assert difference(opened.decode([sequence], [1])[0], last(opened, [*ids, 1])) < F32
        with pytest.raises(RequestError, match=r"cannot run the tree \[-1, -1\]; run its tokens as a chain"):
            opened.forward([Segment(sequence, [3, 4], (0,), DECODE, parents=(-1, -1))])
        with pytest.raises(RequestError, match="belongs to another model that"), pages(tmp_path) as other:
            other.decode([sequence], [1])
        opened.close()
        with pytest.raises(ClosedError, match="The model was closed; open it again"):
            opened.decode([sequence], [1])


# -- requests ----------------------------------------------------------------------------------------------------------

# -- plans, and what is refused ----------------------------------------------------------------------------------------


def test_the_plan_has_the_pages(tmp_path: Path) -> None:
    with pages(tmp_path, max_sequences=3) as opened:
        region = opened.plan.region("kv")
        assert opened.plan.kv_blocks == opened.plan.request.kv_blocks == 3 * (6 + 1)
        assert region.nbytes == sum(slab.nbytes for slab in opened.slabs._kept)
        assert region.reason.startswith("f32, 21 pages of 16 positions, ")
        need = opened.plan.total_bytes
    with pytest.raises(BudgetError, match=r"It fits with --ctx"), \
            pages(tmp_path, max_sequences=3, budget_bytes=need - 1000):
        pass


def test_the_plan_of_a_gpu() -> None:
    """Pages of 256: as many as contexts take, and with beams the prompt once."""
    seven = ("plan", "llama-2-7b", "--weights", "q4", "--device", "cuda", "--kv-layout", "pages")
    out = edgeinfer(*seven, "--samples", "8", "--json").json
    regions = {region["name"]: region for region in out["regions"]}
    assert regions["kv"]["bytes"] == (8 * 17 + 1) * 256 * 524288 and out["kv_bytes_per_position"] == 524288
    assert regions["kv"]["reason"].startswith("f16, 136 pages of 256 positions, ")
    assert "30 graphs of decode steps" in regions["context"]["reason"]
    out = edgeinfer(*seven, "--beams", "8", "-n", "100", "--json").json
    assert out["regions"][1]["reason"].startswith("f16, 31 pages (a prompt once, 8 x 100 tokens) of 256 positions")


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("given", "said"), [
    (("--device", "onnx-cpu", "--kv-layout", "pages"),
     "--kv-layout pages is not available on device onnx-cpu, because PagedAttention has no CPU kernel; choose slots, "
     "or run with --device cuda."),
    (("--kv-layout", "slots"),
     "--kv-layout slots is not available on device cpu, whose KV cache has pages of 16 tokens; leave it out, or run "
     "with --device cuda."),
    (("--kv-layout", "blocks"), "--kv-layout is 'blocks'; choose one of slots, pages."),
])
def test_layouts_that_a_device_has_not(given: tuple[str, ...], said: str, no_variables: None) -> None:
    for command in (("plan", "demo"), ("run", "demo", "Once", "-n", "2"), ("bench", "demo", "-p", "4", "-n", "1")):
        told = edgeinfer(*command, *given)
        assert told.code == 2 and told.sentence == said, command


def test_layouts_in_python() -> None:
    with pytest.raises(UsageError, match="has no CPU kernel"), LLM("demo", device="onnx-cpu", kv_layout="pages"):
        pass
    with pytest.raises(UsageError, match="kv_layout"):
        RuntimeConfig(kv_layout="rows")
    with LLM("demo", ctx=64, threads=1, kv_layout="pages") as llm:
        assert llm.runner.block_tokens == 16


@pytest.mark.slow
def test_speeds_in_pages_as_on_a_gpu(tmp_path: Path) -> None:
    """That part of the check on what stands in for a GPU: steps, draft tokens and arrivals."""
    from benchmarks.gpu.rows import Check
    from benchmarks.gpu.sizes import Sizes
    from benchmarks.gpu.speed import many

    check = Check(PAGED, 60)
    many(check, str(write_model(tmp_path)), "pages", Sizes((1, 2), (0, 16), (16,), 2, 8, 0))
    assert len(check.rows) == 9 and not any(row.verdict for row in check.rows)
    assert "2 arriving" in check.rows[-1].what
