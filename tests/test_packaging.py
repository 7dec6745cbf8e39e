"""Installed files: every folder with code, every tracked file, every import declared. Needs a checkout."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import edgeinfer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "pyproject.toml").is_file():
    pytest.skip("no checkout: packaging is checked where pyproject.toml is", allow_module_level=True)
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]
PACKAGES: list[str] = SETTINGS["tool"]["setuptools"]["packages"]


def folder_of(package: str) -> Path:
    """Return the folder of a package's files in the checkout; packages within a mapped one lie in its folder."""
    for mapped, folder in FOLDERS.items():
        if package == mapped or package.startswith(mapped + "."):
            return ROOT / (folder + package.removeprefix(mapped).replace(".", "/"))
    return ROOT / package.replace(".", "/")


def modules() -> Iterator[Path]:
    """Every .py file that an installation should hold."""
    for folder in ("edgeinfer", *FOLDERS.values()):
        yield from sorted((ROOT / folder).rglob("*.py"))


def tracked_files() -> list[str]:
    """Paths that git tracks, relative to the root."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout: the tracked files are unknown")
    return [name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = {folder_of(package) for package in PACKAGES}
    missing = sorted({path.parent.relative_to(ROOT).as_posix() for path in modules() if path.parent not in listed})
    assert not missing, f"add to [tool.setuptools] packages in pyproject.toml: {', '.join(missing)}"


def test_every_listed_package_exists() -> None:
    absent = [package for package in PACKAGES if not (folder_of(package) / "__init__.py").is_file()]
    assert not absent, f"listed in pyproject.toml without an __init__.py: {', '.join(absent)}"


def test_every_root_folder_has_its_signpost() -> None:
    for package, folder in FOLDERS.items():
        assert package == f"edgeinfer.{folder}"
        assert f"from {folder} import *" in (ROOT / "edgeinfer" / f"{folder}.pyi").read_text(encoding="utf-8")


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Top-level name of each absolute import, and whether it is optional (in a function or for type checkers)."""

    def forward(node: ast.AST, optional: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue  # most of a file, and none imports
            if isinstance(child, ast.Import):
                yield from ((alias.name.split(".")[0], optional) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                yield (child.module or "").split(".")[0], optional
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            yield from forward(child, optional or inner or typing_only)

    return list(forward(ast.parse(path.read_text(encoding="utf-8")), False))


def names(requirements: list[str]) -> set[str]:
    """Import names of requirement lines (here every distribution is called like its module)."""
    return {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].replace("-", "_") for line in requirements}


OPTIONAL = {"edgeinfer/server": "server"}
"""Packages that are imported only where their extra is installed."""


def test_every_import_is_declared() -> None:
    required = names(SETTINGS["project"]["dependencies"])
    extras = {key: names(value) for key, value in SETTINGS["project"]["optional-dependencies"].items()}
    offered = required.union(*(value for key, value in extras.items() if key not in ("dev", "reference")))
    wrong = []
    for path in modules():
        whole = next((extra for folder, extra in OPTIONAL.items() if path.is_relative_to(ROOT / folder)), "dev")
        for name, optional in imports(path):
            if whole != "dev" and name in extras[whole]:
                continue
            if name in sys.stdlib_module_names or name in ("edgeinfer", "__future__"):
                continue
            if name not in (offered if optional else required):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "not declared in pyproject.toml, or optional and not inside a function: " + "; ".join(wrong)


def test_every_dependency_is_imported() -> None:
    used = {name for path in modules() for name, _ in imports(path)}
    unused = names(SETTINGS["project"]["dependencies"]) - used
    assert not unused, f"declared in pyproject.toml but never imported: {', '.join(sorted(unused))}"


def test_tests_import_only_what_dev_and_reference_declare() -> None:
    groups = [SETTINGS["project"]["dependencies"], *SETTINGS["project"]["optional-dependencies"].values()]
    allowed = names([line for group in groups for line in group])
    local = {path.stem for path in (ROOT / "tests").glob("*.py")} | {"tests", "edgeinfer", "benchmarks", "tools"}
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name, _ in imports(path):
            if name not in sys.stdlib_module_names and name not in allowed | local:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "not declared in pyproject.toml: " + "; ".join(wrong)


def test_the_version_stands_in_one_place() -> None:
    import edgeinfer

    assert SETTINGS["project"]["dynamic"] == ["version"]
    assert SETTINGS["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "edgeinfer.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", edgeinfer.__version__)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files: the one that EDGEINFER_TEST_WHEEL names, else built here from a copy."""
    if given := os.environ.get("EDGEINFER_TEST_WHEEL"):
        return Path(given)
    return built(tmp_path_factory.mktemp("build"))


def built(folder: Path, changed: float | None = None) -> Path:
    """A wheel of a copy of the tracked files, which were all changed at that time."""
    source, out = folder / "source", folder / "wheel"
    for name in tracked_files():  # a copy: a build leaves build/ behind, and the next would take stale files from it
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
        if changed:
            os.utime(source / name, (changed, changed))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("edgeinfer-*.whl"))


@pytest.mark.slow
def test_the_same_sources_give_the_same_wheel(tmp_path: Path) -> None:
    one, other = (built(tmp_path / str(day), changed=day * 86400.0) for day in (20000, 20100))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_the_wheel_holds_every_tracked_file_and_nothing_else(wheel: Path) -> None:
    expected = set()
    for name in tracked_files():
        for folder in ("edgeinfer", *FOLDERS.values()):
            if name.startswith(folder + "/") and not name.endswith(".pyi"):
                expected.add(name if folder == "edgeinfer" else f"edgeinfer/{name}")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    prebuilt = {name for name in held if name.startswith("edgeinfer/kernels/objects/")}
    assert sorted(expected - held) == [], "tracked files that the wheel lacks"
    assert sorted(held - expected - prebuilt) == [], "files in the wheel that git does not track"


@pytest.mark.slow
def test_the_wheels_metadata(wheel: Path) -> None:
    import edgeinfer

    with zipfile.ZipFile(wheel) as archive:
        info = f"edgeinfer-{edgeinfer.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert f"Version: {edgeinfer.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata
    assert "edgeinfer = edgeinfer.cli:main" in entry_points


def test_changelog_and_citation_name_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", text, re.M)
    assert released and released[0] == edgeinfer.__version__ and len(set(released)) == len(released)
    assert f"\nversion: {released[0]}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
