"""The screened output head: what it computes, reads, changes and saves, by the rank of its estimates.

    python benchmarks/screened_head.py MODEL --text FILE --held-out FILE [--ranks 64,128,192] [--tokens N]
    python benchmarks/screened_head.py MODEL --speed [--rank R] [--shares 0.05,0.15,0.3]

The first makes screens of a bundle's head from a text, and decodes another text with and without them. The second is
about speed where the weights mean nothing (random bundles of real shapes): it lets a share of the head's tiles be
computed for each token, whatever their logits, and decodes with and without in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/screened_head.py` in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from edgeinfer.bundle import SCREEN_FILE, Bundle, BundleWriter, HeadScreen, weights_identity  # noqa: E402
from edgeinfer.config import GenerationConfig, Recipe, RuntimeConfig  # noqa: E402
from edgeinfer.engine import Sampler  # noqa: E402
from edgeinfer.evaluate import token_stream  # noqa: E402
from edgeinfer.graph import OUTER_TYPE, inner_type, place_of_head  # noqa: E402
from edgeinfer.quant import TILE_ROWS  # noqa: E402
from edgeinfer.runner import DECODE  # noqa: E402
from edgeinfer.runtime import Session, open_plain  # noqa: E402
from edgeinfer.sparse import make_screen  # noqa: E402
from edgeinfer.technique import recipe_with  # noqa: E402
from edgeinfer.text import Tokenizer  # noqa: E402

WINDOW, OUTPUTS, TURN, ROUNDS = 512, 64, 16, 30
SCREENED = recipe_with(head="screened")


@contextmanager
def with_screen(bundle: Bundle, screen: HeadScreen):  # type: ignore[no-untyped-def]
    """Yield the path of the bundle with a screen, which is there for a while."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m"
        with BundleWriter(path, bundle.config, bundle.header.quantisation) as writer:
            for entry in bundle.header.tensors:
                writer.add(entry.name, entry.type, entry.shape, bundle.weights[entry.offset :][: entry.nbytes])
            content = b"".join(screen.pack(weights_identity(bundle.header.tensors)))
            writer.add_file(SCREEN_FILE, content, "screen")
        yield path


def opened(stack: ExitStack, path: Path, recipe: Recipe, threads: int | None, outputs: int = 1,
           host: Session | None = None) -> Session:
    """A session that the stack closes."""
    config = RuntimeConfig(ctx=WINDOW, threads=threads, outputs=outputs, recipe=recipe)
    session = Session(stack.enter_context(Bundle.open(path)), config, host=host)
    stack.callback(session.close)
    return session


def head_bytes(session: Session) -> int:
    """Bytes of the head."""
    weight = place_of_head(session.graph).head.weight
    return session.graph.types[weight.name].nbytes(weight.shape)


def quality(path: Path, text: str, held_out: str, ranks: list[int | None], tokens: int, threads: int | None) -> None:
    """Print a row for each rank."""
    print("| rank | head computed | 90 % | most | bytes | KLD mean | KLD 99 % | same largest logit |\n"
          "|---:|---:|---:|---:|---:|---:|---:|---:|")
    with ExitStack() as outer:
        bundle = outer.enter_context(Bundle.open(path))
        plain = open_plain(path, WINDOW, threads)
        outer.callback(plain.close)
        tokenizer = Tokenizer.open(path, {"bos_token_id": bundle.config.bos_token_id})
        fitting = token_stream(tokenizer, text, max_tokens=8 * tokens).ids
        measured = token_stream(tokenizer, held_out, max_tokens=tokens).ids
        for rank in ranks:
            screen = make_screen(plain, bundle, fitting, rank=rank)
            with with_screen(bundle, screen) as made, ExitStack() as stack:
                exact = opened(stack, path, Recipe(), threads, OUTPUTS)
                screened = opened(stack, made, SCREENED, threads, OUTPUTS, exact)
                shares, klds, same = compared(screened, exact, measured)
                read = shares.mean() + screen.nbytes / head_bytes(plain)
                chosen = "" if rank else " (chosen)"
                print(f"| {screen.rank}{chosen} | {shares.mean():.1%} | {np.quantile(shares, 0.9):.1%} "
                      f"| {shares.max():.1%} | {read:.1%} | {klds.mean():.5f} | {np.quantile(klds, 0.99):.4f} "
                      f"| {same:.2%} |", flush=True)


