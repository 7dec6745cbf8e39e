"""Names of models as people write them: ``Llama 3.1 8B instruct Q4_K_M``, ``qwen2.5-coder:7b``.

A name is cut into words and numbers; words that change no size (instruct, chat, GGUF) and owners are left out, and so
is a file type. The rest must be a built-in shape's name or one of its other names. If it is none, names of fine-tunes,
dates, versions and lengths of context are left out one kind after the other, which change no size either; but a name
that then has no size of its own (``mistral large``) means nothing. At last the name of a shape with its version and
size may stand between other words, which are those of a fine-tune, unless one of them says that it is another kind of
model (`_OTHER_KINDS`) or has another size: nothing is guessed.
"""

from __future__ import annotations

import re
from functools import cache

from ..base.dataclass import dataclass
from ..base.validation import similar
from ..graph import Shape, builtin_shapes, other_names

FILE_TYPES = ("Q4_0", "Q4_K_S", "Q4_K_M", "IQ4_XS", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0")
"""GGUF file types that a shape can be described with."""
COARSE_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K", "Q2_K_S", "IQ3_XXS", "IQ3_XS", "IQ3_S",
                "IQ3_M", "Q3_K_S", "Q3_K_M", "Q3_K_L", "TQ1_0", "TQ2_0")
"""File types whose levels no type of edgeinfer has: their weights are held in q4, as when a file is converted."""
_TYPE = re.compile(r"(?<![a-z0-9])(?:ud-)?([it]?q\d(?:[_-](?:0|1|k[lst]?s?|nl|xxs|xs|s|m|l|xl|r4|r8))*|"
                   r"(?:bf|fp?)(?:16|32)|mxfp4|int[48]|w?[2-8][ -]?bits?|w\d+a\d+|fp8|nvfp4|"
                   r"exl[23]|awq|gptq|i2_s)(?:[_-]moe)?(?![a-z0-9])")
