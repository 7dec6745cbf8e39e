"""Optional part of a bundle with estimates of its logits: `sparse/` makes it, the screened head reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import BundleError
from edgeinfer.graph import OUTER_TYPE, ModelConfig, inner_type
from edgeinfer.quant import WeightType

from ..base.dataclass import dataclass
from .arrays import pack_arrays
from .parts import FIELDS, check_arrays, check_scales, open_part

if TYPE_CHECKING:
    from .reader import Bundle

SCREEN_FILE = "screen.bin"


@dataclass(frozen=True)
class HeadScreen:
    """Estimates of all logits, and how far they may be off.

    low = inner x, where x is the head's input as its matmul sees it; the estimates are outer times the first `rank`
    values of low, rounded to int8 in groups of 32. Each is off by at most its row's bound times the reach of low
    (kernels/reference/screen.py).
    """

    rank: int
    share: float
    """Share of the head's tiles of 16 rows computed for a token, as measured when the screen was made."""
    inner: NDArray[np.uint8]
    """Bytes of a matrix (hidden_size, hidden_size) of `inner_type` of the head's."""
    outer: NDArray[np.uint8]
    """Bytes of a matrix (vocab_size, rank) of `OUTER_TYPE`."""
    bounds: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Bytes that a sampled token reads of it."""
        return self.inner.nbytes + self.outer.nbytes + self.bounds.nbytes

    def pack(self, weights: str) -> Iterator[bytes]:
        """Yield the file's bytes; `weights` is `weights_identity` of the weights that it was made for."""
        yield from pack_arrays({"part": "screen", "weights": weights, "rank": self.rank, "share": self.share},
                               {"inner": self.inner, "outer": self.outer, "bounds": self.bounds})


def read_screen(bundle: Bundle) -> HeadScreen | None:
    """Return the screen of a bundle's head, its arrays mapped, or None if it has none.

    Raises
    ------
    BundleError
        It was made for other weights, does not fit the model, or has values that are not numbers.
    """
    if (opened := open_part(bundle, "screen", FIELDS["screen"])) is None:
        return None
    about, arrays, where = opened
    rank, share = _numbers(about, bundle.config, where)
    if not _head_type(bundle).quantised:
        raise BundleError(f"{where} is for heads of codes, but that of this model is {_head_type(bundle)}; make it "
                          "again.")
    inner, shape = inner_type(_head_type(bundle)), (bundle.config.head_width, bundle.config.head_width)
    thin = (bundle.config.vocab_size, rank)
    check_arrays(arrays, {"inner": ((inner.nbytes(shape),), "u1"), "outer": ((OUTER_TYPE.nbytes(thin),), "u1"),
                          "bounds": ((thin[0],), "<f4")}, where)
    for name, kind, cols in (("inner", inner, shape[1]), ("outer", OUTER_TYPE, rank)):
        check_scales(arrays[name], kind, cols, name, where)
    if (arrays["bounds"] < 0).any():
        raise BundleError(f"{where} has bounds below 0; make it again.")
    return HeadScreen(rank, share, arrays["inner"], arrays["outer"], arrays["bounds"])


def screen_settings(bundle: Bundle) -> dict[str, str | float]:
    """Return rank and share of a bundle's screen, without its arrays; nothing if it has none."""
    if (opened := open_part(bundle, "screen", FIELDS["screen"])) is None:
        return {}
    rank, share = _numbers(opened[0], bundle.config, opened[2])
    return {"rank": rank, "share": share}


def _head_type(bundle: Bundle) -> WeightType:
    return bundle.weight_type("embed" if bundle.config.tie_word_embeddings else "head")


def _numbers(about: dict[str, Any], config: ModelConfig, where: str) -> tuple[int, float]:
    rank, share = about["rank"], about["share"]
    if type(rank) is not int or not 1 <= rank <= config.head_width:
        raise BundleError(f"{where} has the rank {str(rank)[:60]}, which no screen of this model has.")
    if type(share) not in (int, float) or not 0 <= share <= 1:
        raise BundleError(f"{where} says that a share of {str(share)[:60]} is computed; shares are from 0 to 1.")
    return rank, float(share)
