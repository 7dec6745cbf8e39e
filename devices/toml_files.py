"""Reading of TOML files that may be damaged."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from edgeinfer.base.files import open_plain
from edgeinfer.base.strict_json import check_depth
from edgeinfer.errors import ProfileError

MAX_FILE_BYTES = 1 << 20


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises `ProfileError`: it cannot be read, is not valid TOML, or is longer than 1 MiB."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise ProfileError(f"{path} has {size} bytes; a profile has at most {MAX_FILE_BYTES}.")
            table = tomllib.loads(file.read().decode("utf-8"))
        check_depth(table)
        return table
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ProfileError(f"{path} is not a TOML file: {error}; mend it, or probe again.") from error
