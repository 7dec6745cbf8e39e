"""Basis of the graph builder: names, tensors and weights of a graph under construction, and the matmul."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...base.units import round_up
from ...quant import WeightType
from ..config import ModelConfig
from ..ops.base import Op
from ..ops.matmul import Linear, LinearPart
from ..tensors import Tensor
from ..weight_types import ORDER
from ..weights import Source, Weight, as_source


class BuilderBase:
    """Operations and weights so far; parameters as of `GraphBuilder`."""

    def __init__(self, config: ModelConfig, type_of: Callable[[Weight], WeightType]):
        self.config = config
        self.layer: int | None = None
        """The layer that operations belong to from now on."""
        self._type_of = type_of
        self._ops: list[Op] = []
        self._weights: dict[str, Weight] = {}
        self._types: dict[str, WeightType] = {}
        self._names: dict[str, int] = {}

    def linear(
        self,
        x: Tensor,
        name: str,
        sources: tuple[str | Source, ...],
        widths: tuple[int, ...],
        bias: tuple[str | Source, ...] = (),
        residual: Tensor | None = None,
        in_ffn: bool = False,
        kind: str = "matrix",
        room: int = 0,
        onto: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """x W^T (+ bias) (+ residual): the matrices of `sources`, of `widths` rows each, multiplied as one.

        If they are stored in several types, each run of sources of one type is a part by itself. The output has
        `room` for further columns, which are not written yet; a later matmul writes them `onto` it from the column
        `first` on, a multiple of 16.
        """
        if firsts := self._parts(name, len(sources)):
            return self._linear_parts(x, name, sources, widths, bias, firsts, room)
        weight = self._weight(name, kind, sources, tuple((w, x.width) for w in widths))
        weight = self._ordered(weight)
        biases = self._vector(name + "_bias", bias, widths) if bias else None
        made = replace(self._tensor(name.rsplit(".", 1)[-1], sum(widths) + room), rows=x.rows)
        over = residual or onto
        out = self._after(over) if over else made
        if room or onto:
            return self._op(LinearPart(out=out, x=x, weight=weight, bias=biases, first=first, onto=onto,
                                       layer=self.layer))
        left_out, outliers = self._outliers(weight)
        return self._op(Linear(out=out, x=x, weight=weight, bias=biases, residual=residual, in_ffn=in_ffn,
                               left_out=left_out, outliers=outliers, layer=self.layer))

    def _linear_parts(self, x: Tensor, name: str, sources: tuple[str | Source, ...], widths: tuple[int, ...],
                      bias: tuple[str | Source, ...], firsts: list[int], room: int) -> Tensor:
        """Add a matmul in parts that begin at these sources."""
        out, onto = self._tensor(name.rsplit(".", 1)[-1], sum(widths) + room), None
        for first, end in zip(firsts, (*firsts[1:], len(sources)), strict=True):
            part, mine = f"{name}.{first}", slice(first, end)
            weight = self._weight(part, "matrix", sources[mine], tuple((w, x.width) for w in widths[mine]))
            biases = self._vector(part + "_bias", bias[mine], widths[mine]) if bias else None
            weight = self._ordered(weight)
            onto = self._op(LinearPart(out=out, x=x, weight=weight, bias=biases, first=sum(widths[:first]),
                                       onto=onto, layer=self.layer))
            out = self._after(onto)
        assert onto
        return onto

    def _parts(self, name: str, sources: int) -> list[int]:
        """Return the sources at which the parts of a matrix begin; none if it is stored whole."""
        return [i for i in range(sources if sources > 1 else 0)
                if self._type_of(Weight(f"{name}.{i}", (), "part")).layout != "plain"]

    # -- parts -----------------------------------------------------------------------------------------------------

    def _op(self, op: Op) -> Tensor:
        self._ops.append(op)
        return op.out

    def _after(self, x: Tensor) -> Tensor:
        """Return the tensor that an operation leaves when it writes over x."""
        return replace(x, name=self._tensor(x.name.rsplit(".", 1)[0], x.width).name)

    def _ffn_weight(self, name: str, sources: tuple[str | Source, ...]) -> Weight:
        c, size = self.config, self.config.ffn_size(self.layer or 0)
        shapes = ((size, c.hidden_size),) * (len(sources) - 1) + ((c.hidden_size, size),)
        parts = tuple(as_source(source, shape, name + "ffn") for source, shape in zip(sources, shapes, strict=True))
        return Weight(name + "ffn", (size, len(sources), c.hidden_size), "ffn", parts, "neurons")

    def _ffn_type(self, name: str) -> WeightType:
        return self._type_of(Weight(name + "ffn", (), "ffn"))

    def _tensor(self, stem: str, width: int) -> Tensor:
        count = self._names[stem] = self._names.get(stem, -1) + 1
        return Tensor(f"{stem}.{count}", width)

    def _order(self, weight: Weight) -> Weight | None:
        """Return the order of a matrix's columns, if it is not that of its inputs."""
        order = Weight(weight.order_name, weight.shape[1:], "order", _shared(weight.sources[:1]))
        return replace(order, kind="vector") if self._type_of(order) == ORDER else None

    def _ordered(self, weight: Weight) -> Weight:
        """Return the matrix with the order of its columns in the table, where it has one of its own."""
        if (order := self._order(weight)) is None:
            return weight
        weight = replace(weight, ordered=True)
        self._weights |= {weight.name: weight, order.name: order}
        self._types[order.name] = ORDER
        return weight

    def _outliers(self, weight: Weight) -> tuple[Weight, Weight] | tuple[None, None]:
        """Return the columns of outliers that are stored apart from a matrix, their numbers first, if there are any."""
        if not (n := self._types[weight.name].outliers):
            return None, None
        columns = Weight(weight.columns_name, (n,), "vector", _shared(weight.sources[:1]))
        shape = weight.shape[0], n
        apart = Weight(weight.outliers_name, shape, "outliers", _shared(weight.sources), weight.combine)
        self._weights |= {columns.name: columns, apart.name: apart}
        self._types |= {columns.name: ORDER, apart.name: self._type_of(apart)}
        return columns, apart

    def _vector(self, name: str, sources: tuple[str | Source, ...], widths: tuple[int, ...],
                combine: str = "concat") -> Weight:
        return self._weight(name, "vector", sources, tuple((w,) for w in widths), combine)

    def _weight(self, name: str, kind: str, sources: tuple[str | Source, ...], shapes: tuple[tuple[int, ...], ...],
                combine: str = "concat") -> Weight:
        step = 16 if combine == "interleave16" else 1
        rows = sum(round_up(shape[0], step) for shape in shapes)
        parts = tuple(as_source(source, shape, name) for source, shape in zip(sources, shapes, strict=True))
        weight = Weight(name, (rows, *shapes[0][1:]), kind, parts, combine)
        self._weights[name] = weight
        plain = "plain" if len(weight.shape) == 1 else "tile16"
        self._types[name] = WeightType("f32", 0, plain) if kind == "vector" else self._type_of(weight)
        return weight


def _shared(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Return the sources of a weight that shares those of another one."""
    return tuple(replace(source, shared=True) for source in sources)
