"""Storage types for models that are converted when they are first run."""

from __future__ import annotations

from pathlib import Path

from ..base.dataclass import dataclass
from ..base.validation import check_fields, option
from ..bundle import Bundle
from ..errors import UsageError
from ..registry import RULES

WEIGHTS, GROUP_SIZE = "q4", 32
"""Default storage of a checkpoint that is converted when it is first run; `edgeinfer convert` offers the others."""


@dataclass(frozen=True)
class Storage:
    """Requested storage of weights that are converted when the model is first run."""

    weights: str | None = option(None, RULES["weights"])
    """Type of the matrices; None leaves those of a GGUF file as they are, and is q4 for others."""
    group_size: int | None = option(None, RULES["group_size"])
    """Weights per scale; by default 32."""
    budget_bytes: int | None = None
    """Most memory of the run, by which one of several files of a model on the hub is chosen; None: the available
    memory."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def of_checkpoint(self) -> tuple[str, int]:
        """Type and group size of a checkpoint's weights."""
        return self.weights or WEIGHTS, self.group_size or GROUP_SIZE

    @property
    def asked(self) -> bool:
        """True if anything is said."""
        return self.weights is not None or self.group_size is not None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the request in words."""
        groups = f"groups of {self.group_size}" if self.group_size else ""
        return tuple(filter(None, (self.weights or "", groups)))


AS_IT_IS = Storage()


def stored_so(bundle: Path, storage: Storage) -> Path:
    """Return a bundle; raises `UsageError` if its weights are stored otherwise than was requested."""
    if storage.asked:
        with Bundle.open(bundle) as opened:
            own = opened.quantisation
        if (storage.weights or own.weights, storage.group_size or own.group_size) != (own.weights, own.group_size):
            raise UsageError(
                f"{bundle} is a bundle with weights in {own.weights}, groups of {own.group_size}, and runs as it is "
                f"stored, not in {' with '.join(storage.words)}; convert its "
                "checkpoint or GGUF file again, or omit the type.")
    return bundle
