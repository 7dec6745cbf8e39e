"""A little of each fault that `python -m tests.faults` does a hundred times."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer import LLM, EdgeInferError
from edgeinfer.converters import convert
from tests.checkpoints import make_checkpoint
from tests.faults import KINDS, failing_disk


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("conversions", 3), ("first-runs", 3), ("saves", 3), ("full-disk", 1)])
def test_nothing_is_lost_or_half_written(kind: str, count: int, tmp_path: Path) -> None:
    assert KINDS[kind](tmp_path, count, 1)


@pytest.mark.slow
def test_each_read_of_a_checkpoint_and_a_bundle_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails (EIO) is one sentence, whichever read it is."""
    source, bundle = make_checkpoint(tmp_path / "model"), tmp_path / "bundle"

    def converted() -> None:
        convert(source, bundle, overwrite=True)

    for action in (converted, lambda: LLM(bundle, ctx=64, threads=1).close()):
        action()
        with monkeypatch.context() as patched:
            disk = failing_disk(patched, 10**9)
            action()
        assert disk.reads > 5
        for after in range(disk.reads):
            with monkeypatch.context() as patched, pytest.raises(EdgeInferError, match="Input/output error"):
                failing_disk(patched, after)
                action()
    action()
