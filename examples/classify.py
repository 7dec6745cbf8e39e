"""Label each line of standard input by log-probabilities: `python examples/classify.py MODEL LABEL LABEL... < lines`.

    printf 'The fox ate the grapes.\\nThe king wept.\\n' | python examples/classify.py demo " happy" " sad"

Each label is scored as the continuation of a prompt; the share of a label is its probability among the labels. Nothing
is sampled, so the same line always gets the same label.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator

from edgeinfer import LLM

PROMPT = "{line}\nThe story is"


def classify(llm: LLM, lines: Iterable[str], labels: list[str]) -> Iterator[tuple[str, float, str]]:
    """Yield (label, share, line) of each line; labels are compared by the mean log-probability of their tokens."""
    for line in lines:
        scores = llm.score(PROMPT.format(line=line), labels)
        weights = [math.exp(score.mean_logprob) for score in scores]
        best = max(range(len(labels)), key=weights.__getitem__)
        yield labels[best].strip(), weights[best] / sum(weights), line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("labels", nargs="+")
    chosen = parser.parse_args()
    with LLM(chosen.model) as llm:
        lines = (line.strip() for line in sys.stdin if line.strip())
        for label, share, line in classify(llm, lines, chosen.labels):
            print(f"{label}\t{share:.2f}\t{line}", flush=True)
