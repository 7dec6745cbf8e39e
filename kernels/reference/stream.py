"""Reference of the instruction that gives a buffer back to the readers."""

from __future__ import annotations

import numpy as np

from .. import abi
from .expected import Expected
from .view import InstructionView, memory


def stream_release_reference(view: InstructionView) -> list[Expected]:
    """One release more; the event is no longer this forward pass's, for a reader may redeem it again at once."""
    stream = int(memory(view.ctx + abi.CTX_STREAM, np.int64, (1,))[0])
    released = memory(stream + abi.STREAM_RELEASED, np.int64, (1,))
    return [Expected("releases", released, released + 1)]
