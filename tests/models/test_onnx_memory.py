"""Memory of onnxruntime's CPU provider: its parts in the plan, matrices of 8 bits as two of 4, and whole processes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import memory_onnx
from benchmarks.memory_onnx import Case, Row, measure, table
from edgeinfer.backends.onnx.cpu_memory import READ_AROUND, CpuMemory
from edgeinfer.backends.onnx.flavour import Flavour
from edgeinfer.backends.onnx.lower_graph import lower_graph
from edgeinfer.backends.onnx.nibbles import nibbles
from edgeinfer.backends.onnx.weights import Quantised, Stored
from edgeinfer.bundle import Bundle
from edgeinfer.config import Recipe
from edgeinfer.graph import ModelConfig, build_graph, expected_types
from tests.helpers.onnx_models import difference, expected
from tests.helpers.sessions import HYBRID, TINY, tokens, write_model
from tests.models.test_onnx_runner import runner


def lowered(path: Path, dtype: str, nibbles: bool = True) -> tuple[CpuMemory, dict[str, Stored]]:
    """Return what the provider takes for a bundle's graph, and the graph's initializers."""
    bundle = Bundle.open(path)
    graph = build_graph(bundle.config, expected_types(bundle.types), Recipe(()))
    found = lower_graph(graph, Flavour(dtype=dtype, nibbles=nibbles).checked(bundle.config))
    return CpuMemory.of(found), found.stored


def sum_of(stored: dict[str, Stored], *ends: str) -> int:
    return sum(one.nbytes for name, one in stored.items() if name.endswith(ends))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_quantised_matrices_are_packed_and_their_scales_stay_mapped(dtype: str, tmp_path: Path) -> None:
    """Codes of the table are gathered, so a few rows of them are read, and its scales are reshaped when it opens."""
    memory, stored = lowered(write_model(tmp_path, weights="q4"), dtype)
    table, turns = stored["embed.codes"], (stored["cos"], stored["sin"])
    codes = sum_of(stored, ".codes", ".high", ".low") - table.nbytes - sum_of(stored, "scales.high")
    scales = sum_of(stored, ".scales", "scales.high") - stored["embed.scales"].nbytes
    assert memory.packed == codes + stored["embed.scales"].nbytes + (2 * scales if dtype == "f16" else 0)
    assert scales < memory.mapped < 1.5 * scales and memory.opening == 0
    assert memory.rows == ((table.nbytes, table.nbytes // 99, False),
                           *((one.nbytes, one.nbytes // 1024, True) for one in turns))
    assert memory.read(1 << 20) == memory.mapped + table.nbytes + sum(one.nbytes for one in turns)


def test_rows_of_a_table_are_read_with_what_is_around_them() -> None:
    memory = CpuMemory(1000, ((50 * READ_AROUND, 4096, False), (10 * READ_AROUND, 128, True)), 0, 0, 0, 0)
    assert memory.read(3) == 1000 + 4 * READ_AROUND + 3 * 128 + READ_AROUND


@pytest.mark.parametrize(("weights", "summed"), [("q4", 0), ("int8", 72), ("q4k", 72)])
def test_products_that_are_the_sum_of_two(weights: str, summed: int, tmp_path: Path) -> None:
    """The head's 99 logits are wanted of few tokens."""
    assert lowered(write_model(tmp_path, weights=weights), "f32")[0].summed == summed


