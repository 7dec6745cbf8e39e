"""GPTQ and AWQ words written out by hand, from the packing loops of AutoGPTQ's and AutoAWQ's own modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.packers import f16, i32, write_raw
from tests.models.test_packed_reference import read


def test_a_word_of_gptq_has_eight_inputs_the_first_lowest(tmp_path: Path) -> None:
    """qweight[i] |= code[8 i + j] << 4 j by outputs; qzeros so along the outputs, less one; weight s (code - zero)."""
    qweight = np.array([[0x76543210, 0xFEDCBA98], [0x00000001, 0x80000000]], np.uint32).repeat([1, 7], axis=1)
    qzeros = np.array([[0x21436587], [0x00000007]], np.uint32)  # zero points 8, 9, 6, 7, 4, 5, 2, 3; then 8, 1, 1, ...
    scales = np.array([[1, 2, 4, 8, 1, 2, 4, 8], [0.5] * 8])
    write_raw(tmp_path / "m", {"m.qweight": i32(qweight), "m.qzeros": i32(qzeros), "m.scales": f16(scales),
                               "m.g_idx": i32(np.arange(16) // 8)})
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}}
    found = read(tmp_path / "m", config, "m.weight")
    assert found.shape == (8, 16)
    assert found[0].tolist() == [*range(-8, 0), (1 - 8) / 2, *[-8 / 2] * 7]
    assert found[1].tolist() == [*range(-2, 14, 2), *[-0.5] * 7, 7 / 2]
    assert found[7, :8].tolist() == [8 * (code - 3) for code in range(8, 16)]


def test_a_word_of_awq_has_eight_outputs_even_ones_first(tmp_path: Path) -> None:
    """qweight[:, i] |= code[:, 8 i + order[j]] << 4 j with the order 0, 2, 4, 6, 1, 3, 5, 7; zero points likewise."""
    qweight = np.full((32, 1), 0x75316420, np.uint32)
    qweight[31] = 0x80000000
    qzeros = np.array([[0x00000010]], np.uint32)
    write_raw(tmp_path / "m", {"m.qweight": i32(qweight), "m.qzeros": i32(qzeros), "m.scales": f16(np.ones((1, 8)))})
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
                                      "version": "gemm"}}
    found = read(tmp_path / "m", config, "m.weight")
    assert found[:, 0].tolist() == [0, 1, 2 - 1, 3, 4, 5, 6, 7]
    assert found[:, 31].tolist() == [0, 0, -1, 0, 0, 0, 0, 8]
