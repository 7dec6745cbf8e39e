"""The pass between an architecture and all other passes: matmuls with codes get quantised rows.

An architecture writes its forward pass in floats. The type of a norm's output follows from the matrices that read it,
and theirs from the bundle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .graph import Graph
from .ops.base import Op
from .ops.matmul import MatMul, row_type
from .ops.rows import Quantize
from .tensors import RowType, Tensor

FLOATS: RowType = ("f32", 0)
"""Type of rows that are not quantised."""
_STEMS = ("h", "q", "e")
"""Tensors of these names are renumbered: norms, quantised rows and rows of experts, in the order of the program."""


def quantize_activations(graph: Graph) -> Graph:
    """Give each matmul its input in the type that its weights multiply.

    An operation that can quantise its output (`Op.quantises`) does so if all of its readers want the same type;
    else it writes floats, and an operation before each matmul with codes quantises them. For every further part of a
    matrix (`LinearPart`) the norm is made again, so that each part can be fused with its own.
    """
    return _Rewrite(graph).graph()


class _Rewrite:
    """The operations of a graph so far, and the replacements of its tensors."""

    def __init__(self, graph: Graph):
        self._given = graph
        self._weights = {weight.name: weight for weight in graph.weights}
        self._rows = {name: row_type(stored) for name, stored in graph.types.items()}
        self._wanted: dict[str, set[RowType]] = {}
        for op in graph.ops:
            for name, kind in self._wants(op):
                self._wanted.setdefault(name, set()).add(kind)
        self._ops: list[Op] = []
        self._makers: dict[str, Op] = {}
        self._instead: dict[str, Tensor] = {}
        self._numbers = dict.fromkeys(_STEMS, 0)

    def graph(self) -> Graph:
        """Return the graph with quantised inputs."""
        for given in self._given.ops:
            op = given.reading(self._instead)
            if isinstance(op, MatMul) and (x := self._input(op)) is not op.x:
                op = op.replaced(x=x)
            kinds = self._wanted.get(op.out.name, ()) if op.quantises else ()
            out = self._named(op.out, next(iter(kinds)) if len(kinds) == 1 else (op.out.dtype, op.out.group_size))
            if out != given.out:
                self._instead[given.out.name] = out
                op = op.replaced(out=out)
            self._add(op)
        return replace(self._given, ops=tuple(self._ops))

    def _wants(self, op: Op) -> Iterator[tuple[str, RowType]]:
        """Yield the type that an operation needs of each tensor; a matmul that has its input made again needs none."""
        matmul = op if isinstance(op, MatMul) else None
        for x in op.inputs:
            if matmul is None or x.name != matmul.x.name:
                yield x.name, FLOATS
            elif not matmul.again:
                floats = matmul.weight.ordered or matmul.left_out
                yield x.name, FLOATS if floats else self._rows[matmul.weight.name]

    def _input(self, op: MatMul) -> Tensor:
        """Return a matmul's input, quantised if its weights need it."""
        x, maker, kind = op.x, self._makers[op.x.name], self._rows[op.weight.name]
        if op.weight.ordered or op.left_out:
            if x.dtype == "q8":
                x = self._add(maker.replaced(out=self._named(x, FLOATS)))
            order = self._weights[op.weight.order_name] if op.weight.ordered else None
            apart = op.left_out.shape[0] if op.left_out else 0
            out = replace(self._named(replace(x, name="q"), kind), apart=apart)
            return self._add(Quantize(out=out, x=x, order=order, left_out=op.left_out, layer=op.layer))
        if op.again and maker.quantises:
            return self._add(maker.replaced(out=self._named(x, kind)))
        if kind in (FLOATS, (x.dtype, x.group_size)):
            return x
        return self._add(op.quantiser(x, kind[1], self._number))

    def _add(self, op: Op) -> Tensor:
        self._ops.append(op)
        self._makers[op.out.name] = op
        return op.out

    def _named(self, x: Tensor, kind: RowType) -> Tensor:
        """Return x with the next number of its name, of a type."""
        stem = x.name.partition(".")[0]
        name = self._number(stem) if stem in self._numbers else x.name
        same = (name, kind) == (x.name, (x.dtype, x.group_size))
        return x if same else Tensor(name, x.width, *kind, x.rows, x.times)

    def _number(self, stem: str) -> str:
        """Return the next name that begins so."""
        self._numbers[stem] += 1
        return f"{stem}.{self._numbers[stem] - 1}"
