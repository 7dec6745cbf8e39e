"""Splitting of text into words for byte-level BPE of GGUF files: a row for each name of tokenizer.ggml.pre.

The regular expressions are those of the models' own tokenizer.json if these are known; otherwise those of llama.cpp,
which defined the names.
"""

from __future__ import annotations

import re

from edgeinfer.base.validation import similar
from edgeinfer.errors import TokenizerError
from edgeinfer.graph import DIGITS, GPT2, PreTokenizer, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"


def _joined(*alternatives: str) -> str:
    return "|".join(alternatives)


def _cased(digits: str, endings: str = "") -> str:
    """Words that start over at a capital letter, as Tekken and o200k have them."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return _joined(f"{start}{_UPPER}*{_LOWER}+{endings}", f"{start}{_UPPER}+{_LOWER}*{endings}", digits,
                   r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _LINES, _SPACES)


def _deepseek(lines: str) -> str:
    return _joined(r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
                   r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+" + lines, _SPACES)


_LLAMA3 = _joined(_ENDINGS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _LINES, _SPACES)
_QWEN2 = _joined(_ENDINGS, _LETTERS, r"\p{N}", _SIGNS, _LINES, _SPACES)
_SEED = _joined(_ENDINGS, _LETTERS, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _SPACES)
_BAILING = _joined(r"'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*",
                   r"\s*[\r\n]", _SPACES)
_EXAONE_MOE = _joined(_ENDINGS, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}",
                      r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]", _SPACES)
_JAIS2 = _joined(_ENDINGS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _LINES,
                 *(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")), r"\s{1}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_NUMBERS = (r"(?<!\d)\d++\b", r"\A\d{1,3}(?=(?:\d{3})*\z)|(?<=\d)\G\d{3}")
r"""The cuts of ``\d{1,3}(?=(?:\d{3})*\b)``, which looks at the rest of a number from each of its groups: numbers at the
end of a word, and then from the left of each the digits that do not fill a group, and groups."""
_DEEPSEEK_SIGNS = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
_ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
_CASED_LETTERS = (  # of the alphabets that DeepSeek's first models knew, in hexadecimal
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 "
    "1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe "
    "1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 "
    "2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a "
    "10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943")
_DEEPSEEK_LETTERS = rf"\s?[{re.sub('[0-9a-f]+', lambda code: chr(int(code[0], 16)), _CASED_LETTERS).replace(' ', '')}]+"
_CHAMELEON = ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
              r"[\p{P}!-/:-@\[-`{-~]")

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo f2llmv2 grok-2", PreTokenizer((_QWEN2,))),
    ("gpt-2 mpt olmo jais trillion granite-docling phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 jina-es jina-de "
     "jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe", PreTokenizer(gpt2=True)),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((DIGITS,), gpt2=True)),
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("deepseek-llm", PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+$", _ASIAN, r"\p{N}+"))),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4",
     PreTokenizer((r"\p{N}{1,3}", _CJK, _deepseek(_joined(r"[\r\n]*", _LINES))))),
    ("tekken", PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_cased(r"\p{N}{1,3}", _ENDINGS + "?"),))),
    ("tiny_aya cohere2moe", PreTokenizer((*_NUMBERS, _cased(r"\p{N}{1,3}", _ENDINGS + "?")))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _joined(_ENDINGS, _LETTERS, r"\p{N}+", _SIGNS, _LINES, _SPACES)),
                       ignore_merges=True)),
    ("chameleon", PreTokenizer(_CHAMELEON, gpt2=True, add_bos=True)),
)
WORDS = {name: words for names, words in _FAMILIES for name in names.split()}
"""Rows by the names of tokenizer.ggml.pre, but for those that a single family has (`Family.pre_tokenizers`)."""


def words_of(name: str, source: str) -> PreTokenizer:
    """Return the row of a name; raises `TokenizerError` for one that is not known, with the nearest ones."""
    known = WORDS | pre_tokenizers()
    if name not in known:
        near = similar(name.lower(), known, 3, 0.5) or "llama-bpe qwen2 gpt-2".split()
        raise TokenizerError(
            f"{source} has the pre-tokenizer {name!r:.60} (tokenizer.ggml.pre), which edgeinfer does not know; "
            f"similar names are {', '.join(near)}. A wrong choice would split words wrongly without a sign: upgrade "
            "edgeinfer, or convert the checkpoint that the file was made from.")
    return known[name]
