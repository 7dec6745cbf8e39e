"""Rotary position embedding: its fields of configs, and the tables of cosines and sines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...errors import CheckpointError
from ..config import RopeConfig
from ..hf_config.reader import ConfigReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "query_scale", "none")
READ_HERE = KINDS[:-3]
"""Kinds that the plain section of a config may ask for."""
SPELLINGS = {"su": "longrope"}
"""Older names of kinds."""
DEFAULT_THETA = 10000.0
ROWS_AT_ONCE = 1024  # keeps the float64 temporaries of a long context small

# Keys that may be in a RoPE section without being read: values under which they change nothing.
NEUTRAL = {
    "attention_factor": (1,),
    "attn_factor": (1,),
    "factor": (1,),
    "finetuned": (True, False),
    "partial_rotary_factor": (1,),
}


def read_rope(c: ConfigReader, max_position_embeddings: int, theta: float | None = None,
              partial: bool = False) -> RopeConfig:
    """RoPE of a config; `theta` is the default base, and with `partial` `read_partial` reads the share.

    transformers 5 writes ``rope_parameters``, older versions ``rope_theta`` and ``rope_scaling`` (whose kind is called
    ``rope_type`` or ``type``). A file that has both must mean the same by them.
    """
    theta = c.number("rope_theta", theta or DEFAULT_THETA, above=1.0)
    outer_original = c.integer("original_max_position_embeddings", None)
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        section = c.section(name)
        if section is not None:
            if partial:
                section.get("partial_rotary_factor")
            found[name] = read_section(section, theta, outer_original, max_position_embeddings)
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{c.where}: rope_scaling and rope_parameters disagree; keep the one that is right.")
    return next(iter(found.values()), RopeConfig(theta))


def read_partial(c: ConfigReader, names: tuple[str, ...], default: float = 1.0) -> float:
    """Share of a head that turns: from a field of the config, or from its section of RoPE."""
    found = [c.number(name, high=1.0) for name in names if c.has(name)]
    for section in map(c.section, ("rope_scaling", "rope_parameters")):
        if section is not None and section.has("partial_rotary_factor"):
            found.append(section.number("partial_rotary_factor", high=1.0))
    if len(set(found)) > 1:
        raise CheckpointError(f"{c.where}: {', '.join(names)} and the section of RoPE disagree: {found}; keep one.")
    return found[0] if found else default


def without_share(c: ConfigReader) -> ConfigReader:
    """Return the config without `partial_rotary_factor`, which is refused where the rotation is stretched."""
    name, rest = "partial_rotary_factor", {}
    shares = [c.number(name, high=1.0)] if c.has(name) else []
    for key in ("rope_scaling", "rope_parameters"):
        if (section := c.section(key)) is not None and section.has(name):
            shares.append(section.number(name, high=1.0))
            rest[key] = {field: value for field, value in section.items().items() if field != name}
    if not any(share != 1 for share in shares):
        return c
    kinds = [section.get("rope_type", section.get("type", "default"))
             for section in map(c.section, ("rope_scaling", "rope_parameters")) if section is not None]
    if any(kind != "default" for kind in kinds):
        raise c.unsupported(name, min(shares), "transformers cannot run it either, for a rotation that is stretched")
    return c.instead(**rest)


def read_section(r: ConfigReader, theta: float, outer_original: int | None, max_positions: int) -> RopeConfig:
    """RoPE of one section; see `read_rope`."""
    name = "rope_type" if r.has("rope_type") or not r.has("type") else "type"
    given = r.get(name) or "default"
    kind = r.choice(name, SPELLINGS.get(given, given) if isinstance(given, str) else given, READ_HERE)
    r.get("type")  # older files carry both spellings
    theta = r.number("rope_theta", theta, above=1.0)
    original = r.integer("original_max_position_embeddings", max_positions)
    original = outer_original or original
    rope = RopeConfig(theta)
    if kind == "linear":
        rope = RopeConfig(theta, kind, r.number("factor"))
    elif kind == "dynamic":  # of the context that the config says, as transformers has it
        rope = RopeConfig(theta, kind, r.number("factor"), max_positions)
    elif kind == "llama3":
        low, high = r.number("low_freq_factor"), r.number("high_freq_factor")
        if low >= high:
            raise CheckpointError(f"{r.where}: low_freq_factor is {low:g}; it must be below high_freq_factor {high:g}.")
        rope = RopeConfig(theta, kind, r.number("factor"), original, low, high)
    elif kind == "yarn":
        rope = _read_yarn(r, theta, original, max_positions)
    elif kind == "longrope":
        rope = _read_longrope(r, theta, original, max_positions)
    r.refuse_unread(NEUTRAL)
    return rope


def _read_yarn(r: ConfigReader, theta: float, original: int, max_positions: int) -> RopeConfig:
    """YaRN (arXiv 2309.00071); attention_factor defaults to section 3.4's, or DeepSeek's ratio of two of them."""
    factor = r.number("factor", max_positions / original)
    mscale, mscale_all = (r.number(key, 0.0, above=-1.0) for key in ("mscale", "mscale_all_dim"))
    computed = stretch_factor(factor)
    if mscale and mscale_all:
        computed = stretch_factor(factor, mscale) / stretch_factor(factor, mscale_all)
    fast, slow = r.number("beta_fast", 32.0, above=-1.0) or 32.0, r.number("beta_slow", 1.0, above=-1.0) or 1.0
    return RopeConfig(
        theta, "yarn", factor, original, beta_fast=fast, beta_slow=slow,
        attention_factor=r.number("attention_factor", computed, above=0.0, high=1e6),
        truncate=r.flag("truncate", True),
    )


def _read_longrope(r: ConfigReader, theta: float, original: int, max_positions: int) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753) as Phi has it: two lists of factors, and a scale by how far the context grew."""
    factor = r.number("factor", max_positions / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta, "longrope", factor, original,
        attention_factor=r.number("attention_factor", scale, above=0.0, high=1e6),
        short_factors=r.numbers("short_factor"), long_factors=r.numbers("long_factor"),
    )


