"""edgeinfer pull, rm and ps, and completion by shells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.cli.commands.local import arguments_of
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import PYTHON, edgeinfer, environment, process
from tests.helpers.hub_server import serve


@pytest.mark.slow
def test_a_model_is_pulled_used_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    make_checkpoint(tmp_path / "tiny")
    with serve(tmp_path / "tiny", "someone/tiny") as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0",
                     "EDGEINFER_CACHE": str(cache)}
        done = process("models", "pull", "someone/tiny", "--json", **variables)
        assert done.code == 0, done.err
        assert Path(done.json["path"]).parent == cache / "bundles" and done.json["bytes"] > 1000
        asked = len(hub.requests)
        again = process("pull", "someone/tiny", **variables)
        assert again.out.startswith("someone/tiny is ready (") and len(hub.requests) == asked
        missing = process("pull", "someone/none", **variables)
        assert missing.code == 1 and "The hub has no model someone/none" in missing.err
    monkeypatch.setenv("EDGEINFER_CACHE", str(cache))
    refused = edgeinfer("rm", "someone/tiny")
    assert refused.code == 2 and refused.sentence.endswith("Add --yes, because there is no terminal to confirm on.")
    assert edgeinfer("rm", "someone/tiny", "-y", "--json").json["freed_bytes"] > 1000
    assert list((cache / "bundles").glob("[!.]*")) == []
    gone = edgeinfer("rm", "someone/tiny", "-y")
    assert gone.code == 2 and "'someone/tiny' is not a model that edgeinfer has converted" in gone.sentence


def test_what_edgeinfer_has_not_made_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeinfer.models import demo_path

    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    assert edgeinfer("rm", "demo", "-y").sentence == "demo is part of the package and cannot be deleted."
    outcome = edgeinfer("rm", demo_path(), "-y")
    assert outcome.code == 2 and "it deletes no others" in outcome.sentence
    assert demo_path().is_dir()


def test_processes_that_run_are_listed() -> None:
    command = [*PYTHON, "run", "demo", "-", "-n", "4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as child:
        assert child.stdin
        found = [one for one in edgeinfer("ps", "--json").json["processes"] if one["pid"] == child.pid]
        assert str(child.pid) in edgeinfer("ps").out
        child.stdin.write(b"Once")
        child.stdin.close()
        assert child.wait(600) == 0
    assert [(one["command"], one["model"]) for one in found] == [("run", "demo")] and found[0]["rss_bytes"] > 0


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["/x/python", "-m", "edgeinfer", "run", "demo"], ["run", "demo"]),
        (["/x/python", "/x/bin/edgeinfer", "bench"], ["bench"]),
        (["vim", "edgeinfer.py"], []),
        (["git", "clone", "edgeinfer", "x"], []),
        ([], []),
    ],
)
def test_a_command_line_is_ours_or_not(command: list[str], arguments: list[str]) -> None:
    assert arguments_of(command) == arguments


@pytest.mark.parametrize(("shell", "words"), [
    ("bash", {"COMP_WORDS": "edgeinfer mo", "COMP_CWORD": "1"}),
    ("zsh", {"_TYPER_COMPLETE_ARGS": "edgeinfer mo"}),
])
def test_shells_complete_commands(shell: str, words: dict[str, str]) -> None:
    variables = environment(**words, _EDGEINFER_COMPLETE=f"complete_{shell}")
    done = subprocess.run([sys.executable, "-m", "edgeinfer"], env=variables, capture_output=True, text=True)
    assert "models" in done.stdout and "run" not in done.stdout.replace("runs", "").replace("which run", ""), done
