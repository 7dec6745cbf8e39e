"""The configuration file: its order with flags and variables, `edgeinfer config`, and files that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.command_line import edgeinfer


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "config.toml"
    monkeypatch.setenv("EDGEINFER_CONFIG", str(path))
    return path


def ctx(*arguments: str) -> int:
    return int(edgeinfer("plan", "demo", "--json", *arguments).json["ctx"])


def test_a_flag_goes_before_a_variable_before_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ctx() == 1024
    assert edgeinfer("config", "set", "ctx", 256).out == f"ctx is set in {file}.\n"
    assert ctx() == 256 and "EDGEINFER_CTX" not in os.environ
    monkeypatch.setenv("EDGEINFER_CTX", "128")
    assert ctx() == 128 and ctx("-c", "64") == 64
    report = edgeinfer("config", "--json").json
    assert report == {"path": str(file), "settings": [{"key": "ctx", "value": "128", "origin": "EDGEINFER_CTX"}]}
    monkeypatch.delenv("EDGEINFER_CTX")
    assert edgeinfer("config", "unset", "ctx").code == 0 and ctx() == 1024


def test_comments_and_other_keys_stay(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("# mine\nthreads = 1\nmlock = false\n")
    for key, value in (("threads", 2), ("mlock", "true"), ("kv", "f16"), ("temp", 0)):
        assert edgeinfer("config", "set", key, value).code == 0
    assert file.read_text() == '# mine\nthreads = 2\nmlock = true\nkv = "f16"\ntemp = 0.0\n'
    shown = edgeinfer("config").out
    assert str(file) in shown and "kv" in shown and "Other keys, at their built-in defaults: attention" in shown
    assert edgeinfer("config", "path").out == f"{file}\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tmep = 1", "There is no key 'tmep' in FILE; did you mean temp?"),
        ("zzzzzz = 1", "There is no key 'zzzzzz' in FILE; 'edgeinfer config' lists the keys."),
        ("threads = 'two'", "threads in FILE is 'two'; it must be a whole number."),
        ("threads = 0", "threads in FILE is 0; it must be from 1 to 256."),
        ("mlock = 1", "mlock in FILE is 1; it must be true or false."),
        ("[temp]", "temp in FILE is {}; it must be a number."),
        ("temp =", "The configuration FILE is not valid TOML ("),
    ],
)
def test_a_wrong_file_is_one_sentence(file: Path, text: str, sentence: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    for command in (["plan", "demo"], ["config"]):
        outcome = edgeinfer(*command)
        assert outcome.code == 2 and outcome.sentence.startswith(sentence.replace("FILE", str(file)))


def test_an_empty_variable_hides_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("ctx = 300\n")
    monkeypatch.setenv("EDGEINFER_CTX", "")
    assert ctx() == 300


@pytest.mark.parametrize(("name", "value"), [
    ("budget", "xx"), ("max-kld", "inf"), ("recipe", "a b"), ("sparse", "some"), ("device", "a\x07b")])
def test_a_value_is_checked_where_it_is_set(file: Path, name: str, value: str) -> None:
    done = edgeinfer("config", "set", name, value)
    assert done.code == 2 and name in done.err and not file.exists(), done.err


def test_what_cannot_be_changed_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert edgeinfer("config", "set", "temp", "hot").sentence == "temp is 'hot'; it must be a number."
    assert "did you mean temp?" in edgeinfer("config", "set", "tmp", "1").sentence
    assert "temp is not in" in edgeinfer("config", "unset", "temp").sentence
    assert not file.exists()
    file.parent.mkdir()
    file.write_text("budget = \"\"\"\n4GiB\"\"\"\n")
    assert "is written over several lines" in edgeinfer("config", "unset", "budget").sentence
    monkeypatch.setenv("VISUAL", "false")
    assert edgeinfer("config", "edit").sentence == "The editor 'false' ended with the code 1."
    monkeypatch.setenv("VISUAL", str(file.parent / "no-editor"))
    assert "cannot be started" in edgeinfer("config", "edit").sentence
    monkeypatch.setenv("EDGEINFER_CONFIG", "")
    assert edgeinfer("config", "path").sentence.startswith("EDGEINFER_CONFIG is empty")
    assert edgeinfer("config", "set", "temp", "1").sentence.startswith("EDGEINFER_CONFIG is empty")
