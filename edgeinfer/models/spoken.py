"""Names of models as people write them: ``Llama 3.1 8B instruct Q4_K_M``, ``qwen2.5-coder:7b``.

A name is cut into words and numbers; words that change no size (instruct, chat, GGUF) and owners are left out, and so
is a file type. The rest must be a built-in shape's name or one of its other names. If it is none, names of fine-tunes,
dates, versions and lengths of context are left out one kind after the other, which change no size either; but a name
that then has no size of its own (``mistral large``) means nothing: nothing is guessed.
"""

from __future__ import annotations

import re
from functools import cache

from ..base.dataclass import dataclass
from ..base.validation import similar
from ..graph import Shape, builtin_shapes, other_names

FILE_TYPES = ("Q4_0", "Q4_K_S", "Q4_K_M", "IQ4_XS", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0")
"""GGUF file types that a shape can be described with."""
_TYPE = re.compile(r"(?<![a-z0-9])(?:ud-)?(i?q\d(?:[_-](?:0|1|k|nl|xxs|xs|s|m|l|xl))*|[bf]p?(?:16|32)|mxfp4|int[48]|"
                   r"[48][ -]?bits?|w?[48]bit|w\d+a\d+|fp8|nvfp4|exl[23]|awq|gptq)(?![a-z0-9])")
_WORDS = re.compile(r"\d+(?:\.\d+)?(?:[bmkt](?![^\W\d_]))?|[^\W\d_]+")
_FILE = re.compile(r"(?:-\d{5}-of-\d{5})?\.(?:gguf|bin|safetensors)$|[.-]ggml?v\d\b")
_SIZE = re.compile(r"\d+(?:\.\d+)?[bm]")
_SPACED = re.compile(r"(?<=\d) (?=b\b)")
_LLAMA = re.compile(r"(?<![a-z0-9])l(?=(?:2|3(?:\.[123])?)(?![.\w]))")
_LEFT_OUT = (
    re.compile(r"(?<![a-z])(?:(?:nous|open|deep)[- ]?hermes|hermes|dolphin|tulu|chatqa|saiga|samantha|storm|stheno|"
               r"lexi|lumimaid|sauerkrautlm|swallow|elyza|calme|kunoichi|airoboros|openorca|josiefied|nous)"
               r"(?:[- ]?\d(?:\.\d+){0,2}(?![\d.]*[bm]\b))?(?:[- ](?:pro|theta))?(?![a-z])|"
               r"(?<![a-z])(?:uncensored|abliterated|heretic|dpo|sft|orpo|kto|rlhf|qat|beta|alpha|python|reasoning|"
               r"distilled|finetune|finetuned|merged|japanese|german)(?![a-z])"),
    re.compile(r"(?<![\d.])(?:2[3-6](?:0[1-9]|1[0-2])|(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01]))(?![\d.]*[a-z]|\d)"),
    re.compile(r"(?<![a-z])v\d(?:\.\d)?(?!\.?\d)|(?<![\d.])(?:\d+k|1m)(?![a-z])"),
)
"""Fine-tunes with their versions; dates such as 2507 and 0324; versions and lengths of context."""
_NOISE = frozenset("instruct instruction chat it gguf ggml hf latest preview base pt text meta google microsoft qwenlm "
                   "alibaba mistralai openai ibm nvidia deepseekai tiiuae liquidai allenai huggingfacetb unsloth "
                   "bartowski mlx onnx model the a fp imatrix thinking think quantized dynamic".split())
_MADE = {"int4": "q4", "4bit": "q4", "4bits": "q4", "q4": "q4", "int8": "int8", "8bit": "int8", "8bits": "int8",
         "q8": "int8", "f16": "f16", "fp16": "f16", "bf16": "f16", "f32": "f32", "fp32": "f32", "mxfp4": "mxfp4"}
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
    words = _WORDS.findall(_LLAMA.sub("llama ", _SPACED.sub("", text.lower().replace("_", " "))))
    return tuple(sorted(word for word in words if word not in _NOISE))


@cache
def _keys() -> dict[tuple[str, ...], str]:
    """Return built-in shapes by all their names."""
    return {**{key_of(other): name for other, name in other_names().items()},
            **{key_of(name): name for name in builtin_shapes()}}


def spoken(text: str) -> Spoken:
    """Take the name of a model apart."""
    lowered = _FILE.sub(" ", text[:MOST_CHARACTERS].strip().lower())
    if exact := builtin_shapes().get(lowered):
        return Spoken(exact)
    found = _TYPE.search(lowered)
    rest = lowered if found is None else f"{lowered[:found.start()]} {lowered[found.end():]}"
    name = _named(rest.rpartition("/")[2]) or _named(rest)
    shape = builtin_shapes()[name] if name else None
    if found is None:
        return Spoken(shape)
    stated = found[1].replace("-", "_").replace(" ", "").upper()
    if stated in FILE_TYPES:
        return Spoken(shape, file_type=stated)
    made = _MADE.get(stated.lower().replace("_", ""))
    return Spoken(shape, made, unknown_type=None if made else found[1])


def _named(text: str) -> str | None:
    """Return the shape of a name without its type; at last without what changes no size."""
    if name := _keys().get(key_of(text)):
        return name
    for left_out in _LEFT_OUT:
        text = left_out.sub(" ", text)
        key = key_of(text)
        if (name := _keys().get(key)) and (any(map(_SIZE.fullmatch, key)) or left_out is _LEFT_OUT[0]):
            return name
    return None


def near_shapes(text: str) -> list[str]:
    """Return three built-in shapes whose names are like one: those with the same words first, then those like spelt."""
    typed, keys = key_of(_TYPE.sub(" ", _FILE.sub(" ", text.lower()))), _keys()
    joined = {" ".join(key): key for key in keys}
    near = similar(" ".join(typed), joined, n=20, cutoff=0.2)
    same = sorted(keys, key=lambda key: -_alike(key, typed))[:12]
    same = [key for key in same if any(len(word) > 1 and not word[0].isdigit() for word in {*key} & {*typed})]
    return list(dict.fromkeys(keys[key] for key in [*same, *(joined[one] for one in near)]))[:3]


def _alike(key: tuple[str, ...], typed: tuple[str, ...]) -> float:
    """Letters of the words that two names share, a size as three, less a little for those that only one has."""
    shared = {*key} & {*typed}
    return sum(3 if _SIZE.fullmatch(word) else len(word) for word in shared) - len({*key} ^ {*typed}) / 4
