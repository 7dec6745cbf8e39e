"""Functions of values in ONNX operators: activations with and without a gate, scales, soft caps."""

from __future__ import annotations

from edgeinfer.errors import UnsupportedModelError

from .lowering import MICROSOFT, Lowering


def function(x: str, name: str, factor: float, at: Lowering) -> str:
    """Apply a function of single values (kernels.VALUE_FUNCTIONS).

    Every operator here has CUDA kernels in float16, and in float32 on the CPU.
    """
    if name == "scale":
        return x if factor == 1 else at.node("Mul", x, at.number(factor))
    if name == "soft_cap":
        return at.node("Mul", at.node("Tanh", at.node("Div", x, at.number(factor))), at.number(factor))
    if name == "silu":
        return at.node("Mul", x, at.node("Sigmoid", x))
    if name in ("relu", "drelu"):
        return at.node("Relu", x)
    if name == "relu2":
        y = at.node("Relu", x)
        return at.node("Mul", y, y)
    if name == "fatrelu":
        return at.node("Where", at.node("Greater", x, at.number(factor)), x, at.number(0.0))
    if name in ("gelu", "gelu_tanh"):
        return at.node("Gelu", x, approximate="tanh" if name == "gelu_tanh" else "none")
    raise UnsupportedModelError(f"The activation {name} has no equivalent in ONNX, so the model cannot be exported; "
                                "run it with --device cpu.")


def gated(gate: str, up: str, activation: str, limit: float, at: Lowering) -> str:
    """act(gate) * up."""
    if activation == "swiglu_oai":
        gate = at.node("Clip", gate, "", at.number(limit))
        up = at.node("Clip", up, at.number(-limit), at.number(limit))
        gate = at.node("QuickGelu", gate, domain=MICROSOFT, alpha=1.702)
        return at.node("Mul", gate, at.node("Add", up, at.number(1.0)))
    if activation == "drelu":
        up = at.node("Relu", up)
    return at.node("Mul", function(gate, activation, limit, at), up)
