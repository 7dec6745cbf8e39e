"""Base class of operations: the contract between a graph and everything that reads it.

Planner, estimator, profiler, `describe`, `bench` and the lowerings ask the operation; none keeps a list of kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache, cached_property
from typing import Any, ClassVar

from ...base.dataclass import dataclass
from ...base.units import round_up
from ...errors import UnsupportedModelError
from ..tensors import Tensor, Types
from ..weights import Weight
from .costs import KvAccess, OnDemand, Read, Scratch, Sizes

PARTS = ATTENTION, FFN, HEAD = "attention", "FFN", "head"
"""Parts of a model in reports."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation. Fields that are tensors or weights are its operands, in the order of the class.

    A subclass states its costs by overriding `reads`, `operations`, `scratch` and `KERNELS`; one that is missing is
    refused by name when a graph is built (check.py). Fields hold numbers and names only, so that a graph can be
    printed, compared and stored.
    """

    KERNELS: ClassVar[tuple[str, ...] | None] = None
    """Names of the kernels that it becomes, none if it cannot run yet; in braces the parameters of a name: ``kv``
    (type of KV), ``out`` (the output), ``stored`` (WeightType of its first weight)."""
    OVER: ClassVar[str] = ""
    """The input whose memory the output takes (residual sums, rotary embedding); empty for an output of its own."""

    given: ClassVar[bool] = False
    """True if its output is computed outside of the program, so that there is nothing to run."""
    quantises: ClassVar[bool] = False
    """True if its kernels can write quantised rows."""

    out: Tensor
    layer: int | None = None
    """The transformer layer it belongs to; None outside of layers."""
    decoded: bool = False
    """Left out where no token of a forward pass is decoded: it serves approximations of these alone."""
    sampled: bool = False
    """Left out where no token is sampled: it serves approximations of these alone."""
    several: bool = False
    """Left out where a forward pass has one token: its reader then does this work itself (passes.fuse_input)."""

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The class' name in words, such as ``rms_norm``."""
        return _words(type(self).__name__)

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that it reads."""
        return tuple([value for name, value in vars(self).items() if type(value) is Tensor and name != "out"])

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Weights that it names."""
        return tuple([value for value in vars(self).values() if type(value) is Weight])

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers and names of the operation itself."""
        skipped = ("layer", "several", "decoded", "sampled", "in_ffn")
        return {name: value for name, value in self._values()
                if not isinstance(value, Tensor | Weight) and value not in (None, False) and name not in skipped}

    @property
    def over(self) -> Tensor | None:
        """The tensor that `OVER` names."""
        return getattr(self, self.OVER) if self.OVER else None

    @cached_property
    def label(self) -> str:
        """Return its name in reports: kind and weight, or kind and layer."""
        if self.weights:
            return f"{self.name} {self.weights[0].name}"
        return self.name if self.layer is None else f"{self.name} layer {self.layer}"

    def reading(self, instead: Mapping[str, Tensor]) -> Op:
        """Return the operation with other inputs for those named."""
        if not any(x.name in instead for x in self.inputs):
            return self
        changed: dict[str, Any] = {name: instead[value.name] for name, value in self._values()
                   if isinstance(value, Tensor) and name != "out" and value.name in instead}
        return self.replaced(**changed)

    def replaced(self, **changed: Any) -> Op:
        """Return the operation with other values of some fields.

        As dataclasses.replace, in a tenth of its time: passes replace hundreds of operations when a model is opened.
        """
        names = self._names()
        if unknown := changed.keys() - set(names):
            raise TypeError(f"The operation {self.name} has no field {sorted(unknown)[0]!r}.")
        new: Op = object.__new__(type(self))
        vars(new).update({name: value for name, value in vars(self).items() if name in names}, **changed)
        return new

    def _values(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in self._names())

    def _names(self) -> tuple[str, ...]:
        kind: Any = type(self)
        return _field_names(kind)

    @property
    def ffn(self) -> bool:
        """True if it belongs to a feed-forward network."""
        return False

    @property
    def part(self) -> str:
        """The one of `PARTS` that it belongs to."""
        return FFN if self.ffn else HEAD if self.out.rows == "outputs" else ATTENTION

    # -- what it costs ---------------------------------------------------------------------------------------------

    def reads(self, types: Types) -> tuple[Read, ...]:
        """Say which weights are read, and how many bytes of them."""
        raise self._unsaid("what it reads")

    def operations(self) -> float:
        """Count the multiplications and additions with matrices for one token."""
        raise self._unsaid("how many operations it takes")

    def scratch(self, sizes: Sizes) -> Scratch:
        """Return the scratch memory that its kernels need."""
        raise self._unsaid("what scratch it needs")

    def memory(self, types: Types) -> OnDemand | None:
        """Say which weight of it need not be in memory whole."""
        return None

    def read_share(self, mode: str, density: float) -> float:
        """Return the share of its weights that a decoded token reads, where an FFN runs in a mode (config.SPARSE_MODES)
        and this many of its neurons are live."""
        return 1.0

    def kernels(self, types: Types, kv: str) -> tuple[str, ...]:
        """Name the kernels that it becomes, with KV of a type; none if it cannot run yet."""
        if self.KERNELS is None:
            raise self._unsaid("which kernels it becomes")
        stored = types[self.weights[0].name] if self.weights else None
        return tuple(name.format(kv=kv, out=self.out, stored=stored) for name in self.KERNELS)

    def int8(self, types: Types) -> bool:
        """Tell whether its matmuls are of int8."""
        return False

    @property
    def kv(self) -> KvAccess | None:
        """The K and V that it stores or reads."""
        return None

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state that a sequence keeps for it (kernels/abi/state.py)."""
        return 0

    @property
    def state_traffic(self) -> float:
        """Bytes of it that a decoded token reads and writes."""
        return 0.0

    def activation_values(self) -> float:
        """Count the values that go into and come out of matrices for one token."""
        return 0.0

    def faults(self, types: Types) -> Iterator[str]:
        """Yield faults: mismatched widths of inputs, weights and output."""
        return iter(())

    def _unsaid(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"The operation {self.name} does not say {what}, so no graph can have it.")


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _words(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


COSTS = ("reads", "operations", "scratch", "kernels")
"""Methods that every class must define."""


@dataclass(frozen=True, kw_only=True)
class RowOp(Op):
    """An operation on rows of activations: it reads no matrices and multiplies none; vectors are read whole."""

    def reads(self, types: Types) -> tuple[Read, ...]:
        """Vectors, whole."""
        return tuple(Read.whole(weight, types) for weight in self.weights)

    def operations(self) -> float:
        """Return 0: there are no matrices."""
        return 0.0

    def scratch(self, sizes: Sizes) -> Scratch:
        """Return no scratch memory."""
        return Scratch()


def other_width(what: str, have: int, tensor: Tensor, step: int = 1) -> Iterator[str]:
    """Yield an error for each tensor of the wrong width."""
    if have != round_up(tensor.width, step):
        yield f"{what} {have}, but {tensor} is {tensor.width} wide"


def layer_of(op: Op) -> int:
    """Return the layer of an operation that cannot be outside of layers."""
    if op.layer is None:
        raise ValueError(f"The operation {op.name} needs a layer.")
    return op.layer
