"""Types of the options of `LLM` and its requests, for editors and type checkers.

`edgeinfer.config` documents each option, and checks its value when it is used.
`tests/system/test_llm_types.py` compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ..base.progress import OnProgress as OnProgress

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from typing import Unpack as Unpack
    else:
        from typing_extensions import Unpack as Unpack

    from ..config import GenerationConfig, Recipe
    from ..runner.pruning import Schedule

Prompt = str | Iterable[int]
"""Text, or token ids."""
Messages = Sequence[Mapping[str, Any]]
"""Messages of a conversation, each with ``role`` and ``content``."""
KvType = Literal["int8", "f16", "f32"]
WeightType = Literal["q4", "int8", "f16", "f32", "q4m", "q4k", "q5", "q5m", "q5k", "q6", "iq4", "iq4k", "mxfp4",
                     "q2", "tableq", "tableq3"]
GroupSize = Literal[32, 64, 128]
SparseMode = Literal["off", "exact", "predict"]
HeadMode = Literal["exact", "screened"]
Speculation = Literal["auto", "off", "lookup", "draft", "self", "mtp"]
Device = Literal["cpu", "cuda", "auto", "onnx-cpu", "webgpu", "openvino", "coreml", "qnn", "dml"]
KvLayout = Literal["slots", "pages"]


class TechniqueOptions(TypedDict, total=False):
    """Options of all techniques (`edgeinfer.registry`); None leaves the model as it is."""

    sparse: SparseMode | None
    head: HeadMode | None
    attention: str | None
    lazy: str | Schedule | None
    lazy_layers: str | None
    speculate: Speculation | None
    draft: str | Path | Recipe | None
    draft_tokens: int | None


class GenerationOptions(TypedDict, total=False):
    """Fields of `GenerationConfig`; None means the default."""

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Iterable[str] | None
    response_format: Any
    logprobs: int | None
    n: int | None
    beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    speculate: Speculation | None
    draft_tokens: int | None
    ignore_eos: bool | None


class RequestOptions(GenerationOptions, total=False):
    """Options of `generate`, `complete` and `stream`."""

    config: GenerationConfig | None
    """Options as one object; those that are also given by name replace its fields."""
    reuse: bool | None
    """Start from the common beginning with the last request that had this option."""
    prompt_cache: str | Path | None
    """Start from the prompt saved in this file, and save this one."""
    generated: Iterable[int] | None
    """Token ids of the answer that another run has generated already: it continues after them."""
    progress: OnProgress | None
    """Called with ``"prompt"``, done, total and an empty item, in tokens, while the prompt is processed."""


class ChatOptions(RequestOptions, total=False):
    """Options of `chat` and `chat_stream`."""

    template_options: Mapping[str, Any] | None
    """Settings that the model's chat template knows, such as ``{"enable_thinking": False}``."""
