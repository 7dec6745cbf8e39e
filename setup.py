"""Give the files of a wheel a date that does not depend on when it is built: the same sources give the same bytes.

The date is that of the commit in a checkout, and the earliest that a zip file can have where there is none, as in a
source distribution. Everything else about the package stands in pyproject.toml.
"""

import os
import subprocess
from pathlib import Path

from setuptools import setup

EARLIEST = 315532800
"""1980-01-01, in seconds since 1970."""


def date_of_commit() -> int:
    """Seconds since 1970 of the commit that is checked out here; EARLIEST where git does not know this folder."""
    root = Path(__file__).resolve().parent
    if not (root / ".git").exists():  # the folder around it may be in a repository of its own
        return EARLIEST
    command = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return EARLIEST


os.environ.setdefault("SOURCE_DATE_EPOCH", str(date_of_commit()))
setup()
