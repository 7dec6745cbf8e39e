"""Draw the pictures of README from measurements and a plan: docs/images/peers.svg and docs/images/plan.svg.

    python benchmarks/pictures.py

`peers.svg` is the table "Against the best setting" of docs/measurements/peers.md; `plan.svg` is
`edgeinfer plan llama-3.1-8b --machine rpi5-8gb --json`. Both are SVG written line by line, so that they need no package
and a test can compare them with their sources.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "measurements" / "peers.md"
IMAGES = ROOT / "docs" / "images"
PLAN = ("plan", "llama-3.1-8b", "--machine", "rpi5-8gb", "--json")
SHAPES = {"smollm2-135m": "135M", "tinyllama-1.1b": "1.1B", "llama-2-7b": "7B"}
BLUE, GREY, INK, PAPER = "#2563eb", "#9ca3af", "#1f2937", "#ffffff"
COLOURS = {"weights": BLUE, "kv": "#059669", "python": GREY}


def ratios(text: str) -> list[tuple[str, float]]:
    """Return (label, ratio) of each row of the table whose peer is llama.cpp."""
    section = text.split("## Against the best setting")[1].split("\n## ")[0]
    found = []
    rows = re.findall(r"^\| (\S+) \| (.+?) \| (\S+) \| .+ \| ([\d.]+) \|$", section, re.MULTILINE)
    for shape, test, peer, ratio in rows:
        if peer == "llama.cpp":
            kind = "prompt" if test.startswith("pp") else "decoding"
            found.append((f"{SHAPES[shape]} {kind}" + (" at depth 4096" if "d4096" in test else ""), float(ratio)))
    return found


def machine(text: str) -> str:
    """Return the line with the date and machine of the table."""
    (date, processor, cores), = re.findall(r"^Measured (\S+): (.+?) \(.*?\), (\d+ cores)", text, re.MULTILINE)
    return f"{processor}, {cores}, AVX-512 VNNI; 4-bit weights; {date}; llama.cpp's best setting = 1"


def peers(text: str) -> str:
    """Return the bar chart of ratios as SVG."""
    rows, left, unit = ratios(text), 190, 110
    lines = [label(16, 26, "Tokens per second, edgeinfer over llama.cpp", 15, bold=True)]
    for place, (name, ratio) in enumerate(rows):
        y = 44 + 26 * place
        lines += [label(left - 8, y + 15, name, 13, anchor="end"), box(left, y, ratio * unit, 20, BLUE),
                  label(left + ratio * unit + 6, y + 15, f"{ratio:.2f}", 13)]
    end = 44 + 26 * len(rows)
    lines += [f'<line x1="{left + unit}" y1="38" x2="{left + unit}" y2="{end}" stroke="{INK}" stroke-dasharray="4 3"/>',
              label(16, end + 18, machine(text), 11)]
    return picture(640, end + 30, "Speed of edgeinfer over llama.cpp", lines)


def plan(report: dict) -> str:
    """Return the regions of a plan beside its budget as SVG."""
    budget, width, x = report["budget_bytes"], 600, 20.0
    lines = [label(16, 26, f"edgeinfer {' '.join(PLAN[:-1])}", 15, bold=True),
             box(20, 44, width, 34, PAPER, stroke=INK)]
    shown = [(one["name"], one["bytes"]) for one in report["regions"] if one["name"] in COLOURS]
    shown.insert(2, ("other", report["total_bytes"] - sum(size for _, size in shown)))
    for place, (name, size) in enumerate(shown):
        colour, share = COLOURS.get(name, "#d97706"), width * size / budget
        lines += [box(x, 44, share, 34, colour), box(20 + 150 * place, 96, 12, 12, colour),
                  label(37 + 150 * place, 106, f"{name} {size / 1e6:,.0f} MB", 12)]
        x += share
    estimate = report["estimate"]
    speed = (f"It fits. At {estimate['depth']} tokens of context: {estimate['decode_tok_per_s']:.1f} tokens/s "
             f"({estimate['low']:.1f} to {estimate['high']:.1f}), the speed of {estimate['program']} on this board.")
    lines += [label(x + 12, 66, f"{report['remaining_bytes'] / 1e9:.2f} GB remain of {budget / 1e9:.2f} GB", 13),
              label(20, 130, speed, 13)]
    return picture(640, 144, "A memory plan", lines)


def box(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none") -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}" stroke="{stroke}"/>'


def label(x: float, y: float, text: str, size: int, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def picture(width: int, height: int, title: str, lines: list[str]) -> str:
    """Return an SVG with a white ground, so that it is read on dark pages too."""
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="Helvetica, Arial, sans-serif" fill="{INK}">')
    ground = box(0, 0, width, height, PAPER)
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *lines, "</svg>"]) + "\n"


def pictures() -> dict[str, str]:
    """Return the name and text of every picture."""
    command = [sys.executable, "-m", "edgeinfer", *PLAN]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    return {"peers.svg": peers(TABLE.read_text(encoding="utf-8")), "plan.svg": plan(report)}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