_LEVELS = re.compile("[it]?q")
_OF_FILES = ".gguf"
_CONTEXT = re.compile(r"(?<![\d.a-z])(\d+k|1m)(?![a-z])")
"""Types of a GGUF file, of which it has one; lengths of context."""
_MIXED = {
    "Q2_K_XL": "Q2_K", "Q2_K_L": "Q2_K", "Q3_K": "Q3_K_M", "Q3_K_XL": "Q3_K_M", "Q4_K": "Q4_K_M", "Q4_K_L":
    "Q4_K_M", "Q4_K_XL": "Q4_K_M", "Q5_K": "Q5_K_M", "Q5_K_L": "Q5_K_M", "Q5_K_XL": "Q5_K_M", "Q6_K_L": "Q6_K",
    "Q6_K_XL": "Q6_K", "Q8_K_XL": "Q8_0", "Q8": "Q8_0", "IQ2_K": "IQ2_M", "IQ2_KS": "IQ2_S", "IQ2_KL": "IQ2_M",
    "IQ2_KT": "IQ2_S", "IQ3_K": "IQ3_M", "IQ3_KS": "IQ3_S", "IQ3_KT": "IQ3_S", "IQ4_K": "IQ4_XS", "IQ4_KS":
    "IQ4_XS", "IQ4_KSS": "IQ4_XS", "IQ5_K": "Q5_K_S", "IQ5_KS": "Q5_K_S", "IQ6_K": "Q6_K",
    "Q2": "Q2_K", "Q3": "Q3_K_M", "Q5": "Q5_K_M", "Q6": "Q6_K", "IQ2": "IQ2_M", "IQ3": "IQ3_M", "IQ4": "IQ4_XS",
    "2BIT": "Q2_K", "3BIT": "Q3_K_M", "5BIT": "Q5_K_M", "6BIT": "Q6_K",
}
"""Names of files that mix types by matrix, of ik_llama.cpp's types, and of bits alone, with the file type nearest in
bits."""
_BITS_UNSAID = ("AWQ", "GPTQ")
"""Methods whose checkpoints have 4 bits where the name says no other number."""
_SAID = (*_BITS_UNSAID, "FP8")
"""Types of checkpoints that a description names beside that of edgeinfer which holds them."""
_WORDS = re.compile(r"\d+(?:\.\d+)?(?:[bmkt](?![^\W\d_]))?|[^\W\d_]+")
_ROWS = re.compile("_R[48]$")
"""Rows that a type stores together."""
_FILE = re.compile(r"(?:-\d{5}-of-\d{5})?\.(?:gguf|bin|safetensors)$|[.-]ggml?v\d\b|[.-]i1(?=[.:-]|$)")
_SIZE = re.compile(r"\d+(?:\.\d+)?[bm]")
_BIT = re.compile(r"W?(\d)_?BITS?")
_SPACED = re.compile(r"(?<=\d) (?=b\b)")
_POINT = re.compile(r"(?<=\d)(?<![a-z]\d)_(?=\d)|(?<=[a-z]\d)_(?=\d(?!\d*b))")
"""A point as names write it that may not have one: internlm2_5-7b, but saiga_llama3_8b."""
_FULL_WIDTH = {**{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}, 0x3000: 0x20}
_LLAMA = re.compile(r"(?<![a-z0-9])l(?=(?:2|3(?:\.[123])?)(?![.\w]))")
_LEFT_OUT = (
    re.compile(r"(?<![a-z])(?:(?:nous|open|deep)[- ]?hermes|hermes|dolphin|tulu|chatqa|saiga|samantha|storm|stheno|"
               r"lexi|lumimaid|sauerkrautlm|swallow|elyza|calme|kunoichi|airoboros|openorca|josiefied|nous|huihui|sppo|"
               r"iter)"
               r"(?:[- ]?\d(?:\.\d+){0,2}(?![\d.]*[bm]\b))?(?:[- ](?:pro|theta|r1))?(?![a-z])|"
               r"(?<![a-z])(?:uncensored|abliterated|heretic|dpo|sft|orpo|kto|rlhf|qat|beta|alpha|python|reasoning|"
               r"distilled|deduped|finetune|finetuned|merged|japanese|german|dwq|obliterated|derestricted|exp)(?![a-z])|"
               r"(?<=a\db[- _])moe(?![a-z])|(?<=a\d\db[- _])moe(?![a-z])|(?<![a-z0-9])\d\d+x\d+(?:\.\d)?b(?![a-z0-9])"),
    re.compile(r"(?<![\d.])20[12]\d[01]\d[0-3]\d(?!\d)|(?<![\d.])(?:2[3-6](?:0[1-9]|1[0-2])|(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01]))(?![\d.]*[a-z]|\d)"),
    re.compile(r"(?<![a-z])v\d{1,2}(?:\.\d)?(?!\.?\d)|(?<![\d.])(?:\d+k|1m)(?![a-z])"),
)
"""Fine-tunes with their versions, and the layout of experts that some files add to the size; dates such as 2507 and
0324; versions and lengths of context.
"""
_NOISE = frozenset("instruct instruction chat it gguf ggml hf latest preview base pt text meta google microsoft qwenlm "
                   "alibaba mistralai openai ibm nvidia deepseekai tiiuae liquidai allenai huggingfacetb unsloth "
                   "bartowski mlx onnx model the a fp imatrix thinking think quantized dynamic".split())
_OTHER_KINDS = frozenset(
    "vision visual vl v llava bakllava vlm pixtral omni audio speech voice tts asr ocr video image embed "
    "embedding embeddings reranker rerank reward rm prm classifier draft drafter mtp eagle eagle3 speculator "
    "dflash dspark medusa lora adapter mmproj projector encoder vae reap pruned prune pruning slim moe merge "
    "franken upscaled expanded drop layers x minitron nemotron deepseek distill mini nano micro tiny small large "
    "lite coder deep next air flash molmo smolvlm".split())
"""Words of models that are no fine-tune of the model whose name stands beside them, or of another size."""
_MADE = {"int4": "q4", "4bit": "q4", "4bits": "q4", "q4": "q4", "int8": "int8", "8bit": "int8", "8bits": "int8",
         "q8": "int8", "f16": "f16", "fp16": "f16", "bf16": "f16", "f32": "f32", "fp32": "f32", "mxfp4": "mxfp4",
         "q41": "q4m", "q50": "q5", "q51": "q5m", "iq4nl": "iq4", "w4a16": "q4", "w8a8": "int8", "w8a16": "int8",
         "i2s": "q2", "awq": "q4", "gptq": "q4", "fp8": "f16"}