def stretch_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's sqrt(1/t) of a context that is `factor` times as long (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_tables(
    rope: RopeConfig, rotary_dim: int, n_positions: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines for positions 0 to n_positions - 1.

    Element i of a row belongs to the pair of dimensions (i, i + rotary_dim / 2), the "rotate half" order of Hugging
    Face's checkpoints; of a proportional rotation to (i, i + span / 2). Computed in float64, so that far positions do
    not inherit the rounding of the frequencies.

    Returns
    -------
    cos, sin : float32 arrays of shape (n_positions, rotary_dim // 2)
        Times the attention factor of YaRN and LongRoPE. LongRoPE and dynamic scaling have other frequencies where
        n_positions, the context of the run, is beyond that of the training. Of query_scale, cosines are the factors of
        queries and sines are 0; of none, cosines are 1.
    """
    import numpy as np

    cos = np.empty((n_positions, rotary_dim // 2), np.float32)
    sin = np.empty_like(cos)
    fill_rope_tables(rope, rotary_dim, cos, sin)
    return cos, sin


def fill_rope_tables(rope: RopeConfig, rotary_dim: int, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> None:
    """Write `rope_tables` into memory that is there, some rows at a time, for long contexts make large tables."""
    import numpy as np

    if rope.kind == "none":
        cos[:], sin[:] = 1.0, 0.0
        return
    frequencies = inverse_frequencies(rope, rotary_dim, len(cos))
    for start in range(0, len(cos), ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, len(cos)))
        if rope.kind == "query_scale":
            spans = np.arange(rows.start, rows.stop)[:, None] // rope.original_max_position_embeddings
            cos[rows], sin[rows] = 1 + rope.factor * np.log1p(spans), 0.0
            continue
        angles = np.arange(rows.start, rows.stop, dtype=np.float64)[:, None] * frequencies
        cos[rows] = np.cos(angles) * rope.attention_factor
        sin[rows] = np.sin(angles) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, n_positions: int = 0) -> NDArray[np.float64]:
    """Radians per position of each pair of dimensions: float64 array of shape (rotary_dim // 2,)."""
    import numpy as np

    plain = rope.theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / (rope.span or rotary_dim))
    if rope.kind in ("linear", "proportional"):
        return plain / rope.factor
    if rope.kind == "dynamic":
        return _dynamic(rope, rotary_dim, n_positions) if n_positions > rope.original_max_position_embeddings else plain
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, rotary_dim)
    if rope.kind == "longrope":
        far = n_positions > rope.original_max_position_embeddings
        return plain / np.array(rope.long_factors if far else rope.short_factors)
    return plain


def _dynamic(rope: RopeConfig, rotary_dim: int, n_positions: int) -> NDArray[np.float64]:
    """NTK-aware scaling: a base that grows with the context, so that the slowest pair is stretched as a whole."""
    import numpy as np

    stretch = rope.factor * n_positions / rope.original_max_position_embeddings - (rope.factor - 1)
    theta = rope.theta * stretch ** (rotary_dim / (rotary_dim - 2))
    return theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def _llama3(rope: RopeConfig, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keep short wavelengths, stretch long ones, blend between (Llama 3.1's reference code)."""
    import numpy as np

    turns = rope.original_max_position_embeddings * plain / (2 * np.pi)  # over the context of the training
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return plain * (keep + (1 - keep) / rope.factor)


def _yarn(rope: RopeConfig, plain: NDArray[np.float64], rotary_dim: int) -> NDArray[np.float64]:
    """Keep dimensions that turn often over the training context, stretch those that turn seldom (YaRN, section 3.2)."""
    import numpy as np

    def dimension(rotations: float) -> float:
        """Dimension (a real number) that makes this many rotations."""
        positions = rope.original_max_position_embeddings
        return rotary_dim * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    stretch = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    return plain * (1 - stretch + stretch / rope.factor)
