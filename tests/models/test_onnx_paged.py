"""Attention over pages, which no CPU provider has, through ONNX's reference evaluator with our own PagedAttention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import Flavour, export
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from tests.helpers import golden_cases
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.onnx_models import difference, expected
from tests.helpers.onnx_operators import OPERATORS
from tests.models.test_onnx_families import F32_MORE, RECURRENT

onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
ReferenceEvaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator

PAGES, PAGE_ROWS = 12, 16


class Pages:
    """A paged model with its pages."""

    def __init__(self, model: Path):
        proto = onnx.load(str(model))
        self._run = ReferenceEvaluator(proto, new_ops=OPERATORS).run
        self.outputs = [value.name for value in proto.graph.output]
        shapes = {value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
                  for value in proto.graph.input if "_cache." in value.name}
        self._pages = {name: np.full((PAGES, PAGE_ROWS, *shape[2:]), 9, np.float32) for name, shape in shapes.items()}

    def forward(self, sequences: Sequence[tuple[list[int], int, list[int]]]) -> list[np.ndarray]:
        """Logits of sequences, each new tokens, positions before them, and pages."""
        lengths = [len(new) for new, _, _ in sequences]
        widest = max(len(pages) for _, _, pages in sequences)
        given: dict[str, Any] = {
            "input_ids": np.array([token for new, _, _ in sequences for token in new], np.int64),
            "cumulative_sequence_length": np.cumsum([0, *lengths]).astype(np.int32),
            "past_seqlens": np.array([past for _, past, _ in sequences], np.int32),
            "block_table": np.array([pages + [0] * (widest - len(pages)) for _, _, pages in sequences], np.int32),
            "attention_metadata": np.zeros(3, np.int32), "output_rows": np.arange(sum(lengths)),
        }
        found = dict(zip(self.outputs, self._run(None, given | self._pages), strict=True))
        for name in self._pages:
            self._pages[name] = found[name.replace("_cache.", "_cache_out.")]
        return np.split(found["logits"], np.cumsum(lengths)[:-1])


def exported(checkpoint: Path, folder: Path, qk_norm: str = "", ctx: int | None = None, weights: str = "q4"
             ) -> tuple[Bundle, Pages]:
    """A checkpoint's model in pages."""
    convert(checkpoint, folder / "b", weights=weights)
    bundle = Bundle.open(folder / "b")
    export(bundle, folder / "m.onnx", Flavour(dtype="f32", attention="paged", qk_norm=qk_norm, ctx=ctx))
    return bundle, Pages(folder / "m.onnx")


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", ["llama-gqa3-bias-gelu", "mistral-window-head6", "qwen2-window", "llama-yarn", "qwen3",
                                  "qwen3-window-bias-tied"])
def test_chunks_and_decodes_together(name: str, tmp_path: Path) -> None:
    """Two prompts in chunks beside each other's decodes, pages in any order, then a third that shares a first page."""
    case = golden_cases.load(name)
    bundle, pages = exported(golden_cases.write_checkpoint(case, tmp_path / "c"), tmp_path)
    a, b = case.ids[:40], case.ids[::-1][:27]
    of_a, of_b = [7, 2, 11], [5, 3]
    got_a, got_b = pages.forward([(a[:23], 0, of_a), (b[:9], 0, of_b)])
    more_a, more_b = pages.forward([(a[23:24], 23, of_a), (b[9:26], 9, of_b)])
    last_a, last_b = pages.forward([(a[24:], 24, of_a), (b[26:], 26, of_b)])
    assert difference(np.concatenate([got_a, more_a, last_a]), expected(bundle, a)) < 1e-5
    assert difference(np.concatenate([got_b, more_b, last_b]), expected(bundle, b)) < 1e-5
    c = a[:PAGE_ROWS] + b[:8]
    (got_c,) = pages.forward([(c[PAGE_ROWS:], PAGE_ROWS, [7, 0])])
    assert difference(got_c, expected(bundle, c)[PAGE_ROWS:]) < 1e-5


NAMES = [name for name in golden_cases.names() if name not in RECURRENT and not name.startswith(
    ("bloom", "mpt", "falcon-rw", "falcon-alibi"))]
"""Models of every family but those that keep a state, or have ALiBi, for which the operator has no input."""


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", NAMES)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Two texts whose chunks and single tokens go through together, pages in any order."""
    case = golden_cases.load(name)
    bundle, pages = exported(golden_cases.write_checkpoint(case, tmp_path / "c"), tmp_path, ctx=24, weights="f32")
    a, b = case.ids[:24], case.ids[::-1][:24]
    found = [pages.forward([(a[i:j], i, [7, 2]), (b[k:m], k, [5, 3])])
             for (i, j), (k, m) in zip(((0, 13), (13, 14), (14, 24)), ((0, 2), (2, 23), (23, 24)), strict=True)]
    for text, rows in zip((a, b), zip(*found, strict=True), strict=True):
        assert difference(np.concatenate(rows), expected(bundle, text)) < F32_MORE.get(name, 1e-5)


@pytest.mark.parametrize(("head_dim", "qk_norm", "norms"), [(16, "", 0), (16, "apart", 4), (18, "", 4)])
def test_norms_of_heads_are_fused_unless_heads_are_padded(
    head_dim: int, qk_norm: str, norms: int, tmp_path: Path
) -> None:
    """Padding changes the length that a norm counts."""
    checkpoint = make_checkpoint(tmp_path / "c", "qwen3", head_dim=head_dim)
    bundle, pages = exported(checkpoint, tmp_path, qk_norm)
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "m.onnx")).graph.node]
    assert kinds.count("RMSNormalization") == 2 + norms  # the first and the last
    ids = golden_cases.load("qwen3").ids
    (got,) = pages.forward([(ids, 0, [4, 1, 9])])
    assert difference(got, expected(bundle, ids)) < 1e-5
