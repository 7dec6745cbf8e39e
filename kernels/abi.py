"""The kernel ABI: the layout of a record (what never changes) and of the ctx block (all that changes).

``int64 kernel(rec, ctx, tid, n_threads)``: rec and ctx are addresses. Kernels, lowering and twins share these numbers.
"""

from __future__ import annotations

from edgeinfer.quant import KV_TYPES

VERSION = 2
"""Part of the hash of the kernel objects."""

# -- record: 32 words of 8 bytes ---------------------------------------------------------------------------------------
RECORD_BYTES = 256
REC_KERNEL = 0
"""Byte offset of the kernel's address, filled in at load from the table of the chosen instruction set."""
REC_FLAGS = 8
"""int32: FLAG_* bits, of the kernel's own meaning."""
REC_TICKET = 12
"""int32: 1 + index of an I/O ticket that must be redeemed before the record starts. 0 = none."""
REC_PREDICATES = 16
"""2 int32: each 1 + index of a count, 0 = none; the record is skipped where one of these counts is 0."""
N_PREDICATES = 2
REC_OPERANDS = 24
"""12 operands of 8 bytes: region << 48 | byte offset."""
N_OPERANDS = 12
REC_PARAMETERS = 120
"""32 int32 parameters: counts, strides in bytes, float32 bits."""
N_PARAMETERS = 32
REGION_SHIFT = 48

FLAG_RESIDUAL = 1
"""linear: add the product to what the output holds."""
FLAG_BIAS = 2
"""linear, gated: add a bias vector."""
FLAG_MASK = 16
"""neuron_gated: tokens of role ROLE_DECODE compute the neurons of their masks alone, the others are 0 to them.

A mask is a row of operand 3, `mask_stride` bytes (a multiple of 8) from one token's to the next: bit i % 64 of its
int64 i // 64 stands for neuron i, bits behind the last neuron count for nothing. There is a row for each token of the
walk; those of prompt tokens are not read."""
FLAG_THRESHOLD = 64
"""neuron_gated: operand 3 is one float; for tokens of role ROLE_DECODE activations that are no larger count as 0."""
FLAG_DENSE = 32
"""neuron kernels: rows and columns of dead neurons are read and computed too."""
FLAG_EARLY = 128
"""neuron_resolve: it stands before the layer's attention and only asks for what a prompt will want."""
FLAG_HEAD_NORM = 4
"""rope_store: normalise q and k heads."""
FLAG_HOLES = 8
"""attention: operand 6 says of which tokens the layer has no K and V: BLOCK_TOKENS bytes for each block of the pool, 1
for a row that was left out on the way to this layer and 0 for every other. Nothing of such a row reaches a result."""
FLAG_SINKS = 1024
"""attention, attention_merge: operand 8 has a float for each query head that competes with the scores and has no V."""
FLAG_CENTRED = 512
"""norm: the mean of a row is taken off before it is scaled (LayerNorm)."""
FLAG_LAST = 256
"""attention_merge: the tokens are the last of the walk, not the first, and rows of V may have been left out."""
FLAG_TIMES, FLAG_SCALED, FLAG_VALUE_NORM, FLAG_KEYS_AS_VALUES, FLAG_QUERIES = (1 << bit for bit in range(11, 16))
"""activate: times operand 1; norm: times operand 5; rope_store: v normed, v made of k, queries alone (ops/rope.py)."""
VALUES_OF_A_UNIT = 2048
"""activate: values of a row that a thread takes at once, a multiple of 16."""
INSTEAD_NOTHING, INSTEAD_SCALE, INSTEAD_MEAN = 0, 1, 2
"""What stands for rows of V that are left out: nothing; the others' weights add up to 1; a mean (MEAN_BLOCKS)."""
FUSED_QUANTISE, FUSED_NORM = 1, 2
"""What a product does to its input itself: quantise it, or normalise and quantise it; 0 = nothing."""

