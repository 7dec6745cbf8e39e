"""Traffic of the tests: bytes that memory must deliver, and int8 multiplications and additions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..kernels import abi
from .results import GENERATE, Case

if TYPE_CHECKING:
    from ..graph import Op
    from ..runner import Runner
    from ..runtime import Instruction, Session


def chunk_ends(session: Session, case: Case, share: float = 1.0) -> list[int]:
    """Tokens of a prompt that are done after each forward pass; about, where a share of them goes through."""
    step = math.ceil(session.config.prefill_chunk / share)
    return [min(start + step, case.tokens) for start in range(0, case.tokens, step)]


def _went(session: Session, op: Op | None) -> float:
    """Share of the last prompt's tokens that went through an operation."""
    if session.prefill_strategy is None or op is None or op.layer is None:
        return 1.0
    return session.prefill_strategy.share(op.layer)


def instruction_bytes(session: Session, case: Case, instruction: Instruction) -> float:
    """Bytes that an instruction reads during a whole test: weights with their scales, and KV.

    A prompt reads the weights once a chunk (those of the head only in the last one), and the KV before and in each
    chunk once. Rows of the embedding and activations are left out, and of sparse FFNs the parts that tokens like those
    of the bundle's statistics leave out.
    """
    generating, op = case.kind == GENERATE, instruction.op
    ends = range(1, case.tokens + 1) if generating else chunk_ends(session, case, _went(session, op))
    if op and op.kv and not op.kv.stores:
        kv, lengths = session.config.kv, [case.depth + end for end in ends]
        if generating and op.kv.topn:  # K for the scores, then chosen V
            return math.fsum(op.kv.chosen_bytes(kv, n)[instruction.step // 2 - 1] for n in lengths) \
                if instruction.step in (2, 4) else 0.0
        return 0.0 if instruction.step else float(sum(op.kv.read_bytes(kv, n) for n in lengths))
    share = _live(session, op) * _wanted(session, op) if generating else 1.0
    return float(instruction.bytes_read * share * (1 if _last_pass_only(instruction) and not generating else len(ends)))


def _wanted(session: Session, op: Op | None) -> float:
    """Share of an operation's weights that one token reads: of an MoE model its own experts."""
    reads = op.reads(session.graph.types) if op else ()
    whole = sum(read.batch for read in reads)
    return sum(read.token for read in reads) / whole if whole else 1.0


def _live(session: Session, op: Op | None) -> float:
    """Share of an FFN's rows by neuron that a decoded token reads; of gates all in mode exact."""
    if session.sparse is None or op is None or op.layer is None:
        return 1.0
    return op.read_share(*session.sparse.layers()[op.layer])


def instruction_operations(session: Session, case: Case, instruction: Instruction) -> float:
    """Int8 multiplications and additions of an instruction during a whole test; 0 if it multiplies no int8."""
    if instruction.op is None or instruction.step or not instruction.op.int8(session.graph.types):
        return 0.0
    if case.kind == GENERATE:
        return instruction.op.operations() * case.tokens
    return instruction.op.operations() * (1 if _last_pass_only(instruction) else case.tokens
                                          * _went(session, instruction.op))


def _last_pass_only(instruction: Instruction) -> bool:
    """Return whether a prompt needs the instruction only where logits are wanted."""
    return abi.COUNT_OUTPUTS in instruction.predicates


def bytes_per_token(runner: Runner, case: Case) -> float:
    """Bytes that memory must deliver for each token of a test."""
    from ..runtime import Session

    if not isinstance(runner, Session):
        passes = case.tokens if case.kind == GENERATE else math.ceil(case.tokens / runner.config.prefill_chunk)
        request, depth = runner.plan.request, case.depth + case.tokens / 2
        kv = runner.plan.region("kv").nbytes / (request.sequences * request.ctx) * depth
        return passes * ((runner.lowered_bytes or runner.plan.region("weights").nbytes) + kv) / case.tokens
    return math.fsum(instruction_bytes(runner, case, instruction)
                     for instruction in runner.program.instructions) / case.tokens


def operations_per_token(runner: Runner, case: Case) -> float:
    """Int8 multiplications and additions of the matrices for each token of a test; none if others run the model."""
    from ..runtime import Session

    if not isinstance(runner, Session):
        return 0.0
    return math.fsum(instruction_operations(runner, case, instruction)
                     for instruction in runner.program.instructions) / case.tokens
