"""edgeinfer.sparse: sparse feed-forward layers.

This room is for graph rewrites that skip the neurons of an FFN whose activation is zero (ReLU, ReGLU, dReLU, squared
ReLU, thresholded), for the predictors that guess the active ones from the layer's input, and for the statistics that
both need. It may import the runtime (edgeinfer.runtime) and everything below it, never edgeinfer.offload.
Nothing is implemented yet.
"""

__all__: list[str] = []
