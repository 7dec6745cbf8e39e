"""The tokenizer of a GGUF file, converted to the files that a bundle holds.

docs/reference/tokenizers.md lists the names and kinds, and the programs that each was compared with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import TokenizerError
from edgeinfer.graph import PreTokenizer, pre_tokenizers

from .fast import bpe_json, wordpiece_json
from .pieces import added_tokens, sentencepiece_model
from .vocabulary import PREFIX, Vocabulary, damaged, flag, read_vocabulary
from .words import words_of

BPE, SENTENCEPIECE = "gpt2", "llama"
MODELS = (BPE, SENTENCEPIECE, "bert", "t5")
"""Values of tokenizer.ggml.model: byte-level BPE, SentencePiece's BPE, WordPiece, and Unigram; BPE that is not
byte-level is named as its family's (`Family.pre_tokenizers`)."""
_TEMPLATE = "tokenizer.chat_template"
_NO_PRE = "{source} does not say how text is split into words (tokenizer.ggml.pre); llama.cpp's default is used."


@dataclass(frozen=True)
class GgufTokenizer:
    """Parts of a GGUF file's tokenizer that a bundle stores."""

    files: dict[str, bytes]
    """Content by file name: tokenizer.json or tokenizer.model, tokenizer_config.json, generation_config.json."""
    n_tokens: int
    """Length of the vocabulary; the embedding has as many rows or more."""
    bos_id: int | None
    end_ids: tuple[int, ...]
    """All tokens that end a text or a turn."""
    remarks: tuple[str, ...]


def read_gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> GgufTokenizer | None:
    """Return the tokenizer that a GGUF file's metadata hold, None if they hold none.

    Parameters
    ----------
    metadata : mapping
        Values by the keys of GGUF; arrays are lists or NumPy arrays.
    source : str
        The file, for messages.

    Raises
    ------
    TokenizerError
        The kind of tokenizer or its pre-tokenizer is not known, or the vocabulary contradicts itself.
    """
    model = check_kind(metadata, source)
    if not model:
        return None
    vocabulary = read_vocabulary(metadata, model, source)
    remarks: list[str] = []
    if model in (SENTENCEPIECE, "t5"):
        add_bos, add_eos = _around(metadata, vocabulary, model == SENTENCEPIECE, model == "t5", remarks)
        files = {"tokenizer.model": sentencepiece_model(metadata, vocabulary, model == "t5")}
    elif model == "bert":
        add_bos, add_eos = "bos" in vocabulary.named, False
        files = {"tokenizer.json": wordpiece_json(metadata, vocabulary)}
    else:
        name = metadata.get(PREFIX + "pre") or ""
        if not name and model == BPE:
            remarks.append(_NO_PRE.format(source=source))
        words = _words(metadata, model, source)
        add_bos, add_eos = _around(metadata, vocabulary, words.add_bos, False, remarks, always=not words.byte_level)
        files = {"tokenizer.json": bpe_json(metadata, vocabulary, words, add_bos, add_eos)}
    settings: dict[str, Any] = {f"{role}_token": vocabulary.text(role) for role in vocabulary.named}
    settings |= {"add_bos_token": add_bos, "add_eos_token": add_eos}
    if "tokenizer.model" in files:
        settings["added_tokens_decoder"] = added_tokens(metadata, vocabulary)
    if template := _chat_template(metadata, source):
        settings["chat_template"] = template
    bos = vocabulary.named.get("bos")
    ends = {"eos_token_id": list(vocabulary.end_ids), **({} if bos is None else {"bos_token_id": bos})}
    files |= {"tokenizer_config.json": _json(settings), "generation_config.json": _json(ends)}
    return GgufTokenizer(files, len(vocabulary.tokens), bos, vocabulary.end_ids, tuple(remarks))


def check_kind(metadata: Mapping[str, Any], source: str) -> str:
    """Return the kind of tokenizer, empty if there is none; of its tokens nothing is looked at.

    Raises `TokenizerError` if the kind, or its pre-tokenizer, is not known.
    """
    model = metadata.get(PREFIX + "model")
    if model in (None, "none", "no_vocab"):
        return ""
    own = [name for name, words in pre_tokenizers().items() if not words.byte_level]
    if model not in (*MODELS, *own):
        raise TokenizerError(f"{source} has a tokenizer of the kind {model!r:.60} (tokenizer.ggml.model), which "
                             f"edgeinfer does not know; known are {', '.join((*MODELS, *own))}.")
    if model == BPE or model in own:
        _words(metadata, model, source)
    return str(model)


def _words(metadata: Mapping[str, Any], model: str, source: str) -> PreTokenizer:
    """Return how a BPE vocabulary's text is cut into words."""
    return words_of(str(metadata.get(PREFIX + "pre") or "default") if model == BPE else model, source)


def _around(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, bos: bool, eos: bool, remarks: list[str], always: bool = False
) -> tuple[bool, bool]:
    """Return whether the beginning-of-text and the end-of-text token are around a text; `bos`, `eos`: presumed so."""
    found = []
    for role, presumed in (("bos", bos), ("eos", eos)):
        wanted = flag(metadata, f"add_{role}_token", presumed, vocabulary.source) or (always and role == "bos")
        if wanted and role not in vocabulary.named and PREFIX + f"add_{role}_token" in metadata:
            remarks.append(f"{vocabulary.source} asks for a {role} token around texts but names none; none is added.")
        found.append(wanted and role in vocabulary.named)
    return found[0], found[1]


def _chat_template(metadata: Mapping[str, Any], source: str) -> str | list[dict[str, str]] | None:
    """Return the chat template, or all of them with their names if there are several."""
    named = {key.removeprefix(_TEMPLATE + "."): text for key, text in metadata.items()
             if key.startswith(_TEMPLATE + ".")}
    default = metadata.get(_TEMPLATE)
    for name, text in (*named.items(), ("default", default)):
        if not isinstance(text, str) and (text is not None or name != "default"):
            raise damaged(source, f"its chat template {name!r:.60} is a {type(text).__name__} instead of text")
    if not named:
        return default or None
    named |= {"default": default} if default else {}
    return [{"name": name, "template": text} for name, text in named.items()]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode()
