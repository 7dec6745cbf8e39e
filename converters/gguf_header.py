"""The header of a GGUF file as the fields of a config.json; the tensors themselves are never read.

So the beginning of a file is enough, as far as its header goes.
Format: ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import io
import math
import os
import struct
from pathlib import Path
from typing import Any

from edgeinfer.dataclass import dataclass
from edgeinfer.errors import CheckpointError, UnsupportedModelError
from edgeinfer.files import open_plain
from edgeinfer.graph import build_graph, read_config, read_outline, requested_types

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
MAX_PAIRS, MAX_TENSORS, MAX_ITEMS, MAX_TEXT = 4096, 1 << 20, 1 << 24, 1 << 20
KEPT_ITEMS = 4096
"""Longer arrays (vocabularies) are passed over; only their length is kept."""
TOLERANCE = 0.01
"""Largest difference between the parameters that the fields give and those of the tensors."""

_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}
"""Name of each type of tensors, elements of a block, and its bytes."""
_ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3",
    "qwen3moe": "qwen3_moe",
}
"""GGUF's names of architectures and Hugging Face's; Mistral's is llama, Mixtral's too, with experts."""
_FIELDS = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
}


@dataclass(frozen=True)
class Header:
    """What stands before the tensors."""

    fields: dict[str, Any]
    """Values by key; an array longer than `KEPT_ITEMS` is a range of its length."""
    tensors: dict[str, tuple[int, ...]]
    """Dimensions of each tensor, the fastest first."""
    types: dict[str, int]
    """Bytes of all tensors of a type, by its name; the largest first."""


def is_gguf(path: Path) -> bool:
    """Whether a file is one, by its first bytes or its name."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF" or path.suffix == ".gguf"
    except OSError:  # whoever reads it says so
        return False


def gguf_refusal(path: Path) -> str:
    """Say what to do instead where a file would have to be run or converted."""
    return (f"{path} is a GGUF file, which edgeinfer does not run or convert, yet: give the checkpoint that it was "
            f"made from, a directory with safetensors or an id on the hub (edgeinfer plan {path} says what that "
            "takes).")


def read_gguf_config(path: str | Path) -> dict[str, Any]:
    """Return the fields of a config.json for the model of a GGUF file; raises as `read_gguf`."""
    return read_gguf(path)[0]


