"""The table of known devices in the manual: ``python -m edgeinfer.cli.devices_manual docs/devices.md`` rewrites it."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import UsageError

BEGIN, END = "<!-- devices: made by edgeinfer.cli.devices_manual -->\n", "<!-- end of devices -->\n"


def device_table() -> str:
    """Return all devices as a Markdown table, with where the bandwidth figures are from."""
    from ..devices import profiles

    lines = ["| name | device | class | memory, GiB | GB/s | source | drawn by decoding, GB/s | source |",
             "|---|---|---|---|---|---|---|---|"]
    for profile in profiles().values():
        drawn = "" if profile.effective_gbs is None else f"{profile.effective_gbs:g}"
        cells = [f"`{profile.name}`", profile.title, profile.device_class, f"{profile.memory_bytes / 2**30:g}",
                 f"{profile.bandwidth_gbs:g}", profile.sources["bandwidth_gbs"], drawn,
                 profile.sources.get("effective_gbs", "")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """Return a page with its table made anew.

    Raises
    ------
    UsageError
        The page has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"The page has no lines {BEGIN.strip()!r} and {END.strip()!r}; put them where the table goes.")
    return before + BEGIN + device_table() + END + after


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
