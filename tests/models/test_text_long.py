"""Long prompts: cut where the ids stay the same, refused before they are tokenised, read no further than can fit."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.outside import watch
from edgeinfer.converters.gguf import words as gguf_words
from edgeinfer.errors import CancelledError, RequestError
from edgeinfer.llm.api import LLM
from edgeinfer.models import demo_path
from edgeinfer.text import Tokenizer
from edgeinfer.text.long_texts import PART
from tests.helpers.command_line import PYTHON, environment

MB = 1_000_000
WORDS = ["a", "The", "fox", "didn't", "x1y22", "日本語", "naïve", "...", "—", "\n", "\n\n", "  ", "e\u0301", "I'll",
         "</s>", "🎉", "<|im_end|>", "3.14159", "\t", "Ünï", "A"]


def text_of(seed: int, n: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + (" " if rng.random() < 0.8 else "") for _ in range(n))


def byte_level(words: object, tmp_path: Path) -> Tokenizer:
    """A byte-level BPE that was trained on such text, with these rules for words."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, trainers

    library = Library(models.BPE())
    library.normalizer, library.pre_tokenizer, library.decoder = normalizers.NFC(), words, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["</s>", "<|im_end|>"], show_progress=False)
    library.train_from_iterator([text_of(seed, 3000) for seed in range(3)], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.open(tmp_path)


def tokenizers(tmp_path: Path) -> list[tuple[Tokenizer, bool]]:
    """Tokenizers, and whether their texts are cut."""
    from tokenizers import Regex, pre_tokenizers

    made = [(Tokenizer.open(demo_path()), True)]
    plain = pre_tokenizers.ByteLevel(use_regex=False)

    def split(*patterns: str) -> Any:
        return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(one), "isolated") for one in patterns), plain])

    for i, (words, cut) in enumerate([
        (pre_tokenizers.ByteLevel(), True),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), True),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()]), True),
        (pre_tokenizers.Sequence([  # as Falcon has it
            pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(), pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]), True),
        *((split(*gguf_words.WORDS[name].splits), name != "exaone-moe")
          for name in ("qwen2", "llama3", "gpt-4o", "deepseek-v3", "deepseek-llm", "bloom", "exaone-moe")),
        (split(r"\w+ \w+"), False),
        (plain, False),
    ]):
        directory = tmp_path / str(i)
        directory.mkdir()
        made.append((byte_level(words, directory), cut))
    return made