def test_matrices_of_floats_are_packed_as_f32(tmp_path: Path) -> None:
    """In an f16 model the largest is there twice more while the model opens."""
    path = write_model(tmp_path, weights="f16")
    (wide, stored), (half, _) = lowered(path, "f32"), lowered(path, "f16")
    matrices = [one for one in stored.values() if len(one.shape) == 2 and one.name not in ("embed", "cos", "sin")]
    packed = [4 * one.shape[0] * -(-one.shape[1] // 16) * 16 for one in matrices]
    assert wide.packed == half.packed == sum(packed)
    assert (wide.opening, half.opening) == (0, 2 * max(packed))


def test_a_matrix_of_8_bits_is_the_sum_of_two_of_4() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (5, 3, 16), np.uint8)
    scales = rng.standard_normal((5, 3)).astype(np.float32)
    whole = Quantised(Stored("m.codes", "u8", codes.shape, lambda read: iter([codes])),
                      Stored("m.scales", "f32", scales.shape, lambda read: iter([scales])), 8, 16)
    high, low, zeros = nibbles(whole, "f32")
    total = np.zeros((5, 3, 16))
    for part, zero in ((high, 8), (low, 0)):
        (packed,), (factors,) = part.codes.pieces(None), part.scales.pieces(None)  # type: ignore[arg-type]
        assert packed.shape == part.codes.shape and part.bits == 4
        values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(5, 3, 16)
        total += factors[..., None] * (values.astype(np.float64) - zero)
    np.testing.assert_allclose(total, scales[..., None] * (codes.astype(np.float64) - 128), rtol=1e-6)
    (empty,) = zeros.pieces(None)  # type: ignore[arg-type]
    assert empty.shape == (5, 2) and not empty.any()


@pytest.mark.parametrize(("weights", "kv", "most"), [
    ("int8", "f32", 1e-5), ("int8", "f16", 5e-3), ("q5k", "f32", 1e-5), ("q6", "f32", 1e-5), ("iq4", "f32", 1e-5)])
def test_logits_of_matrices_of_8_bits(weights: str, kv: str, most: float, tmp_path: Path) -> None:
    """Of a prompt and of a step, whose matmuls have kernels of their own; q5k has minima as well."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    path, ids = write_model(tmp_path, weights=weights), tokens(12)
    want = expected(Bundle.open(path), ids)
    with runner(path, kv=kv) as opened:
        sequence = opened.new_sequence()
        assert difference(opened.prefill(sequence, ids[:-1]), want[-2]) < most
        assert difference(opened.decode([sequence], ids[-1:])[0], want[-1]) < most


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")
@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_a_process_stays_within_its_plan(kv: str) -> None:
    """The second run, which has the lowered model, takes 7 to 11 MB less than the first."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    case = Case("demo", "q4", kv, 512, 256, 1, 1)
    first, second = (measure("demo", case, lowers) for lowers in (True, False))
    assert first.planned == second.planned
    assert 0 <= second.excess < 0.25 and first.planned >= first.measured


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what a process holds")
@pytest.mark.parametrize("config", [TINY, HYBRID], ids=lambda config: config.model_type)
def test_a_process_with_many_small_layers_stays_within_its_plan(config: ModelConfig, tmp_path: Path) -> None:
    """Plans without the descriptions of operators and tensors were 104 MB, and the processes took 134 and 148."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    if recurrent := config.recurrent:
        recurrent = replace(recurrent, layers=tuple(i for i in range(96) if i % 4 != 3))
    path = write_model(tmp_path, replace(config, num_hidden_layers=96, recurrent=recurrent), "int8")
    case = Case("deep", "int8", "f32", 128, 64, 1, 1)
    first, second = (measure(str(path), case, lowers) for lowers in (True, False))
    assert first.planned >= first.measured and first.excess < 0.15 and 0 <= second.excess < 0.25


def test_the_table_of_the_benchmark() -> None:
    row = Row(Case("demo", "q4", "f32", 512, 256, 1, 2), 105_010_000, 100_000_000, True)
    assert not row.good and Row(row.case, 105, 101, False).good
    assert not Row(row.case, 99, 100, False).good and not Row(row.case, 106, 100, False).good
    assert list(table([row]))[2:] == [
        "| demo, lowers | q4 | f32 | 512 | 256 | 1 | 2 | 105.0 | 100.0 | +5.0 % | **no** |"]
    with pytest.raises(SystemExit, match="exit code"):
        memory_onnx.measure("no such model", row.case, False)
