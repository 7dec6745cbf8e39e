"""Prompt pruning: the prompt runs in stages of layers, and fewer tokens enter each stage (LazyLLM, arXiv 2407.14057).

All chunks of a prompt go through the layers of one stage before any goes through the next. A token's importance is how
much the prompt's last tokens attend to it, which is known only at the end of the prompt. A pruned token keeps its
position, its K and V in the layers that computed it, and a flag in the others (`abi.FLAG_PRUNED`). Pruned
tokens are never revived (docs/explanation/long-context.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.progress import OnPromptProgress
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Attention, Graph, Tensor, alibi_bias, alibi_slopes
from edgeinfer.runner import PROMPT, Cancellation, Segment, Sequence
from edgeinfer.runner.pruning import MIN_PROMPT, NEIGHBOURS, RECENT, Schedule

from .memory import allocate

if TYPE_CHECKING:
    from .execution.forward import Logits
    from .session import Session

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


class Pruned(NamedTuple):
    """Report on the last prompt."""

    schedule: Schedule
    tokens: tuple[int, ...]
    """Tokens of the prompt in each stage; one number if it went through all layers in one."""
    share: float
    """Share of the dense prompt's work, counted as tokens times layers."""

    def report(self) -> dict[str, Any]:
        """Return it as the JSON object of a run has it."""
        return {"schedule": str(self.schedule), "tokens": list(self.tokens), "share": self.share, "said": str(self)}

    def __str__(self) -> str:
        n, *others = self.tokens
        if not others:
            return f"New prompt tokens: {n}, fewer than {MIN_PROMPT}, so all of them went through all layers."
        stages = zip(self.schedule.layers, others, strict=True)
        went = ", ".join(f"{tokens} after layer {layer}" for layer, tokens in stages)
        return f"Of {n} prompt tokens were kept: {went}; {self.share:.0%} of the tokens' layers were computed."


class _PruningStage(NamedTuple):
    first: int
    """First instruction of the stage."""
    hook: int
    """Operation whose queries rank the tokens; they are read before it runs."""
    stop: int
    attention: Attention