def compared(screened: Session, exact: Session, ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, float]:
    """Share of the tiles that each token computes, its divergence, and for how many the largest logit is the same."""
    sampler = Sampler(GenerationConfig(temperature=0), screened.model.vocab_size, 1)
    shares, klds, same = [], [], []
    for start in range(0, len(ids), WINDOW):
        part, sequences = list(ids[start : start + WINDOW]), (screened.new_sequence(), exact.new_sequence())
        for (_, have), (_, want) in zip(screened.score(sequences[0], part, DECODE, sampler.address),
                                        exact.score(sequences[1], part), strict=True):
            width = have.shape[1] // TILE_ROWS * TILE_ROWS
            shares.append((have == want)[:, :width].reshape(len(have), -1, TILE_ROWS).all(axis=2).mean(axis=1))
            p, q = (np.log(softmax(rows)) for rows in (want, have))
            klds.append((np.exp(p) * (p - q)).sum(axis=1))
            same.append(have.argmax(axis=1) == want.argmax(axis=1))
        screened.release(sequences[0])
        exact.release(sequences[1])
    return np.concatenate(shares), np.concatenate(klds), float(np.concatenate(same).mean())


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def speed(path: Path, rank: int | None, shares: list[float], threads: int | None) -> None:
    """Print tokens/s with and without a screen that lets a share of the tiles be computed."""
    print("| head computed | bytes of the head | tokens/s | ratio (middle half) |\n|---:|---:|---:|---:|")
    with ExitStack() as outer:
        bundle = outer.enter_context(Bundle.open(path))
        for share in shares:
            with ExitStack() as stack:
                exact = opened(stack, path, Recipe(), threads)
                screen = random_screen(exact, rank or bundle.config.hidden_size // 2, share)
                screened = opened(stack, stack.enter_context(with_screen(bundle, screen)), SCREENED, threads, 1, exact)
                runs = [Decoding(one) for one in (exact, screened)]
                times = np.array([[run.turn() for run in runs] for _ in range(ROUNDS)])
                low, middle, high = np.quantile(times[:, 0] / times[:, 1], (0.25, 0.5, 0.75))
                if share == shares[0]:
                    print(f"| exact | 100 % | {TURN / statistics.median(times[:, 0]):.1f} | 1 |")
                print(f"| {share:.0%} | {share + screen.nbytes / head_bytes(exact):.1%} "
                      f"| {TURN / statistics.median(times[:, 1]):.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |",
                      flush=True)


def random_screen(session: Session, rank: int, share: float) -> HeadScreen:
    """A screen that says nothing: some tiles can always matter, the others never."""
    hidden, vocab = session.model.hidden_size, session.model.vocab_size
    head = session.graph.types[place_of_head(session.graph).head.weight.name]
    rng, inner = np.random.default_rng(1), inner_type(head)
    bounds = np.where(np.repeat(rng.random(-(-vocab // TILE_ROWS)) < share, TILE_ROWS)[:vocab], 1e30, 0)
    matrices = [np.zeros(kind.nbytes(shape), np.uint8) for kind, shape in
                ((inner, (hidden, hidden)), (OUTER_TYPE, (vocab, rank)))]
    return HeadScreen(rank, share, *matrices, bounds.astype(np.float32))


class Decoding:
    """A text that goes on in turns."""

    def __init__(self, session: Session):
        self._session, self._sequence = session, session.new_sequence()
        self._sampler = Sampler(GenerationConfig(temperature=0), session.model.vocab_size, 1)
        self.turn()

    def turn(self) -> float:
        """Decode some tokens; returns the seconds."""
        self._session.truncate(self._sequence, 0)
        start = time.perf_counter()
        for i in range(TURN):
            self._session.decode([self._sequence], [i + 5], None, [self._sampler.address])
        return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="What a screened output head computes, changes and saves.")
    parser.add_argument("model", type=Path, help="bundle without a screen")
    parser.add_argument("--text", type=Path, help="what screens are made from (UTF-8)")
    parser.add_argument("--held-out", type=Path, help="what they are measured on")
    parser.add_argument("--ranks", default="", help="with commas; by default the one that reads least")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens to measure on")
    parser.add_argument("--speed", action="store_true", help="measure speed with screens that say nothing")
    parser.add_argument("--rank", type=int, help="of these; by default half of hidden_size")
    parser.add_argument("--shares", default="0.05,0.15,0.3", help="of the head that they let be computed")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args(arguments)
    if given.speed:
        speed(given.model, given.rank, [float(share) for share in given.shares.split(",")], given.threads)
        return 0
    if given.text is None or given.held_out is None:
        parser.error("give --text and --held-out, or --speed")
    ranks = [int(rank) for rank in given.ranks.split(",")] if given.ranks else [None]
    quality(given.model, given.text.read_text(encoding="utf-8"), given.held_out.read_text(encoding="utf-8"), ranks,
            given.tokens, given.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
