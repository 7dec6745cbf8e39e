"""The executor's inner half: N threads walk the program together, without the GIL and without Python.

`worker` is each thread's life: sleep until the epoch changes, run the record that `CTX_FIRST` names, meet at the
barrier, where the last to arrive decides for all what comes next (skip, cancel, error, end) and says so in `CTX_PC`.
`submit` starts a walk, `wait` waits for its end with a time limit, so that Python stays able to see Ctrl-C. Threads
spin for at most CTX_SPINS turns, then sleep in a futex; where there is none they give the core away.

Why no thread is stranded and none runs a record twice:

* EPOCH counts the walks that have a record to run. FIRST is written before it and stays until that walk is over, which
  takes every thread: so each thread takes part in each epoch exactly once, however late it looks.
* PC is written by the last thread at a barrier only, while all others wait there, and not again before every thread has
  come to the next barrier, for which it must have read PC. `submit` leaves it alone: a thread that is slow to leave the
  last barrier of a walk reads -1 even when the next walk has begun, and then finds a new epoch.
* DONE is written after PC = -1, and `submit` comes after DONE, so ctx and tables change only while nobody reads them.
* A thread that waits counts itself as a sleeper, looks at the word again, and sleeps if the futex finds it unchanged
  too; whoever changes the word looks at the sleepers after that. One of the two sees the other: no wake-up is lost.
* Plain stores (tables, counts, FIRST, PC, WORK, ARRIVED) come before an atomic store (EPOCH, GENERATION, DONE) that
  their readers load first, which orders them on ARM as well.
"""

from __future__ import annotations

from ..abi import (
    CTX_ARRIVED,
    CTX_BEGIN,
    CTX_CANCEL,
    CTX_CLOCK,
    CTX_CLOCK_ID,
    CTX_COUNTS,
    CTX_DONE,
    CTX_END,
    CTX_EPOCH,
    CTX_ERROR,
    CTX_FIRST,
    CTX_FUTEX_NUMBER,
    CTX_GENERATION,
    CTX_HOST_CLOCK,
    CTX_HOST_FUTEX,
    CTX_HOST_YIELD,
    CTX_PARKED,
    CTX_PC,
    CTX_PROFILE,
    CTX_PROGRAM,
    CTX_SCRATCH,
    CTX_SLEEPERS,
    CTX_SPINS,
    CTX_STOP,
    CTX_TICKETS,
    CTX_WORK,
    REC_KERNEL,
    REC_PREDICATES,
    REC_TICKET,
    RECORD_BYTES,
    TICKET_FAILED,
)
from ..registry import kernel
from ..vector.record import inline
from ..vector.simd import load_i32, load_i64, store_i64
from ..vector.targets import atomic_add, atomic_load, atomic_store, call2, call4, call6, pause

FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
_EVERYONE = 2**31 - 1


@inline
def sleep_on(ctx, word, seen, timeout):
    """Sleep while the word still holds `seen`; timeout = address of a timespec or 0. May return early."""
    futex = load_i64(ctx + CTX_HOST_FUTEX)
    if futex:
        call6(futex, load_i64(ctx + CTX_FUTEX_NUMBER), word, FUTEX_WAIT_PRIVATE, seen & 0xFFFFFFFF, timeout, 0)
    else:
        call2(load_i64(ctx + CTX_HOST_YIELD), 0, 0)


@inline
def wake_all(ctx, word):
    """Wake whoever sleeps on the word."""
    futex = load_i64(ctx + CTX_HOST_FUTEX)
    if futex:
        call6(futex, load_i64(ctx + CTX_FUTEX_NUMBER), word, FUTEX_WAKE_PRIVATE, _EVERYONE, 0, 0)


@inline
def await_change(ctx, word, seen, sleepers, turns):
    """Wait until the word no longer holds `seen`: spin `turns` times, then sleep, counted in the word `sleepers`.

    Returns the turns for the next time: fewer if spinning was in vain (the thread that is waited for may need this very
    core), more if it was not.
    """
    left = turns
    while atomic_load(word) == seen:
        if left > 0:
            left -= 1
            pause()
        else:
            atomic_add(sleepers, 1)  # before the last look at the word: whoever changes it looks here after
            if atomic_load(word) == seen:
                sleep_on(ctx, word, seen, 0)
            atomic_add(sleepers, -1)
    most = load_i64(ctx + CTX_SPINS)
    return min(2 * turns, most) if left > 0 else max(turns >> 1, most >> 6)


@inline
def holds(ctx, predicate):
    """Whether a predicate lets its record run."""
    return predicate == 0 or load_i64(ctx + CTX_COUNTS + 8 * (predicate - 1)) != 0


@inline
def halted(ctx):
    """Whether the walk is to end before its last record."""
    return atomic_load(ctx + CTX_CANCEL) or atomic_load(ctx + CTX_ERROR) or atomic_load(ctx + CTX_STOP)


@inline
def runnable(ctx, pc):
    """The record after `pc` that no count skips, or -1."""
    records = load_i64(ctx + CTX_END)
    pc += 1
    while pc < records:
        rec = load_i64(ctx + CTX_PROGRAM) + RECORD_BYTES * pc
        if holds(ctx, load_i32(rec + REC_PREDICATES)) and holds(ctx, load_i32(rec + REC_PREDICATES + 4)):
            return pc
        pc += 1
    return -1


