"""Recurrent layers on onnxruntime's CPU provider: states in slots, and whatever happens to a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import PROVIDERS, Flavour, OnnxRunner, device_planner, export
from edgeinfer.backends.onnx import caller
from edgeinfer.backends.onnx.caller import Caller
from edgeinfer.backends.onnx.lower_graph import lower_graph
from edgeinfer.backends.onnx.slabs import STATE_BLOCKS
from edgeinfer.bundle import Bundle
from edgeinfer.config import CPU, Recipe
from edgeinfer.errors import CancelledError, EdgeInferError, RequestError, UsageError
from edgeinfer.graph import ModelConfig, build_graph, read_config, requested_types
from edgeinfer.llm import LLM
from edgeinfer.memory_planner import to_request
from edgeinfer.runner import Cancellation, Segment, Sequence
from tests.helpers import golden_cases
from tests.helpers.command_line import edgeinfer
from tests.helpers.onnx_models import Slots, difference, expected, graph_of
from tests.helpers.sessions import HYBRID, KIMI, config_of, running, tokens, write_model

pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")

F32 = 1e-5
"""Of the largest logit."""


@contextmanager
def runner(path: Path, **options: Any) -> Iterator[OnnxRunner]:
    with running(path, "onnx-cpu", **{"prefill_chunk": 16, "ctx": 96, "max_sequences": 3, **options}) as opened:
        assert isinstance(opened, OnnxRunner)
        yield opened


def last(opened: OnnxRunner, ids: list[int]) -> np.ndarray:
    """The oracle's logits after a text."""
    return np.asarray(expected(opened.bundle, ids)[-1])


def states(opened: OnnxRunner, slot: int) -> list[np.ndarray]:
    """Copies of the states of a slot."""
    return [kept[slot].copy() for slab, kept in zip(opened.slabs.slabs, opened.slabs._kept, strict=True)
            if slab.past.startswith(("past_inputs", "past_matrices"))]


def slot_of(sequence: Sequence) -> int:
    return int(sequence.blocks[0])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hybrid"), HYBRID)


@pytest.mark.parametrize("config", [HYBRID, KIMI], ids=lambda config: config.model_type)
def test_sequences_of_unlike_lengths_are_the_oracles(config: ModelConfig, tmp_path: Path) -> None:
    """A prompt of one token, of several chunks, and of one; chunks and single tokens in one pass; a fork between."""
    texts = [tokens(1, 1), tokens(37, 2), tokens(16, 3)]
    with runner(write_model(tmp_path, config), max_sequences=4, outputs=4) as opened:
        held = [opened.new_sequence() for _ in texts]
        for sequence, ids in zip(held, texts, strict=True):
            assert difference(opened.prefill(sequence, ids), last(opened, ids)) < F32
        held.append(opened.fork(held[1]))
        texts.append(list(texts[1]))
        for step in range(3):
            new = [tokens(5 if (step + i) % 3 == 0 else 1, 10 * step + i) for i in range(4)]
            rows = opened.forward([Segment(sequence, ids, (len(ids) - 1,))
                                   for sequence, ids in zip(held, new, strict=True)])
            for text, ids, row in zip(texts, new, rows, strict=True):
                text += ids
                assert difference(row, last(opened, text)) < F32


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_sequences(seed: int, bundle: Path) -> None:
    """Prompts, chunks, single tokens, forks, releases and rollbacks in random order, up to full slots."""
    random, held = np.random.default_rng(seed), list[tuple[Sequence, list[int]]]()
    with runner(bundle, ctx=24, max_sequences=4, outputs=4) as opened:
        for _ in range(60):
            what = random.choice(["new", "fork", "release", "rollback", *["pass"] * 4])
            if what == "new" and len(held) < 4:
                held.append((opened.new_sequence(), []))
            elif what == "pass" and held:
                shuffled = [held[i] for i in random.permutation(len(held))]
                taken = [(one, text, random.integers(90, size=random.choice([1, 1, 2, 4])).tolist())
                         for one, text in shuffled]
                taken = [(one, text, ids) for one, text, ids in taken if len(text) + len(ids) <= 24]
                if not taken:
                    continue
                rows = opened.forward([Segment(one, ids, (len(ids) - 1,)) for one, _, ids in taken])
                for (_, text, ids), row in zip(taken, rows, strict=True):
                    text += ids
                    assert difference(row, last(opened, text)) < F32
            elif held and what != "new":
                one, text = held[random.integers(len(held))]
                if what == "fork" and len(held) < 4:
                    held.append((opened.fork(one), list(text)))
                elif what == "release":
                    opened.release(one)
                    held.remove((one, text))
                elif what == "rollback":
                    del text[random.integers(len(text) + 1) :]
                    opened.rollback(one, len(text))


