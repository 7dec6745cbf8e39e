"""Rules that readers rely on: documented fields, short files, no paths of one machine, exact public names."""

from __future__ import annotations

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import statements

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("edgeinfer", "kernels", "memory_planner", "converters", "sparse", "offload", "devices")
FILE_LINES, FUNCTION_LINES = 300, 50
MACHINE_PATH = re.compile(r"(?<![\w.])(/home/|/root/|/work/|/opt/|/tmp/|/Users/|/mnt/|/var/tmp/|[A-Z]:\\\\?Users)")
QUESTION = re.compile(r"(What|Which|Where|How|Who|Whoever|Nobody)\b")
MAYBE_QUESTION = re.compile(rf"""['"][\\\s]*{QUESTION.pattern}""")
REPLACED = {
    "walk": "forward", "walker": "ModelRunner", "walked": "run", "twin": "reference", "ticket": "event",
    "rung": "level", "ladder": "ISA_LEVELS", "taps": "hooks", "tapped": "hooked", "pace": "tuner",
    "guess": "propose", "guesser": "drafter", "guesses": "proposals", "mixture": "moe", "rewind": "rollback",
    "rungs": "levels", "holes": "pruned",
}
"""Words that the field has another one for, by the parts of identifiers, and that one."""
ALLOWED = {"tokens_per_walk", "os.walk", "ast.walk"}
"""A field of the JSON report, and functions of the standard library."""
PARTS = ("bundle", "graph", "kernels", "memory_planner", "runtime", "converters", "sparse", "offload", "devices", "cli")


def sources() -> Iterator[Path]:
    """Every .py file of the packages."""
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function, without signature, docstring and the functions inside it."""
    found = [node for node in statements(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [range(min([node.lineno, *(one.lineno for one in node.decorator_list)]), (node.end_lineno or 0) + 1)
             for node in found]
    for node, span in zip(found, spans, strict=True):
        body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
        inner = (other for other in spans if span.start < other.start and other.stop <= span.stop)
        yield node.name, len(set(range(body[0].lineno, span.stop)).difference(*inner))


def undocumented_fields(source: str) -> list[str]:
    """Fields of dataclasses that no docstring follows."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef) or "dataclass" not in "".join(map(ast.dump, node.decorator_list)):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if not (isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.strip()):
                    missing.append(f"{node.name}.{field.target.id}")
    return missing


