"""Layers that are read ahead of use: the same bits as with all weights in memory, and faults of the storage."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import BudgetError, BundleError, CancelledError
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.kernels import abi
from edgeinfer.memory_planner import Planner, resolve, to_request
from edgeinfer.memory_planner import stream as stream_plan
from edgeinfer.runner import Cancellation, Segment
from edgeinfer.runtime import Session
from edgeinfer.runtime.weights import readers as readers_module
from edgeinfer.runtime.weights import stream as streaming
from edgeinfer.runtime.weights.direct import File
from tests.helpers.sessions import TINY, config_of, logits_of, session, tokens
from tests.helpers.streamed import Pread, decoded_after_errors, real, resumed_after_cancellations, watched

CONFIG = replace(TINY, hidden_size=128, intermediate_size=320, num_hidden_layers=7, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32)
IDS = tokens(90)
OPTIONS: dict[str, Any] = {"prefill_chunk": 64, "ctx": 256}


@pytest.fixture(scope="module", params=["q4", "int8", "f16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streamed") / request.param
    write_random_bundle(CONFIG, path, request.param, 32)
    return path


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streamed") / "q4"
    write_random_bundle(CONFIG, path, "q4", 32)
    return path


def budget(path: Path, layers: int, **options: Any) -> int:
    """The budget with which so many layers are streamed and no more."""
    with Bundle.open(path) as bundle:
        graph = build_graph(bundle.config, expected_types(bundle.types))
        planner = Planner(graph, bundle.weights_bytes, {name: row.offset for name, row in bundle.tensors.items()})
        request = to_request(resolve(config_of(**{"threads": 1, **OPTIONS, **options}), bundle.config))
        limit = planner.plan(request).total_bytes - 1
        while plan := stream_plan(planner, request, limit):
            if len(plan.parts) == layers:
                return plan.total_bytes
            limit = plan.total_bytes - 1
    raise AssertionError(f"no budget streams {layers} layers")


def streamed(path: Path, layers: int = 7, **options: Any) -> Any:
    options = {**OPTIONS, **options}
    return session(path, budget_bytes=budget(path, layers, **options), **options)


def resident(path: Path, **options: Any) -> np.ndarray:
    with session(path, **{**OPTIONS, **options}) as opened:
        assert opened.executor.stream is None
        return logits_of(opened, IDS, 6)


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("layers", [3, 4, 7])
def test_streaming_changes_no_bit(model: Path, layers: int, threads: int) -> None:
    want = resident(model, threads=threads)
    with streamed(model, layers, threads=threads) as opened:
        assert len(opened.plan.parts) == layers and "weights" not in [r.name for r in opened.plan.regions]
        for _ in range(2):
            assert (watched(lambda: logits_of(opened, IDS, 6)) == want).all()
        stream = opened.executor.stream
        run_pass = stream.bytes_per_pass * stream.passes
        # what is ahead of the next pass included
        assert run_pass <= stream.bytes_read <= run_pass + stream.bytes_per_pass


def test_neurons_are_streamed_too(tmp_path: Path) -> None:
    write_random_bundle(CONFIG, tmp_path / "m", "q4", 32, ffn_layout="neuron")
    want = resident(tmp_path / "m")
    with streamed(tmp_path / "m", 5) as opened:
        assert (logits_of(opened, IDS, 6) == want).all()


def test_passes_of_ranges_and_without_outputs(q4: Path) -> None:
    """Readers are set to where a range begins; a prompt without outputs skips instructions of the last layer."""
    want = resident(q4)
    with streamed(q4, 7, threads=2) as opened:
        n, sequence = len(opened.program.instructions), opened.new_sequence()
        opened.reserve(sequence, 40)
        for first, stop in ((0, n // 2), (0, n // 3), (n // 3, n)):
            opened.forward_range(Segment(sequence, IDS[:40]), first, stop)
        opened.append(sequence, IDS[:40])
        opened.forward([Segment(sequence, IDS[40:84])])
        got = [opened.decode([sequence], [token])[0].copy() for token in IDS[84:]]
    assert (np.stack(got) == want[1:]).all()


def test_two_programs_on_one_pool(q4: Path) -> None:
    """Readers of one go on while the other has its turn."""
    want = resident(q4, threads=2)
    config = RuntimeConfig(threads=2, budget_bytes=budget(q4, 5, threads=2), **OPTIONS)
    with streamed(q4, 7, threads=2) as first:
        second = Session(Bundle.open(q4), config, host=first)
        rows: list[list[np.ndarray]] = [[], []]
        pairs = [(opened, opened.new_sequence()) for opened in (first, second)]
        for ids in (IDS[:50], IDS[50:84], *([token] for token in IDS[84:])):
            for (opened, sequence), row in zip(pairs, rows, strict=True):
                row.append(watched(lambda o=opened, s=sequence, i=ids: o.prefill(s, i).copy()))
        second.close()
    for row in rows:
        assert (np.stack(row[1:]) == want).all()


def test_instructions_are_compared_with_their_references(q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session(q4, **OPTIONS) as opened:
        want = logits_of(opened, IDS[:6])
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with streamed(q4, 3) as opened:
        assert (watched(lambda: logits_of(opened, IDS[:6])) == want).all()


def test_what_is_read_is_each_weight_and_nothing_else(model: Path) -> None:
    with streamed(model, 7) as opened:
        plan, region = opened.plan, opened.executor.regions["streamed"]
        offsets = {name: row.offset for name, row in opened.bundle.tensors.items()}
        rows = streaming.pieces(plan, region.ctypes.data, offsets)
        assert not (rows[:, 0] % 4096).any() and not (rows[:, 1] % 4096).any() and not (rows[:, 3] % 4096).any()
        assert (rows[:, 3] >= region.ctypes.data).all()
        assert (rows[:, 3] + rows[:, 1] <= region.ctypes.data + region.nbytes).all()
        assert [offset % 4096 for offset in offsets.values()] != [0] * len(offsets)  # the hard case is among them
    for part, names in enumerate(plan.parts):
        own = rows[rows[:, 4] == part]
        spans = sorted((int(row[3]), int(row[3] + row[1])) for row in own)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert len(own) == len(names)


# -- faults: a clear error or a slower run, never wrong tokens, never a hang ------------------------------------------


def test_a_slow_disk_makes_a_slow_run(q4: Path, host: Callable[[Pread], None]) -> None:
    def slow(*call: int) -> int:
        time.sleep(1e-3)
        return real(*call)

    want = resident(q4)
    host(slow)
    with streamed(q4, 7) as opened:
        for _ in range(50):  # the reads of a pass that itself waits for a core are there when it wants them
            assert (watched(lambda: logits_of(opened, IDS, 6)) == want).all()
            if opened.executor.waited_ns > 8 * 7 * 1e6:
                break
        assert opened.executor.waited_ns > 8 * 7 * 1e6


def test_a_read_that_is_cut_short_is_repeated(q4: Path, host: Callable[[Pread], None]) -> None:
    calls: list[int] = []

    def torn(file: int, to: int, length: int, offset: int) -> int:
        """Nothing, then half of it, then all."""
        calls.append(offset)
        got = real(file, to, length, offset)
        return (-1, got // 8192 * 4096, got)[(calls.count(offset) - 1) % 3]

    want = resident(q4)
    host(torn)
    with streamed(q4, 7) as opened:
        assert (watched(lambda: logits_of(opened, IDS, 6)) == want).all()


def test_an_error_ends_the_pass_and_the_next_one_is_right(q4: Path, host: Callable[[Pread], None]) -> None:
    bad: list[bool] = []
    host(lambda *call: -1 if bad else real(*call))
    want = resident(q4)
    with streamed(q4, 7, threads=2) as opened:
        match = r"could not be read at byte .*, and could when it was tried again"
        assert (decoded_after_errors(opened, IDS[:84], IDS[84:], bad, match) == want[1:]).all()


def test_a_file_that_is_cut_in_mid_run(q4: Path, tmp_path: Path) -> None:
    path = shutil.copytree(q4, tmp_path / "m")
    with streamed(path, 7) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, IDS[:84])
        os.truncate(path / "weights.bin", 200_000)
        with pytest.raises(BundleError, match=r"ends at byte 200000.*cut it short|was changed while it was in use"):
            for token in IDS[84:]:
                watched(lambda token=token: opened.decode([sequence], [token]))
        assert len(sequence.tokens) < 90


def test_a_file_that_is_written_to_in_mid_run(q4: Path, tmp_path: Path) -> None:
    path = shutil.copytree(q4, tmp_path / "m")
    with streamed(path, 7) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, IDS[:84])
        with open(path / "weights.bin", "r+b") as file:
            file.seek(100_000)
            file.write(bytes(1000))
        with pytest.raises(BundleError, match="was changed while it was in use; convert or copy the model again"):
            watched(lambda: opened.decode([sequence], IDS[84:85]))


@pytest.mark.parametrize("other", [False, True])
def test_a_file_whose_name_goes_to_another_is_read_to_the_end(q4: Path, tmp_path: Path, other: bool) -> None:
    path, want = shutil.copytree(q4, tmp_path / "m"), resident(q4)
    with streamed(path, 7) as opened:
        (path / "weights.bin").unlink()
        if other:
            (path / "weights.bin").write_bytes(bytes(1000))
        assert (watched(lambda: logits_of(opened, IDS, 6)) == want).all()


def test_a_file_that_is_replaced_after_its_check(q4: Path, tmp_path: Path) -> None:
    path = shutil.copytree(q4, tmp_path / "m")
    bundle = Bundle.open(path)
    (path / "weights.bin").rename(path / "old")
    shutil.copy(path / "old", path / "weights.bin")
    with pytest.raises(BundleError, match="was changed while it was in use"):
        Session(bundle, RuntimeConfig(threads=1, budget_bytes=budget(q4, 7), **OPTIONS))
    (path / "weights.bin").unlink()
    with pytest.raises(BundleError, match=r"weights.bin cannot be read: No such file"):
        File.open(path / "weights.bin", bundle.weights_state)
    bundle.close()


def test_a_read_that_does_not_return_can_be_cancelled(q4: Path, host: Callable[[Pread], None],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in the wait for data and in the wait for the readers; right once the disk answers; closed meanwhile."""
    answers = threading.Event()

    def stuck(*call: int) -> int:
        answers.wait()
        return real(*call)

    host(stuck)
    want = resident(q4)
    monkeypatch.setattr(readers_module, "END_SECONDS", 0.05)
    with streamed(q4, 7, threads=2) as opened:
        answers.set()
        sequence = opened.new_sequence()
        assert (resumed_after_cancellations(opened, sequence, IDS, 84, answers) == want[1:]).all()
        answers.clear()
        opened.executor.stream._words[abi.STREAM_STATE >> 3] = abi.STREAM_PAUSES  # the next forward pass starts over
        cancel = Cancellation()
        threading.Timer(0.1, cancel.cancel).start()
        with pytest.raises(CancelledError):
            watched(lambda: opened.forward([Segment(sequence, [1], [0])], cancel))
        watched(opened.close)
        assert readers_module._stuck
    answers.set()


