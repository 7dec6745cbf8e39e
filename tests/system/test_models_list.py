"""`edgeinfer models`: made-up stores of every program, with whatever can be wrong in them."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.converters import convert
from edgeinfer.converters.gguf.file import read_headers
from edgeinfer.converters.gguf.header import PassedOver
from edgeinfer.converters.stores.find import llama_cpp_folder, lm_studio_folders
from edgeinfer.converters.stores.ollama import ADAPTER_LAYER
from edgeinfer.errors import CheckpointError
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.helpers.sessions import TINY, write_model
from tests.system.test_gguf_header import header
from tests.system.test_gguf_stores import DIGEST, LAYER

linked = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without models, whose stores are all below one folder."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "APPDATA", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EDGEINFER_CACHE", str(home / "edgeinfer"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr("edgeinfer.converters.stores.ollama.SERVICE", home / "service")
    return home


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "hf", "llama", **SIZES)


def listed(*arguments: object) -> list[dict[str, Any]]:
    done = edgeinfer("models", *arguments, "--json")
    assert done.code == 0, done.err
    return list(done.json["models"])


def by_name(*arguments: object) -> dict[str, dict[str, Any]]:
    return {model["name"]: model for model in listed(*arguments)}


def hub_file(home: Path, repo_id: str, name: str, commit: str = "c0ffee") -> Path:
    path = home / "hub" / f"models--{repo_id.replace('/', '--')}" / "snapshots" / commit / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_every_store_is_found_under_the_name_to_type(home: Path, source: Path) -> None:
    convert(source, home / "edgeinfer/bundles/mine")
    blob = home / f".ollama/models/blobs/sha256-{DIGEST}"
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/1b"
    for path in (blob, manifest, home / ".lmstudio/models/some/one/a.gguf", home / ".cache/llama.cpp/b.gguf"):
        path.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"layers": [LAYER]}))
    write_gguf(blob, source, "Q8_0")
    for path in (home / ".lmstudio/models/some/one/a.gguf", home / ".cache/llama.cpp/b.gguf",
                 hub_file(home, "o/r-GGUF", "r-Q4_0.gguf"), hub_file(home, "o/r-GGUF", "r.Q8_0.gguf")):
        write_gguf(path, source, "Q4_0" if "Q4_0" in path.name else "Q8_0")
    for file in source.iterdir():
        hub_file(home, "o/hf", file.name).write_bytes(file.read_bytes())
    before = sorted((path, path.stat().st_mtime_ns) for path in home.rglob("*"))
    found = by_name()
    want = {"demo": "edgeinfer", str(home / "edgeinfer/bundles/mine"): "edgeinfer", "ollama:tiny:1b": "ollama",
            str(home / ".lmstudio/models/some/one/a.gguf"): "lmstudio", str(home / ".cache/llama.cpp/b.gguf"):
            "llama.cpp", "hf:o/r-GGUF:Q4_0": "hub", "hf:o/r-GGUF:Q8_0": "hub", "o/hf": "hub"}
    assert {name: model["store"] for name, model in found.items()} == want
    assert all(model["runs"] and model["fits"] and not model["reason"] for model in found.values())
    assert all(model["planned_bytes"] > model["bytes"] > 0 for model in found.values())
    assert found["ollama:tiny:1b"]["bytes"] == blob.stat().st_size and found["o/hf"]["format"] == "checkpoint"
    assert found[str(home / "edgeinfer/bundles/mine")]["source"] == "hf"
    assert sorted((path, path.stat().st_mtime_ns) for path in home.rglob("*")) == before, "something was written"
    plan = edgeinfer("plan", "ollama:tiny:1b", "--json").json
    assert found["ollama:tiny:1b"]["planned_bytes"] == plan["total_bytes"]
    table = edgeinfer("models")
    assert max(map(len, table.out.splitlines())) <= max(80, max(map(len, found)) + 2)
    assert all(name in table.out for name in found) and "8 models, all of which run and fit" in table.out


@pytest.mark.slow
def test_what_does_not_run_says_what_run_would(home: Path, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_gguf(folder / "pre.gguf", source, "Q8_0", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "lama-bpe"})
    wide = make_checkpoint(tmp_path / "wide", "llama", **{**SIZES, "hidden_size": 256})
    write_gguf(folder / "type.gguf", wide, {"attn_q": "F64", "": "Q8_0"})
    (folder / "arch.gguf").write_bytes(header({"general.architecture": "lama"}, {"a": (32,)}) + bytes(128))
    for name, fields in (("mmproj.gguf", {"general.architecture": "clip"}),
                         ("imatrix.gguf", {"general.architecture": "", "imatrix.chunk_count": 1}),
                         ("lora.gguf", {"general.architecture": "llama", "general.type": "adapter"})):
        (folder / name).write_bytes(header(fields, {"a": (32,)}))
    (folder / "text.gguf").write_text("no")
    (folder / "old.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    whole = folder / "cut.gguf"
    write_gguf(whole, source, "Q8_0")
    whole.write_bytes(whole.read_bytes()[:-64])
    (folder / "half.gguf.part").write_bytes(b"GGUF")
    found = {Path(name).name: model for name, model in by_name(folder, "--only").items()}
    for name, reason in (("pre.gguf", "the pre-tokenizer 'lama-bpe'"), ("arch.gguf", "of architecture 'lama'"),
                         ("cut.gguf", "is cut short"), ("text.gguf", "is not a GGUF file"),
                         ("old.gguf", "GGUF version 1"),
                         ("half.gguf.part", "The download of half.gguf is not complete"),
                         ("type.gguf", r"types that weights do not have (2 of F64)")):
        assert not found[name]["runs"] and reason in found[name]["reason"], found[name]
        if name.endswith(".gguf"):
            error = edgeinfer("run", folder / name, "x").err
            assert " ".join(error.split()) == f"edgeinfer: {found[name]['reason']}"
    kinds = {name: found[name]["kind"] for name in ("mmproj.gguf", "imatrix.gguf", "lora.gguf", "pre.gguf")}
    assert kinds == {"mmproj.gguf": "the image encoder of a vision model", "imatrix.gguf": "an importance matrix",
                     "lora.gguf": "an adapter", "pre.gguf": "model"}
    table = edgeinfer("models", folder, "--only").out
    assert "the file is an importance matrix, not a language model." in table
    assert all(len(line) <= 80 or str(folder) in line for line in table.splitlines())
    assert "6 models, of which 0 run" in table


def denied(path: object) -> os.stat_result:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@linked
def test_links_fifos_and_folders_that_cannot_be_read(
    home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    (folder / "a/b").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    write_gguf(folder / "a/m.gguf", source, "Q8_0")
    (folder / "a/b/up").symlink_to(folder)  # a circle of folders
    (folder / "again.gguf").symlink_to(folder / "a/m.gguf")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    (folder / "gone.gguf").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "is.gguf").mkdir()
    write_gguf(tmp_path / "outside" / "o.gguf", source, "Q8_0")
    (folder / "out").symlink_to(tmp_path / "outside")  # not followed, as none to / is
    found = {Path(name).name: model["reason"] for name, model in by_name(folder, "--only").items()}
    assert found.pop("again.gguf") == "" and "m.gguf" not in found, "one file under two names"
    assert "is a fifo, not a plain file" in found.pop("pipe.gguf") and "is not there" in found.pop("gone.gguf")
    assert "is a folder, not a plain file" in found.pop("is.gguf") and "Cannot read" in found.pop("loop.gguf")
    assert not found
    plain = os.stat
    with monkeypatch.context() as patch:  # as a folder that this user may not look into
        patch.setattr(os, "stat", lambda path, *more, **options: denied(path) if str(path).endswith("a/b") else plain(
            path, *more, **options))
        assert "Permission denied" in str(listed(folder, "--only"))
    if os.geteuid():  # root may read everything
        (folder / "a").chmod(0)
        assert "Permission denied" in str(listed(folder, "--only"))
        (folder / "a").chmod(0o700)
    done = edgeinfer("models", folder / "a/m.gguf")
    assert done.code == 2 and "is not a folder" in done.err
    assert edgeinfer("models", "--only").code == 2


def test_stores_that_are_damaged(home: Path, source: Path) -> None:
    manifests = home / ".ollama/models/manifests/registry.ollama.ai/library"
    adapter = {"mediaType": ADAPTER_LAYER}
    for name, layers in (("broken", None), ("cloud", []), ("gone", [LAYER]), ("lora", [LAYER, adapter])):
        (manifests / name).mkdir(parents=True)
        (manifests / name / "latest").write_text("{" if layers is None else json.dumps({"layers": layers}))
    blobs = home / ".ollama/models/blobs"
    blobs.mkdir()
    (blobs / "sha256-1-partial").write_bytes(b"GGUF")
    write_gguf(hub_file(home, "o/one", "one-Q8_0.gguf"), source, "Q8_0")
    incomplete = home / "hub/models--o--half/blobs/x.incomplete"
    incomplete.parent.mkdir(parents=True)
    incomplete.write_bytes(b"1234")
    hub_file(home, "o/pickle", "config.json").write_bytes((source / "config.json").read_bytes())
    hub_file(home, "o/pickle", "pytorch_model.bin").write_bytes(b"1")
    hub_file(home, "o/planned", "config.json").write_bytes((source / "config.json").read_bytes())
    hub_file(home, "o/lacks", "config.json").write_bytes((source / "config.json").read_bytes())
    hub_file(home, "o/lacks", "model-00001-of-00002.safetensors").write_bytes(b"1")
    found = by_name()
    for name, reason in (("ollama:broken:latest", "JSON"), ("ollama:cloud:latest", "has no model layer"),
                         ("ollama:gone:latest", "lacks its file"), ("ollama:lora:latest", "has an adapter"),
                         (str(blobs / "sha256-1-partial"), "not complete"), ("o/half", "is not complete"),
                         ("o/pickle", "only as a pickle"), ("o/lacks", "has no weights")):
        assert not found[name]["runs"] and reason in found[name]["reason"], (name, found[name])
    assert found["hf:o/one:Q8_0"]["runs"] and "o/planned" not in found and found["o/half"]["bytes"] == 4


def test_split_models_are_one(home: Path, tmp_path: Path, source: Path) -> None:
    from tests.helpers.gguf_files import split

    write_gguf(tmp_path / "whole.gguf", source, "Q8_0")
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = split(tmp_path / "whole.gguf", folder, source)
    (model,) = listed(folder, "--only")
    assert model["runs"] and model["name"] == str(parts[0])
    assert model["bytes"] == sum(part.stat().st_size for part in parts)
    parts[1].unlink()
    (model,) = listed(folder, "--only")
    assert not model["runs"] and f"{parts[1]} is missing" in model["reason"]
    parts[0].unlink()
    (model,) = listed(folder, "--only")
    assert not model["runs"] and "give the first" in model["reason"]


def test_where_lm_studio_and_llama_cpp_keep_their_models(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lm_studio_folders() == []
    folders = [home / name for name in ("moved/models", ".lmstudio/models", ".cache/lm-studio/models", "disk")]
    for folder in folders:
        folder.mkdir(parents=True)
    (home / ".lmstudio-home-pointer").write_text(f"{home / 'moved'}\n")
    assert lm_studio_folders() == folders[:3]
    for system, place in (("linux", ".config"), ("darwin", "Library/Application Support"),
                          ("win32", "AppData/Roaming")):
        monkeypatch.setattr("edgeinfer.converters.stores.find.sys.platform", system)
        settings = home / place / "LM Studio/settings.json"
        settings.parent.mkdir(parents=True)
        settings.write_text(json.dumps({"downloadsFolder": str(folders[3])}))
        assert lm_studio_folders() == [folders[3], *folders[:3]]
        for text in ("{", "[]", '{"downloadsFolder": 1}', '{"downloadsFolder": "a\\u0000b"}', "[" * 100_000):
            settings.write_text(text)
            assert lm_studio_folders() == folders[:3]
    for system, folder in (("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "AppData/Local")):
        monkeypatch.setattr("edgeinfer.converters.stores.find.sys.platform", system)
        assert llama_cpp_folder() == home / folder / "llama.cpp"
    monkeypatch.setenv("LLAMA_CACHE", str(home / "elsewhere"))
    assert llama_cpp_folder() == home / "elsewhere"


def test_the_store_of_ollamas_service(home: Path, source: Path) -> None:
    manifest = home / "service/manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    (home / "service/blobs").mkdir()
    manifest.write_text(json.dumps({"layers": [LAYER]}))
    write_gguf(home / f"service/blobs/sha256-{DIGEST}", source, "Q8_0")
    assert by_name()["ollama:tiny:latest"]["runs"]


def test_the_same_vocabulary_is_passed_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another one that begins alike is not taken for it."""
    words = [f"token number {i}" for i in range(5000)]

    def fields(tokens: list[str]) -> dict[str, Any]:
        return {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens, "general.name": "behind"}

    middle = [*words[:2000], "short", *words[2001:]]  # begins and ends as the others do
    for name, tokens in (("a", words), ("b", words), ("c", [*words[:-1], "x"]), ("d", [*words[:-2], "yy", "z" * 40]),
                         ("m", middle), ("n", [*words[:2000], "token x000x 2000", *words[2001:]])):
        (tmp_path / name).write_bytes(header(fields(tokens), {"t": (32,)}))
    passed = PassedOver()
    for name in "abcdmnbm":
        (found,) = read_headers(tmp_path / name, passed)
        (whole,) = read_headers(tmp_path / name)
        assert found.fields["tokenizer.ggml.tokens"] == range(5000) and found.fields["general.name"] == "behind"
        assert (found.data, found.tensors) == (whole.data, whole.tensors)
    hostile = header(fields([*words[:2000], "\0" * 100, *words[2001:]]), {"t": (32,)})  # a place that misleads
    end = (tmp_path / "a").read_bytes()
    place = end.index(struct.pack("<Q", 12) + b"general.name")
    hostile = hostile[:place - 1024] + end[place - 1024 : place] + hostile[place:]
    (tmp_path / "h").write_bytes(hostile)
    with pytest.raises(CheckpointError, match=r"cut short|damaged"):
        read_headers(tmp_path / "h", passed)
    data = (tmp_path / "a").read_bytes()
    for end in (200, 3000, 60_000, len(data) - 600):
        (tmp_path / "e").write_bytes(data[:end])
        with pytest.raises(Exception, match="is cut short"):
            read_headers(tmp_path / "e", passed)


