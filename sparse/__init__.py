"""edgeinfer.sparse: sparse feed-forward layers.

This package holds graph rewrites that skip the neurons of an FFN whose activation is zero (ReLU, ReGLU, dReLU, squared
ReLU, thresholded), for the predictors that draft the active ones from the layer's input, and for the statistics that
both need. It may import the runtime (edgeinfer.runtime) and everything below it, never edgeinfer.offload. `sparsify`
makes a bundle with a predictor of a bundle without one; its results are parts of the bundle (edgeinfer.bundle), so
that the runtime and `offload/` need nothing of this package.
"""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .ffn import ffns, parts
    from .fitting import LAMBDAS, choose, fit
    from .making import sparsify
    from .predictors import low_rank, scorer, thresholds
    from .screened import Screened, screen_head
    from .simulate import Tally, predicted
    from .sparsified import Sparsified
    from .texts import MAX_TOKENS, MEASURED_TOKENS

__all__ = [
    "LAMBDAS", "MAX_TOKENS", "MEASURED_TOKENS", "Screened", "Sparsified", "Tally", "choose", "ffns", "fit", "low_rank",
    "parts", "predicted", "scorer", "screen_head", "sparsify", "thresholds",
]
__getattr__ = lazily(__name__, {
    "ffn": "ffns parts", "fitting": "LAMBDAS choose fit",
    "predictors": "low_rank scorer thresholds", "simulate": "Tally predicted",
    "making": "sparsify", "screened": "Screened screen_head", "sparsified": "Sparsified",
    "texts": "MEASURED_TOKENS MAX_TOKENS",
})