# -- regions -----------------------------------------------------------------------------------------------------------
REGIONS = ("weights", "constants", "activations", "kv", "logits", "scratch", "resident", "streamed", "state", "cold",
           "experts")
"""Memory that operands point into; the index is the region's number. Weights lie in `weights` (the mapped file),
`resident` (memory of the process), `streamed` (buffers that are read ahead of use) or, neurons that are read when
they are wanted, in slots of `cold`, experts likewise in `experts`; `state` is what recurrent layers keep of a sequence.
A second program, such as a draft model's, brings regions of its own (HEAD_BYTES)."""

# -- ctx: byte offsets -------------------------------------------------------------------------------------------------
CTX_REGIONS = 0
"""16 base addresses."""
CTX_COUNTS = 128
"""16 dynamic counts, see COUNT_*."""
CTX_TICKETS = 256
"""Address of the program's I/O tickets, a word each: 0 = pending, positive = the data is there, negative = it will not
come. They lie outside of ctx, so that who reads need not know whose turn it is."""
CTX_STREAM = 264
"""Address of the STREAM_* block of who reads weights ahead of use, or 0."""
CTX_WAITED = 272
"""Nanoseconds that walks have waited for tickets; stays 0 where kernels can read no clock."""
CTX_TOKENS = 384
"""Address of the token table: TOKEN_BYTES per token of the walk."""
CTX_SEQUENCES = 392
"""Address of the sequence table: SEQUENCE_BYTES per sequence."""
CTX_OUTPUTS = 400
"""Address of the list (int64) of the tokens whose logits are wanted."""
CTX_PROGRAM = 408
"""Address of the first record."""
CTX_END = 416
"""Index behind the last record of a walk."""
CTX_PROFILE = 424
"""Address of int64 nanoseconds per record, or 0."""
CTX_BEGIN = 432
"""Index of the first record of a walk: a walk may be a range of the program."""
CTX_FIRST = 440
"""Index of the record that a walk begins with; -2 - index where that has a ticket."""
CTX_CLOCK = 448
"""Nanoseconds at the last barrier (profile only)."""
CTX_DRAWS = 456
"""Address of the list (int64) of the draws, one for each row of logits: DRAW_BYTES at an address each, 0 for none."""
CTX_STEPS = 464
"""Steps that this walk may still go on by itself, each sequence with the token that was drawn from its row; only where
every token of the walk is the one new token of its sequence, with a row of logits and a draw."""
CTX_CHOSEN = 472
"""Address of the list (int64) of the tokens that it went on with: MOST_STEPS for each sequence, the first one last."""
CTX_VALUES = 480
"""Blocks of V, each of one KV head, that tokens have read whose rows are chosen; only grows."""
HEAD_BYTES = 512
"""Up to here ctx is what one program and its next walk need: programs that share threads have such a head each."""
# What never changes while the threads live.
CTX_HOST_FUTEX = 512
"""Address of libc's `syscall` where futex exists (Linux), else 0."""
CTX_FUTEX_NUMBER = 520
CTX_HOST_YIELD = 528
"""Address of `sched_yield` (or the like): gives the core away."""
CTX_HOST_CLOCK = 536
"""Address of `clock_gettime`, or 0: no profile."""
CTX_CLOCK_ID = 544
"""What `clock_gettime` calls its monotonic clock; systems number their clocks differently."""
CTX_HOST_SLEEP = 552
"""Address of `nanosleep` (or the like), for threads without work where there is no futex."""
CTX_NAP = 560
"""What to call it with."""
CTX_SPINS = 568
"""Most turns of the spin loop before a thread sleeps."""
CTX_NAP_TIME = 576
"""The timespec that CTX_NAP may point to."""
CTX_TICKET_TIME = 592
"""The timespec of the longest sleep at a ticket: what ends a walk meanwhile is seen after it."""
# Words that threads write: a cache line each, so that spinning on one does not slow the others.
CTX_CANCEL = 640
"""Set by who waits for the walk; read at barriers by the last thread to arrive, and by threads that want more work."""
CTX_ERROR = 704
"""Set by a kernel that returns non-zero; ABANDONED after a cancellation within a record, TICKET_FAILED - its index for
a record whose data will not come."""
CTX_STOP = 768
"""Non-zero: no walk begins or goes on; the threads return once their gates hold -1."""
CTX_WORK = 832
"""Next chunk of the running record; threads claim chunks by atomic addition."""
CTX_EPOCH = 896
"""Number of the last walk that was begun."""
CTX_ACTIVE = 904
"""Threads of the walk that the helper was asked for."""
CTX_ARRIVED = 960
"""Threads that have come to the barrier."""
GATE_SLEEPERS = 64
"""A gate is a word that threads wait for to change and, at this offset, how many of them sleep."""
CTX_GENERATION = 1024
"""Gate of the barrier: low half, counts barriers; high half, index of the record to run, or -1 = the walk has ended."""
CTX_CREW = 1152
"""Gate of threads 1 and up: the last walk that all threads take part in."""
CTX_HELPER = 1280
"""Gate of the helper, which is thread 0 of walks whose caller waits outside: the last such walk."""
CTX_DONE = 1408
"""Gate of who waits for a walk: the last one that has ended."""
CTX_TURNS = 1536
"""Turns of the spin loop at the barrier now: fewer than CTX_SPINS where spinning was in vain."""
CTX_VAIN = 1544
"""Waits in vain since CTX_SPINS turns were last tried."""
CTX_RETRY = 1552
"""Waits in vain after which they are tried again."""
CTX_SCRATCH = 1600
"""64 bytes of timespec."""
CTX_BYTES = 1600 + 64

