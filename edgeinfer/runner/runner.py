"""The class of whatever runs a model, what guesses ahead of it, and the wish to end a request."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgeinfer.config import CPU
from edgeinfer.errors import BundleError, RequestError
from edgeinfer.kernels import abi

from .interfaces import SparseNeurons, WeightReader
from .prefill import PrefillStrategy
from .sequences import PROMPT, Segment, Sequence, decoding, integers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgeinfer.bundle import Bundle
    from edgeinfer.config import RuntimeConfig
    from edgeinfer.graph import ModelConfig
    from edgeinfer.memory_planner import MemoryPlan

    Logits = NDArray[np.float32]
    Told = Callable[[int, int], None]


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
    device: str = CPU
    """Which of `config.DEVICES` runs the model."""
    sparse: SparseNeurons | None = None
    """How FFNs stored neuron by neuron run, where there are any."""
    budget_bytes: int = 0
    """Of the whole process, 0 where none was found."""
    instead: object | None = None
    """Where weights are read from storage, the first smaller request that would fit without (its `str`)."""
    prefill_strategy: PrefillStrategy | None = None
    """How prompts are processed, where a technique does so in its own way."""

    @property
    def reader(self) -> WeightReader | None:
        """What reads weights from storage while tokens flow; None where all are in memory."""
        return None

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that forward passes have waited for such reads."""
        return 0

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
                draw: int = 0, told: Told | None = None) -> Logits:
        """Process a prompt in chunks; `draw` is that of its last token, see `Segment.draws`.

        `told` is called with (done, total) in tokens, before the first chunk and after each.

        Returns
        -------
        float32 array of shape (vocab_size,)
            Logits after the last token, valid until the next walk.
        """
        ids = integers("ids", ids)
        self.check(sequence, ids)
        step, tell = self.config.prefill_chunk, told or (lambda done, total: None)
        for start in range(0, len(ids) - step, step):
            tell(start, len(ids))
            self.walk([Segment(sequence, ids[start : start + step])], cancel)
        begun = (len(ids) - 1) // step * step
        tell(begun, len(ids))
        rest = ids[begun:]
        logits = self.walk([Segment(sequence, rest, (len(rest) - 1,), draws=(draw,))], cancel)[0]
        tell(len(ids), len(ids))
        return logits

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
