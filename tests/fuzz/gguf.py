"""Targets: vocabularies of GGUF files with valid headers, and whole files that become bundles."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from edgeinfer.converters import convert, open_checkpoint, read_gguf_tokenizer
from edgeinfer.text import ChatTemplate, Tokenizer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.helpers.vocabularies import P, bpe_metadata, sentencepiece_metadata, small_bpe, small_sentencepiece

from . import mutate
from .base import Target, tokens_of
from .texts import TEXTS

KEYS = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "precompiled_charsmap", "add_bos_token",
    "add_eos_token", "add_space_prefix", "remove_extra_whitespaces", "bos_token_id", "eos_token_id", "eot_token_id",
    "eos_token_ids", "unknown_token_id", "seperator_token_id", "padding_token_id", "normalizer.lowercase",
)
"""Keys that a case may give a hostile value, whatever the kind of the vocabulary."""


class Vocabulary(Target):
    """Damage metadata of tokenizers of all kinds; accepted ones open, encode and decode any text."""

    weight = 3.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        processor, _ = small_sentencepiece(vocab_size=330, model_type="bpe", byte_fallback=True)
        unigram, _ = small_sentencepiece(vocab_size=100, model_type="unigram")
        vocab, merges = small_bpe()
        special = ["<|im_start|>", "<|im_end|>", "<s>"]
        words = ["[UNK]", "[CLS]", "[SEP]", *(f"\u2581{c}" for c in "abcdefgh"), *"abcdefgh"]
        marked = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "<bos>", "\u2581", "a", "b", "ab", "\u2581a"]
        self.all: list[dict[str, Any]] = [
            *(bpe_metadata(vocab, merges, pre, special, eos_token_id=len(vocab))
              for pre in ("llama-bpe", "qwen2", "gpt-2")),
            sentencepiece_metadata(processor, "llama", bos_token_id=1),
            sentencepiece_metadata(unigram, "t5", precompiled_charsmap=[8, 0, 0, 0, *bytes(8), 97, 0]),
            {P + "model": "bert", P + "tokens": words, P + "token_type": [3] * 3 + [1] * (len(words) - 3),
             P + "unknown_token_id": 0, P + "cls_token_id": 1, P + "seperator_token_id": 2},
            {P + "model": "gemma4", P + "tokens": marked, P + "token_type": [6] * 256 + [2, 3] + [1] * 5,
             P + "merges": ["a b", "\u2581 a"], P + "bos_token_id": 257, P + "unknown_token_id": 256},
        ]
        for metadata in self.all:
            metadata["tokenizer.chat_template"] = "{{ messages[0]['content'] }}"
        self.work = directory / "work"

    def run(self, rng: random.Random) -> bool:
        metadata: dict[str, Any] = mutate.tree(rng, rng.choice(self.all))
        if not isinstance(metadata, dict):
            return False
        for key in rng.sample(KEYS, rng.choice((0, 0, 1, 2))):
            metadata[P + key] = rng.choice((mutate.value(rng), rng.randrange(-2, 500), rng.random() < 0.5))
        self.input_bytes = 200_000
        made = read_gguf_tokenizer(metadata, "m.gguf")
        if made is None:
            return False
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name, content in made.files.items():
            (self.work / name).write_bytes(content)
        ChatTemplate.open(self.work)
        self.use(Tokenizer.open(self.work), rng)
        return True

    @staticmethod
    def use(tokenizer: Tokenizer, rng: random.Random) -> None:
        """Encode a text, decode it whole and token by token."""
        ids = tokenizer.encode(rng.choice(TEXTS), parse_special=rng.random() < 0.5)
        if any(not 0 <= token < tokenizer.vocab_size for token in ids):
            raise AssertionError(f"ids outside of the vocabulary: {ids}")
        stream = tokenizer.stream(skip_special=False)
        streamed = "".join(map(stream.push, ids)) + stream.flush()
        if streamed != tokenizer.decode(ids, skip_special=False):
            raise AssertionError("streamed text is not the whole text")


class GgufFiles(Target):
    """Damage whole files anywhere: accepted ones become bundles that open and run; otherwise nothing is left."""

    weight = 0.5

    def __init__(self, directory: Path):
        super().__init__(directory)
        source = make_checkpoint(directory / "hf", "llama", tokenizer=False, **SIZES)
        self.whole: list[tuple[bytes, int]] = []
        for kind in ("Q4_0", "Q8_0", "F16", "F32", "BF16"):
            path = directory / f"{kind}.gguf"
            write_gguf(path, source, kind, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0})
            with open_checkpoint(path) as checkpoint:
                data = min(checkpoint.tensor(name).offset for name in checkpoint.files)
            self.whole.append((path.read_bytes(), data))
        self.file, self.target = directory / "model.gguf", directory / "out" / "bundle"

    def run(self, rng: random.Random) -> bool:
        shutil.rmtree(self.target.parent, ignore_errors=True)
        self.target.parent.mkdir()
        stored, data = rng.choice(self.whole)
        if rng.random() < 0.7:  # where most bytes are weights, most damage would be to them
            stored = mutate.data(rng, stored[:data]) + stored[data:]
        else:
            stored = mutate.data(rng, stored)
        self.file.write_bytes(stored)
        self.input_bytes = len(stored)
        try:
            convert(self.file, self.target, weights=rng.choice((None, None, "q4", "int8", "f16")))
        finally:
            left = [path.name for path in self.target.parent.iterdir() if path != self.target]
            if any(not name.endswith(".lock") for name in left):
                raise AssertionError(f"left behind: {left}")
        tokens_of(self.target, self)
        return True
