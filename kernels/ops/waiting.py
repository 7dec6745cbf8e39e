"""Waiting for a word to change: threads spin, then sleep in a futex.

At the barrier a futile wait halves the turns of the next ones and a timely one doubles them: if the awaited thread
needs this very core, spinning only keeps it away. But turns shorter than a wake-up are self-perpetuating: every thread
that slept arrives late at the next barrier, where the others then sleep. So the full number of turns is tried again
after some futile waits, and kept if that was in time. Without a futex, threads yield the core within a pass and take
naps between forward passes. forward.py proves that no wake-up is lost.
"""

from __future__ import annotations

from ..abi import (
    CTX_FUTEX_NUMBER,
    CTX_GENERATION,
    CTX_HOST_FUTEX,
    CTX_HOST_SLEEP,
    CTX_HOST_YIELD,
    CTX_NAP,
    CTX_RETRY,
    CTX_SPINS,
    CTX_TURNS,
    CTX_VAIN,
    GATE_SLEEPERS,
)
from ..vector.instruction import inline
from ..vector.memory import load_i64, store_i64
from ..vector.targets import atomic_add, atomic_load, atomic_store, call2, call6, pause

FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
MIN_RETRY, MAX_RETRY = 16, 256
_EVERYONE = 2**31 - 1
LOW = 0xFFFFFFFF
"""Part of a word that a futex compares: its low half."""


@inline
def sleep_on(ctx, word, seen, timeout):
    """Sleep while the word still holds `seen`; timeout = address of a timespec or 0. May return early."""
    futex = load_i64(ctx + CTX_HOST_FUTEX)
    if futex:
        call6(futex, load_i64(ctx + CTX_FUTEX_NUMBER), word, FUTEX_WAIT_PRIVATE, seen & LOW, timeout, 0)
    elif word == ctx + CTX_GENERATION:
        call2(load_i64(ctx + CTX_HOST_YIELD), 0, 0)
    else:
        call2(load_i64(ctx + CTX_HOST_SLEEP), load_i64(ctx + CTX_NAP), 0)


@inline
def await_change(ctx, gate, seen, turns):
    """Wait until the gate no longer holds `seen`; returns its value then, and the rest of the turns."""
    value, left = atomic_load(gate), turns
    while value == seen:
        if left > 0:
            left -= 1
            pause()
        else:
            atomic_add(gate + GATE_SLEEPERS, 1)  # before the last look: a thread that changes the word looks here after
            if atomic_load(gate) == seen:
                sleep_on(ctx, gate, seen, 0)
            atomic_add(gate + GATE_SLEEPERS, -1)
        value = atomic_load(gate)
    return value, left


@inline
def await_barrier(ctx, seen):
    """Wait at the barrier; threads share their estimate of spinning, and lose nothing if two write at once."""
    most, usual = load_i64(ctx + CTX_SPINS), load_i64(ctx + CTX_TURNS)
    again = usual < most and load_i64(ctx + CTX_VAIN) >= load_i64(ctx + CTX_RETRY)
    value, left = await_change(ctx, ctx + CTX_GENERATION, seen, most if again else usual)
    if left > 0:
        if usual < most:
            store_i64(ctx + CTX_TURNS, most if again else min(2 * usual, most))
            store_i64(ctx + CTX_VAIN, 0)
            store_i64(ctx + CTX_RETRY, MIN_RETRY)
    else:
        store_i64(ctx + CTX_TURNS, max(usual >> 1, (most >> 6) + 1))
        store_i64(ctx + CTX_VAIN, 0 if again else load_i64(ctx + CTX_VAIN) + 1)
        if again:
            store_i64(ctx + CTX_RETRY, min(2 * load_i64(ctx + CTX_RETRY), MAX_RETRY))
    return value


@inline
def change(ctx, gate, value):
    """Give the gate another value and wake its sleepers."""
    atomic_store(gate, value)
    if atomic_load(gate + GATE_SLEEPERS):
        futex = load_i64(ctx + CTX_HOST_FUTEX)
        if futex:
            call6(futex, load_i64(ctx + CTX_FUTEX_NUMBER), gate, FUTEX_WAKE_PRIVATE, _EVERYONE, 0, 0)