ABANDONED, TICKET_FAILED = -1, -2
"""CTX_ERROR of a walk whose record was left half done; the highest of those whose data did not come."""

# -- streaming: who reads, and what ------------------------------------------------------------------------------------
# Parts (a layer's streamed weights) are read in the order in which walks use them, in rounds; a piece is one read.
STREAM_PREAD, STREAM_FILE = 0, 8
"""Address of `pread`, and the file descriptor that it is called with."""
STREAM_DROP = 16
"""Address of `posix_fadvise` where pages have to be dropped from the system's cache behind a read, else 0."""
STREAM_PIECES, STREAM_N_PIECES = 24, 32
"""Address of the table of pieces, by part: PIECE_BYTES each."""
STREAM_PARTS, STREAM_N_PARTS = 40, 48
"""Address of the table of parts: PART_BYTES each."""
STREAM_TICKETS = 56
"""Address of the tickets: one for each part."""
STREAM_NEXT = 64
"""Pieces claimed since the last `begin`, those of all rounds; reader threads claim by atomic addition."""
STREAM_GATE = 128
"""Gate: changes with a release, and with the state."""
STREAM_RELEASED = 256
"""Parts that walks are done with since the beginning of the first round."""
STREAM_STATE = 320
"""STREAM_RUNS, STREAM_PAUSES or STREAM_ENDS."""
STREAM_BUSY = 384
"""Readers that may touch buffers: those that are not parked."""
STREAM_FAILED = 448
"""1 + number of a piece that could not be read, after which nothing is; 0 = none."""
STREAM_READ = 512
"""Bytes read."""
STREAM_QUEUE = 576
"""Non-zero: records post pieces as they want them, RELEASED counts those posted, and the table of pieces is a ring."""
STREAM_BYTES = 640
STREAM_UNIT = 4096
"""Direct I/O reads multiples of it from multiples of it."""
STREAM_RUNS, STREAM_PAUSES, STREAM_ENDS = 0, 1, -1

