"""Programs before they run: every operand's extent lies inside its region, or linking is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import KernelError
from edgeinfer.graph import ModelConfig
from edgeinfer.kernels import catalogue
from edgeinfer.registry import recipe_with
from edgeinfer.runtime import Instruction, Program, Session
from tests.helpers.sessions import TINY, WINDOWED, session

BIASED = replace(TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
QWEN = replace(TINY, model_type="qwen3", head_dim=10)
RELU = replace(BIASED, hidden_act="relu")
MODELS = {
    "q4 int8": (TINY, "q4", 32, "tile16", "int8"), "int8 f16": (BIASED, "int8", 32, "tile16", "f16"),
    "f16 f32": (QWEN, "f16", 32, "tile16", "f32"), "f32 int8": (WINDOWED, "f32", 32, "tile16", "int8"),
    "neuron q4": (RELU, "q4", 32, "neuron", "int8"), "neuron int8": (TINY, "int8", 128, "neuron", "int8"),
}
IDLE = {"apart", "bias", "by", "masks", "source", "norm", "q_norm", "k_norm", "table", "slots", "scores", "pruned",
        "means", "sinks", "slopes"}
"""Operands that an instruction may do without."""
REGIONS = {"weights", "constants", "activations", "kv", "logits", "scratch"}


@pytest.fixture(params=MODELS, scope="module")
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    config, weights, group, layout, kv = MODELS[request.param]
    path: Path = tmp_path_factory.mktemp("model") / "bundle"
    assert isinstance(config, ModelConfig)
    write_random_bundle(config, path, weights, group, ffn_layout=layout)
    with session(path, kv=kv, threads=2, ctx=600, max_sequences=2) as running:
        yield running


def ends(program: Program) -> dict[str, int]:
    """Return how far the operands reach into each region."""
    reach: dict[str, int] = {}
    for instruction in program.instructions:
        for (region, offset), extent in zip(instruction.operands, instruction.extents, strict=True):
            if extent:
                reach[region] = max(reach.get(region, 0), offset + extent)
    return reach


def test_operands_of_real_programs_lie_inside_their_regions(opened: Session) -> None:
    """The session has checked them; here, that no operand which a kernel uses goes without an extent."""
    sizes = {name: len(memory) for name, memory in opened.executor.regions.items()}
    opened.program.check(sizes)
    assert set(ends(opened.program)) == REGIONS
    for instruction in opened.program.instructions:
        family = catalogue.family_of(instruction.kernel)
        assert family and len(instruction.operands) <= len(family.operands) and len(instruction.parameters) <= 32
        idle = {name for name, extent in zip(family.operands, instruction.extents, strict=False) if not extent}
        assert idle <= IDLE, instruction
        for name, place in zip(family.operands, instruction.operands, strict=False):
            assert name not in idle or place == ("activations", 0), instruction


def test_operands_of_chosen_rows_and_pruned_prompts_are_used(tmp_path: Path) -> None:
    write_random_bundle(TINY, tmp_path / "bundle")
    with session(tmp_path / "bundle", ctx=600, recipe=recipe_with(attention="top:16"), lazy="keep=0.5") as running:
        used = {name for instruction in running.program.instructions
                if (family := catalogue.family_of(instruction.kernel))
                for name, extent in zip(family.operands, instruction.extents, strict=False) if extent}
        assert {"scores", "pruned", "means"} <= used
        running.program.check({name: len(memory) for name, memory in running.executor.regions.items()})


@pytest.mark.parametrize("region", sorted(REGIONS))
def test_one_byte_too_far_is_refused_with_its_instruction_and_operand(opened: Session, region: str) -> None:
    reach = ends(opened.program)
    opened.program.check(reach)
    number, instruction = next(
        (n, r) for n, r in enumerate(opened.program.instructions)
        if any(p[0] == region and p[1] + e == reach[region] and e for p, e in zip(r.operands, r.extents, strict=True)))
    with pytest.raises(KernelError) as caught:
        opened.program.check(reach | {region: reach[region] - 1})
    assert f" of instruction {number} ({instruction.kernel}, {instruction.label}) takes " in str(caught.value)
    assert str(caught.value).endswith(f"; the region {region} has {reach[region] - 1}.")
    for place, extent in zip(instruction.operands, instruction.extents, strict=True):
        if extent and place[0] == region:  # the operand moved, where memory ends as it does
            moved = tuple((r, reach[region] - extent + 1 if (r, o) == place else o) for r, o in instruction.operands)
            with pytest.raises(KernelError, match=f"takes {extent} bytes from {reach[region] - extent + 1} on"):
                Program((replace(instruction, operands=moved),)).check(reach)


def test_an_instruction_with_too_few_extents_and_an_absent_region_are_refused() -> None:
    instruction = Instruction("quantize", "q", (("activations", 0), ("state", 64)), extents=(64, 8))
    with pytest.raises(KernelError) as caught:
        Program((instruction,)).check({"activations": 64})
    assert str(caught.value) == \
        "Operand 1 (out) of instruction 0 (quantize, q) takes 8 bytes from 64 on; the region state has 0."
    Program((instruction,)).check({"activations": 64, "state": 72})
    with pytest.raises(KernelError, match="has 2 operands and 1 extents; each needs one"):
        Program((replace(instruction, extents=(64,)),)).check({"activations": 64, "state": 72})
    with pytest.raises(KernelError, match="takes 8 bytes from -8 on"):
        Program((Instruction("quantize", "q", (("activations", -8),), extents=(8,)),)).check({"activations": 64})
