"""The layout of an instruction, the constant part of a kernel call: flags, and the regions that operands point
into.
"""

from __future__ import annotations

VERSION = 3
"""Part of the hash of the kernel objects."""

# -- instruction: 32 words of 8 bytes ----------------------------------------------------------------------------------
INSTRUCTION_BYTES = 256
INST_KERNEL = 0
"""Byte offset of the kernel's address, filled in at load from the table of the chosen instruction set."""
INST_FLAGS = 8
"""int32: FLAG_* bits, of the kernel's own meaning."""
INST_EVENT = 12
"""int32: 1 + index of a completion event that must be redeemed before the instruction starts. 0 = none."""
INST_PREDICATES = 16
"""2 int32: each 1 + index of a count, 0 = none; the instruction is skipped where one of these counts is 0."""
N_PREDICATES = 2
INST_OPERANDS = 24
"""12 operands of 8 bytes: region << 48 | byte offset."""
N_OPERANDS = 12
INST_PARAMETERS = 120
"""28 int32 parameters: counts, strides in bytes, float32 bits."""
N_PARAMETERS = 28
INST_LEVELS = 232
"""16 int8: levels of the codes of the matrix that the instruction reads, where its type leaves them to the tensor."""
N_LEVELS = 16
REGION_SHIFT = 48

# -- flags -------------------------------------------------------------------------------------------------------------
FLAG_RESIDUAL = 1
"""linear: add the matmul to the output."""
FLAG_BIAS = 2
"""linear, gated: add a bias vector."""
FLAG_APART = 4
"""linear, gated: add the products of the values apart of a row of x (FUSED_LEFT_OUT) and operand 7, their columns of
the matrix in f16."""
FLAG_MASK = 16
"""neuron_gated: tokens of role ROLE_DECODE compute the neurons of their masks alone, the others are 0 to them.

A mask is a row of operand 3, `mask_stride` bytes (a multiple of 8) from one token's to the next: bit i % 64 of its
int64 i // 64 stands for neuron i, bits after the last neuron count for nothing. There is a row for each token of the
forward pass; those of prompt tokens are not read."""
FLAG_THRESHOLD = 64
"""neuron_gated: operand 3 is one float; for tokens of role ROLE_DECODE activations that are no larger count as 0."""
FLAG_DENSE = 32
"""neuron kernels: rows and columns of dead neurons are read and computed too."""
FLAG_EARLY = 128
"""neuron_resolve: it is before the layer's attention and only requests the neurons that a prompt will want."""
FLAG_HEAD_NORM = 4
"""rope_store: normalise q and k heads."""
FLAG_NORM_OF_F = 4
"""neuron kernels: columns are multiplied by the RMS norm of f, whose weight, a float for each neuron, is operand 11 of
neuron_gated and operand 8 of neuron_down."""
FLAG_PRUNED = 8
"""attention: operand 6 says of which tokens the layer has no K and V: BLOCK_TOKENS bytes for each block of the pool, 1
for a row that was left out on the way to this layer and 0 for every other. Nothing of such a row reaches a result."""
FLAG_SINKS = 1024
"""attention, attention_merge: operand 8 has a float for each query head that competes with the scores and has no V."""
FLAG_ALIBI = 1 << 16
"""attention, attention_scores: operand 9 has a slope for each query head; a score gets slope x (position of the key -
position of the query) (ALiBi, arXiv 2108.12409)."""
FLAG_ALIBI_BF16 = 1 << 17
"""With FLAG_ALIBI, slopes that are bfloat16: slope x position is rounded to bfloat16, for positions that are rounded so
too, and the difference is multiplied by the instruction's scale (Falcon)."""
FLAG_CENTRED = 512
"""norm: the mean of a row is taken off before it is scaled (LayerNorm)."""
FLAG_LAST = 256
"""attention_merge: the tokens are the last of the forward pass, not the first, and rows of V may have been left out."""
FLAG_TIMES, FLAG_SCALED, FLAG_VALUE_NORM, FLAG_KEYS_AS_VALUES, FLAG_QUERIES = (1 << bit for bit in range(11, 16))
"""activate: times operand 1; norm: times operand 5; rope_store: v normed, v made of k, queries alone (ops/rope.py)."""
VALUES_OF_A_UNIT = 2048
"""activate: values of a row that a thread takes at once, a multiple of 16."""
INSTEAD_NOTHING, INSTEAD_SCALE, INSTEAD_MEAN = 0, 1, 2
"""Replacement for omitted rows of V: nothing; the others' weights rescaled to add up to 1; a mean (MEAN_BLOCKS)."""
FUSED_QUANTISE, FUSED_NORM, FUSED_ORDERED, FUSED_LEFT_OUT = 1, 2, 3, 4
"""Processing of a matmul's input by the matmul itself: quantise it, after a norm, in an order or without outliers; 0 =
nothing."""

# -- regions -----------------------------------------------------------------------------------------------------------
REGIONS = ("weights", "constants", "activations", "kv", "logits", "scratch", "resident", "streamed", "state", "cold",
           "experts")
"""Memory that operands point into; the index is the region's number. Weights are in `weights` (the mapped file),
`resident` (memory of the process), `streamed` (buffers that are read ahead of use) or, neurons that are read when they
are wanted, in slots of `cold`, experts likewise in `experts`; `state` is the recurrent state of a sequence. A
second program, such as a draft model's, brings regions of its own (HEAD_BYTES)."""
