"""Permitted imports (ARCHITECTURE.md), read from the sources; nothing is imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "memory_planner", "converters", "sparse", "offload", "devices")  # install as edgeinfer.<folder>
LAYERS = {  # compared as strings
    **dict.fromkeys(["errors", "base", "demo"], "0"),
    **dict.fromkeys(["quant"], "0b"),
    **dict.fromkeys(["config"], "0c"),
    **dict.fromkeys(["registry"], "0d"),
    **dict.fromkeys(["kernels"], "1"),
    **dict.fromkeys(["graph"], "2a"),
    **dict.fromkeys(["bundle", "devices"], "2b"),
    **dict.fromkeys(["text"], "2c"),
    **dict.fromkeys(["memory_planner"], "3"),
    **dict.fromkeys(["runner"], "4"),
    **dict.fromkeys(["quality"], "4b"),
    **dict.fromkeys(["runtime", "backends"], "5"),
    **dict.fromkeys(["calibration"], "5a"),
    **dict.fromkeys(["sparse", "offload", "models", "pipeline"], "5b"),
    **dict.fromkeys(["engine"], "5c"),
    **dict.fromkeys(["techniques"], "5d"),
    **dict.fromkeys(["llm", "bench"], "6"),
    **dict.fromkeys(["server"], "6b"),
    **dict.fromkeys(["cluster"], "6c"),
    **dict.fromkeys(["cli"], "7"),
    **dict.fromkeys(["__main__"], "8"),
}
OPEN = ("base", "quality", "calibration", "engine.speculation.load", "graph.topn_cost", "llm.executors", "llm.open",
        "llm.strategy", "models.calibrated", "models.comparison", "models.describe", "models.description",
        "models.file_types", "models.list", "models.sizes", "models.spoken", "models.uses", "runner.block_tables",
        "runner.prefix_cache", "runner.prompt_parts", "runner.pruning", "runner.state_slots", "runner.window_blocks")
"""Modules, and packages of modules, that are imported by their own names: not through the package above them."""
CONVERTERS_MAY_IMPORT = {"base", "bundle", "config", "devices", "errors", "graph", "quant", "registry", "text"}
MAY_IMPORT_CONVERTERS = {"models", "cli"}
PUBLIC_NAMES = {"LLM": "llm", "EdgeInferError": "errors", "GenerationConfig": "config"}


def sources(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every module of the packages with its installed name in parts: ("edgeinfer", package, ...)."""
    for folder in ("edgeinfer", *FOLDERS):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield path, [*([] if folder == "edgeinfer" else ["edgeinfer"]), *parts]


