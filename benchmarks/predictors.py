"""Predictors of live neurons: divergence against the bytes that a token reads of the FFNs.

    python benchmarks/predictors.py MODEL --text FILE [--held-out FILE] [--kinds sign,lowrank:64] [--tokens N]

The model (a checkpoint, or a bundle by neuron) is walked over the text, each predictor fitted to what it does, and its
divergence from the dense model measured on the held-out text (by default the end of the text) at several prices. Scores
and masks are NumPy's, everything else is the model's own program. Bytes are those of the FFNs with their predictor over
those of the dense FFNs in layout neuron, and in layout tile16, whose rows have no padding to lines.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/predictors.py` in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from edgeinfer.bundle import Bundle, is_bundle  # noqa: E402
from edgeinfer.converters import convert  # noqa: E402
from edgeinfer.evaluate import evaluate, token_stream  # noqa: E402
from edgeinfer.graph import WeightType  # noqa: E402
from edgeinfer.runtime import open_plain  # noqa: E402
from edgeinfer.sparse import PRICES, Tally, ffns, fit, parts, predicted, read_bytes_share, scorer  # noqa: E402
from edgeinfer.text import Tokenizer  # noqa: E402

WINDOW = 512
HEAD = ("| predictor | recall | neurons computed | inactive skipped | perplexity | KLD mean | KLD 99 % "
        "| bytes, of neuron | of tile16 |\n|---|---|---|---|---|---|---|---|---|")


def table(path: Path, text: str, held_out: str, kinds: list[str], tokens: int, step: int) -> None:
    """Print a row for each predictor and price."""
    with ExitStack() as stack:
        bundle = stack.enter_context(Bundle.open(path))
        session = open_plain(path, WINDOW, outputs=64)
        stack.callback(session.close)
        reference = open_plain(path, WINDOW, host=session, outputs=64)
        stack.callback(reference.close)
        tokenizer = Tokenizer.open(path, {"bos_token_id": bundle.config.bos_token_id})
        fitting = token_stream(tokenizer, text, max_tokens=8 * tokens)
        measured = token_stream(tokenizer, held_out, max_tokens=tokens)
        networks = ffns(session.graph)
        weights = [ffn.weight for ffn in networks]
        stored = [bundle.weight_type(weight.name) for weight in weights]
        dense = sum(kind.nbytes(weight.shape) for kind, weight in zip(stored, weights, strict=True))
        tiles = sum(3 * WeightType(kind.dtype, kind.group_size).nbytes((weight.shape[0], weight.shape[2]))
                    for kind, weight in zip(stored, weights, strict=True))
        gates = [parts(bundle, ffn).gate for ffn in networks]
        print(f"{len(fitting.ids)} tokens fitted, {len(measured.ids)} measured.\n\n{HEAD}")
        for name in kinds:
            kind, _, rank = name.partition(":")
            fitted = fit(session, bundle, networks, fitting.ids, kind, rank=int(rank) if rank else None)
            for i in range(0, len(PRICES), step):
                predictor = fitted.at(i)
                scores = [scorer(predictor, j, gate, ffn.activation)
                          for j, (gate, ffn) in enumerate(zip(gates, networks, strict=True))]
                runner, tallies = predicted(session, networks, scores, predictor.thresholds)
                result = evaluate(runner, measured, reference=reference, window=WINDOW)
                total, apart = sum(tallies, Tally()), result.divergence
                assert apart is not None
                share = read_bytes_share(predictor, total, dense)
                size = f" rank {predictor.rank}" if predictor.rank else ""
                print(f"| {kind}{size}, {PRICES[i]:.1e} | {total.recall:.3f} | {total.read_share:.1%} "
                      f"| {total.skipped:.1%} | {result.perplexity / apart.reference_perplexity - 1:+.2%} "
                      f"| {apart.kld_mean:.5f} | {apart.kld_p99:.4f} | {share:.1%} | {share * dense / tiles:.1%} |",
                      flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Divergence of predictors against bytes read.")
    parser.add_argument("model", type=Path, help="checkpoint directory, or a bundle by neuron")
    parser.add_argument("--text", type=Path, required=True, help="what predictors are fitted to (UTF-8)")
    parser.add_argument("--held-out", type=Path, help="what they are measured on (default: the end of the text)")
    parser.add_argument("--kinds", default="sign,lowrank", help="kinds, lowrank with its rank as lowrank:64")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens measured; 8 times as many are fitted")
    parser.add_argument("--step", type=int, default=2, help="every n-th price")
    given = parser.parse_args(arguments)
    text = given.text.read_text(encoding="utf-8")
    cut = len(text) * 4 // 5
    held_out = given.held_out.read_text(encoding="utf-8") if given.held_out else text[cut:]
    with tempfile.TemporaryDirectory() as folder:
        path = given.model
        if not is_bundle(path):
            path = Path(folder) / "bundle"
            convert(given.model, path, ffn_layout="neuron")
        table(path, text if given.held_out else text[:cut], held_out, given.kinds.split(","), given.tokens, given.step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
