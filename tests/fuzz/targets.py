"""All targets by name. A target makes one case from a generator, runs it, and says whether it was accepted."""

from __future__ import annotations

from .base import Target, WrongTokensError
from .calls import Api, CommandLine
from .checkpoints import Config, Conversion, Gguf, Safetensors, ShardIndex
from .stored import BundleHeader, DeviceFile, PromptCache, StoredBytes
from .texts import Template, TokenizerFiles

__all__ = ["TARGETS", "Target", "WrongTokensError"]

TARGETS: dict[str, type[Target]] = {
    "config": Config,
    "safetensors": Safetensors,
    "index": ShardIndex,
    "conversion": Conversion,
    "gguf": Gguf,
    "bundle": BundleHeader,
    "weights": StoredBytes,
    "prompt-cache": PromptCache,
    "profile": DeviceFile,
    "tokenizer": TokenizerFiles,
    "template": Template,
    "command": CommandLine,
    "api": Api,
}
