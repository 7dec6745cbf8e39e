"""The contract of techniques: one that is planted here is seen everywhere, and no other file knows any by its name."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import registry
from edgeinfer.backends import PROVIDERS, device_planner
from edgeinfer.bundle import Bundle
from edgeinfer.config import MAX_KLD, Recipe, RuntimeConfig
from edgeinfer.errors import UsageError
from edgeinfer.graph import build_graph, expected_types
from edgeinfer.llm.api import LLM
from edgeinfer.models import demo_path
from edgeinfer.quality.gate import judge
from edgeinfer.quality.measurements import Measurement, Setting, measured_identity, remember
from edgeinfer.registry import COMMANDS, MODULES, configured, recipe_with
from tests.helpers.planted import REGION_BYTES, TECHNIQUE
from tests.helpers.sessions import session

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = {
    "run": ("run", "demo", "Once", "-n", "2"), "plan": ("plan", "demo"),
    "estimate": ("estimate", "demo", "--machine", "rpi5"),
    "bench": ("bench", "demo", "-p", "0", "-n", "2", "-r", "1", "--no-startup"), "info": ("info", "demo"),
    "eval": ("eval", "demo", "--text", "TEXT", "-c", "16"),
}
SCRIPT = """
import contextlib, io, json, sys
from edgeinfer import registry
registry.MODULES += ("tests.helpers.planted",)
from edgeinfer.cli.app import execute
def said(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = execute(arguments)
    return [code, out.getvalue()]
print(json.dumps([said(each) for each in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int, str]]:
    """Exit code and standard output of all commands: their help, and their JSON with the option off and on."""
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_text("Once upon a time there was a king who had three daughters.")
    asked = {}
    for name in COMMANDS:
        own = [str(text) if one == "TEXT" else one for one in ARGUMENTS[name]]
        asked |= {(name, "help"): [name, "--help-all"], (name, "off"): [*own, "--json"],
                  (name, "half"): [*own, "--json", "--shade", "half"]}
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=json.dumps(list(asked.values())), cwd=ROOT,
                          capture_output=True, text=True, check=True)
    return dict(zip(asked, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "MODULES", (*MODULES, "tests.helpers.planted"))
    registry.techniques.cache_clear()
    yield
    registry.techniques.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_in_the_help_and_json_of_each_command(outcomes: dict[tuple[str, str], tuple[int, str]],
                                                    command: str) -> None:
    code, text = outcomes[command, "help"]
    assert code == 0 and "--shade off|half" in text and "EDGEINFER_SHADE" in " ".join(text.split())
    for mode, expected in (("off", None), ("half", {"mode": "half", "in": command})):
        code, text = outcomes[command, mode]
        assert code == 0, text
        assert json.loads(text)["shade"] == expected


@pytest.mark.slow
def test_plan_and_estimate_count_its_region(outcomes: dict[tuple[str, str], tuple[int, str]]) -> None:
    plain, shaded = (json.loads(outcomes["plan", mode][1]) for mode in ("off", "half"))
    assert {"name": "shade", "bytes": REGION_BYTES, "kind": "private", "reason": "what a planted technique takes"} \
        in shaded["regions"]
    assert shaded["total_bytes"] > plain["total_bytes"]
    plain, shaded = (json.loads(outcomes["estimate", mode][1]) for mode in ("off", "half"))
    assert shaded["total_bytes"] > plain["total_bytes"] and shaded["decode_tok_per_s"] > plain["decode_tok_per_s"]


def test_a_model_takes_its_option_and_refuses_wrong_values(planted: None) -> None:
    with LLM("demo", ctx=32, threads=1, shade="half") as llm:  # type: ignore[call-arg]
        assert llm.plan.region("shade").nbytes == REGION_BYTES
        assert llm.complete("Once", max_tokens=2, temperature=0).completion_tokens == 2
    with pytest.raises(UsageError, match=r"^shade is 'whole'; choose one of off, half\.$"):
        LLM("demo", shade="whole")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"Unknown option 'shades'; did you mean 'shade'\?"):
        LLM("demo", shades="half")  # type: ignore[call-arg]


@pytest.mark.parametrize(("kld", "enabled", "why"), [
    (MAX_KLD / 2, 1, ()), (2 * MAX_KLD, 0, ("--shade half (KLD 0.0400 over 500 tokens is above --max-kld 0.02)",)),
])
def test_it_stands_behind_the_gate(planted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kld: float,
                                   enabled: int, why: tuple[str, ...]) -> None:
    monkeypatch.setattr("edgeinfer.quality.measurements.cache_root", lambda: tmp_path)
    monkeypatch.setattr(Bundle, "parts", frozenset({"draft_head"}))
    monkeypatch.setattr("edgeinfer.bundle.reader.APPROXIMATING", ("draft_head",))
    with Bundle.open(demo_path()) as bundle:
        config = RuntimeConfig()
        assert bundle.approximates
        assert judge(bundle, config).switched_off == (
            "--shade half (not measured with kv=int8 passes=shade:mode=half)",)
        setting = Setting.of_run(configured(config, {"shade": "half"}))
        remember(bundle, Measurement(setting, kld, 1.0, 0.9, 9.0, 8.9, 500, "windows", "0", measured_identity(bundle),
                                     "generic"))
        judged = judge(bundle, config)
        assert len(judged.enabled) == enabled and judged.switched_off == why
        assert all(one.recipe == recipe_with(shade="half") for one in judged.enabled)
        assert judge(bundle, configured(config, {"shade": "off"})).enabled == ()  # asked for: nothing by itself


def test_it_is_part_of_the_cache_identity(planted: None) -> None:
    def identity(**options: Any) -> str:
        with session(demo_path(), ctx=32, **options) as opened:
            return opened._identity(False)

    assert len({identity(), identity(shade="half"), identity(shade="off")}) == 3


def test_other_backends_refuse_it_by_name(planted: None) -> None:
    provider, config = PROVIDERS["onnx-cpu"], RuntimeConfig()
    with Bundle.open(demo_path()) as bundle:
        graph = build_graph(bundle.config, expected_types(bundle.types), Recipe(()))
    with pytest.raises(UsageError, match=r"^Device onnx-cpu runs models exactly .* it has no pass shade:mode=half: "):
        device_planner(graph, configured(config, {"shade": "half"}), provider)
    assert device_planner(graph, configured(config, {"shade": "off"}), provider)[1].recipe == Recipe(())


# -- names -------------------------------------------------------------------------------------------------------------

OWN_FILES = {
    "sparse": ("sparse/", "edgeinfer/runtime/sparse_fallback.py"),
    "head": ("sparse/",),
    "attention": ("edgeinfer/techniques/topn_attention.py",),
    "lazy": ("edgeinfer/techniques/prompt_pruning.py",),
    "speculate": ("edgeinfer/techniques/speculation.py", "edgeinfer/runtime/self_draft.py",
                  "edgeinfer/runtime/draft_head.py"),
    "experts from flash": ("offload/kept_experts.py",),
    "sparse from flash": ("offload/cold_neurons.py",),
}
OTHER_MEANINGS = {
    "sparse": {"edgeinfer/llm/strategy.py": "how a way to run is called",
               "edgeinfer/graph/architectures/": "a type of MLP"},
    "head": {"edgeinfer/graph/": "the weight", "edgeinfer/bundle/": "the weight", "converters/": "the weight",
             "edgeinfer/registry/rules.py": "the weight",
             "edgeinfer/cli/commands/info.py": "the weight", "edgeinfer/models/": "the weight",
             "edgeinfer/cli/reports/explain.py": "a part of a model", "kernels/": "the kernels"},
    "attention": {"kernels/": "the kernels", "edgeinfer/graph/architectures/": "a kind of layer",
                  "edgeinfer/graph/ops/base.py": "a part of a model",
                  "edgeinfer/bundle/config_json.py": "a kind of layer",
                  "edgeinfer/cli/reports/explain.py": "a part of a model",
                  "edgeinfer/backends/onnx/export.py": "a setting of an export"},
    "experts from flash": {"memory_planner/plan.py": "the mode of a plan"},
    "sparse from flash": {"memory_planner/plan.py": "the mode of a plan"},
}
"""Files in which the word is not the technique's name, and what it is there."""


def named(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and file of each string in product files that is the name of a technique."""
    names = {one.name for one in registry.techniques()}
    for part in ("edgeinfer", "kernels", "memory_planner", "converters", "sparse", "offload", "devices"):
        for path in sorted((folder / part).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not any(f"{quote}{name}{quote}" in text for name in names for quote in "'\""):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                    yield node.value, path.relative_to(folder).as_posix()


def stray(found: Iterator[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(name, file) for name, file in found
            if not file.startswith((*OWN_FILES[name], *OTHER_MEANINGS.get(name, ())))}


def test_no_technique_is_named_outside_its_own_files() -> None:
    assert set(OWN_FILES) == {one.name for one in registry.techniques()}
    found = list(named(ROOT))
    assert not stray(iter(found))
    for name, files in OTHER_MEANINGS.items():
        unused = [file for file in files if not any(each == name and at.startswith(file) for each, at in found)]
        assert not unused, f"no file says {name} there: {unused}"


def test_a_name_elsewhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "edgeinfer" / "llm").mkdir(parents=True)
    strategy = tmp_path / "edgeinfer" / "llm" / "strategy.py"
    strategy.write_text("steps = [step for step in recipe if step.name == 'lazy']\n")
    assert stray(named(tmp_path)) == {("lazy", "edgeinfer/llm/strategy.py")}


def test_each_option_is_declared_once() -> None:
    names = [one.name for one in registry.options()]
    assert len(names) == len(set(names)) and TECHNIQUE.name not in names
