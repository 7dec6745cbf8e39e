"""Rewrite converters/gguf/grids.npz from the gguf package (extra ``dev``): ``python -m tests.make_gguf_grids``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PATH = Path(__file__).parents[1] / "converters" / "gguf" / "grids.npz"


def grids() -> dict[str, NDArray[np.int8]]:
    """Return the levels that each index of a code book stands for, by the type's name."""
    from gguf import quants

    out = {}
    for kind in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
        form = getattr(quants, kind)
        form.init_grid()
        out[kind] = form.grid.reshape(form.grid_shape).astype(np.int8)
    return out


if __name__ == "__main__":
    np.savez_compressed(PATH, **grids())
