"""Targets: command lines and the options of the Python API, in this process."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.llm.api import LLM
from tests.helpers.command_line import edgeinfer

from . import mutate
from .base import Target, WrongTokensError

NUMBERS = ("0", "1", "2", "7", "-1", "1e3", "nan", "inf", "4096", "99999999999999999999", "x", "", "0x10", "1_000", "½")
SIZES = ("1", "1MB", "126MB", "4GiB", "1e9", "-4GiB", "9" * 400, "1TB", "x", "", "nanGB")
NAMES = ("demo", "DEMO", "tinyllama-1.1b", "llama-2-7b", "no-such-model", "a/b/c", "/dev/null", "/", ".", "..", "",
         "\0", "ä" * 99, "x" * 20_000, "bundle", "empty", "file.gguf")
DEVICES = ("m4", "raspberry pi 5", "rtx 4080", "", "x" * 999, "/dev/null", "nothing")
WORDS = ("q4", "int8", "f16", "f32", "none", "fuse_input", "fuse_input:x=1", "32", "64", "a,b", "--", "-", "%s")
VALUES = {"number": NUMBERS, "size": SIZES, "device": DEVICES, "word": WORDS}
OPTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "run": (("-c", "number"), ("-t", "number"), ("--kv", "word"), ("--budget", "size"), ("--temp", "number"),
            ("--top-k", "number"), ("--top-p", "number"), ("--min-p", "number"), ("--seed", "number"),
            ("--stop", "word"), ("--recipe", "word"), ("--no-mmap", ""), ("--mlock", ""), ("--raw", ""), ("--json", ""),
            ("--no-stats", ""), ("--nonsense", "")),
    "plan": (("-c", "number"), ("--budget", "size"), ("--machine", "device"), ("--kv", "word"), ("--json", ""),
             ("--recipe", "word")),
    "estimate": (("-c", "number"), ("--machine", "device"), ("--kv", "word"), ("--weights", "word"),
                 ("--all-devices", ""), ("--json", "")),
    "info": (("--tensors", ""), ("--program", ""), ("--json", ""), ("--recipe", "word")),
    "verify": (("--json", ""),),
    "devices": (("--json", ""),),
    "convert": (("--weights", "word"), ("--group-size", "number"), ("--json", ""), ("--overwrite", "")),
    "eval": (("--text", "word"), ("-c", "number"), ("--max-tokens", "number"), ("--json", "")),
    "": (("--version", ""), ("--help", "")),
    "nonsense": (("--help", ""),),
}
"""Options by command; `warmup`, `bench`, `cache clear` and `--probe` measure, build or delete, and are not called."""


def check_command(line: list[str], stdin: bytes) -> bool:
    """Run a command; whether it succeeded. Any undocumented end is a finding."""
    outcome = edgeinfer(*line, stdin=stdin)
    told = outcome.err + outcome.out
    if outcome.code not in (0, 1, 2, 3) or "Traceback" in told or "which is a bug" in told:
        raise AssertionError(f"{line} ended with {outcome.code}: {told[-600:]}")
    answered = "--json" in line and outcome.out.strip()  # such as a plan that does not fit
    if outcome.code and not (outcome.err.strip() or answered):
        raise AssertionError(f"{line} ended with {outcome.code} and said nothing")
    return outcome.code == 0


class CommandLine(Target):
    """Make a command with plausible options and values, and some implausible ones."""

    weight = 0.7

    def __init__(self, directory: Path):
        super().__init__(directory)
        (directory / "empty").mkdir()
        (directory / "file.gguf").write_bytes(b"GGUF" + bytes(40))
        (directory / "text.txt").write_text("Once upon a time there was a hen. " * 20)
        self.plan_bytes = 0

    def run(self, rng: random.Random) -> bool:
        self.plan_bytes = 600 << 20  # the demo at whatever context the line asks for
        before = Path.cwd()
        os.chdir(self.directory)
        try:
            return check_command(self.line(rng), rng.choice((b"", b"Hello", b"\xff\0")))
        finally:
            os.chdir(before)

    def line(self, rng: random.Random) -> list[str]:
        """Return the words of one command line."""
        command = rng.choice(("run", "run", *OPTIONS))
        words = [command] if command else []
        if command == "eval" and rng.random() < 0.7:
            words += ["demo", "--text", "text.txt", "--max-tokens", "40"]
        elif rng.random() < 0.9:
            words.append(rng.choice((*NAMES, "demo", "demo", "demo")))
        if command == "run":
            words += ["-n", rng.choice(("0", "1", "4", "x"))]
            words += [rng.choice(("Hi", "", "\0", "x" * 3000, "\udcff"))] if rng.random() < 0.8 else []
        for flag, kind in rng.sample(OPTIONS[command], rng.randint(0, min(3, len(OPTIONS[command])))):
            words += [flag, rng.choice(VALUES[kind])] if kind else [flag]
        if rng.random() < 0.05:
            rng.shuffle(words)
        return words if "clear" not in words else ["--help"]


class Api(Target):
    """Options of `LLM` and of its requests, of every type."""

    weight = 3.0

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.llm = LLM("demo", ctx=128, threads=1)
        self.path = directory
        self.expected = self.llm.generate("Once upon a time", max_tokens=8, temperature=0)
        self.options = [name for name in GenerationConfig.__dataclass_fields__ if name != "max_tokens"]

    def canary(self) -> None:
        text = self.llm.generate("Once upon a time", max_tokens=8, temperature=0)
        if text != self.expected:
            raise WrongTokensError(f"{text!r} instead of {self.expected!r}")

    def run(self, rng: random.Random) -> bool:
        kind = rng.randrange(12)
        if kind == 0:
            return self.open(rng)
        options: dict[str, Any] = {"max_tokens": rng.choice((0, 1, 3, 3))}
        for name in rng.sample(self.options, rng.randint(0, 2)):
            options[name] = self.value(rng)
        if rng.random() < 0.1:
            options[rng.choice(("max_tokens", "reuse", "nonsense"))] = self.value(rng)
        if kind <= 3:
            self.llm.chat(self.value(rng) if kind == 1 else [{"role": "user", "content": self.value(rng)}], **options)
        elif kind == 4:
            with self.llm.stream(self.prompt(rng), **options) as stream:
                for _ in stream:
                    if rng.random() < 0.3:
                        break
        else:
            self.llm.complete(self.prompt(rng), **options)
        return True

    def open(self, rng: random.Random) -> bool:
        """Open the demo with options of any type."""
        names = ("ctx", "budget", "kv", "threads", "prefill_chunk", "max_sequences", "mmap", "recipe")
        options = {name: self.value(rng) for name in rng.sample(names, rng.randint(1, 2))}
        self.plan_bytes = 2 << 30
        with LLM("demo", **{"ctx": 64, "threads": 1, **options}) as llm:
            llm.generate("Once", max_tokens=1)
        return True

    def prompt(self, rng: random.Random) -> Any:
        """Return a prompt, most often one that is right."""
        if rng.random() < 0.6:
            return "Once upon a time"
        return rng.choice(([1, 5, 9], (1,), iter([1, 2]), range(3), [0.5], ["a"], [-1], [10**9], [True],
                           self.value(rng)))

    def value(self, rng: random.Random) -> Any:
        """Return a value of any type."""
        import numpy as np

        others = (b"x", b"", {1: 2.0}, {"1": 1}, {1: float("nan")}, {1, 2}, (1, "a"), object(), len, Path("x"), 1j,
                  np.float32(0.5), np.int64(3), np.array([1, 2]), np.array(1.0), iter(()), ["a", ""], ("a",), "a", 1)
        return rng.choice(others) if rng.random() < 0.6 else mutate.value(rng)
