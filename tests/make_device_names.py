"""All names of the devices, taken apart: ``python -m tests.make_device_names`` writes devices/names.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

from edgeinfer.devices.known import all_rows
from edgeinfer.devices.lookup import names_of
from edgeinfer.devices.names import UNITS, taken_apart

TABLE = Path(__file__).resolve().parents[1] / "devices" / "names.json"
TIER = re.compile(r"\b(ultra|ai|ryzen) [3579] ")
"""Tiers of processors that many leave out: Ultra 155H."""


def table() -> dict[str, str]:
    """Return the devices of each name: its words in order, and all of them as one word."""
    found: dict[str, dict[str, None]] = {}
    for name, (_, row) in all_rows().items():
        said = names_of(name, row["title"], row.get("aliases", ()))
        for text in (*said, *(TIER.sub(r"\1 ", text.lower()) for text in said)):
            typed = taken_apart(text)
            for key in (" ".join(typed.key), *typed.whole):
                found.setdefault(key, {})[name] = None
    return {key: " ".join(found[key]) for key in sorted(found) if key not in ("", *UNITS)}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
