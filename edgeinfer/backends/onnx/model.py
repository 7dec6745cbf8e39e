"""The ModelProto of a lowered graph, whose tensors are in a file of external data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .lowering import Lowering, Value
from .packages import import_onnx
from .weights import KINDS

OPSET, IR_VERSION, MICROSOFT_OPSET = 23, 11, 1
"""Opset 23 has RMSNormalization, which opset 21 had only as an operator that onnx.checker does not know."""
PREFIX = "edgeinfer."
"""Prefix of our keys in the model's metadata."""
GRAPH_KEY = f"{PREFIX}graph_sha256"


class ExternalTensor(NamedTuple):
    """Offset, length and checksum of a tensor in the file of external data."""

    offset: int
    nbytes: int
    sha256: str


def model_proto(lowered: Lowering, location: str, external: Mapping[str, ExternalTensor],
                about: Mapping[str, str]) -> Any:
    """Return the model.

    Parameters
    ----------
    lowered : Lowering
    location : str
        Name of the file of external data, in the folder that the model will be in.
    external : mapping of str to ExternalTensor
        Of each stored tensor.
    about : mapping of str to str
        Metadata; the checksum of the model itself is added.

    Returns
    -------
    onnx.ModelProto
    """
    onnx = import_onnx()
    helper, kinds = onnx.helper, _kinds(onnx)
    nodes = []
    for i, node in enumerate(lowered.nodes):
        attributes = {name: kinds[value] if name == "to" else value for name, value in node.attributes.items()}
        nodes.append(helper.make_node(node.kind, node.inputs, node.outputs, f"{node.kind}_{i}", domain=node.domain,
                                      **attributes))
    tensors = [onnx.TensorProto(name=name, data_type=kinds["i64"], dims=[len(numbers)], int64_data=numbers)
               for name, numbers in lowered.integers.items()]
    tensors += [onnx.TensorProto(name=name, data_type=kinds[kind], dims=np.shape(value),
                                 raw_data=np.array(value, KINDS[kind]).tobytes())
                for name, (kind, value) in lowered.numbers.items()]
    for name, stored in lowered.stored.items():
        tensor = onnx.TensorProto(name=name, data_type=kinds[stored.kind], dims=stored.shape,
                                  data_location=onnx.TensorProto.EXTERNAL)
        entry = external[name]
        for key, value in (("location", location), ("offset", entry.offset), ("length", entry.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)

    def values(found: list[Value]) -> list[Any]:
        return [helper.make_tensor_value_info(value.name, kinds[value.kind], value.shape) for value in found]

    graph = helper.make_graph(nodes, lowered.graph.config.model_type, values(lowered.inputs), values(lowered.outputs),
                              tensors)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", MICROSOFT_OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgeinfer")
    for key, value in about.items():
        model.metadata_props.add(key=PREFIX + key, value=value)
    model.metadata_props.add(key=GRAPH_KEY, value=graph_sha256(model))
    return model


def graph_sha256(model: Any) -> str:
    """Return the checksum of a model without its own entry."""
    copy = type(model)()
    copy.CopyFrom(model)
    kept = [(entry.key, entry.value) for entry in copy.metadata_props if entry.key != GRAPH_KEY]
    del copy.metadata_props[:]
    for key, value in kept:
        copy.metadata_props.add(key=key, value=value)
    return hashlib.sha256(copy.SerializeToString(deterministic=True)).hexdigest()


def _kinds(onnx: Any) -> dict[str, int]:
    proto = onnx.TensorProto
    return {"u8": proto.UINT8, "f16": proto.FLOAT16, "f32": proto.FLOAT, "i32": proto.INT32, "i64": proto.INT64}
