"""Values of MODEL: directories, names, hub ids; conversion into the cache; the cache itself."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.base.cache_dir import cache_entries, cache_root, clear_cache
from edgeinfer.bundle import FORMAT_VERSION, Bundle, is_bundle
from edgeinfer.errors import DestinationError, ModelNotFoundError, UnsupportedModelError, UsageError
from edgeinfer.models import Storage, checkpoint_path, demo_path, resolve
from tests.helpers.bundles import alter_header, as_format_1
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.packers import make_packed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_id: str) -> Path:
    """Make a checkpoint as if it had been downloaded before."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / f"models--{repo_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return make_checkpoint(repository / "snapshots" / ("0" * 40))


def test_the_demo_is_a_bundle_in_the_package() -> None:
    assert resolve("demo") == demo_path()
    assert is_bundle(demo_path())


def test_a_folder_named_as_a_known_model_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert resolve("demo") == demo_path()
    make_checkpoint(tmp_path / "demo")
    assert resolve("demo").name.startswith("demo-")


def test_a_checkpoint_is_converted_once(tmp_path: Path, cache: Path) -> None:
    source = make_checkpoint(tmp_path / "tiny model")
    told: list[tuple[str, int, int, str]] = []
    first = resolve(source, lambda *step: told.append(step))
    assert is_bundle(first) and first.parent == cache / "bundles" and first.name.startswith("tiny--model-")
    assert told and {stage for stage, *_ in told} == {"convert"} and told[-1][1] == told[-1][2]
    told.clear()
    assert resolve(f"{source}/", lambda *step: told.append(step)) == first
    assert not told


@pytest.mark.slow
def test_a_checkpoint_that_changed_is_converted_again_and_replaces_the_older_one(tmp_path: Path, cache: Path) -> None:
    source = make_checkpoint(tmp_path / "tiny")
    first = resolve(source)
    os.utime(source / "model.safetensors", ns=(1, 1))
    second = resolve(source)
    assert second != first and not first.exists() and is_bundle(second)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("model", ["path", "someone/a-model"])
def test_an_older_conversion_is_replaced_with_one_line(
    model: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "tiny")
    in_the_hubs_cache(tmp_path, monkeypatch, model)
    name = str(source) if model == "path" else model
    path = resolve(name)
    as_format_1(path)
    stem, origin, *stamps = path.name.removesuffix(f"-v{FORMAT_VERSION}").rsplit("-", 2 if model == "path" else 1)
    if stamps:  # format 1 had its version in there
        origin = hashlib.sha256("\0".join([name, "q4", "32", "1"]).encode()).hexdigest()[:8]
    older = path.rename(path.with_name("-".join([stem, origin, *stamps])))
    assert resolve(name, convert=False) == older and capsys.readouterr().err == ""
    made_by = Bundle.open(older).header.made_by
    assert resolve(name) == path and not older.exists() and Bundle.open(path).header.version == FORMAT_VERSION
    said = f"edgeinfer: {name} was converted by {made_by} to bundle format 1; converting it again.\n"
    assert capsys.readouterr().err == said
    assert resolve(name) == path and capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_conversion_that_cannot_be_opened_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_checkpoint(tmp_path / "tiny")
    path = resolve(source)
    alter_header(path, lambda data: (data["config"].update(colour=1), data.update(made_by="edgeinfer 7")))
    with pytest.raises(ModelNotFoundError, match="has not been converted yet"):
        resolve(source, convert=False)
    assert resolve(source) == path
    said = capsys.readouterr().err
    assert said.startswith(f"edgeinfer: {source} has an unusable bundle (Cannot open the bundle {path}: config has ")
    assert "written by edgeinfer 7: upgrade edgeinfer" in said and said.endswith("; converting it again.\n")
    assert said.count("\n") == 1
    Bundle.open(path).verify()
    os.truncate(path / "weights.bin", 64)
    assert resolve(source) == path
    assert "weights.bin is truncated" in capsys.readouterr().err
    Bundle.open(path).verify()


def test_a_checkpoint_is_not_converted_where_that_is_not_wanted(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "tiny")
    with pytest.raises(ModelNotFoundError, match=r"has not been converted yet; .edgeinfer run. or"):
        resolve(source, convert=False)
    assert resolve(resolve(source), convert=False) == resolve(source, convert=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file stands where the directory should")
    with pytest.raises(DestinationError, match=r"The cache .* cannot be written: .*; set EDGEINFER_CACHE"):
        resolve(make_checkpoint(tmp_path / "tiny"))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dmeo", r"Unknown model 'dmeo'; did you mean 'demo'\?$"),
        ("tinylama", r"did you mean 'tinyllama'\?"),
        ("zzzzzz", "Unknown model 'zzzzzz'. Give a GGUF file, .* such as demo or .*'edgeinfer models' lists those"),
        ("no/such/place", r"There is no file or directory 'no/such/place'\.$"),
        ("/no/such/place", "There is no file or directory '/no/such/place'\\."),
    ],
)
def test_an_unknown_name_gives_the_nearest_ones(name: str, sentence: str) -> None:
    with pytest.raises(ModelNotFoundError, match=sentence):
        resolve(name)
    with pytest.raises(ModelNotFoundError, match=sentence):
        checkpoint_path(name)


