"""`edgeinfer info --environment`: complete, without a model, and without names of user and host."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from edgeinfer import __version__, kernels
from edgeinfer.cli.reports import environment
from tests.helpers.command_line import ROOT, edgeinfer


def test_it_describes_installation_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels" / "one").mkdir(parents=True)
    (tmp_path / "kernels" / "one" / "object").write_bytes(b"12345")
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    [(name, found)] = edgeinfer("info", "--environment", "--json").json.items()
    assert name == "environment" and found["edgeinfer"]["version"] == __version__
    assert found["packages"]["numpy"] == metadata.version("numpy") and set(found["packages"]) > {"numba", "llvmlite"}
    assert found["isa"] == {"chosen": kernels.choose().name, "available": [isa.name for isa in kernels.available()],
                            "refused": None}
    assert found["cores"]["logical"] == os.cpu_count()
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]
    assert found["cache"]["state"] == "writable" and found["cache"]["bytes"] == 5
    assert found["cache"]["entries"]["kernels"] == 1 and found["cache"]["entries"]["bundles"] == 0
    assert {"name": "EDGEINFER_CACHE", "value": found["cache"]["directory"], "origin": "environment"} in \
        found["variables"]
    shown = edgeinfer("info", "--environment").out
    assert found["processor"] in shown and "5 B, 1 kernels" in shown and "EDGEINFER_CACHE" in shown


def test_a_value_of_the_configuration_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("threads = 2\n")
    monkeypatch.setenv("EDGEINFER_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("EDGEINFER_THREADS", raising=False)
    variables = edgeinfer("info", "--environment", "--json").json["environment"]["variables"]
    assert {"name": "EDGEINFER_THREADS", "value": "2", "origin": "file"} in variables


def test_a_wrong_instruction_set_is_reported_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_ISA", "mmx")
    done = edgeinfer("info", "--environment", "--json")
    assert done.code == 0
    isa = done.json["environment"]["isa"]
    assert isa["chosen"] is None and "'mmx' is not available here" in isa["refused"]
    assert "'mmx' is not available here" in edgeinfer("info", "--environment").out


@pytest.mark.parametrize(("path", "state"), [("absent", "absent"), ("file", "not a directory")])
def test_the_state_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, state: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / path))
    assert edgeinfer("info", "--environment", "--json").json["environment"]["cache"]["state"] == state


def test_names_of_user_and_host_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "kitchen.example.org")
    monkeypatch.setenv("EDGEINFER_CONFIG", "")
    monkeypatch.setenv("EDGEINFER_CACHE", "/scratch/alice/kitchen/cache")
    monkeypatch.setattr("platform.platform", lambda: "Linux-6.1-kitchen.example.org")
    out = edgeinfer("info", "--environment", "--json").out
    assert "alice" not in out and "kitchen" not in out
    assert "/scratch/<user>/<host>/cache" in out and "Linux-6.1-<host>" in out
    assert environment.anonymous("/home/alice/models of malice") == "~/models of malice"


def test_the_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: the commit is unknown")
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert head.startswith((environment.commit() or "none").removesuffix("-dirty"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert environment.commit() is None


def test_the_commit_that_pip_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    folder = tmp_path / "edgeinfer-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: edgeinfer\n")
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(folder))
    assert environment.commit() is None
    (folder / "direct_url.json").write_text('{"vcs_info": {"commit_id": "0123456789abcdef0123456789abcdef01234567"}}')
    assert environment.commit() == "0123456789ab"


@pytest.mark.parametrize(("given", "sentence"), [
    (["info"], "Name a model, or give --environment."),
    (["info", "demo", "--environment"], "--environment takes no MODEL; omit 'demo'."),
])
def test_a_model_or_the_environment(given: list[str], sentence: str) -> None:
    done = edgeinfer(*given)
    assert done.code == 2 and done.sentence == sentence