"""Types of weights that edgeinfer makes, by their common names."""
MAX_CHARACTERS, _SLIPS_FROM = 200, 4
"""Length limit of a name, and the letters of a word in which a slip is mended."""


@dataclass(frozen=True)
class Spoken:
    """The parts of a name."""

    shape: Shape | None
    """The built-in shape that it means; None if it means none."""
    weights: str | None = None
    """The type of weights that it states, one that edgeinfer makes."""
    file_type: str | None = None
    """The GGUF file type that it states."""
    unknown_type: str | None = None
    """A type that it states and that cannot be described."""
    stated: str | None = None
    """The type as the name states it."""
    refused: str | None = None
    """Sentence for a name that states two types, one without a model, or a longer context than the shape's."""


def key_of(text: str) -> tuple[str, ...]:
    """Return the words and numbers of a name that matter, in no order."""
    return tuple(sorted(_words(text)))


def _words(text: str) -> list[str]:
    """Return the words and numbers of a name that matter, in their order."""
    words = _WORDS.findall(_LLAMA.sub("llama ", _SPACED.sub("", _POINT.sub(".", text.lower()).replace("_", " "))))
    return [word for word in words if word not in _NOISE]


@cache
def _keys() -> dict[tuple[str, ...], str]:
    """Return built-in shapes by all their names but tags."""
    return {**{key_of(other): name for other, name in other_names().items()
               if ":" not in other and not other.endswith(_OF_FILES)},
            **{key_of(name): name for name in builtin_shapes()}}


@cache
def _tags() -> dict[tuple[str, ...], str]:
    """Return built-in shapes by tags of ollama that mean another version than the same words do elsewhere."""
    return {key_of(other): name for other, name in other_names().items() if ":" in other}


@cache
def _files() -> dict[tuple[str, ...], str]:
    """Return built-in shapes by names that mean one in names of files, which people leave out the size of."""
    return {key_of(other): name for other, name in other_names().items() if other.endswith(_OF_FILES)}


@cache
def _vocabulary() -> frozenset[str]:
    """Return the words of letters in names of models."""
    return frozenset({word for key in _keys() for word in key if word.isalpha()} | _NOISE | _OTHER_KINDS)


def spoken(text: str) -> Spoken:
    """Parse the name of a model."""
    plain = text[:MAX_CHARACTERS].translate(_FULL_WIDTH).replace("通义千问", "qwen ").replace("千问", "qwen ")
    lowered = _FILE.sub(" ", plain.strip().lower())
    if exact := builtin_shapes().get(lowered):
        return Spoken(exact)
    types = [*_TYPE.finditer(lowered)]
    bits_said = [kind for kind in types if kind[1].upper() not in _BITS_UNSAID]
    found = [*types, *bits_said][-1] if types else None  # a file of "BF16-256x20B-Q8_0" was made from one in BF16
    two = list(dict.fromkeys(kind[0].upper() for kind in types if _LEVELS.match(kind[1])))
    if len(two) > 1:
        return Spoken(None, refused=f"{text!r} states two types of weights, {two[-2]} and {two[-1]}; leave one out.")
    rest = _TYPE.sub(" ", lowered)
    if found and not _words(rest):
        return Spoken(None, refused=f"{text!r} is a type of weights without a model; write one before it, such as "
                                    f"'llama-3.1-8b {text}'.")
    name = _named(rest.rpartition("/")[2]) or _named(rest) or _respelt(rest)
    if not name and ((found and _LEVELS.match(found[1])) or "gguf" in plain.lower()):
        name = _files().get(key_of(rest))
    shape = builtin_shapes()[name] if name else None
    if shape and (longer := _longer(rest, shape)):
        most = shape.config["max_position_embeddings"]
        return Spoken(None, refused=f"{text!r} is a version with a longer context, {longer}, of which no shape is "
                                    "built in; give its config.json or its id on the hub, or take "
                                    f"{shape.name!r} for up to {most} positions.")
    if found is None:
        return Spoken(shape)
    stated = _BIT.sub(r"\1BIT", _ROWS.sub("", found[1].replace("-", "_").replace(" ", "").upper()))
    if (kind := _MIXED.get(stated, stated)) in (*FILE_TYPES, *COARSE_TYPES):
        return Spoken(shape, file_type=kind, stated=found[0].upper())
    made = _MADE.get(stated.lower().replace("_", ""))
    return Spoken(shape, made, unknown_type=None if made else found[1],
                  stated=stated if stated in _SAID else None)


