"""Targets: tokenizer files and chat templates."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from edgeinfer.models import demo_path
from edgeinfer.text import ChatTemplate, Tokenizer
from tests.helpers.checkpoints import write_tokenizer

from . import mutate
from .base import Target

TEXTS = ("", " ", "Once upon a time", "a\0b", "日本語 🦙", "</s><s>", "x" * 500, "\ud800", "\n\n \t", "<|end|>")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VALUES = (
    "messages", "messages[0]", "'a' * 9", "9", "10 ** 9", "-1", "1.5", "true", "none", "'x'", "b", "[1, 2]", "{'a': 1}",
    "range(9)", "range(10 ** 9)", "namespace(a=1)", "messages[1]['content']", "bos_token", "'%s'", "'{}'", "loop",
)
FILTERS = (
    "length", "upper", "join", "center(10 ** 9)", "list", "tojson", "indent(10 ** 8)", "replace('a', 'b' * 999)",
    "sort", "unique", "title", "batch(3)", "round(10 ** 7)", "int", "float", "string", "format(1)", "wordwrap(1)",
    "first", "reverse", "map('upper')", "select", "tojson(indent=10 ** 7)", "xmlattr", "urlize", "pprint", "sum", "abs",
)
METHODS = (
    "split('')", "split()", "join(messages)", "encode()", "zfill(10 ** 9)", "ljust(10 ** 9)", "replace('', 'a' * 99)",
    "to_bytes(10 ** 9)", "format(1)", "items()", "keys()", "update(a=1)", "append(1)", "extend(messages)", "__class__",
    "__init__", "bit_length()", "translate({})", "expandtabs(10 ** 9)", "splitlines()", "startswith('a')", "hex()",
)
OPERATORS = ("+", "-", "*", "**", "/", "//", "%", "~", "==", "<", "in", "and", "or", "is")
STATEMENTS = (
    "{{ %s }}", "{%% set x = %s %%}{{ x }}", "{%% for i in %s %%}{{ i }}{%% endfor %%}", "{%% if %s %%}a{%% endif %%}",
    "{%% set n = namespace(a='a') %%}{%% for i in range(60) %%}{%% set n.a = n.a + %s %%}{%% endfor %%}{{ n.a }}",
    "{%% macro f(n) %%}{{ %s }}{{ f(n) }}{%% endmacro %%}{{ f(1) }}",
)


class TokenizerFiles(Target):
    """tokenizer.json, tokenizer.model, and the settings beside them."""

    weight = 2.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        tiny, spm = directory / "tiny", directory / "spm"
        tiny.mkdir()
        spm.mkdir()
        write_tokenizer(tiny)
        special = {"eos_token": "<s>", "additional_special_tokens": ["<u>"]}
        (tiny / "special_tokens_map.json").write_text(json.dumps(special))
        for name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(demo_path() / name, spm)
        self.sources, self.work = (tiny, tiny, spm), directory / "work"

    def run(self, rng: random.Random) -> bool:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(rng.choice(self.sources), self.work)
        file = rng.choice(sorted(self.work.iterdir()))
        stored = file.read_bytes()
        if file.suffix == ".json" and rng.random() < 0.85:
            file.write_text(json.dumps(mutate.tree(rng, json.loads(stored))))
        else:
            file.write_bytes(mutate.data(rng, stored))
        self.input_bytes = 10 * file.stat().st_size
        ChatTemplate.open(self.work)
        tokenizer = Tokenizer.open(self.work)
        text = rng.choice(TEXTS)
        ids = tokenizer.encode(text, parse_special=rng.random() < 0.5)
        tokenizer.decode(ids)
        stream = tokenizer.stream(ids)
        for token in (*ids[:20], 0, rng.randrange(400)):
            stream.push(token)
        stream.flush()
        return True


class Template(Target):
    """Chat templates: real ones with a piece changed, and expressions made to be large."""

    weight = 3.0

    def run(self, rng: random.Random) -> bool:
        text = mutate.text(rng, CHATML) if rng.random() < 0.4 else self.made(rng)
        self.input_bytes = len(text)
        template = ChatTemplate({"default": text}, {"bos_token": "<s>", "eos_token": "</s>"})
        template.render(MESSAGES, **({"b": mutate.value(rng)} if rng.random() < 0.3 else {}))
        return True

    def made(self, rng: random.Random) -> str:
        """Return statements over random expressions, some of them in loops that double."""
        count = rng.randint(1, 4)
        return "".join(rng.choice(STATEMENTS) % self.expression(rng, rng.randint(0, 3)) for _ in range(count))

    def expression(self, rng: random.Random, depth: int) -> str:
        """Return one expression."""
        if depth == 0:
            return rng.choice(VALUES)
        inner: Any = self.expression(rng, depth - 1)
        kind = rng.randrange(4)
        if kind == 0:
            return f"({inner}) | {rng.choice(FILTERS)}"
        if kind == 1:
            return f"({inner}).{rng.choice(METHODS)}"
        if kind == 2:
            return f"({inner}) {rng.choice(OPERATORS)} ({self.expression(rng, depth - 1)})"
        return f"({inner})[{rng.choice(VALUES)}:{rng.choice(VALUES)}]"