def test_idle_slots_keep_their_state(bundle: Path) -> None:
    """Also one with a state that is not finite; its slot is as good as new for the next sequence."""
    with runner(bundle) as opened:
        held = [opened.new_sequence() for _ in range(3)]
        for seed, sequence in enumerate(held):
            opened.prefill(sequence, tokens(9, seed))
        before = states(opened, slot_of(held[1]))
        for kept in opened.slabs._kept[opened.slabs._kv :]:
            kept[slot_of(held[1])].fill(np.nan)
        opened.decode([held[0], held[2]], [1, 2])
        assert difference(opened.decode([held[0]], [3])[0], last(opened, [*tokens(9, 0), 1, 3])) < F32
        assert all(np.isnan(state).all() for state in states(opened, slot_of(held[1])))
        assert all(np.isfinite(state).all() for state in before)
        opened.release(held[1])
        again = opened.new_sequence()
        assert difference(opened.prefill(again, tokens(1, 8)), last(opened, tokens(1, 8))) < F32


def test_a_cancelled_chunk_leaves_its_sequence_as_it_was(bundle: Path) -> None:
    with runner(bundle) as opened:
        cancel, sequence, ids = Cancellation(), opened.new_sequence(), tokens(20)
        opened.prefill(sequence, ids)
        before, run = states(opened, slot_of(sequence)), opened.sessions.run

        def cancelling(*given: Any) -> None:
            run(*given)
            cancel.cancel()
            raise CancelledError("The run was cancelled.")

        opened.sessions.run = cancelling  # type: ignore[method-assign]
        with pytest.raises(CancelledError):
            opened.prefill(sequence, tokens(12, 5), cancel)
        del opened.sessions.run  # type: ignore[method-assign]
        with pytest.raises(CancelledError):
            opened.decode([sequence], [1], cancel)
        assert sequence.tokens == ids
        assert all(map(np.array_equal, before, states(opened, slot_of(sequence))))
        assert difference(opened.decode([sequence], [1])[0], last(opened, [*ids, 1])) < F32


def test_single_tokens_are_not_cancelled_halfway(bundle: Path) -> None:
    """A wish to cancel that comes while they run is too late for them: they end, and their sequence holds them."""
    with runner(bundle) as opened:
        cancel, sequence, ids = Cancellation(), opened.new_sequence(), tokens(20)
        opened.prefill(sequence, ids)
        run = opened.sessions.model.run_with_iobinding

        def cancelling(*given: Any) -> None:
            cancel.cancel()
            run(*given)

        opened.sessions.model.run_with_iobinding = cancelling
        assert difference(opened.decode([sequence], [1], cancel)[0], last(opened, [*ids, 1])) < F32
        assert sequence.tokens == [*ids, 1]


