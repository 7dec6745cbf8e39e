"""How many guesses are right: of a draft model, of the first layers of the model itself, and of the model with masks.

    python benchmarks/acceptance.py MODEL [--draft MODEL] [--prompts FILE] [--layers 1 2 ...] [--tokens N]

Each drafter guesses in every walk, for continuations of pieces of a text; the shares do not depend on the machine's
speed. A row is a setting: of single guesses the share that is right, and of five in a row the tokens of a walk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/acceptance.py` in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from edgeinfer import LLM, engine  # noqa: E402
from edgeinfer.config import Recipe  # noqa: E402
from edgeinfer.technique import recipe_with  # noqa: E402

TEXT = ROOT / "tests" / "data" / "box_of_robbers.txt"
PIECES, PIECE = 24, 64
"""Prompts, and their tokens."""
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "T = 1": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "T = 0.7, top-k 40": {"temperature": 0.7, "top_k": 40, "top_p": 1.0, "min_p": 0.0},
}
SEVERAL = 5


def prompts(llm: LLM, path: Path) -> list[list[int]]:
    """Pieces of a text, each with the beginning-of-text token in front."""
    ids = llm.tokenizer.encode(path.read_text(encoding="utf-8"))
    step = max(PIECE, (len(ids) - PIECE) // PIECES)
    return [[*ids[:1], *ids[at : at + PIECE - 1]] for at in range(1, len(ids) - PIECE, step)][:PIECES]


def accepted(model: str, path: Path, tokens: int, guesses: int, **options: Any) -> Iterator[tuple[str, float, float]]:
    """Open a model and go on with all pieces in each setting; gives share of right guesses and tokens of a walk."""
    with LLM(model, threads=1, draft_tokens=guesses, **options) as llm:
        pieces = prompts(llm, path)
        for name, setting in SETTINGS.items():
            right = drafted = walks = 0
            for seed, ids in enumerate(pieces):
                done = llm.complete(ids, max_tokens=tokens, seed=seed, ignore_eos=True, **setting).speculation
                assert done
                right, drafted, walks = right + done.accepted, drafted + done.drafted, walks + done.walks
            yield name, right / drafted, 1 + right / walks


def drafters(model: str, draft: str | None, layers: list[int] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way to guess for a model, with the options that open it."""
    if draft:
        yield f"draft model {Path(draft).name}", {"speculate": "draft", "draft": draft}
    with LLM(model, threads=1, speculate="off") as llm:
        n, files = llm.session.model.num_hidden_layers, llm.session.bundle.header.files
    if any(entry.part == "predictor" for entry in files):
        yield "the model with masks", {"speculate": "self", "draft": recipe_with(sparse="predict"), "sparse": "exact"}
    for k in layers if layers is not None else range(1, n):
        recipe = Recipe.parse(f"fuse_input+early_exit:layers={k}")
        yield f"its first {k} of {n} layers", {"speculate": "self", "draft": recipe}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="How many guesses are right, by drafter.")
    parser.add_argument("model")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--prompts", type=Path, default=TEXT, help="text whose pieces are the prompts")
    parser.add_argument("--layers", nargs="*", type=int, help="early exits; by default all there are")
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args(arguments)
    engine.Speculation = partial(engine.Speculation, fixed=True)  # type: ignore[misc,assignment]
    print(f"| drafter | setting | right of single guesses | tokens a walk, {SEVERAL} guesses |\n|---|---|---|---|")
    for name, options in drafters(given.model, given.draft, given.layers):
        rows = [list(accepted(given.model, given.prompts, given.tokens, n, **options)) for n in (1, SEVERAL)]
        for (setting, share, _), (_, _, walk) in zip(*rows, strict=True):
            print(f"| {name} | {setting} | {share:.2f} | {walk:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
