"""Links, pipes and devices in a checkpoint: nothing from elsewhere gets into a bundle, and nothing is waited for."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.converters.checkpoint.safe_path import checkpoint_file
from edgeinfer.errors import CheckpointError
from tests.helpers.checkpoints import make_checkpoint, refused

if sys.platform == "win32":
    pytest.skip("making links needs rights there", allow_module_level=True)

COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "LICENSE",
          "LICENSE.txt", "README.md", "chat_template.jinja", "chat_template.json", "generation_config.json",
          "config.json", "vocab.json", "merges.txt", "tokenizer.model", "model.safetensors.index.json")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "hf")


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elsewhere") / "secret"
    path.write_text("secret")
    return path


def put(path: Path, target: str | Path) -> None:
    """Make a link where there may be a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.slow(keep=20)
@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("way", ["absolute", "relative", "through a folder", "through a link"])
def test_a_link_out_of_the_checkpoint_is_refused(source: Path, secret: Path, name: str, way: str) -> None:
    target: str | Path = secret
    if way == "relative":
        target = os.path.relpath(secret, source)
    elif way == "through a folder":
        put(source / "folder", secret.parent)
        target = "folder/secret"
    elif way == "through a link":
        put(source / "other", secret)
        target = "other"
    put(source / name, target)
    assert refused(source) == (
        f"{name} is a link to {secret}, which lies outside the checkpoint; if it belongs there, copy the file itself."
    )


def test_links_within_the_checkpoint_and_hard_links(source: Path, secret: Path) -> None:
    (source / "texts").mkdir()
    for name in ("tokenizer.json", "config.json"):
        (source / name).rename(source / "texts" / name)
        (source / name).symlink_to(f"texts/{name}")
    os.link(secret, source / "LICENSE")
    convert(source, source.parent / "bundle")
    assert (source.parent / "bundle" / "LICENSE").read_text() == "secret"
    assert not (source.parent / "bundle" / "tokenizer.json").is_symlink()


def test_the_checkpoint_itself_may_be_reached_by_a_link(source: Path) -> None:
    (source.parent / "link").symlink_to(source)
    convert(source.parent / "link", source.parent / "bundle")
    Bundle.open(source.parent / "bundle").verify()


def test_weights_may_lie_on_another_disk(source: Path, secret: Path) -> None:
    file = source / "model.safetensors"
    shutil.move(file, secret.parent / "large.safetensors")
    file.symlink_to(secret.parent / "large.safetensors")
    convert(source, source.parent / "bundle")
    put(file, secret)
    (source.parent / "bundle").rename(source / "made")
    assert refused(source).startswith("Cannot read model.safetensors: its header")  # nothing but safetensors is read


def hub_cache(source: Path, shared: bool) -> Path:
    """The checkpoint as the hub's client stores it: links to blobs, which may be links to blobs of all models."""
    cache = source.parent / "hub"
    repository = cache / "models--some--model"
    snapshot, blobs, common = repository / "snapshots" / "0123", repository / "blobs", cache / "blobs" / "ab"
    for folder in (snapshot, blobs, common):
        folder.mkdir(parents=True)
    for i, path in enumerate(sorted(source.iterdir())):
        shutil.move(path, (common if shared else blobs) / f"ab{i}")
        if shared:
            (blobs / f"ab{i}").symlink_to(f"../../blobs/ab/ab{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/ab{i}")
    source.rmdir()
    return snapshot


@pytest.mark.parametrize("shared", [False, True])
def test_the_hubs_cache_is_made_of_links(source: Path, secret: Path, shared: bool) -> None:
    snapshot = hub_cache(source, shared)
    convert(snapshot, source.parent / "bundle")
    shutil.rmtree(source.parent / "bundle")
    put(snapshot / "LICENSE", secret)
    with pytest.raises(CheckpointError, match=r"LICENSE is a link to .*secret, which lies outside the checkpoint"):
        convert(snapshot, source.parent / "bundle")
    other = snapshot.parents[2] / "models--some--other" / "blobs"
    other.mkdir(parents=True)
    shutil.copy(secret, other)
    put(snapshot / "LICENSE", other / "secret")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        convert(snapshot, source.parent / "bundle")


def test_blobs_that_are_a_link_lead_nowhere_else(source: Path, secret: Path) -> None:
    snapshot = hub_cache(source, False)
    blobs = snapshot.parents[1] / "blobs"
    shutil.move(blobs, secret.parent / "blobs")
    blobs.symlink_to(secret.parent / "blobs")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to .*, which lies outside the checkpoint"):
        convert(snapshot, source.parent / "bundle")


@pytest.mark.parametrize("name", [*COPIED, "model.safetensors"])
def test_pipes_and_sockets_are_refused(source: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    says = "is a pipe instead of a plain file; remove it, or put the checkpoint's file there."
    assert refused(source) == f"{name} {says}"
    (source / name).unlink()
    monkeypatch.chdir(source)  # the path of a socket is bounded
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        assert f"{name} is a socket instead of a plain file" in refused(source)


@pytest.mark.parametrize("name", ["LICENSE", "config.json", "model.safetensors", "tokenizer.json"])
def test_devices_are_refused(source: Path, name: str) -> None:
    put(source / name, "/dev/zero")
    assert f"{name} is a device instead of a plain file" in refused(source)


def test_a_pipe_among_the_shards(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", shards=2)
    name = "model-00002-of-00002.safetensors"
    (source / name).unlink()
    assert "names the file model-00002" in refused(source)
    os.mkfifo(source / name)
    assert f"{name} is a pipe" in refused(source)


@pytest.mark.parametrize(("target", "why"), [("absent", "No such file"), ("config.json", "")])
def test_links_that_lead_nowhere(source: Path, target: str, why: str) -> None:
    put(source / "config.json", target)
    text = refused(source)
    assert text.startswith(f"Cannot read config.json: {why}") and text.endswith("; copy the file again.")


def test_folders_named_as_a_licence_are_passed_over(source: Path) -> None:
    (source / "LICENSES").mkdir()
    convert(source, source.parent / "bundle")
    with pytest.raises(CheckpointError, match="LICENSES is a directory instead of a plain file"):
        checkpoint_file(source, "LICENSES")
