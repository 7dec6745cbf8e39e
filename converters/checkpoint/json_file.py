"""The small JSON files of a checkpoint; config.json alone describes the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeinfer.base.files import open_plain, os_errors
from edgeinfer.base.strict_json import parse_json
from edgeinfer.errors import CheckpointError

CONFIG_FILE = "config.json"
MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    with os_errors(CheckpointError, f"Cannot read {path}"), open_plain(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB, too large for its purpose.")
    try:
        data = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {str(error)[:120]}.") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return data
