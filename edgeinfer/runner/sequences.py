"""Input of a forward pass: sequences, and segments of new tokens, as chains or trees."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import field
from itertools import repeat
from typing import Any, NamedTuple

from edgeinfer.base.validation import shown, whole
from edgeinfer.errors import RequestError
from edgeinfer.kernels import abi

from ..base.dataclass import dataclass

PROMPT: int = abi.ROLE_PROMPT
DECODE: int = abi.ROLE_DECODE
"""Roles of tokens: text that is read, and text that is being written."""
GONE = -1
"""Number that stands for a freed block."""


@dataclass(eq=False)
class WindowTable:
    """Blocks of one sequence in layers with a window."""

    blocks: list[int] = field(default_factory=list)
    """Numbers of the sequence's blocks; GONE for the first ones if they were freed."""
    gone: int = 0
    """Number of leading blocks that are freed or about to be."""
    table: Any = None
    address: int = 0
    listed: int = 0
    """Number of blocks in the table, as in `Sequence`."""


@dataclass(eq=False)
class Sequence:
    """Tokens of one context, and their runner's state; made by `Runner.new_sequence`."""

    tokens: list[int] = field(default_factory=list)
    """Token ids processed so far."""
    blocks: list[int] = field(default_factory=list)
    """Numbers of the KV blocks that hold them, `block_tokens` tokens each."""
    reserved: int = 0
    """Tokens after the last one that blocks are held for while a prompt is run in ranges of instructions."""
    table: Any = None
    """The blocks as the runner's kernels read them."""
    address: int = 0
    """Address of the table."""
    listed: int = 0
    """First blocks that are in the table already."""
    recent: WindowTable | None = None
    """Blocks that layers with a window keep; None if all layers keep all."""
    state: Any = None
    """Slots of recurrent layers (`StateTable`); None if the model has none."""
    cut: bool = False
    """True if rows after the last token may hold discarded or uncommitted tokens: it must not reach others, were
    it NaN."""
    decoded: int | None = None
    """Index of the first token that may not have been run as part of a prompt; None if all were."""
    unlike: bool = False
    """Whether another executor computed its prompt, whose K and V have other bits: nothing of it is cached or saved."""

    def __len__(self) -> int:
        return len(self.tokens)


class Segment(NamedTuple):
    """New tokens of one sequence in a forward pass."""

    sequence: Sequence
    ids: Items[int]
    """New tokens of the segment."""
    outputs: Items[int] = ()
    """Indices into `ids` of the tokens after which logits are wanted."""
    role: int = PROMPT
    """PROMPT or DECODE, for all tokens: approximations follow the role, never the number of tokens."""
    parents: Items[int] | None = None
    """Parent of each token in a tree, by its index here, -1 for the sequence's last token; a parent
    comes before its children. None is a chain: each follows the one before."""
    sample_specs: Items[int] = ()
    """Addresses of one sample per output (abi.SAMPLE_BYTES each), which must stay valid until the pass is over; 0 for
    an output that only needs logits; empty for none. A runner that cannot sample leaves SAMPLE_TOKEN as it is. One that
    can may leave a row of DECODE out, as NaN, if the sample spec allows it (SAMPLE_ALONE).
    """
    prepare: Callable[[], None] | None = None
    """Completes the data of this segment that samplers read, such as masks. A runner calls it once, before it samples:
    while the model runs if it can."""

    def check(self) -> None:
        """Raise `RequestError` for a role, outputs, samples or parents that make no sense."""
        if self.role not in (PROMPT, DECODE):
            raise RequestError(f"The role of a segment is {self.role!r}; it is PROMPT or DECODE.")
        if self.parents is not None:
            _check_tree(self.parents, len(self.ids))
        if self.outputs and not 0 <= min(self.outputs) <= max(self.outputs) < len(self.ids):
            raise RequestError(f"Logits are wanted after tokens {list(self.outputs)} of {len(self.ids)}; count from 0.")
        if self.sample_specs and len(self.sample_specs) != len(self.outputs):
            raise RequestError(f"{len(self.sample_specs)} sample specs are given for {len(self.outputs)} rows of "
                               "logits; give one "
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
        There are no segments, or tokens, outputs or parents are not lists of integers.
    """
    if not isinstance(segments, (list, tuple)) or not all(isinstance(segment, Segment) for segment in segments):
        raise RequestError(f"A forward pass takes a list of segments, and got {shown(segments)}.")
    return [segment if all(map(_is_plain, segment[1:3])) and segment.parents is None else segment._replace(
        ids=integers("ids", segment.ids), outputs=integers("outputs", segment.outputs),
        parents=None if segment.parents is None else integers("parents", segment.parents)) for segment in segments]


def prepare_samples(segments: Items[Segment]) -> None:
    """Complete the data that samplers read."""
    for segment in segments:
        if segment.prepare:
            segment.prepare()


def decoding(sequences: Items[Sequence], ids: Items[int], sample_specs: Items[int]) -> list[Segment]:
    """Return the segments of a forward pass over one token of each sequence; see `Runner.decode`."""
    if len(sequences) != len(ids):
        raise RequestError(f"{len(sequences)} sequences cannot continue with {len(ids)} tokens; give one for each.")
    each = zip(sequences, ids, sample_specs or repeat(0), strict=False)
    return [Segment(sequence, (token,), (0,), DECODE, None, (spec,)) for sequence, token, spec in each]


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