def _longer(text: str, shape: Shape) -> str | None:
    """Return the length of context that a name states if the shape, of a shorter one, is of another version."""
    for stated in _CONTEXT.finditer(text):
        positions = int(stated[1][:-1]) * (1_000_000 if stated[1][-1] == "m" else 1000)
        if positions > shape.config.get("max_position_embeddings", positions):
            return stated[0]
    return None


def _named(text: str) -> str | None:
    """Return the shape of a name without its type; at last without words that change no size."""
    if name := (_tags().get(key_of(text)) if ":" in text else None) or _keys().get(key_of(text)):
        return name
    for left_out in _LEFT_OUT:
        text = left_out.sub(" ", text)
        key = key_of(text)
        if (name := _keys().get(key)) and (any(map(_SIZE.fullmatch, key)) or left_out is _LEFT_OUT[0]):
            return name
    return _amid(text)


def _amid(text: str) -> str | None:
    """Return the shape whose name, with version and size, stands among the words of a fine-tune."""
    words = _words(text)
    for n in range(len(words) - 1, 1, -1):
        for i in range(len(words) - n + 1):
            part, rest = words[i:i + n], [*words[:i], *words[i + n:]]
            name = _keys().get(tuple(sorted(part)))
            if (name and not part[0][0].isdigit() and any(map(_SIZE.fullmatch, part))
                    and (n > 2 or part[0] in ("mistral", "mn")) and not _OTHER_KINDS & {*rest}
                    and not any(map(_SIZE.fullmatch, rest))):
                return name
    return None


def _respelt(text: str) -> str | None:
    """Return the shape of a name with a size in which a word of a family is misspelt by one slip: "lama 3.1 8b"."""
    meant = re.sub(r"[^\W\d_]+", lambda word: _meant(word[0]), text)
    return _named(meant) if meant != text and any(map(_SIZE.fullmatch, _words(meant))) else None


def _meant(word: str) -> str:
    """Return the known word that is one slip from an unknown one and begins alike; the word if none or several are."""
    if not word.isalpha() or len(word) < _SLIPS_FROM or word in _vocabulary():
        return word
    near = [known for known in _vocabulary() - _OTHER_KINDS if len(known) >= _SLIPS_FROM and _one_slip(word, known)]
    return near[0] if len(near) == 1 else word


def _one_slip(typed: str, known: str) -> bool:
    """Return whether words that begin alike differ by one letter, or by two that changed places."""
    i = next((i for i, pair in enumerate(zip(typed, known, strict=False)) if pair[0] != pair[1]),
             min(len(typed), len(known)))
    a, b = typed[i:], known[i:]
    return i > 0 and (b in (a[1:], a[1::-1] + a[2:]) or b[1:] in (a, a[1:]))


def near_shapes(text: str) -> list[str]:
    """Return three built-in shapes whose names are like one: those with the same words first, then those like spelt."""
    typed, keys = key_of(_TYPE.sub(" ", _FILE.sub(" ", text.lower()))), _keys()
    if len(typed) == 1 and _SIZE.fullmatch(typed[0]):
        return [name for name in builtin_shapes() if typed[0] in key_of(name)][:3]
    joined = {" ".join(key): key for key in keys}
    near = similar(" ".join(typed), joined, n=20, cutoff=0.2)
    same = sorted(keys, key=lambda key: -_alike(key, typed))[:12]
    same = [key for key in same if any(len(word) > 1 and not word[0].isdigit() for word in {*key} & {*typed})]
    return list(dict.fromkeys(keys[key] for key in [*same, *(joined[one] for one in near)]))[:3]


def _alike(key: tuple[str, ...], typed: tuple[str, ...]) -> float:
    """Letters of the words that two names share, a size as three, less a little for those that only one has."""
    shared = {*key} & {*typed}
    return sum(3 if _SIZE.fullmatch(word) else len(word) for word in shared) - len({*key} ^ {*typed}) / 4
