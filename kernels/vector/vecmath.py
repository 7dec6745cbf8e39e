"""Elementary functions on vectors: polynomials, for library calls would be symbols that an object cannot resolve."""

from __future__ import annotations

from llvmlite import ir

from ..parameters import ACTIVATIONS
from .instruction import inline
from .lanes import first_lane, splat_f32, vabs, vmax
from .scalars import div_f32
from .simd import VF, VI, F32x16, constant, define
from .targets import emit_fma, fma

RELU, SILU, RELU2, GELU, DRELU, FATRELU, SWIGLU_OAI = (
    ACTIVATIONS[name] for name in ("relu", "silu", "relu2", "gelu", "drelu", "fatrelu", "swiglu_oai"))


@define(F32x16, F32x16)
def exp(b, x):
    """e^x within 2 ulp; exactly 1 at 0, exactly 0 below -87, clamped at 88 (Cephes' reduction and degree)."""
    floor = b.fcmp_ordered(">", x, constant(VF, -87.0))
    x = b.select(b.fcmp_ordered("<", x, constant(VF, 88.0)), x, constant(VF, 88.0))
    shifted = emit_fma(b, x, constant(VF, 1.4426950408889634), constant(VF, 12582912.0))
    whole = b.fsub(shifted, constant(VF, 12582912.0))
    r = emit_fma(b, whole, constant(VF, -0.693359375), x)
    r = emit_fma(b, whole, constant(VF, 2.12194440e-4), r)
    p = constant(VF, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0):
        p = emit_fma(b, p, r, constant(VF, c))
    power = b.shl(b.bitcast(shifted, VI), constant(VI, 23))  # the integer sits in the low bits of `shifted`
    out = b.bitcast(b.add(b.bitcast(p, VI), power), VF)
    return b.select(floor, out, constant(VF, 0.0))


@define(F32x16, F32x16)
def exp_below(b, x):
    """e^x of x <= 0 within 3 ulp, in two thirds of the instructions; exactly 1 at 0, exactly 0 below -87.

    2^f on [-1/2, 1/2] by the polynomial of degree 5 with p(0) = 1 of the least relative error, 9.2e-8.
    """
    shifted = emit_fma(b, x, constant(VF, 1.4426950408889634), constant(VF, 12582912.0))
    whole = b.fsub(shifted, constant(VF, 12582912.0))
    f = emit_fma(b, x, constant(VF, 1.4426950408889634), b.fneg(whole))
    p = constant(VF, 1.326472731307149e-3)
    for c in (9.671512991189957e-3, 5.550733581185341e-2, 0.24022242426872253, 0.6931470036506653, 1.0):
        p = emit_fma(b, p, f, constant(VF, c))
    power = b.shl(b.bitcast(shifted, VI), constant(VI, 23))  # the integer sits in the low bits of `shifted`
    out = b.bitcast(b.add(b.bitcast(p, VI), power), VF)
    return b.select(b.fcmp_ordered(">", x, constant(VF, -87.0)), out, constant(VF, 0.0))


@define(F32x16, F32x16, F32x16)
def copy_sign(b, size, sign):
    """|size| with the sign of `sign`."""
    bits = b.or_(b.and_(b.bitcast(size, VI), constant(VI, 0x7FFFFFFF)),
                 b.and_(b.bitcast(sign, VI), ir.Constant(VI, [-(2**31)] * 16)))
    return b.bitcast(bits, VF)


@inline
def sigmoid(x):
    """1 / (1 + e^-x)."""
    one = splat_f32(1.0)
    return one / (one + exp(splat_f32(0.0) - x))


@inline
def soft_cap(x, cap):
    """cap x tanh(x / cap), within 2e-7 of the cap."""
    y = sigmoid(x * splat_f32(div_f32(first_lane(splat_f32(2.0)), cap)))
    return splat_f32(cap) * (y + y - splat_f32(1.0))


@inline
def erf(x):
    """Error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    z, one = vabs(x), splat_f32(1.0)
    t = one / fma(splat_f32(0.3275911), z, one)
    p = fma(splat_f32(1.061405429), t, splat_f32(-1.453152027))
    p = fma(p, t, splat_f32(1.421413741))
    p = fma(p, t, splat_f32(-0.284496736))
    p = fma(p, t, splat_f32(0.254829592)) * t
    return copy_sign(one - p * exp(splat_f32(0.0) - z * z), x)


@define(F32x16, F32x16, F32x16)
def _above(b, x, limit):
    """x where it is above the limit, else 0."""
    return b.select(b.fcmp_ordered(">", x, limit), x, constant(VF, 0.0))


@inline
def _swiglu_oai(gate, up, limit):
    """gpt-oss's SwiGLU: gate and up are clamped, the sigmoid is steeper, and up counts from -1 on."""
    zero = splat_f32(0.0)
    gate = zero - vmax(zero - gate, zero - limit)
    up = vmax(zero - vmax(zero - up, zero - limit), zero - limit)
    return (up + splat_f32(1.0)) * (gate * sigmoid(splat_f32(1.702) * gate))


@inline
def gated(gate, up, kind, limit):
    """The activated gate times `up`, of each lane."""
    if kind == SWIGLU_OAI:
        return _swiglu_oai(gate, up, splat_f32(limit))
    if kind == DRELU:
        up = vmax(up, splat_f32(0.0))
    return activate(gate, kind, limit) * up


@inline
def activate(x, kind, limit):
    """The hidden activation `kind` (parameters.ACTIVATIONS) of each lane; `limit` is that of fatrelu."""
    zero = splat_f32(0.0)
    if kind == RELU:
        return vmax(x, zero)
    if kind == DRELU:
        return vmax(x, zero)
    if kind == FATRELU:
        return _above(x, splat_f32(limit))
    if kind == SILU:
        return x * sigmoid(x)
    if kind == RELU2:
        r = vmax(x, zero)
        return r * r
    if kind == GELU:
        return splat_f32(0.5) * x * (splat_f32(1.0) + erf(x * splat_f32(0.7071067811865476)))
    inner = fma(splat_f32(0.044715) * x * x, x, x)
    return x * sigmoid(splat_f32(1.5957691216057308) * inner)
