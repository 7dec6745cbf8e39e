"""Base class of runners: blocks, the prefix cache, and files of both prompts and prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path

from edgeinfer.errors import BundleError, RequestError

from .prompt_parts import BlockForm
from .sequences import Sequence


class Caching:
    """The part of `Runner` that keeps K and V for later requests; a runner that keeps none leaves it as it is."""

    @property
    def n_blocks(self) -> int:
        """KV blocks that sequences share, or slots; 0 if the runner has neither."""
        return 0

    @property
    def free_blocks(self) -> int:
        """Blocks of these that no sequence holds and the prefix cache does not have."""
        return 0

    @property
    def available_blocks(self) -> int:
        """Blocks available for new tokens: free ones, and those that only the prefix cache holds."""
        return self.free_blocks

    @property
    def prefix_blocks(self) -> int:
        """Blocks in the prefix cache, held by sequences or not."""
        return 0

    @property
    def caches_prefixes(self) -> bool:
        """True if `cache_prefix` caches anything."""
        return False

    def cache_prefix(self, sequence: Sequence, salt: bytes = b"") -> None:
        """Enter the full blocks of a sequence into the prefix cache, as far as their rows were computed exactly.

        The sequence keeps them, or shares the blocks with the same tokens that were there before. So blocks of
        sequences that were run beside each other become one. Decoded tokens are left out if they are approximated;
        nothing is cached if prompts are pruned. Layers with a window cache the blocks that the sequence still has, so
        a later prompt can begin with those of its tokens whose window is there: call this before a window has passed
        a beginning that others share. Not to be called between a forward pass over a tree and `accept`.
        """

    def drop_prefixes(self) -> None:
        """Empty the prefix cache; sequences keep their blocks."""

    def save_prefixes(self, path: str | Path) -> int:
        """Write the prefix cache to a file, and return how many blocks.

        Raises
        ------
        DestinationError
            The file cannot be written; an older one stays as it was.
        RequestError
            The runner has no prefix cache that it could write.
        """
        raise RequestError(f"This model cannot save its prefix cache, so {path} was not written; leave the prefix file "
                           "out.")

    def load_prefixes(self, path: str | Path) -> int:
        """Take blocks of a file into the prefix cache, as far as blocks are free, and return how many.

        Raises
        ------
        BundleError
            The file cannot be read, is damaged, or was not saved by the same model with the same KV type.
        RequestError
            Nothing is cached in this run.
        """
        raise BundleError(f"This model cannot read the prefix file {path}; leave it out.")

    @property
    def saves_prompts(self) -> bool:
        """True if `save` and `load` do anything."""
        return False

    def save(self, sequence: Sequence, path: str | Path) -> None:
        """Write a sequence to a file (prompt cache)."""
        raise RequestError(f"This model cannot save prompts, so {path} was not written; leave the prompt cache out.")

    def load(self, path: str | Path) -> Sequence:
        """Return a sequence as it was saved by the same model."""
        raise BundleError(f"This model cannot read the prompt cache {path}; leave it out.")

    @property
    def block_form(self) -> BlockForm | None:
        """Form of KV blocks that another executor may compute for this runner; None if none may."""
        return None

    def read_blocks(self, sequence: Sequence, first: int, complete: bool, form: BlockForm | None = None
                    ) -> Iterator[bytes]:
        """Return parts of a prompt for `write_blocks` of another process: the full KV blocks, of 16 tokens, from
        `first` on, or all that the sequence has if its prompt is complete.

        `form` is that of the other runner if its K and V have other bits.
        """
        raise RequestError("This model cannot compute prompts for others.")

    def write_blocks(self, sequence: Sequence, part: bytes | memoryview, ids: Items[int]
                     ) -> Iterator[None]:
        """Write a part of a prompt, in order, into a sequence that is empty until the last one: then it has `ids`.

        The caller may do other things whenever the iterator stops. It truncates the sequence where a part is missing.

        Raises
        ------
        BundleError
            The part is damaged, or of another model or KV type.
        RequestError
            No KV block is free.
        """
        raise BundleError("This model cannot use prompts that others have computed.")
