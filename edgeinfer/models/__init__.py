"""From the user's name of a model to a bundle on disk: a directory, a GGUF file, a known name, a model of the hub."""

from .cached import cached_bundle
from .names import DEMO, KNOWN_NAMES, LISTING, SHOWN_NAMES, demo_path, is_hub_id
from .resolve import checkpoint_path, gguf_file, resolve
from .storage import AS_IT_IS, WEIGHTS, Storage
from .tokenizer import tokenizer_of

__all__ = ["AS_IT_IS", "DEMO", "KNOWN_NAMES", "LISTING", "SHOWN_NAMES", "WEIGHTS", "Storage", "cached_bundle",
           "checkpoint_path", "demo_path", "gguf_file", "is_hub_id", "resolve", "tokenizer_of"]