@inline
def ticket(ctx, pc):
    """Address of the ticket that record `pc` waits for, or 0."""
    number = load_i32(load_i64(ctx + CTX_PROGRAM) + RECORD_BYTES * pc + REC_TICKET)
    return ctx + CTX_TICKETS + 8 * (number - 1) if number else 0


@inline
def next_record(ctx, pc):
    """The record after `pc` that is to run, or -1; called by one thread while the others wait.

    A record with a ticket runs only on data that came while the walk was wanted: whatever ends the walk during the wait
    wins over a ticket that is redeemed at the same time.
    """
    if halted(ctx):
        return -1
    following = runnable(ctx, pc)
    if following < 0:
        return -1
    word = ticket(ctx, following)
    if word == 0:
        return following
    while atomic_load(word) == 0 and not halted(ctx):
        call2(load_i64(ctx + CTX_HOST_YIELD), 0, 0)
    if halted(ctx):
        return -1
    if atomic_load(word) < 0:
        atomic_store(ctx + CTX_ERROR, TICKET_FAILED - following)
        return -1
    return following


@inline
def clock(ctx):
    """Nanoseconds since the last call; the time lies in ctx."""
    timespec = ctx + CTX_SCRATCH
    call2(load_i64(ctx + CTX_HOST_CLOCK), load_i64(ctx + CTX_CLOCK_ID), timespec)
    now = load_i64(timespec) * 1000000000 + load_i64(timespec + 8)
    passed = now - load_i64(ctx + CTX_CLOCK)
    store_i64(ctx + CTX_CLOCK, now)
    return passed


@inline
def advance(ctx, pc):
    """Publish what comes after record `pc`; called by the last thread at the barrier."""
    profile = load_i64(ctx + CTX_PROFILE)
    if profile:
        passed = clock(ctx)
        if pc >= 0:
            store_i64(profile + 8 * pc, load_i64(profile + 8 * pc) + passed)
    store_i64(ctx + CTX_WORK, 0)
    following = next_record(ctx, pc)
    store_i64(ctx + CTX_PC, following)
    return following


@inline
def barrier(ctx, pc, n_threads, turns):
    """Wait for all threads; the last to arrive decides what comes next. Takes and gives turns as `await_change`."""
    generation = atomic_load(ctx + CTX_GENERATION)
    if atomic_add(ctx + CTX_ARRIVED, 1) == n_threads - 1:
        store_i64(ctx + CTX_ARRIVED, 0)
        epoch = load_i64(ctx + CTX_EPOCH)
        following = advance(ctx, pc)
        atomic_store(ctx + CTX_GENERATION, generation + 1)
        if atomic_load(ctx + CTX_SLEEPERS):
            wake_all(ctx, ctx + CTX_GENERATION)
        if following < 0:
            atomic_store(ctx + CTX_DONE, epoch)
            wake_all(ctx, ctx + CTX_DONE)
        return turns
    return await_change(ctx, ctx + CTX_GENERATION, generation, ctx + CTX_SLEEPERS, turns)


@kernel("worker")
def worker(rec, ctx, tid, n_threads):
    """A thread's life; `rec` is the epoch at which it starts waiting. Returns when CTX_STOP is set."""
    seen = rec
    between_walks = between_records = load_i64(ctx + CTX_SPINS)
    while True:
        between_walks = await_change(ctx, ctx + CTX_EPOCH, seen, ctx + CTX_PARKED, between_walks)
        seen = atomic_load(ctx + CTX_EPOCH)
        if atomic_load(ctx + CTX_STOP):
            return 0
        pc = load_i64(ctx + CTX_FIRST)
        if pc < 0:  # its ticket is waited for as at a barrier, not by `submit`: Python would not see Ctrl-C meanwhile
            between_records = barrier(ctx, -3 - pc, n_threads, between_records)
            pc = load_i64(ctx + CTX_PC)
        while pc >= 0:
            record = load_i64(ctx + CTX_PROGRAM) + RECORD_BYTES * pc
            status = call4(load_i64(record + REC_KERNEL), record, ctx, tid, n_threads)
            if status:
                atomic_store(ctx + CTX_ERROR, status)
            between_records = barrier(ctx, pc, n_threads, between_records)
            pc = load_i64(ctx + CTX_PC)


@kernel("submit")
def submit(rec, ctx, tid, n_threads):
    """Start a walk (or, with CTX_STOP set, the threads' end); called when the last walk is over."""
    stop = atomic_load(ctx + CTX_STOP)
    if not stop:
        if load_i64(ctx + CTX_PROFILE):
            clock(ctx)
        first = runnable(ctx, load_i64(ctx + CTX_BEGIN) - 1)
        if first < 0 or halted(ctx):
            return 0  # nothing to run: the threads need not know
        store_i64(ctx + CTX_FIRST, -2 - first if ticket(ctx, first) else first)
    atomic_add(ctx + CTX_EPOCH, 1)
    if stop:  # an epoch without a walk is over at once
        atomic_add(ctx + CTX_DONE, 1)
    if atomic_load(ctx + CTX_PARKED):
        wake_all(ctx, ctx + CTX_EPOCH)
    return 0


@kernel("wait")
def wait(rec, ctx, tid, n_threads):
    """Wait for the end of the walk, at most the timespec at `rec` (0: no limit); returns 1 if it has ended."""
    epoch, done = atomic_load(ctx + CTX_EPOCH), atomic_load(ctx + CTX_DONE)
    while done != epoch:
        sleep_on(ctx, ctx + CTX_DONE, done, rec)
        done = atomic_load(ctx + CTX_DONE)
        if rec:
            break
    return 1 if done == epoch else 0
