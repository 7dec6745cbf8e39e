"""A model family is one file: converters know no family's name, and a file that is deleted takes its family along."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from edgeinfer.converters import convert
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import (
    Family,
    Gguf,
    architectures,
    family_of,
    gguf_architectures,
    gguf_of,
    read_config,
    seeing_models,
    supported_architectures,
)
from tests import make_models
from tests.helpers import golden_cases
from tests.make_golden import CASES
from tests.models.test_gguf_families import metadata, tensors_of, write

CONVERTERS = Path(__file__).resolve().parents[2] / "converters"
FORMAT_WORDS = {"gpt2", "llama"}
"""Values of tokenizer.ggml.model: kinds of tokenizers, which the format has named so."""
METHODS = {"bitnet"}
"""Values of quantization_config.quant_method that a family is called, too; models of other families have them."""
DELETED = "starcoder2"


def strings(path: Path) -> set[str]:
    """The string literals of a module, but for docstrings and comments below a name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {node.value for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose}


def known_names() -> set[str]:
    """Return the names of families, their wrappers and their files."""
    ollama = {gguf.ollama.name for rows in gguf_architectures().values() for _, gguf in rows if gguf.ollama} - {""}
    return {*supported_architectures(), *gguf_architectures(), *seeing_models(), *ollama}


def families_in(folder: Path) -> list[str]:
    known = known_names()
    return [f"{path.name}: {name}" for path in sorted(folder.rglob("*.py"))
            for name in sorted(strings(path) & known)
            if not ((name in FORMAT_WORDS and path.stem.endswith(("tokenizer", "vocabulary")))
                    or (name in METHODS and path.parent.name == "quantized"))]


def test_converters_know_no_family() -> None:
    assert len(known_names()) > 60
    assert families_in(CONVERTERS) == []


def test_a_family_in_a_converter_is_found(tmp_path: Path) -> None:
    text = '"""Of falcon."""\nA = ("falcon", "gptoss")\nif A == "command-r":\n    B = "llama"\n'
    (tmp_path / "names.py").write_text(text)
    (tmp_path / "tokenizer.py").write_text('KINDS = ("llama", "gpt2", "gemma4")')
    assert families_in(tmp_path) == [
        "names.py: command-r", "names.py: falcon", "names.py: gptoss", "names.py: llama", "tokenizer.py: gemma4"]


def test_one_family_of_each_architecture_takes_all_other_files() -> None:
    for name, rows in gguf_architectures().items():
        assert [gguf.when is None for _, gguf in rows] == [False] * (len(rows) - 1) + [True], name
        assert gguf_of(name) is rows[-1][1]
        assert {gguf.name for _, gguf in rows} == {name}
    assert [model_type for model_type, _ in gguf_architectures()["llama"]] == ["mistral", "mixtral", "llama"]
    assert gguf_of("mamba") is None and gguf_of(None) is None


def test_what_is_no_family_has_the_usual_names() -> None:
    assert family_of("mamba") == family_of(None) == Family()
    assert family_of("glm4").gguf == (Gguf("glm4", rotated="share"),)


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of the architectures without one file; gives the page of models as it was before."""
    if DELETED not in supported_architectures():
        pytest.skip(f"there is no family {DELETED}")
    before = make_models.models()
    folder = shutil.copytree(next(iter(architectures.__path__)), tmp_path / "architectures")
    (folder / f"{DELETED}.py").unlink()
    monkeypatch.setattr(architectures, "__path__", [str(folder)])
    return before


@pytest.mark.slow
def test_deleting_a_file_removes_its_family(without: str, tmp_path: Path) -> None:
    """From what runs, GGUF, the page of models and golden cases; all else is as before."""
    pytest.importorskip("gguf")
    assert DELETED not in supported_architectures() and DELETED not in gguf_architectures()
    gone = {name for name, config in CASES.items() if config["model_type"] == DELETED}
    assert gone and not gone & set(golden_cases.names())
    assert set(golden_cases.names()) == set(CASES) - gone
    with pytest.raises(pytest.skip.Exception, match=f"there is no family {DELETED}"):
        golden_cases.load("starcoder2-window")
    with pytest.raises(UnsupportedModelError, match=f"model_type is '{DELETED}', which edgeinfer does not support"):
        read_config(CASES["starcoder2-window"])
    page = make_models.models()
    assert [line for line in without.splitlines() if line not in page.splitlines()] == [
        line for line in without.splitlines() if line.startswith(f"| `{DELETED}` |")]
    case = golden_cases.load("gpt-bigcode")  # a family that shares tensors' names and blocks with it
    c = read_config(case.config)
    for arch, refused in (("starcoder", False), (DELETED, True)):
        path = tmp_path / f"{arch}.gguf"
        fields = {key.replace("starcoder.", f"{arch}."): value for key, value in metadata(case, c, "starcoder").items()}
        write(path, fields, tensors_of(case, c, "starcoder"), arch)
        if refused:
            with pytest.raises(UnsupportedModelError, match=f"architecture '{DELETED}'; known: .*the nearest is star"):
                convert(path, tmp_path / arch)
        else:
            convert(path, tmp_path / arch)
