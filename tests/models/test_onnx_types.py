"""Every type of weights as ONNX: levels and scales are kept exactly, in 4 or 8 bits, and minima are added apart."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.backends import Flavour, export
from edgeinfer.backends.onnx import codes
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.graph import build_graph, read_config, requested_types
from edgeinfer.quant import TYPES, WeightType, layouts
from tests.golden_parts import MIXTRAL
from tests.helpers import gguf_files, golden_cases
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.gguf_files import OF_256, random_blocks, sizes_for, write_gguf
from tests.helpers.onnx_models import Slots, difference, expected, expected_in_f16
from tests.helpers.packers import FORMS, make_packed

onnx = pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")

IDS = [5, 17, 80, 3, 42, 61, 12, 9, 90, 31, 2, 77]
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "BF16", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
MIXED = ({"attn_v": "Q6_K", "attn_": "Q4_K", "ffn_down": "Q6_K", "": "Q4_K"},
         {"attn_v": "Q8_0", "attn_": "Q4_1", "ffn_gate": "F16", "ffn_up": "Q5_1", "ffn_down": "Q6_K", "": "Q5_K"})


SIZES = {"Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 6e-5, "IQ4_XS": 6e-5, "IQ4_NL": 1e-3}
"""Of the fp16 numbers of random blocks: with them weights are as large as a model's, and activations within f16."""


@pytest.fixture(autouse=True)
def weights_of_the_usual_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(kind: str, shape: tuple[int, ...]) -> np.ndarray:
        flat = random_blocks(kind, (math.prod(shape[:-1]), shape[-1]), size=SIZES.get(kind, 0.01))
        return flat.reshape(*shape[:-1], -1)

    monkeypatch.setattr(gguf_files, "random_blocks", blocks)


def exact(bundle: Bundle) -> None:
    """Compare logits with the oracle's; bounds are those of other types, or follow what rounding alone costs."""
    want = expected(bundle, IDS)
    for dtype, kind, least in (("f32", np.float32, 1e-5), ("f16", np.float16, 5e-3)):
        rounding = difference(expected_in_f16(bundle, IDS, kind), want)
        flavour = Flavour(dtype=dtype).checked(bundle.config)
        export(bundle, model := bundle.path.with_name(f"{dtype}.onnx"), flavour)
        onnx.checker.check_model(str(model))
        for size in (len(IDS), 1):
            found = difference(Slots(model, flavour).chunks(IDS, size), want)
            print(f"{sorted({str(kind) for kind in bundle.types.values()})} {dtype}: {found:.1e}, {rounding:.1e}")
            assert found < max(least, 2.5 * rounding)


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("kind", KINDS)
def test_types_of_gguf_files(kind: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **sizes_for(kind))
    write_gguf(tmp_path / "m.gguf", source, kind)
    convert(tmp_path / "m.gguf", tmp_path / "b")
    exact(Bundle.open(tmp_path / "b"))


@pytest.mark.parametrize("kinds", MIXED)
def test_types_that_are_mixed(kinds: dict[str, str], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "hf", "llama", **OF_256)
    write_gguf(tmp_path / "m.gguf", source, kinds)
    convert(tmp_path / "m.gguf", tmp_path / "b")
    exact(Bundle.open(tmp_path / "b"))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q5_1", "Q4_1"), ("MXFP4", "IQ4_NL")])
def test_types_of_experts(kinds: tuple[str, str], tmp_path: Path) -> None:
    """Codes of all experts side by side; all are chosen, so that rounding chooses no others."""
    n, width, size = 3, 256, 512 if "K" in kinds[0] else 96
    config = {**MIXTRAL, "hidden_size": width, "intermediate_size": size, "num_attention_heads": 8,
              "num_local_experts": n, "num_experts_per_tok": n}
    graph = build_graph(read_config(config), requested_types("f32"))
    tensors = {source.name: golden_cases.weights(source.name, source.stored) for weight in graph.weights
               for source in weight.sources if not source.each}
    for i in range(config["num_hidden_layers"]):
        module = f"model.layers.{i}.mlp.experts."
        tensors[module + "gate_up_proj"] = golden_cases.weights(module + "1", (n, 2 * size, width))
        tensors[module + "down_proj"] = golden_cases.weights(module + "2", (n, width, size))
    case = golden_cases.GoldenCase("made", config, tensors, [], np.zeros(0))
    checkpoint = golden_cases.write_checkpoint(case, tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", checkpoint, {"down_exps": kinds[1], "_exps": kinds[0], "attn_": "Q4_0"})
    convert(tmp_path / "m.gguf", tmp_path / "b")
    exact(Bundle.open(tmp_path / "b"))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("form", FORMS)
def test_types_of_quantised_checkpoints(form: str, tmp_path: Path) -> None:
    make_packed(tmp_path / "hf", form)
    convert(tmp_path / "hf", tmp_path / "b")
    exact(Bundle.open(tmp_path / "b"))


@pytest.mark.parametrize("stored", [WeightType.of(name, group) for name, row in TYPES.items() if row.quantised
                                    for group in row.groups], ids=str)
def test_blocks_are_the_weights(stored: WeightType) -> None:
    """(code - half) scale + offset, to the last bits of a float, of random bytes of a bundle."""
    rng, columns = np.random.default_rng(1), 256 * 3
    if stored.storage.fitted:
        stored = replace(stored, levels=tuple(range(-8 << 3, 8 << 3, 128 >> stored.storage.bits)))
    row = stored.storage
    tiles = rng.integers(0, 256, (2, stored.tile_bytes(columns)), np.uint8)
    records = tiles.reshape(2, stored.tile_records(columns), -1)
    codes_end = row.factors_at(stored.group_size)
    small = rng.normal(0, 0.1, (*records.shape[:2], records.shape[2] - codes_end))
    if row.nested:
        start = row.outer_at(stored.group_size) - codes_end
        records[:, :, codes_end + start:] = small[..., start::2].astype(np.float16).view(np.uint8)
    else:
        records[:, :, codes_end:] = small[..., ::2].astype(np.float16).view(np.uint8)
    want = layouts.unpack_tile16(tiles.reshape(-1), stored.dtype, stored.group_size, (32, columns),
                                  stored.levels)
    blocks, bits = codes.tile_blocks(tiles, stored, columns), codes.code_bits(stored)
    levels = blocks.codes if bits == 8 else np.stack([blocks.codes & 15, blocks.codes >> 4], -1)
    levels = levels.reshape(32, -1, stored.group_size).astype(np.float32) - (1 << bits - 1)
    found = levels * blocks.scales[:, :, None].astype(np.float32)
    found += 0 if blocks.offsets is None else blocks.offsets[:, :, None]
    assert np.abs(found.reshape(32, -1) - want).max() <= 1e-6 * np.abs(want).max()
    if not row.minimum:
        assert np.array_equal(found.reshape(32, -1), want), "the same bits"