PIECE_BYTES = 40
PIECE_OFFSET, PIECE_LENGTH = 0, 8
"""In the file; direct I/O wants multiples of a page of both."""
PIECE_LEAST = 16
"""Bytes that have to come: fewer than PIECE_LENGTH only where the file ends."""
PIECE_TO, PIECE_PART = 24, 32
"""Address in memory, number of the part."""
PART_BYTES = 24
PART_BEHIND = 0
"""How many releases ago, counted from the part's own, its buffer was another part's (or its own, a round ago)."""
PART_LEFT, PART_PIECES = 8, 16
"""Pieces that are still to be read in this round, and how many there are."""

COUNT_TOKENS = 0
COUNT_OUTPUTS = 1
COUNT_MERGE = 2
"""Tokens whose attention is computed in splits and merged by the next record; 0 = attention finishes by itself."""
COUNT_SEVERAL = 6
"""Tokens of the walk if they are more than one, else 0: one token is normalised and quantised by every thread alone,
which costs less than a barrier."""
COUNT_DECODED = 7
"""Tokens of role ROLE_DECODE: what only approximates for them is skipped in a walk over a prompt."""
COUNT_PROMPTED = 9
"""Tokens of the other role; those of role ROLE_DECODE stand behind them."""
COUNT_DRAWS = 4
"""Rows of logits if a token is to be drawn from one of them, else 0."""

TOKEN_BYTES = 64
TOKEN_ID = 0
TOKEN_SEQUENCE = 8
TOKEN_POSITION = 16
"""Place in the text: what RoPE turns by."""
TOKEN_SLOT = 24
"""2 int32, for each block table where K and V are stored: block * BLOCK_TOKENS + TOKEN_ROW % BLOCK_TOKENS."""
TOKEN_MASK = 32
"""The token's ancestors of this walk and itself, bit i for row TOKEN_BASE + i; all ones = every row up to its own.

What a token sees is its path: the rows before TOKEN_BASE, then those of its mask up to its own, ascending. Attention
gives the bits of a sequence whose rows were this path: splits, lanes and windows count along it. A window takes no bit
out of the mask, for windows differ by layer."""
TOKEN_ROW = 40
"""Row of the token's sequence in which its K and V are stored. Siblings in a tree have one position and many rows."""
TOKEN_BASE = 48
"""First row of this walk in the token's sequence; the rows before it are part of every path."""
TOKEN_ROLE = 56
"""ROLE_*: whatever approximates follows the role, never the number of tokens."""
ROLE_PROMPT, ROLE_DECODE = 0, 1
MOST_STEPS = 16
"""Most steps of a walk (CTX_STEPS)."""
MASK_TOKENS = 64
"""Most new tokens of a sequence in a walk where one of them has a mask."""

SEQUENCE_BYTES = 16
SEQUENCE_BLOCKS = 0
"""2 addresses of int32 block tables: of layers that keep all K and V, and of those that keep what their window sees
(parameter `recent`), where what was given back is some block. The same where all keep all."""

# -- neurons that are read when they are wanted ------------------------------------------------------------------------
COLD_HAND, COLD_EPOCH = 0, 8
"""Where the clock's hand stands; records of `neuron_resolve` so far."""
COLD_HITS, COLD_MISSES = 16, 24
"""Clusters that decoded tokens wanted and that were there, or not there."""
COLD_EARLY = 32
"""1 + first ticket of the layer whose early record holds its tickets, until its other record lets go; 0 = none."""
COLD_BYTES = 64
COLD_PARTS = 4
"""Tickets of a layer: its cold neurons are computed in so many parts, or fewer, while those behind are read."""
COLD_USES = 3
"""Most uses that are counted of a slot."""