def test_a_mistyped_path_gives_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "fables-large")
    with pytest.raises(ModelNotFoundError, match=r"did you mean '.*/fables-large'\?"):
        resolve(tmp_path / "fables-lrage")
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(ModelNotFoundError, match=rf"did you mean '{tmp_path.name}/fables-large'\?"):
        resolve(f"{tmp_path.name}/fables-larg")  # looks like a hub id, but the folder is here: the hub is not asked


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"neither a bundle \(it has no bundle.json\) nor a checkpoint"):
        resolve(tmp_path / "empty")
    with pytest.raises(ModelNotFoundError, match="is a file; MODEL is the directory of a bundle or of a checkpoint"):
        resolve(tmp_path / "file.bin")


@pytest.mark.slow
def test_a_hub_model_is_fetched_and_converted_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo_ids = ("someone/a-model", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "someone/another")
    source = [in_the_hubs_cache(tmp_path, monkeypatch, repo_id) for repo_id in repo_ids][-1]
    first = resolve("someone/a-model")
    assert first.name.startswith("someone--a-model-") and is_bundle(first)
    shutil.rmtree(tmp_path / "hub" / "models--someone--a-model")  # it is not asked for again
    assert resolve("someone/a-model") == resolve("someone/a-model", convert=False) == first
    assert resolve("tinyllama").name.startswith("TinyLlama--TinyLlama-1.1B-Chat-v1.0-")
    monkeypatch.setattr("edgeinfer.converters.fetch", lambda *_, **__: source, raising=False)
    assert checkpoint_path("someone/another") == source
    assert checkpoint_path(source) == source


def test_the_cache_is_listed_and_cleared(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_entries() == []
    bundle = resolve(make_checkpoint(tmp_path / "tiny"))
    (cache / "kernels" / "set").mkdir(parents=True)
    (cache / "kernels" / "set" / "one.o").write_bytes(b"12345")
    (cache / "kernels" / "elsewhere").symlink_to(tmp_path / "tiny")
    entries = cache_entries()
    assert [(entry.kind, entry.name) for entry in entries] == [("bundles", bundle.name), ("kernels", "set")]
    assert entries[1].nbytes == 5
    assert clear_cache(entries) == sum(entry.nbytes for entry in entries)
    assert cache_entries() == [] and (tmp_path / "tiny" / "config.json").exists()
    with pytest.raises(DestinationError, match="cannot be deleted: No such file"):
        clear_cache(entries)
    monkeypatch.delenv("EDGEINFER_CACHE")
    assert cache_root().name == "edgeinfer"


FIRST_RUN = """
import sys, time, uuid
from pathlib import Path
from edgeinfer.models import cached_bundle
from tests.helpers.bundles import write_bundle

others, waiting = int(sys.argv[1]), Path(sys.argv[2])
mark = waiting / str(uuid.uuid4())

def make(target):
    print("makes", flush=True)
    while len(list(waiting.iterdir())) < others:  # however long they take to start
        time.sleep(0.05)
    write_bundle(target, overwrite=True)

def progress(*args):
    told.append(args)
    if args[0] == "wait":
        mark.touch()

told = []
path = cached_bundle("m", "m", make, progress=progress)
print(path, sorted(set(told)))
"""


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("count", [2, 5])
def test_of_several_first_runs_one_converts_and_the_others_wait(tmp_path: Path, count: int) -> None:
    """Each in a PID namespace of its own where that is possible: their process ids mean nothing to each other."""
    cache, waiting = tmp_path / "cache", tmp_path / "waiting"
    waiting.mkdir()
    command = [sys.executable, "-c", FIRST_RUN, str(count - 1), str(waiting)]
    alone = ["unshare", "--pid", "--fork"]
    if sys.platform == "linux" and subprocess.run([*alone, "true"], capture_output=True).returncode == 0:
        command = [*alone, *command]
    environment = os.environ | {"EDGEINFER_CACHE": str(cache)}
    running = [subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE) for _ in range(count)]
    answers = [process.communicate(timeout=600) for process in running]
    assert [process.returncode for process in running] == [0] * count, answers
    made = [out for out, _ in answers if out.startswith("makes\n")]
    waited = [out for out, _ in answers if "('wait', 0, 0, '')" in out]
    assert len(made) == 1 and len(waited) == count - 1
    said = [err for _, err in answers if err]
    assert said == ["edgeinfer: Another process is converting m; waiting for it.\n"] * (count - 1)
    assert [path.name for path in (cache / "bundles").iterdir()] == [f"m-v{FORMAT_VERSION}"]


def test_a_checkpoint_that_cannot_be_converted_is_not_told_to_be(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(UnsupportedModelError, match="mamba"):
        resolve(source, convert=False)


@pytest.mark.slow
def test_a_group_size_alone_is_refused_whatever_there_is(tmp_path: Path) -> None:
    make_packed(tmp_path / "hf", "gptq")
    made = resolve(tmp_path / "hf", storage=Storage("q4", 64))
    assert resolve(tmp_path / "hf", storage=Storage("q4", 64)) == made
    with pytest.raises(UsageError, match="also say with --weights"):
        resolve(tmp_path / "hf", storage=Storage(None, 64))
