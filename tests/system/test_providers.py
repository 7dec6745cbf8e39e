"""Providers of onnxruntime that come with packages of their own, without these packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeinfer import config
from edgeinfer.backends import PROVIDERS, OnnxRunner, Provider, provider_of, why_not
from edgeinfer.backends.onnx import devices, packages, plugins
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import UsageError
from tests.helpers.command_line import edgeinfer
from tests.helpers.sessions import write_model

pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")


def hardware(name: str, kind: str) -> SimpleNamespace:
    return SimpleNamespace(ep_name=name, device=SimpleNamespace(type=SimpleNamespace(name=kind)))


class Fake(SimpleNamespace):
    """onnxruntime with a plugin's library, whose sessions place the nodes of `placed`."""

    def InferenceSession(self, model: str, options: Any, providers: Any = None) -> Any:
        self.opened.append((options.chosen, providers))
        parts = [SimpleNamespace(ep_name=name, get_nodes=lambda kinds=kinds: [
            SimpleNamespace(op_type=kind, name=kind) for kind in kinds]) for name, kinds in self.placed.items()]
        return SimpleNamespace(get_providers=lambda: [self.first, "CPUExecutionProvider"],
                               get_provider_graph_assignment_info=lambda: parts)

    def SessionOptions(self) -> Any:
        made = SimpleNamespace(chosen=None, add_session_config_entry=lambda key, value: None)

        def add(found: list[Any], settings: dict[str, str]) -> None:
            made.chosen = [one.device.type.name for one in found], settings

        made.add_provider_for_devices = add
        return made


