"""The ctx block, which has all that changes from pass to pass: addresses, counts, words of threads; and its tables."""

from __future__ import annotations

CTX_REGIONS = 0
"""16 base addresses."""
CTX_COUNTS = 128
"""16 dynamic counts, see COUNT_*."""
CTX_EVENTS = 256
"""Address of the program's I/O events, a word each: 0 = pending, positive = the data is there, negative = it will not
come. They are outside of ctx, so that readers need not know which program is running.
"""
CTX_STREAM = 264
"""Address of the STREAM_* block of the readers of weights, or 0."""
CTX_WAITED = 272
"""Nanoseconds that forward passes have waited for completion events; stays 0 if kernels can read no clock."""
CTX_TOKENS = 384
"""Address of the token table: TOKEN_BYTES per token of the forward pass."""
CTX_SEQUENCES = 392
"""Address of the sequence table: SEQUENCE_BYTES per sequence."""
CTX_OUTPUTS = 400
"""Address of the list (int64) of the tokens whose logits are wanted."""
CTX_PROGRAM = 408
"""Address of the first instruction."""
CTX_END = 416
"""Index after the last instruction of a forward pass."""
CTX_PROFILE = 424
"""Address of int64 nanoseconds per instruction, or 0."""
CTX_BEGIN = 432
"""Index of the first instruction of a forward pass: a forward pass may be a range of the program."""
CTX_FIRST = 440
"""Index of the instruction that a forward pass begins with; -2 - index where that has a completion event."""
CTX_CLOCK = 448
"""Nanoseconds at the last barrier (profile only)."""
CTX_SAMPLES = 456
"""Address of the list (int64) of the samples, one for each row of logits: SAMPLE_BYTES at an address each, 0 for
none.
"""
CTX_STEPS = 464
"""Steps that this pass may still continue automatically, each sequence with the token that was sampled from its row;
only where every token of the forward pass is the one new token of its sequence, with a row of logits and a sample."""
CTX_CHOSEN = 472
"""Address of the list (int64) of the tokens that it decoded by itself: MAX_STEPS for each sequence, the first one
last."""
CTX_VALUES = 480
"""Blocks of V, each of one KV head, that tokens have read whose rows are chosen; only grows."""
HEAD_BYTES = 512
"""Up to here ctx is the header of one program: programs that share threads have one each."""
# Constant while the threads live.
CTX_HOST_FUTEX = 512
"""Address of libc's `syscall` where futex exists (Linux), else 0."""
CTX_FUTEX_NUMBER = 520
CTX_HOST_YIELD = 528
"""Address of `sched_yield` (or the like): gives the core away."""
CTX_HOST_CLOCK = 536
"""Address of `clock_gettime`, or 0: no profile."""
CTX_CLOCK_ID = 544
"""Number of the monotonic clock for `clock_gettime`; it differs between systems."""
CTX_HOST_SLEEP = 552
"""Address of `nanosleep` (or the like), for threads without work if there is no futex."""
CTX_NAP = 560
"""Argument of that function."""
CTX_SPINS = 568
"""Most turns of the spin loop before a thread sleeps."""
CTX_NAP_TIME = 576
"""The timespec that CTX_NAP may point to."""
CTX_EVENT_TIME = 592
"""The timespec of the longest sleep at a completion event: a cancellation is seen after it."""
# Words that threads write: a cache line each, so that spinning on one does not slow the others.
CTX_CANCEL = 640
"""Set by the thread that waits for the pass; read at barriers by the last thread to arrive, and by threads that want
more work.
"""
CTX_ERROR = 704
"""Set by a kernel that returns non-zero; ABANDONED after a cancellation within an instruction, EVENT_FAILED - its
index for an instruction whose data will not come."""
CTX_STOP = 768
"""Non-zero: no forward pass begins or continues; the threads return once their gates hold -1."""
CTX_WORK = 832
"""Next chunk of the running instruction; threads claim chunks by atomic addition."""
CTX_EPOCH = 896
"""Number of the last forward pass that was begun."""
CTX_ACTIVE = 904
"""Threads of the forward pass that the helper was requested."""
CTX_ARRIVED = 960
"""Threads that have come to the barrier."""
GATE_SLEEPERS = 64
"""A gate is a word that threads wait for to change and, at this offset, how many of them sleep."""
CTX_GENERATION = 1024
"""Gate of the barrier: low half, counts barriers; high half, index of the instruction to run, or -1 = the pass has
ended.
"""
CTX_CREW = 1152
"""Gate of threads 1 and up: the last forward pass that all threads take part in."""
CTX_HELPER = 1280
"""Gate of the helper, which is thread 0 of forward passes whose caller waits outside: the last such forward pass."""
CTX_DONE = 1408
"""Gate of the thread that waits for a forward pass: the last one that has ended."""
CTX_TURNS = 1536
"""Turns of the spin loop at the barrier now: fewer than CTX_SPINS after futile waits."""
CTX_VAIN = 1544
"""Futile waits since CTX_SPINS turns were last tried."""
CTX_RETRY = 1552
"""Futile waits after which they are tried again."""
CTX_SCRATCH = 1600
"""64 bytes of timespec."""
CTX_BYTES = 1600 + 64

