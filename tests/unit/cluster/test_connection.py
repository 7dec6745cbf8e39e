"""Sentences for Ray's errors, addresses, and the variables that it reads."""

from __future__ import annotations

import os

import pytest

from edgeinfer.cluster.connection import LOCAL, environment, first_sentence, split_address
from edgeinfer.errors import UsageError


def test_first_sentences() -> None:
    for text, sentence in (
            ("", "RuntimeError"), ("It failed.\nlog\nlog", "It failed"), ("\n  No such file:\n  a", "No such file"),
            ("Version mismatch: The cluster was started with:\n    Ray: 2.60.0\nThis process with:\n    Ray: 2.59.0\n",
             "Version mismatch: The cluster was started with: Ray: 2.60.0 This process with: Ray: 2.59.0")):
        assert first_sentence(RuntimeError(text)) == sentence


def test_addresses() -> None:
    assert split_address("board:6379") == ("board", 6379) and split_address("[fd00::2]:1") == ("fd00::2", 1)
    for wrong in ("board", ":6379", "board:", "board:0", "board:65536", "board:x", "board:²"):
        with pytest.raises(UsageError, match=f"--ray is '{wrong}'; write it as HOST:PORT, such as .*, or local"):
            split_address(wrong)


def test_tokens_are_required_and_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with environment(LOCAL):
        assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
        assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    with environment("board:6379"):
        assert os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in os.environ
        assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
