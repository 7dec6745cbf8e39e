"""The time a user waits from pressing return to the first token, measured on processes of their own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.process import python_command
from ..errors import EdgeInferError

if TYPE_CHECKING:
    from ..config import RuntimeConfig
    from ..text import Tokenizer

PROMPT_TOKENS = 8
ANSWER_TOKENS = 4
"""Enough that some text appears: a token may hold half a letter."""
TIMEOUT_SECONDS = 600


def first_token_ms(bundle: Path, tokenizer: Tokenizer, eos_ids: tuple[int, ...], config: RuntimeConfig,
                   repetitions: int = 3) -> float:
    """Return the median milliseconds from the start of ``edgeinfer run`` to its first text, with a prompt of 8 tokens.

    The process runs as `config` says and no other way: with its recipe, threads, type of KV and budget.

    Raises
    ------
    EdgeInferError
        The run fails or prints nothing.
    """
    words = ["run", str(bundle), prompt_of(tokenizer), "--raw", "--json", "-n", str(ANSWER_TOKENS), "--temp", "0",
             "--kv", config.kv, "--recipe", str(config.recipe), "--max-kld", "0"]
    words += ["-t", str(config.threads)] if config.threads else []
    if config.budget_bytes:
        words += ["--budget", f"{config.budget_bytes}B", "--prefill-chunk", str(config.prefill_chunk)]
        words += ["-c", str(max(config.ctx, 2 * PROMPT_TOKENS))] if config.ctx else []
    for token in eos_ids:
        words += ["--logit-bias", f"{token}=-inf"]
    command, path = python_command("edgeinfer", *words)
    return statistics.median(_first_ms(command, path) for _ in range(repetitions))


def prompt_of(tokenizer: Tokenizer, n_tokens: int = PROMPT_TOKENS) -> str:
    """Return a text of this many tokens, the beginning's included; of fewer where the attempts step over it."""
    text, length = "a", len(tokenizer.encode("a"))
    while length < n_tokens:
        longer = [(len(tokenizer.encode(text + tail)), text + tail) for tail in (*" aeiou", " a", " the", ".", ", and")]
        better = [item for item in longer if length < item[0] <= n_tokens]
        if not better:
            break
        length, text = min(better)
    return text


def _first_ms(command: list[str], path: str) -> float:
    try:
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
                              encoding="utf-8", timeout=TIMEOUT_SECONDS)
        first = json.loads(done.stdout).get("ttft_process_ms")
    except subprocess.TimeoutExpired:
        raise EdgeInferError(
            f"A process that was to print its first token has not done so in {TIMEOUT_SECONDS} s; use --no-startup."
        ) from None
    except ValueError:
        first = None
    if not isinstance(first, float):
        said = done.stderr.strip().splitlines()
        raise EdgeInferError(f"A process that was to print its first token failed: "
                             f"{said[-1].rstrip('.') if said else 'no text'}.")
    return first
