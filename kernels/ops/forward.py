"""The executor's inner half: threads run the program together, without the GIL and without Python.

Thread 0 of a pass is its caller, within `submit`, or the helper, while the caller waits in `wait` with a time limit, so
that Python can still handle Ctrl-C. The others are the crew, which takes part in all passes except those of one thread.
`worker` is the life of helper and crew: wait at the gate for the next pass, run the instruction that CTX_FIRST names,
meet at the barrier, where the last thread to arrive decides for all the next step (skip, cancel, error, end).

A thread that waits spins, longer than waking a thread takes, then sleeps in a futex (waiting.py).

No thread is stranded and none runs an instruction twice, because:

* CREW changes once for each pass of all threads. FIRST is written before it and stays until that pass is over, which
  takes the whole crew: so each thread takes part in each such pass exactly once, however late it looks. The same holds
  for HELPER and the helper.
* GENERATION holds the number of the barrier and of the next instruction in one word, written by the last thread at the
  barrier while all others wait there. During a pass no participant can miss a barrier. A thread that is slow to leave
  the last one may: the helper, after which the caller has become thread 0 of the next pass. It finds a number other
  than the next and so knows that its forward pass is over. Forward passes of one thread leave GENERATION alone.
* DONE is written after GENERATION; the next `submit` comes after DONE, even if the caller takes part, so ctx and
  tables change only while no thread reads them, and no thread that was slow to write DONE takes it back.
* A waiting thread counts itself as a sleeper, looks at the word again, and sleeps if the futex finds it unchanged too;
  a thread that changes the word looks at the sleepers after that. One of the two sees the other: no wake-up is lost.
* `submit` writes EPOCH, then looks at STOP; closing writes STOP, then (in `wait`, after an atomic addition) looks at
  EPOCH. Either no forward pass begins or its end is waited for, and only then the gates get their -1.
* Plain stores (tables, counts, FIRST, ACTIVE, WORK, ARRIVED) come before an atomic store (CREW, HELPER, GENERATION,
  DONE) that their readers load first, which orders them on ARM as well.
"""

from __future__ import annotations

from ..abi import (
    CTX_ACTIVE,
    CTX_ARRIVED,
    CTX_BEGIN,
    CTX_CANCEL,
    CTX_CLOCK,
    CTX_CLOCK_ID,
    CTX_COUNTS,
    CTX_CREW,
    CTX_DONE,
    CTX_END,
    CTX_EPOCH,
    CTX_ERROR,
    CTX_EVENT_TIME,
    CTX_EVENTS,
    CTX_FIRST,
    CTX_GENERATION,
    CTX_HELPER,
    CTX_HOST_CLOCK,
    CTX_PROFILE,
    CTX_PROGRAM,
    CTX_SCRATCH,
    CTX_SPINS,
    CTX_STOP,
    CTX_WAITED,
    CTX_WORK,
    EVENT_FAILED,
    GATE_SLEEPERS,
    INST_EVENT,
    INST_KERNEL,
    INST_PREDICATES,
    INSTRUCTION_BYTES,
)
from ..registry import kernel
from ..vector.instruction import inline
from ..vector.memory import load_i32, load_i64, store_i64
from ..vector.targets import atomic_add, atomic_load, atomic_store, call2, call4, pause
from .steps import take_step
from .waiting import LOW, await_barrier, await_change, change, sleep_on


@inline
def holds(ctx, predicate):
    """Return whether a predicate lets its instruction run."""
    return predicate == 0 or load_i64(ctx + CTX_COUNTS + 8 * (predicate - 1)) != 0


@inline
def halted(ctx):
    """Return whether the forward pass is to end before its last instruction."""
    return atomic_load(ctx + CTX_CANCEL) or atomic_load(ctx + CTX_ERROR) or atomic_load(ctx + CTX_STOP)


