"""The runtime: program, executor and session (tokens to logits), text, sampling."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .completion import Choice, Completion, TokenLogprob
    from .generation import Generation
    from .machine import CHUNK_SIZES, MachineProbe, thread_counts
    from .probe import Probe
    from .program import Program, Record
    from .requests import Request, RequestQueue, Stream
    from .sampling import Sampled, Sampler
    from .sequence import Sequence
    from .session import Session
    from .text import ChatTemplate, StopStrings, StreamDecoder, Tokenizer

_HOMES = {
    "Choice": "completion", "Completion": "completion", "TokenLogprob": "completion", "Generation": "generation",
    "Request": "requests", "RequestQueue": "requests", "Stream": "requests",
    "CHUNK_SIZES": "machine", "MachineProbe": "machine", "thread_counts": "machine",
    "Probe": "probe", "Program": "program", "Record": "program", "Sampled": "sampling", "Sampler": "sampling",
    "Sequence": "sequence",
    "Session": "session", "ChatTemplate": "text", "StopStrings": "text", "StreamDecoder": "text", "Tokenizer": "text",
}
__all__ = ["CHUNK_SIZES", "ChatTemplate", "Choice", "Completion", "Generation", "MachineProbe", "Probe", "Program",
           "Record", "Request", "RequestQueue", "Sampled", "Sampler", "Sequence", "Session", "StopStrings", "Stream",
           "StreamDecoder", "TokenLogprob", "Tokenizer", "thread_counts"]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
