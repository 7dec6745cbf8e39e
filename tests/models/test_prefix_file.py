"""Prefix files: the prefix cache of another process has the same hits; files that lie or are damaged are said."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.errors import BundleError, ClosedError, DestinationError, RequestError
from edgeinfer.runtime import Session
from edgeinfer.runtime.kv.cache_file import start_digest
from edgeinfer.runtime.kv.prefix_file import PrefixFile
from tests.helpers.sessions import HYBRID, TINY, running, session, tokens, write_model
from tests.models.test_kv_prompt_cache import failing, rewrite_header
from tests.models.test_windows import MODEL as WINDOWED
from tests.models.test_windows import keeping_all

DAMAGED = r"^The prefix file \S+ is damaged or cut short; give another file\.$"
OTHER = r"^The prefix file \S+ was saved by another model or version of edgeinfer, or with another --kv, --recipe"
NONE = r"is not a prefix file of edgeinfer\.$"
LONG, SHORT = tokens(100), tokens(40, seed=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opened(models: Path) -> Iterator[Session]:
    with session(write_model(models), ctx=128, max_sequences=2) as one:
        yield one


def run(opened: Session, ids: list[int], hit: int, salt: bytes = b"") -> bytes:
    """Run a prompt of which so much is found, cache and release it; returns the logits after it."""
    sequence = opened.from_prefix(ids, salt)
    assert len(sequence) == hit
    row = opened.prefill(sequence, ids[hit:]).tobytes()
    opened.cache_prefix(sequence, salt)
    opened.release(sequence)
    return row


@pytest.fixture
def saved(opened: Session, tmp_path: Path) -> Path:
    """A file with LONG and then SHORT, and an empty cache."""
    run(opened, LONG, 0)
    run(opened, SHORT, 0)
    assert opened.save_prefixes(tmp_path / "prefixes") == 8
    opened.drop_prefixes()
    return tmp_path / "prefixes"


def refused(opened: Session, path: Path, match: str, kind: type[Exception] = BundleError) -> None:
    before = opened.free_blocks, opened.prefix_blocks
    with pytest.raises(kind, match=match):
        opened.load_prefixes(path)
    assert (opened.free_blocks, opened.prefix_blocks) == before


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("model", [TINY, WINDOWED, HYBRID], ids=["tiny", "windows", "hybrid"])
def test_another_process_has_the_same_hits(models: Path, tmp_path: Path, kv: str, model: object) -> None:
    """In a session whose blocks lie elsewhere, and held other things before."""
    path, options = write_model(models, model), {"kv": kv, "ctx": 240, "prefill_chunk": 32}  # type: ignore[arg-type]
    texts = [(tokens(230), b""), (tokens(90, seed=1), b""), (tokens(120, seed=2), b"salt")]
    with session(path, max_sequences=3, **options) as one:
        rows = [run(one, ids, 0, salt) for ids, salt in texts]
        n = one.save_prefixes(tmp_path / "prefixes")
        assert n == one.prefix_blocks == 14 + 5 + 7
        assert one.save_prefixes(tmp_path / "prefixes") == n  # over an older file
    assert os.listdir(tmp_path) == ["prefixes"]
    with session(path, max_sequences=4, threads=2, **options) as one:
        held = one.new_sequence()
        one.prefill(held, tokens(100, seed=3))
        assert one.load_prefixes(tmp_path / "prefixes") == n == one.prefix_blocks
        assert one.load_prefixes(tmp_path / "prefixes") == 0
        one.release(held)
        for (ids, salt), row in zip(texts, rows, strict=True):
            assert run(one, ids, (len(ids) - 1) // 16 * 16, salt) == row
        assert len(one.from_prefix(texts[2][0])) == 0, "the salt is needed"
        one.drop_prefixes()
        assert one.free_blocks == one.n_blocks


def test_a_smaller_pool_takes_what_would_be_evicted_last(models: Path, saved: Path) -> None:
    """The beginnings of what was used last; nothing that is held or cached gives way."""
    with session(write_model(models), ctx=64) as small:
        assert small.load_prefixes(saved) == small.n_blocks == 4
        assert run(small, SHORT, 32)
        assert len(small.from_prefix(LONG[:60])) == 16
    with session(write_model(models), ctx=128) as small:
        run(small, tokens(64, seed=5), 0)
        assert small.load_prefixes(saved) == 4 and small.prefix_blocks == 8
        assert len(small.from_prefix(tokens(65, seed=5))) == 64
        run(small, [*tokens(64, seed=5), 1], 64)
        for left in (48, 32):  # of what was taken over the older leaves go first
            sequence = small.new_sequence()
            small.prefill(sequence, tokens(16, seed=left))
            assert len(small.from_prefix([*tokens(64, seed=5), 1])) == 64


def test_the_cache_is_saved_while_it_is_used(opened: Session, tmp_path: Path) -> None:
    run(opened, LONG, 0)
    sequence = opened.from_prefix(LONG)
    opened.save_prefixes(tmp_path / "prefixes")
    row = opened.prefill(sequence, LONG[96:]).tobytes()
    opened.release(sequence)
    opened.drop_prefixes()
    assert opened.load_prefixes(tmp_path / "prefixes") == 6
    assert run(opened, LONG, 96) == row


def test_an_empty_cache_can_be_saved(opened: Session, tmp_path: Path) -> None:
    assert opened.save_prefixes(tmp_path / "prefixes") == 0
    assert opened.load_prefixes(tmp_path / "prefixes") == 0


def rewrite_body(path: Path, change: Callable[[bytearray], object]) -> None:
    """Change the data after the header of a file, with the checksum."""
    data = path.read_bytes()
    end = 16 + struct.unpack("<Q", data[8:16])[0]
    header, body = json.loads(data[16:end]), bytearray(data[end:])
    change(body)
    del header["sha256"]
    digest = start_digest(header)
    digest.update(body)
    text = json.dumps(header | {"sha256": digest.hexdigest()}).encode()
    path.write_bytes(data[:8] + struct.pack("<Q", len(text)) + text + body)


# -- files that lie ----------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_noticed(opened: Session, saved: Path) -> None:
    data, rng = saved.read_bytes(), np.random.default_rng(0)
    header_end = 16 + struct.unpack("<Q", data[8:16])[0]
    keys_end = header_end + 8 * 32
    keys, blocks = rng.integers(header_end, keys_end, 30), rng.integers(keys_end, len(data), 60)
    for i in (*range(0, header_end, 5), *keys, *blocks):
        damaged = bytearray(data)
        damaged[i] ^= 1 << int(rng.integers(8))
        saved.write_bytes(damaged)
        refused(opened, saved, f"{DAMAGED}|{OTHER}|{NONE}")


@pytest.mark.parametrize("keep", [16, 17, 200, 1000, -1])
def test_a_cut_file_is_refused(opened: Session, saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    refused(opened, saved, DAMAGED)


def test_a_file_with_something_after_its_end_is_refused(opened: Session, saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    refused(opened, saved, DAMAGED)


@pytest.mark.parametrize("content", [b"", b"EDGEPF01", b"EDGEKV01" + bytes(100), b"EDGEPF99" + bytes(100)])
def test_other_files_are_refused(opened: Session, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    refused(opened, tmp_path / "file", NONE)


@pytest.mark.parametrize("change", [
    lambda h: h.pop("blocks") and h,
    lambda h: h.update(blocks=7),
    lambda h: h.update(blocks=10**18),
    lambda h: h.update(blocks="8"),
    lambda h: h.update(blocks=True),
    lambda h: h.update(blocks=-8),
    lambda h: h.update(recent=1),
    lambda h: h.update(recent=None),
    lambda h: h.update(sha256=None),
    lambda h: h.pop("sha256") and h,
    lambda h: [h],
])
def test_headers_that_lie_are_refused(opened: Session, saved: Path, change: Callable[[dict], object]) -> None:
    rewrite_header(saved, change)
    refused(opened, saved, DAMAGED)


def test_a_header_that_states_more_than_its_file_takes_no_memory(opened: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"EDGEPF01" + struct.pack("<Q", 2**40) + b'{"sha256": ""}')
    refused(opened, tmp_path / "file", DAMAGED)


def test_a_key_that_stands_twice_is_taken_once(opened: Session, saved: Path) -> None:
    """The first of the two counts, and no block is lost, though nothing writes such a file."""
    rewrite_body(saved, lambda body: body.__setitem__(slice(32, 64), body[:32]))
    assert opened.load_prefixes(saved) == 7
    opened.drop_prefixes()
    assert opened.free_blocks == opened.n_blocks


@pytest.mark.parametrize(("at", "number"), [(0, -1), (8, 16), (8, -1)])
def test_a_checkpoint_that_cannot_be_is_refused(models: Path, tmp_path: Path, at: int, number: int) -> None:
    with session(write_model(models, HYBRID), ctx=128) as hybrid:
        run(hybrid, LONG, 0)
        hybrid.save_prefixes(tmp_path / "file")
        hybrid.drop_prefixes()
        note = 32 * 6 + 32 + at  # after the keys of six blocks and its own
        rewrite_body(tmp_path / "file", lambda body: struct.pack_into("<q", body, note, number))
        refused(hybrid, tmp_path / "file", DAMAGED)
        states = hybrid.kv.states
        assert states and states.pool.n_free == states.pool.n_blocks


def test_what_other_runs_have_saved_is_refused(opened: Session, saved: Path, models: Path, tmp_path: Path) -> None:
    for weights, options in (("int8", {}), ("q4", {"kv": "f16"})):
        with session(write_model(models, TINY, weights), ctx=128, **options) as other:
            refused(other, saved, OTHER)
    path, options = write_model(models, WINDOWED), {"ctx": 240, "prefill_chunk": 32}
    with keeping_all(path, **options) as whole:
        run(whole, LONG, 0)
        whole.save_prefixes(tmp_path / "whole")
    with session(path, **options) as one:
        refused(one, tmp_path / "whole", OTHER)


def test_files_that_cannot_be_read_are_said(opened: Session, tmp_path: Path) -> None:
    refused(opened, tmp_path / "none", r"^Cannot read the prefix file \S+none: No such file or directory\.$")
    refused(opened, tmp_path, r"^Cannot read the prefix file \S+: Is a directory\.$")


def test_an_interruption_while_a_file_is_read_loses_nothing(
    opened: Session, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = PrefixFile._pieces
    monkeypatch.setattr(PrefixFile, "_pieces", lambda *given: failing([*pieces(*given)][:5], KeyboardInterrupt()))
    refused(opened, saved, "^$", KeyboardInterrupt)
    assert opened.free_blocks == opened.n_blocks


# -- where nothing is cached, or written -------------------------------------------------------------------------------


def test_runs_without_a_prefix_cache_refuse_its_files(models: Path, saved: Path) -> None:
    before = saved.read_bytes()
    with session(write_model(models), ctx=128, lazy="keep=0.5") as lazy:
        for call in (lazy.save_prefixes, lazy.load_prefixes):
            with pytest.raises(RequestError, match=r"^Prompts are pruned \(--lazy\), so no .*leave the prefix file"):
                call(saved)
    with running(write_model(models, TINY, "f32"), "pages", ctx=96) as other:
        with pytest.raises(RequestError, match=r"^This model cannot save its prefix cache, so \S+ was not written"):
            other.save_prefixes(saved)
        with pytest.raises(BundleError, match=r"^This model cannot read the prefix file \S+; leave it out\.$"):
            other.load_prefixes(saved)
    with session(write_model(models)) as one:
        pass
    for call in (one.save_prefixes, one.load_prefixes):
        with pytest.raises(ClosedError, match=r"^The model was closed; open it again"):
            call(saved)
    assert saved.read_bytes() == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_half_way_leaves_the_old_file(
    opened: Session, saved: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    run(opened, LONG, 0)
    before, pieces, calls = saved.read_bytes(), PrefixFile._pieces, []

    def fail(*given: object) -> Iterator[object]:
        calls.append(given)
        found = [*pieces(*given)]  # type: ignore[arg-type]
        return iter(found) if len(calls) == 1 else failing(found[:3], error)  # the checksum's turn is the first

    monkeypatch.setattr(PrefixFile, "_pieces", fail)
    kind, match = (DestinationError, r"^Cannot write the prefix file \S+: No space left on device\.$") \
        if isinstance(error, OSError) else (type(error), None)
    with pytest.raises(kind, match=match):
        opened.save_prefixes(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_a_destination_that_cannot_be_written_is_said(opened: Session, tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match=r"^Cannot write the prefix file \S+none/file: No such file or"):
        opened.save_prefixes(tmp_path / "none" / "file")
