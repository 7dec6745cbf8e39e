"""Numbers of columns, by which kernels read inputs: an order names every input once, outliers are some of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgeinfer.errors import BundleError

from .format import TensorEntry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def check_orders(tensors: Iterable[TensorEntry], weights: NDArray[np.uint8]) -> None:
    """Refuse a tensor of integers that does not name every column once, or outliers; raises `BundleError`."""
    tensors = list(tensors)
    outliers = {f"{entry.name}_columns": entry.shape[-1] for entry in tensors if entry.type.outliers}
    for entry in tensors:
        if entry.type.dtype == "i32":
            order = weights[entry.offset : entry.offset + entry.nbytes].view("<i4")
            if entry.name in outliers:
                if order[0] < 0 or order[-1] >= outliers[entry.name] or (order[1:] <= order[:-1]).any():
                    raise BundleError(f"the tensor {entry.name!r} does not name {order.size} of the "
                                      f"{outliers[entry.name]} columns in rising order; convert the model again.")
            elif not _is_permutation(order):
                raise BundleError(f"the tensor {entry.name!r} does not name each of its {order.size} columns once; "
                                  "convert the model again.")


def _is_permutation(order: NDArray[np.int32]) -> bool:
    import numpy as np

    if order.min() < 0 or order.max() >= order.size:
        return False
    return bool((np.bincount(order, minlength=order.size) == 1).all())
