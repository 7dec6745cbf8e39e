"""Layers in several stages give the bits of one session: logits and texts, forks, cuts, prefixes, cancelled passes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgeinfer import LLM
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.errors import BundleError, CancelledError, ClosedError, EdgeInferError, RequestError, UsageError
from edgeinfer.graph import ExpertsConfig, ModelConfig, RecurrentConfig
from edgeinfer.llm import open as opening
from edgeinfer.memory_planner.weights import MAPPED_BYTES
from edgeinfer.pipeline import LocalStage, PipelineRunner, ProcessStage, open_pipeline
from edgeinfer.pipeline.parts import PartCounts
from edgeinfer.pipeline.split import Split
from edgeinfer.runner import DECODE, PROMPT, Cancellation, Segment
from edgeinfer.runtime import StageSession
from tests.helpers.crowd import CTX, POOL, Crowd, branching, logits_alone
from tests.helpers.sessions import HYBRID, KIMI, TINY, WINDOWED, config_of, logits_of, session, tokens, write_model

LLAMA = replace(TINY, num_hidden_layers=4)
MOE = replace(LLAMA, model_type="qwen3_moe", experts=ExpertsConfig(5, 2, 24))
CONV = ModelConfig(
    "lfm2", vocab_size=99, hidden_size=40, intermediate_size=56, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=10, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=1024,
    tie_word_embeddings=True, recurrent=RecurrentConfig("conv", (0, 2, 3), conv_width=3))
MODELS: dict[str, tuple[ModelConfig, Split]] = {
    "llama": (LLAMA, ((0, 1), (2, 3))),
    "llama-4": (LLAMA, ((0, 0), (1, 1), (2, 2), (3, 3))),
    "windowed": (WINDOWED, ((0, 0), (1, 2))),
    "windowed-alone": (WINDOWED, ((0, 1), (2, 2))),
    "moe": (MOE, ((0, 2), (3, 3))),
    "hybrid": (HYBRID, ((0, 0), (1, 2))),
    "hybrid-3": (HYBRID, ((0, 0), (1, 1), (2, 2))),
    "kimi": (KIMI, ((0, 1), (2, 2))),
    "conv": (CONV, ((0, 1), (2, 3))),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@contextmanager
def pipeline(path: Path, split: Split, processes: bool = False, **options: Any) -> Iterator[PipelineRunner]:
    """An open pipeline with the settings of `session`; passes go through it in parts also where it is one process."""
    config = config_of(**{"threads": 1, "prefill_chunk": 64, **options})
    opened = open_pipeline(Bundle.open(path), config, split, processes)
    opened._counts = PartCounts(2)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("name", MODELS)
def test_stages_give_the_bits_of_one_session(folder: Path, name: str) -> None:
    model, split = MODELS[name]
    path, ids = write_model(folder, model), tokens(330, 1)
    options: dict[str, Any] = {"ctx": 512, "max_sequences": 4, "outputs": 8, "prefill_chunk": 256}
    with session(path, **options) as one, pipeline(path, split, **options) as several:
        for _ in range(3):  # other numbers of parts
            assert np.array_equal(logits_of(one, ids, 12), logits_of(several, ids, 12))
        rows = [list[np.ndarray](), list[np.ndarray]()]
        for opened, found in zip((one, several), rows, strict=True):
            texts = [opened.new_sequence() for _ in range(3)]
            first = [Segment(texts[0], ids[:100], (3, 99)), Segment(texts[1], ids[7:8], (0,)),
                     Segment(texts[2], ids[50:130], (79,), DECODE)]
            found.append(opened.forward(first).copy())
            fork = opened.fork(texts[0])
            found.append(opened.decode([*texts, fork], [5, 6, 7, 8]).copy())
            found.append(opened.forward([Segment(texts[1], ids[:6], (0, 5), DECODE),
                                         Segment(fork, ids[:70], (69,), PROMPT)]).copy())
            opened.rollback(texts[1], 4)
            found.append(opened.decode([texts[1], texts[0]], [9, 10]).copy())
            for sequence in (*texts, fork):
                opened.release(sequence)
        for ours, theirs in zip(*rows, strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ["llama", "windowed", "hybrid"])
def test_a_stage_in_another_process_gives_the_same_bits(folder: Path, name: str) -> None:
    model, split = MODELS[name]
    path, ids = write_model(folder, model), tokens(330, 2)
    options: dict[str, Any] = {"ctx": 512, "max_sequences": 4, "prefill_chunk": 256}
    with session(path, **options) as one, pipeline(path, split, processes=True, **options) as several:
        for _ in range(3):
            assert np.array_equal(logits_of(one, ids, 12), logits_of(several, ids, 12))
        texts = [several.new_sequence() for _ in range(4)]
        for sequence in texts:
            several.prefill(sequence, ids[:40])
        with_one = one.new_sequence()
        one.prefill(with_one, ids[:40])
        for token in ids[40:50]:
            want = one.decode([with_one], [token])[0]
            assert all(np.array_equal(row, want) for row in several.decode(texts, [token] * 4))


def test_trees_of_drafts_and_accepted_paths(folder: Path) -> None:
    path, ids = write_model(folder, LLAMA), tokens(40, 3)
    options: dict[str, Any] = {"ctx": 128, "outputs": 8}
    with session(path, **options) as one, pipeline(path, ((0, 0), (1, 3)), **options) as several:
        rows = []
        for opened in (one, several):
            sequence = opened.new_sequence()
            opened.prefill(sequence, ids)
            found = [opened.forward([Segment(sequence, [1, 2, 3, 4], range(4), DECODE, [-1, 0, 0, 2])]).copy()]
            opened.accept(sequence, 40, [0, 2, 3])
            assert sequence.tokens == [*ids, 1, 3, 4]
            rows.append([*found, opened.decode([sequence], [5]).copy()])
            with pytest.raises(RequestError, match="cannot be kept"):
                opened.accept(sequence, 40, [1, 1])
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(*rows, strict=True))


class Requests(Crowd):
    """Requests to a pipeline in this process, the books of whose stages are looked at."""

    def cancelled(self, segments: list[Segment]) -> None:
        """End a pass in its last stage."""
        self.counts["cancelled"] += 1
        lengths = [len(segment.sequence) for segment in segments]
        last = self.opened.stages[-1].session  # type: ignore[attr-defined]
        with mock.patch.object(last, "_run", side_effect=CancelledError("Cancelled.")):
            try:
                self.opened.forward(segments)
            except (CancelledError, RequestError):
                assert [len(segment.sequence) for segment in segments] == lengths
                return
        raise AssertionError("the pass was not cancelled")

    def check_books(self) -> None:
        """Check that the stages have the tokens of all requests."""
        opened: Any = self.opened
        for stage in opened.stages:
            for request in self.alive:
                own = stage._calls._sequences[opened._numbers[request.sequence]]
                assert own.tokens == request.sequence.tokens and not own.reserved


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_a_crowd_of_requests(folder: Path, name: str) -> None:
    model, split = MODELS[name]
    path, texts = write_model(folder, model), branching(8)
    wanted = logits_alone(path, texts)
    with pipeline(path, split, outputs=4, **POOL) as opened:
        crowd = Requests(opened, texts, wanted)  # type: ignore[arg-type]
        counts = crowd.run(60)
        assert counts["forks"] and counts["cuts"] and counts["cancelled"] and counts["hit"]
        del crowd
        gc.collect()
        opened.drop_prefixes()
        opened.release(opened.new_sequence())  # sequences that nobody holds are released before
        gc.collect()
        last = opened.new_sequence()
        assert opened.fits([(last, CTX)]) and opened.available_blocks == opened.n_blocks == opened.free_blocks
        assert opened.prefix_blocks == 0


@pytest.mark.parametrize("name", ["hybrid", "conv", "llama"])
def test_prefixes_are_found_as_far_as_all_stages_have_them(folder: Path, name: str) -> None:
    model, split = MODELS[name]
    path, ids = write_model(folder, model), tokens(100, 4)
    options: dict[str, Any] = {"ctx": 256, "max_sequences": 2}
    with session(path, **options) as one, pipeline(path, split, **options) as several:
        lengths = []
        for opened in (one, several):
            sequence = opened.new_sequence()
            opened.prefill(sequence, ids[:64])
            opened.cache_prefix(sequence, b"salt")
            assert len(opened.from_prefix(ids)) == 0
            found = opened.from_prefix(ids, b"salt")
            lengths.append(len(found))
            assert found.tokens == ids[: len(found)]
            opened.prefill(found, ids[len(found) :])
            fresh = opened.new_sequence()
            opened.release(sequence)
            opened.prefill(fresh, ids)
            assert np.array_equal(opened.decode([found], [3]).copy(), opened.decode([fresh], [3]))
        assert lengths[0] == lengths[1] > 0
        first = several.stages[0]
        assert isinstance(first, LocalStage)
        first.session.drop_prefixes()
        assert len(several.from_prefix(ids, b"salt")) == 0, "one stage has forgotten it"
        assert all(len(stage._calls._sequences) <= 4 for stage in several.stages if isinstance(stage, LocalStage))


def test_a_pass_that_finds_no_room_leaves_all_stages_as_they_were(folder: Path) -> None:
    path = write_model(folder, LLAMA)
    with pipeline(path, ((0, 1), (2, 3)), ctx=64, kv_tokens=64, max_sequences=2) as opened:
        first, second = opened.new_sequence(), opened.new_sequence()
        opened.prefill(first, tokens(40))
        want = logits_of(opened, tokens(14), 2)
        assert not opened.fits([(second, 40)])
        with pytest.raises(RequestError, match="KV blocks of 16 tokens are in use"):
            opened.forward([Segment(second, tokens(40), (39,))])
        assert len(second) == 0 and np.array_equal(logits_of(opened, tokens(14), 2), want)


# -- texts -------------------------------------------------------------------------------------------------------------

PROMPTS = ["Once upon a time", "The fox and the crow", "There was a king, there was a king, there was"]
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"seed": 1}, {"seed": 2, "n": 2}, {"temperature": 0, "logprobs": 2},
    {"seed": 3, "repetition_penalty": 1.3}, {"temperature": 0, "beams": 3}, {"speculate": "off", "seed": 4},
    {"temperature": 0, "response_format": {"type": "json_object"}})


def written() -> list[Any]:
    """Texts of the demo model."""
    with LLM("demo", ctx=256, threads=1, max_sequences=4, beams=3) as llm:
        return [[(one.text, one.token_ids, one.logprobs) for one in llm.batch(PROMPTS, max_tokens=24, **settings)]
                for settings in REQUESTS]


@pytest.mark.parametrize("processes", [False, True])
def test_texts_of_the_engine_are_those_of_one_session(processes: bool) -> None:
    wanted = written()

    def opened(bundle: Bundle, config: RuntimeConfig, *_: Any) -> PipelineRunner:
        return open_pipeline(bundle, config, ((0, 1), (2, 4)), processes)

    with mock.patch.object(opening, "session", opened):
        assert written() == wanted


# -- memory ------------------------------------------------------------------------------------------------------------


def test_plans_of_stages_have_the_bytes_of_their_layers_alone(folder: Path) -> None:
    model = replace(LLAMA, num_hidden_layers=6, hidden_size=256, intermediate_size=1024, head_dim=32)
    path = write_model(folder / "large", model)
    for options in ({}, {"mmap": False}):
        where = "resident" if options else "weights"
        with session(path, ctx=512, **options) as one:
            whole, names = one.plan, {weight.name for weight in one.graph.weights}
        found: set[str] = set()
        kv = 0
        for first, last in ((0, 1), (2, 3), (4, 5)):
            stage = StageSession(Bundle.open(path), config_of(threads=1, prefill_chunk=64, ctx=512, **options), first,
                                 last)
            own = {weight.name for weight in stage.graph.weights}
            assert not own & found and all(name.split(".")[1] in (str(first), str(last)) for name in own
                                           if name.startswith("layers."))
            nbytes = sum(stage.graph.types[weight.name].nbytes(weight.shape) for weight in stage.graph.weights)
            planned = stage.plan.region(where).nbytes
            assert nbytes <= planned <= nbytes + 2 * MAPPED_BYTES + 64 * len(own) + 64
            assert planned < 0.6 * whole.region(where).nbytes and set(stage.plan.kv_layers) == {first, last}
            kv += stage.plan.region("kv").nbytes - 64
            if sys.platform.startswith("linux") and where == "weights":
                # Nothing of other layers is touched, before or after a pass.
                sequence = stage.new_sequence()
                stage.begin([(sequence, 40)])
                given = None if first == 0 else np.zeros((40, 256), np.float32)
                stage.run_part([Segment(sequence, tokens(40), (39,) if last == 5 else ())], 0, given)
                assert mapped_bytes(path) <= planned + 4095  # the last page counts whole
            found |= own
            stage.close()
            del stage
            gc.collect()
        assert found == names and kv == whole.region("kv").nbytes - 64


def mapped_bytes(path: Path) -> int:
    """Bytes of a bundle's weights that this process has in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            inside = str(path) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_part_in_another_process_is_cancelled_and_the_sequence_goes_on(folder: Path) -> None:
    path, ids = write_model(folder, LLAMA), tokens(300, 5)
    with pipeline(path, ((0, 2), (3, 3)), processes=True, ctx=512, prefill_chunk=256) as opened:
        sequence, wish = opened.new_sequence(), Cancellation()
        opened.prefill(sequence, ids[:20])
        wish.cancel()
        with pytest.raises(CancelledError):
            opened.forward([Segment(sequence, ids[20:270], (249,))], wish)
        assert len(sequence) == 20
        got = opened.prefill(sequence, ids[20:]).copy()
        with session(path, ctx=512) as one:
            assert np.array_equal(got, one.prefill(one.new_sequence(), ids))


