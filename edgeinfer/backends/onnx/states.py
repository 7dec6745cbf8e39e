"""State of recurrent layers: the tensors of a slot that a model reads and writes beside K and V."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from edgeinfer.graph import CausalConv, Graph, Op, StateRule

UNTRIED_STATES = ("Recurrent layers have not been run on a GPU by edgeinfer yet: compare their results first, with "
                  "benchmarks/gpu_check.py --stage smoke numerics.")
SIZES = {"f16": 2, "f32": 4}


class State(NamedTuple):
    """A tensor of a slot."""

    past: str
    """Name of the model's input."""
    present: str
    """Name of the output."""
    kind: str
    """f16 or f32."""
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """True for the matrices of a rule, False for the inputs of a convolution."""
        return len(self.shape) == 3

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return prod(self.shape) * SIZES[self.kind]


def past(op: Op, what: str) -> str:
    """Return the name of the input for an operation's state, its ``inputs`` or ``matrices``."""
    return f"past_{what}.{op.layer}"


def present(op: Op, what: str) -> str:
    """Return the name of the output, likewise."""
    return f"present_{what}.{op.layer}"


def states_of(graph: Graph, dtype: str) -> list[State]:
    """Return the states of a model: convolutions have their last inputs as they came, rules their matrices in f32."""
    found = []
    for op in graph.ops:
        if isinstance(op, CausalConv):
            found.append(State(past(op, "inputs"), present(op, "inputs"), dtype, (op.out.width, op.width - 1)))
        elif isinstance(op, StateRule):
            found.append(State(past(op, "matrices"), present(op, "matrices"), "f32",
                               (op.heads, op.value_dim, op.key_dim)))
    return found
