"""The face of whatever runs a model: sequences, walks over them, and the wish to end a request.

The engine, `LLM` and evaluation know runners by this file alone. `Session` is the one that runs our own kernels.

Rules for what a runner keeps of a sequence, whichever it is:

* **KV rows** belong to one token each and depend on the tokens before it only. So a fork shares them until one of the
  two writes, `truncate` forgets the last ones exactly, and prompts that begin alike may share those of their beginning.
* **State** (recurrent layers) is one value for the whole past: no token can be taken out of it. A fork copies it at
  once. `truncate` to anything but 0 is refused, unless the runner keeps snapshots: then it goes back to the last one at
  or before that length and computes the tokens between them anew. A common beginning is shared only up to a snapshot.
* **KV rows of layers with a window** may be given back once no token that can follow sees them. A fork shares those
  that are left, copied on write like the others. `truncate` is exact as long as all that the next token sees is there:
  by MARGIN_TOKENS (memory_planner/windows.py) from the longest that the sequence has been, always; mostly by some
  hundred tokens more; and to 0. Anything between is refused, never answered wrongly. `reach` says how much of a
  beginning can be kept, and `rewind` walks over again what cannot; whoever shares common beginnings asks before it
  cuts. A prompt cache holds what there was, with the same reach.
* A sequence always holds as many rows as tokens, also after a walk that was cancelled or failed: such a walk changes
  nothing but what lies behind the last token.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import field
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from edgeinfer.checks import shown, whole
from edgeinfer.errors import BundleError, RequestError
from edgeinfer.kernels import abi

from .dataclass import dataclass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgeinfer.bundle import Bundle
    from edgeinfer.config import RuntimeConfig
    from edgeinfer.graph import ModelConfig
    from edgeinfer.memory_planner import MemoryPlan

    Logits = NDArray[np.float32]

PROMPT, DECODE = abi.ROLE_PROMPT, abi.ROLE_DECODE
"""Roles of tokens: text that is read, and text that is being written."""


GONE = -1
"""Number of a block that was given back."""


@dataclass(eq=False)
class Recent:
    """Blocks of one sequence in layers with a window."""

    blocks: list[int] = field(default_factory=list)
    """Their numbers, one for each block of the sequence; GONE for the first ones, which were given back."""
    gone: int = 0
    """How many of the first ones are gone, or to be so."""
    table: Any = None
    address: int = 0
    listed: int = 0
    """As in `Sequence`."""


@dataclass(eq=False)
class Sequence:
    """Tokens of one context, and where their runner keeps what it knows of them; made by `Runner.new_sequence`."""

    tokens: list[int] = field(default_factory=list)
    """Token ids processed so far."""
    blocks: list[int] = field(default_factory=list)
    """Numbers of the KV blocks that hold them, `block_tokens` tokens each."""
    reserved: int = 0
    """Tokens behind the last one that blocks are held for while a prompt is walked in ranges of records."""
    table: Any = None
    """The blocks as the runner's kernels read them."""
    address: int = 0
    """Of the table."""
    listed: int = 0
    """First blocks that stand in the table already."""
    recent: Recent | None = None
    """What layers with a window keep; None where all layers keep all."""
    cut: bool = False
    """Whether rows behind the last token may hold what was forgotten or never taken in: it must not reach others, were
    it NaN."""
    decoded: int | None = None
    """Index of the first token that may not have been walked as part of a prompt; None where all were."""

    def __len__(self) -> int:
        return len(self.tokens)


class Segment(NamedTuple):
    """What one sequence takes part in a walk with."""

    sequence: Sequence
    ids: Items[int]
    """Its new tokens."""
    outputs: Items[int] = ()
    """After which of them logits are wanted: indices into `ids`."""
    role: int = PROMPT
    """PROMPT or DECODE, of all of them: whatever approximates follows the role, never the number of tokens."""
    parents: Items[int] | None = None
    """For a tree: which of these tokens each one follows, by its index here, -1 for the sequence's last token; a parent
    comes before its children. None is a chain: each follows the one before."""
    draws: Items[int] = ()
    """How the token behind each output is to be chosen: addresses of abi.DRAW_BYTES each, which must stay until
    the walk is over, 0 for an output of which the logits are enough; or none at all. A runner that cannot choose leaves
    DRAW_TOKEN as it is. One that does may leave a row of DECODE out, all NaN, where the draw allows it (DRAW_ALONE)."""

    def check(self) -> None:
        """Raise `RequestError` for a role, outputs, draws or parents that make no sense."""
        if self.role not in (PROMPT, DECODE):
            raise RequestError(f"The role of a segment is {self.role!r}; it is PROMPT or DECODE.")
        if self.parents is not None:
            _check_tree(self.parents, len(self.ids))
        if self.outputs and not 0 <= min(self.outputs) <= max(self.outputs) < len(self.ids):
            raise RequestError(f"Logits are wanted after tokens {list(self.outputs)} of {len(self.ids)}; count from 0.")
        if self.draws and len(self.draws) != len(self.outputs):
            raise RequestError(f"{len(self.draws)} draws are given for {len(self.outputs)} rows of logits; give one "
                               "for each, 0 where none is wanted, or none at all.")


