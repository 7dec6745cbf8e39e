"""Kernels linked once per process: a session that links its own takes two and a half times as long to open."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.kernels import Isa, Kernels

_linked: dict[str, Linked] = {}
_kept: list[Linked] = []
"""All that were ever linked: tests hold addresses of their functions."""
_turn = threading.Lock()


class Linked(Kernels):
    """Kernels of several sessions, which may open at the same time."""

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """As `Kernels.addresses`."""
        with _turn:
            return super().addresses(names)


def linked(isa: Isa, progress: OnStageProgress | None = None) -> Kernels:
    """Return this process' kernels of an instruction set; new ones where an extension has joined those there were."""
    with _turn:
        if isa.name not in _linked or len(_linked[isa.name]._sets) > 1:
            _linked[isa.name] = Linked(isa, progress)
            _kept.append(_linked[isa.name])
        return _linked[isa.name]