def questions(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those of fields and constants included, that begins with a question word."""
    for node in ast.walk(ast.parse(source)):
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text, str) and QUESTION.match(text.strip()):
            yield node.lineno, text.strip()


def test_docstrings_begin_with_a_verb_or_their_subject() -> None:
    everywhere = [path for folder in (*FOLDERS, "tests", "benchmarks", "docs", "examples")
                  for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(everywhere) > 400
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in everywhere}
    found = [f"{path}:{line}: {text[:60]}" for path, source in texts.items() if MAYBE_QUESTION.search(source)
             for line, text in questions(source)]
    assert not found, "begin with a verb or name the subject:\n" + "\n".join(found)


def test_a_docstring_that_begins_with_a_question_is_noticed() -> None:
    source = 'x = 1\n"""What x is."""\ndef f():\n    """Return how many; Whatever."""\n'
    assert MAYBE_QUESTION.search(source) and [line for line, _ in questions(source)] == [2]
    assert MAYBE_QUESTION.search('def f():\n    r"""\\\n  How."""\n')


def test_every_field_of_the_request_types_is_documented() -> None:
    assert undocumented_fields((ROOT / "edgeinfer" / "config.py").read_text(encoding="utf-8")) == []


def test_an_undocumented_field_is_noticed() -> None:
    source = (
        "@dataclass(frozen=True)\nclass A:\n    x: int = 1\n    'one'\n    y: int = 2\n    z: int = 3\n    'three'\n"
    )
    assert undocumented_fields(source) == ["A.y"]


def product() -> dict[str, str]:
    """The text of every .py file of the packages and benchmarks, by its path."""
    paths = [*sources(), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_files_stay_short() -> None:
    long = {name: lines for name, text in product().items() if (lines := text.count("\n")) > FILE_LINES}
    assert not long, f"files over {FILE_LINES} lines; split them where their subjects part: {long}"


def test_functions_stay_short() -> None:
    long = {f"{path}:{name}": lines for path, text in product().items() for name, lines in functions(text)
            if lines > FUNCTION_LINES}
    assert not long, f"functions over {FUNCTION_LINES} lines: {long}"


def test_lines_of_a_function_are_its_own() -> None:
    source = "@a\ndef f(\n    b,\n):\n    'Text\\\n    of f.'\n    x = 1\n\n    @c\n    def g():\n" \
        "        return (\n            1)\n\n    return g\n"
    assert dict(functions(source)) == {"f": 4, "g": 2}


def test_no_text_names_a_path_of_one_machine() -> None:
    found = []
    for path in sources():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n" + "\n".join(found)


def test_a_path_of_one_machine_is_noticed() -> None:
    assert MACHINE_PATH.search("print('/home/someone/model')")
    assert not MACHINE_PATH.search("open('/proc/self/status'), '/sys/devices', 'https://host/home/x'")


def test_public_names() -> None:
    import edgeinfer

    assert edgeinfer.__all__ == ["LLM", "AsyncLLM", "EdgeInferError", "GenerationConfig", "__version__", "estimate",
                                 "plan", "recommend"]
    assert edgeinfer.EdgeInferError.__module__ == "edgeinfer.errors"
    assert edgeinfer.GenerationConfig.__module__ == "edgeinfer.config"
    with pytest.raises(AttributeError, match="module 'edgeinfer' has no attribute 'Model'"):
        _ = edgeinfer.Model


@pytest.mark.parametrize("part", PARTS)
def test_a_package_offers_its_public_names(part: str) -> None:
    api = importlib.import_module(f"edgeinfer.{part}")
    names = list(api.__all__)
    assert len(names) == len(set(names)), f"edgeinfer.{part}.__all__ names something twice"
    assert not [name for name in names if name.startswith("_")], "a private name in __all__"
    assert not [name for name in names if not hasattr(api, name)], "__all__ names what does not exist"


def test_importing_a_part_compiles_nothing() -> None:
    """Numba takes half a second to import; a process that finds its kernels in the cache must not pay it."""
    check = "import importlib, sys\nfor part in sys.argv[1:]:\n    importlib.import_module(f'edgeinfer.{part}')\n" \
        "    assert 'numba' not in sys.modules, f'import edgeinfer.{part} imports numba'"
    done = subprocess.run([sys.executable, "-c", check, *PARTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def replaced_words(source: str) -> list[str]:
    """Identifiers with a word of `REPLACED`, each with the word to use."""
    if not re.search("|".join(REPLACED), source, re.IGNORECASE):
        return []
    found, before = list[str](), ["", ""]
    imported = {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
                for alias in node.names if not node.module}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = token.string
        if token.type == tokenize.NAME and not ({name, "".join([*before, name])} & ALLOWED or name in imported):
            parts = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
            found += [f"line {token.start[0]}: {name}: {REPLACED[part]}" for part in parts if part in REPLACED]
        before = [before[1], name]
    return found


def test_identifiers_use_the_words_of_the_field() -> None:
    modules = {path.stem for path in sources()}
    found = {f"{path.relative_to(ROOT)}, {line}" for path in sources()
             for line in replaced_words(path.read_text(encoding="utf-8")) if line.split(": ")[1] not in modules}
    assert not found


def test_a_replaced_word_is_noticed() -> None:
    assert replaced_words("import os\nfor _ in os.walk('.'):\n    runner.walk_range(1)\n") == [
        "line 3: walk_range: forward"]
    assert replaced_words("class Guesser:\n    n_rungs = 1\n    rung = 2\n") == [
        "line 1: Guesser: drafter", "line 2: n_rungs: levels", "line 3: rung: level"]