@inline
def now(ctx):
    """Nanoseconds of the monotonic clock."""
    timespec = ctx + CTX_SCRATCH
    call2(load_i64(ctx + CTX_HOST_CLOCK), load_i64(ctx + CTX_CLOCK_ID), timespec)
    return load_i64(timespec) * 1000000000 + load_i64(timespec + 8)


@inline
def clock(ctx):
    """Nanoseconds since the last call; the time is in ctx."""
    time = now(ctx)
    passed = time - load_i64(ctx + CTX_CLOCK)
    store_i64(ctx + CTX_CLOCK, time)
    return passed


@inline
def runnable(ctx, pc):
    """The instruction after `pc` that no count skips, or -1."""
    instructions = load_i64(ctx + CTX_END)
    pc += 1
    while pc < instructions:
        inst = load_i64(ctx + CTX_PROGRAM) + INSTRUCTION_BYTES * pc
        if holds(ctx, load_i32(inst + INST_PREDICATES)) and holds(ctx, load_i32(inst + INST_PREDICATES + 4)):
            return pc
        pc += 1
    return -1


@inline
def event(ctx, pc):
    """Address of the completion event that instruction `pc` waits for, or 0."""
    number = load_i32(load_i64(ctx + CTX_PROGRAM) + INSTRUCTION_BYTES * pc + INST_EVENT)
    return load_i64(ctx + CTX_EVENTS) + 8 * (number - 1) if number else 0


@inline
def await_event(ctx, word):
    """Wait until an event is no longer pending, or the forward pass is to end; the time is added to CTX_WAITED."""
    if atomic_load(word) == 0:
        timed = load_i64(ctx + CTX_HOST_CLOCK) != 0
        began = now(ctx) if timed else 0
        while atomic_load(word) == 0 and not halted(ctx):
            sleep_on(ctx, word, 0, ctx + CTX_EVENT_TIME)  # a request to end the pass does not wake us: look again
        if timed:
            store_i64(ctx + CTX_WAITED, load_i64(ctx + CTX_WAITED) + now(ctx) - began)


@inline
def next_instruction(ctx, pc):
    """The instruction after `pc` that is to run, or -1; called by one thread while the others wait.

    An instruction with an event runs only on data that came while the pass was wanted: whatever ends the pass during
    the wait wins over a completion event that is redeemed at the same time.
    """
    if halted(ctx):
        return -1
    following = runnable(ctx, pc)
    if following < 0 and take_step(ctx):
        following = runnable(ctx, load_i64(ctx + CTX_BEGIN) - 1)
    if following < 0:
        return -1
    word = event(ctx, following)
    if word == 0:
        return following
    await_event(ctx, word)
    if halted(ctx):
        return -1
    if atomic_load(word) < 0:
        atomic_store(ctx + CTX_ERROR, EVENT_FAILED - following)
        return -1
    return following


@inline
def advance(ctx, pc):
    """Return the instruction after `pc`, or -1; called by one thread while the others wait."""
    profile = load_i64(ctx + CTX_PROFILE)
    if profile:
        passed = clock(ctx)
        if pc >= 0:
            store_i64(profile + 8 * pc, load_i64(profile + 8 * pc) + passed)
    store_i64(ctx + CTX_WORK, 0)
    return next_instruction(ctx, pc)


@inline
def meet(ctx, pc, n_threads):
    """Wait for all threads to end instruction `pc`; returns the next one, which the last to arrive decides."""
    if n_threads == 1:
        following, epoch = advance(ctx, pc), load_i64(ctx + CTX_EPOCH)
    else:
        seen = atomic_load(ctx + CTX_GENERATION)
        number = (seen + 1) & LOW
        if atomic_add(ctx + CTX_ARRIVED, 1) < n_threads - 1:
            value = await_barrier(ctx, seen)
            return value >> 32 if value & LOW == number else -1
        store_i64(ctx + CTX_ARRIVED, 0)
        following, epoch = advance(ctx, pc), load_i64(ctx + CTX_EPOCH)
        change(ctx, ctx + CTX_GENERATION, following << 32 | number)
    if following < 0:
        change(ctx, ctx + CTX_DONE, epoch)
    return following


