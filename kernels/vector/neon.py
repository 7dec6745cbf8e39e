"""NEON's int8 products as emitters on registers: a quarter of a line is 4 rows x 4 columns.

Which of them an ISA level uses is decided in `int8_dot.py`. All are exact for weights and activations in [-127, 127].
"""

from __future__ import annotations

from llvmlite import ir

from .simd import I8, I16, I32, VI, call, half, join, pointer

BYTES, WORDS, LANES = ir.VectorType(I8, 16), ir.VectorType(I16, 8), ir.VectorType(I32, 4)


def pick(b, x, y, lanes):
    """Lanes of two vectors, numbered one after the other."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def _quarters(b, v, n):
    """The four parts, of n lanes each, of a vector."""
    return [half(b, v, n * i, n) for i in range(4)]


def _whole(b, parts):
    """The inverse of `_quarters`."""
    return join(b, join(b, *parts[:2]), join(b, *parts[2:]))


def _activations(b, x, n):
    """4 n bytes as lanes of four."""
    return b.load(pointer(b, x), typ=ir.VectorType(I32, n), align=4)


# -- four columns of a quarter: ``(b, acc, [(w, x), ...])`` with x the four activations repeated -----------------------


def by_sdot(b, acc, operands):
    """sdot; LLVM takes the activations from a lane ("by element")."""
    for w, x in operands:
        acc = call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", LANES, acc, w, x)
    return acc


def by_smull(b, acc, operands):
    """Bytes on cores without sdot: two products fit 16 bits, 2 * 127 * 127 < 2^15 (smull, addp, sadalp)."""
    for w, x in operands:
        acc = _add_fours(b, acc, *_products(b, w, x))
    return acc


def by_smlal(b, acc, operands):
    """Codes 0 .. 15 of two lines on cores without sdot: four products stay below 4 * 15 * 127 < 2^15."""
    low, high = _products(b, *operands[0])
    for w, x in operands[1:]:
        low, high = (b.add(p, q) for p, q in zip((low, high), _products(b, w, x), strict=True))
    return _add_fours(b, acc, low, high)


def _products(b, w, x):
    """16-bit products: rows 0 and 1, rows 2 and 3."""
    return [call(b, "llvm.aarch64.neon.smull.v8i16", WORDS, half(b, w, i, 8), half(b, x, i, 8)) for i in (0, 8)]


def _add_fours(b, acc, low, high):
    """acc + the sums of four neighbouring 16-bit lanes."""
    pairs = call(b, "llvm.aarch64.neon.addp.v8i16", WORDS, low, high)
    return b.add(acc, call(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", LANES, pairs))


# -- whole lines -------------------------------------------------------------------------------------------------------


def dot_rows(b, products, sums, lines, x):
    """Add the products of one or two lines to the vectors of n tokens.

    The four activations of token t are at x + 4 t for the first line, at x + 4 n + 4 t for the second.
    """
    n = len(sums)
    activations = _activations(b, x, len(lines) * n)
    parts = [_quarters(b, v, 4) for v in sums]
    for i, quarters in enumerate(zip(*(_quarters(b, line, 16) for line in lines), strict=True)):
        for t in range(n):
            fours = (pick(b, activations, activations, [j * n + t] * 4) for j in range(len(lines)))
            operands = [(w, b.bitcast(four, BYTES)) for w, four in zip(quarters, fours, strict=True)]
            parts[t][i] = products(b, parts[t][i], operands)
    return [_whole(b, part) for part in parts]


def dot_line(b, products, total, line, four):
    """Add the products of a line with the same four values for all 16 rows."""
    quarters = zip(_quarters(b, total, 4), _quarters(b, line, 16), strict=True)
    return _whole(b, [products(b, part, [(w, four)]) for part, w in quarters])


def dot_blocks(b, sums, lines, x):
    """`dot_rows` of two lines by smmla: 2 rows x 8 columns times 8 columns x 2 tokens; the sums belong to a PairTile.

    Interleaving the 32-bit lanes of both lines (zip1, zip2) puts the 8 columns of a row side by side.
    """
    n = len(sums)
    eights = _activations(b, x, 2 * n)
    twos = [b.bitcast(pick(b, eights, eights, [t, n + t, t + 1, n + t + 1]), BYTES) for t in range(0, n, 2)]
    parts = [_quarters(b, v, 4) for v in sums]
    first, second = (b.bitcast(line, VI) for line in lines)
    for block in range(8):
        rows = 2 * block
        w = b.bitcast(pick(b, first, second, [rows, 16 + rows, rows + 1, 17 + rows]), BYTES)
        for pair, two in enumerate(twos):
            part = parts[2 * pair + block // 4]
            part[block % 4] = call(b, "llvm.aarch64.neon.smmla.v4i32.v16i8", LANES, part[block % 4], w, two)
    return [_whole(b, part) for part in parts]
