"""A model that copies a slot or a page to another, so that forks stay in the memory of their device."""

from __future__ import annotations

from typing import Any

from .model import IR_VERSION, OPSET
from .packages import import_onnx

FROM, TO = "from.", "to."
AXES = ("blocks", "rows", "columns", "elements")


def copy_proto(tensors: list[tuple[str, str, int]]) -> Any:
    """Return a model whose outputs are copies of its inputs, one pair for each name, type and number of axes."""
    onnx = import_onnx()
    helper, kinds = onnx.helper, {"f16": onnx.TensorProto.FLOAT16, "f32": onnx.TensorProto.FLOAT}
    nodes = [helper.make_node("Identity", [FROM + name], [TO + name], f"copy.{name}") for name, _, _ in tensors]
    inputs, outputs = ([helper.make_tensor_value_info(end + name, kinds[kind], AXES[:axes])
                        for name, kind, axes in tensors] for end in (FROM, TO))
    graph = helper.make_graph(nodes, "copy", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION,
                             producer_name="edgeinfer")
