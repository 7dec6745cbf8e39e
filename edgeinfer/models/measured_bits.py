"""Types by size of a small model, by the divergence of bundles that are made of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edgeinfer import converters

from ..base.dataclass import dataclass
from ..base.progress import OnStageProgress
from ..calibration.hooks import open_plain
from ..graph import parameters
from ..quality.corpus import Stream
from ..quality.evaluate import OUTPUT_ROWS
from .calibrated import WINDOW, in_floats
from .comparison import measured

if TYPE_CHECKING:
    from edgeinfer.converters import BitBudget, Calibration, ChosenTypes

    from ..graph import Graph

SMALL = 1 << 20
"""Most weights of a model that is converted a hundred times for this."""


@dataclass(frozen=True)
class MeasuredBits:
    """Types by size, as `convert` takes them: with a calibration, those of a small model by measured divergence."""

    budget: BitBudget
    source: Path
    """The checkpoint."""

    def __call__(self, reading: Any, graph: Graph, calibration: Calibration | None,
                 progress: OnStageProgress | None = None) -> ChosenTypes:
        """Choose a type for each matrix of a graph; raises as `BitBudget`."""
        chosen = self.budget(reading, graph, calibration, progress)
        count = sum(parameters(weight) for weight in graph.weights if weight.name in chosen.types)
        if calibration is None or not calibration.sample or count > SMALL:
            return chosen
        ids = calibration.sample
        stream = Stream(ids, (True,) * len(ids), 0, calibration.text)
        window = min(WINDOW, graph.config.max_position_embeddings)
        with in_floats(self.source, _quiet) as floats, TemporaryDirectory(dir=floats.parent) as room:
            reference = open_plain(floats, window, kv="f32", outputs=OUTPUT_ROWS)

            def divergence(types: ChosenTypes) -> float:
                path = Path(room, "made")
                converters.convert(self.source, path, chooser=lambda *_: types, calibration=lambda _: calibration,
                                   overwrite=True)
                row = measured("", path, reference=reference, stream=stream, window=window, progress=_quiet)
                assert row.divergence
                return row.divergence.kld_mean

            try:
                return converters.types_by_divergence(self.budget, reading, graph, chosen, divergence, progress)
            finally:
                reference.close()


def _quiet(*_: object) -> None:
    """Report no progress."""
