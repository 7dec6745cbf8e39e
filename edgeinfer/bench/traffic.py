"""What the tests ask of the machine: bytes that memory must deliver, and int8 multiplications and additions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..kernels import abi
from .results import GENERATE, Case

if TYPE_CHECKING:
    from ..graph import ModelConfig
    from ..runtime import Record, Session


def kv_read_bytes(model: ModelConfig, kv: str, layer: int, length: int) -> int:
    """Bytes of K and V, scales included, that a token reads in one layer when `length` tokens are stored.

    The token itself is among them; a sliding window limits them.
    """
    window = model.window(layer)
    seen = min(length, window) if window else length
    return seen * model.num_key_value_heads * abi.kv_head_bytes(kv, model.head_dim) // abi.BLOCK_TOKENS


def chunk_ends(session: Session, case: Case) -> list[int]:
    """Tokens of a prompt that are done after each walk."""
    step = session.config.prefill_chunk
    return [min(start + step, case.tokens) for start in range(0, case.tokens, step)]


def record_bytes(session: Session, case: Case, record: Record) -> float:
    """Bytes that a record reads during a whole test: weights with their scales, and KV.

    A prompt reads the weights once a chunk (those of the head only in the last one), and the KV before and in each
    chunk once. Rows of the embedding and activations are left out.
    """
    generating = case.kind == GENERATE
    ends = range(1, case.tokens + 1) if generating else chunk_ends(session, case)
    if record.kernel.startswith("attention_") and record.kernel != "attention_merge":
        layer = int(record.op.split()[-1])
        return float(sum(kv_read_bytes(session.model, session.config.kv, layer, case.depth + end) for end in ends))
    walks = 1 if record.predicate == abi.COUNT_OUTPUTS and not generating else len(ends)
    return float(record.bytes_read * walks)


def record_operations(session: Session, case: Case, record: Record) -> float:
    """Int8 multiplications and additions of a record during a whole test; 0 where it multiplies no int8."""
    words = record.op.split()
    if words[0] not in ("linear", "gated", "neuron_gated"):  # down multiplies floats
        return 0.0
    weight = next(weight for weight in session.graph.weights if weight.name == words[1])
    if not session.graph.types[weight.name].quantised:
        return 0.0
    shapes = weight.source_shapes[:2] if weight.kind == "ffn" else weight.source_shapes
    once = record.predicate == abi.COUNT_OUTPUTS and case.kind != GENERATE
    return 2.0 * sum(math.prod(shape) for shape in shapes) * (1 if once else case.tokens)


def bytes_per_token(session: Session, case: Case) -> float:
    """Bytes that memory must deliver for each token of a test."""
    return math.fsum(record_bytes(session, case, record) for record in session.program.records) / case.tokens


def operations_per_token(session: Session, case: Case) -> float:
    """Int8 multiplications and additions of the matrices for each token of a test."""
    return math.fsum(record_operations(session, case, record) for record in session.program.records) / case.tokens
