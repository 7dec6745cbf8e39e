"""edgeinfer.backends: other executors of the same graph.

This room is for backends that lower the graph of edgeinfer.graph to another runtime (ONNX Runtime for GPUs) instead of
the program. Nothing is implemented yet.
"""

__all__: list[str] = []