def read_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the fields of a config.json for the model of a GGUF file, and the bytes of its tensors by type.

    Raises
    ------
    CheckpointError
        The file is no GGUF file, is cut short, or its header contradicts itself.
    UnsupportedModelError
        The architecture is not known.
    """
    path = Path(path)
    try:
        with open_plain(path) as file:
            header = _Reader(file, path).header()
    except OSError as error:
        raise CheckpointError(f"Cannot read the GGUF file {path}: {error.strerror or error}.") from None
    config = _config(header, path)
    _check(config, header, path)
    return config, header.types


class _Reader:
    """Walks through the header; every length is checked before it is used.

    By reads and not by a mapping, of which a file that shrinks meanwhile would end the process.
    """

    def __init__(self, file: io.BufferedReader, path: Path):
        self._file, self._path, self._left = file, path, os.fstat(file.fileno()).st_size
        self._size = self._left

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise CheckpointError(f"{self._path} is no GGUF file: it does not begin with GGUF.")
        version = self._number("<I")
        if version not in (2, 3):
            raise CheckpointError(f"{self._path} has GGUF version {version}; versions 2 and 3 can be read.")
        n_tensors, n_pairs = self._count(MAX_TENSORS, "tensors"), self._count(MAX_PAIRS, "fields")
        fields: dict[str, Any] = {}
        for _ in range(n_pairs):
            key = self._text()
            fields[key] = self._value(self._number("<I"))
        tensors: dict[str, tuple[int, ...]] = {}
        types: dict[str, int] = {}
        for _ in range(n_tensors):
            name, n_dims = self._text(), self._number("<I")
            if not 1 <= n_dims <= 4:
                raise self._damaged(f"the tensor {name:.60} has {n_dims} dimensions")
            if name in tensors:
                raise self._damaged(f"it has the tensor {name:.60} twice")
            tensors[name] = tuple(self._count(2**40, "rows") for _ in range(n_dims))
            stored, nbytes = self._stored(name, tensors[name], self._number("<I"))
            types[stored] = types.get(stored, 0) + nbytes
            self._take(8)  # where it begins
        return Header(fields, tensors, dict(sorted(types.items(), key=lambda item: -item[1])))

    def _stored(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        """The name of a tensor's type, and the bytes of the tensor; its rows are blocks."""
        if kind not in _TYPES:
            raise self._damaged(f"the tensor {name:.60} has the type {kind}, which is not known")
        stored, elements, nbytes = _TYPES[kind]
        if shape[0] % elements:
            raise self._damaged(f"the tensor {name:.60} has rows of {shape[0]} elements, which are no blocks of "
                                f"{elements}, as {stored} needs")
        return stored, math.prod(shape) // elements * nbytes

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise self._damaged(f"there is no type {kind}")
            return self._number(_SCALARS[kind])
        kind, count = self._number("<I"), self._count(MAX_ITEMS, "items of an array")
        if kind == _ARRAY:
            raise self._damaged("an array holds arrays")
        if count <= KEPT_ITEMS:
            return [self._value(kind) for _ in range(count)]
        if kind == _STRING:
            self._pass_over_texts(count)
        elif kind in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
        else:
            raise self._damaged(f"there is no type {kind}")
        return range(count)

    def _pass_over_texts(self, count: int) -> None:
        """Step over the strings of a vocabulary."""
        for _ in range(count):
            self._skip(int.from_bytes(self._take(8), "little"))

    def _text(self) -> str:
        return self._take(self._count(MAX_TEXT, "bytes of a text")).decode("utf-8", errors="replace")

    def _count(self, most: int, what: str) -> int:
        value = int(self._number("<Q"))
        if value > most:
            raise self._damaged(f"it has {value} {what}, above the limit of {most}")
        return value

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, n: int) -> bytes:
        self._left -= n
        data = self._file.read(n) if self._left >= 0 else b""
        if len(data) < n:
            raise self._cut_short()
        return data

    def _skip(self, n: int) -> None:
        self._left -= n
        if self._left < 0:
            raise self._cut_short()
        self._file.seek(n, os.SEEK_CUR)

    def _cut_short(self) -> CheckpointError:
        return CheckpointError(f"{self._path} is cut short: its header goes on after the file's {self._size} bytes; "
                               "download it again.")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"The header of {self._path} is damaged: {why}; download it again.")


def _config(header: Header, path: Path) -> dict[str, Any]:
    fields, name = header.fields, header.fields.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise UnsupportedModelError(f"{path} holds a model of architecture {name!r:.60}; known: "
                                    f"{', '.join(_ARCHITECTURES)}.")
    config = {ours: fields[f"{name}.{key}"] for key, ours in _FIELDS.items() if f"{name}.{key}" in fields}
    config["model_type"] = _ARCHITECTURES[name]
    config["hidden_act"] = "gelu_pytorch_tanh" if name.startswith("gemma") else "silu"
    tokens = fields.get("tokenizer.ggml.tokens")
    own = fields.get(f"{name}.vocab_size")
    config["vocab_size"] = own if own is not None else len(tokens) if isinstance(tokens, (list, range)) else None
    tied = "output.weight" not in header.tensors if header.tensors else name.startswith("gemma")
    config["tie_word_embeddings"] = tied
    if "blk.0.attn_q.bias" in header.tensors:
        config["attention_bias"] = True
    if experts := fields.get(f"{name}.expert_count"):
        config["model_type"] = {"llama": "mixtral"}.get(name, config["model_type"])
        config["num_local_experts"] = config["num_experts"] = experts
    else:
        config.pop("num_experts_per_tok", None)
    if config["model_type"] in ("llama", "qwen3"):
        config.pop("sliding_window", None)
    if config["model_type"] != "qwen3_moe":
        config.pop("moe_intermediate_size", None)
    return config


def _check(config: dict[str, Any], header: Header, path: Path) -> None:
    """Refuse fields and tensors that do not belong to the same model; a header may be without tensors."""
    outline = read_outline(config, str(path))
    graph = outline.graph(requested_types()) if outline else build_graph(read_config(config), requested_types())
    stored = sum(math.prod(shape) for name, shape in header.tensors.items() if not name.startswith("rope_"))
    if header.tensors and abs(stored - graph.weight_count) > TOLERANCE * graph.weight_count:
        raise CheckpointError(f"The header of {path} contradicts itself: its fields make a model of "
                              f"{graph.weight_count:,} parameters, but its tensors have {stored:,}; download it again.")