# -- draws: how a token is to be chosen from a row of logits, and which was --------------------------------------------
DRAW_BYTES = 128
"""Kept by whoever draws, as long as it draws; integers are int64, the others float64."""
DRAW_TOKEN = 0
"""Result: the token's id; -1 where a logit is NaN or infinite."""
DRAW_KEY = 8
"""State of the random numbers (sampling.stream_key)."""
DRAW_TEMPERATURE, DRAW_TOP_P, DRAW_MIN_P, DRAW_TOP_K = 16, 24, 32, 40
"""Temperature 0 takes the best token; the others as in GenerationConfig."""
DRAW_EDITS, DRAW_N_EDITS = 48, 56
"""Address of EDIT_BYTES for each token whose logit has a bias or a penalty, and how many there are."""
DRAW_REPETITION, DRAW_PRESENCE, DRAW_FREQUENCY = 64, 72, 80
DRAW_ENDS, DRAW_N_ENDS = 88, 96
"""Address of the tokens (int64) that end the text, behind which no walk goes on by itself; and how many there are."""
DRAW_SCREEN = 104
"""1 where of logits that cannot be the largest estimates are enough, else 0: nobody but the draw looks at the row."""
DRAW_ALONE = 112
"""1 where the row is not looked at once the token is chosen, so that a runner need not give it; else 0."""
DRAW_CANDIDATES = 128
"""Most candidates that kernels sort; where more may be kept the cut is found by counting, in so many bins."""
DRAW_BINS = 256
DRAW_BLOCK, DRAW_CHUNK = 64, 1024
"""Logits of which the largest is noted, and of a chunk: a vector of such maxima."""
EDIT_BYTES = 16
EDIT_TOKEN = 0
"""int32, once in a list."""
EDIT_COUNT = 4
"""int32: how often the token was generated; 0 in the prompt only, -1 if it has a bias and was never seen."""
EDIT_BIAS = 8
"""float32."""
EDIT_KEPT = 12
"""float32: what the model computed, while the row is edited."""


