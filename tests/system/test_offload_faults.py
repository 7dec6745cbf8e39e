"""Cold neurons and a storage that fails: a clear error or a slower run, never wrong tokens, never a hang."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import COLD_FILE, Bundle, read_cold
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import BundleError, CancelledError
from edgeinfer.kernels import abi, reference
from edgeinfer.runner import Cancellation, Segment
from edgeinfer.runtime import Session
from edgeinfer.runtime.weights import readers as readers_module
from tests.helpers.offloaded import COLD, IDS, MIXED, OPTIONS, made, offloaded, placed, resident
from tests.helpers.sessions import logits_of
from tests.helpers.streamed import Pread, decoded_after_errors, real, resumed_after_cancellations, watched


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("cold") / "m")


def copied(q4: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(q4, tmp_path / "m"))


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 4]))


def test_a_file_that_is_missing_or_short(q4: Path, tmp_path: Path) -> None:
    path = copied(q4, tmp_path)
    os.truncate(path / COLD_FILE, 100_000)
    with pytest.raises(BundleError, match=r"cold\.bin"):
        Bundle.open(path)
    (path / COLD_FILE).unlink()
    with pytest.raises(BundleError, match=r"its file cold\.bin is missing"):
        Bundle.open(path)


def test_a_bit_that_flips(q4: Path, tmp_path: Path) -> None:
    path = copied(q4, tmp_path)
    with Bundle.open(path) as bundle:
        cold = read_cold(bundle)
    assert cold
    flip(path / COLD_FILE, cold.offsets[2] + 5 * cold.nbytes + 17)
    with Bundle.open(path) as bundle:
        with pytest.raises(BundleError, match=r"cold\.bin: neurons 40 to 47 of layer 2 are damaged: their checksum"):
            bundle.verify()
        bundle.check_contents()  # whoever reads no cold neurons can go on
    with pytest.raises(BundleError, match=r"file 'cold\.bin' is damaged"), offloaded(path):
        pass


def test_a_bit_that_flips_on_the_way(q4: Path, host: Callable[[Pread], None],
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reads that are not what was written the debug mode alone knows."""
    def flipping(file: int, to: int, length: int, offset: int) -> int:
        got = real(file, to, length, offset)
        reference.view.memory(to, np.uint8, (1,))[0] ^= 1
        return got

    host(flipping)
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with offloaded(q4, COLD) as opened, pytest.raises(BundleError, match=r"neurons \d+ to \d+ of layer 0 are damaged"):
        watched(lambda: opened.prefill(opened.new_sequence(), IDS[:3]))


def test_a_slow_disk_makes_a_slow_run(q4: Path, host: Callable[[Pread], None]) -> None:
    def slow(*call: int) -> int:
        time.sleep(1e-3)
        return real(*call)

    want = resident(q4)
    host(slow)
    with offloaded(q4, COLD, 0) as opened:
        for _ in range(50):  # the reads of a pass that itself waits for a core are there when it wants them
            before = opened.executor.waited_ns
            assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all()
            if (waited := opened.executor.waited_ns - before) > 20e6:  # 13 passes over 4 layers, each at least 1 ms
                break
        assert waited > 20e6


def test_a_read_that_is_cut_short_is_repeated(q4: Path, host: Callable[[Pread], None]) -> None:
    calls: list[tuple[int, ...]] = []

    def torn(file: int, to: int, length: int, offset: int) -> int:
        """Nothing, then half of it, then all."""
        calls.append((to, offset))
        got = real(file, to, length, offset)
        return (-1, got // 8192 * 4096, got)[(calls.count((to, offset)) - 1) % 3]

    want = resident(q4)
    host(torn)
    with offloaded(q4, MIXED) as opened:
        assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all()


def test_an_error_ends_the_pass_and_the_next_one_is_right(q4: Path,
                                                          host: Callable[[Pread], None]) -> None:
    bad: list[bool] = []
    host(lambda *call: -1 if bad else real(*call))
    want = resident(q4)
    with offloaded(q4, MIXED, 0, threads=2) as opened:
        match = r"cold.bin could not be read at byte .*, and could when"
        assert (decoded_after_errors(opened, IDS[:58], IDS[58:], bad, match) == want[1:]).all()


def test_a_file_that_is_cut_or_written_to_in_mid_run(q4: Path, tmp_path: Path) -> None:
    path = copied(q4, tmp_path)
    with offloaded(path, COLD, 0) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, IDS[:58])
        flip(path / COLD_FILE, 50_000)
        with pytest.raises(BundleError, match="was changed while it was in use; convert or copy the model again"):
            watched(lambda: opened.decode([sequence], IDS[58:59]))
        os.truncate(path / COLD_FILE, 90_000)
        with pytest.raises(BundleError, match=r"ends at byte 90000.*cut it short|was changed while it was in use"):
            for token in IDS[58:]:
                watched(lambda token=token: opened.decode([sequence], [token]))
        assert len(sequence.tokens) == 58


