"""From foreign checkpoints to bundles: Hugging Face directories and the hub; random bundles for measurements."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .bit_budget import BitBudget
    from .calibration import CALIBRATION_FILE, Calibration
    from .checkpoint.directory import Checkpoint
    from .checkpoint.json_file import read_json
    from .chosen_types import ChosenTypes
    from .conversion import convert, open_checkpoint
    from .gguf.describe import FileDescription, check_tokenizer, describe_gguf, gguf_purpose, gguf_structure
    from .gguf.file import gguf_origin, gguf_parts, is_gguf, read_headers
    from .gguf.header import GgufHeader, PassedOver
    from .gguf.imatrix import by_imatrix, read_imatrix
    from .gguf.tokenizer import GgufTokenizer, read_gguf_tokenizer
    from .hub.download import fetch, fetch_config
    from .hub.gguf_files import cached_gguf, fetch_gguf, gguf_type
    from .outliers import share_of, with_outliers
    from .quantized.describe import describe_packed
    from .report import ConversionReport
    from .stores.find import find_models, lm_studio_folders, ollama_models
    from .stores.ollama import ollama_file
    from .stores.scan import Found, models_below
    from .subprocess import convert_apart
    from .synthetic.random_bundle import SHAPES, write_random_bundle
    from .synthetic.random_neurons import Sparsity

__all__ = [
    "CALIBRATION_FILE", "SHAPES", "BitBudget", "Calibration", "Checkpoint", "ChosenTypes", "ConversionReport",
    "FileDescription", "Found", "GgufHeader", "GgufTokenizer", "PassedOver", "Sparsity", "by_imatrix", "cached_gguf",
    "check_tokenizer", "convert", "convert_apart", "describe_gguf", "describe_packed", "fetch", "fetch_config",
    "fetch_gguf", "find_models", "gguf_origin", "gguf_parts", "gguf_purpose", "gguf_structure", "gguf_type", "is_gguf",
    "lm_studio_folders", "models_below", "ollama_file", "ollama_models", "open_checkpoint", "read_gguf_tokenizer",
    "read_headers", "read_imatrix", "read_json", "share_of", "with_outliers", "write_random_bundle",
]
__getattr__ = lazily(__name__, {
    "bit_budget": "BitBudget", "chosen_types": "ChosenTypes",
    "gguf.imatrix": "by_imatrix read_imatrix", "calibration": "CALIBRATION_FILE Calibration",
    "outliers": "share_of with_outliers", "subprocess": "convert_apart", "checkpoint.directory": "Checkpoint",
    "checkpoint.json_file": "read_json",
    "conversion": "convert open_checkpoint", "hub.download": "fetch fetch_config",
    "hub.gguf_files": "cached_gguf fetch_gguf gguf_type",
    "stores.scan": "Found models_below", "stores.find": "find_models lm_studio_folders ollama_models",
    "stores.ollama": "ollama_file",
    "gguf.file": "GgufHeader PassedOver gguf_origin gguf_parts is_gguf read_headers",
    "gguf.describe": "FileDescription check_tokenizer describe_gguf gguf_purpose gguf_structure",
    "gguf.tokenizer": "GgufTokenizer read_gguf_tokenizer",
    "quantized.describe": "describe_packed",
    "synthetic.random_bundle": "SHAPES write_random_bundle",
    "synthetic.random_neurons": "Sparsity",
    "report": "ConversionReport",
})
