"""How fast files become bundles: bytes of the file by second, processor time, and the most memory of the process.

    python benchmarks/import_speed.py FILE.gguf|CHECKPOINT ... [--rounds 3] [--to FOLDER]

Each conversion is a process of its own, all files in turns; the file is read before, so that it comes from the page
cache, and the bundle is written to FOLDER (a disk, or /dev/shm to leave it out) and removed. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

CHUNK = 16 << 20
FIGURES = ("seconds", "cpu_seconds", "memory_mb")


def convert_once(source: str, destination: str) -> None:
    """Convert, and print what it took."""
    from edgeinfer.converters import convert
    from edgeinfer.process import peak_rss_bytes

    began = time.perf_counter()
    convert(source, destination)
    seconds = time.perf_counter() - began
    print(json.dumps(dict(zip(FIGURES, (seconds, time.process_time(), (peak_rss_bytes() or 0) / 1e6), strict=True))))


def measured(source: Path, folder: Path) -> dict[str, float]:
    """One conversion."""
    read(source)
    bundle = Path(tempfile.mkdtemp(dir=folder)) / "bundle"
    try:
        code = f"from benchmarks.import_speed import convert_once; convert_once({str(source)!r}, {str(bundle)!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))
    finally:
        shutil.rmtree(bundle.parent)


def read(source: Path) -> int:
    """Read all files of a model; gives their bytes."""
    total = 0
    for path in [source] if source.is_file() else sorted(source.iterdir()):
        if path.is_file():
            with open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    total += len(chunk)
    return total


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    found: dict[Path, list[dict[str, float]]] = {source: [] for source in args.sources}
    for _ in range(args.rounds):
        for source in args.sources:
            found[source].append(measured(source, args.to))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| file | MB | s | MB/s | CPU s | peak memory, MB |\n|---|---|---|---|---|---|")
    for source, rounds in found.items():
        size = read(source) / 1e6
        seconds, cpu, memory = (statistics.median(one[name] for one in rounds) for name in FIGURES)
        print(f"| {source.name} | {size:.0f} | {seconds:.2f} | {size / seconds:.0f} | {cpu:.2f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
