"""All targets by name. A target makes one case from a generator, runs it, and says whether it was accepted."""

from __future__ import annotations

from importlib.util import find_spec

from .base import Target, WrongTokensError
from .calls import Api, CommandLine
from .checkpoints import Config, Conversion, Gguf, Safetensors, ShardIndex
from .gguf import GgufFiles, Vocabulary
from .packed import Packed
from .stored import BundleHeader, DeviceFile, PrefixCache, PromptCache, StoredBytes
from .texts import Template, TokenizerFiles

__all__ = ["LEFT_OUT", "TARGETS", "Target", "WrongTokensError"]

TARGETS: dict[str, type[Target]] = {
    "config": Config,
    "safetensors": Safetensors,
    "index": ShardIndex,
    "conversion": Conversion,
    "gguf": Gguf,
    "gguf-file": GgufFiles,
    "gguf-vocabulary": Vocabulary,
    "packed": Packed,
    "bundle": BundleHeader,
    "weights": StoredBytes,
    "prompt-cache": PromptCache,
    "prefix-cache": PrefixCache,
    "profile": DeviceFile,
    "tokenizer": TokenizerFiles,
    "template": Template,
    "command": CommandLine,
    "api": Api,
}
LEFT_OUT: dict[str, str] = {}
"""Targets that cannot run here, and why."""
if find_spec("onnx") and find_spec("onnxruntime"):
    from .exports import Export

    TARGETS["export"] = Export
else:
    LEFT_OUT["export"] = "onnx or onnxruntime is not installed (extra 'onnx')"
if find_spec("starlette") and find_spec("uvicorn"):
    from .requests import Requests

    TARGETS["request"] = Requests
else:
    LEFT_OUT["request"] = "starlette or uvicorn is not installed (extra 'server')"
