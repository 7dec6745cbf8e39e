"""Rewrite tests/golden/beams.json from transformers (extra ``reference``): ``python -m tests.make_beams MODELS``.

MODELS is the folder of the fables models; the models of tests/golden need none. In each case of settings some tokens
that come often are taken as end tokens, so that texts end at all lengths.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers import golden_cases
from tests.make_golden import CASES, transformers_model

FILE = golden_cases.FOLDER / "beams.json"
RANDOM = ("llama-gqa3-bias-gelu", "mistral-window-head6", "qwen3")
FABLES = ("fables-5m-relu", "fables-5m-silu", "fables-draft")
FULL_STOP, COMMA = 4049, 4046
SETTINGS: list[dict[str, Any]] = [
    {"beams": 2}, {"beams": 4}, {"beams": 8}, {"beams": 4, "early_stopping": True},
    {"beams": 8, "length_penalty": 2.0}, {"beams": 4, "length_penalty": 0.0},
    {"beams": 4, "length_penalty": -0.7, "early_stopping": "never"},
    {"beams": 8, "length_penalty": 0.6, "early_stopping": "never"},
]  # fmt: skip


def results(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    """All results of a search: generated tokens without padding, and scores."""
    import torch

    prompt = case["prompt"]
    given = {"num_beams": case["beams"], "length_penalty": case.get("length_penalty", 1.0),
             "early_stopping": case.get("early_stopping", False)}
    done = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=case["max_tokens"], max_length=None, num_return_sequences=case["beams"],
        eos_token_id=case["ends"], pad_token_id=0, return_dict_in_generate=True, output_scores=True, **given)
    texts = []
    for row in done.sequences[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(row) if token in case["ends"]), len(row))
        texts.append(row[:end])
    return {"texts": texts, "scores": [round(score, 6) for score in done.sequences_scores.tolist()]}


def random_cases(name: str) -> Iterator[dict[str, Any]]:
    """Of a model of tests/golden."""
    ids = golden_cases.load(name).ids
    for i, settings in enumerate(SETTINGS):
        yield {"model": name, "prompt": ids[: 7 + 3 * i], "ends": [*range(2, 99, 24 // (1 + i % 4))], "max_tokens": 14,
               **settings}


def fables_cases(folder: Path) -> Iterator[dict[str, Any]]:
    """Of a fables model."""
    prompts = [case["prompt_ids"] for case in json.loads((folder / "golden.json").read_text())["cases"]]
    for i, settings in enumerate(SETTINGS):
        for ends in ([1, 2], [1, 2, FULL_STOP, COMMA][: 3 + i % 2]):
            yield {"model": folder.name, "prompt": prompts[i % len(prompts)], "ends": ends, "max_tokens": 32,
                   **settings}


def made(models: Path | None) -> Iterator[dict[str, Any]]:
    """Every case with its results."""
    for name in RANDOM:
        model, _ = transformers_model(name, CASES[name])
        yield from (case | results(model, case) for case in random_cases(name))
    for name in FABLES if models else ():
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32).eval()
        yield from (case | results(model, case) for case in fables_cases(models / name))


if __name__ == "__main__":
    rows = [json.dumps(case, separators=(",", ":")) for case in made(Path(sys.argv[1]))]
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    print(f"{FILE}: {len(rows)} cases, {FILE.stat().st_size} bytes")