@linked
def test_names_do_not_command_the_terminal(home: Path, source: Path) -> None:
    convert(source, home / "edgeinfer/bundles/mine", origin="of\x1b[2Jmine")
    folder = home / "f\x1b[31mred"
    folder.mkdir()
    write_gguf(folder / "a.gguf", source, "Q8_0")
    (folder / "b.gguf.part").write_bytes(b"GGUF")
    os.mkfifo(folder / "c.gguf")
    table = edgeinfer("models", folder).out
    assert "\x1b" not in table
    assert "f\\x1b[31mred/a.gguf" in table and "of\\x1b[2Jmine" in table


def test_a_name_like_that_of_a_part_is_no_split_model(home: Path, tmp_path: Path, source: Path) -> None:
    path = tmp_path / "whole-00001-of-00002.gguf"
    write_gguf(path, source, "Q8_0")
    assert edgeinfer("info", path).code == 0


def test_only_those_that_run(home: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_text("no")
    assert [model["name"] for model in listed("--runs")] == ["demo"]
    assert "bad.gguf" in str(listed(tmp_path)) and "bad.gguf" not in str(listed(tmp_path, "--runs"))


def test_memory_that_does_not_suffice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.models.list.process_budget", lambda: 1000)
    (model,) = listed()
    assert model["runs"] and model["fits"] is False
    assert "needs " in edgeinfer("models").out


def test_models_and_plan_agree_where_weights_are_streamed(home: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, num_hidden_layers=9, hidden_size=128, intermediate_size=4096, windows=(0,) * 9)
    path = write_model(tmp_path, config)
    modes = set()
    for more in (1, -2_000_000, -60_000_000):
        whole = edgeinfer("plan", path, "--json", "--budget", "1GB").json["total_bytes"]
        monkeypatch.setattr("edgeinfer.models.list.process_budget", lambda enough=whole + more: enough)
        planned = edgeinfer("plan", path, "--json", "--budget", whole + more).json
        (found,) = [model for model in listed(path.parent) if model["store"] == "folder"]
        assert (found["fits"], found["planned_bytes"]) == (planned["fits"], planned["total_bytes"])
        assert found["mode"] == planned["mode"] or planned["mode"] == "refused"
        modes.add(planned["mode"])
    assert modes == {"resident", "streamed", "refused"}
