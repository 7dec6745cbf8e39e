"""Damage to JSON trees, bytes and texts: random, or typical of attacks on such files."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63),
    0.0, -0.0, 0.5, 1e-45, 1e308, float("inf"), float("-inf"), float("nan"), "", " ", "a", "0", "1", "\0", "\ud800",
    "ä", "../../../etc/passwd", "/dev/zero", "x" * 20_000, "{{ 1 }}", "%s%n", [], {}, [[]], [None], [1, 2],
    {"": None}, {"a": 1},
)
"""Values that a field may hold instead of its own."""
WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)


def value(rng: random.Random) -> Any:
    """Return a hostile value; now and then a deep or a long one."""
    kind = rng.randrange(30)
    if kind == 0:
        deep: Any = []
        for _ in range(rng.choice((40, 70, 250))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    if kind == 1:
        return [rng.randrange(99)] * rng.choice((100, 10_000))
    if kind == 2:
        return {f"k{i}": i for i in range(rng.choice((10, 1000)))}
    if kind == 3:
        return rng.randrange(-(2**40), 2**40)
    return copy.deepcopy(rng.choice(HOSTILE))


def places(tree: Any, most: int = 4000) -> list[tuple[Any, Any]]:
    """Return (container, key) of the nodes of a tree, at most so many."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo and len(found) < most:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], (dict, list)):
                todo.append(node[key])
    return found


def tree(rng: random.Random, original: Any, most: int = 3) -> Any:
    """Return a copy of a JSON tree with one to `most` changes."""
    changed = copy.deepcopy(original)
    for _ in range(rng.randint(1, most)):
        found = places(changed)
        if not found:
            return value(rng)
        node, key = rng.choice(found)
        kind = rng.randrange(8)
        if kind == 0:
            del node[key]
        elif kind == 1:
            other, its = rng.choice(found)
            if its in (other if isinstance(other, dict) else range(len(other))):
                node[key] = copy.deepcopy(other[its])
        elif kind == 2 and isinstance(node, dict):
            node[str(value(rng))[:100]] = value(rng)
        elif kind == 3 and isinstance(node, list):
            node.insert(rng.randint(0, len(node)), copy.deepcopy(node[key]))
        elif kind == 4 and type(node[key]) in (int, float):
            node[key] = rng.choice((node[key] + 1, node[key] - 1, node[key] * 2, -node[key], node[key] / 2))
        elif kind == 5 and isinstance(node[key], str):
            node[key] = text(rng, node[key])
        else:
            node[key] = value(rng)
    return changed


def text(rng: random.Random, original: str) -> str:
    """Return a text with a piece cut out, doubled, or replaced."""
    at, end = sorted(rng.randint(0, len(original)) for _ in range(2))
    piece = original[at:end]
    character = chr(rng.choice((0, 0x41, 0xD800, 0xFFFD, 0x1F999)))
    return original[:at] + rng.choice(("", piece * 2, piece[::-1], character, str(value(rng))[:200])) + original[end:]


def data(rng: random.Random, original: bytes, most: int = 3) -> bytes:
    """Return bytes with one to `most` changes: flipped bits, numbers at their limits, spans cut, doubled or moved."""
    changed = bytearray(original)
    for _ in range(rng.randint(1, most)):
        kind, at = rng.randrange(7), rng.randint(0, max(0, len(changed) - 1))
        span = min(len(changed) - at, rng.choice((1, 2, 8, 64, 1000)))
        if kind <= 1 and changed:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            word = struct.pack("<Q", rng.choice(WORDS))[: rng.choice((1, 2, 4, 8))]
            changed[at : at + len(word)] = word
        elif kind == 3:
            del changed[at : at + span]
        elif kind == 4:
            changed[at:at] = changed[at : at + span] * rng.choice((1, 2, 50))
        elif kind == 5:
            del changed[at:]
        else:
            changed[at:at] = rng.randbytes(span)
    return bytes(changed)
