"""The pages are true: their commands and Python run, their paths exist, printed output is the program's."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import typer

from edgeinfer.bundle import Bundle
from edgeinfer.cli.app import make_app
from edgeinfer.config import GenerationConfig, RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.models import demo_path
from edgeinfer.runtime import Session
from edgeinfer.text import Tokenizer
from tests import make_onnx_models
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import environment
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.make_documents import PAGE, demo_program
from tests.make_manual import commands, renewed
from tests.test_layers import LAYERS

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "README.md").is_file():
    pytest.skip("no checkout: the pages are not installed", allow_module_level=True)
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
PAGES += sorted(ROOT.glob("docs/**/*.md"))
RUN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/reference/cli.md")]
RUN += [page for part in ("tutorials", "how-to") for page in sorted((ROOT / "docs" / part).glob("*.md"))]
"""Pages whose commands are run; those of the others are measurements, and only looked at."""
NOT_RUN = {
    "python -m venv": "makes environments; .ci/run makes its own the same way",
    "python3 -m venv": "makes environments; .ci/run makes its own the same way",
    "git clone": "needs a network",
    "edgeinfer run model-Q4_K_M.gguf": "needs the reader's file; models/test_gguf_models.py runs files of all types",
    "edgeinfer run model-Q8_0.gguf": "needs a file with a tokenizer; the one that stands in has none",
    "edgeinfer run ollama:": "needs what ollama has pulled; tests/system/test_gguf_stores.py writes a store",
    "pip install": "needs a package index; .ci/run installs with the same extras",
    "pip uninstall": "removes edgeinfer from the environment that runs this test",
    "uv ": "needs uv and a package index",
    "pipx ": "needs pipx and a package index",
    "python -m pytest": "is this very run",
    ".ci/run": "runs this test",
    ".ci/release": "compiles every instruction set; .ci/run calls it",
    "edgeinfer devices --probe": "measures for minutes; tests/system/test_devices_probe.py takes small sizes",
    "edgeinfer cache clear": "empties the cache of all tests; tests/cli/test_run.py clears its own",
    "edgeinfer serve": "runs until a signal; tests/system/test_server_program.py sends one",
    "edgeinfer bench --serve": "needs a server; tests/system/test_server_cli.py has one",
    "edgeinfer chat": "needs a server; tests/system/test_server_cli.py has one",
    "edgeinfer batch requests.jsonl": "needs a file of requests; docs/how-to/batch.md writes one and runs it",
    "edgeinfer pull": "needs a download; tests/cli/test_local.py has a server",
    "edgeinfer rm smollm2-135m": "needs what was pulled; tests/cli/test_local.py removes it",
    "edgeinfer convert HuggingFaceTB/SmolLM2-135M-Instruct": "needs a download; test_convert_hub.py has a server",
    "edgeinfer cluster": "starts Ray, which listens; tests/system/test_cluster_command.py does so",
    "edgeinfer batch in.jsonl out.jsonl --model ./my-bundle --ray": "needs Ray; tests/system/test_cluster.py has it",
    "edgeinfer plan owner/model": "needs a download",
    "edgeinfer estimate ./my-bundle --ctx 32768": "the bundle that stands in knows 1024 positions",
    "edgeinfer bench ./my-bundle -d 0,4096": "the bundle that stands in knows 1024 positions",
    "edgeinfer convert hf:": "needs a download",
    "edgeinfer sparsify ./prosparse-7b": "needs a model of gigabytes; the other example runs",
    "edgeinfer bench --shape": "writes and reads gigabytes",
    "pre-commit install": "writes a hook into the checkout",
    "python benchmarks/": "measures for minutes",
}
"""Beginnings of the commands that are not run here, and why."""
OUTSIDE = {"/proc/PID/status": "Linux'", "devices/local-KEY.toml": "the user's", "llama-env/bin/python": "the reader's",
           "openvino-env/bin/python": "the reader's", "PEER_ENV/bin/python": "the reader's"}
"""Paths on the pages that are not in this repository."""
TOLERANCE = 2e-2
"""Of the largest logit. Inputs of products are int8 with a scale for 32 values: each is off by up to 1/254 of the
largest of its group, and such errors add up like noise over the layers, to about 0.7 % (largest seen: 0.9 %)."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shell_lines(page: Path) -> Iterator[str]:
    """Commands without their remarks."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.sub(r"\s+#.*", "", line).strip():
                yield command


def label(page: Path) -> str:
    """The page's path, as a test's name."""
    return page.relative_to(ROOT).as_posix()


def reason(command: str) -> str | None:
    """Why a command is not run here, if so."""
    return next((why for beginning, why in NOT_RUN.items() if command.startswith(beginning)), None)


LINES = {line: page for page in reversed(PAGES) for line in shell_lines(page)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name (a bundle, a checkpoint, texts), and `edgeinfer` on the path."""
    home = tmp_path_factory.mktemp("reader")
    for name in ("my-bundle", "my-f32-bundle"):
        (home / name).symlink_to(demo_path())
    small = make_checkpoint(home / "small", vocab_size=4096, max_position_embeddings=1024, tokenizer=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path() / name, small)
    convert(small, home / "my-draft")
    make_checkpoint(home / "TinyLlama-1.1B-Chat")
    write_gguf(home / "model-Q8_0.gguf", make_checkpoint(home / "odd", **SIZES), "Q8_0")
    (home / "question.txt").write_text("Once upon a time")
    (home / "held_out.txt").write_text("Once upon a time there was a fox who lived in a forest by the sea. " * 4)
    books = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")[:6000]
    (home / "some_books.txt").write_text(books, encoding="utf-8")
    script = home / "bin" / "edgeinfer"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m edgeinfer "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return home


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder, as a user whose profile knows no device."""
    variables = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1",
                 "XDG_DATA_HOME": str(folder / "data"), "XDG_CONFIG_HOME": str(folder / "config")}
    return subprocess.run(command, cwd=folder, env=environment(**variables), capture_output=True, text=True,
                          timeout=600, stdin=subprocess.DEVNULL)


@pytest.mark.slow(keep=2)
@pytest.mark.skipif(sys.platform == "win32", reason="no sh")
@pytest.mark.parametrize("page", [page for page in RUN if not all(map(reason, shell_lines(page)))], ids=label)
def test_the_commands_of_a_page_run(page: Path, folder: Path, tmp_path: Path) -> None:
    """In their order, in a folder of their own: a command may use the files of an earlier one."""
    shutil.copytree(folder, tmp_path / "reader", symlinks=True)
    for line in shell_lines(page):
        if not reason(line):
            done = run(["sh", "-c", line], tmp_path / "reader")
            assert done.returncode == 0 and done.stdout, f"{line}\n{done.stderr}"


CLIENTS = ROOT / "docs" / "how-to" / "connect-clients.md"
"""Needs a server: tests/system/test_server_clients.py runs it."""
PYTHON = [page for page in RUN if blocks(page, "python") and page != CLIENTS]
PYTHON.append(ROOT / "docs" / "reference" / "python.md")


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("page", PYTHON, ids=label)
def test_the_python_of_a_page_runs(page: Path, folder: Path) -> None:
    done = run([sys.executable, "-c", "\n".join(blocks(page, "python"))], folder)
    assert done.returncode == 0 and "finish" not in done.stderr and len(done.stdout) > 100, done.stderr


def test_the_options_of_the_api_page_are_up_to_date() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert renewed("python.md") == page, "run: python -m tests.make_manual"
    assert all(f"| `{one.name}` |" in page for one in fields(GenerationConfig))


def test_what_is_not_run_stands_on_a_page() -> None:
    stale = [beginning for beginning in NOT_RUN if not any(line.startswith(beginning) for line in LINES)]
    assert not stale, "no page has a command that begins so"


def options() -> dict[str, set[str]]:
    """The options of every command of `edgeinfer`."""
    return {name: {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
            for name, command in commands(typer.main.get_command(make_app()))}


def test_every_command_and_flag_exists() -> None:
    known, wrong = options(), []
    texts = [line for line in LINES if line.startswith("edgeinfer ")]
    for page in PAGES:
        texts += re.findall(r"`(edgeinfer [a-z][^`]*)`", page.read_text(encoding="utf-8"))
    for text in texts:
        words = [word.strip("[]") for word in text.split("#")[0].split()[1:]]
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in known), None)
        flags = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        if (name is None and words[0] != "cache") or not set(flags) <= known.get(name or "", {"--help"}):
            wrong.append(text)
    assert not wrong, "no such command, or no such option"


def test_every_script_and_flag_exists() -> None:
    """Of `python FILE` and `python -m MODULE`; the options stand in the file."""
    for line in (line for line in LINES if re.match(r"python benchmarks/", line)):
        script, *words = shlex.split(line)[1:]
        text = (ROOT / script).read_text(encoding="utf-8")
        assert not [w for w in words if w.startswith("--") and f'"{w}"' not in text], line
    for page in PAGES:
        for module in re.findall(r"`python -m ([\w.]+)", page.read_text(encoding="utf-8")):
            path = module.removeprefix("edgeinfer.").replace(".", "/")
            if module in ("pytest", "sphinx"):
                continue
            files = [top / (path + end) for top in (ROOT, ROOT / "edgeinfer") for end in (".py", "/__main__.py")]
            assert any(file.is_file() for file in files), f"{page.name}: {module}"


def test_every_extra_exists() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for line in (line for line in LINES if "pip install" in line):
        for extra in re.findall(r"\.\[([\w,]+)\]", line):
            assert all(f"\n{name} = [" in text for name in extra.split(",")), line


def missing(text: str, page: Path) -> list[str]:
    """Paths and links in a text that lead nowhere; <name> stands for any name."""
    files = {path.name for folder in (ROOT, *(p for p in ROOT.iterdir() if p.is_dir() and p.name[0] not in ".~"))
             for path in (folder.rglob("*.*") if folder != ROOT else folder.glob("*.*"))}
    tops = {path.name for path in ROOT.iterdir()}
    found = []
    for name in re.findall(r"`([\w.<>*/-]+)`", text):
        if name in OUTSIDE or ("/" in name and name.split("/")[0] not in tops):
            continue
        there = list(ROOT.glob(re.sub(r"<\w+>", "*", name).rstrip("/"))) if "/" in name else name in files
        if not there and ("/" in name or re.fullmatch(r"[\w-]+\.(py|toml)", name)):
            found.append(name)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        if not (page.parent / link).exists():
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page: Path) -> None:
    assert not missing(page.read_text(encoding="utf-8"), page)


def test_a_wrong_path_is_named() -> None:
    text = "`kernels/isa.py` `kernels/none.py` `kernels/<name>.py` `gone.py` `isa.py` [a](docs/none.md) [b](README.md)"
    assert missing(text, ROOT / "README.md") == ["kernels/none.py", "gone.py", "docs/none.md"]


def test_the_forward_pass_in_numpy_gives_the_demos_logits() -> None:
    (source,) = blocks(ROOT / "docs" / "explanation" / "reading.md", "python")
    names: dict[str, object] = {}
    exec(compile(source, "docs/explanation/reading.md", "exec"), names)  # as the reader would: it opens the demo itself
    assert np.shape(names["logits"]) == (len(names["ids"]), 4096)  # type: ignore[arg-type]
    ids = Tokenizer.open(demo_path(), {"bos_token_id": 1}).encode(
        "Once upon a time a fox met a crow who sat in a tree with a piece of cheese")
    session = Session(Bundle.open(demo_path()), RuntimeConfig(ctx=64, kv="f32", threads=2, outputs=len(ids)))
    try:
        got = np.concatenate([rows.copy() for _, rows in session.score(session.new_sequence(), ids)])
        want = names["forward"](session.bundle, ids)  # type: ignore[operator]
    finally:
        session.close()
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
    assert np.array_equal(got.argmax(axis=1), want.argmax(axis=1))


def test_the_demos_plan_and_program_are_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == demo_program(), "run: python -m tests.make_documents"


def test_the_table_of_onnx_models_is_up_to_date() -> None:
    """And names the kernels of every operator that the lowering makes."""
    made = make_onnx_models.page()
    assert make_onnx_models.PAGE.read_text(encoding="utf-8") == made, "run: python -m tests.make_onnx_models"


def test_the_glossary_has_few_words_of_our_own() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("\n## Glossary\n")[1].split("\n## ")[0]
    head, _, *words = [line for line in section.splitlines() if line.startswith("|")]
    assert head == "| word | meaning |" and 1 <= len(words) <= 5, words


def test_the_table_of_layers_is_the_enforced_one() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (-?\d\w?) \| (.*?) \|", text, re.MULTILINE)
    said = {name.strip("/").rpartition("/")[2].removesuffix(".py"): layer
            for layer, parts in rows for name in re.findall(r"`([\w./]+)`", parts)}
    there = {part for part in LAYERS if any((ROOT / base / part).with_suffix(end).exists()
                                            for base in ("", "edgeinfer") for end in ("", ".py"))}
    assert said == {part: LAYERS[part] for part in there - {"__main__"}}


@pytest.mark.slow
def test_the_table_of_models_is_that_of_the_program() -> None:
    from tests.make_models import PAGE as MODELS
    from tests.make_models import models

    assert MODELS.read_text(encoding="utf-8") == models(), "run: python -m tests.make_models"


def test_the_table_of_device_names_is_up_to_date() -> None:
    from tests.make_device_names import TABLE, table

    assert json.loads(TABLE.read_text(encoding="utf-8")) == table(), "run: python -m tests.make_device_names"
