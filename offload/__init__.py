"""edgeinfer.offload: weights that do not fit in memory.

This room is for the flash reader, the neuron cache and the graph rewrites that fetch weights from storage while the
program runs. It may import the runtime (edgeinfer.runtime) and everything below it, never edgeinfer.sparse.
Nothing is implemented yet.
"""

__all__: list[str] = []