def test_a_pass_that_fails_empties_sequences_whose_state_went_on(bundle: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two calls are over, the third fails: two prompts and a decoded token have no state from before."""
    with runner(bundle, prefill_chunk=32) as opened:
        held, calls = [opened.new_sequence() for _ in range(3)], list[int]()
        for seed, sequence in enumerate(held):
            opened.prefill(sequence, tokens(9, seed))
        run = Caller.run

        def failing(self: Caller, session: Any, *given: Any) -> None:
            calls.append(session is opened.sessions.model)
            if sum(calls) == 2 and calls[-1]:
                raise RuntimeError("CUDA failure 700")
            run(self, session, *given)

        with monkeypatch.context() as patch:
            patch.setattr(Caller, "run", failing)
            patch.setattr("edgeinfer.backends.onnx.sessions.raised_by_onnxruntime", lambda error: True)
            with pytest.raises(EdgeInferError, match="CUDA failure 700"):
                opened.forward([Segment(held[0], tokens(5)), Segment(held[1], [1], (0,)), Segment(held[2], [2])])
        assert [len(sequence) for sequence in held] == [0, 0, 0]
        for seed, sequence in enumerate(held):
            assert difference(opened.prefill(sequence, tokens(9, seed)), last(opened, tokens(9, seed))) < F32


def test_states_cannot_be_cut(bundle: Path) -> None:
    """But a sequence goes back by running its beginning again."""
    with runner(bundle) as opened:
        sequence, ids = opened.new_sequence(), tokens(20)
        opened.prefill(sequence, ids)
        assert [opened.can_truncate(sequence, n) for n in (0, 7, 20)] == [0, 0, 20]
        with pytest.raises(RequestError, match=r"^A sequence of 20 tokens cannot be cut to 7: its recurrent state has "
                                               r"continued, and no earlier one is kept on this device\. Cut it to 0, "):
            opened.truncate(sequence, 7)
        opened.rollback(sequence, 7)
        assert difference(opened.decode([sequence], [1])[0], last(opened, [*ids[:7], 1])) < F32


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Graphs that were recorded: CUDA runs a model three times then, with the same inputs each time."""
    monkeypatch.setitem(PROVIDERS, "onnx-cpu", PROVIDERS["onnx-cpu"]._replace(graphs=True))
    make, found = caller._Call.make, set[str]()

    def recording(self: caller._Call) -> None:
        graph = self.options.get_run_config_entry("gpu_graph_id")
        if graph not in {*found, "-1"}:
            found.add(graph)
            for _ in range(2):
                self._run(self._binding, self.options)
        make(self)

    monkeypatch.setattr(caller._Call, "make", recording)
    return found


def test_recording_a_step_does_not_move_states(bundle: Path, recorded: set[str]) -> None:
    texts = [tokens(9, seed) for seed in range(3)]
    with runner(bundle) as opened:
        held = [opened.new_sequence() for _ in range(3)]
        for sequence, ids in zip(held, texts, strict=True):
            opened.prefill(sequence, ids)
        for chosen in ((0,), (0, 1), (2,), (0, 1, 2), (1, 2)):
            rows = opened.decode([held[i] for i in chosen], [i + 1 for i in chosen])
            for i, row in zip(chosen, rows, strict=True):
                texts[i].append(i + 1)
                assert difference(row, last(opened, texts[i])) < F32
        assert len(recorded) == len(opened._calls._steps) == 3


def test_a_step_that_was_cancelled_before_it_was_recorded(bundle: Path, recorded: set[str]) -> None:
    """It is recorded by the next one, with idle slots, too."""
    with runner(bundle) as opened:
        cancel, sequence, ids = Cancellation(), opened.new_sequence(), tokens(9)
        opened.prefill(sequence, ids)
        cancel.cancel()
        with pytest.raises(CancelledError):
            opened.decode([sequence], [1], cancel)
        assert opened._calls._steps and not recorded
        for token in (1, 2):
            ids.append(token)
            assert difference(opened.decode([sequence], [token])[0], last(opened, ids)) < F32


@pytest.mark.parametrize("device", ["onnx-cpu", "cuda"])
def test_the_plan_has_the_states(device: str, bundle: Path) -> None:
    with Bundle.open(bundle) as opened:
        planner, config = device_planner(graph_of(opened), config_of(ctx=96, max_sequences=3, threads=1),
                                         PROVIDERS[device], PROVIDERS[device].kv[0])
        assert config.kv_layout == "slots"
        region = planner.plan(to_request(config)).region("state")
        assert region.reason.startswith("recurrent state: 5 slots x ")
    if device == "onnx-cpu":
        with runner(bundle) as running_on:
            found = [kept for kept in running_on.slabs._kept if len(kept) == 3 + STATE_BLOCKS]
            assert sum(kept.nbytes for kept in found) == region.nbytes == running_on.plan.region("state").nbytes


def test_two_tensors_of_one_name_are_not_one(bundle: Path) -> None:
    """Kimi's gate of a layer and the gate of an FFN that is stored by neuron once were."""
    with Bundle.open(bundle) as opened:
        at = lower_graph(graph_of(opened), Flavour(dtype="f32").checked(opened.config))
    stored = next(iter(at.stored.values()))
    assert at.store(stored) == stored.name
    with pytest.raises(ValueError, match=f"^Two tensors of the model have the name {stored.name}: "):
        at.store(stored._replace(shape=(1, *stored.shape)))


@pytest.mark.parametrize("device", ["onnx-cpu", "cuda"])
def test_a_model_without_attention_has_no_keys(device: str) -> None:
    graph = build_graph(read_config(golden_cases.config_of("mamba2")), requested_types("q4"), Recipe(()))
    planner, config = device_planner(graph, config_of(ctx=48, threads=1), PROVIDERS[device], PROVIDERS[device].kv[0])
    plan = planner.plan(to_request(config))
    assert plan.region("kv").nbytes == 0 < plan.region("state").nbytes


def test_idle_slots_of_an_exported_model(bundle: Path, tmp_path: Path) -> None:
    """The input `active`, as the description of the model has it."""
    with Bundle.open(bundle) as opened:
        flavour = Flavour(dtype="f32", ctx=32).checked(opened.config)
        export(opened, tmp_path / "m.onnx", flavour)
        model, ids = Slots(tmp_path / "m.onnx", flavour, 2), tokens(9)
        for slot in (0, 1):
            model.feed([ids], [slot])
        model.feed([[3], [4]], idle=[1])
        found = model.feed([[5], [5]])[0]
        assert difference(found[0], expected(opened, [*ids, 3, 5])[-1]) < F32
        assert difference(found[1], expected(opened, [*ids, 5])[-1]) < F32


@pytest.mark.parametrize("device", ["onnx-cpu", "cuda"])
def test_the_report_of_a_plan_has_the_states(device: str, bundle: Path) -> None:
    """Neither journal nor checkpoints; on a GPU a note says that nothing is known of results there."""
    report = edgeinfer("plan", bundle, "-c", "64", "--device", device, "--json").json
    state, (region,) = report["state"], [one for one in report["regions"] if one["name"] == "state"]
    assert state["slot_bytes"] == state["matrices_bytes"] + state["convolution_bytes"] == region["bytes"] // 3
    assert state["journal_bytes"] == state["checkpoints"] == 0 < state["matrices_bytes"]
    assert "there are no checkpoints" in state["said"]
    assert any("have not been run on a GPU" in note for note in report["notes"]) is (device == "cuda")


def test_a_run_on_a_gpu_says_that_it_is_untried(bundle: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("edgeinfer.backends.onnx.runner.CUDA", "onnx-cpu")
    with runner(bundle):
        assert "Recurrent layers have not been run on a GPU by edgeinfer yet" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [{"speculate": "lookup"}, {"draft": "demo"}])
def test_draft_tokens_are_refused(asked: dict[str, Any], bundle: Path) -> None:
    """On request; by default nothing is drafted."""
    with pytest.raises(UsageError, match="Draft tokens were asked for, and device onnx-cpu keeps no recurrent state "):
        LLM(bundle, device="onnx-cpu", ctx=64, **asked)
    with LLM(bundle, device="onnx-cpu", ctx=64) as llm:
        text = llm.generate([1, 2, 3] * 5, max_tokens=12, temperature=0.0)
        with pytest.raises(RequestError, match="speculate is 'lookup', and device onnx-cpu keeps no recurrent state"):
            llm.generate([1, 2, 3], speculate="lookup")
    with LLM(bundle, device=CPU, ctx=64, kv="f32") as llm:
        assert llm.generate([1, 2, 3] * 5, max_tokens=12, temperature=0.0) == text
