"""Prompt caches: a saved sequence goes on bit for bit; files that lie, or that cannot be written, are said."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import Recipe
from edgeinfer.errors import BundleError, ClosedError, DestinationError, RequestError
from edgeinfer.runner import Sequence
from edgeinfer.runtime import Session
from edgeinfer.runtime.kv.prompt_file import PromptFile
from tests.helpers.sessions import TINY, free_blocks, session, tokens, write_model

PROMPT = tokens(53)
DAMAGED = r"^The prompt cache \S+ is damaged or cut short; give another file\.$"
OTHER = r"^The prompt cache \S+ was saved by another model or version of edgeinfer, or with another --kv, --recipe"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def opened(models: Path) -> Iterator[Session]:
    with session(write_model(models), ctx=100, max_sequences=2) as one:
        yield one


@pytest.fixture
def saved(opened: Session, tmp_path: Path) -> Path:
    """A cache of PROMPT."""
    sequence = opened.new_sequence()
    opened.prefill(sequence, PROMPT)
    opened.save(sequence, tmp_path / "cache")
    opened.release(sequence)
    return tmp_path / "cache"


def refused(opened: Session, path: Path, match: str, kind: type[Exception] = BundleError) -> None:
    free = free_blocks(opened)
    with pytest.raises(kind, match=match):
        opened.load(path)
    assert free_blocks(opened) == free


def rewrite_header(path: Path, change: Callable[[dict], object]) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[8:16])[0]
    header = json.loads(data[16 : 16 + size])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(data[:8] + struct.pack("<Q", len(text)) + text + data[16 + size :])


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("n", [1, 16, 53, 80])
def test_a_saved_sequence_goes_on_bit_for_bit(models: Path, tmp_path: Path, kv: str, n: int) -> None:
    """In another session, whose blocks lie elsewhere and held other things before."""
    path, prompt, rest = write_model(models), tokens(n), tokens(12, seed=1)
    with session(path, kv=kv, ctx=100) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, prompt)
        opened.save(sequence, tmp_path / "cache")
        opened.save(sequence, tmp_path / "cache")  # over an older file
        expected = [opened.decode([sequence], [token]).tobytes() for token in rest]
    assert os.listdir(tmp_path) == ["cache"]
    with session(path, kv=kv, ctx=96, max_sequences=2, threads=2) as opened:
        other = opened.new_sequence()
        opened.prefill(other, tokens(70, seed=2))
        opened.truncate(other, 20)
        sequence = opened.load(tmp_path / "cache")
        assert sequence.tokens == prompt
        assert [opened.decode([sequence], [token]).tobytes() for token in rest] == expected


def test_pieces_may_be_small_and_blocks_scattered(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same whatever it is written by, and is read into blocks that do not follow each other."""
    path, prompt = write_model(models), tokens(70)
    with session(path, ctx=100, max_sequences=2) as opened:
        sequence, other = opened.new_sequence(), opened.new_sequence()
        opened.prefill(sequence, prompt)
        opened.save(sequence, tmp_path / "cache")
        whole = (tmp_path / "cache").read_bytes()
        for size in (1, 3 * 64):
            monkeypatch.setattr("edgeinfer.runtime.kv.cache_file.PIECE_BYTES", size)
            opened.save(sequence, tmp_path / "cache")
            assert (tmp_path / "cache").read_bytes() == whole
        expected = opened.decode([sequence], [3]).tobytes()
        opened.prefill(other, tokens(30))
        opened.truncate(sequence, 10)
        opened.release(other)
        scattered = opened.load(tmp_path / "cache")
        assert scattered.blocks != sorted(scattered.blocks)
        assert opened.decode([scattered], [3]).tobytes() == expected


def test_a_cache_of_another_layout_is_refused(opened: Session, saved: Path) -> None:
    for change in (lambda h: h.pop("layout") and h, lambda h: h.update(layout=1)):
        before = saved.read_bytes()
        rewrite_header(saved, change)
        refused(opened, saved, OTHER)
        saved.write_bytes(before)


def test_what_is_reserved_is_not_saved(models: Path, tmp_path: Path) -> None:
    with session(write_model(models), ctx=100, max_sequences=2) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(20))
        opened.save(sequence, tmp_path / "plain")
        opened.reserve(sequence, 40)
        opened.save(sequence, tmp_path / "cache")
        assert (tmp_path / "cache").read_bytes() == (tmp_path / "plain").read_bytes()
        assert opened.load(tmp_path / "cache").tokens == tokens(20)


def test_an_empty_sequence_can_be_saved(opened: Session, tmp_path: Path) -> None:
    opened.save(opened.new_sequence(), tmp_path / "cache")
    assert opened.load(tmp_path / "cache").tokens == []


def test_a_flipped_bit_anywhere_is_noticed(opened: Session, saved: Path) -> None:
    data = saved.read_bytes()
    header_end = 16 + struct.unpack("<Q", data[8:16])[0]
    rng = np.random.default_rng(0)
    places = [*range(0, header_end), *rng.integers(header_end, len(data), 60).tolist(), len(data) - 1]
    for i in places[:: 1 if len(places) < 400 else 3]:
        damaged = bytearray(data)
        damaged[i] ^= 1 << int(rng.integers(8))
        saved.write_bytes(damaged)
        refused(opened, saved, f"{DAMAGED}|{OTHER}|not a prompt cache|holds .* tokens and the context")


