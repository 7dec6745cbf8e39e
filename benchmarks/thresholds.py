"""SwiGLU with a threshold a layer: what leaving out a share of the neurons costs in quality, and gains in speed.

    python benchmarks/thresholds.py quality BUNDLE --text FILE --held-out FILE
    python benchmarks/thresholds.py speed --shape tinyllama-1.1b --bundles FOLDER

Each layer's threshold is the quantile of its gates' activations that leaves out the share asked for (CATS, arXiv
2404.08763). Quality is that of a model by neuron, with masks between the records of the dense program; speed that of
random models of a real shape, with the kernels, against the dense bundle in tiles, in turns.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/thresholds.py` in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

from benchmarks.sparse_speed import Program, measure, watch  # noqa: E402
from edgeinfer.bundle import PREDICTOR_FILE, Bundle, BundleWriter, Predictor, weights_identity  # noqa: E402
from edgeinfer.config import RuntimeConfig  # noqa: E402
from edgeinfer.converters import SHAPES, write_random_bundle  # noqa: E402
from edgeinfer.evaluate import evaluate, token_stream  # noqa: E402
from edgeinfer.memory_planner import default_threads  # noqa: E402
from edgeinfer.runtime import Rows, Session, capture, everywhere, open_plain  # noqa: E402
from edgeinfer.sparse import Tally, ffns, parts, predicted, scorer  # noqa: E402
from edgeinfer.technique import recipe_with  # noqa: E402
from edgeinfer.text import Tokenizer  # noqa: E402

ZEROS = (0.3, 0.4, 0.5)
WATCHED = 128


def limits(bundle: Bundle, session: Session, ids: list[int]) -> list[list[float]]:
    """Thresholds by layer, for each share of zeros."""
    networks, found = ffns(session.graph), []
    rows = {ffn.op: Rows(ffn.x, len(ids)) for ffn in networks}
    capture(session, ids, {op: [one] for op, one in rows.items()})
    for ffn in networks:
        scores = scorer(Predictor("threshold", 0), 0, parts(bundle, ffn).gate, ffn.activation)(rows[ffn.op].rows)
        found.append([float(np.quantile(scores, zeros)) for zeros in ZEROS])
    return found


def quality(path: Path, text: str, held_out: str, tokens: int) -> None:
    """Print a row for each share."""
    print("| zeros | neurons computed | perplexity | KLD mean | KLD 99 % | bytes |\n|---:|---:|---:|---:|---:|---:|")
    with ExitStack() as stack:
        bundle = stack.enter_context(Bundle.open(path))
        session = open_plain(path, 512, outputs=64)
        stack.callback(session.close)
        reference = open_plain(path, 512, host=session, outputs=64)
        stack.callback(reference.close)
        tokenizer, networks = Tokenizer.open(path, {"bos_token_id": bundle.config.bos_token_id}), ffns(session.graph)
        fitting, measured = (token_stream(tokenizer, one, max_tokens=tokens) for one in (text, held_out))
        found = limits(bundle, session, list(fitting.ids))
        scores = [scorer(Predictor("threshold", 0), 0, parts(bundle, ffn).gate, ffn.activation) for ffn in networks]
        for i, zeros in enumerate(ZEROS):
            runner, tallies = predicted(session, networks, scores, [np.array([one[i]], np.float32) for one in found])
            result = evaluate(runner, measured, reference=reference, window=512)
            chosen, apart = sum(tallies, Tally()).read_share, result.divergence
            assert apart is not None
            print(f"| {zeros:.0%} | {chosen:.1%} | {result.perplexity / apart.reference_perplexity - 1:+.2%} "
                  f"| {apart.kld_mean:.5f} | {apart.kld_p99:.4f} | {(1 + 2 * chosen) / 3:.1%} |", flush=True)


def make_bundles(folder: Path, shape: str, layers: int | None) -> tuple[Path, Path]:
    """Return random bundles in tiles and by neuron, with a predictor whose thresholds are to be set."""
    config = SHAPES[shape]
    if layers:
        words = config.vocab_size * layers // config.num_hidden_layers
        config = replace(config, num_hidden_layers=layers, vocab_size=words)
    name = f"{shape}-{config.num_hidden_layers}-silu"
    tiles, made, plain = (folder / f"{name}{end}" for end in ("-tile16", "", "-plain"))
    if not made.exists():
        write_random_bundle(config, tiles, overwrite=True)
        write_random_bundle(config, plain, ffn_layout="neuron", overwrite=True)
        limits = (np.zeros(1, np.float32),) * config.num_hidden_layers
        with Bundle.open(plain) as bundle, BundleWriter(made, config, bundle.quantisation) as writer:
            for entry in bundle.header.tensors:
                writer.add(entry.name, entry.type, entry.shape, bundle.weights[entry.offset :][: entry.nbytes])
            content = Predictor("threshold", 0, thresholds=limits).pack(weights_identity(bundle.header.tensors))
            writer.add_file(PREDICTOR_FILE, b"".join(content), "predictor")
    return tiles, made


def speed(tiles: Path, made: Path, threads: int, seconds: float) -> None:
    """Print tokens/s dense and with each share left out."""
    with ExitStack() as stack:
        with Bundle.open(made) as bundle:
            session = open_plain(made, WATCHED, threads)
            ids = np.random.default_rng(1).integers(3, session.model.vocab_size, WATCHED)
            found = limits(bundle, session, list(map(int, ids)))
            session.close()
        programs: list[Program] = []
        for name, path, mode in (("dense, tile16", tiles, "off"), ("dense, by neuron", made, "off"),
                                 *((f"{zeros:.0%} zeros", made, "predict") for zeros in ZEROS)):
            config = RuntimeConfig(ctx=512, threads=threads, prefill_chunk=WATCHED,
                                   recipe=everywhere(recipe_with(sparse=mode)))
            session = Session(Bundle.open(path), config, host=programs[0].session if programs else None)
            stack.callback(session.close)
            programs.append(Program(name, session, mode))
            for layer, own in enumerate(found) if mode == "predict" else ():
                place = session.plan.places[f"layers.{layer}.predictor.thresholds"]
                memory = session.executor.regions[place.region][place.offset :][:4]
                memory.view(np.float32)[0] = own[len(programs) - 3]
            if mode == "predict":
                programs[-1].fired = watch(session)[0].mean() / WATCHED
        measure(programs, 1000, 8, seconds)
        dense = min(programs[:2], key=lambda program: median(program.seconds))
        print(f"Against {dense.name}.\n\n| program | neurons computed | tokens/s | ratio |\n|---|---:|---:|---:|")
        for program in programs:
            ratios = [a / b for a, b in zip(dense.seconds, program.seconds, strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            print(f"| {program.name} | {program.fired:.1%} | {1 / median(program.seconds):.1f} "
                  f"| {middle:.2f} ({low:.2f} to {high:.2f}) |")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Thresholds for SwiGLU: quality and speed.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("quality")
    one.add_argument("model", type=Path, help="bundle by neuron")
    one.add_argument("--text", type=Path, required=True)
    one.add_argument("--held-out", type=Path, required=True)
    one.add_argument("--tokens", type=int, default=4096)
    two = commands.add_parser("speed")
    two.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    two.add_argument("--layers", type=int)
    two.add_argument("--bundles", type=Path, default=Path("sparse-speed"))
    two.add_argument("--make-only", action="store_true")
    two.add_argument("--seconds", type=float, default=60)
    two.add_argument("-t", "--threads", type=int, default=default_threads())
    given = parser.parse_args(arguments)
    if given.command == "quality":
        quality(given.model, given.text.read_text(encoding="utf-8"), given.held_out.read_text(encoding="utf-8"),
                given.tokens)
        return 0
    paths = make_bundles(given.bundles, given.shape, given.layers)
    if not given.make_only:
        speed(*paths, given.threads, given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
