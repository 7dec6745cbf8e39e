"""Prompt caches: the tokens and KV blocks of one sequence, on disk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeinfer.base.files import open_plain
from edgeinfer.base.validation import shown
from edgeinfer.errors import BundleError
from edgeinfer.kernels import abi
from edgeinfer.registry import technique
from edgeinfer.runner import Sequence

from .cache_file import CacheFile, Piece, head_pieces, in_pieces, origin, state_pieces
from .sequence import KVCache

PRESENT = "present"
"""Key of a header: tokens that each stage has, where later layers lack some."""
FILE = CacheFile("prompt cache", b"EDGEKV01")


class PromptFile:
    """Writes and reads prompt caches of the sequences of one KV cache."""

    def __init__(self, kv: KVCache):
        self._kv = kv

    def save(self, sequence: Sequence, path: Path, model: str) -> None:
        """Write tokens and blocks: the header, then of each layer, plane and KV head the blocks.

        Of layers with a window these are the ones that are left: the header says how many are gone before them.

        Raises `DestinationError` if the file cannot be written; nothing is left behind, and an older file stays as it
        was.
        """
        self._kv.check_own(sequence)
        header = origin(self._kv, model) | {"tokens": sequence.tokens} | self._pruned(sequence, len(sequence))
        if sequence.recent and sequence.recent.gone:
            header["gone"] = sequence.recent.gone
        if sequence.state and sequence.tokens:
            header["state"] = sequence.state.base
        FILE.write(path, header, lambda: self.pieces(sequence, header))

    def load(self, path: Path, prompts: str, decoded: str) -> Sequence:
        """Read a sequence saved by the same model with the same KV type.

        The model has two identities: for prompts alone, and for decoded tokens.

        Raises `BundleError` if the file cannot be read, is damaged, belongs to another model or KV type, or is longer
        than the context. Raises `RequestError` if the pool has no room for it.
        """
        sequence = self._kv.new()
        try:
            with open_plain(path) as file:
                header = self._read_header(file, path, (prompts, decoded))
                self._kv.make_room(sequence, len(header["tokens"]), header.get("gone", 0))
                if self._kv.states and header["tokens"]:
                    self._kv.states.begin(sequence, 1)
                pruned = {key: header[key] for key in (_pruner(header), PRESENT) if key in header}
                if not FILE.read(file, header, self.pieces(sequence, header)) \
                        or self._pruned(sequence, len(header["tokens"])) != pruned:
                    raise FILE.damaged(path)
        except OSError as error:
            self._kv.trim(sequence)
            raise FILE.unreadable(path, error) from None
        except BaseException:
            self._kv.trim(sequence)
            raise
        if sequence.state and header["tokens"]:
            sequence.state.base = header["state"]
        sequence.cut = True  # it may have been truncated before it was saved
        sequence.tokens, sequence.decoded = header["tokens"], None if header["model"] == prompts else 0
        return sequence

    def pieces(self, sequence: Sequence, header: dict[str, Any]) -> Iterator[Piece]:
        """Yield the arrays of a prompt cache in order: of each head of a plane, some of the sequence's blocks.

        K and V are followed by the flags of pruned tokens, if prompts were pruned.
        """
        n_blocks = -(-len(header["tokens"]) // abi.BLOCK_TOKENS)  # more: reserved
        whole = recent = sequence.blocks[:n_blocks]
        if sequence.recent:
            recent = sequence.recent.blocks[header.get("gone", 0) : n_blocks]
        yield from head_pieces(self._kv, whole, recent)
        for stage in self._kv.pruned_mask if _pruner(header) else ():
            yield from in_pieces(stage, whole)
        if "state" in header:
            yield from state_pieces(self._kv, sequence.state.blocks[0])

    def _pruned(self, sequence: Sequence, n_tokens: int) -> dict[str, Any]:
        """Return the header's fields on pruned tokens, if any: the schedule, and how many tokens each stage has.

        Also empty if the flags are inconsistent: later stages must lack the tokens that a stage lacks.
        """
        lacking = self._kv.lacking(sequence, n_tokens)
        if not lacking.any() or (lacking[:-1] > lacking[1:]).any():
            return {}
        (name, settings), = self._kv.pruning.items()
        return {name: settings, PRESENT: (~lacking).sum(axis=1).tolist()}

    def _read_header(self, file: io.BufferedReader, path: Path, models: tuple[str, ...]) -> dict[str, Any]:
        header = FILE.read_header(file, path)
        tokens = header.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise FILE.damaged(path)
        if not any(header.items() >= origin(self._kv, model).items() for model in models):
            raise FILE.other(path)
        if (name := _pruner(header)) and self._kv.pruning.get(name) != header[name]:
            raise BundleError(f"The prompt cache {path} was saved with {shown(header[name])} as --{name}, and lacks K "
                              "and V that this run needs; give the same schedule, or another file.")
        self._check_gone(header, path)
        base = header.get("state")
        if (base is None) != (not self._kv.states or not tokens) or (
                base is not None and (type(base) is not int or not 0 <= len(tokens) - base <= abi.JOURNAL_TOKENS)):
            raise FILE.damaged(path)
        if len(tokens) > (ctx := self._kv.plan.request.ctx):
            raise BundleError(f"The prompt cache {path} holds {len(tokens)} tokens and the context {ctx}; raise --ctx.")
        return header

    def _check_gone(self, header: dict[str, Any], path: Path) -> None:
        """Refuse a file that lacks more of layers with a window than can be, or than this run does."""
        if (gone := header.get("gone")) is None:
            return
        if self._kv.recent is None:
            raise BundleError(f"The prompt cache {path} has only the rows inside the windows of its layers, and this "
                              "run keeps all tokens in all layers (a short --ctx or --lazy); give the --ctx that it "
                              "was saved with, or another file.")
        seen = len(header["tokens"]) - self._kv.recent.windowed.window + 1
        if type(gone) is not int or not 0 < gone * abi.BLOCK_TOKENS <= seen:
            raise FILE.damaged(path)


def _pruner(header: dict[str, Any]) -> str:
    """Return the technique that pruned tokens of a prompt cache, a key of its header; empty for none."""
    if PRESENT not in header:
        return ""
    return next((key for key in header if technique(key)), "")
