"""The packages onnx and onnxruntime, which come with extras: whether they are there, new enough, and which wheel it is.

All builds of onnxruntime own the same folder; pip installs several without a warning, and the one that was written last
runs.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from edgeinfer.errors import UsageError

WHEELS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-webgpu")
LEAST = (1, 29)
"""Oldest supported version of onnxruntime: it has RMSNormalization, PagedAttention as in our models, and CUDA 13."""

MIN_PYTHON = (3, 11)
_ERRORS = 3
"""Level of its log: the CUDA provider warns of plugins at every opening, and of a setting that has no successor."""
TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
"""Variable of onnxruntime, from 1.32 on: else its builds by Microsoft keep a number of the machine and send events."""


def installed(name: str) -> str:
    """Return the version of a distribution, empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def check_wheels() -> str:
    """Return the one wheel of onnxruntime that is installed.

    Raises
    ------
    UsageError
        There is none, there are two, or it is too old; the sentence names the remedy.
    """
    found = {name: installed(name) for name in WHEELS if installed(name)}
    if len(found) > 1:
        (one, have), (other, too) = list(found.items())[:2]
        raise UsageError(f"{one} {have} and {other} {too} are both installed, and overwrite each other's files; "
                         f"uninstall both, then install one: pip uninstall -y {' '.join(found)}, pip install "
                         "'edgeinfer[gpu]' or 'edgeinfer[onnx]'.")
    if not found and sys.version_info[:2] < MIN_PYTHON:
        have = ".".join(map(str, sys.version_info[:2]))
        raise UsageError(f"onnxruntime is not installed, and has no package for Python {have}; run edgeinfer with "
                         "Python 3.11 or newer.")
    if not found:
        raise UsageError("onnxruntime is not installed: pip install 'edgeinfer[gpu]' for CUDA, 'edgeinfer[onnx]' for "
                         "the CPU, never both.")
    ((name, have),) = found.items()
    numbers = tuple(int(part) for part in re.findall(r"\d+", have)[:2])  # 1.32.0, 1.32+cu130; a build may say dev
    if numbers and numbers < LEAST:
        raise UsageError(f"{name} {have} lacks operators of this model; 1.29 is the first that has all: pip install "
                         f"-U {name}.")
    return name


def import_onnxruntime() -> Any:
    """Import onnxruntime without its telemetry, and with errors alone in its own log; raises as `check_wheels`.

    Whoever has set the variable of telemetry, or imported onnxruntime before, has decided about telemetry.
    """
    check_wheels()
    os.environ.setdefault(TELEMETRY_OFF, "1")
    import onnxruntime

    onnxruntime.set_default_logger_severity(_ERRORS)
    return onnxruntime


def import_onnx(why: str = "edgeinfer export") -> Any:
    """Import onnx; raises `UsageError` if it is not installed."""
    try:
        import onnx
    except ImportError:
        raise UsageError(f"{why} needs the package onnx, which is not installed: pip install 'edgeinfer[onnx]', or "
                         "'edgeinfer[gpu]' for CUDA.") from None
    return onnx
