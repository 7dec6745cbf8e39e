"""One layer's KV blocks and the forward pass that attends to them, for tests of the kernels around attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from edgeinfer.graph import RopeConfig, rope_tables
from edgeinfer.kernels import abi
from edgeinfer.kernels.parameters import ATTENTION, ROPE, fill
from edgeinfer.quant import KV_TYPES
from edgeinfer.quant import kv as kv_layout
from tests.helpers.kernel_bench import Bench

KV = ("int8", "f16", "f32")
HEADS = [(1, 1, 6), (4, 2, 8), (6, 2, 10), (8, 1, 64), (3, 3, 128), (16, 2, 16), (2, 1, 40)]
"""(heads, kv_heads, head_dim): MHA, GQA of 2, 3 and 8, MQA."""


GROUPS = [(3, 3, 6), (6, 2, 10), (8, 2, 16), (8, 1, 64)]
"""Heads with 1, 3, 4 and 8 heads a KV head."""


@dataclass
class Sequence:
    """Tokens of one sequence in a forward pass: `new` of them after `past`."""

    past: int
    new: int
    parents: list[int] = field(default_factory=list)
    """Parent of each new token in a tree, -1 for none; an empty list is a chain."""
    blocks: list[int] = field(default_factory=list)

    def nodes(self) -> list[tuple[int, int]]:
        """(depth, mask) of each new token."""
        if not self.parents:
            return [(i, -1) for i in range(self.new)]
        nodes: list[tuple[int, int]] = []
        for i, parent in enumerate(self.parents):
            depth, mask = nodes[parent] if parent >= 0 else (-1, 0)
            nodes.append((depth + 1, mask | 1 << i))
        return nodes


class Layer:
    """One layer's KV blocks and a forward pass over some sequences."""

    def __init__(self, kv: str, heads: tuple[int, int, int], sequences: list[Sequence], window: int = 0,
                 norm: bool = False, tile: int = 4, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.kv, self.bench, self.window, self.sequences = kv, Bench(), window, sequences
        self.heads, self.kv_heads, self.head_dim = heads
        n_blocks = sum(-(-(s.past + s.new) // abi.BLOCK_TOKENS) for s in sequences)
        free = list(rng.permutation(n_blocks + 3))  # scrambled, with blocks that nobody owns
        for s in sequences:
            s.blocks = [int(free.pop()) for _ in range(-(-(s.past + s.new) // abi.BLOCK_TOKENS))]
        self.blocks, self.block_bytes = n_blocks + 3, abi.kv_block_bytes(kv, self.head_dim)
        nodes = [(i, s.past, s.past + row, *node) for i, s in enumerate(sequences)
                 for row, node in enumerate(s.nodes())]
        self.batch = {
            "positions": [past + depth for _, past, _, depth, _ in nodes],
            "sequences": [i for i, *_ in nodes],
            "slots": [sequences[i].blocks[row // 16] * 16 + row % 16 for i, _, row, *_ in nodes],
            "rows": [row for _, _, row, *_ in nodes],
            "bases": [past for _, past, *_ in nodes],
            "masks": np.array([mask % 2**64 for *_, mask in nodes], np.uint64).view(np.int64),
        }
        self.positions = self.batch["positions"]
        self.recent = len(self.positions) % 2
        self.bench.tables([s.blocks for s in sequences], self.recent)
        self.bench.tokens(**self.batch)
        tokens, width = len(self.positions), (self.heads + 2 * self.kv_heads) * self.head_dim
        self.q_stride, self.out_stride = 4 * width + 64, 4 * self.heads * self.head_dim + 64
        qkv = np.full((tokens, self.q_stride // 4), np.nan, np.float32)
        qkv[:, :width] = rng.standard_normal((tokens, width)) * 1.5
        self.splits = max(self.batch["rows"]) // 256 + 1
        group = self.heads // self.kv_heads  # no more: what is written after it shows
        self.scratch_bytes = abi.attention_scratch_bytes(self.head_dim, group)
        partials = tokens * self.heads * self.splits * (128 + 4 * abi.padded_head_dim(self.head_dim))
        self.operands = [
            self.bench.put("activations", qkv),
            self.bench.reserve("activations", tokens * self.out_stride),
            self.bench.put("kv", self._stale_blocks(rng)),
            self.bench.scratch(self.scratch_bytes, 3),
            self.bench.scratch(partials),
        ]
        self.norms = [self.bench.put("constants", rng.standard_normal(self.head_dim).astype(np.float32)) for _ in "qk"]
        self.table, self.table_stride = self._table()
        self.flags, self.tile = abi.FLAG_HEAD_NORM * norm, tile
        self.attention_flags = 0
        self.rotary: int | None = None
        self.apart = 0
        self.cap = 0.0

    def part(self, plane: int, h: int, block: int) -> int:
        """Return the offset of the K (plane 0), V (1) or scales (2) of a KV head in a block."""
        size = 64 if plane == 2 else self.block_bytes
        start = self.operands[2] + plane * self.kv_heads * self.blocks * self.block_bytes
        return start + (h * self.blocks + block) * size

    def _stale_blocks(self, rng: np.random.Generator) -> np.ndarray:
        """Finite K and V in every slot: remains of earlier owners, and the past of the sequences."""
        n, padded, kind = self.blocks * self.kv_heads, abi.padded_head_dim(self.head_dim), KV_TYPES[self.kv]
        shape, most = (2, n, 16, padded), kind.highest
        k, v = rng.integers(-most, most + 1, shape) if kind.scaled else rng.standard_normal(shape)
        k[..., self.head_dim :] = v[..., self.head_dim :] = 0
        scales = (rng.random((n, 32)) / 60).astype(np.float16) if kind.scaled else np.zeros(0, np.float16)
        parts = kv_layout.pack_keys(k, kind), kv_layout.pack_values(v, kind), scales.view(np.uint8)
        return np.concatenate([part.ravel() for part in parts])

    def _table(self) -> tuple[int, int]:
        half = self.head_dim // 2
        padded = -(-half // 16) * 16
        rows = np.full((max(self.positions) + 1, 2, padded), np.nan, np.float32)
        rows[:, 0, :half], rows[:, 1, :half] = rope_tables(RopeConfig(theta=1e4), self.head_dim, len(rows))
        return self.bench.put("constants", rows), 8 * padded

    def store(self, isa: str, keep: bool = True, threads: int = 1) -> dict[str, np.ndarray]:
        """Run rope_store."""
        parameters = fill(
            ROPE, stride=self.q_stride, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            table_stride=self.table_stride, block_bytes=self.block_bytes, blocks=self.blocks, eps=1e-6,
            rotary=self.head_dim if self.rotary is None else self.rotary,
            apart=self.apart or (self.head_dim if self.rotary is None else self.rotary) // 2, recent=self.recent,
        )
        operands = [self.operands[0], self.table, self.operands[2], *self.norms]
        return self.bench.run(isa, f"rope_store_{self.kv}", operands, parameters, self.flags, threads, keep=keep)

    def parameters(self, tile: int | None = None) -> list[int]:
        return fill(
            ATTENTION, q_stride=self.q_stride, out_stride=self.out_stride, heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.head_dim, block_bytes=self.block_bytes, blocks=self.blocks, window=self.window,
            scale=1 / math.sqrt(self.head_dim), cap=self.cap,
            edits=int(bool(self.cap or self.attention_flags & abi.FLAG_ALIBI)), scratch=self.scratch_bytes,
            splits=self.splits, tokens=tile or self.tile, recent=self.recent,
        )

    def attend(self, isa: str, threads: int = 1, tile: int | None = None, prompted: int | None = None) -> np.ndarray:
        """Attention in one instruction, of tokens of prompts; of decoded ones after the first ones, if stated."""
        self.bench.counts[abi.COUNT_MERGE] = 0
        self.bench.counts[abi.COUNT_PROMPTED] = len(self.positions) if prompted is None else prompted
        name = f"attention_{self.kv}"
        return self._run(isa, name, threads, tile)

    def attend_in_splits(self, isa: str, threads: int = 1, last: int | None = None, prompted: int = 0) -> np.ndarray:
        """Attention in two instructions: splits, then their merge; of the last tokens, if not of all."""
        self.bench.counts[abi.COUNT_MERGE] = len(self.positions) if last is None else last
        self.bench.counts[abi.COUNT_PROMPTED] = prompted
        whole = self._run(isa, f"attention_{self.kv}", threads, keep=True)
        return np.concatenate([whole, self._run(isa, "attention_merge", threads)])

    def _run(self, isa: str, name: str, threads: int, tile: int | None = None, keep: bool = False) -> np.ndarray | None:
        found = self.bench.run(isa, name, self.operands, self.parameters(tile), self.attention_flags, threads, keep)
        return found.get("out")

    def only(self, t: int) -> None:
        """Make the forward pass token t alone."""
        self.batch = {name: [values[t]] for name, values in self.batch.items()}
        self.positions = self.batch["positions"]
        self.bench.tokens(**self.batch)
        self.operands[0] += t * self.q_stride
        self.operands[1] += t * self.out_stride


def chain_of(new: int, past: int = 0) -> list[Sequence]:
    return [Sequence(past, new)]
