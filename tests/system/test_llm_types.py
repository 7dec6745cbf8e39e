"""The types of the Python API: they name all options, with the values that are taken, and mypy refuses others."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from edgeinfer import config, registry
from edgeinfer.config import GenerationConfig
from edgeinfer.errors import UsageError
from edgeinfer.llm import options
from edgeinfer.llm.api import LLM
from edgeinfer.quant import KV_TYPES
from edgeinfer.registry import of_command

CHOICES = {
    options.KvType: tuple(KV_TYPES), options.WeightType: config.WEIGHT_TYPES, options.GroupSize: config.GROUP_SIZES,
    options.Device: config.DEVICES,
    options.Speculation: config.SPECULATIONS, options.KvLayout: config.KV_LAYOUTS,
}


@pytest.mark.parametrize("literal", CHOICES, ids=str)
def test_a_type_names_the_choices_that_are_taken(literal: object) -> None:
    assert set(typing.get_args(literal)) == set(CHOICES[literal])


def test_each_field_of_a_request_is_an_option() -> None:
    assert set(options.GenerationOptions.__annotations__) == {one.name for one in fields(GenerationConfig)}


def test_each_option_of_a_technique_is_typed() -> None:
    assert set(options.TechniqueOptions.__annotations__) == {one.name for one in registry.options("run")}


def test_a_slip_in_an_option_of_a_technique_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="Unknown option 'sprase'; did you mean 'sparse'"):
        LLM("demo", sprase="off")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["generate", "complete", "stream", "chat", "chat_stream"])
def test_requests_take_typed_options(name: str) -> None:
    annotation = inspect.signature(getattr(LLM, name)).parameters["options"].annotation
    assert annotation == ("Unpack[ChatOptions]" if "chat" in name else "Unpack[RequestOptions]")


RIGHT = """
from edgeinfer import LLM, GenerationConfig
with LLM("demo", ctx=256, kv="int8", weights="q4", group_size=32, speculate="off", budget="1GiB") as llm:
    text: str = llm.generate("a", max_tokens=5, temperature=0, stop=["b"], config=GenerationConfig(seed=1))
    for piece in llm.stream([1, 2], top_k=1, reuse=True):
        piece.upper()
    text = llm.chat([{"role": "user", "content": "a"}], template_options={"enable_thinking": False})
    done = llm.complete("a", logprobs=2, logit_bias={3: 1.5}, early_stopping="never", beams=2)
    likely: float = done.logprobs[0].top[0].logprob if done.logprobs else 0.0
    scores: list[float] = [score.logprob for score in llm.score("a", [" b", [3]])]
"""
WRONG = """
from edgeinfer import LLM
LLM("demo", kv="int9")
LLM("demo", group_size=48)
LLM("demo", cxt=256)
llm = LLM("demo")
llm.generate("a", max_tokens="5")
llm.generate("a", temprature=0)
llm.stream("a", speculate="maybe")
llm.chat([], template_options=3)
llm.complete(3)
llm.score("a", 3)
"""


@pytest.mark.slow
def test_mypy_takes_right_calls_and_refuses_wrong_ones(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed (extra 'dev')")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "--follow-imports", "silent",
         "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "right.py"), str(tmp_path / "wrong.py")],
        cwd=root, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in lines if "right.py" in line], done.stdout
    found = {int(line.split("wrong.py:")[1].split(":")[0]) for line in lines if "wrong.py:" in line}
    wrong = {n for n, line in enumerate(WRONG.splitlines(), 1) if "LLM(" in line or "llm." in line}
    assert found == wrong - {6}, done.stdout


def test_a_model_takes_the_options_of_the_table() -> None:
    own = set(inspect.signature(LLM.__init__).parameters) - {"self", "techniques"}
    table = {one.name for one in of_command("run")} - {field.name for field in fields(GenerationConfig)}
    assert table - own == {"raw", "system", "no_mmap", "no_stats", "json", "json_schema", "grammar", "prompt_cache"}, \
        "the command line's alone"
    alone = {"model", "max_sequences", "own_tokens", "kv_tokens", "beams", "mmap", "progress", "fill_budget",
             "max_queue"}
    assert own - table == alone, "Python's alone"