def test_a_process_that_is_killed_ends_requests_by_one_sentence_and_a_closed_one_leaves_none(folder: Path) -> None:
    path = write_model(folder, LLAMA)
    with pipeline(path, ((0, 0), (1, 1), (2, 3)), processes=True, ctx=128) as opened:
        stages = [stage for stage in opened.stages if isinstance(stage, ProcessStage)]
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(20))
        os.kill(stages[0]._process.pid, signal.SIGKILL)
        with pytest.raises(EdgeInferError, match=r"The process of the layers 0-0 has ended \(exit code -9\)"):
            for _ in range(3):
                opened.decode([sequence], [3])
        with pytest.raises(EdgeInferError, match="has ended"):
            opened.new_sequence()
    opened.close()
    assert all(stage._process.poll() is not None for stage in stages)
    with pytest.raises(ClosedError):
        opened.decode([sequence], [3])


def test_a_stage_ends_when_who_started_it_dies(folder: Path) -> None:
    path = write_model(folder, LLAMA)
    stage = ProcessStage(path, config_of(threads=1, ctx=64), 0, 1)
    stage.wait()
    stage._to.close()  # as the system does with all that a process has open
    assert stage._process.wait(120) == 0
    stage.close()


def test_what_a_process_cannot_open_is_said_here(folder: Path, tmp_path: Path) -> None:
    stage = ProcessStage(tmp_path / "none", config_of(threads=1), 0, 1)
    with pytest.raises(BundleError):
        stage.wait()
    stage.close()
    nobody = ProcessStage(tmp_path, config_of(threads=1), 0, 1, (sys.executable, "-c", "pass"))
    with pytest.raises(EdgeInferError, match="layers 0-1 has ended"):
        nobody.wait()
    nobody.close()
    with pytest.raises(EdgeInferError, match="The process for the layers 0-1 cannot be started"):
        ProcessStage(tmp_path, config_of(threads=1), 0, 1, (str(tmp_path / "python"),))


