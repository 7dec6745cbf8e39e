"""Quantised rows of activations, and the blocks of tokens in which they go through matmuls."""

from __future__ import annotations


def q8_row_bytes(width: int, group_size: int, apart: int = 0) -> tuple[int, int, int]:
    """Return the layout of a quantised activation row: (stride, offset of the f32 scales, offset of the int32 offsets).

    All in bytes. The int8 values come first, padded with zeros to whole pairs of groups, as the weights' instructions
    are. An offset is -8 x the sum of a group's values: the start value of matmuls with 4-bit codes. Values that are
    multiplied `apart`, f32, come after the offsets. Rows of several tokens are interleaved, see `token_blocks`.
    """
    groups = 2 * -(-width // (2 * group_size))
    values = groups * group_size
    return -(-(values + 8 * groups + 4 * apart) // 64) * 64, values, values + 4 * groups


def token_blocks(n_tokens: int, token_tiles: tuple[int, ...]) -> list[tuple[int, int]]:
    """Blocks (first token, tokens) in which n tokens go through matmuls: the largest that fit, one by one.

    A q8 block of n tokens that starts at ``base`` = first token * row bytes interleaves the rows: value k of
    token j is at base + (k // 4) * 4n + 4j + k % 4, the f32 scale of group g at base + n * scales + 4 (g n + j), and
    its int32 offset at base + n * offsets + 4 (g n + j). Value i of those apart is at base + n * (offsets + 4 * groups)
    + 4 (i n + j).
    """
    blocks, start = [], 0
    for tokens in (*token_tiles, 1):
        while start + tokens <= n_tokens:
            blocks.append((start, tokens))
            start += tokens
    return blocks


def pack_token_tiles(token_tiles: tuple[int, ...]) -> int:
    """Pack the tokens of up to 7 kinds of blocks, 2 to 15 each, into one parameter of an instruction."""
    return sum(tokens << 4 * i for i, tokens in enumerate(token_tiles))


def unpack_token_tiles(packed: int) -> tuple[int, ...]:
    """Undo `pack_token_tiles`."""
    return (packed & 15, *unpack_token_tiles(packed >> 4)) if packed else ()


GATED_SCRATCH_BYTES = 2 * 16 * 64
"""Scratch of a thread in gated kernels: a gate and an up tile of at most 16 tokens; a fused input row is after."""
