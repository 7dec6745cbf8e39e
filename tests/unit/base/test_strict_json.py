"""Untrusted JSON: invalid texts, and nesting beyond the limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.base.strict_json import MAX_DEPTH, parse_json
from edgeinfer.bundle import Bundle
from edgeinfer.converters import Checkpoint
from edgeinfer.devices import load_profile
from edgeinfer.errors import EdgeInferError
from edgeinfer.text import Tokenizer
from tests.helpers.bundles import alter_header, write_bundle
from tests.helpers.checkpoints import make_checkpoint


def nested(depth: int) -> str:
    """Lists and objects in turn, so many levels."""
    return '[{"a": ' * (depth // 2) + "[1]" * (depth % 2) + "0" * (1 - depth % 2) + "}]" * (depth // 2)


@pytest.mark.parametrize("depth", [1, 2, 9, MAX_DEPTH - 1, MAX_DEPTH])
def test_what_is_meant_is_read(depth: int) -> None:
    assert parse_json(nested(depth)) == json.loads(nested(depth))


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 300, 1000, 100_000])
def test_deeper_trees_are_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=r"^it nests deeper than 64 levels$"):
        parse_json(nested(depth).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[1,]", b"1" * 5000])
def test_what_is_no_json(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"\uDFFF": 1}', r'["\ud83e\ud83e\udd8a"]'])
def test_half_a_pair_of_surrogates_is_no_text(text: str) -> None:
    with pytest.raises(ValueError, match="one half of a pair of surrogates"):
        parse_json(text)
    assert parse_json(r'"\ud83e\udd8a"') == "\U0001f98a"


def test_a_strict_reading() -> None:
    assert parse_json('{"a": 1, "a": 2, "b": NaN}')["a"] == 2
    for text in ('{"a": 1, "a": 2}', "[NaN]", "[-Infinity]"):
        with pytest.raises(ValueError):
            parse_json(text, unique=True)


def test_every_reader_refuses_deep_files(tmp_path: Path) -> None:
    deep = json.loads(nested(300))
    checkpoint = make_checkpoint(tmp_path / "hf")
    write_bundle(tmp_path / "bundle")
    alter_header(tmp_path / "bundle", lambda data: data["config"].update(rope=deep))
    (checkpoint / "tokenizer_config.json").write_text(f'{{"eos_token": {nested(300)}}}')
    config = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(f'{config[:-1]}, "more": {nested(300)}}}')
    (tmp_path / "profile.toml").write_text("name = " + "[" * 300 + "]" * 300)
    for read, path in ((Checkpoint.open, checkpoint), (Bundle.open, tmp_path / "bundle"), (Tokenizer.open, checkpoint),
                       (load_profile, tmp_path / "profile.toml")):
        with pytest.raises(EdgeInferError, match="nests deeper than 64 levels"):
            read(path)
