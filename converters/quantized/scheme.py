"""The record of how the weights of a checkpoint are packed; `config.py` reads it from a config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from edgeinfer.base.dataclass import dataclass


@dataclass(frozen=True)
class Scheme:
    """The packing of a checkpoint's weights; their tensors tell which of them are packed."""

    method: str
    """One of `packed_config.METHODS`, or mlx."""
    bits: int = 0
    group_size: int = 0
    """Columns that share a scale; 0 for a whole row."""
    symmetric: bool = True
    """GPTQ: whether all zero points are half of the range."""
    ordered: bool = False
    """True if columns may be in groups in another order than their own; their tensors tell."""
    stored_minus_one: bool = False
    """GPTQ: whether zero points are stored less one."""
    group_sizes: tuple[int, ...] = ()
    """compressed-tensors: of all groups of modules; which one a module has is seen from its scales."""
    block: tuple[int, int] = (0, 0)
    """FP8: rows and columns that share a scale; 0 for one scale."""
    blocks: tuple[tuple[int, int], ...] = ()
    """compressed-tensors: of all groups of modules, as `group_sizes`."""
    groups: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    """compressed-tensors: names of modules, patterns (``re:``) or classes of them, and how these are packed."""
    mode: str = "affine"
    """MLX: affine, or the name of a format of floats, one of `packed_config.MLX_MODES`."""
    modules: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    """MLX: modules with bits, group and mode of their own."""
    floats: bool = False
    """compressed-tensors: whether codes are floats of 8 bits."""
    divided: bool = False
    """BitNet: whether codes are divided by their scale."""
    online: bool = False
    """BitNet: whether weights are the floats of training, which are rounded when they are used."""
    left_out: tuple[str, ...] = ()
    """Names of modules that are not quantised, or patterns of them (``re:``); a part of a name is enough."""

    def of_module(self, name: str) -> tuple[int, int, str]:
        """Bits, group and, of MLX, mode of a module."""
        return self.modules.get(name, (self.bits, self.group_size, self.mode))

    def of_group(self, module: str) -> Scheme:
        """Return the packing of a module by the config: a group that names it goes before one of all of a class.

        For plans from a config alone; tensors tell more than patterns that are not understood.
        """
        named = [scheme for targets, scheme in self.groups if any(_fits(target, module) for target in targets)]
        classes = [scheme for targets, scheme in self.groups if any(target.isidentifier() for target in targets)]
        return next(iter((*named, *classes)), self)

    def leaves_out(self, module: str) -> bool:
        """Return whether the config says that a module is not quantised."""
        return any(_fits(pattern, module) for pattern in self.left_out)


def _fits(pattern: str, module: str) -> bool:
    """Return whether a module is meant: by a part of its name, or by a pattern of which only ``.*`` is understood.

    Patterns are strangers' programs, of which some never end. One with more in it fits nothing: this is for plans from
    a config alone, and tensors tell for the rest. In a part of a name a star stands for anything (gpt-oss).
    """
    at, regular = 0, pattern.startswith("re:")
    pieces = pattern[3:].replace("\\.", "\0").strip("^$").split(".*") if regular else pattern.split("*")
    for piece in pieces:
        piece = piece.replace("\0", ".")
        found = module.find(piece, at) if not regular or re.fullmatch(r"[\w.\-]*", piece) else -1
        if found < 0:
            return False
        at = found + len(piece)
    return True
