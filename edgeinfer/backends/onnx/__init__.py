"""The graph of edgeinfer.graph as an ONNX model with onnxruntime's operators; edgeinfer.backends is its public API."""
