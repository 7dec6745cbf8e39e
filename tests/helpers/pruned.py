"""A small model whose prompts are pruned, and queries of a session that its tests share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import ModelConfig
from edgeinfer.runner import Sequence
from edgeinfer.runner.pruning import Schedule
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, held_in, session, tokens

MODEL = replace(TINY, num_hidden_layers=5)
HALF = Schedule((0.5, 0.25), (2, 4))
ALL = Schedule((1.0, 1.0, 1.0), (1, 2, 4))


def written(root: Path, config: ModelConfig = MODEL, **how: str) -> Path:
    """A bundle with random weights."""
    write_random_bundle(config, root / "bundle", **how)
    return root / "bundle"


def kv_rows(opened: Session, sequence: Sequence) -> bytes:
    """Return the contents of the sequence's full blocks, layer by layer."""
    found = []
    for planes in opened.kv.planes:
        whole = held_in(opened, sequence, planes.layers[0])[: len(sequence) // 16]
        found += [(layer, of_layer[:, whole].tobytes()) for plane in planes.arrays
                  for layer, of_layer in zip(planes.layers, plane, strict=True)]
    return b"".join(held for _, held in sorted(found, key=lambda each: each[0]))


def answer(opened: Session, sequence: Sequence, n: int = 4) -> bytes:
    """Logits of tokens decoded after a sequence, whose fork is given back."""
    fork = opened.fork(sequence)
    rows = [opened.decode([fork], [token])[0].tobytes() for token in tokens(n, seed=9)]
    opened.release(fork)
    return b"".join(rows)


def run(path: Path, ids: list[int], **options: object) -> tuple[bytes, bytes, bytes]:
    """Logits after a prompt in two parts, its KV, and logits of the tokens decoded after it."""
    with session(path, ctx=640, max_sequences=2, **options) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids[:21])
        logits = opened.prefill(sequence, ids[21:]).tobytes()
        return logits, kv_rows(opened, sequence), answer(opened, sequence)