def test_direct_io_that_is_refused(q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *more, **named: opens(path, flags, *more, **named)
                        if not flags & os.O_DIRECT else _refuse())
    want = resident(q4)
    with streamed(q4, 7) as opened:
        stream = opened.executor.stream
        assert not stream.file.direct and stream._words[abi.STREAM_DROP >> 3]
        assert (watched(lambda: logits_of(opened, IDS, 6)) == want).all()


def _refuse() -> int:
    raise OSError(22, os.strerror(22))


def test_a_budget_that_not_even_the_fixed_part_fits(q4: Path) -> None:
    limit = budget(q4, 7) - 1
    with pytest.raises(BudgetError, match="The run needs") as caught, session(q4, budget_bytes=limit, **OPTIONS):
        pass
    offer = caught.value.alternatives[-1]
    assert str(offer) == \
        f"--ctx {offer.options['ctx']} and 7 layers streamed from storage, which run does automatically"
    with session(q4, budget_bytes=limit, **{**OPTIONS, "ctx": offer.options["ctx"]}) as opened:
        assert opened.plan.total_bytes == offer.total_bytes and len(opened.plan.parts) == 7
    with pytest.raises(BudgetError, match="so no model fits; raise --budget"), \
            session(q4, budget_bytes=limit - 5_000_000, **OPTIONS):
        pass


