"""Execution providers that are not part of every onnxruntime: plugins in packages of their own, and other builds."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from edgeinfer.errors import UsageError

from .packages import check_wheels, import_onnxruntime, installed

_SYSTEMS = {"darwin": "macOS", "linux": "Linux", "win32": "Windows"}
CPU_HARDWARE = "CPU"


class Plugin(NamedTuple):
    """The package that contains a provider."""

    package: str
    """Distribution to install beside onnxruntime, or instead of it."""
    systems: tuple[str, ...]
    """Values of `sys.platform` for which the package exists."""
    module: str = ""
    """Python module that names the plugin's library; empty where the package is a build of onnxruntime itself."""
    hardware: tuple[str, ...] = ("GPU", "NPU", CPU_HARDWARE)
    """Kinds of hardware, the first that is there is used."""

    @property
    def command(self) -> str:
        """The command that installs it."""
        if self.package == "onnxruntime":
            return "pip install 'edgeinfer[onnx]'"
        return f"pip install 'edgeinfer[onnx]' {self.package}" if self.module else f"pip install onnx {self.package}"

    def find(self, device: str, name: str) -> Any | None:
        """Return the hardware that provider `name` runs on, an `OrtEpDevice`; None for a provider without plugin.

        Raises
        ------
        UsageError
            The provider is not installed, does not load or finds no hardware; the sentence names the remedy.
        """
        if sys.platform not in self.systems:
            where = " and ".join(_SYSTEMS[one] for one in self.systems)
            raise UsageError(f"Device {device} exists on {where} only; run with --device cpu.")
        if not installed(self.package):
            raise UsageError(f"Device {device} needs the package {self.package}, which is not installed: "
                             f"{self.command}.")
        wheel = check_wheels()
        if not self.module:
            if name not in import_onnxruntime().get_available_providers():
                raise UsageError(f"{wheel} {installed(wheel)} has no {name}; the package {self.package} has it: "
                                 f"{self.command}.")
            return None
        found = _hardware(device, self, name)
        for kind in self.hardware:
            for one in found:
                if one.device.type.name == kind:
                    return one
        raise UsageError(f"{self.package} {installed(self.package)} finds no hardware that it can use on this machine; "
                         "see its driver, or run with --device cpu.")


def _hardware(device: str, plugin: Plugin, name: str) -> list[Any]:
    """Return the devices of a plugin's provider."""
    try:
        _register(plugin.module)
        return [one for one in import_onnxruntime().get_ep_devices() if one.ep_name == name]
    except UsageError:
        raise
    except Exception as error:  # of the package's module, of the system's loader, or pybind's own classes
        why = " ".join(str(error).split())[:300]
        raise UsageError(f"Device {device} cannot be used, because {plugin.package} {installed(plugin.package)} does "
                         f"not load: {why} Reinstall it: pip install --force-reinstall {plugin.package}.") from None


@cache
def _register(module: str) -> None:
    """Load a plugin's library into onnxruntime, once in a process."""
    plugin = import_module(module)
    import_onnxruntime().register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