class PruningStages:
    """A session's way of processing prompts by a schedule of pruning.

    Parameters
    ----------
    session : Session
        With the region ``aux`` in its plan. Memory between stages is allocated here, that of ranking when it runs.
    schedule : Schedule

    Attributes
    ----------
    choose : callable
        Says which tokens continue: takes the importance of each, the rows that may continue and how many shall, and
        returns those that do, ascending. Experiments put another one in its place.
    last : Pruned or None
        Outcome of the last prompt.

    Raises
    ------
    UnsupportedModelError
        More than one tensor of the model goes from layer to layer.
    UsageError
        The recipe leaves no layer after the last boundary.
    """

    def __init__(self, session: Session, schedule: Schedule):
        assert session.config.ctx
        self._session, ctx = session, session.config.ctx
        self._n_layers = len({op.layer for op in session.graph.ops} - {None})
        self.schedule = schedule.placed(self._n_layers)  # a recipe may leave the last layers out
        self.choose: Callable[[Floats, Rows, int], Rows] = most_important
        self.last: Pruned | None = None
        hidden = session.model.hidden_size
        self._aux = allocate(4 * ctx * hidden).view(np.float32).reshape(ctx, hidden)
        self._residual = _residual(session.graph, self.schedule)
        layers = [instruction.op.layer if instruction.op else None for instruction in session.program.instructions]
        starts = [0, *map(layers.index, self.schedule.layers), len(layers)]
        self._stages = [self._stage(first, stop) for first, stop in itertools.pairwise(starts)]

    def _stage(self, first: int, stop: int) -> _PruningStage:
        """The last attention over whole contexts chooses, because a window has no scores of tokens before it."""
        instructions = self._session.program.instructions
        found = [(not op.window, i, op) for i, instruction in enumerate(instructions[first:stop], first)
                 if isinstance(op := instruction.op, Attention) and not instruction.step]
        _, hook, attention = max(found, key=lambda each: each[:2])
        return _PruningStage(first, hook, stop, attention)

    def takes(self, ids: Items[int]) -> bool:
        """Return whether a prompt is long enough for stages; takes note of one that is not."""
        counts = self.schedule.tokens(len(ids))
        if len(counts) == 1:
            self._note(counts)
        return len(counts) > 1

    def share(self, layer: int) -> float:
        """Return which share of the last prompt's tokens went through a layer."""
        if self.last is None or not self.last.tokens[1:]:
            return 1.0
        return self.last.tokens[self.schedule.stage(layer)] / self.last.tokens[0]

    def prefill(self, sequence: Sequence, ids: Items[int], cancel: Cancellation | None, spec: int,
                on_progress: OnPromptProgress | None = None) -> Logits:
        """Process a prompt; see `Runner.prefill`. A prompt that ends early leaves the sequence as it was.

        `on_progress` is called with the share of the prompt's tokens that is the share of the work done.
        """
        session = self._session
        session.check(sequence, ids)
        rows, last = np.arange(len(ids)), self._stages[-1]
        counts = self.schedule.tokens(len(ids), len(sequence))
        tell = self._teller(counts, on_progress)
        with session.executor.pool.turn:  # closing the session must leave its memory alone until a forward pass ends
            session.reserve(sequence, len(ids))
            try:
                for number in range(len(self._stages) - 1):
                    queries = self._through(sequence, ids, rows, number, cancel, tell)
                    rows = self._choose(sequence, len(ids), rows, number, queries, counts[number + 1], cancel)
                *chunks, final = self._chunks(rows)
                for part in chunks:
                    self._forward(sequence, ids, part, last, last.first, last.stop, cancel)
                    tell(last, len(part))
                logits = self._forward(sequence, ids, final, last, last.first, last.stop, cancel, spec)
                tell(last, len(final))
            except BaseException:
                session.truncate(sequence, len(sequence))
                raise
            session.append(sequence, ids, PROMPT)
        self._note(counts)
        return logits[0]

    def _teller(self, counts: tuple[int, ...], on_progress: OnPromptProgress | None
                ) -> Callable[[_PruningStage, int], None]:
        """Return a callback for when tokens have passed a stage, which reports progress over the whole prompt."""
        work = sum(n * (stage.stop - stage.first) for n, stage in zip(counts, self._stages, strict=True))
        done = 0

        def tell(stage: _PruningStage, n: int) -> None:
            nonlocal done
            done += n * (stage.stop - stage.first)
            if on_progress:
                on_progress(counts[0] * done // work, counts[0])

        tell(self._stages[0], 0)
        return tell

    def _chunks(self, rows: Rows) -> list[Rows]:
        step = self._session.config.prefill_chunk
        return np.split(rows, range(step, len(rows), step))

    def _through(self, sequence: Sequence, ids: Items[int], rows: Rows, number: int,
                 cancel: Cancellation | None, tell: Callable[[_PruningStage, int], None]) -> Floats:
        """Run tokens through a stage; returns the last ones' queries in the attention that ranks."""
        stage, queries = self._stages[number], []
        for part in self._chunks(rows):
            start, recent = stage.first, part >= len(ids) - RECENT
            if recent.any():
                self._forward(sequence, ids, part, stage, start, stage.hook, cancel)
                queries.append(self._rows_of(stage.attention.qkv, len(part))[recent])
                start = stage.hook
            self._forward(sequence, ids, part, stage, start, stage.stop, cancel)
            self._aux[part] = self._rows_of(self._residual, len(part))
            tell(stage, len(part))
        return np.concatenate(queries)

    def _forward(self, sequence: Sequence, ids: Items[int], rows: Rows, stage: _PruningStage, first: int, stop: int,
              cancel: Cancellation | None, spec: int | None = None) -> Logits:
        """Run tokens through instructions of a stage, from the hidden states that the stage before has stored."""
        if first and first == stage.first:
            self._rows_of(self._residual, len(rows))[:] = self._aux[rows]
        outputs, sample_specs = ((), ()) if spec is None else ((len(rows) - 1,), (spec,))
        segment = Segment(sequence, [ids[row] for row in rows.tolist()], outputs, PROMPT, None, sample_specs)
        return self._session.forward_range(segment, first, stop, 0, cancel, rows)

    def _choose(self, sequence: Sequence, n: int, rows: Rows, number: int, queries: Floats,
                most: int, cancel: Cancellation | None) -> Rows:
        """Return which of a stage's tokens, this many at most, continue, and mark the others as pruned."""
        before, ended = len(sequence), partial(self._session.executor.ended, cancel)
        seen = importance(self._session, sequence, self._stages[number].attention, number, queries, before + n, ended)
        forced = (rows >= n - RECENT) | (rows + before == 0)
        chosen = self.choose(np.where(forced, np.inf, seen[before + rows]).astype(np.float32), rows, most)
        self._session.kv.leave_out(sequence, number + 1, before + np.setdiff1d(rows, chosen))
        return chosen

    def _rows_of(self, tensor: Tensor, n: int) -> Floats:
        """The first n rows of an activation, in place."""
        allocation = self._session.plan.allocations[tensor.name]
        memory = self._session.executor.regions[allocation.region][allocation.offset :][: n * allocation.stride]
        return memory.view(np.float32).reshape(n, -1)[:, : tensor.width]

    def _note(self, counts: tuple[int, ...]) -> None:
        self.last = Pruned(self.schedule, counts, self.schedule.share(counts, self._n_layers))


def most_important(weight: Floats, rows: Rows, most: int) -> Rows:
    """Return the rows of the largest weights, this many at most; of equal ones those that come first."""
    return np.sort(rows[np.argsort(-weight, kind="stable")[:most]])


def importance(session: Session, sequence: Sequence, attention: Attention, stage: int, queries: Floats,
               n_tokens: int, ended: Callable[[], bool] = lambda: False) -> Floats:
    """Return how much of their attention the last tokens pay to each row: the mean over them and the heads of a layer,
    and of such means the largest among a row's neighbours.

    Computed from the stored keys, a head at a time, with sums in a fixed order: the same for any threads and chunks.
    Returns early, with anything, once `ended`: no forward pass follows.
    """
    group, n, positions = attention.heads // attention.kv_heads, attention.head_dim, np.arange(n_tokens)
    sinks, slopes = _sinks(session, attention), _slopes(attention)
    there = ~session.kv.lacking(sequence, n_tokens)[stage - 1] if stage else np.ones(n_tokens, bool)
    out = np.zeros(n_tokens)
    for head in range(attention.kv_heads):
        if ended():
            break
        keys = session.kv.keys(sequence, attention.layer or 0, head)[:n_tokens]
        rows = queries[:, head * group * n : (head + 1) * group * n].reshape(-1, group, n) * np.float32(attention.scale)
        for back, q in enumerate(rows[::-1]):
            position = n_tokens - 1 - back
            sees = there & (positions <= position) & (positions > position - (attention.window or n_tokens))
            scores = np.einsum("gd,pd->gp", q, keys)
            if attention.cap:
                scores = attention.cap * np.tanh(scores / attention.cap)
            for i, slope in enumerate(slopes[head]):
                scores[i] += alibi_bias(attention.alibi, slope, attention.scale, positions, position)  # type: ignore[arg-type]
            scores[:, ~sees] = -np.inf
            largest = scores.max(axis=1, keepdims=True)
            scores -= largest
            np.exp(scores, out=scores)  # in place: this memory is planned (techniques/prompt_pruning.py)
            total = scores.sum(axis=1, dtype=np.float64, keepdims=True) + np.exp(sinks[head] - largest)
            out += (scores / total).sum(axis=0)
        del keys
    padded = np.pad(out / (attention.heads * len(queries)), NEIGHBOURS)
    largest = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1).max(axis=1)
    return largest.astype(np.float32)


