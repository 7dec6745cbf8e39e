"""Names of models as people write them: ``Llama 3.1 8B instruct Q4_K_M``, ``qwen2.5-coder:7b``.

A name is cut into words and numbers; words that change no size (instruct, chat, GGUF) and owners are left out, and so
is a file type. The rest must be a built-in shape's name or one of its other names: nothing is guessed.
"""

from __future__ import annotations

import re
from functools import cache

from ..base.dataclass import dataclass
from ..base.validation import similar
from ..graph import Shape, builtin_shapes, other_names

FILE_TYPES = ("Q4_0", "Q4_K_S", "Q4_K_M", "IQ4_XS", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0")
"""GGUF file types that a shape can be described with."""
_TYPE = re.compile(r"(?<![a-z0-9.])(?:ud-)?(i?q\d(?:[_-](?:0|1|k|nl|xxs|xs|s|m|l|xl))*|[bf]p?(?:16|32)|mxfp4|int[48]|"
                   r"[48][ -]?bits?|w?[48]bit|awq|gptq)(?![a-z0-9])")
_WORDS = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+")
_NOISE = frozenset("instruct instruction chat it gguf ggml hf latest preview base pt text meta google microsoft qwenlm "
                   "alibaba mistralai openai ibm nvidia deepseekai tiiuae liquidai allenai huggingfacetb unsloth "
                   "bartowski mlx onnx model the a fp imatrix thinking".split())
_MADE = {"int4": "q4", "4bit": "q4", "4bits": "q4", "q4": "q4", "int8": "int8", "8bit": "int8", "8bits": "int8",
         "q8": "int8", "f16": "f16", "fp16": "f16", "bf16": "f16", "f32": "f32", "fp32": "f32"}
"""Types of weights that edgeinfer makes, by what they are called."""
MOST_CHARACTERS = 200


@dataclass(frozen=True)
class Spoken:
    """A name taken apart."""

    shape: Shape | None
    """The built-in shape that it means; None if it means none."""
    weights: str | None = None
    """The type of weights that it states, one that edgeinfer makes."""
    file_type: str | None = None
    """The GGUF file type that it states."""
    unknown_type: str | None = None
    """A type that it states and that cannot be described."""


def key_of(text: str) -> tuple[str, ...]:
    """Return the words and numbers of a name that matter, in no order."""
    words = _WORDS.findall(text.lower().replace("_", " "))
    return tuple(sorted(word for word in words if word not in _NOISE))


@cache
def _keys() -> dict[tuple[str, ...], str]:
    """Return built-in shapes by all their names."""
    return {**{key_of(other): name for other, name in other_names().items()},
            **{key_of(name): name for name in builtin_shapes()}}


def spoken(text: str) -> Spoken:
    """Take the name of a model apart."""
    lowered = text[:MOST_CHARACTERS].strip().lower()
    if exact := builtin_shapes().get(lowered):
        return Spoken(exact)
    found = _TYPE.search(lowered)
    rest = lowered if found is None else f"{lowered[:found.start()]} {lowered[found.end():]}"
    name = _keys().get(key_of(rest.rpartition("/")[2])) or _keys().get(key_of(rest))
    shape = builtin_shapes()[name] if name else None
    if found is None:
        return Spoken(shape)
    stated = found[1].replace("-", "_").replace(" ", "").upper()
    if stated in FILE_TYPES:
        return Spoken(shape, file_type=stated)
    made = _MADE.get(stated.lower().replace("_", ""))
    return Spoken(shape, made, unknown_type=None if made else found[1])


def near_shapes(text: str) -> list[str]:
    """Return three built-in shapes whose names are like one."""
    joined = {" ".join(key): name for key, name in _keys().items()}
    near = similar(" ".join(key_of(_TYPE.sub(" ", text.lower()))), joined, n=12, cutoff=0.2)
    return list(dict.fromkeys(joined[one] for one in near))[:3]
