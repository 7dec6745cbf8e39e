"""onnxruntime-genai on the same model, in a process of an interpreter that has it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from edgeinfer.backends import Flavour, export
from edgeinfer.bundle import Bundle

from .models import bundle_of
from .rows import Check
from .sizes import Sizes

WORKER = Path(__file__).with_name("genai_worker.py")
SECONDS = 120
"""Time that a model may take there."""


def genai(check: Check, name: str, python: str, sizes: Sizes) -> None:
    """Export a model for onnxruntime-genai and add rows for its prompts and steps."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        export(Bundle.open(bundle_of(name)), model, Flavour(target="genai", dtype=check.provider.kv[0]))
        numbers = (sizes.prompt, sizes.steps, *sizes.sequences)
        command = [python, str(WORKER), str(model), "cuda" if check.cuda else "cpu", *map(str, numbers)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        except subprocess.CalledProcessError as error:
            return check.not_run(f"{name}: onnxruntime-genai", (error.stderr or "it failed").splitlines()[-1])
        except (OSError, subprocess.TimeoutExpired) as error:
            return check.not_run(f"{name}: onnxruntime-genai", str(error))
    for line in done.stdout.splitlines():
        row = json.loads(line)
        n, step = row["sequences"], row["step_s"]
        check.add(f"{name}: onnxruntime-genai {row['version']}, {n} sequences at depth {sizes.prompt}",
                  f"{n / step:.0f} tokens/s, {1000 * step:.2f} ms; prompts {n * sizes.prompt / row['prompt_s']:.0f} "
                  "tokens/s")