@pytest.mark.parametrize("keep", [16, 17, 200, 1000, -1])
def test_a_cut_file_is_refused(opened: Session, saved: Path, keep: int) -> None:
    saved.write_bytes(saved.read_bytes()[:keep])
    refused(opened, saved, DAMAGED)


def test_a_file_with_something_after_its_end_is_refused(opened: Session, saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    refused(opened, saved, DAMAGED)


@pytest.mark.parametrize("content", [b"", b"EDGEKV01", b"GGUF" + bytes(100), b"EDGEKV99" + bytes(100)])
def test_other_files_are_refused(opened: Session, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    refused(opened, tmp_path / "file", r"file is not a prompt cache of edgeinfer\.$")


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("tokens") and h,
        lambda h: h.update(tokens="123"),
        lambda h: h.update(tokens=[1, 2.5]),
        lambda h: h.update(tokens=[1, True]),
        lambda h: h.update(tokens=[-1, *PROMPT[1:]]),
        lambda h: h.update(tokens=PROMPT[:-1]),
        lambda h: h.update(tokens=[PROMPT[0] + 1, *PROMPT[1:]]),
        lambda h: h.update(sha256=None),
        lambda h: [h],
        lambda h: "tokens sha256",
    ],
)
def test_headers_that_lie_are_refused(opened: Session, saved: Path, change: Callable[[dict], object]) -> None:
    rewrite_header(saved, change)
    refused(opened, saved, DAMAGED)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b"nul"])
def test_headers_that_are_no_json_are_refused(opened: Session, tmp_path: Path, text: bytes) -> None:
    for size in (len(text), 2**40):
        (tmp_path / "cache").write_bytes(b"EDGEKV01" + struct.pack("<Q", size) + text)
        refused(opened, tmp_path / "cache", DAMAGED)


def test_a_closed_model_writes_no_cache_over_a_good_one(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    with session(write_model(models)) as one:
        sequence = one.new_sequence()
        one.prefill(sequence, tokens(20))
        one.save(sequence, path)
        before = path.read_bytes()
    for call in (lambda: one.save(sequence, path), lambda: one.load(path)):
        with pytest.raises(ClosedError, match="The model was closed; open it again"):
            call()
    assert path.read_bytes() == before


def test_another_models_cache_is_refused(opened: Session, saved: Path, models: Path) -> None:
    with session(write_model(models, TINY, "int8"), ctx=100) as other:
        refused(other, saved, OTHER)
    with session(write_model(models), ctx=100, kv="f16") as other:
        refused(other, saved, OTHER)
    with session(write_model(models), ctx=100, recipe=Recipe(())) as other:  # other passes may give other K and V
        refused(other, saved, OTHER)


def test_a_cache_longer_than_the_context_is_refused(saved: Path, models: Path) -> None:
    with session(write_model(models), ctx=52) as short:
        refused(short, saved, r"^The prompt cache \S+ holds 53 tokens and the context 52; raise --ctx\.$")


def test_a_cache_that_finds_no_room_takes_none(saved: Path, models: Path) -> None:
    with session(write_model(models), ctx=64) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(10))
        refused(opened, saved, "^All 4 KV blocks", RequestError)


def test_a_missing_file_is_said(opened: Session, tmp_path: Path) -> None:
    refused(opened, tmp_path / "none", r"^Cannot read the prompt cache \S+none: No such file or directory\.$")
    refused(opened, tmp_path, r"^Cannot read the prompt cache \S+: Is a directory\.$")


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sequence(opened: Session) -> Sequence:
    one = opened.new_sequence()
    opened.prefill(one, PROMPT)
    return one


def test_a_destination_that_cannot_be_written_is_said(opened: Session, sequence: Sequence, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name, why in [("none/cache", "No such file or directory"), ("file/cache", "Not a directory"),
                      ("folder", "Is a directory")]:  # fmt: skip
        with pytest.raises(DestinationError, match=f"^Cannot write the prompt cache \\S+{name}: {why}\\.$"):
            opened.save(sequence, tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_half_way_leaves_the_old_file(
    opened: Session, sequence: Sequence, saved: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before, pieces = saved.read_bytes(), list(PromptFile(opened.kv).pieces(sequence, {"tokens": sequence.tokens}))
    passes = iter([iter(pieces), failing(pieces[:3], error)])  # the checksum's, then the file's
    monkeypatch.setattr(PromptFile, "pieces", lambda file, held, header: next(passes))
    opened.decode([sequence], [1])
    kind, match = (DestinationError, "No space left on device") if isinstance(error, OSError) else (type(error), None)
    with pytest.raises(kind, match=match):
        opened.save(sequence, saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["cache"]


def failing(pieces: list[Any], error: BaseException) -> Iterator[Any]:
    yield from pieces
    raise error
