"""GGUF files in ollama's store and on the hub, and their bundles in the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.converters import ollama_file
from edgeinfer.converters.hub.gguf_files import chosen, gguf_type
from edgeinfer.errors import CheckpointError, ModelNotFoundError, UsageError
from edgeinfer.llm import LLM
from edgeinfer.models import Storage, checkpoint_path, resolve
from edgeinfer.models.describe import describe
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import SIZES, split, write_gguf
from tests.helpers.hub_server import serve

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "ab" * 32
WIDE = {**SIZES, "hidden_size": 256}
"""Rows of blocks of 256, for a type that is not held."""
LAYER = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}", "size": 1}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of ollama with one model under two names."""
    root = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(root))
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("edgeinfer.models.stores._said", set())  # the program reports each name once per process
    (root / "blobs").mkdir(parents=True)
    write_gguf(root / f"blobs/sha256-{DIGEST}", make_checkpoint(tmp_path / "hf", "llama", **SIZES), "Q8_0")
    for name in ("registry.ollama.ai/library/tiny/latest", "registry.ollama.ai/someone/tiny/1b", "hf.co/a/b/Q8_0"):
        path = root / "manifests" / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"schemaVersion": 2, "layers": [{"mediaType": "text/license"}, LAYER]}))
    return root


@pytest.mark.slow(keep=2)
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


