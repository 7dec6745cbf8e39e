"""Calibrated conversions that were killed: rounded weights are taken from them, and the bundle is the same."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.converters import BitBudget, Calibration, ConversionReport, bit_budget, convert, packing, unfinished
from edgeinfer.converters.unfinished import PARTIAL, PREFIX
from edgeinfer.quant import InputStatistics
from tests.helpers.checkpoints import make_checkpoint

KILLED = """
import os, signal, sys
from edgeinfer.converters import packing
from tests.models.test_conversion_resumed import converted
rounded, left = packing.rounded, [3]
def counting(*given):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from rounded(*given)
packing.rounded = counting
from pathlib import Path
converted(Path(sys.argv[1]), "made")
"""


def converted(folder: Path, name: str, **options: Any) -> ConversionReport:
    """Convert the checkpoint of a folder by statistics that a directory beside it keeps."""
    (folder / "kept").mkdir(exist_ok=True)

    def of(weight: Any) -> list[InputStatistics]:
        x = np.random.default_rng(0).standard_normal((200, weight.shape[-1])).astype(np.float32)
        return [InputStatistics(200, np.square(x).mean(axis=0), None, x.T @ x / 200)]

    calibration = Calibration("gptq", "a text", "", 200, of, scale=False, folder=folder / "kept")
    return convert(folder / "hf", folder / name, overwrite=True, calibration=lambda _: calibration, **options)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The matrices that are rounded."""
    found, rounded = list[str](), packing.rounded

    def noting(read: Any, weight: Any, *more: Any) -> Any:
        found.append(weight.name)
        return rounded(read, weight, *more)

    monkeypatch.setattr(packing, "rounded", noting)
    return found


def weights_of(path: Path) -> bytes:
    return (path / "weights.bin").read_bytes()


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "kept").glob(f"{PREFIX}*") if path.suffix != PARTIAL)


@pytest.mark.slow
def test_a_conversion_that_was_killed_continues_with_the_next_weight(tmp_path: Path, names: list[str]) -> None:
    make_checkpoint(tmp_path / "hf")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "made").exists()
    assert len(copies(tmp_path)) == 2
    report = converted(tmp_path, "made")
    continued = names.copy()
    assert report.remarks[0] == "Matrices that an interrupted conversion had rounded: 2."
    assert not [*(tmp_path / "kept").iterdir()] and not [*tmp_path.glob(".*")]
    names.clear()
    whole = converted(tmp_path, "whole")
    assert not whole.remarks and continued == names[2:] and len(continued) > 4
    assert weights_of(tmp_path / "made") == weights_of(tmp_path / "whole") and report.tensors == whole.tensors


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, after: int = 2, **options: Any) -> None:
    """Interrupt a conversion when this many matrices were rounded."""
    left, rounded = [after], packing.rounded

    def counting(*given: Any) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        yield from rounded(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing, "rounded", counting)
        converted(folder, "made", **options)
    assert not (folder / "made").exists()


@pytest.mark.parametrize("damage, taken", [
    (lambda path: path.write_bytes(b""), 1), (lambda path: path.write_bytes(path.read_bytes()[:-1]), 1),
    (lambda path: path.write_bytes(bytes(4) + path.read_bytes()[4:]), 1),
    (lambda path: path.with_suffix(PARTIAL).write_bytes(b"of a killed conversion"), 2),
], ids=["empty", "cut", "changed", "another in the making"])
def test_damaged_copies_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      damage: Callable[[Path], object], taken: int) -> None:
    make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    interrupted(tmp_path, monkeypatch)
    damage(copies(tmp_path)[0])
    made = converted(tmp_path, "made")
    assert made.remarks == (f"Matrices that an interrupted conversion had rounded: {taken}.",)
    converted(tmp_path, "whole")
    assert weights_of(tmp_path / "made") == weights_of(tmp_path / "whole") and not [*(tmp_path / "kept").iterdir()]


def test_copies_of_other_types_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    interrupted(tmp_path, monkeypatch)
    made = converted(tmp_path, "made", weights="q5", embedding="q4")
    assert not made.remarks and not copies(tmp_path)
    assert made.tensors == converted(tmp_path, "whole", weights="q5", embedding="q4").tensors
    assert weights_of(tmp_path / "made") == weights_of(tmp_path / "whole")


def test_costs_of_types_are_not_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    whole = converted(tmp_path, "whole", chooser=BitBudget(bits=5.5))
    interrupted(tmp_path, monkeypatch, chooser=BitBudget(bits=5.5))
    with monkeypatch.context() as patch:
        patch.setattr(bit_budget, "_measured", None)
        made = converted(tmp_path, "made", chooser=BitBudget(bits=5.5))
    assert made.chosen == whole.chosen and weights_of(tmp_path / "made") == weights_of(tmp_path / "whole")
    assert made.remarks and not [*(tmp_path / "kept").iterdir()]


def test_a_disk_without_room_for_copies_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    monkeypatch.setattr(unfinished, "ROOM", 1 << 60)
    interrupted(tmp_path, monkeypatch)
    assert not copies(tmp_path)


def test_a_copy_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    plain = converted(tmp_path, "plain")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(unfinished.os, "replace", full)
    assert converted(tmp_path, "made").tensors == plain.tensors and not copies(tmp_path)
