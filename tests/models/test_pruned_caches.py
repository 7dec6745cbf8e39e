"""Prompt caches of pruned prompts: stored rows continue, missing or unfit ones are refused."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import BundleError
from edgeinfer.runner import Segment
from edgeinfer.runner.pruning import Schedule
from edgeinfer.runtime import Session
from tests.helpers.pruned import ALL, HALF, answer, written
from tests.helpers.sessions import free_blocks, session, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"))


def saved(opened: Session, path: Path, n: int = 150) -> bytes:
    """Save a prompt; return the tokens decoded after it."""
    sequence = opened.new_sequence()
    opened.prefill(sequence, tokens(n))
    opened.save(sequence, path)
    return answer(opened, sequence)


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_a_saved_prompt_goes_on_with_what_is_there(model: Path, tmp_path: Path, kv: str) -> None:
    with session(model, ctx=256, kv=kv, max_sequences=2, lazy=HALF) as opened:
        expected = saved(opened, tmp_path / "cache")
    with session(model, ctx=200, kv=kv, max_sequences=2, lazy=HALF, threads=2) as opened:
        stale = opened.new_sequence()
        opened.prefill(stale, tokens(180, seed=5))
        opened.release(stale)
        sequence = opened.load(tmp_path / "cache")
        assert answer(opened, sequence) == expected
        n = len(sequence)
        opened.truncate(sequence, n - 1)
        last = opened.prefill(sequence, tokens(n)[-1:]).tobytes()
        whole = opened.new_sequence()
        assert opened.prefill(whole, tokens(n)).tobytes() == last


def test_a_prompt_cache_is_refused_where_something_is_missing(model: Path, tmp_path: Path) -> None:
    with session(model, ctx=256, max_sequences=2, lazy=HALF) as opened:
        saved(opened, tmp_path / "pruned")
        expected = saved(opened, tmp_path / "dense", n=50)
    for lazy in (None, ALL, Schedule((0.5, 0.25), (1, 4))):
        with session(model, ctx=256, max_sequences=2, lazy=lazy) as opened:
            free = free_blocks(opened)
            with pytest.raises(BundleError, match=r"was saved with 'keep=0.5,0.25 after layers 2,4' as --lazy, and la"):
                opened.load(tmp_path / "pruned")
            assert free_blocks(opened) == free
            assert answer(opened, opened.load(tmp_path / "dense")) == expected  # where all is there


def _rewrite(path: Path, change: Callable[[dict[str, Any], bytearray], object]) -> None:
    """Change a cache's header and blocks, and let the checksum be right."""
    data = path.read_bytes()
    end = 16 + struct.unpack("<Q", data[8:16])[0]
    header, blocks = json.loads(data[16:end]), bytearray(data[end:])
    change(header, blocks)
    del header["sha256"]
    header["sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode() + blocks).hexdigest()
    text = json.dumps(header).encode()
    path.write_bytes(data[:8] + struct.pack("<Q", len(text)) + text + blocks)


FLAGS = 2 * 10 * 16
"""Bytes of a cache of 150 tokens that say what is there, at its end."""
CHANGES: dict[str, Callable[[dict[str, Any], bytearray], object]] = {
    "cut short": lambda header, blocks: blocks.pop(),
    "one more is there": lambda header, blocks: header["present"].__setitem__(0, 76),
    "none is said to be there": lambda header, blocks: header.pop("present"),
    "all are": lambda header, blocks: blocks.__setitem__(slice(-FLAGS, None), bytes(FLAGS)),
    "a flag turned": lambda header, blocks: blocks.__setitem__(-FLAGS + 3, 1 - blocks[-FLAGS + 3]),
    "more in the later stage": lambda header, blocks: (
        header["present"].reverse(), blocks.extend(blocks[-FLAGS : -FLAGS // 2]), blocks.__delitem__(
            slice(len(blocks) - FLAGS - FLAGS // 2, len(blocks) - FLAGS))),
    "no schedule": lambda header, blocks: header.pop("lazy"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_flags_that_do_not_fit_their_blocks_are_refused(model: Path, tmp_path: Path, change: str) -> None:
    with session(model, ctx=256, max_sequences=2, lazy=HALF) as opened:
        expected, free = saved(opened, tmp_path / "cache"), free_blocks(opened)
        _rewrite(tmp_path / "cache", lambda header, blocks: None)
        one = opened.load(tmp_path / "cache")
        assert answer(opened, one) == expected
        opened.release(one)
        _rewrite(tmp_path / "cache", CHANGES[change])
        with pytest.raises(BundleError, match="is damaged or cut short; give another file"):
            opened.load(tmp_path / "cache")
        assert free_blocks(opened) == free
        other = opened.new_sequence()
        opened.forward([Segment(other, tokens(60))])
        assert not opened.kv.lacking(other, 60).any()
