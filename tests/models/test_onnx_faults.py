"""Runs by onnxruntime that lack memory, lowered models that are another version's, and its telemetry."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.backends.onnx import stored
from edgeinfer.errors import EdgeInferError, UsageError
from tests.helpers.command_line import PYTHON, environment
from tests.helpers.sessions import tokens, write_model
from tests.models.test_onnx_runner import runner

onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
REMEDY = "Lower --ctx or --samples, end programs that hold memory there, or run with --device cpu."


@pytest.mark.parametrize("error", [
    MemoryError("std::bad_alloc"), RuntimeError("CUDA failure 2: out of memory ; GPU=0"),
    RuntimeError("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED"),
    RuntimeError("Failed to allocate memory for requested buffer of size 1073741824")], ids=str)
def test_no_memory_while_a_model_is_opened_and_while_it_runs(error: Exception, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what needs less of it; a sequence is as before, and its slot is free."""
    import onnxruntime

    path = write_model(tmp_path)

    def fail(*given: Any, **more: Any) -> None:
        raise error

    with runner(path) as opened:
        sequence, ids = opened.new_sequence(), tokens(5)
        opened.sessions.model.run_with_iobinding = fail
        with pytest.raises(EdgeInferError) as caught:
            opened.prefill(sequence, ids)
        assert str(caught.value) == (f"onnxruntime failed on CPUExecutionProvider, which ends the request: {error} "
                                     f"{REMEDY}")
        del opened.sessions.model.run_with_iobinding
        assert not sequence.tokens and opened.kv.pool.n_free == 1
        opened.prefill(sequence, ids)
    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(UsageError) as refused, runner(path):
        pass
    assert str(refused.value) == f"onnxruntime cannot open the model on CPUExecutionProvider: {error} {REMEDY}"


def test_a_lowered_model_of_another_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version finds its own; what onnxruntime does not know is one sentence."""
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    path, folders = write_model(tmp_path), tmp_path / "cache" / "onnx"
    with monkeypatch.context() as patch:
        patch.setattr(stored, "lowering_sources", lambda: "another version")
        with runner(path):
            pass
    (other,) = folders.iterdir()
    for file in other.iterdir():
        if file.suffix == ".onnx":
            file.write_bytes(b"of another version")
    before = {file.name: file.read_bytes() for file in other.iterdir()}
    with runner(path) as opened:
        opened.prefill(opened.new_sequence(), tokens(5))
    assert {file.name: file.read_bytes() for file in other.iterdir()} == before
    (own,) = set(folders.iterdir()) - {other}
    model = onnx.load_model(str(own / stored.MODEL), load_external_data=False)
    model.opset_import[0].version = 99
    (own / stored.MODEL).write_bytes(model.SerializeToString())
    (own / stored.DONE).write_text(stored._states(own), encoding="utf-8")
    with pytest.raises(UsageError, match=r"^onnxruntime cannot open the model on CPUExecutionProvider: .*") as caught, \
            runner(path):
        pass
    assert "If other models open, remove " in str(caught.value)
    assert str(caught.value).endswith(f"{own.name}, and this one is lowered again.")
    assert "\n" not in str(caught.value)
    (own / stored.MODEL).unlink()
    with runner(path) as opened:
        opened.prefill(opened.new_sequence(), tokens(5))


@pytest.mark.slow
def test_onnxruntime_keeps_no_number_of_the_machine(tmp_path: Path) -> None:
    """Its telemetry, which sends events from 1.32 on, writes one below the user's cache as soon as a session opens."""
    variables = environment(XDG_CACHE_HOME=str(tmp_path / "user"), HOME=str(tmp_path))
    variables.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([*PYTHON, "run", "demo", "Once", "-n", "1", "--device", "onnx-cpu"], env=variables, check=True,
                   capture_output=True)
    assert not [path for path in tmp_path.rglob("*") if "Microsoft" in path.name]