def _check_tree(parents: Items[int], n_tokens: int) -> None:
    if len(parents) != n_tokens or n_tokens > abi.MASK_TOKENS:
        raise RequestError(f"A tree has {n_tokens} tokens and {len(parents)} parents; it takes one parent for each of "
                           f"at most {abi.MASK_TOKENS} tokens.")
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise RequestError(f"Token {i} of a tree has the parent {parent}; a parent stands before it, and -1 is the "
                               "sequence's last token.")


def plain_segments(segments: Items[Segment]) -> Items[Segment]:
    """Return segments whose numbers are Python's own: arrays and NumPy's integers are taken as well.

    Raises
    ------
    RequestError
        There are no segments, or what stands for tokens, outputs or parents is no list of integers.
    """
    if not isinstance(segments, (list, tuple)) or not all(isinstance(segment, Segment) for segment in segments):
        raise RequestError(f"A walk takes a list of segments, and got {shown(segments)}.")
    return [segment if all(map(_is_plain, segment[1:3])) and segment.parents is None else segment._replace(
        ids=integers("ids", segment.ids), outputs=integers("outputs", segment.outputs),
        parents=None if segment.parents is None else integers("parents", segment.parents)) for segment in segments]


def decoding(sequences: Items[Sequence], ids: Items[int], draws: Items[int]) -> list[Segment]:
    """Return the segments of a walk over one token of each sequence; see `Runner.decode`."""
    if len(sequences) != len(ids):
        raise RequestError(f"{len(sequences)} sequences cannot go on with {len(ids)} tokens; give one for each.")
    each = zip(sequences, ids, draws or repeat(0), strict=False)
    return [Segment(sequence, (token,), (0,), DECODE, None, (draw,)) for sequence, token, draw in each]


def _is_plain(items: Any) -> bool:
    return type(items) in (list, tuple, range) and {int}.issuperset(map(type, items))


def integers(name: str, items: Any) -> Items[int]:
    """Return `items` as Python's integers; raises `RequestError` for anything else."""
    if _is_plain(items):
        return items
    try:
        return [whole(item) for item in items]
    except (TypeError, OverflowError):
        raise RequestError(f"The {name} of a segment are {shown(items)}; they must be integers.") from None


class Ahead(Protocol):
    """Something cheaper than a runner that goes on with the runner's own sequences, to guess what it would do."""

    def ahead(self, sequences: Items[Sequence], ids: Items[int], draws: Items[int], offset: int, further: int,
              cancel: Cancellation | None = None) -> tuple[Logits, list[list[int]]]:
        """Walk over one token of each sequence, and on with those that it draws; the sequences stay as they are.

        Parameters
        ----------
        sequences, ids, draws : one token and one draw (`Segment.draws`) for each
        offset : tokens behind the ends of the sequences that were walked so before. The walks from offset 0 on that
            belong together follow each other, with nothing in between; the first says how many follow in all
        further : how many more tokens are wanted

        Returns
        -------
        rows : float32 array of shape (len(sequences), vocab_size)
            Logits after the last token of each, valid until the next walk.
        chosen : list of list of int
            Up to `further` tokens that each went on with by itself, as many for each.
        """


class Cancellation:
    """The wish to end one request.

    `cancel` may come from any thread and from signal handlers, and at any time: before its first walk, between two of
    them, within one, and after the last, when it reaches nobody.
    """

    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = False

    def cancel(self) -> None:
        """End the request."""
        self.asked = True


