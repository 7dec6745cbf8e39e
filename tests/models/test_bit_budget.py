"""Types of matrices by a number of bits or bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.calibration import effects
from edgeinfer.calibration.effects import measure_effects
from edgeinfer.calibration.hooks import View, open_plain
from edgeinfer.converters import (
    CALIBRATION_FILE,
    BitBudget,
    Calibration,
    ConversionReport,
    convert,
    write_random_bundle,
)
from edgeinfer.errors import UsageError
from edgeinfer.graph import ExpertsConfig, ExpertsGated, GatedLinear, LinearPart, ModelConfig, read_config
from edgeinfer.models.calibrated import by_text, calibration_text
from edgeinfer.quant import InputStatistics
from tests.helpers import golden_cases
from tests.helpers.checkpoints import SENTENCES, make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import write_gguf
from tests.helpers.sessions import KIMI, TINY, tokens

MOE = replace(TINY, model_type="qwen3_moe", experts=ExpertsConfig(5, 2, 40))
GEMMA4 = read_config(golden_cases.config_of("gemma4-keys-as-values"))
GPT_OSS = read_config(golden_cases.config_of("gpt-oss"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "hf", hidden_size=128, intermediate_size=384, vocab_size=320)


def by_budget(source: Path, calibration: Calibration | None = None, **budget: float) -> ConversionReport:
    return convert(source, source.parent / "bundle", overwrite=True, chooser=BitBudget(**budget),  # type: ignore[arg-type]
                   calibration=calibration and (lambda _: calibration))


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("bits", [3.6, 4.5, 5, 6.25, 8])
def test_bits_are_met_and_never_exceeded(source: Path, bits: float) -> None:
    report = by_budget(source, bits=bits)
    matrices = [one for one in report.tensors if one.weights]
    assert 0.98 * bits < report.bits <= bits and len(matrices) >= 9
    assert report.bits == 8 * sum(one.nbytes for one in matrices) / sum(one.weights for one in matrices)
    assert report.chosen and report.chosen.gap is not None and report.chosen.gap < 0.25
    with Bundle.open(source.parent / "bundle") as bundle:
        bundle.verify()
        assert {name: entry.type for name, entry in bundle.tensors.items() if entry.type.layout != "plain"} == {
            name: replace(stored, levels=bundle.tensors[name].type.levels)
            for name, stored in report.chosen.types.items()}
    record = json.loads((source.parent / "bundle" / CALIBRATION_FILE).read_text())
    assert record["method"] == "plain" and record["bits"] == report.bits and record["request"] == f"--bits {bits:g}"
    assert record["bits_of"] == {one.name: one.bits for one in matrices}


@pytest.mark.slow
def test_a_size_is_met_by_the_file_of_weights(source: Path) -> None:
    least = (source.parent / "bundle" / "weights.bin")
    for size in (210_000, 260_000, 330_000):
        by_budget(source, size=size)
        assert 0.97 * size < least.stat().st_size <= size


@pytest.mark.slow
def test_more_bits_lose_less(source: Path) -> None:
    costs = [by_budget(source, bits=bits).chosen.cost for bits in (3.6, 4.5, 5.5, 7)]  # type: ignore[union-attr]
    assert all(a > 1.5 * b for a, b in pairwise(costs))


def test_the_matrix_whose_errors_matter_most_gets_most_bits(source: Path) -> None:
    found = by_budget(source, calibration({"layers.1.o": (10.0, 0.0)}), bits=4.5)
    bits = {one.name: one.bits for one in found.tensors if one.weights}
    assert bits["layers.1.o"] == max(bits.values()) > bits["layers.0.o"]


def calibration(effects: dict[str, tuple[float, float]]) -> Calibration:
    def of(weight):  # type: ignore[no-untyped-def]
        return [InputStatistics(99, np.ones(weight.shape[-1], np.float32))]

    return Calibration("importance", "a text", "", 99, of, scale=False, effects=effects)


@pytest.mark.parametrize("budget, said", [
    ({"bits": 2}, r"--bits 2 cannot be met: it must be from 3\.\d+ to 8\.\d+, the bits per weight that"),
    ({"bits": 12}, r"--bits 12 cannot be met: .* bits per weight .*; f16 is --weights f16"),
    ({"size": 1000}, r"--size 1.0 kB cannot be met: this model's weights take from .* to .*; choose more"),
    ({"size": 10**9}, r"--size 1.00 GB cannot be met: .*; the largest is --weights int8"),
])
def test_what_no_types_can_meet_is_refused(source: Path, budget: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        by_budget(source, **budget)
    assert not (source.parent / "bundle").exists()


def test_it_is_refused_before_a_text_is_read(source: Path) -> None:
    for bits in (2, 99):
        with pytest.raises(UsageError, match=f"--bits {bits} cannot be met"):
            convert(source, source.parent / "bundle", chooser=BitBudget(bits=bits),
                    calibration=lambda checkpoint: pytest.fail("the text was read"))


def test_the_command_says_what_contradicts(source: Path) -> None:
    convert_it = partial(edgeinfer, "convert", source, source.parent / "made")
    for options, said in (
        (("--bits", 4, "--size", "2GB"), "--bits 4 and --size 2GB both set the size of the bundle"),
        (("--bits", 4, "--weights", "q4"), "--bits 4 chooses the type of each matrix, and --weights q4 sets one"),
        (("--size", "2GB", "--head", "q6"), "--size 2GB chooses the type of each matrix, and --head q6 sets one"),
        (("--weights", "Q4_K_M", "--head", "q6"), "--weights q4_k_m chooses the type of each matrix, and --head q6"),
        (("--size", "much"), "Size 'much' cannot be read"),
        (("--bits", "nan"), "--bits nan cannot be met: it must be from 3."),
        (("--bits", "-1"), "--bits -1 cannot be met: it must be from 3."),
    ):
        done = convert_it(*options)
        assert done.code != 0 and said in done.sentence, done.sentence
    assert not (source.parent / "made").exists()


@pytest.mark.slow
def test_the_command_reports_bits(source: Path) -> None:
    done = edgeinfer("convert", source, source.parent / "made", "--bits", 4.5, "--json")
    report = json.loads(done.out)
    assert 4.4 < report["bits"] <= 4.5 and 0 <= report["gap"] < 0.25
    assert {one["bits"] is None for one in report["tensors"]} == {True, False}
    shown = edgeinfer("info", source.parent / "made")
    assert "4.5" in shown.out and "--bits 4.5" in shown.out


@pytest.mark.parametrize("model", [TINY, pytest.param(MOE, marks=pytest.mark.slow), KIMI, GEMMA4],
                         ids=["dense", "experts", "parts", "keys-as-values"])
def test_effects_are_those_of_noise_in_each_matrix(tmp_path: Path, model: ModelConfig) -> None:
    write_random_bundle(model, tmp_path / "m", weights="f32")
    session, steps = open_plain(tmp_path / "m", 64, 2, kv="f32", outputs=40, chunk=40), []
    try:
        found = measure_effects(session, tokens(100), lambda *step: steps.append(step))
        again = measure_effects(session, tokens(100))
    finally:
        session.close()
    matrices = {weight.name for weight in session.graph.weights if weight.kind in ("matrix", "experts", "head")}
    assert matrices | {"embed"} == found.keys() and found == again
    assert all(one.output > 0 for name, one in found.items() if name in matrices)
    assert found["embed"].rows > 0 and (found["embed"].output > 0) is model.tie_word_embeddings
    assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("model", [replace(TINY, mlp_bias=True), GPT_OSS], ids=["dense", "experts"])
def test_gates_without_noise_are_the_models_own(tmp_path: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    """Biases are no errors."""
    write_random_bundle(model, tmp_path / "m", weights="f32")
    monkeypatch.setattr(effects, "SHARE", 0.0)
    session = open_plain(tmp_path / "m", 64, 1, kv="f32", outputs=16, chunk=16)
    try:
        gates = [op for op in session.graph.ops if isinstance(op, GatedLinear | ExpertsGated)]
        run = effects._Run(session, tokens(16))
        assert gates and all(op.bias for op in gates)
        assert all(abs(run.divergence(op, np.random.default_rng(0))) < 1e-6 for op in gates)
    finally:
        session.close()


def test_noise_of_a_part_is_in_its_columns(tmp_path: Path) -> None:
    """By the size of these alone: columns that are not written yet hold anything."""
    write_random_bundle(KIMI, tmp_path / "m", weights="f32")
    session = open_plain(tmp_path / "m", 64, 1, kv="f32", outputs=16, chunk=16)
    try:
        parts = [op for op in session.graph.ops if isinstance(op, LinearPart)][:2]
        for op in parts:
            out = View(session, 16).floats(op.out)
            out[:], mine = 1e6, slice(op.first, op.first + op.weight.shape[0])
            out[:, mine] = 1.0
            effects._add_noise(session, View(session, 16), op, np.zeros((), np.float32), np.random.default_rng(0))
            others = np.delete(out, np.r_[mine], axis=1)
            assert others.size and (others == 1e6).all() and 0.02 < np.std(out[:, mine]) < 0.5
        assert parts[0].first < parts[1].first
    finally:
        session.close()


def test_noise_is_as_unequal_as_rows() -> None:
    """Of v below q and k, whose outputs are far larger, errors are small."""
    sizes = effects._sizes(np.array([[3, 4], [0, 0.05], [0, 0]], np.float32))
    np.testing.assert_allclose(np.square(sizes).mean(), 1, rtol=1e-6)
    np.testing.assert_allclose(sizes / sizes[0], [1, 0.01, 0], rtol=1e-6)
    assert not effects._sizes(np.zeros((2, 3), np.float32)).any()


@pytest.mark.slow
def test_effects_of_a_text_are_kept_and_share_bits_out(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(source.parent / "cache"))
    (source.parent / "text.txt").write_text("\n".join(SENTENCES * 60))
    text = calibration_text(source, source.parent / "text.txt", 2048).stream
    made = [convert(source, source.parent / name, chooser=BitBudget(bits=4.5),
                    calibration=by_text(source, text, lambda *_: None, effects=True)) for name in ("first", "second")]
    assert made[0].calibrated and made[0].chosen == made[1].chosen
    weights = [(source.parent / name / "weights.bin").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    record = json.loads((source.parent / "first" / CALIBRATION_FILE).read_text())
    assert record["method"] == "gptq" and record["bits"] <= 4.5


@pytest.mark.slow
def test_codes_of_a_file_stay_where_the_type_is_chosen(source: Path) -> None:
    write_gguf(source.parent / "m.gguf", source, "Q8_0")
    report = convert(source.parent / "m.gguf", source.parent / "made", chooser=BitBudget(bits=7.5))
    kept = [one for one in report.tensors if one.dtype == "int8"]
    assert kept and all(one.exact for one in kept) and len(kept) < len([one for one in report.tensors if one.weights])


@pytest.mark.slow
def test_all_experts_of_a_layer_have_one_type(tmp_path: Path) -> None:
    """An expert's matrices are in one piece of the file; gate and up alternate in one matrix."""
    source = make_checkpoint(tmp_path / "hf", "qwen3_moe", hidden_size=128, moe_intermediate_size=64, num_experts=4,
                             num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
                             head_dim=32)
    report = convert(source, tmp_path / "made", chooser=BitBudget(bits=5))
    with Bundle.open(tmp_path / "made") as bundle:
        bundle.verify()
        experts = {name for name in bundle.tensors if ".experts_" in name}
    assert len(experts) == 4 and experts < report.chosen.types.keys() and report.bits <= 5  # type: ignore[union-attr]
