"""The quality that storage costs: the demo on a text it never saw, and the script that makes the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import quality
from edgeinfer.models import resolve
from edgeinfer.quality.evaluate import Divergence, Evaluation
from tests.helpers.checkpoints import make_checkpoint

TEXT = (Path(__file__).parents[1] / "data" / "box_of_robbers.txt").read_text(encoding="utf-8")
VARIANTS = (quality.Variant("f32", 32, "int8"), quality.Variant("int8", 128, "f32"), quality.Variant("q4", 32, "int8"))


def row(variant: quality.Variant, perplexity_change: float) -> quality.Row:
    """A measurement that changes the perplexity by a share."""
    import math

    divergence = Divergence(kld_mean=0.01, kld_p99=0.1, same_top=0.9, reference_perplexity=math.e)
    result = Evaluation(100, 400, 1 + math.log1p(perplexity_change), divergence)
    return quality.Row("model", "text", variant, 1_500_000, result)


@pytest.mark.slow
def test_an_int8_cache_costs_the_demo_next_to_nothing() -> None:
    demo = resolve("demo")
    result = quality.measure(demo, "int8", demo, TEXT, reference_kv="f32")
    assert result.divergence is not None
    assert abs(result.perplexity / result.divergence.reference_perplexity - 1) < quality.BOUNDS["kv"]
    assert result.divergence.kld_mean < 1e-3 and result.divergence.same_top > 0.98
    assert (result.tokens, result.text_bytes) == (4499, 15463)


def test_the_demo_reads_a_book_it_never_saw_as_well_as_its_checkpoint() -> None:
    """The perplexity of its float32 checkpoint on this story is 36.227; 4 bits and an int8 cache may add 4 %."""
    demo = resolve("demo")
    result = quality.measure(demo, "int8", demo, TEXT)
    assert 36.227 < result.perplexity < 1.04 * 36.227


def test_variants_of_a_tiny_model_make_a_table(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", max_position_embeddings=quality.WINDOW)
    rows, _ = quality.run(checkpoint, {"story": TEXT}, max_tokens=300, variants=VARIANTS)
    assert [r.variant for r in rows] == list(VARIANTS)
    assert all(r.result.tokens == 300 and abs(r.change) < 0.05 for r in rows)
    assert rows[2].bundle_bytes < rows[0].bundle_bytes
    table = quality.report(rows)
    assert "### tiny on story" in table and "| int8 g128 | f32 |" in table and "| **q4 g32** | int8 |" in table
    assert str(tmp_path) not in table


def test_the_command_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", max_position_embeddings=quality.WINDOW)
    (tmp_path / "story.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(quality, "VARIANTS", VARIANTS[:1])
    out = tmp_path / "table.md"
    arguments = ["--text", str(tmp_path / "story.txt"), "--max-tokens", "100", "--out", str(out)]
    assert quality.main([str(checkpoint), *arguments]) == 0
    assert "### tiny on story" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("variant", "change", "over"),
    [
        (quality.Variant("int8", 32, "f32"), 0.006, True),
        (quality.Variant("int8", 128, "f32"), 0.004, False),
        (quality.Variant("q4", 32, "f32"), 0.05, True),
        (quality.Variant("q4", 64, "f32"), 0.05, False),
        (quality.Variant("f32", 32, "int8"), 0.003, True),
        (quality.Variant("q4", 32, "int8"), 0.003, False),
        (quality.Variant("f16", 32, "f32"), 0.001, True),
    ],
)
def test_what_is_over_its_bound_is_said(variant: quality.Variant, change: float, over: bool) -> None:
    found = quality.over_bounds([row(variant, change)], quality.BOUNDS)
    assert bool(found) == over
    if over:
        assert f"changes the perplexity by +{100 * change:.2f}%, more than" in found[0]


def test_small_models_may_lose_more_by_4_bits() -> None:
    worse = row(quality.Variant("q4", 32, "f32"), 0.08)
    assert quality.over_bounds([worse], quality.BOUNDS) and not quality.over_bounds([worse], quality.SMALL_BOUNDS)
    assert replace(worse, text="other").change == pytest.approx(0.08)