class Runner(abc.ABC):
    """Runs one model. Not thread-safe, but for `close` and for the `Cancellation` that a walk is given."""

    model: ModelConfig
    config: RuntimeConfig
    """Without open fields: context, chunk of prompts, sequences and rows of logits of a walk are known."""
    plan: MemoryPlan
    block_tokens: int = abi.BLOCK_TOKENS
    """Tokens of a KV block: sequences share whole ones."""
    isa: str = ""
    """Instruction set of the kernels, or who runs the model instead."""
    bundle: Bundle
    """What was opened."""
    sparse: Any = None
    """What FFNs stored neuron by neuron read (`runtime.SparseFfn`), where there are any."""
    stages: Any = None
    """How prompts go through the layers where not all of their tokens go through all of them (`runtime.Stages`)."""

    @property
    def reader(self) -> Any:
        """What reads weights from storage while tokens flow; None where all are in memory."""
        return None

    @abc.abstractmethod
    def walk(self, segments: Items[Segment], cancel: Cancellation | None = None) -> Logits:
        """Run the model once over the new tokens of several sequences, which hold them afterwards.

        Parameters
        ----------
        segments : at least one, each with a sequence of its own
        cancel : ends the walk within 100 ms

        Returns
        -------
        float32 array of shape (rows, vocab_size)
            The logits wanted, in the order of segments and then of their outputs. Valid until the next walk: copy what
            is to be kept.

        Raises
        ------
        RequestError
            The walk does not fit: too many tokens, sequences or rows, a full context, no KV block left, an id outside
            the vocabulary, a sequence twice, or parents that are no tree.
        CancelledError
            It was cancelled. The sequences are as before.

        Notes
        -----
        After a walk over a tree the sequence holds its tokens in the order given, all branches, each in a row of its
        own. That is no text yet: before the next walk `keep` one path of them, or truncate it to its length before.
        """

    @abc.abstractmethod
    def new_sequence(self) -> Sequence:
        """Return an empty sequence."""

    @abc.abstractmethod
    def fork(self, sequence: Sequence) -> Sequence:
        """Return a copy that goes its own way from here."""

    @abc.abstractmethod
    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n.

        Raises `RequestError` where layers with a window have given back what a token behind them sees (`reach`).
        """

    def reach(self, sequence: Sequence, n_tokens: int) -> int:
        """Return how many of the first n tokens can be kept when a sequence is cut there: all n, or none."""
        return n_tokens

    def rewind(self, sequence: Sequence, n_tokens: int, cancel: Cancellation | None = None) -> None:
        """Go back to the first n tokens: forget those behind them, and walk over them again where they cannot be kept.
        """
        ids, kept = sequence.tokens[:n_tokens], self.reach(sequence, n_tokens)
        self.truncate(sequence, kept)
        if kept < n_tokens:
            self.prefill(sequence, ids, cancel)

    def keep(self, sequence: Sequence, n_before: int, path: Items[int]) -> None:
        """After a walk over a tree, go on from one of its nodes: forget all branches but the one that leads there.

        Afterwards the sequence is as if it had walked these tokens as a chain, to the last bit. Where the path is how
        the tree begins, as of every chain, nothing moves. Other sequences that share its blocks stay as they are.

        Parameters
        ----------
        n_before : tokens before the tree, all of which stay
        path : which of the tokens behind them stay, counted from the tree's first: a root, a child of it, and so on

        Raises
        ------
        RequestError
            These tokens are not there or not in their order, or a block that is shared cannot be copied because none is
            free, or this runner cannot move what it keeps of a token. The sequence is as before.
        """
        if list(path) != list(range(len(path))):
            raise RequestError(f"This model cannot keep the branch {list(path)} of a tree; walk its tokens as a chain.")
        self.truncate(sequence, n_before + len(path))

    @abc.abstractmethod
    def close(self) -> None:
        """End a walk that runs and give all memory back. Callable twice, and from any thread."""

    def settle(self) -> None:
        """Return when the process holds all the memory that was planned; measured peaks mean nothing before."""
        return

    @property
    def device_used_bytes(self) -> int | None:
        """Memory of a device beside this process that is taken now; None where the process has all."""
        return None

    def room(self, sequences: Items[Sequence], most: int) -> int:
        """Return how many tokens, `most` at most, each of several sequences can be given by one walk."""
        return min(most, int(self.config.ctx or 0) - max(map(len, sequences)))

    def release(self, sequence: Sequence) -> None:
        """Give back what the sequence holds; it is empty afterwards."""
        self.truncate(sequence, 0)

    def save(self, sequence: Sequence, path: str | Path) -> None:
        """Write a sequence to a file (prompt cache)."""
        raise RequestError(f"This model cannot save prompts, so {path} was not written; leave the prompt cache out.")

    def load(self, path: str | Path) -> Sequence:
        """Return a sequence as it was saved by the same model."""
        raise BundleError(f"This model cannot read the prompt cache {path}; leave it out.")

    # -- common walks ------------------------------------------------------------------------------------------------

    def prefill(self, sequence: Sequence, ids: Items[int], cancel: Cancellation | None = None,
                draw: int = 0) -> Logits:
        """Process a prompt in chunks; `draw` is that of its last token, see `Segment.draws`.

        Returns
        -------
        float32 array of shape (vocab_size,)
            Logits after the last token, valid until the next walk.
        """
        ids = integers("ids", ids)
        self.check(sequence, ids)
        step = self.config.prefill_chunk
        for start in range(0, len(ids) - step, step):
            self.walk([Segment(sequence, ids[start : start + step])], cancel)
        rest = ids[(len(ids) - 1) // step * step :]
        return self.walk([Segment(sequence, rest, (len(rest) - 1,), draws=(draw,))], cancel)[0]

    def decode(self, sequences: Items[Sequence], ids: Items[int], cancel: Cancellation | None = None,
               draws: Items[int] = (), further: int = 0) -> Logits:
        """Walk over one more token of each of several sequences.

        Parameters
        ----------
        sequences, ids : one token for each sequence
        cancel : ends the walk within 100 ms
        draws : one for each sequence, see `Segment.draws`; or none at all
        further : after how many more tokens the caller wants to look at the latest. A runner may go on by itself that
            often, with the tokens that it draws, until a text ends; all sequences are as much longer afterwards, and
            the tokens are theirs

        Returns
        -------
        float32 array of shape (len(sequences), vocab_size)
            After the last token of each. Valid until the next walk.
        """
        return self.walk(decoding(sequences, ids, draws), cancel)

    def score(self, sequence: Sequence, ids: Items[int], role: int = PROMPT,
              draw: int = 0) -> Iterator[tuple[int, Logits]]:
        """Compute logits after every token, of a role, and with a draw where one is given (`Segment.draws`).

        Yields
        ------
        start : int
            Index of the block's first token in `ids`.
        logits : float32 array of shape (rows, vocab_size)
            Valid until the next block.
        """
        ids = integers("ids", ids)
        self.check(sequence, ids)
        step = min(self.config.outputs, self.config.prefill_chunk)
        for start in range(0, len(ids), step):
            chunk = ids[start : start + step]
            draws = (draw,) * len(chunk) if draw else ()
            yield start, self.walk([Segment(sequence, chunk, range(len(chunk)), role, None, draws)])

    def check_walk(self, segments: Items[Segment], most_tokens: int) -> None:
        """Raise `RequestError` for a walk over too many tokens, sequences or rows, or over a sequence twice."""
        n = sum(len(segment.ids) for segment in segments)
        outputs = sum(len(segment.outputs) for segment in segments)
        if not 1 <= len(segments) <= self.config.max_sequences or n > most_tokens or outputs > self.config.outputs:
            raise RequestError(
                f"{len(segments)} sequences with {n} tokens and {outputs} rows of logits do not fit one walk, which "
                f"takes 1 to {self.config.max_sequences} sequences (max_sequences), {most_tokens} tokens "
                f"(prefill_chunk) and {self.config.outputs} rows (outputs)."
            )
        if len(segments) > 1 and len({id(segment.sequence) for segment in segments}) != len(segments):
            raise RequestError("A sequence takes part twice in one walk; fork it.")

    def check(self, sequence: Sequence, ids: Items[int]) -> None:
        """Raise `RequestError` for tokens that the model does not have or the context has no room for."""
        if not len(ids):
            raise RequestError("The prompt is empty; give at least one token.")
        vocab_size, ctx = self.model.vocab_size, int(self.config.ctx or 0)
        if min(ids) < 0 or max(ids) >= vocab_size:
            token = next(token for token in ids if not 0 <= token < vocab_size)
            raise RequestError(f"Token id {token} is outside the vocabulary (0 to {vocab_size - 1}).")
        if len(sequence) + len(ids) > ctx:
            before = f" after {len(sequence)} tokens" if len(sequence) else ""
            raise RequestError(
                f"{len(ids)} tokens{before} do not fit the context of {ctx}; shorten the prompt or raise --ctx (the "
                f"model allows {self.model.max_position_embeddings})."
            )
