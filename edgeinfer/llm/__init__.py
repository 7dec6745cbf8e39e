"""The Python API: open a model, generate, stream, chat."""

from .api import LLM

__all__ = ["LLM"]
