"""--device: why a provider cannot be used, in one sentence each."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.backends import PROVIDERS, provider_of
from edgeinfer.backends.onnx import devices, driver, packages
from edgeinfer.backends.onnx.lowering import lower
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import UsageError
from edgeinfer.graph import Op
from edgeinfer.llm import open as opening
from edgeinfer.llm.api import LLM
from edgeinfer.runtime import Session
from tests.helpers.command_line import edgeinfer
from tests.helpers.fake_gpu import Driver, Management
from tests.helpers.sessions import TINY, write_model


@pytest.fixture
def gpu_wheel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An onnxruntime-gpu 1.31.1 that is complete, on a machine with a GPU."""
    found = SimpleNamespace(get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(packages, "installed", lambda name: "1.31.1" if name == "onnxruntime-gpu" else "")
    monkeypatch.setattr(devices, "installed", packages.installed)
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: found)
    monkeypatch.setattr(driver, "load_driver", Driver)
    monkeypatch.setattr(devices, "ctypes", SimpleNamespace(CDLL=lambda name: None))  # not of the whole process
    return found


def refused(device: str = "cuda") -> str:
    with pytest.raises(UsageError) as caught:
        provider_of(device)
    return str(caught.value)


def test_a_gpu_that_works(gpu_wheel: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert provider_of("cuda") == provider_of("auto") == PROVIDERS["cuda"]
    assert capsys.readouterr().err == ""  # what auto takes depends on the model, too
    assert driver.read_gpu() == ("NVIDIA Test", (9, 0), 12_000_000_000, 13000)
    assert provider_of("cpu") is None


@pytest.mark.parametrize("lacking", ["model", "setting"])
def test_auto_takes_the_cpu_for_what_cuda_lacks(gpu_wheel: SimpleNamespace, no_variables: None, tmp_path: Path,
                                                lacking: str, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU that works; which of them it took is said, with the reason."""
    path = write_model(tmp_path, replace(TINY, vocab_size=320), "f32")  # with a tokenizer
    if lacking == "model":
        monkeypatch.setattr("edgeinfer.backends.onnx.lower_graph.lower", lower.dispatch(Op))
    kv, why = (("f16", "has no equivalent in ONNX") if lacking == "model"
               else ("f32", "--kv f32 is not available on device cuda"))
    given = (path, "-c", "64", "-t", "1", "--kv", kv, "--json")
    ran = edgeinfer("run", given[0], "a", "-n", "2", "--speculate", "off", *given[1:], "--device", "auto")
    assert ran.code == 0 and ran.json["kv"] == kv and not ran.json["isa"].startswith("onnxruntime")
    planned = edgeinfer("plan", *given, "--speculate", "off", "--device", "auto")
    assert planned.json["fits"] and planned.json["device"] is None
    assert planned.json["total_bytes"] == ran.json["planned_bytes"]
    monkeypatch.setattr("edgeinfer.cli.commands.bench_run.READ_BYTES", 8 << 20)
    measured = edgeinfer("bench", path, "-t", "1", "--kv", kv, "--json", "-p", "0", "-n", "2", "-r", "1", "--device",
                         "auto", "--no-startup")
    assert measured.json["device"] == "cpu"
    for outcome in (ran, planned, measured):
        assert "Device auto took cpu, our own kernels: " in outcome.err and why in outcome.err, outcome.err
    with LLM(path, device="auto", ctx=64, kv=kv, threads=1) as llm:
        assert isinstance(llm.session, Session)
    assert "Device auto took cpu, our own kernels: " in capsys.readouterr().err
    refused = edgeinfer("run", given[0], "a", *given[1:], "--device", "cuda")
    assert refused.code and why in refused.err


def test_auto_takes_cuda_for_what_it_runs(gpu_wheel: SimpleNamespace, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    provider, config = opening.taken("auto", provider_of("auto"), write_model(tmp_path), RuntimeConfig(), None)
    assert provider == PROVIDERS["cuda"] and config.kv == "f16"
    assert capsys.readouterr().err == "edgeinfer: Device auto took cuda.\n"


@pytest.mark.parametrize(("made", "said"), [
    ({"cuda": 12040}, "NVIDIA's driver runs CUDA up to 12.4, and onnxruntime-gpu 1.31.1 is for CUDA 13; update the "
                      "driver to 580 or newer, or run with --device cpu."),
    ({"capability": (10, 0)}, "NVIDIA Test has compute capability 10.0, for which onnxruntime-gpu 1.31.1 has no code"),
    ({"capability": (7, 0)}, "compute capability 7.0, for which"),
    ({"count": 0}, "NVIDIA's driver finds no GPU that this process may use; see nvidia-smi and CUDA_VISIBLE_DEVICES"),
])
def test_drivers_and_gpus(made: dict[str, Any], said: str, gpu_wheel: SimpleNamespace,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_driver", lambda: Driver(**made))
    assert said in refused()


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_driver", Driver)
    monkeypatch.setattr(driver, "load_management", Management)
    assert driver.gpu_free_bytes() == 11_000_000_000
    monkeypatch.setattr(Management, "nvmlInit_v2", lambda self: 9)
    with pytest.raises(UsageError, match="NVIDIA's driver does not say how much memory is free; see nvidia-smi"):
        driver.gpu_free_bytes()


def test_no_driver(gpu_wheel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise OSError

    monkeypatch.setattr(driver, "load_driver", absent)
    assert refused() == ("There is no NVIDIA driver on this system (libcuda.so.1 was not found); install one, or run "
                         "with --device cpu.")


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are looked for by Linux's names")
@pytest.mark.parametrize(("library", "package"), devices.LIBRARIES.items())
def test_libraries(library: str, package: str, gpu_wheel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        if name == library:
            raise OSError

    monkeypatch.setattr(devices.ctypes, "CDLL", load)
    assert refused() == (f"CUDA's library {library} is missing; the package {package} has it: pip install "
                         f"'edgeinfer[gpu]', or {package} alone.")


def test_wheels(gpu_wheel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch,
                capsys: pytest.CaptureFixture[str]) -> None:
    gpu_wheel.get_available_providers = lambda: ["CPUExecutionProvider"]
    assert "was built without a CUDA provider; reinstall it" in refused()
    for versions, said in (
        ({"onnxruntime": "1.32.0"}, "onnxruntime 1.32.0 is installed, which has no CUDA provider; replace it: pip "
                                    "uninstall -y onnxruntime, then pip install 'edgeinfer[gpu]'."),
        ({"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"},
         "are both installed, and overwrite each other's files; uninstall both, then install one"),
        ({"onnxruntime-gpu": "1.26.0"}, "onnxruntime-gpu 1.26.0 lacks operators of this model; 1.29 is the first"),
        ({}, "onnxruntime is not installed: pip install 'edgeinfer[gpu]' for CUDA"),
    ):
        found: dict[str, str] = versions
        monkeypatch.setattr(packages, "installed", lambda name, found=found: found.get(name, ""))
        monkeypatch.setattr(devices, "installed", packages.installed)
        assert said in refused()
        assert provider_of("auto") is None
        err = capsys.readouterr().err
        assert err.startswith("edgeinfer: Device auto took cpu, our own kernels, because CUDA cannot be used: ")
        assert said in err
    assert refused("gpu") == ("device is 'gpu'; choose one of cpu, cuda, auto, onnx-cpu, webgpu, openvino, coreml, "
                              "qnn, dml.")


def test_a_session_that_is_not_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that does not start, that is replaced, and one that leaves a node to another."""
    node = SimpleNamespace(op_type="GroupQueryAttention", name="n1")
    parts = [SimpleNamespace(ep_name="CUDAExecutionProvider", get_nodes=list),
             SimpleNamespace(ep_name="CPUExecutionProvider", get_nodes=lambda: [node])]
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"],
                              get_provider_graph_assignment_info=lambda: parts)
    entries: dict[str, str] = {}
    asked: list[Any] = []

    def make(model: str, options: Any, providers: Any) -> Any:
        asked.append(providers)
        return session

    fake = SimpleNamespace(InferenceSession=make, SessionOptions=lambda: SimpleNamespace(
        add_session_config_entry=entries.__setitem__))
    monkeypatch.setattr(devices, "import_onnxruntime", lambda: fake)
    with pytest.raises(UsageError, match=r"^onnxruntime gave CPUExecutionProvider instead of CUDAExecutionProvider"):
        PROVIDERS["cuda"].open("m", 1)
    assert entries["session.disable_cpu_ep_fallback"] == entries["ep.cuda.fpa_intb_gemm"] == "1"
    assert asked[0][0][1]["arena_extend_strategy"] == "kSameAsRequested"
    session.get_providers = lambda: ["CUDAExecutionProvider"]
    with pytest.raises(UsageError, match=r"^1 operations of the model would not run on CUDAExecutionProvider, such as "
                                         r"GroupQueryAttention n1; choose another --device"):
        PROVIDERS["cuda"].open("m", 1)

    def broken(*given: Any, **more: Any) -> None:
        raise RuntimeError("CUDA failure 35: driver\nstack")

    fake.InferenceSession = broken
    with pytest.raises(UsageError, match=r"^onnxruntime cannot open the model on CUDAExecutionProvider: CUDA failure "
                                         r"35: driver Nothing falls back to another device"):
        PROVIDERS["cuda"].open("m", 1)
