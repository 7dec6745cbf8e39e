"""From foreign checkpoints to bundles: Hugging Face directories and the hub; random bundles for measurements."""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

if TYPE_CHECKING:
    from .apart import convert_apart
    from .checkpoint import Checkpoint
    from .conversion import convert, open_checkpoint
    from .folders import Found, models_below
    from .gguf_describe import FileDescription, check_tokenizer, describe_gguf, gguf_purpose, gguf_structure
    from .gguf_file import gguf_origin, gguf_parts, is_gguf, read_headers
    from .gguf_header import GgufHeader, PassedOver
    from .gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
    from .hub import fetch, fetch_config
    from .hub_files import cached_gguf, fetch_gguf, gguf_type
    from .json_file import read_json
    from .ollama import ollama_file
    from .packed_describe import describe_packed
    from .random_bundle import SHAPES, write_random_bundle
    from .random_neurons import Sparsity
    from .report import ConversionReport, TensorReport
    from .stores import find_models, lm_studio_folders, ollama_models

__all__ = ["SHAPES", "Checkpoint", "ConversionReport", "FileDescription", "Found", "GgufHeader", "GgufTokenizer",
           "PassedOver", "Sparsity", "TensorReport", "cached_gguf", "check_tokenizer", "convert", "convert_apart",
           "describe_gguf", "describe_packed", "fetch", "fetch_config", "fetch_gguf", "find_models", "gguf_origin",
           "gguf_parts", "gguf_purpose", "gguf_structure", "gguf_type", "is_gguf", "lm_studio_folders", "models_below",
           "ollama_file", "ollama_models", "open_checkpoint",
           "read_gguf_tokenizer", "read_headers", "read_json", "write_random_bundle"]
__getattr__ = lazily(__name__, {
    "apart": "convert_apart", "checkpoint": "Checkpoint", "json_file": "read_json",
    "conversion": "convert open_checkpoint", "hub": "fetch fetch_config",
    "hub_files": "cached_gguf fetch_gguf gguf_type",
    "folders": "Found models_below", "stores": "find_models lm_studio_folders ollama_models", "ollama": "ollama_file",
    "gguf_file": "GgufHeader PassedOver gguf_origin gguf_parts is_gguf read_headers",
    "gguf_describe": "FileDescription check_tokenizer describe_gguf gguf_purpose gguf_structure",
    "gguf_tokenizer": "GgufTokenizer read_gguf_tokenizer",
    "packed_describe": "describe_packed",
    "random_bundle": "SHAPES write_random_bundle",
    "random_neurons": "Sparsity",
    "report": "ConversionReport TensorReport",
})
