"""A technique that lives in this file: an operation with kernel, reference and cost, put in by a pass, seen everywhere.

No product file knows it. It multiplies the output of each layer's attention by a number, so that with factor 1 the text
is as before, and with another the predictions differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.errors import KernelError, UnsupportedModelError
from edgeinfer.graph import PASSES, Attention, Graph, Op, RowOp, Tensor, Types, graph_pass, insert_after
from edgeinfer.kernels import catalogue, extend, fill
from edgeinfer.llm.api import LLM
from edgeinfer.models import demo_path
from edgeinfer.runtime import Instruction, Lowering, Session, lower, rows
from tests.helpers.command_line import edgeinfer
from tests.scale_rows import SCALE

RECIPE = "fuse_input+scale_attention:factor={}"
LAYERS, WIDTH = 5, 256


@dataclass(frozen=True, kw_only=True)
class ScaleRows(RowOp):
    """x times a number."""

    x: Tensor
    factor: float

    def operations(self) -> float:
        """One for each element."""
        return self.x.width

    def kernels(self, types: Types, kv: str) -> tuple[str, ...]:
        """The one from tests/scale_rows."""
        return ("scale_rows",)


@lower.register
def _(op: ScaleRows, at: Lowering) -> list[Instruction]:
    parameters = fill(SCALE, width=op.x.width, stride=at.stride(op.x), rows=rows(op.x), factor=float(op.factor))
    return [at.instruction(op, "scale_rows", [at.at(op.x), at.at(op.out)], parameters)]


@pytest.fixture(autouse=True)
def technique(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers its parts as a separate package would on import."""
    monkeypatch.setattr("edgeinfer.graph.passes.PASSES", dict(PASSES))
    monkeypatch.setattr(catalogue, "_EXTENSIONS", {})
    extend("tests.scale_rows.kernels", {"scale_rows": "tests.scale_rows.reference:scale_rows"})

    @graph_pass
    def scale_attention(graph: Graph, factor: float = 1.0) -> Graph:
        def make(op: Op) -> Op:
            out = dataclasses.replace(op.out, name=f"scaled.{op.layer}")
            return ScaleRows(out=out, x=op.out, factor=factor, layer=op.layer)

        return insert_after(graph, lambda op: isinstance(op, Attention), make)

    yield


def tokens(recipe: str | None) -> list[int]:
    with LLM("demo", recipe=recipe, threads=2) as llm:
        return list(llm.complete("Once upon a time", max_tokens=24, temperature=0).token_ids)


def test_a_factor_of_one_is_the_same_text() -> None:
    assert tokens(RECIPE.format(1)) == tokens(None) == tokens("none")
    assert tokens(RECIPE.format(0.25)) != tokens(None)


def test_its_instructions_agree_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with Bundle.open(demo_path()) as bundle:
        session = Session(bundle, RuntimeConfig(ctx=64, recipe=Recipe.parse(RECIPE.format(0.5))))
        sequence = session.new_sequence()
        session.prefill(sequence, [1, 5, 9, 13, 17])
        session.decode([sequence], [21])
        session.close()


def test_plan_and_estimate_see_it() -> None:
    plain, scaled = (edgeinfer("plan", "demo", "--ctx", "256", "--json", "--recipe", recipe).json
                     for recipe in ("fuse_input", RECIPE.format(2)))
    bytes_of = [{region["name"]: region["bytes"] for region in report["regions"]} for report in (plain, scaled)]
    assert bytes_of[1]["tables"] == bytes_of[0]["tables"] + LAYERS * 256  # an instruction a layer
    assert bytes_of[1]["activations"] >= bytes_of[0]["activations"]
    from edgeinfer.models.describe import describe

    one, other = describe("demo"), describe("demo", recipe=Recipe.parse(RECIPE.format(2)))
    assert other.operations_per_token == one.operations_per_token + LAYERS * WIDTH
    slow = ["estimate", "demo", "--machine", "rpi5", "--json", "-p", "256", "--recipe"]
    assert edgeinfer(*slow, RECIPE.format(2)).json["ttft_ms"] >= edgeinfer(*slow, "none").json["ttft_ms"]
    assert edgeinfer(*slow, "scale_attentio").code == 2


def test_info_shows_its_instructions() -> None:
    report = edgeinfer("info", "demo", "--program", "--json", "--recipe", RECIPE.format(2)).json
    found = [instruction["operation"] for instruction in report["program"] if instruction["kernel"] == "scale_rows"]
    assert found == [f"scale_rows layer {i}" for i in range(LAYERS)]


@pytest.mark.slow
def test_bench_times_it() -> None:
    done = edgeinfer("bench", "demo", "-p", "64", "-n", "8", "-r", "1", "--no-startup", "--profile", "--json",
                     "--recipe", RECIPE.format(2))
    assert done.code == 0, done.err
    assert "scale_rows" in done.out


def test_eval_measures_it(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little dog. The dog liked to play in the garden with a red ball.")
    measured = [edgeinfer("eval", "demo", "--text", text, "--json", "--reference", "demo", "--recipe", recipe).json
                for recipe in (RECIPE.format(1), RECIPE.format(0.25))]
    assert measured[0]["kld_mean"] < 0.01 < measured[1]["kld_mean"]
    assert measured[0]["perplexity"] < measured[1]["perplexity"]


def test_without_a_lowering_or_with_an_instruction_too_wide_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unlowered(RowOp):
        """Has a kernel and a reference, but no lowering to an instruction."""

        x: Tensor

        def kernels(self, types: Types, kv: str) -> tuple[str, ...]:
            return ("scale_rows",)

    @graph_pass
    def unlowered(graph: Graph) -> Graph:
        return insert_after(graph, lambda op: isinstance(op, Attention), lambda op: Unlowered(
            out=dataclasses.replace(op.out, name=f"u.{op.layer}"), x=op.out, layer=op.layer))

    with pytest.raises(UnsupportedModelError, match="The operation unlowered layer 0 has no lowering to a kernel"):
        LLM("demo", recipe="unlowered")
    monkeypatch.setattr(Lowering, "instruction", lambda self, op, kernel, operands, parameters, *rest,
                        **more: Instruction(
        kernel, op.label, (("activations", 0),) * 13, tuple(parameters)))
    with pytest.raises(KernelError, match="has 13 operands; an instruction has room for 12"):
        LLM("demo", recipe="none")
