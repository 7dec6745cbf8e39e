"""The Python API: open a model, generate, stream, chat."""

from typing import TYPE_CHECKING

from ..base.lazy_import import lazily

if TYPE_CHECKING:
    from .api import LLM
    from .asynchronous import AsyncLLM
    from .embeddings import Embeddings
    from .open import plan_model
    from .requests import ReplicaState, State

__all__ = ["LLM", "AsyncLLM", "Embeddings", "ReplicaState", "State", "plan_model"]
__getattr__ = lazily(__name__, {"api": "LLM", "asynchronous": "AsyncLLM", "embeddings": "Embeddings",
                              "open": "plan_model", "requests": "ReplicaState State"})
