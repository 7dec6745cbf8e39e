"""The graph: typed operations on named tensors. Plan, program, estimate and references all read these classes."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from itertools import groupby

from ..base.dataclass import dataclass
from .config import ModelConfig
from .ops.base import Op
from .ops.costs import OnDemand
from .ops.matmul import parameters
from .tensors import Tensor, Types
from .weight_types import ORDER
from .weights import Weight


@dataclass(frozen=True)
class Graph:
    """One architecture's forward pass over a flat list of tokens."""

    config: ModelConfig
    ops: tuple[Op, ...]
    weights: tuple[Weight, ...]
    types: Types
    """Storage of each weight, by name."""
    logits: Tensor
    """Logits; of a range of layers without the head, the hidden states of all tokens after its last layer."""
    layers: tuple[int, int] | None = None
    """First and last layer of a range (layer_range.py); None if the model is whole."""

    @cached_property
    def weight_count(self) -> int:
        """Parameters of the model, without padding; tied matrices count once, and tables of columns do not."""
        return sum(parameters(weight) for weight in self.weights if self.types[weight.name] != ORDER)

    @property
    def activation_values(self) -> float:
        """Values that go into and come out of the matrices of all layers for one token; of experts the active ones."""
        return sum(op.activation_values() for op in self.ops)

    @cached_property
    def type_shares(self) -> tuple[tuple[str, float, float], ...]:
        """Types of the matrices, each with its shares of the bytes and of the operations of a token."""
        nbytes, operations = defaultdict[str, float](float), defaultdict[str, float](float)
        for op in self.ops:
            matrices = [read for read in op.reads(self.types) if len(read.weight.shape) > 1]
            whole = sum(math.prod(read.weight.shape) for read in matrices)
            for read in matrices:
                dtype = self.types[read.weight.name].dtype
                nbytes[dtype] += read.token
                operations[dtype] += op.operations() * math.prod(read.weight.shape) / whole
        total = max(sum(nbytes.values()), 1.0), max(sum(operations.values()), 1.0)
        return tuple((dtype, nbytes[dtype] / total[0], operations[dtype] / total[1]) for dtype in sorted(nbytes))

    @cached_property
    def stored_bytes(self) -> dict[str, int]:
        """Bytes of each weight as it is stored, padding included; raises `BundleError` as `WeightType.nbytes`."""
        return {weight.name: self.types[weight.name].nbytes(weight.shape) for weight in self.weights}

    @cached_property
    def strides(self) -> dict[str, int]:
        """Bytes from one expert's matrices to the next's, of each weight that shares an allocation
        (`Weight.pieces`)."""
        found: dict[str, int] = {}
        for pieces, run in groupby(self.weights, key=lambda weight: weight.pieces):
            if pieces:
                names = [weight.name for weight in run]
                found |= dict.fromkeys(names, sum(self.stored_bytes[name] for name in names) // pieces)
        return found

    @cached_property
    def chooses_values(self) -> bool:
        """True if decoded tokens choose which rows of V they read."""
        return any(op.kv is not None and op.kv.topn is not None for op in self.ops)

    def on_demand(self, kind: str) -> list[OnDemand]:
        """Weights that need not be in memory whole, of a kind, in the order of the operations."""
        found = (op.memory(self.types) for op in self.ops)
        return [one for one in found if one and one.kind == kind]

    def buffers(self) -> dict[str, str]:
        """Name the tensor in whose memory each tensor is: itself, or the one that it overwrote."""
        buffers: dict[str, str] = {}
        for op in self.ops:
            buffers[op.out.name] = op.out.name if op.over is None else buffers[op.over.name]
        return buffers

    def describe(self) -> str:
        """One line per operation: output, kind, numbers, inputs, weights with their shape and storage."""
        return "\n".join(self._line(op) for op in self.ops)

    def _line(self, op: Op) -> str:
        numbers = "".join(f" {key}={value}" for key, value in op.numbers.items())
        layer = "" if op.layer is None else f" layer={op.layer}"
        weights = [f"{w.name} {'x'.join(map(str, w.shape))} {self.types[w.name]}" for w in op.weights]
        arguments = ", ".join([str(t) for t in op.inputs] + weights)
        over = f" over {op.over.name}" if op.over else ""
        when = " where several tokens" if op.several else ""
        return f"{op.out} = {op.name}{layer}{numbers}({arguments}){over}{when}"
