"""Quality of each storage type of weights and KV cache: perplexity and divergence from float32, on held-out text.

    python benchmarks/quality.py MODEL_DIR... --text FILE... [--separator TEXT] [--max-tokens N] [--out FILE]
    python benchmarks/quality.py MODEL_DIR --gguf FILE... --text FILE...

Each checkpoint directory is converted to float32, float16, int8 and 4-bit bundles in a temporary folder, and
`edgeinfer.quality.evaluate` compares each with the float32 bundle on a float32 KV cache, in windows of 512 tokens that
do not see each other. GGUF files of the same model are compared, too, with their codes as they are. The exit code is 1
if a row is over its bound (`BOUNDS`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import machine, table
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.quality.evaluate import OUTPUT_ROWS, Divergence, Evaluation, evaluate, token_stream
from edgeinfer.runtime import Session
from edgeinfer.text import Tokenizer

WINDOW = 512
SMALL_MODEL = 1_000_000
"""Parameters under which a model loses more by 4 bits: there is less redundancy to lose."""


@dataclass(frozen=True)
class Variant:
    """One storage of a model."""

    weights: str
    """f32, f16, int8 or q4; of a GGUF file, the type that its name ends with."""
    group_size: int
    """Weights that share a scale (int8, q4)."""
    kv: str
    """Type of the KV cache."""
    file: Path | None = None
    """The GGUF file that is measured instead of the checkpoint."""

    @classmethod
    def of_file(cls, file: Path) -> Variant:
        """A GGUF file as it is."""
        return cls(file.stem.rpartition("-")[2], 0, "f32", file)

    @property
    def name(self) -> str:
        """Name of the weights in tables: ``q4 g32``."""
        if self.file:
            return f"{self.weights}, imported"
        return f"{self.weights} g{self.group_size}" if self.weights in ("int8", "q4") else self.weights


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    text: str
    variant: Variant
    bundle_bytes: int
    result: Evaluation

    @property
    def divergence(self) -> Divergence:
        """Divergence from the float32 model; every row has one."""
        assert self.result.divergence is not None
        return self.result.divergence

    @property
    def change(self) -> float:
        """Relative change of the perplexity."""
        return self.result.perplexity / self.divergence.reference_perplexity - 1


REFERENCE = Variant("f32", 32, "f32")
VARIANTS = (
    Variant("f32", 32, "f16"),
    Variant("f32", 32, "int8"),
    Variant("f16", 32, "f32"),
    Variant("int8", 32, "f32"),
    Variant("int8", 128, "f32"),
    Variant("q4", 32, "f32"),
    Variant("q4", 64, "f32"),
    Variant("q4", 128, "f32"),
    Variant("q4", 32, "int8"),
)
"""Variants; the last one is the default of `edgeinfer convert` and `edgeinfer run`."""
BOUNDS = {"f16": 0.0005, "int8": 0.005, "q4": 0.04, "kv": 0.002}
"""Largest relative change of the perplexity: of weights (4 bits: in groups of 32) and of an int8 KV cache."""
SMALL_BOUNDS = {**BOUNDS, "q4": 0.09}
"""The same for models under SMALL_MODEL parameters."""


def open_session(stack: ExitStack, bundle: Path, kv: str, window: int = WINDOW, threads: int | None = None) -> Session:
    """A session for scoring, closed by the stack."""
    config = RuntimeConfig(ctx=window, kv=kv, threads=threads, outputs=OUTPUT_ROWS)
    session = Session(stack.enter_context(Bundle.open(bundle)), config)
    stack.callback(session.close)
    return session


def parameters(bundle: Path) -> int:
    """Weights of a model."""
    with Bundle.open(bundle) as opened:
        return sum(_matmul(tensor.shape) for tensor in opened.tensors.values())


def measure(
    bundle: Path, kv: str, reference: Path, text: str, *, reference_kv: str = "f32", separator: str = "\f",
    max_tokens: int | None = None, window: int = WINDOW, threads: int | None = None,
) -> Evaluation:
    """Evaluate a bundle on a text against another one of the same model."""
    with ExitStack() as stack:
        session = open_session(stack, bundle, kv, window, threads)
        other = open_session(stack, reference, reference_kv, window, threads)
        tokenizer = Tokenizer.open(reference, {"bos_token_id": session.model.bos_token_id})
        stream = token_stream(tokenizer, text, separator, max_tokens)
        return evaluate(session, stream, reference=other, window=window)


def convert_all(checkpoint: Path, folder: Path, variants: Iterable[Variant]) -> dict[Variant, Path]:
    """Convert a checkpoint, or its GGUF files, to the bundles that the variants and the reference need."""
    bundles: dict[Variant, Path] = {}
    for variant in (REFERENCE, *variants):
        bundle = folder / variant.name.replace(" ", "-")
        if not bundle.exists():
            stored = {} if variant.file else {"weights": variant.weights, "group_size": variant.group_size}
            convert(variant.file or checkpoint, bundle, **stored)
        bundles[variant] = bundle
    return bundles


def run(
    checkpoint: Path, texts: dict[str, str], *, separator: str = "\f", max_tokens: int | None = None,
    variants: Iterable[Variant] | None = None, threads: int | None = None,
) -> tuple[list[Row], list[str]]:
    """Measure variants of a checkpoint (all by default) on texts by name; returns rows, and those over their bound."""
    variants, rows = tuple(VARIANTS if variants is None else variants), []
    with tempfile.TemporaryDirectory() as folder:
        bundles = convert_all(checkpoint, Path(folder), variants)
        small = parameters(bundles[REFERENCE]) < SMALL_MODEL
        for name, text in texts.items():
            for variant in variants:
                result = measure(bundles[variant], variant.kv, bundles[REFERENCE], text, separator=separator,
                                 max_tokens=max_tokens, threads=threads)
                size = sum(file.stat().st_size for file in bundles[variant].iterdir())
                rows.append(Row(checkpoint.name, name, variant, size, result))
                print(line(rows[-1]), file=sys.stderr, flush=True)
    return rows, over_bounds(rows, SMALL_BOUNDS if small else BOUNDS)


def over_bounds(rows: list[Row], bounds: dict[str, float]) -> list[str]:
    """A sentence for each row whose change is over its bound: one storage at a time, 4 bits in groups of 32."""
    found = []
    for row in rows:
        variant, bound = row.variant, None
        if variant.kv == "f32" and (variant.group_size == 32 or variant.weights == "int8"):
            bound = bounds.get(variant.weights)
        elif variant.weights == "f32":
            bound = bounds["kv"]
        if bound is not None and row.change > bound:
            stored = f"{variant.name} with {variant.kv} KV"
            found.append(f"{row.text}: {stored} changes the perplexity by {row.change:+.2%}, more than {bound:.2%}.")
    return found


def line(row: Row) -> str:
    """One line of the table."""
    name = f"**{row.variant.name}**" if row.variant == VARIANTS[-1] else row.variant.name
    cells = (
        name, row.variant.kv, f"{row.bundle_bytes / 1e6:.1f}", f"{row.result.perplexity:.3f}", f"{row.change:+.2%}",
        f"{row.divergence.kld_mean:.5f}", f"{row.divergence.kld_p99:.4f}", f"{row.divergence.same_top:.1%}",
    )
    return f"| {' | '.join(cells)} |"


def report(rows: list[Row]) -> str:
    """Tables in Markdown, one per model and text, with the machine and the versions."""
    out = [f"Measured on {machine()}."]
    for model, text in dict.fromkeys((row.model, row.text) for row in rows):
        part = [row for row in rows if (row.model, row.text) == (model, text)]
        reference, tokens = part[0].divergence.reference_perplexity, part[0].result.tokens
        exact = f"{tokens} tokens; float32 throughout: perplexity {reference:.3f}."
        out += ["", f"### {model} on {text}", "", exact, "", table(
            "weights | KV | bundle, MB | perplexity | change | KLD mean | KLD 99 % | same top token", map(line, part))]
    return "\n".join(out) + "\n"


def _matmul(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Quality of quantised weights and KV caches against float32.")
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_DIR", help="checkpoint directories")
    parser.add_argument("--gguf", nargs="+", type=Path, default=[], metavar="FILE", help="files of the only model")
    parser.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE", help="held-out texts (UTF-8)")
    parser.add_argument("--separator", default="\f", help=r"between documents, such as \n\n\n (default: form feeds)")
    parser.add_argument("--max-tokens", type=int, help="most tokens of each text (default: all)")
    parser.add_argument("--threads", type=int, help="worker threads (default: physical cores)")
    parser.add_argument("--out", type=Path, help="write the tables to this file instead of printing them")
    given = parser.parse_args(arguments)
    if given.gguf and len(given.models) > 1:
        parser.error(f"--gguf is for one model, but {len(given.models)} are given; run the script once for each.")
    variants = (*VARIANTS, *map(Variant.of_file, given.gguf))
    separator = given.separator.replace("\\n", "\n").replace("\\f", "\f")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in given.text}
    rows: list[Row] = []
    over: list[str] = []
    for model in given.models:
        more, wrong = run(model, texts, separator=separator, max_tokens=given.max_tokens, variants=variants,
                          threads=given.threads)
        rows += more
        over += [f"{model.name} on {sentence}" for sentence in wrong]
    tables = report(rows)
    if given.out:
        given.out.write_text(tables, encoding="utf-8")
    else:
        print(tables, end="")
    for sentence in over:
        print(sentence, file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
