"""The table of the check: rows that are printed and written as they come, so that a run that is killed keeps them."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from edgeinfer.backends import Provider
from edgeinfer.devices import DeviceProfile
from edgeinfer.errors import BudgetError, UnsupportedModelError


@dataclass
class Row:
    """One line of the table."""

    what: str
    found: str
    wanted: str = ""
    verdict: str = ""
    """ok, missed, not run, or empty if nothing is wanted."""


class Check:
    """The rows so far, and the time that is left.

    Parameters
    ----------
    provider : Provider
        The device that is checked.
    seconds : float
        As for `begin`.
    out : Path, optional
        File that each row is appended to as a line of JSON.
    profile : DeviceProfile, optional
        Profile whose bandwidth and estimates are shown beside the results; by default the GPU's.
    """

    def __init__(self, provider: Provider, seconds: float, out: Path | None = None,
                 profile: DeviceProfile | None = None):
        self.provider, self.profile, self.rows = provider, profile, list[Row]()
        self._out = out
        if out:
            out.write_text("", encoding="utf-8")
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """Begin a stage: cases that have not begun after so many seconds are not run."""
        self._until = time.monotonic() + seconds

    @property
    def cuda(self) -> bool:
        """True if the device is a GPU, whose speed and memory mean something."""
        return self.provider.memory == "cuda"

    def add(self, what: str, found: str, wanted: str = "", good: bool | None = None) -> None:
        """Add a row; nothing is wanted of it if `good` is None."""
        self._add(Row(what, found, wanted, "" if good is None else "ok" if good else "missed"))

    def case(self, what: str, run: Callable[[], None]) -> None:
        """Run a case; whatever goes wrong in it is a row, and the next case follows."""
        if time.monotonic() > self._until:
            self.not_run(what, "out of time")
            return
        try:
            run()
        except (BudgetError, UnsupportedModelError) as error:
            self.not_run(what, str(error))
        except Exception as error:  # onnxruntime's own classes, too
            traceback.print_exc()
            self.add(what, f"{type(error).__name__}: {' '.join(str(error).split())}", "no error", False)
        gc.collect()  # memory of a runner that failed

    def not_run(self, what: str, why: str) -> None:
        """Add a row for a case that was left out."""
        self._add(Row(what, " ".join(why.split()), verdict="not run"))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print("| " + " | ".join(str(value).replace("|", "/") for value in asdict(row).values()) + " |", flush=True)
        if self._out:
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
