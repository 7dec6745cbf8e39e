"""The check of a GPU on onnxruntime's CPU provider, whole and with one thing broken after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import PROVIDERS, Provider
from edgeinfer.backends.onnx import devices
from edgeinfer.bundle import Bundle
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.runner.block_tables import BlockTables
from tests.helpers.onnx_pages import PAGE, PAGED, PagedProvider, ReferenceSession, at
from tests.helpers.onnx_pages import Binding as PageBinding
from tests.helpers.sessions import write_model

pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
gpu_check = pytest.importorskip("benchmarks.gpu_check")
genai = pytest.importorskip("benchmarks.gpu.peers").genai
QUICK = pytest.importorskip("benchmarks.gpu.sizes").QUICK
DEMO = ["--device", "onnx-cpu", "--models", "demo", "--quick", "--minutes", "60"]


def rows_of(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_recurrent_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid has so many layers that attention is among them; whatever a state forbids is not asked for."""
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    out = tmp_path / "rows"
    assert gpu_check.main(["--device", "onnx-cpu", "--models", "lfm2-350m:small", "--stage", "smoke", "numerics",
                           "--minutes", "60", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert {row["verdict"] for row in rows if row["wanted"]} == {"ok"} and len(rows) > 12
    with Bundle.open(next((tmp_path / "bundles").glob("small-lfm2-350m*"))) as bundle:
        assert bundle.config.num_hidden_layers == 3 and bundle.config.recurrent.layers == (0, 1)  # type: ignore


@pytest.mark.slow
def test_all_stages(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    assert gpu_check.main([*DEMO, "--out", str(out), "--profile", "NVIDIA H200"]) == 0
    rows = rows_of(out)
    assert {row["verdict"] for row in rows if row["wanted"]} == {"ok"}
    whats = " | ".join(row["what"] for row in rows)
    for part in ("f16 logits", "greedy tokens", "second chunk", "unlike lengths", "where another was", "top-k 40",
                 "request that is cancelled", "pass that is cancelled", "2 sequences at depth 32", "prompt of 64",
                 "4 tokens of each", "estimate of 1 sequence at depth 32", "2 arriving", "growth in 1 s"):
        assert part in whats
    assert " of the bandwidth" in next(row["found"] for row in rows if "1 sequences at depth 32" in row["what"])


def test_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    assert gpu_check.main(["--out", str(out)]) == 0
    assert [row["what"] for row in rows_of(out)] == ["smoke", "numerics", "speed", "soak"]
    assert {row["verdict"] for row in rows_of(out)} == {"not run"}
    assert all("which has no CUDA provider" in row["found"] for row in rows_of(out))


def test_out_of_time(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    assert gpu_check.main([*DEMO, "--stage", "smoke", "speed", "--minutes", "0", "--out", str(out)]) == 0
    assert {row["found"] for row in rows_of(out)} == {"out of time"}


def test_prepared_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    assert gpu_check.main(["--prepare", "--stage", "smoke", "--models", "demo", "no-such-model"]) == 0
    assert len(list((tmp_path / "gpu-check").glob("demo-*.npz"))) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("smoke: demo: ") and said[1].startswith("smoke: no-such-model: ")


def test_a_case_that_fails_stops_no_other() -> None:
    """A case that does not fit was not run; whatever else is raised is a row."""
    check = gpu_check.Check(PROVIDERS["onnx-cpu"], 60)

    def fail(error: Exception) -> None:
        raise error

    check.case("large", lambda: fail(BudgetError("The run needs more.")))
    check.case("broken", lambda: fail(RuntimeError("CUDA failure 2:\nout of memory")))
    check.case("whole", lambda: check.add("whole", "ran"))
    assert [(row.found, row.verdict) for row in check.rows] == [
        ("The run needs more.", "not run"), ("RuntimeError: CUDA failure 2: out of memory", "missed"), ("ran", "")]


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
@pytest.mark.parametrize(("script", "found", "verdict"), [
    ("""echo '{"sequences": 2, "prompt_s": 0.5, "step_s": 0.01, "version": "0.18.0"}'""",
     "200 tokens/s, 10.00 ms; prompts 64 tokens/s", ""),
    ("echo 'Traceback' >&2; echo 'ModuleNotFoundError: No module' >&2; exit 1", "ModuleNotFoundError: No module",
     "not run"),
])
def test_genai_beside_it(script: str, found: str, verdict: str, tmp_path: Path) -> None:
    """It gets a folder that it can open, in a process of its own interpreter."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ -f \"$2/genai_config.json\" ] && [ \"$3\" = cpu ] || exit 2\n{script}\n")
    python.chmod(0o755)
    check = gpu_check.Check(PROVIDERS["onnx-cpu"], 60)
    genai(check, "demo", str(python), QUICK)
    assert [(row.found, row.verdict) for row in check.rows] == [(found, verdict)]
    genai(check, "demo", str(tmp_path / "none"), QUICK)
    assert "No such file" in check.rows[-1].found and check.rows[-1].verdict == "not run"


# -- one thing broken --------------------------------------------------------------------------------------------------


class Binding:
    """An IOBinding that remembers where outputs go."""

    def __init__(self, binding: Any):
        self.binding, self.outputs = binding, dict[str, np.ndarray]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_output(self, name: str, memory: str, device: int, kind: Any, shape: list[int], address: int) -> None:
        self.outputs[name] = at(address, kind, shape)
        self.binding.bind_output(name, memory, device, kind, shape, address)

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.outputs[name] = at(value.data_ptr(), value.numpy().dtype, value.shape())
        self.binding.bind_ortvalue_output(name, value)


class Session:
    """A session in whose runs something goes wrong."""

    def __init__(self, session: Any, run: Callable[[Any, Binding, Any], None]):
        self._session, self._run = session, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def io_binding(self) -> Binding:
        return Binding(self._session.io_binding())

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        self._run(self._session, binding, options)


class Broken(Provider):
    """The CPU provider, with sessions in whose runs something goes wrong."""

    run: Any = None

    def open(self, model: str, threads: int) -> Any:
        session = super().open(model, threads)
        return Session(session, self.run) if "logits" in [one.name for one in session.get_outputs()] else session


def nan(session: Any, binding: Binding, options: Any) -> None:
    session.run_with_iobinding(binding.binding, options)
    binding.outputs["logits"].fill(np.nan)


def swapped(session: Any, binding: Binding, options: Any) -> None:
    session.run_with_iobinding(binding.binding, options)
    for name in ("logits", "top_logits", "top_ids"):
        if len(binding.outputs.get(name, ())) > 1:
            binding.outputs[name][:] = binding.outputs[name][::-1].copy()


def stale(session: Any, binding: Binding, options: Any) -> None:
    kept = {name: values.copy() for name, values in binding.outputs.items() if name.startswith("present")}
    session.run_with_iobinding(binding.binding, options)
    for name, values in kept.items():
        binding.outputs[name][...] = values


def wrong_best(session: Any, binding: Binding, options: Any) -> None:
    session.run_with_iobinding(binding.binding, options)
    if "top_ids" in binding.outputs:
        binding.outputs["top_ids"] += 1


def not_ended(session: Any, binding: Binding, options: Any) -> None:
    session.run_with_iobinding(binding.binding, onnxruntime.RunOptions())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("run", "where"), [
    (nan, "f16 logits"), (swapped, "unlike lengths"), (stale, "second chunk"), (wrong_best, "from the best logits"),
    (not_ended, "pass that is cancelled"),
])
def test_what_smoke_finds(run: Any, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check.prepare(["smoke"], ["demo"])  # answers of a provider that works
    broken = Broken(*PROVIDERS["onnx-cpu"])
    monkeypatch.setattr(Broken, "run", staticmethod(run))
    monkeypatch.setitem(PROVIDERS, "onnx-cpu", broken)
    out = tmp_path / "rows"
    assert gpu_check.main([*DEMO, "--stage", "smoke", "--out", str(out)]) == 1
    assert any(where in row["what"] for row in rows_of(out) if row["verdict"] == "missed")


def test_what_smoke_says_of_wrong_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check.prepare(["smoke"], ["demo"])
    monkeypatch.setattr(devices, "check_placement", refuse)
    out = tmp_path / "rows"
    assert gpu_check.main([*DEMO, "--stage", "smoke", "--out", str(out)]) == 1
    assert "UsageError: 1 operations" in next(row["found"] for row in rows_of(out) if row["verdict"] == "missed")


def refuse(session: Any, provider: Provider) -> None:
    raise UsageError("1 operations of the model would not run on it.")


# -- one thing broken in pages -----------------------------------------------------------------------------------------

Inputs = dict[str, np.ndarray]


class PageSession(ReferenceSession):
    """Attention over pages that reads or writes them wrongly, as kernels would: without the checks of the stand-in."""

    read: Callable[[Inputs], None]
    """Changes the inputs of a run."""
    written: Callable[[Inputs, Inputs], None]
    """Changes the pages after it; called with its inputs and them."""

    def _check(self, given: Inputs) -> None:
        self.read(given)

    def run_with_iobinding(self, binding: PageBinding, options: Any) -> None:
        super().run_with_iobinding(binding, options)
        self.written(self.calls[-1], {name: read() for name, read in binding.read.items() if "_cache." in name})


class NoCopy(Session):
    """A session that does nothing."""

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        pass


class BrokenPages(PagedProvider):
    """The stand-in for a provider with pages, with something broken."""

    fault: Any = None

    def open(self, model: str, threads: int) -> Any:
        session = super().open(model, threads)
        if isinstance(session, ReferenceSession):
            session.__class__ = PageSession
            read, written = self.fault if isinstance(self.fault, tuple) else (nothing, nothing)
            session.read, session.written = read, written  # type: ignore[attr-defined]
            return session
        copies = "logits" not in [one.name for one in session.get_outputs()]
        return NoCopy(session, nan) if copies and self.fault is NoCopy else session


def nothing(*_: Inputs) -> None:
    pass


def swapped_rows(given: Inputs) -> None:
    given["block_table"] = given["block_table"][::-1].copy()


def one_shorter(given: Inputs) -> None:
    given["past_seqlens"] = given["past_seqlens"] - (given["past_seqlens"] > 0)


def past_the_end(given: Inputs, pages: Inputs) -> None:
    """A row too many after one that fills its page."""
    ends = given["past_seqlens"] + np.diff(given["cumulative_sequence_length"])
    for end, table in zip(ends, given["block_table"], strict=True):
        page = table[(end - 1) // PAGE]
        if end % PAGE == 0:
            for values in pages.values():
                values[(page + 1) % len(values), 0] = values[page, -1]


def smoke_in_pages(fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Exit code, and what was missed, of smoke over pages and slots."""
    model = str(write_model(tmp_path / "model"))
    gpu_check.prepare(["smoke"], [model])
    monkeypatch.setattr(BrokenPages, "fault", fault)
    monkeypatch.setitem(PROVIDERS, "onnx-cpu", BrokenPages(*PAGED))
    out = tmp_path / "rows"
    code = gpu_check.main(["--device", "onnx-cpu", "--models", model, "--minutes", "60", "--stage", "smoke", "--out",
                           str(out)])
    rows = rows_of(out)
    assert {layout for layout in ("pages", "slots") for row in rows if f", {layout}: " in row["what"]} == \
        {"pages", "slots"}
    return code, [row["what"] + ": " + row["found"] for row in rows if row["verdict"] == "missed"]


def test_smoke_over_pages_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smoke_in_pages(None, tmp_path, monkeypatch) == (0, [])


@pytest.mark.parametrize(("fault", "where"), [
    ((swapped_rows, nothing), "unlike lengths"), ((one_shorter, nothing), "f16 logits"),
    ((nothing, past_the_end), "copies of a sequence"), (NoCopy, "copies of a sequence"),
    ("no copy on write", "copies of a sequence"),
], ids=["swapped rows of the block table", "wrong length", "written past its end", "stale page after a copy",
        "shared page written"])
def test_what_smoke_finds_in_pages(fault: Any, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is found by what the model answers."""
    if fault == "no copy on write":
        monkeypatch.setattr(BlockTables, "own", lambda self, sequence, number: None)
    code, missed = smoke_in_pages(fault, tmp_path, monkeypatch)
    assert code == 1 and any("pages: " in what and where in what for what in missed), missed
    assert not any("Error" in what for what in missed)