def test_settings_that_stages_cannot_have_are_refused(folder: Path) -> None:
    path = write_model(folder, LLAMA)
    for options, message in (({"kv_memory": 10**6}, "sized by its tokens"),
                             ({"recipe": Recipe.parse("early_exit:layers=2")}, "cannot run with early_exit"),
                             ({"lazy": "keep=0.5"}, "cannot run with lazy")):
        with Bundle.open(path) as bundle, pytest.raises(UsageError, match=message):
            open_pipeline(bundle, config_of(threads=1, **options), ((0, 1), (2, 3)))


def test_stages_that_do_not_fit_together_are_refused(folder: Path) -> None:
    path, config = write_model(folder, LLAMA), config_of(threads=1, ctx=64)
    with session(path, ctx=64) as one:
        stages = [LocalStage(StageSession(Bundle.open(path), config, *layers)) for layers in ((0, 1), (2, 3), (2, 2))]
        for given, message in ((stages[1::-1], "layer 0 is next"), (stages[:1], "end with layer 1; the model has 4"),
                               ([stages[0], stages[2]], "end with layer 2")):
            with pytest.raises(UsageError, match=message):
                PipelineRunner(one.bundle, config, given)
        for name, value, message in (("identity", "another", "has another bundle"),
                                     ("arithmetic", "generic", "differ in their arithmetic"),
                                     ("kv_blocks", 7, "differ in their kv_blocks")):
            unlike = mock.Mock(info=stages[1].info._replace(**{name: value}))
            with pytest.raises(UsageError, match=message):
                PipelineRunner(one.bundle, config, [stages[0], unlike])
        for stage in stages:
            stage.close()


def test_sequences_of_others_are_refused(folder: Path) -> None:
    path = write_model(folder, LLAMA)
    with session(path, ctx=64) as one, pipeline(path, ((0, 1), (2, 3)), ctx=64) as opened:
        for call in (opened.fork, opened.checkpoint, opened.cache_prefix, opened.release,
                     lambda sequence: opened.decode([sequence], [1])):
            with pytest.raises(RequestError, match="belongs to another model that is open"):
                call(one.new_sequence())
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(5))
        for n in (-1, 6):
            with pytest.raises(RequestError, match=f"Cannot cut a sequence of 5 tokens to {n}"):
                opened.truncate(sequence, n)
