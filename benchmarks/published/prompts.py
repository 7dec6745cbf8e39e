"""Speeds of prompts that others published, beside what the estimator says of the same devices."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.devices import Traffic, estimate, load_profile

FILE = Path(__file__).with_name("prompts.tsv")


@dataclass(frozen=True)
class Prompt:
    """One published measurement of a prompt, and the estimate."""

    device: str
    """Name of the profile."""
    model: str
    tokens: int
    tok_per_s: float
    estimated: float
    band: float
    """Half-width of the estimate's band as a share."""
    source: str

    @property
    def miss(self) -> float:
        """Estimated over measured, less one."""
        return self.estimated / self.tok_per_s - 1


def read_prompts(path: Path = FILE) -> list[Prompt]:
    """Return all rows with their estimates.

    The weights' bytes do not matter, for at these lengths the operations take longer than reading them.
    """
    found = []
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            parameters, layers, tokens = 1e9 * float(row["parameters_1e9"]), int(row["layers"]), int(row["tokens"])
            traffic = Traffic(parameters * 0.56, layers, operations=2 * parameters,
                              attention_operations=4.0 * int(row["width"]) * layers)
            outcome = estimate(load_profile(row["device"]), traffic, prompt=tokens)
            if outcome.prefill_tok_per_s is None or outcome.prefill_high is None:
                raise ValueError(f"{row['device']} has no peak")
            found.append(Prompt(row["device"], row["model"], tokens, float(row["tok_per_s"]), outcome.prefill_tok_per_s,
                                outcome.prefill_high / outcome.prefill_tok_per_s - 1, row["source"]))
    return found
