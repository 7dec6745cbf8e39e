"""Messages of `run` on weights that are read from storage: the reason, alternatives, and the cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...registry import technique

if TYPE_CHECKING:
    from ...runner import Runner


def notice(runner: Runner) -> str | None:
    """Return why weights are read from storage, and the alternative; None if all are in memory."""
    if runner.reader is None:
        return None
    reader, plan = runner.reader, runner.plan
    if one := technique(plan.technique):
        line = one.notice(plan)
    else:
        line = (f"{len(plan.parts)} of {runner.model.num_hidden_layers} layers are streamed from storage, "
                f"{format_size(reader.bytes_per_pass)} for each token or prompt chunk")
    line += (f", because all weights in memory would take {format_size(plan.unstreamed_bytes)} and the budget is "
             f"{format_size(runner.budget_bytes)}.")
    if runner.smaller_alternative is not None:
        line += f" They would fit with {runner.smaller_alternative}."
    if not reader.direct:
        line += (" The file system refuses direct I/O, so reads go through the page cache, which is asked to drop "
                 "them.")
    return line


class Usage:
    """Counts the reads of a request from storage, from its creation on."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._before = self._now()

    def _now(self) -> tuple[int, ...]:
        reader = self._runner.reader
        return () if reader is None else (reader.passes, reader.bytes_read, self._runner.waited_ns, *reader.hits)

    def report(self) -> dict[str, Any] | None:
        """Return the field ``offload`` of the JSON object; None if all weights are in memory."""
        plan, reader = self._runner.plan, self._runner.reader
        if reader is None:
            return None
        passes, nbytes, waited, *found = (now - before for now, before in zip(self._now(), self._before, strict=True))
        own: dict[str, Any]
        if one := technique(plan.technique):
            own = one.cost(plan, *found)
        else:
            own = {"decision": "streamed", "layers": len(plan.parts), "flash_bytes_per_token": reader.bytes_per_pass}
        return {**own, "walks": passes, "flash_bytes": nbytes, "io_wait_ms": waited / 1e6, "direct": reader.direct}


def line(report: dict[str, Any] | None) -> str | None:
    """Return the cost of reading from storage in one line."""
    if report is None:
        return None
    hits = f", hit rate {report['hit_rate']:.0%}" if "hit_rate" in report else ""
    unit = "token" if hits else "forward pass"  # which checks several tokens if there are draft tokens
    return (f"{report['decision']}: {format_size(report['flash_bytes_per_token'])} from storage per {unit}{hits} "
            f"({format_size(report['flash_bytes'])} in {report['walks']} forward passes), "
            f"{report['io_wait_ms'] / 1000:.1f} s spent waiting for it")