def draw_row(vocab_size: int) -> tuple[int, int, int]:
    """Return the layout of a row of work of the draw kernels, in bytes: (its length, place of sums, of candidates).

    Maxima of blocks come first, whole vectors of them; then the sum of each chunk's exponentials; then the candidates;
    then bins of a count and a weight.
    """
    chunks = -(-vocab_size // DRAW_CHUNK)
    sums = 64 * chunks
    candidates = sums + 64 * -(-chunks // 16)
    return candidates + 8 * DRAW_CANDIDATES + 16 * DRAW_BINS, sums, candidates


SCREEN_LEAST, SCREEN_REACH, SCREEN_MAXIMA = 0, 4, 64
"""Places in a row of work of the screen kernels: float32 that a logit must be able to reach, what the bounds of all
logits are multiplied by, and the largest estimate of each chunk of DRAW_CHUNK."""
SCREEN_ROUNDING = 64
"""How much more an error of the rounded input weighs than one of the input, in reach and in bounds."""


def screen_row(vocab_size: int) -> int:
    """Return the bytes of a row of work of the screen kernels."""
    return SCREEN_MAXIMA + 64 * -(-vocab_size // (16 * DRAW_CHUNK))


# -- KV blocks ---------------------------------------------------------------------------------------------------------
BLOCK_TOKENS = 16
"""Tokens of a KV block.

A layer's K, V and, with int8, their scales lie in planes of their own, one behind the other. A plane is ordered
[KV head][block of the pool], because attention walks one head over many blocks: what it reads next lies next where
blocks follow each other. For what a block holds see ops/rope.py.
"""
KV_SCALES_BYTES = 2 * 2 * BLOCK_TOKENS
"""int8: bytes of the scales of one head in a block, 16 of K and 16 of V, in fp16."""
SPLIT_BLOCKS = 16
"""Blocks of an attention split: contexts are cut at fixed lengths, so that results do not depend on the threads."""

KV_ELEMENT_BYTES = {name: kv.bits // 8 for name, kv in KV_TYPES.items()}


def padded_head_dim(head_dim: int) -> int:
    """Elements of a stored head: whole vectors of 16."""
    return -(-head_dim // 16) * 16


def kv_block_bytes(kv: str, head_dim: int) -> int:
    """Bytes of K, and of V, of one head in one block."""
    return BLOCK_TOKENS * KV_ELEMENT_BYTES[kv] * padded_head_dim(head_dim)


def kv_head_bytes(kv: str, head_dim: int, latent: bool = False) -> int:
    """Bytes of one head of one block in all planes: K, V and their scales, if any; of `latent` KV there is no V."""
    whole = 2 * BLOCK_TOKENS * KV_TYPES[kv].row_bytes(padded_head_dim(head_dim))
    return whole - kv_block_bytes(kv, head_dim) if latent else whole


def q8_row_bytes(width: int, group_size: int) -> tuple[int, int, int]:
    """Return the layout of a quantised activation row: (stride, place of the f32 scales, place of the int32 offsets).

    All in bytes. The int8 values come first, padded with zeros to whole pairs of groups, as the weights' records are.
    An offset is -8 x the sum of a group's values: what products with 4-bit codes start from. Rows of several tokens are
    interleaved, see `token_blocks`.
    """
    groups = 2 * -(-width // (2 * group_size))
    values = groups * group_size
    return -(-(values + 8 * groups) // 64) * 64, values, values + 4 * groups


def token_blocks(n_tokens: int, token_tiles: tuple[int, ...]) -> list[tuple[int, int]]:
    """Blocks (first token, tokens) in which n tokens go through matrix products: the largest that fit, one by one.

    A q8 block of n tokens that starts at ``base`` = first token * row bytes interleaves what the rows hold: value k of
    token j lies at base + (k // 4) * 4n + 4j + k % 4, the f32 scale of group g at base + n * scales + 4 (g n + j), and
    its int32 offset at base + n * offsets + 4 (g n + j).
    """
    blocks, start = [], 0
    for tokens in (*token_tiles, 1):
        while start + tokens <= n_tokens:
            blocks.append((start, tokens))
            start += tokens
    return blocks


def pack_token_tiles(token_tiles: tuple[int, ...]) -> int:
    """Pack the tokens of up to 7 kinds of blocks, 2 to 15 each, into one parameter of a record."""
    return sum(tokens << 4 * i for i, tokens in enumerate(token_tiles))


def unpack_token_tiles(packed: int) -> tuple[int, ...]:
    """Undo `pack_token_tiles`."""
    return (packed & 15, *unpack_token_tiles(packed >> 4)) if packed else ()


GATED_SCRATCH_BYTES = 2 * 16 * 64
"""Scratch of a thread in gated kernels: a gate and an up tile of at most 16 tokens; a fused input row lies behind."""
NEURON_TOKENS = 4
"""Most tokens that go through the neuron kernels together."""
NEURON_BATCH = 8
"""Neurons that are computed together: gates, then ups, then columns."""
NEURON_WINDOW = 1024
"""Most neurons of a block."""
NEURON_CLAIM = 2048
"""Most neurons that are claimed together."""
NEURON_LINES = 16
"""Most 64-byte lines of a down column in a chunk."""


def neuron_line_columns(dtype: str) -> int:
    """Columns in a 64-byte line of a part in layout neuron."""
    return 128 if dtype == "q4" else 64


def neuron_lines(width: int, group_size: int, dtype: str) -> int:
    """64-byte lines that hold the codes of a part."""
    return -(-(-(-width // group_size) * group_size) // neuron_line_columns(dtype))


def neuron_block(neurons: int) -> int:
    """Neurons of a block: about 32 blocks, a fixed number for a shape, because sums of blocks are rounded."""
    return max(64, min(NEURON_WINDOW, -(-neurons // 256) * 8))


def neuron_sums_bytes(neurons: int, width: int, group_size: int, dtype: str) -> int:
    """Bytes of the sums that the blocks of one token leave: a row of floats each."""
    row = 4 * neuron_line_columns(dtype) * neuron_lines(width, group_size, dtype)
    return -(-neurons // neuron_block(neurons)) * row


def neuron_chunks(neurons: int, part_bytes: int, lines: int, threads: int) -> tuple[int, int]:
    """Neurons of a chunk of several tokens (64 KiB of rows, four chunks a thread), and lines of a chunk of columns."""
    return (max(1, min((64 << 10) // (2 * part_bytes), neurons // (4 * threads))),
            max(2, min(NEURON_LINES, -(-lines // (4 * threads)) * 2)))


def neuron_mask_bytes(neurons: int) -> int:
    """Bytes of a token's mask of neurons (FLAG_MASK): whole words of 64 bits."""
    return 8 * -(-neurons // 64)


def neuron_gated_scratch_bytes(width: int, group_size: int, dtype: str) -> int:
    """Scratch of a thread in neuron_gated: sums, gates, lists of a claim, x as lines, factors, a fused input row."""
    columns, lines = neuron_line_columns(dtype), neuron_lines(width, group_size, dtype)
    fixed = 2 * 64 * NEURON_TOKENS + 64 + NEURON_CLAIM * (12 + 4 * NEURON_TOKENS)
    row = q8_row_bytes(width, group_size)[0] + 4 * (-(-width // 16) * 16)
    return fixed + lines * NEURON_TOKENS * (columns + 128) + NEURON_BATCH * 16 * (lines + 3) + row + 128


def neuron_down_scratch_bytes() -> int:
    """Scratch of a thread in neuron_down: sums and totals of a chunk, factors of a batch, values of a block."""
    factors = NEURON_BATCH * NEURON_TOKENS * NEURON_LINES * 16
    entries = (NEURON_WINDOW + 1) * (8 + 4 * NEURON_TOKENS)
    return 2 * 4 * NEURON_TOKENS * NEURON_LINES * 128 + factors + entries + 64


ATTENTION_TILE = 8
"""Most (token, query head) rows that go through attention together."""
ATTENTION_STATE = 384 + 3 * 8 * SPLIT_BLOCKS
"""Bytes of what attention keeps of a tile beside its rows: their scales and largest scores, where the blocks lie."""
STRETCH_SPLITS = 4
"""Splits whose chosen blocks of V are summed together: 64 blocks, bits of a word."""
ATTENTION_TOKENS = 16
"""Most tokens of a walk whose attention is split along the context."""
ATTENTION_ROWS = 128
"""Most rows of a unit of work of such a walk: the queries that a thread keeps for the next split of their context."""
MEAN_BLOCKS = SPLIT_BLOCKS
"""Most blocks whose V stands for what is left out, evenly spread over those that lie MASK_TOKENS before a token: these
are the same blocks however the token came about."""
PATH_BLOCKS = MASK_TOKENS // BLOCK_TOKENS + 1
"""Most blocks of one KV head that the rows of a mask touch, once they lie one behind the other."""


def score_row_bytes(splits: int) -> int:
    """Bytes of the scores of one (token, query head): 4 for each place and block, 8 for each split, 16 for the choice.

    A block has the largest of its scores; a split has the largest and the sum of exp(score - largest); the choice is
    the least score that is wanted, the last place at which that score is, then of all splits the largest and the sum.
    The place is int32, all else float32.
    """
    return -(-(splits * (4 * SPLIT_BLOCKS * (BLOCK_TOKENS + 1) + 8) + 16) // 64) * 64


def attention_scratch_bytes(head_dim: int, group: int) -> int:
    """Scratch of a thread in attention: a tile's state, scores of one split, sums and merged sums, a path, queries."""
    padded = padded_head_dim(head_dim)
    tile = ATTENTION_STATE + 128 * ATTENTION_TILE + 4 * ATTENTION_TILE * (SPLIT_BLOCKS * BLOCK_TOKENS + 2 * padded)
    path = PATH_BLOCKS * max(2 * kv_block_bytes(kv, head_dim) + KV_SCALES_BYTES for kv in KV_ELEMENT_BYTES)
    rows = min(ATTENTION_ROWS, -(-ATTENTION_TOKENS * group // ATTENTION_TILE) * ATTENTION_TILE)
    return tile + path + rows * (32 + 4 * padded)
