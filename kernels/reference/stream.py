"""Twin of the record that gives a buffer back to the readers."""

from __future__ import annotations

import numpy as np

from .. import abi
from .expected import Expected
from .view import RecordView, memory


def stream_release_twin(view: RecordView) -> list[Expected]:
    """One release more; the ticket is no longer this walk's, for a reader may redeem it again at once."""
    stream = int(memory(view.ctx + abi.CTX_STREAM, np.int64, (1,))[0])
    released = memory(stream + abi.STREAM_RELEASED, np.int64, (1,))
    return [Expected("releases", released, released + 1)]