def imported(path: Path, module: list[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each import; relative ones resolved, `from a import b` as a.b."""
    yield from imports_of(ast.parse(path.read_text(encoding="utf-8")), module)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a tree without its expressions, which are most of it and import nothing."""
    waiting = [tree]
    while waiting:
        yield (node := waiting.pop())
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


def imports_of(tree: ast.AST, module: list[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of each import in a tree, as `imported`."""
    package = module[:-1]
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            if node.level and len(base) < 1 + (module[1] in FOLDERS):
                yield node.lineno, "(escape)"  # a type checker sees the folder at the root, where nothing is above it
                continue
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def hidden(root: Path, part: str, name: str) -> bool:
    """Return whether `name` is a module of the package that its public API does not list in __all__."""
    home = root / part if part in FOLDERS else root / "edgeinfer" / part
    if not (home / name).is_dir() and not (home / f"{name}.py").is_file():
        return False
    init = home / "__init__.py"
    return not (init.is_file() and name in public_names(init))


def public_names(init: Path) -> set[str]:
    """The strings of a package's __all__; none if it is computed, which readers and type checkers cannot see."""
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            names = value.elts if isinstance(value, ast.List | ast.Tuple) else []
            return {name.value for name in names if isinstance(name, ast.Constant)}
    return set()


def violation(root: Path, part: str, name: str) -> str | None:
    """Say what is wrong with a module of `part` importing `name`, or None."""
    top, *rest = name.split(".")
    if name == "(escape)":
        return "a relative import leaves the folder: write from edgeinfer... import"
    if top in FOLDERS:
        return f"imports {top} from the root: write edgeinfer.{top}"
    if top in ("numba", "llvmlite") and part != "kernels":
        return f"imports {top}: only kernels/ may"
    if top == "ray" and part != "cluster":
        return f"imports {top}: only cluster/ may"
    if top != "edgeinfer" or not rest:
        return None
    target = PUBLIC_NAMES.get(rest[0], rest[0])
    if target == part or target == "__version__":
        return None
    if target not in {*LAYERS, "converters"}:
        return f"imports {name}: this package has no layer"
    name_opened = any((".".join(rest) + ".").startswith(module + ".") for module in OPEN)
    if not name_opened and (len(rest) > 2 or (len(rest) == 2 and hidden(root, target, rest[1]))):
        return f"imports {name}: import through the package, edgeinfer.{target}"
    if target == "converters":
        allowed = part in MAY_IMPORT_CONVERTERS
    elif part == "converters":
        allowed = target in CONVERTERS_MAY_IMPORT
    else:
        allowed = target == "errors" or LAYERS[target] < LAYERS[part]
    return None if allowed else f"imports {name}: {target} is not below {part}"


def violations(root: Path) -> list[str]:
    """Every import against the rules, as path:line: sentence."""
    found = []
    for path, module in sources(root):
        part = module[1]
        where = path.relative_to(root).as_posix()
        if part != "__init__" and part not in {*LAYERS, "converters"}:
            found.append(f"{where}:1: {part} has no layer")
            continue
        if part == "__init__":  # edgeinfer/__init__.py names the public classes lazily and imports nothing of ours
            continue
        for line, name in imported(path, module):
            if message := violation(root, part, name):
                found.append(f"{where}:{line}: {message}")
    return found


def test_every_import_goes_down_the_floors() -> None:
    assert not (found := violations(ROOT)), "\n" + "\n".join(found)


def test_every_package_lists_its_public_names() -> None:
    inits = [ROOT / part / "__init__.py" for part in FOLDERS if LAYERS.get(part, "side") not in ("2b", "5a")]
    inits += [ROOT / "edgeinfer" / part / "__init__.py" for part in ("bundle", "graph", "runtime")]
    assert not [str(init) for init in inits if not public_names(init)], "a package without a literal __all__"


def test_a_computed_list_hides_everything(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "memory_planner").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__all__ = sorted({'pack': ''})\n")
    (tmp_path / "kernels" / "pack.py").write_text("")
    (tmp_path / "memory_planner" / "arena.py").write_text("from edgeinfer.kernels import pack\n")
    assert [found for found in violations(tmp_path) if "import through the package" in found]


@pytest.mark.parametrize(
    ("where", "text", "sentence"),
    [
        ("sparse/rewrite.py", "from edgeinfer.offload import cache", "offload is not below sparse"),
        ("edgeinfer/graph/build.py", "from ..bundle import Bundle", "bundle is not below graph"),
        ("edgeinfer/bundle/reader.py", "from edgeinfer.devices import Profile", "devices is not below bundle"),
        ("kernels/shapes.py", "def f():\n    import edgeinfer.graph", "graph is not below kernels"),
        ("edgeinfer/quant/types.py", "from ..config import WEIGHT_TYPES", "config is not below quant"),
        ("memory_planner/plan.py", "from edgeinfer.kernels.linear import gemv", "import through the package"),
        ("memory_planner/plan.py", "from edgeinfer.kernels import linear", "import through the package"),
        ("memory_planner/plan.py", "from edgeinfer.kernels.pack import rows", "import through the package"),
        ("memory_planner/plan.py", "from edgeinfer import LLM", "llm is not below memory_planner"),
        ("edgeinfer/runtime/session.py", "import numba.core", "imports numba: only kernels/ may"),
        ("edgeinfer/cli/commands/run.py", "from llvmlite import binding", "imports llvmlite: only kernels/ may"),
        ("edgeinfer/runtime/load.py", "from edgeinfer.converters import convert", "converters is not below runtime"),
        ("converters/hf.py", "from edgeinfer.runtime import Session", "runtime is not below converters"),
        ("kernels/isa.py", "from ..errors import KernelError", "a relative import leaves the folder"),
        ("edgeinfer/llm/api.py", "import kernels", "imports kernels from the root"),
        ("edgeinfer/cli/commands/serve.py", "def f():\n    import ray", "imports ray: only cluster/ may"),
        ("edgeinfer/stray.py", "", "stray has no layer"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, where: str, text: str, sentence: str) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__all__ = ['pack']\n")
    (tmp_path / "kernels" / "pack.py").write_text("")
    (tmp_path / "memory_planner").mkdir()
    (tmp_path / "memory_planner" / "arena.py").write_text("from edgeinfer.kernels import gemv, pack\n")
    (tmp_path / "edgeinfer" / "bundle").mkdir(parents=True)
    (tmp_path / "edgeinfer" / "bundle" / "format.py").write_text("from edgeinfer.graph import WeightType\n")
    (tmp_path / "kernels" / "linear.py").write_text("from .isa import isa\nfrom edgeinfer.errors import KernelError\n")
    assert violations(tmp_path) == []
    path = tmp_path / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert [found for found in violations(tmp_path) if sentence in found and found.startswith(where)]


def module_imports(path: Path, module: list[str]) -> Iterator[str]:
    """Yield the full names of what a module imports, in functions too, but not for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    waiting: list[ast.AST] = list(tree.body)
    run = ast.Module([], [])
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            run.body.append(node)
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    yield from (name for _, name in imports_of(run, module))


def part_edges(root: Path) -> dict[str, set[str]]:
    """Return the imports of each module within its own package, leaving out its `__init__.py`, which only others
    import.
    """
    found = {".".join(module).removesuffix(".__init__"): (path, module) for path, module in sources(root)
             if module[-1] != "__init__" or len(module) > 3}
    edges: dict[str, set[str]] = {}
    for name, (path, module) in found.items():
        reached = edges.setdefault(name, set())
        for target in module_imports(path, module):
            reached |= {n for n in (target, target.rpartition(".")[0]) if n in found and n.split(".")[1] == module[1]}
        reached.discard(name)
    return edges


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The names of one circle, the first again at its end; nothing if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name):], name]
        if name not in done:
            for target in sorted(edges.get(name, ())):
                if found := visit(target, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := visit(name, []))), [])


def test_no_import_cycle_inside_a_package() -> None:
    edges = part_edges(ROOT)
    assert sum(map(len, edges.values())) > 100, "the imports inside packages were not found"
    assert not circle(edges), "a circle of imports"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from .plan import Plan", True),
        ("from . import plan", True),
        ("from edgeinfer.memory_planner.plan import Plan", True),
        ("try:\n    from .plan import Plan\nexcept ImportError:\n    pass", True),
        ("class A:\n    from .plan import Plan", True),
        ("def f():\n    from .plan import Plan", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .plan import Plan", False),
        ("from .blocks import Pool", False),
    ],
)
def test_a_planted_circle_is_caught(tmp_path: Path, text: str, found: bool) -> None:
    """plan -> blocks -> sizes -> plan, closed by `text` in the last."""
    part = tmp_path / "memory_planner"
    part.mkdir()
    (part / "__init__.py").write_text("from .plan import Plan\n")
    (part / "plan.py").write_text("from .blocks import Pool\n")
    (part / "blocks.py").write_text("from . import sizes\n" if "blocks" not in text else "")
    (part / "sizes.py").write_text(text + "\n")
    names = [f"edgeinfer.memory_planner.{name}" for name in ("blocks", "sizes", "plan", "blocks")]
    assert circle(part_edges(tmp_path)) == (names if found else [])