@pytest.mark.parametrize("another", [False, True])
def test_a_file_whose_name_goes_to_another_is_read_to_the_end(q4: Path, tmp_path: Path, another: bool) -> None:
    path, want = copied(q4, tmp_path), resident(q4)
    with offloaded(path, COLD, 0) as opened:
        (path / COLD_FILE).unlink()
        if another:
            (path / COLD_FILE).write_bytes(bytes(1000))
        assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all()


def test_a_file_that_is_replaced_after_its_check(q4: Path, tmp_path: Path) -> None:
    path = copied(q4, tmp_path)
    bundle = Bundle.open(path)
    (path / COLD_FILE).rename(path / "old")
    shutil.copy(path / "old", path / COLD_FILE)
    with pytest.raises(BundleError, match="was changed while it was in use"):
        Session(bundle, RuntimeConfig(threads=1, budget_bytes=1, **OPTIONS), placer=placed(MIXED))
    bundle.close()


def test_a_read_that_does_not_return_can_be_cancelled(q4: Path, host: Callable[[Pread], None],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in the wait for neurons, and in the wait for what a cancelled pass has left; closed meanwhile."""
    answers = threading.Event()

    def stuck(*call: int) -> int:
        answers.wait()
        return real(*call)

    host(stuck)
    want = resident(q4)
    monkeypatch.setattr(readers_module, "END_SECONDS", 0.05)
    with offloaded(q4, MIXED, 0, threads=2) as opened:
        answers.set()
        sequence = opened.new_sequence()
        assert (resumed_after_cancellations(opened, sequence, IDS, 58, answers) == want[1:]).all()
        answers.clear()
        cancel = Cancellation()
        threading.Timer(0.1, cancel.cancel).start()
        with pytest.raises(CancelledError):
            watched(lambda: opened.forward([Segment(sequence, IDS[:30], [0])], cancel))
        watched(opened.close)
        assert readers_module._stuck
    answers.set()


def test_a_prompt_whose_reads_fail_or_do_not_return(q4: Path, host: Callable[[Pread], None]) -> None:
    """Reads that were asked for before the attention; cancelled also where the instruction that wants them did not
    run.
    """
    answers, bad = threading.Event(), [True]

    def stuck(*call: int) -> int:
        answers.wait()
        return -1 if bad else real(*call)

    host(stuck)
    want = resident(q4)
    with offloaded(q4, MIXED, 0, threads=2) as opened:
        answers.set()
        sequence = opened.new_sequence()
        for _ in range(2):
            with pytest.raises(BundleError, match=r"cold.bin could not be read at byte .*, and could when"):
                watched(lambda: opened.prefill(sequence, IDS[:30]))
        bad.clear()
        opened.reserve(sequence, 30)
        early = next(i for i, instruction in enumerate(opened.program.instructions)
                     if instruction.label.startswith("ask for"))
        answers.clear()
        watched(lambda: opened.forward_range(Segment(sequence, IDS[:30]), 0, early + 1))
        for _ in range(2):
            cancel = Cancellation()
            threading.Timer(0.1, cancel.cancel).start()
            with pytest.raises(CancelledError):
                watched(lambda c=cancel: opened.forward([Segment(sequence, IDS[:30], [0])], c))
        answers.set()
        opened.release(sequence)
        assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all()


def test_a_pass_that_goes_on_behind_a_read_that_failed_ends(q4: Path, host: Callable[[Pread], None]) -> None:
    """A range of instructions asked for data that another one computes with; they did not come before the second
    began.
    """
    bad = [True]
    host(lambda *call: -1 if bad else real(*call))
    want = resident(q4)
    with offloaded(q4, MIXED, 0) as opened:
        instructions, sequence = opened.program.instructions, opened.new_sequence()
        found = next(i for i, instruction in enumerate(instructions)
                     if instruction.kernel == "neuron_resolve" and not instruction.label.startswith("ask for"))
        opened.reserve(sequence, 30)
        segment = Segment(sequence, IDS[:30], [0])
        watched(lambda: opened.forward_range(segment, 0, found + 1))
        while not opened.executor.stream._words[abi.STREAM_FAILED >> 3]:
            time.sleep(0.001)
        bad.clear()
        with pytest.raises(BundleError, match=r"cold.bin could not be read at byte .*, and could when"):
            watched(lambda: opened.forward_range(segment, found + 1, len(instructions)))
        opened.release(sequence)
        assert (watched(lambda: logits_of(opened, IDS, 12)) == want).all()
