"""A little of each fault that `python -m tests.faults` does a hundred times."""

from __future__ import annotations

import errno
import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends.onnx.export import export
from edgeinfer.backends.onnx.weights import Reader
from edgeinfer.bundle import Bundle
from edgeinfer.bundle.checksums import SETTLED_NS
from edgeinfer.converters import convert
from edgeinfer.errors import BundleError, EdgeInferError
from edgeinfer.llm.api import LLM
from edgeinfer.models.describe import describe
from edgeinfer.runtime.memory import copy_in
from tests.faults import KINDS, failing_disk
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.sessions import write_model


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("conversions", 3), ("first-runs", 3), ("saves", 3), ("full-disk", 1)])
def test_nothing_is_lost_or_half_written(kind: str, count: int, tmp_path: Path) -> None:
    assert KINDS[kind](tmp_path, count, 1)


def test_weights_that_were_compared_and_cannot_be_read_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the file that failed, and not the one that is written."""
    bundle = write_model(tmp_path, weights="q4")
    with monkeypatch.context() as patched, Bundle.open(bundle) as opened:
        failing_disk(patched, 0)
        parts, message = [(0, np.zeros(64, np.uint8))], r"weights\.bin can no longer be read: Input/output error; check"
        with pytest.raises(BundleError, match=message):
            copy_in(parts, opened.weights_path)
        with closing(Reader(opened)) as reader, pytest.raises(BundleError, match=message):
            reader("embed", 0, 64)


def test_a_gguf_file_whose_first_bytes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("builtins.open", failing)
    with pytest.raises(EdgeInferError, match=r"Cannot read the GGUF file .*m\.gguf: Input/output error"):
        describe(path)


@pytest.mark.slow
def test_each_read_of_a_checkpoint_and_a_bundle_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails (EIO) is one sentence, whichever read it is."""
    source, bundle = make_checkpoint(tmp_path / "model"), tmp_path / "bundle"

    def converted() -> None:
        convert(source, bundle, overwrite=True)

    def exported() -> None:
        with Bundle.open(bundle) as opened:
            export(opened, tmp_path / "m.onnx", overwrite=True)

    def opened(**how: Any) -> None:
        LLM(bundle, ctx=64, threads=1, **how).close()

    for action in (converted, opened, partial(opened, mmap=False), exported):
        action()
        time.sleep(2 * SETTLED_NS / 1e9)  # a file that passed its check is remembered once it is no longer new
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
