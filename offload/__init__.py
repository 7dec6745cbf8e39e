"""edgeinfer.offload: weights that do not fit in memory.

This package decides which neurons of sparse FFNs stay in memory under a budget, or how many experts of an MoE model,
and predicts the reads of a token and their time. Reading and computing are in the runtime (slots.py) and the
kernels (neuron_resolve.py, experts_resolve.py); whole layers are streamed by the runtime alone (stream.py). It may
import the runtime (edgeinfer.runtime) and all below it, never edgeinfer.sparse.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .experts import ALIKE, SKEWED, FromFlash, expected, from_flash, keep_experts
    from .placement import Heat, choose
    from .prediction import predict

__all__ = ["ALIKE", "SKEWED", "FromFlash", "Heat", "choose", "expected", "from_flash", "keep_experts", "predict"]
__getattr__ = lazily(__name__, {
    "experts": "ALIKE SKEWED FromFlash expected from_flash keep_experts", "placement": "Heat choose",
    "prediction": "predict",
})