def test_a_bare_name_is_looked_up_in_the_stores(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    blob = store / f"blobs/sha256-{DIGEST}"
    assert checkpoint_path("tiny") == checkpoint_path("tiny") == blob
    assert capsys.readouterr().err == "edgeinfer: Using ollama's model ollama:tiny.\n"
    folder = tmp_path / ".lmstudio" / "models" / "owner" / "repo"
    folder.mkdir(parents=True)
    (folder / "Small-Q8_0.gguf").write_bytes(blob.read_bytes())
    for name in ("small", "Small-Q8_0"):
        assert checkpoint_path(name) == folder / "Small-Q8_0.gguf"
        assert f"Using LM Studio's model {folder}" in capsys.readouterr().err
    (folder / "Small-Q4_0.gguf").write_bytes(blob.read_bytes())
    with pytest.raises(ModelNotFoundError, match=r"LM Studio has 2 models called 'small': .*; give the path of one\."):
        checkpoint_path("small")
    with pytest.raises(ModelNotFoundError, match=r"Unknown model 'tiny:3b'.*did you mean 'ollama:someone/tiny:1b' or"):
        checkpoint_path("tiny:3b")
    with pytest.raises(ModelNotFoundError, match=r"Unknown model 'tinny'; did you mean 'ollama:someone/tiny:1b' or"):
        checkpoint_path("tinny")
    with pytest.raises(ModelNotFoundError, match="'llama-2-7b' is a built-in shape without weights"):
        checkpoint_path("llama-2-7b")


def test_names_that_ollama_does_not_have(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in (("tiny:7b", r"has not pulled 'tiny:7b' .*nearest: someone/tiny:1b, tiny:latest"),
                          ("tony", "nearest: .*tiny"), ("a/b/c/d/e", "is not the name of an ollama model"),
                          ("../../etc/passwd", "is not the name of an ollama model")):
        with pytest.raises(ModelNotFoundError, match=message):
            resolve(f"ollama:{name}")
    manifest = store / "manifests/registry.ollama.ai/library/tiny/latest"
    for layers, message in (([{"mediaType": "text/license"}], "has no model layer"), (None, "has no model layer"),
                            ([LAYER | {"digest": "../../x"}], "is damaged: its model layer has the digest"),
                            ([LAYER | {"digest": "sha256:" + "0" * 64}], "lacks its file .*; pull it again")):
        manifest.write_text(json.dumps({"layers": layers}))
        with pytest.raises(CheckpointError, match=message):
            resolve("ollama:tiny")
    for root in (str(store / "none"), "~no-such-user/models"):
        monkeypatch.setenv("OLLAMA_MODELS", root)
        with pytest.raises(ModelNotFoundError, match="has no models; pull one"):
            resolve("ollama:tiny")


def test_a_file_of_several_names_is_converted_once(store: Path) -> None:
    bundle = resolve("tiny")
    stamp = (bundle / "weights.bin").stat().st_mtime_ns
    for name in ("ollama:tiny", "ollama:tiny:latest", "ollama:someone/tiny:1b", f"{store}/blobs/sha256-{DIGEST}"):
        assert resolve(name) == bundle and (bundle / "weights.bin").stat().st_mtime_ns == stamp
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_file_of_a_repository_on_the_hub(tmp_path: Path) -> None:
    """In processes of their own, because the hub's client reads the environment when it is imported."""
    folder = tmp_path / "repo"
    source = make_checkpoint(tmp_path / "hf", "llama", **SIZES)
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0", "F16"):
        write_gguf(folder / f"tiny-{kind}.gguf", source, kind)
    (folder / "mmproj-tiny-Q8_0.gguf").write_bytes(b"GGUF")

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment.update(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_TELEMETRY="1",
                           NO_PROXY="*", no_proxy="*")
        command = [sys.executable, "-m", "edgeinfer", *arguments]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)

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
        done = ran("run", "hf:owner/tiny-GGUF", "x", "--json", "-n", "1")  # no type: the best one that fits, said
        said = " ".join(done.stderr.split())
        assert "has 3 types; using Q8_0 (" in said and "the best that fits in " in said, said
        assert "The others are F16, Q4_0: hf:owner/tiny-GGUF:TYPE." in said
        assert not any("Q4_0.gguf" in request or "F16.gguf" in request for request in hub.requests)
        done = ran("run", "hf:owner/tiny-GGUF", "x", "--json", "-n", "1", "--budget", "1MB")
        assert "the smallest: none fits in 1.0 MB of memory" in " ".join(done.stderr.split())
        (folder / "other-Q8_0.gguf").write_bytes((folder / "tiny-Q8_0.gguf").read_bytes())
        done = converted("hf:owner/tiny-GGUF", "other")
        assert "has 4 models: other-Q8_0, tiny-F16, tiny-Q4_0, tiny-Q8_0; choose one with hf:owner/tiny-GGUF:TYPE" in \
            " ".join(done.stderr.split())
    done = converted("hf:owner/tiny-GGUF:Q8_0", "again")  # the hub is gone, its cache is not
    assert done.returncode == 0 and "is the copy in its cache" in done.stderr
    assert ran("plan", "hf:owner/tiny-GGUF:Q8_0").returncode == 0


def test_the_best_type_that_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of types that are held without loss; Q8_0 before floats, of which nobody can tell it apart."""
    gb = 10**9
    sizes = {"m-Q2_K.gguf": 3 * gb, "m-Q4_0.gguf": 4 * gb, "m-Q4_K_M.gguf": 4 * gb + 5, "m-Q8_0.gguf": 8 * gb,
             "m-BF16.gguf": 15 * gb, "m-F16-00001-of-00002.gguf": 8 * gb, "m-F16-00002-of-00002.gguf": 7 * gb,
             "mmproj-F16.gguf": 1, "README.md": 1}

    def taken(room: int | None, anew: bool = False, but: str = "none") -> str:
        return chosen({name: size for name, size in sizes.items() if but not in name}, "o/r", "", room, anew)[0]

    assert taken(None) == taken(10 * gb) == "m-Q8_0.gguf"
    assert taken(20 * gb, but="Q8_0") == "m-F16-00001-of-00002.gguf"
    assert "of which" not in capsys.readouterr().err
    exact = dict.fromkeys(["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16"])
    monkeypatch.setattr("edgeinfer.converters.hub.gguf_files.EXACT", exact)
    assert taken(6 * gb) == "m-Q4_K_M.gguf"
    monkeypatch.setattr("edgeinfer.converters.hub.gguf_files.EXACT", dict.fromkeys(["Q8_0", "F16"]))
    assert taken(6 * gb) == "m-Q8_0.gguf"  # none fits that can be held: the smallest of them
    said = capsys.readouterr().err
    assert "the smallest: none fits in 6.00 GB of memory, of those that can be held without loss" in said
    assert taken(6 * gb, anew=True) == "m-Q4_K_M.gguf" and taken(gb, anew=True) == "m-Q2_K.gguf"


@pytest.mark.parametrize(("name", "kind"), [
    ("m-Q4_K_M.gguf", "Q4_K_M"), ("m.Q8_0.gguf", "Q8_0"), ("m-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"), ("q8-model.gguf", ""),
    ("m-bf16.gguf", "bf16"), ("m-MXFP4_MOE.gguf", "MXFP4_MOE"), ("m-Q4_0-00001-of-00002.gguf", "Q4_0"), ("m.gguf", "")])
def test_the_type_in_a_name(name: str, kind: str) -> None:
    assert gguf_type(name) == kind


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_file_runs_in_another_type_where_that_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **WIDE)
    path = tmp_path / "m.gguf"
    write_gguf(path, source, {"attn_q": "Q3_K", "": "Q8_0"})
    with LLM(path, weights="int8", group_size=64) as llm:
        assert str(llm.session.bundle.types["layers.0.down"]) == "int8g64"
    resolve(path)
    assert "because no type of edgeinfer's holds Q3_K exactly. " in " ".join(capfd.readouterr().err.split())
    bundle = resolve(path, storage=Storage("int8", 64))
    assert bundle != resolve(path, storage=Storage("q4")) == resolve(path, storage=Storage("q4", 32))
    with pytest.raises(UsageError, match="is taken as it is, type by type; for --group-size"):
        resolve(path, storage=Storage(None, 64))
    for asked, message in ((Storage("q4"), "is a bundle with weights in int8, groups of 64, and runs as it is stored, "
                            "not in q4; convert"), (Storage(None, 32), "not in groups of 32;")):
        with pytest.raises(UsageError, match=message):
            resolve(bundle, storage=asked)
    assert resolve(bundle, storage=Storage("int8")) == bundle
    with pytest.raises(UsageError, match="q3"):
        resolve(path, storage=Storage("q3"))
    with pytest.raises(UsageError, match="is a bundle with weights in q4"):
        resolve("demo", storage=Storage("f32"))
    with Bundle.open(resolve(source, storage=Storage("f16"))) as opened:
        assert str(opened.types["layers.0.down"]) == "f16" and opened.header.source == str(source)
    assert resolve(source) != resolve(source, storage=Storage("f16"))


def test_what_a_conversion_costs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    source = make_checkpoint(tmp_path / "hf", "llama", **WIDE)
    path = tmp_path / "m.gguf"
    write_gguf(path, source, {"attn_q": "Q3_K", "": "Q8_0"}, {"general.name": "Tiny"})
    bundle = resolve(path, storage=Storage("q4"))
    said = " ".join(capfd.readouterr().err.split())
    size = re.search(r"m\.gguf \([0-9]+ kB\) to a bundle of ([0-9]+) kB in .*; this takes about 1 s\.", said)
    assert size, said
    on_disk = sum(file.stat().st_size for file in bundle.iterdir())
    assert on_disk <= 1000 * int(size[1]) <= 1.5 * on_disk
    assert "holds Q3_K exactly. The file's types typically lose (Q3_K 2.3e-02, Q8_0 3.0e-05)" in said
    with Bundle.open(bundle) as opened:
        assert opened.header.source == f"Tiny, from {path}"
    assert f"Tiny, from {path}" in edgeinfer("cache", "list").out
    (entry,) = edgeinfer("cache", "list", "--json").json["bundles"]
    assert entry["source"] == f"Tiny, from {path}"


def test_selecting_among_names() -> None:
    names = dict.fromkeys(["a/Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "a/Q4_K_M/m-Q4_K_M-00002-of-00002.gguf",
                           "m.Q8_0.gguf", "imatrix.gguf", "m-IQ4_XS.gguf", "README.md", "x-mmproj-f16.gguf"], 1)
    assert chosen(names, "o/r", "Q4_K_M") == list(names)[:2]
    assert chosen(names, "o/r", "q8_0") == ["m.Q8_0.gguf"]
    for kind, message in (("Q4_K", "no model of the type Q4_K: m-Q4_K_M, "), ("Q5_0", "no model of the type Q5_0: ")):
        with pytest.raises(ModelNotFoundError, match=message):
            chosen(names, "o/r", kind)
    with pytest.raises(ModelNotFoundError, match="has no GGUF file with a model"):
        chosen({"config.json": 1, "mmproj-F16.gguf": 1}, "o/r", "F16")


@pytest.mark.parametrize("kind", ["Q4_K_M", ""])
def test_a_file_of_the_hub_without_a_connection(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = edgeinfer("run", f"hf:owner/no-such-repository:{kind}".rstrip(":"), "x")
    assert done.code == 1 and "is not in the hub's cache, and HF_HUB_OFFLINE forbids access to the hub" in done.err


def test_info_of_a_file_says_what_its_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    source = make_checkpoint(tmp_path / "hf", "llama", **WIDE)
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, source, {"attn_q": "Q3_K", "": "Q8_0"}, {"general.name": "Tiny"})
    header = edgeinfer("info", path, "--json", "--tensors").json["header"]
    assert header["parameters"] == sum(tensor.size for tensor in tensors.values()) and header["runs"]
    assert header["name"] == "Tiny"
    assert {one["type"]: one["tensors"] for one in header["types"]} == {"Q8_0": 14, "Q3_K": 2, "F32": 5}
    assert sum(one["bytes"] for one in header["types"]) == sum(one["bytes"] for one in header["tensors"])
    assert header["fields"]["embedding_length"] == WIDE["hidden_size"] and header["tokenizer"]["tokens"] is None
    text = edgeinfer("info", path).out
    assert "Q3_K: 2 tensors" in text and "runs       yes, in " in text and "llama, " in text
    path = tmp_path / "no.gguf"
    write_gguf(path, source, {"attn_q": "F64", "": "Q8_0"})
    assert "runs no: " in (text := " ".join(edgeinfer("info", path).out.split())) and "(2 of F64)" in text
    write_gguf(path, source, "Q8_0")
    done = edgeinfer("info", path, "--program")
    assert done.code == 2 and "--program needs a bundle" in done.err
    resolve(path)
    assert edgeinfer("info", path, "--json").json["quantisation"]["weights"] == "int8"
    path.write_text("no")
    assert "is not a GGUF file" in edgeinfer("info", path).err


@pytest.mark.skipif(sys.platform == "win32", reason="no fifos there")
def test_sentences_for_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.gguf")
    for command in (["run", "x"], ["info"], ["verify"]):
        assert "f.gguf is a fifo, not a plain file; MODEL is" in edgeinfer(
            command[0], tmp_path / "f.gguf", *command[1:]).err
    refused = edgeinfer("convert", tmp_path / "f.gguf", tmp_path / "o").err
    assert "f.gguf is not a plain file; give the directory" in refused
    assert "demo is a bundle already" in edgeinfer("convert", "demo", tmp_path / "o").err