def _sinks(session: Session, attention: Attention) -> NDArray[np.float64]:
    """The sink of each head, (KV heads, heads of each, 1); -inf if there are none."""
    if not attention.sinks:
        return np.full((attention.kv_heads, 1, 1), -np.inf)
    allocation = session.plan.allocations[attention.sinks.name]
    found = session.executor.regions[allocation.region][allocation.offset :][: 4 * attention.heads].view(np.float32)
    return found.astype(np.float64).reshape(attention.kv_heads, -1, 1)


def _slopes(attention: Attention) -> Items[Floats]:
    """ALiBi's slopes of the heads of each KV head; none if scores do not fall with the distance."""
    if not attention.alibi:
        return [np.zeros(0, np.float32)] * attention.kv_heads
    return list(alibi_slopes(attention.alibi, attention.heads).reshape(attention.kv_heads, -1))


def _residual(graph: Graph, schedule: Schedule) -> Tensor:
    """Return the one tensor of earlier results that a token needs at the boundaries."""
    buffers = graph.buffers()
    found = set()
    for layer in schedule.layers:
        start = next(i for i, op in enumerate(graph.ops) if op.layer == layer)
        written = {buffers[op.out.name] for op in graph.ops[:start]}
        found |= {buffers[x.name] for op in graph.ops[start:] for x in op.inputs} & written
    tensors = {op.out.name: op.out for op in graph.ops}
    if len(found) != 1 or (tensor := tensors[found.pop()]).dtype != "f32" or tensor.width != graph.config.hidden_size:
        raise UnsupportedModelError("More than one tensor of this model goes from layer to layer, so its prompts "
                                    "cannot be pruned; leave --lazy out.")
    return tensor
