"""Base class of anything that runs a model."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

from edgeinfer.config import CPU
from edgeinfer.errors import RequestError
from edgeinfer.kernels import abi

from .caching import Caching
from .interfaces import Cancellation, SparseNeurons, WeightReader
from .prefill import PrefillStrategy
from .sequences import PROMPT, Segment, Sequence, decoding, integers

if TYPE_CHECKING:
    from edgeinfer.bundle import Bundle
    from edgeinfer.config import RuntimeConfig
    from edgeinfer.graph import ModelConfig
    from edgeinfer.memory_planner import MemoryPlan

    from .interfaces import Logits

    OnPromptProgress = Callable[[int, int], None]


class Runner(Caching, abc.ABC):
    """Runs one model. Not thread-safe, but for `close` and for the `Cancellation` that a forward pass is given."""

    model: ModelConfig
    config: RuntimeConfig
    """Settings of the run, completed: context, chunk of prompts, sequences and rows of logits of a pass are known."""
    plan: MemoryPlan
    block_tokens: int = abi.BLOCK_TOKENS
    """Tokens of a KV block: sequences share whole ones."""
    isa: str = ""
    """Instruction set of the kernels, or the name of another executor."""
    bundle: Bundle
    device: str = CPU
    """Entry of `config.DEVICES` that runs the model."""
    lowered_bytes: int = 0
    """Bytes of weights that a token reads where a device runs another form of the model than the bundle."""
    sparse: SparseNeurons | None = None
    """Execution of FFNs stored neuron by neuron, for models that have them."""
    budget_bytes: int = 0
    """Memory budget of the whole process, 0 if none was found."""
    smaller_alternative: object | None = None
    """First smaller request that would fit with all weights in memory, if they do not (as text by `str`)."""
    stages: Items[Any] = ()
    """Parts of the model, in order, if several processes have one each."""
    prefill_strategy: PrefillStrategy | None = None
    """Processing of prompts, if a technique replaces the usual one."""

    @property
    def reader(self) -> WeightReader | None:
        """Reader of weights in storage while tokens are generated; None if all weights are in memory."""
        return None

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that forward passes have waited for such reads."""
        return 0

    @abc.abstractmethod
    def forward(self, segments: Items[Segment], cancel: Cancellation | None = None) -> Logits:
        """Run the model once over the new tokens of several sequences, which hold them afterwards.

        Parameters
        ----------
        segments : at least one, each with a sequence of its own
        cancel : ends the forward pass within 100 ms

        Returns
        -------
        float32 array of shape (rows, vocab_size)
            The logits wanted, in the order of segments and then of their outputs. Valid until the next pass: copy those
            that is to be kept.

        Raises
        ------
        RequestError
            The pass does not fit: too many tokens, sequences or rows, a full context, no KV block left, an id outside
            the vocabulary, a sequence twice, or parents that form no tree.
        CancelledError
            It was cancelled. The sequences are as before; on a device one whose recurrent state has gone on is empty.

        Notes
        -----
        After a pass over a tree the sequence holds its tokens in the order given, all branches, each in a row of its
        own. That is no text yet: before the next pass `accept` one path of them, or truncate it to its length before.
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

        Raises `RequestError` if layers with a window have freed rows that a token after them sees (`reach`).
        """

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return the largest length up to n that a sequence can be cut to: n if no row was freed."""
        return n_tokens

    def checkpoint(self, sequence: Sequence) -> None:
        """Make sure, where that is cheap, that the sequence can be cut to its present length later (`rollback`)."""

    def rollback(self, sequence: Sequence, n_tokens: int, cancel: Cancellation | None = None) -> None:
        """Go back to the first n tokens: forget those after them, and run over them again where they cannot be kept.
        """
        ids, kept = sequence.tokens[:n_tokens], self.can_truncate(sequence, n_tokens)
        self.truncate(sequence, kept)
        if kept < n_tokens:
            self.prefill(sequence, ids[kept:], cancel)

    def accept(self, sequence: Sequence, n_before: int, path: Items[int]) -> None:
        """After a pass over a tree, continue from one of its nodes: forget all branches but the one that leads there.

        Afterwards the sequence is as if it had run these tokens as a chain, to the last bit. If the path is how
        the tree begins, as of every chain, nothing moves. Other sequences that share its blocks stay as they are.

        Parameters
        ----------
        n_before : tokens before the tree, all of which stay
        path : which of the tokens after them stay, counted from the tree's first: a root, a child of it, and so on

        Raises
        ------
        RequestError
            These tokens are not there or not in order, or a block that is shared cannot be copied because none is free,
            or this runner cannot move the state of a token. The sequence is as before.
        """
        if list(path) != list(range(len(path))):
            raise RequestError(f"This model cannot keep the branch {list(path)} of a tree; run its tokens as a chain.")
        self.truncate(sequence, n_before + len(path))

    @abc.abstractmethod
    def close(self) -> None:
        """End a forward pass that runs and give all memory back. Callable twice, and from any thread."""

    def settle(self) -> None:
        """Return when the process holds all the memory that was planned; measured peaks mean nothing before."""
        return

    @property
    def device_used_bytes(self) -> int | None:
        """Memory in use on a device beside this process; None if all memory belongs to the process."""
        return None

    def pass_tokens(self, role: int) -> int:
        """Return how many tokens of a role a forward pass may have."""
        return self.plan.request.tokens

    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether this many more tokens of each of several sequences find room, by one forward pass or several.

        Counted are the context and the KV blocks of every pool that are free or can be evicted from the prefix cache.
        Blocks of sequences that were deleted without being released are not: they come back when the pool is empty.

        Parameters
        ----------
        wanted : of (sequence, number of tokens)
        """
        ctx = int(self.config.ctx or 0)
        return all(len(sequence) + n <= ctx for sequence, n in wanted)

    def room(self, sequences: Items[Sequence], most: int) -> int:
        """Return how many tokens, `most` at most, each of several sequences can be given by one forward pass."""
        most = min(most, int(self.config.ctx or 0) - max(map(len, sequences)))
        return next((n for n in range(most, 0, -1) if self.fits([(sequence, n) for sequence in sequences])), 0)

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's blocks; it is empty afterwards."""
        self.truncate(sequence, 0)

    def from_prefix(self, ids: Items[int], salt: bytes = b"") -> Sequence:
        """Return a new sequence that holds the longest cached beginning of a prompt: whole blocks, which it shares.

        The prompt continues from there with the same bits as if all of it had been run. A token at least is left over,
        for its logits are wanted. Layers with a window give the sequence the rows that the next token sees: it cannot
        be truncated to less than it begins with, but for 0 (`can_truncate`).

        Parameters
        ----------
        ids : the whole prompt
        salt : keeps cached beginnings apart: a request finds only those that were cached with the same salt

        Raises
        ------
        RequestError
            The prompt is empty, does not fit the context, or has an id outside the vocabulary.
        """
        ids = integers("ids", ids)
        sequence = self.new_sequence()
        self.check(sequence, ids)
        return sequence

    # -- common passes ------------------------------------------------------------------------------------------------

    def prefill(self, sequence: Sequence, ids: Items[int], cancel: Cancellation | None = None,
                spec: int = 0, on_progress: OnPromptProgress | None = None) -> Logits:
        """Process a prompt in chunks; `spec` applies to its last token, see `Segment.sample_specs`.

        `on_progress` is called with (done, total) in tokens, before the first chunk and after each.

        Returns
        -------
        float32 array of shape (vocab_size,)
            Logits after the last token, valid until the next forward pass.
        """
        ids = integers("ids", ids)
        self.check(sequence, ids)
        step, tell = self.config.prefill_chunk, on_progress or (lambda done, total: None)
        for start in range(0, len(ids) - step, step):
            tell(start, len(ids))
            self.forward([Segment(sequence, ids[start : start + step])], cancel)
        begun = (len(ids) - 1) // step * step
        tell(begun, len(ids))
        rest = ids[begun:]
        logits = self.forward([Segment(sequence, rest, (len(rest) - 1,), sample_specs=(spec,))], cancel)[0]
        tell(len(ids), len(ids))
        return logits

    def decode(self, sequences: Items[Sequence], ids: Items[int], cancel: Cancellation | None = None,
               sample_specs: Items[int] = (), further: int = 0) -> Logits:
        """Run over one more token of each of several sequences.

        Parameters
        ----------
        sequences, ids : one token for each sequence
        cancel : ends the forward pass within 100 ms
        sample_specs : one for each sequence, see `Segment.sample_specs`; or none at all
        further : after how many more tokens the caller needs to look at the latest. A runner may continue
            automatically that often, with the tokens that it samples, until a text ends; all sequences are as much
            longer afterwards, and the tokens are theirs

        Returns
        -------
        float32 array of shape (len(sequences), vocab_size)
            After the last token of each. Valid until the next forward pass.
        """
        return self.forward(decoding(sequences, ids, sample_specs), cancel)

    def score(self, sequence: Sequence, ids: Items[int], role: int = PROMPT,
              spec: int = 0) -> Iterator[tuple[int, Logits]]:
        """Compute logits after every token, of a role, and with a sample where one is given (`Segment.sample_specs`).

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
            sample_specs = (spec,) * len(chunk) if spec else ()
            yield start, self.forward([Segment(sequence, chunk, range(len(chunk)), role, None, sample_specs)])

    def check_pass(self, segments: Items[Segment], most_tokens: int) -> None:
        """Raise `RequestError` for a forward pass over too many tokens, sequences or rows, or over a sequence twice."""
        n = sum([len(segment.ids) for segment in segments])
        outputs = sum([len(segment.outputs) for segment in segments])
        if not 1 <= len(segments) <= self.config.max_sequences or n > most_tokens or outputs > self.config.outputs:
            raise RequestError(
                f"{len(segments)} sequences with {n} tokens and {outputs} rows of logits do not fit one forward pass, "
                "which "
                f"takes 1 to {self.config.max_sequences} sequences (max_sequences), {most_tokens} tokens "
                f"(prefill_chunk) and {self.config.outputs} rows (outputs)."
            )
        if len(segments) > 1 and len({id(segment.sequence) for segment in segments}) != len(segments):
            raise RequestError("A sequence occurs twice in one forward pass; fork it.")

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
