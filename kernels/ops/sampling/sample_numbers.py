"""Arithmetic of sampling a token: logits as sortable integers, and the float64 functions of sampling.py."""

from __future__ import annotations

from ...vector.instruction import inline
from ...vector.lanes import allow, lane_numbers, lanes_at_least, mask_outside
from ...vector.memory import load_f32x16, load_i32, load_u16
from ...vector.scalars import bits_of_f64, div_f64, f32_from_bits, f64_from_bits, f64_of, i64_of, shift_right

_GAMMA, _MIX1, _MIX2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


LOWEST_ORDER = -0x7F800000
"""The order-preserving bits of the lowest finite number: a logit below it is -inf, and its token in no sample."""


@inline
def logits_at(logits, mask, i, vocab_size):
    """16 logits from number i on, a multiple of 16; -inf after the last one, and where a mask (or 0) forbids one."""
    v = load_f32x16(logits + 4 * i)
    if mask:
        v = allow(v, load_u16(mask + (i >> 3)))
    if i + 16 <= vocab_size:
        return v
    return mask_outside(v, lane_numbers(), 0, vocab_size - 1 - i, f32_from_bits(0xFF800000))


@inline
def lanes_from(logits, mask, i, vocab_size, least):
    """Bit j for each of the 16 logits from number i on that is `least` or more, a finite number, and allowed."""
    lanes = lanes_at_least(logits_at(logits, 0, i, vocab_size), least)
    return lanes & load_u16(mask + (i >> 3)) if mask else lanes


@inline
def order_of(logits, i):
    """Order-preserving bits of logit number i, a signed 32-bit integer; zeros of either sign are equal."""
    bits = load_i32(logits + 4 * i)
    bits = 0 if bits == -(2**31) else bits
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@inline
def logit_of_order(order):
    """The logit with these order-preserving bits."""
    return f32_from_bits(order ^ ((order >> 31) & 0x7FFFFFFF))


@inline
def candidate(logits, i):
    """Logit number i as an int64: its order-preserving bits above the inverted id."""
    return (order_of(logits, i) << 32) | (0xFFFFFFFF - i)


@inline
def logit_of(key):
    """A candidate's logit."""
    return logit_of_order(key >> 32)


@inline
def id_of(key):
    """A candidate's token."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@inline
def exp(x):
    """e^x for x <= 0."""
    if not x >= -708.0:
        return 0.0
    k = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10
    p = 1 / 6227020800
    p = (((p * r + 1 / 479001600) * r + 1 / 39916800) * r + 1 / 3628800) * r + 1 / 362880
    p = (((p * r + 1 / 40320) * r + 1 / 5040) * r + 1 / 720) * r + 1 / 120
    p = ((((p * r + 1 / 24) * r + 1 / 6) * r + 0.5) * r + 1.0) * r + 1.0
    return p * f64_from_bits((i64_of(k) + 1023) << 52)


@inline
def log(x):
    """ln x of a positive normal number (fdlibm's e_log.c)."""
    bits = bits_of_f64(x)
    exponent = (bits >> 52) - 1023
    m = f64_from_bits((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000)
    if m > 1.4142135623730951:
        m = m * 0.5
        exponent += 1
    k, f = f64_of(exponent), m - 1.0
    s = div_f64(f, 2.0 + f)
    z = s * s
    w = z * z
    odd = 2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)
    even = 3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01)
    r = z * (6.666666666666735130e-01 + w * odd) + w * even
    half = 0.5 * f * f
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + r) + k * 1.90821492927058770002e-10)) - f)


@inline
def absorb(state, value):
    """Output number `value` of SplitMix64 with this state."""
    z = state + (value + 1) * _GAMMA
    z = (z ^ shift_right(z, 30)) * _MIX1
    z = (z ^ shift_right(z, 27)) * _MIX2
    return z ^ shift_right(z, 31)


@inline
def gumbel(bits):
    """-ln(-ln u) of the u in (0, 1) that random bits stand for."""
    return -log(-log((f64_of(shift_right(bits, 12)) + 0.5) * 2.220446049250313e-16))


