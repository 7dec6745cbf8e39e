"""From foreign checkpoints to bundles: Hugging Face directories and the hub; random bundles for measurements."""

from typing import TYPE_CHECKING

from edgeinfer.lazy import lazily

if TYPE_CHECKING:
    from .apart import convert_apart
    from .checkpoint import Checkpoint
    from .conversion import convert
    from .gguf_header import gguf_refusal, is_gguf, read_gguf, read_gguf_config
    from .gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer
    from .hub import fetch, fetch_config
    from .json_file import read_json
    from .random_bundle import SHAPES, write_random_bundle
    from .random_neurons import Sparsity
    from .report import ConversionReport, TensorReport

__all__ = ["SHAPES", "Checkpoint", "ConversionReport", "GgufTokenizer", "Sparsity", "TensorReport", "convert",
           "convert_apart", "fetch", "fetch_config", "gguf_refusal", "is_gguf", "read_gguf", "read_gguf_config",
           "read_gguf_tokenizer", "read_json", "write_random_bundle"]
__getattr__ = lazily(__name__, {
    "apart": "convert_apart", "checkpoint": "Checkpoint", "json_file": "read_json", "conversion": "convert",
    "hub": "fetch fetch_config", "gguf_header": "gguf_refusal is_gguf read_gguf read_gguf_config",
    "gguf_tokenizer": "GgufTokenizer read_gguf_tokenizer",
    "random_bundle": "SHAPES write_random_bundle",
    "random_neurons": "Sparsity",
    "report": "ConversionReport TensorReport",
})
