"""GGUF files in ollama's store and on the hub, and their bundles in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import ollama_file
from edgeinfer.converters.hub_files import chosen
from edgeinfer.describe import describe
from edgeinfer.errors import CheckpointError, ModelNotFoundError
from edgeinfer.models import checkpoint_path, resolve
from tests.checkpoints import make_checkpoint
from tests.command_line import edgeinfer
from tests.gguf_files import SIZES, write_gguf
from tests.hub_server import serve
from tests.test_gguf_import import split

ROOT = Path(__file__).resolve().parents[1]
DIGEST = "ab" * 32
LAYER = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}", "size": 1}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of ollama with one model under two names."""
    root = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    (root / "blobs").mkdir(parents=True)
    write_gguf(root / f"blobs/sha256-{DIGEST}", make_checkpoint(tmp_path / "hf", "llama", **SIZES), "Q8_0")
    for name in ("registry.ollama.ai/library/tiny/latest", "registry.ollama.ai/someone/tiny/1b", "hf.co/a/b/Q8_0"):
        path = root / "manifests" / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"schemaVersion": 2, "layers": [{"mediaType": "text/license"}, LAYER]}))
    return root


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "someone/tiny:1b", "hf.co/a/b:Q8_0", "library/tiny"])
def test_a_model_of_ollama_is_used_where_it_lies(store: Path, name: str) -> None:
    blob = store / f"blobs/sha256-{DIGEST}"
    assert ollama_file(name) == checkpoint_path(f"ollama:{name}") == blob
    before = sorted(store.rglob("*"))
    bundle = resolve(f"ollama:{name}")
    assert bundle == resolve(f"ollama:{name}", convert=False) and bundle.parent.name == "bundles"
    with Bundle.open(bundle) as opened:
        assert str(opened.types["embed"]) == "int8g32"
    assert sorted(store.rglob("*")) == before
    assert edgeinfer("plan", f"ollama:{name}", "--json").json["file_types"]["Q8_0"] > 0


def test_names_that_ollama_does_not_have(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (("tiny:7b", r"has not pulled 'tiny:7b' .*nearest: someone/tiny:1b, tiny:latest"),
                          ("tony", "nearest: .*tiny"), ("a/b/c/d/e", "is no name of a model of ollama"),
                          ("../../etc/passwd", "is no name of a model of ollama")):
        with pytest.raises(ModelNotFoundError, match=message):
            resolve(f"ollama:{name}")
    manifest = store / "manifests/registry.ollama.ai/library/tiny/latest"
    for layers, message in (([{"mediaType": "text/license"}], "has no layer with a model"), (None, "has no layer"),
                            ([LAYER | {"digest": "../../x"}], "is damaged: its layer with the model has the digest"),
                            ([LAYER | {"digest": "sha256:" + "0" * 64}], "lacks its file .*; pull it again")):
        manifest.write_text(json.dumps({"layers": layers}))
        with pytest.raises(CheckpointError, match=message):
            resolve("ollama:tiny")
    monkeypatch.setenv("OLLAMA_MODELS", str(store / "none"))
    with pytest.raises(ModelNotFoundError, match="has no models; pull one"):
        resolve("ollama:tiny")


def test_a_bundle_is_made_once_and_again_when_its_file_changes(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tmp_path / "hf", "Q4_0")
    first = resolve(path)
    stamp = (first / "weights.bin").stat().st_mtime_ns
    assert resolve(path) == first and (first / "weights.bin").stat().st_mtime_ns == stamp
    path.unlink()
    write_gguf(path, tmp_path / "hf", "F16")
    second = resolve(path)
    assert second != first and not first.exists()


def test_parts_behind_links_are_found_by_the_names_of_the_links(store: Path, tmp_path: Path) -> None:
    """The hub's cache has links with the parts' names to files that are called by their checksums."""
    parts = split(tmp_path / "m.gguf", tmp_path, tmp_path / "hf")
    other = tmp_path / "mine.gguf"  # the parts lie where it leads to
    other.symlink_to(parts[0])
    assert resolve(other) and describe(other).file_types
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    links = [tmp_path / "snapshot" / part.name for part in parts]
    for i, (part, link) in enumerate(zip(parts, links, strict=True)):
        part.rename(tmp_path / f"blobs/{i}{DIGEST}")
        link.symlink_to(f"../blobs/{i}{DIGEST}")
    bundle = resolve(links[0])
    assert resolve(tmp_path / "m.gguf").joinpath("weights.bin").read_bytes() == (bundle / "weights.bin").read_bytes()
    assert describe(links[0]).weight_bytes == describe(tmp_path / "m.gguf").weight_bytes


def test_one_file_of_a_repository_on_the_hub(tmp_path: Path) -> None:
    """In processes of their own, because the hub's client reads the environment when it is imported."""
    folder = tmp_path / "repo"
    source = make_checkpoint(tmp_path / "hf", "llama", **SIZES)
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        write_gguf(folder / f"tiny-{kind}.gguf", source, kind)
    (folder / "mmproj-tiny-Q8_0.gguf").write_bytes(b"GGUF")

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment.update(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_TELEMETRY="1",
                           NO_PROXY="*", no_proxy="*")
        command = [sys.executable, "-m", "edgeinfer", *arguments]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)

    def converted(name: str, to: str) -> subprocess.CompletedProcess[str]:
        return ran("convert", name, str(tmp_path / to))

    with serve(folder, "owner/tiny-GGUF") as hub:
        done = ran("plan", "hf:owner/tiny-GGUF:q8_0")
        assert "was not downloaded yet, and its plan needs the file's header" in " ".join(done.stderr.split())
        assert not hub.requests
        done = converted("hf:owner/tiny-GGUF:q8_0", "out")
        assert done.returncode == 0, done.stderr
        with Bundle.open(tmp_path / "out") as bundle:
            assert str(bundle.types["embed"]) == "int8g32"
        assert not any("Q4_0.gguf" in request or "mmproj" in request for request in hub.requests)
        done = converted("hf:owner/tiny-GGUF", "other")
        assert "has 2: tiny-Q4_0, tiny-Q8_0; choose one with hf:owner/tiny-GGUF:TYPE" in " ".join(done.stderr.split())
    done = converted("hf:owner/tiny-GGUF:Q8_0", "again")  # the hub is gone, its cache is not
    assert done.returncode == 0 and "is the copy in its cache" in done.stderr
    assert ran("plan", "hf:owner/tiny-GGUF:Q8_0").returncode == 0


def test_choosing_among_names() -> None:
    names = ["a/Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "a/Q4_K_M/m-Q4_K_M-00002-of-00002.gguf", "m.Q8_0.gguf",
             "imatrix.gguf", "m-IQ4_XS.gguf", "README.md", "x-mmproj-f16.gguf"]
    assert chosen(names, "o/r", "Q4_K_M") == names[:2]
    assert chosen(names, "o/r", "q8_0") == ["m.Q8_0.gguf"]
    for kind, message in (("Q4_K", "no model of the type Q4_K: m-Q4_K_M, "), ("Q5_0", "no model of the type Q5_0: ")):
        with pytest.raises(ModelNotFoundError, match=message):
            chosen(names, "o/r", kind)
    with pytest.raises(ModelNotFoundError, match="has no GGUF file with a model"):
        chosen(["config.json", "mmproj-F16.gguf"], "o/r", "F16")