def test_readers_end_with_their_model(q4: Path) -> None:
    def readers() -> int:
        return sum(thread.name.startswith("edgeinfer-reader") for thread in threading.enumerate())

    before = readers()
    with streamed(q4, 7) as opened:
        logits_of(opened, IDS, 1)
        assert readers() == before + streaming.READERS
        handle = opened.executor.stream.file.handle
    assert readers() == before
    with pytest.raises(OSError):
        os.fstat(handle)


@pytest.mark.parametrize("layers", [3, 7])
def test_a_pruned_prompt_goes_through_streamed_layers(q4: Path, layers: int) -> None:
    """Stage by stage, each of which begins in the middle of a round of reads."""
    ids, found = tokens(150), []
    for limit in (None, budget(q4, layers, lazy="keep=0.5,0.25")):
        with session(q4, **OPTIONS, lazy="keep=0.5,0.25", budget_bytes=limit) as opened:
            assert len(opened.plan.parts) == (layers if limit else 0)
            sequence = opened.new_sequence()
            rows = [opened.prefill(sequence, ids).tobytes()]
            rows += [opened.decode([sequence], [token]).tobytes() for token in tokens(3, seed=1)]
            assert opened.prefill_strategy.last.tokens == (150, 75, 38)
            found.append(rows)
    assert found[0] == found[1]