@pytest.fixture
def openvino(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A machine with Linux, OpenVINO's package and a processor that it can use."""
    name = "OpenVINOExecutionProvider"
    fake = Fake(registered=[], opened=[], first=name, available=["CPUExecutionProvider"],
                found=[hardware("CPUExecutionProvider", "CPU"), hardware(name, "CPU"), hardware(f"{name}.AUTO", "GPU")],
                placed={name: ["MatMulNBits"] * 5 + ["Add"], "CPUExecutionProvider": ["GroupQueryAttention"] * 2})
    fake.register_execution_provider_library = lambda *given: fake.registered.append(given)
    fake.get_ep_devices = lambda: fake.found
    fake.get_available_providers = lambda: fake.available
    versions = {"onnxruntime": "1.32.0", "onnxruntime-ep-openvino": "1.8.1"}
    for module in (packages, plugins, devices):
        monkeypatch.setattr(module, "installed", lambda one: versions.get(one, ""))
    for module in (plugins, devices):
        monkeypatch.setattr(module, "import_onnxruntime", lambda: fake)
    module = SimpleNamespace(get_ep_name=lambda: name, get_library_path=lambda: "/library")
    monkeypatch.setattr(plugins, "import_module", lambda one: module)
    monkeypatch.setattr(plugins.sys, "platform", "linux")
    plugins._register.cache_clear()
    fake.versions, fake.module = versions, module
    yield fake
    plugins._register.cache_clear()


def test_a_plugin_that_works(openvino: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    provider = provider_of("openvino")
    assert provider == PROVIDERS["openvino"] and why_not("openvino") == ""
    assert openvino.registered == [("OpenVINOExecutionProvider", "/library")]
    provider.open("m", 3)
    (kinds, settings), providers = openvino.opened[0]
    assert kinds == ["CPU"] and providers is None and '"INFERENCE_NUM_THREADS": "3"' in settings["load_config"]
    assert capsys.readouterr().err == (
        "edgeinfer: Device openvino runs 6 of 8 operations on OpenVINOExecutionProvider; on the CPU provider: "
        "2 GroupQueryAttention.\n")
    openvino.found.append(hardware("OpenVINOExecutionProvider", "GPU"))
    provider.open("m", 1)
    assert openvino.opened[1][0][0] == ["GPU"] and len(openvino.registered) == 1


def test_what_a_provider_leaves_is_said(openvino: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    provider = PROVIDERS["openvino"]
    openvino.placed = {"CPUExecutionProvider": ["MatMulNBits", "Add"]}
    with pytest.raises(UsageError, match=r"^OpenVINOExecutionProvider runs none of the model's 2 operations \(1 "
                                         r"MatMulNBits, 1 Add\); run with --device cpu\.$"):
        provider.open("m", 1)
    openvino.placed = {"CPUExecutionProvider": ["Add"]}  # a provider that does not record what it runs
    provider.open("m", 1)
    assert "runs all other operations on OpenVINOExecutionProvider; on the CPU provider: 1 Add." in \
        capsys.readouterr().err
    openvino.first = "CPUExecutionProvider"
    with pytest.raises(UsageError, match=r"^onnxruntime gave CPUExecutionProvider instead of OpenVINOExecutionProvider"
                                         r".*there: pip install 'edgeinfer\[onnx\]' onnxruntime-ep-openvino\.$"):
        provider.open("m", 1)


def test_plugins_that_do_not_work(openvino: Fake) -> None:
    openvino.found.clear()
    assert why_not("openvino") == ("onnxruntime-ep-openvino 1.8.1 finds no hardware that it can use on this machine; "
                                   "see its driver, or run with --device cpu.")

    def broken() -> str:
        raise RuntimeError("libtbb.so.12:\nno such file")

    openvino.module.get_library_path = broken
    plugins._register.cache_clear()
    assert why_not("openvino") == (
        "Device openvino cannot be used, because onnxruntime-ep-openvino 1.8.1 does not load: libtbb.so.12: no such "
        "file Reinstall it: pip install --force-reinstall onnxruntime-ep-openvino.")
    del openvino.versions["onnxruntime-ep-openvino"]
    assert why_not("openvino") == ("Device openvino needs the package onnxruntime-ep-openvino, which is not installed: "
                                   "pip install 'edgeinfer[onnx]' onnxruntime-ep-openvino.")


def test_other_providers(openvino: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not("coreml") == "Device coreml exists on macOS only; run with --device cpu."
    assert why_not("dml") == "Device dml exists on Windows only; run with --device cpu."
    assert "pip install 'edgeinfer[onnx]' onnxruntime-qnn." in why_not("qnn")
    assert why_not("webgpu") == ("Device webgpu is not available, because its attention gave other values than the "
                                 "CPU's with K and V in this process's memory; run with --device cpu.")
    monkeypatch.setattr(plugins.sys, "platform", "darwin")
    assert why_not("coreml") == ("onnxruntime 1.32.0 has no CoreMLExecutionProvider; the package onnxruntime has it: "
                                 "pip install 'edgeinfer[onnx]'.")
    openvino.available.append("CoreMLExecutionProvider")
    openvino.first, openvino.placed = "CoreMLExecutionProvider", {"CoreMLExecutionProvider": ["MatMul"]}
    PROVIDERS["coreml"].open("m", 1)
    assert openvino.opened == [(None, [("CoreMLExecutionProvider", {})])]
    monkeypatch.setattr(plugins.sys, "platform", "win32")
    assert "pip install onnx onnxruntime-directml." in why_not("dml")
    openvino.versions["onnxruntime-directml"] = "1.24.4"
    assert "onnxruntime 1.32.0 and onnxruntime-directml 1.24.4 are both installed" in why_not("dml")
    del openvino.versions["onnxruntime"]
    assert "onnxruntime-directml 1.24.4 lacks operators" in why_not("dml")


def test_every_device_has_a_row() -> None:
    assert set(PROVIDERS) == set(config.DEVICES) - {config.CPU, config.AUTO}
    assert all(one.partial == (one.plugin is not None) for one in PROVIDERS.values())


def test_plan_counts_the_providers_copy(no_variables: None) -> None:
    given = ("demo", "-c", "128", "-t", "1", "--samples", "1", "--json")
    there = edgeinfer("plan", *given, "--device", "openvino").json
    here = edgeinfer("plan", *given, "--device", "onnx-cpu").json
    named = {one["name"]: one["bytes"] for one in there["regions"]}
    assert named["compiled"] > named["prepacked"] and there["device_bytes"] == 0
    assert there["total_bytes"] > here["total_bytes"] + named["compiled"] + 50_000_000
    assert not here["notes"]
    if not packages.installed("onnxruntime-ep-openvino"):
        assert there["notes"] == [f"run is refused here: {why_not('openvino')}"]


def test_devices_lists_executors() -> None:
    out = edgeinfer("devices", "--json").json["executors"]
    assert list(out) == ["cpu", *PROVIDERS] and out["cpu"] == out["onnx-cpu"] == ""
    assert "Executors here (--device):\n  cpu       works\n" in edgeinfer("devices").out
    if sys.platform != "darwin":
        assert out["coreml"] == "Device coreml exists on macOS only; run with --device cpu."


class Elsewhere(Provider):
    """The CPU provider as one whose memory is elsewhere: inputs are copied when they are bound."""

    partial = True  # type: ignore[assignment]

    def open(self, model: str, threads: int) -> Any:
        return CopyingSession(super().open(model, threads))


class CopyingSession:
    """A session whose bindings copy."""

    def __init__(self, session: Any):
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def io_binding(self) -> Any:
        return CopyingBinding(self._session.io_binding())

    def run_with_iobinding(self, binding: CopyingBinding, options: Any) -> None:
        self._session.run_with_iobinding(binding.binding, options)


class CopyingBinding:
    """A binding whose inputs are what they were when they were bound."""

    def __init__(self, binding: Any):
        self.binding = binding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.binding.bind_cpu_input(name, value.numpy().copy())


def test_steps_of_a_provider_with_memory_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every step reads its own inputs, not those of the step that was bound first."""
    path, found = write_model(tmp_path), []
    for provider in (PROVIDERS["onnx-cpu"], Elsewhere(*PROVIDERS["onnx-cpu"])):
        opened = OnnxRunner(Bundle.open(path), RuntimeConfig(ctx=64, kv="f32", threads=1, max_sequences=2), provider)
        sequence = opened.new_sequence()
        rows = [opened.prefill(sequence, [1, 2, 3]).copy(), opened.prefill(sequence, [4, 5]).copy()]
        rows += [opened.decode([sequence], [token])[0].copy() for token in (6, 7, 8, 9)]
        rows += [opened.decode([opened.fork(sequence), sequence], [4, 5]).copy()[1]]
        found.append(np.stack(rows))
        opened.close()
    assert np.array_equal(*found) and np.isfinite(found[0]).all()
    assert capsys.readouterr().err.count("Device onnx-cpu runs ") == 1