@inline
def forward(ctx, tid, n_threads):
    """Take part in a forward pass until its end."""
    pc = load_i64(ctx + CTX_FIRST)
    if pc < 0:  # its event is waited for as at a barrier, not by `submit`: Python would not see Ctrl-C meanwhile
        pc = meet(ctx, -3 - pc, n_threads)
    while pc >= 0:
        instruction = load_i64(ctx + CTX_PROGRAM) + INSTRUCTION_BYTES * pc
        status = call4(load_i64(instruction + INST_KERNEL), instruction, ctx, tid, n_threads)
        if status:
            atomic_store(ctx + CTX_ERROR, status)
        pc = meet(ctx, pc, n_threads)


@kernel("worker")
def worker(inst, ctx, tid, n_threads):
    """The life of the helper (thread 0) or of one of the crew; returns when its gate holds -1."""
    gate, seen = ctx + (CTX_CREW if tid else CTX_HELPER), 0
    while True:
        seen, _ = await_change(ctx, gate, seen, load_i64(ctx + CTX_SPINS))
        if seen < 0:
            return 0
        forward(ctx, tid, n_threads if tid else load_i64(ctx + CTX_ACTIVE))


@kernel("submit")
def submit(inst, ctx, tid, n_threads):
    """Start a forward pass of 1 or all threads; called when the last pass is over. With CTX_STOP set, end the threads.

    With `inst` the caller is thread 0. Returns 1 if the forward pass has ended, 0 if it is to be waited for.
    """
    epoch = load_i64(ctx + CTX_EPOCH) + 1
    if not atomic_load(ctx + CTX_STOP):
        if load_i64(ctx + CTX_PROFILE):
            clock(ctx)
        first = runnable(ctx, load_i64(ctx + CTX_BEGIN) - 1)
        if first < 0 or halted(ctx):
            return 1  # nothing to run: the threads need not know
        store_i64(ctx + CTX_FIRST, -2 - first if event(ctx, first) else first)
        store_i64(ctx + CTX_ACTIVE, n_threads)
        atomic_store(ctx + CTX_EPOCH, epoch)
        if not atomic_load(ctx + CTX_STOP):
            if n_threads > 1:
                change(ctx, ctx + CTX_CREW, epoch)
            if not inst:
                change(ctx, ctx + CTX_HELPER, epoch)
                return 0
            forward(ctx, 0, n_threads)
            done = atomic_load(ctx + CTX_DONE)
            while done != epoch:
                done, _ = await_change(ctx, ctx + CTX_DONE, done, load_i64(ctx + CTX_SPINS))
            return 1
        change(ctx, ctx + CTX_DONE, epoch)
        return 1
    change(ctx, ctx + CTX_CREW, -1)
    change(ctx, ctx + CTX_HELPER, -1)
    return 1


@kernel("wait")
def wait(inst, ctx, tid, n_threads):
    """Wait for the end of the forward pass, at most the timespec at `inst` (0: no limit); returns 1 if it has ended."""
    gate = ctx + CTX_DONE
    atomic_add(gate + GATE_SLEEPERS, 1)
    epoch, done = atomic_load(ctx + CTX_EPOCH), atomic_load(gate)
    while done != epoch:
        sleep_on(ctx, gate, done, inst)
        done = atomic_load(gate)
        if inst:
            break
    atomic_add(gate + GATE_SLEEPERS, -1)
    return 1 if done == epoch else 0


@kernel("spin")
def spin(inst, ctx, tid, n_threads):
    """Spin `inst` turns at a gate that does not change, so that their time can be taken."""
    while inst > 0 and atomic_load(ctx + CTX_DONE) >= 0:
        inst -= 1
        pause()
    return 0
