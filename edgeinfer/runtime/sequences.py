"""The sequences of a session: forks, cuts, prompt caches, cached beginnings, and the identity of their K and V."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.config import Recipe
from edgeinfer.errors import RequestError
from edgeinfer.registry import ALWAYS, DECODED, each, technique
from edgeinfer.runner import BlockForm, Sequence, computed_elsewhere, integers, why_not_elsewhere

from .execution.forward import ModelRunner

if TYPE_CHECKING:
    from .kv.prompt_parts import PromptParts


class SequenceOwner(ModelRunner):
    """A program's runner with the part of `Runner` that concerns sequences between forward passes."""

    recipe: Recipe
    """Recipe with the bundle's predictor, and the layers that fall back."""

    def new_sequence(self) -> Sequence:
        """Return an empty sequence."""
        return self.kv.new()

    def fork(self, sequence: Sequence) -> Sequence:
        """Return a copy that shares the KV blocks until one of the two writes."""
        copy = self.kv.fork(sequence)
        if self.row_reader:
            self.row_reader.forked(sequence, copy)
        return copy

    def truncate(self, sequence: Sequence, n_tokens: int) -> None:
        """Forget all tokens but the first n."""
        self.kv.truncate(sequence, n_tokens)

    def can_truncate(self, sequence: Sequence, n_tokens: int) -> int:
        """Return how many of the first n tokens can be kept; see `Runner.can_truncate`."""
        return self.kv.can_truncate(sequence, n_tokens)

    def checkpoint(self, sequence: Sequence) -> None:
        """Keep the state of recurrent layers; see `Runner.checkpoint`."""
        if self.kv.states:
            self.kv.states.checkpoint(sequence)

    def accept(self, sequence: Sequence, n_before: int, path: Items[int]) -> None:
        """Keep one path of a tree; see `Runner.accept`."""
        self.kv.accept(sequence, n_before, integers("path", path))

    def fits(self, wanted: Items[tuple[Sequence, int]]) -> bool:
        """Return whether context and KV blocks have room for this many more tokens of each; see `Runner.fits`."""
        return super().fits(wanted) and self.kv.fits(wanted)

    @property
    def n_blocks(self) -> int:
        """KV blocks of the pool of layers that keep all tokens."""
        return self.kv.pool.n_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks of it that are neither held nor cached."""
        return self.kv.pool.n_free

    @property
    def available_blocks(self) -> int:
        """Blocks of it that are not held by a sequence."""
        return self.kv.pool.n_available

    # -- prompt caches -----------------------------------------------------------------------------------------------

    @property
    def saves_prompts(self) -> bool:
        """True if prompts can be kept in files: they can."""
        return True

    def save(self, sequence: Sequence, path: str | Path) -> None:
        """Write the sequence's tokens and KV blocks to a file (prompt cache)."""
        from .kv.prompt_file import PromptFile

        if sequence.unlike:
            raise RequestError(f"Another executor computed the prompt, so {path} was not written; run it here first.")
        PromptFile(self.kv).save(sequence, Path(path), self._identity(sequence.decoded is not None))

    def load(self, path: str | Path) -> Sequence:
        """Return a sequence as it was saved, by the same model with the same KV type."""
        from .kv.prompt_file import PromptFile

        return PromptFile(self.kv).load(Path(path), self._identity(False), self._identity(True))

    @property
    def block_form(self) -> BlockForm | None:
        """Form of KV blocks that another executor may compute; see `Runner.block_form`."""
        return None if not (parts := self._parts).elsewhere else parts.form

    def read_blocks(self, sequence: Sequence, first: int, complete: bool, form: BlockForm | None = None
                    ) -> Iterator[bytes]:
        """Return parts of a prompt; see `Runner.read_blocks`."""
        if form is not None:
            raise RequestError("These kernels compute prompts for those of the same arithmetic alone.")
        return self._parts.read(sequence, first, complete)

    def write_blocks(self, sequence: Sequence, part: bytes | memoryview, ids: Items[int]) -> Iterator[None]:
        """Write a part of a prompt; see `Runner.write_blocks`."""
        return self._parts.write(sequence, part, ids)

    @property
    def _parts(self) -> PromptParts:
        from .kv.prompt_parts import PromptParts

        alone = self.kv.states or self.kv.pruning or why_not_elsewhere(self.graph.config, self.plan.request.ctx)
        return PromptParts(self.kv, self._identity(False), "" if alone else computed_elsewhere(self.bundle.identity))

    # -- the prefix cache --------------------------------------------------------------------------------------------

    @property
    def prefix_blocks(self) -> int:
        """Blocks in the prefix cache."""
        return self.kv.n_cached

    def from_prefix(self, ids: Items[int], salt: bytes = b"") -> Sequence:
        """Return a sequence with the longest cached beginning of a prompt; see `Runner.from_prefix`."""
        ids = integers("ids", ids)
        self.check(self.kv.new(), ids)
        return self.kv.from_prefix(ids, self._origin(salt))

    @property
    def caches_prefixes(self) -> bool:
        """True if blocks are cached: not those of pruned prompts, whose later layers lack tokens."""
        return not self.kv.pruning

    def cache_prefix(self, sequence: Sequence, salt: bytes = b"") -> None:
        """Cache the full blocks of a sequence that were computed exactly; see `Runner.cache_prefix`."""
        if not self.caches_prefixes or sequence.unlike:
            return
        exact = len(sequence)
        if sequence.decoded is not None and self._identity(True) != self._identity(False):
            exact = min(exact, sequence.decoded)
        self.kv.cache_prefix(sequence, exact, self._origin(salt))

    def drop_prefixes(self) -> None:
        """Empty the prefix cache."""
        self.kv.drop_prefixes()

    def save_prefixes(self, path: str | Path) -> int:
        """Write the prefix cache to a file; see `Runner.save_prefixes`."""
        from .kv.prefix_file import PrefixFile

        return PrefixFile(self.kv).save(Path(path), self._identity(False))

    def load_prefixes(self, path: str | Path) -> int:
        """Take the blocks of a file into the prefix cache; see `Runner.load_prefixes`."""
        from .kv.prefix_file import PrefixFile

        return PrefixFile(self.kv).load(Path(path), self._identity(False))

    def _origin(self, salt: bytes) -> bytes:
        return f"{self._identity(False)} {self.plan.request.kv} ".encode() + salt

    # -- identity of K and V ------------------------------------------------------------------------------------------

    def _stretched(self) -> tuple[int, ...]:
        """The context of the run as far as rotations depend on it."""
        rope, ctx = self.graph.config.rope, self.plan.request.ctx
        if rope.kind not in ("dynamic", "longrope") or ctx <= rope.original_max_position_embeddings:
            return ()
        return (ctx if rope.kind == "dynamic" else rope.original_max_position_embeddings,)

    def _identity(self, decoded: bool) -> str:
        """Return a hash of all that the bits of K and V depend on: weights, the graph after its passes, kernels.

        A technique says when it belongs to it: always, or only for the K and V of decoded tokens.
        """
        steps = tuple(step for step in self.recipe.steps if not (one := technique(step.name))
                      or one.kv == ALWAYS or (one.kv == DECODED and decoded and not one.exact(dict(step.settings))))
        others = (f"{one.name}={settings}" for one, settings in each(self.config.techniques) if one.kv == ALWAYS)
        parts = (self.bundle.identity, Recipe(steps), self.executor.kernels.arithmetic, *self._stretched(), *others)
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