@pytest.mark.slow
def test_parts_give_the_ids_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tokenizer, cut in tokenizers(tmp_path):
        for seed, special in [(seed, seed % 2 == 0) for seed in range(20)]:
            text = text_of(seed, 400)
            monkeypatch.setattr("edgeinfer.text.fast.PART", 1 << 30)
            whole = tokenizer.encode(text, parse_special=special)
            for size in (10, 37, 200):
                monkeypatch.setattr("edgeinfer.text.fast.PART", size)
                monkeypatch.setattr("edgeinfer.text.long_texts.PART", size)
                assert tokenizer.encode(text, parse_special=special) == whole
            few = tokenizer.encode(text, parse_special=special, most=5)
            assert few == whole[: len(few)] and (5 < len(few) < len(whole)) == cut


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model", "gemma"])
def test_texts_without_spaces_are_cut(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries, with Llama 2's rules, and with Gemma's: most of these characters have no token of their own."""
    if kind == "gemma":
        data = json.loads((demo_path() / "tokenizer.json").read_bytes())
        data |= {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
                 "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                                   "invert": False}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    else:
        shutil.copyfile(demo_path() / kind, tmp_path / kind)
    tokenizer = Tokenizer.open(tmp_path)
    units = ("吾輩は猫である。名前はまだ無い。\n", "\u2581A fox.", "e\u0301</s>🎉", "\u3000「", "a  b", "<0x0A>")
    text = "".join(units) * 20
    whole = tokenizer.encode(text, add_bos=False, leading_space=True)
    monkeypatch.setattr("edgeinfer.text.long_texts.PART", 20)
    monkeypatch.setattr("edgeinfer.text.fast.PART", 20)
    parts = list(tokenizer.encode_pieces(text[i : i + 7] for i in range(0, len(text), 7)))
    assert len(parts) > 30 and [token for part in parts for token in part] == whole


METASPACE = [  # the model, how Metaspace splits and prepends, added tokens, whether there are cuts
    ("Unigram", {"split": True, "prepend_scheme": "always"}, {}, True),
    ("Unigram", {"split": True, "prepend_scheme": "first"}, {"lstrip": True}, True),
    ("Unigram", {"split": True, "prepend_scheme": "never"}, {"rstrip": True, "normalized": True}, True),
    ("Unigram", {"split": False, "prepend_scheme": "always"}, {}, False),
    ("BPE", {"split": True, "prepend_scheme": "always"}, {"single_word": True}, True),
    ("BPE", {"split": False, "prepend_scheme": "first"}, {"lstrip": True}, True),
    ("BPE", {"split": False, "prepend_scheme": "always"}, {"rstrip": True}, True),
    ("BPE", {"split": False, "prepend_scheme": "never"}, {"normalized": True}, True),
    ("BPE", {"split": False, "prepend_scheme": "always"}, {"single_word": True}, False),
]


@pytest.mark.parametrize(("kind", "splits", "token", "cut"), METASPACE, ids=str)
def test_texts_of_metaspace_are_cut(kind: str, splits: dict[str, Any], token: dict[str, bool], cut: bool,
                                    tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As T5, XGLM and newer files of Mistral have it; a stream of any pieces has the tokens of the whole text."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    library = Library(getattr(models, kind)())
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(**splits), decoders.Metaspace()
    if kind == "Unigram":
        library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        trainer: Any = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"],
                                               show_progress=False)
    else:
        trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    words = [text_of(9, 400).replace("</s>", "")]
    library.train_from_iterator(words if splits["split"] else re.split("(?= )", words[0]), trainer)
    library.add_tokens([AddedToken("<x>", **token), AddedToken("</s>", special=True, normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    for seed in range(6):
        rng = random.Random(seed)
        units = [text_of(rng.randrange(99), 5), " <x> ", "<x>", "  ", "\n", " fox dog"]
        text = "".join(rng.choice(units) for _ in range(120))
        monkeypatch.setattr("edgeinfer.text.fast.PART", 1 << 30)
        whole = tokenizer.encode(text, add_bos=False, leading_space=True)
        for size in (10, 40):
            monkeypatch.setattr("edgeinfer.text.long_texts.PART", size)
            ends = sorted(rng.sample(range(len(text)), 20))
            pieces = (text[a:b] for a, b in pairwise([0, *ends, len(text)]))
            runs = list(tokenizer.encode_pieces(pieces))
            assert [one for run in runs for one in run] == whole
            assert (len(runs) > 5) == cut


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("unit", ["a", "word and ", "日本", "\n", " ", "\u0301e", "</s>", "🎉 x", "1", "aB."])
def test_long_prompts_are_refused_before_they_are_tokenised(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", ctx=64, threads=1) as llm:
        asked: list[int] = []
        encode = type(llm.tokenizer._backend)._encode  # type: ignore[attr-defined]

        def counted(self: object, text: str, *how: Any) -> list[int]:
            asked.append(len(text))
            return encode(self, text, *how)

        monkeypatch.setattr(type(llm.tokenizer._backend), "_encode", counted)
        for request in (llm.generate, llm.complete, llm.stream, llm.prompt_ids):
            with pytest.raises(RequestError, match=r"at least .* tokens, more than the context of 64"):
                request(unit * (8 * MB // len(unit)))
        assert not asked
        with pytest.raises(RequestError, match="more than"):
            llm.generate(unit * (30_000 // len(unit)))
        assert sum(asked) <= 30_000


@pytest.mark.slow(keep=1)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc says what a process holds")
@pytest.mark.parametrize("unit", [b"a", b"word and ", "日本".encode(), b"\n \n"])
def test_standard_input_is_read_no_further_than_a_prompt_can_be(unit: bytes) -> None:
    command = [*PYTHON, "run", "demo", "-c", "64", "-n", "2"]
    short = watch(command, environment(), stdin=b"Once upon a time")
    done = watch(command, environment(), stdin=unit * (60 * MB // len(unit)))
    assert short.code == 0 and done.code == 1
    assert "shorten it" in done.err and "Traceback" not in done.err and len(done.err) < 400
    assert done.vm_hwm_bytes - short.vm_hwm_bytes < 12 * MB


def test_an_abandoned_text_blocks_no_request(tmp_path: Path) -> None:
    """Ctrl-C leaves a long call in a thread of its own; the next prompt, read alike, does not wait for it."""
    from tokenizers import pre_tokenizers

    tokenizer = byte_level(pre_tokenizers.ByteLevel(), tmp_path)
    backend: Any = tokenizer._backend
    library, inside, go_on = backend._tokenizer, threading.Event(), threading.Event()

    class Held:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(library, name, value)

        def encode(self, text: str, **how: Any) -> Any:
            if len(text) > 2 * PART:
                inside.set()
                go_on.wait(600)
            return library.encode(text, **how)

    backend._tokenizer = Held()
    try:
        with pytest.raises(CancelledError, match="cancelled while its prompt was tokenised"):
            tokenizer.encode("a" * (3 * PART), stopped=inside.is_set)
        with ThreadPoolExecutor(1) as pool:
            alike = pool.submit(tokenizer.encode, "a fox")
            try:
                assert alike.result(120)
                with pytest.raises(CancelledError):
                    tokenizer.encode("a fox", parse_special=True, stopped=lambda: True)
            finally:
                go_on.set()
    finally:
        go_on.set()
    special, plain = (tokenizer.encode("</s>", parse_special=way) for way in (True, False))
    assert len(special) == 1 < len(plain)
