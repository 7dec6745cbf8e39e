"""What choosing rows of V costs in quality: divergence from the same bundle with all rows, and what is left out.

    python benchmarks/topn_quality.py MODEL_DIR... --text FILE [--separator TEXT] [--windows N] [--kv TYPE]

Each checkpoint is converted to an int8 bundle in a temporary folder. A window is 1023 tokens of the text: 512 as a
prompt, the others one by one in decode role, with every setting and with all rows (`edgeinfer eval --decode` in a
loop). What a setting keeps follows from the scores of the exact model, layer by layer: the mass of the rows that a head
wants, the rows of a head, those that any head of a KV head wants, the blocks that they lie in and the mass of these.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from edgeinfer.bundle import Bundle  # noqa: E402
from edgeinfer.config import Recipe, RuntimeConfig, Step  # noqa: E402
from edgeinfer.converters import convert  # noqa: E402
from edgeinfer.evaluate import Stream, evaluate, token_stream  # noqa: E402
from edgeinfer.graph import SelectedAttention  # noqa: E402
from edgeinfer.kernels import abi  # noqa: E402
from edgeinfer.runtime import Session  # noqa: E402
from edgeinfer.text import Tokenizer  # noqa: E402

WINDOW, PROMPT = 1023, 512
SETTINGS = [("eps", x) for x in (1e-4, 1e-3, 1e-2, 0.03, 0.1)] + [("top", n) for n in (16, 32, 64, 128)]
INSTEAD = ("nothing", "scale", "mean")


def recipe(settings: dict[str, Any], *more: Step) -> Recipe:
    """The default passes, then these."""
    return Recipe((*Recipe().steps, *more, Step("attention", tuple(settings.items()))))


def opened(stack: ExitStack, path: Path, passes: Recipe, kv: str) -> Session:
    """A session, closed by the stack."""
    session = Session(Bundle.open(path), RuntimeConfig(ctx=1024, kv=kv, recipe=passes))
    stack.callback(session.close)
    return session


def scores(session: Session, layer: int) -> np.ndarray:
    """Live view of the scores that the last token leaves in the last layer: (KV heads, heads of each, places)."""
    record = next(r for r in session.program.records
                  if r.kernel.startswith("attention_scores") and r.op and r.op.layer == layer)
    op, (region, offset) = record.op, record.operands[5]
    assert isinstance(op, SelectedAttention)
    row = abi.score_row_bytes(session.plan.splits)
    data = session.executor.regions[region][offset : offset + op.heads * row].reshape(op.kv_heads, -1, row)
    return data.view(np.float32)


def kept(weights: np.ndarray, kind: str, value: float) -> tuple[float, ...]:
    """Of weights (KV heads, heads of each, places): mass, rows, rows of a KV head, blocks, mass of these."""
    if kind == "eps":
        want = weights >= value * weights.max(axis=2, keepdims=True)
    else:
        order = np.argsort(-weights, axis=2, kind="stable")[..., : int(value)]
        want = np.zeros(weights.shape, bool)
        np.put_along_axis(want, order, True, axis=2)
    union, n = want.any(axis=1), weights.shape[2]
    blocks = np.pad(union, ((0, 0), (0, -n % 16))).reshape(len(union), -1, 16).any(axis=2)
    whole = np.repeat(blocks, 16, axis=1)[:, None, :n]
    return (float((weights * want).sum(axis=2).mean()), float(want.sum(axis=2).mean()),
            float(union.sum(axis=1).mean()), float(blocks.sum(axis=1).mean()),
            float((weights * whole).sum(axis=2).mean()))


def choices(path: Path, kv: str, ids: list[int], windows: int) -> dict[tuple[str, float], np.ndarray]:
    """Of each setting: means of `kept` over tokens and layers, in the exact model."""
    sums: dict[tuple[str, float], list[tuple[float, ...]]] = {setting: [] for setting in SETTINGS}
    with Bundle.open(path) as bundle:
        layers = bundle.config.num_hidden_layers
    for layer in range(layers):
        first = () if layer == layers - 1 else (Step("early_exit", (("layers", layer + 1),)),)
        with ExitStack() as stack:
            session = opened(stack, path, recipe({"eps": 0.0, "instead": "scale"}, *first), kv)
            data = scores(session, layer)
            for window in range(windows):
                sequence, mine = session.new_sequence(), ids[window * WINDOW : (window + 1) * WINDOW]
                session.prefill(sequence, mine[:PROMPT])
                for token in mine[PROMPT:]:
                    session.decode([sequence], [token])
                    own = data[..., : len(sequence)].astype(np.float64)
                    weights = np.exp(own - own.max(axis=2, keepdims=True))
                    weights /= weights.sum(axis=2, keepdims=True)
                    for setting in SETTINGS:
                        sums[setting].append(kept(weights, *setting))
                session.release(sequence)
    return {setting: np.mean(rows, axis=0) for setting, rows in sums.items()}


def divergences(path: Path, kv: str, stream: Stream) -> Iterator[tuple[str, Any]]:
    """Of each setting and replacement: its name and the divergence from the bundle with all rows."""
    with ExitStack() as outer:
        exact = opened(outer, path, Recipe(), kv)
        tried = [(kind, value, instead, 0) for kind, value in SETTINGS for instead in INSTEAD]
        tried += [("top", 16, "mean", 1), ("top", 32, "mean", 1), ("eps", 0.03, "mean", 1)]
        for kind, value, instead, first in tried:
            with ExitStack() as stack:
                session = opened(stack, path, recipe({kind: value, "instead": instead, "exact": first}), kv)
                found = evaluate(session, stream, reference=exact, window=WINDOW, prompt=PROMPT).divergence
                name = f"{kind}:{value:g}", instead + (f", first {first} exact" if first else "")
                yield " | ".join(name), found


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--separator", default="\f")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--kv", default="int8")
    given = parser.parse_args(arguments)
    for model in given.models:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "bundle"
            convert(model, path, weights="int8")
            tokenizer = Tokenizer.open(path)
            text = given.text.read_text(encoding="utf-8")
            stream = token_stream(tokenizer, text, given.separator, given.windows * WINDOW)
            print(f"\n{model.name}, KV {given.kv}, {given.windows} windows\n\n"
                  "| setting | mass | rows of a head | of a KV head | blocks of a KV head | their mass |\n"
                  "|---|---|---|---|---|---|")
            for (kind, value), row in choices(path, given.kv, list(stream.ids), given.windows).items():
                mass, rows, union, blocks, whole = row
                print(f"| {kind}:{value:g} | {mass:.3f} | {rows:.0f} | {union:.0f} | {blocks:.1f} | {whole:.3f} |",
                      flush=True)
            print("\n| setting | instead | KLD mean | 99 % | same top token |\n|---|---|---|---|---|")
            for name, found in divergences(path, given.kv, stream):
                print(f"| {name} | {found.kld_mean:.5f} | {found.kld_p99:.4f} | {found.same_top:.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