ABANDONED, EVENT_FAILED = -1, -2
"""CTX_ERROR of a forward pass whose instruction was left half done; the highest of those whose data did not come."""

# -- counts and tables -------------------------------------------------------------------------------------------------
COUNT_TOKENS = 0
COUNT_OUTPUTS = 1
COUNT_MERGE = 2
"""The last tokens, as many as this, whose attention is computed in splits and merged by the next instruction; of those
before them attention finishes by itself."""
COUNT_SEVERAL = 6
"""Tokens of the pass if they are more than one, else 0: one token is normalised and quantised by every thread alone,
which costs less than a barrier."""
COUNT_DECODED = 7
"""Tokens of role ROLE_DECODE: instructions that only approximate for them are skipped in a pass over a prompt."""
COUNT_PROMPTED = 9
"""Tokens of the other role; those of role ROLE_DECODE are after them."""
COUNT_SEQUENCES = 3
"""Sequences of the pass."""
COUNT_SAMPLES = 4
"""Rows of logits if a token is to be sampled from one of them, else 0."""

TOKEN_BYTES = 64
TOKEN_ID = 0
TOKEN_SEQUENCE = 8
TOKEN_POSITION = 16
"""Position in the text, for RoPE."""
TOKEN_SLOT = 24
"""2 int32, for each block table where K and V are stored: block * BLOCK_TOKENS + TOKEN_ROW % BLOCK_TOKENS."""
TOKEN_MASK = 32
"""The token's ancestors of this pass and itself, bit i for row TOKEN_BASE + i; all ones = every row up to its own.

A token sees its path: the rows before TOKEN_BASE, then those of its mask up to its own, ascending. Attention
gives the bits of a sequence whose rows were this path: splits, lanes and windows count along it. A window takes no bit
out of the mask, for windows differ by layer."""
TOKEN_ROW = 40
"""Row of the token's sequence in which its K and V are stored. Siblings in a tree have one position and many rows."""
TOKEN_BASE = 48
"""First row of this forward pass in the token's sequence; the rows before it are part of every path."""
TOKEN_ROLE = 56
"""ROLE_*: whatever approximates follows the role, never the number of tokens."""
ROLE_PROMPT, ROLE_DECODE = 0, 1
MAX_STEPS = 16
"""Most steps of a forward pass (CTX_STEPS)."""
MASK_TOKENS = 64
"""Most new tokens of a sequence in a forward pass where one of them has a mask."""

SEQUENCE_BYTES = 40
SEQUENCE_BLOCKS = 0
"""2 addresses of int32 block tables: of layers that keep all K and V, and of those that keep only their window
(parameter `recent`), where freed blocks are some block. The same where all keep all."""
SEQUENCE_SLOT = 16
"""Bytes from the beginning of region ``state`` to the sequence's slot."""
SEQUENCE_FIRST = 24
"""Number of its first token in the pass."""
SEQUENCE_TOKENS = 32
"""Number of its tokens there."""
