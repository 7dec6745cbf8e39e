"""Prompt token pruning: what it changes in the predictions behind a prompt, beside other ways to choose as many tokens.

    python benchmarks/lazy_quality.py MODEL... --text FILE [--prompts N] [--prompt TOKENS] [--after TOKENS]
    python benchmarks/lazy_quality.py MODEL... --text FILE --repeat [--prompts N] [--prompt TOKENS] [--after TOKENS]
    python benchmarks/lazy_quality.py MODEL --speed [--prompt TOKENS] [--rounds N] [--keep 0.5,0.25,0.125 ...]

The first walks prompts from a text with all tokens in all layers and pruned, and then the text's next tokens one by
one, in decode role; divergences are those of the predictions after the prompt and after each of these tokens.
Chosen are: by importance; by chance; the latest; and, as a bound on what revival could give, by the importance to each
new token anew: the prompt is computed again before every token, among those tokens alone that it chooses.

The second asks whether a model can retrieve at all: prompts have a passage near their beginning and its first tokens
again at their end, and the loss of what follows is compared with that behind prompts with another passage in its place;
passages are of the text, or of random tokens. Where the first copy helps, that loss is measured behind pruned prompts.

The third is about the time to the first token, where the weights mean nothing: the plain prompt and the pruned ones in
turns, by processor time and by the clock, with the share of tokens times layers that was computed, and the time of a
token that is decoded behind each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/lazy_quality.py` in a checkout that is not installed
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from edgeinfer.bundle import Bundle  # noqa: E402
from edgeinfer.config import RuntimeConfig  # noqa: E402
from edgeinfer.evaluate import token_stream  # noqa: E402
from edgeinfer.models import resolve  # noqa: E402
from edgeinfer.pruning import Schedule  # noqa: E402
from edgeinfer.runtime import Session  # noqa: E402
from edgeinfer.runtime.stages import most_important  # noqa: E402
from edgeinfer.technique import configured  # noqa: E402
from edgeinfer.text import Tokenizer  # noqa: E402

Rows = NDArray[np.int64]
Choose = Callable[[NDArray[np.float32], Rows, int], Rows]
SHARES = ((0.7, 0.49), (0.5, 0.25), (0.3, 0.15))
CUE, LEAST_GAIN = 8, 0.1
"""Tokens of a passage that a prompt repeats; nats that the passage has to be worth before pruning is measured on it."""
DECODED = 8
"""Tokens decoded behind a prompt for its time per token."""


class Figures(NamedTuple):
    """Of one way to choose, over all predictions."""

    kld: float
    worst: float
    same: float


def by_chance(all_but: bool) -> Choose:
    """Choose as many tokens at random; `all_but` those that always stay, else all but the last one."""
    rng = np.random.default_rng(0)

    def choose(weight: NDArray[np.float32], rows: Rows, most: int) -> Rows:
        stays = np.isinf(weight) if all_but else np.arange(len(rows)) == len(rows) - 1
        return most_important(np.where(stays, np.inf, rng.random(len(rows))).astype(np.float32), rows, most)

    return choose


def the_latest(weight: NDArray[np.float32], rows: Rows, most: int) -> Rows:
    """Drop the oldest."""
    return most_important(np.where(np.isinf(weight), weight, rows).astype(np.float32), rows, most)


WAYS = {"importance": most_important, "chance, but the first and the last 16": by_chance(True),
        "chance": by_chance(False), "the latest": the_latest}


@contextmanager
def opened(path: Path, ctx: int, kv: str = "int8", lazy: Schedule | None = None, threads: int | None = None,
           host: Session | None = None) -> Iterator[Session]:
    """A session."""
    config = configured(RuntimeConfig(ctx=ctx, kv=kv, threads=threads), {"lazy": lazy})
    session = Session(Bundle.open(path), config, host=host)
    try:
        yield session
    finally:
        session.close()


def predictions(session: Session, ids: list[int], prompt: int) -> NDArray[np.float32]:
    """Logits after the prompt and after each token behind it."""
    sequence = session.new_sequence()
    rows = [session.prefill(sequence, ids[:prompt]).copy()]
    rows += [session.decode([sequence], [token])[0].copy() for token in ids[prompt:]]
    session.release(sequence)
    return np.stack(rows)


def chosen_anew(session: Session, ids: list[int], prompt: int) -> NDArray[np.float32]:
    """The same where every token chooses from the whole prompt: the tokens after it go on besides."""
    assert session.prefill_strategy
    keep, rows = session.prefill_strategy.schedule.keep, []
    n_stages = len(keep)
    for n in range(prompt, len(ids) + 1):
        stage = iter(range(n_stages))

        def choose(weight: NDArray[np.float32], rows: Rows, most: int, n: int = n,
                   stage: Iterator[int] = stage) -> Rows:
            most = -int(-keep[next(stage)] * prompt // 1) + n - prompt
            return most_important(np.where(rows >= prompt, np.inf, weight).astype(np.float32), rows, most)

        session.prefill_strategy.choose = choose
        sequence = session.new_sequence()
        rows.append(session.prefill(sequence, ids[:n]).copy())
        session.release(sequence)
    return np.stack(rows)


def compared(exact: list[NDArray[np.float32]], other: list[NDArray[np.float32]]) -> Figures:
    """Divergences over all predictions of all prompts."""
    p, q = (_log_softmax(np.concatenate(rows)) for rows in (exact, other))
    klds = np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0)
    return Figures(float(klds.mean()), float(np.percentile(klds, 99)), float((p.argmax(1) == q.argmax(1)).mean()))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def quality(path: Path, text: str, args: argparse.Namespace) -> None:
    """Print the table of one model."""
    tokenizer, length = Tokenizer.open(path), args.prompt + args.after
    stream = list(token_stream(tokenizer, text).ids)
    step = max(length, (len(stream) - length) // max(args.prompts, 1))
    texts = [stream[at : at + length] for at in range(0, len(stream) - length, step)][: args.prompts]
    with opened(path, length, args.kv) as session:
        layers = session.model.num_hidden_layers
        exact = [predictions(session, ids, args.prompt) for ids in texts]
    n = sum(map(len, exact))
    print(f"\n{path.name}: {len(texts)} prompts of {args.prompt} tokens, {n} predictions behind them")
    print("| keep | after layers | chosen by | KLD mean | 99 % | same top token | tokens' layers |")
    print("|---|---|---|---|---|---|---|")
    places = [(layers - 3, layers - 1), (1, layers - 2)] if layers > 3 else [(1, 2)]
    for shares, where in ((shares, where) for where in places for shares in SHARES):
        schedule = Schedule(shares, where)
        with opened(path, length, args.kv, schedule) as session:
            assert session.prefill_strategy
            for name, choose in WAYS.items():
                session.prefill_strategy.choose = choose
                found = [predictions(session, ids, args.prompt) for ids in texts]
                assert session.prefill_strategy.last
                _print(schedule, name, compared(exact, found), session.prefill_strategy.last.share)
                if name == "importance":
                    share = session.prefill_strategy.last.share
            if args.anew:
                found = [chosen_anew(session, ids, args.prompt) for ids in texts]
                _print(schedule, "each token anew", compared(exact, found), share)


def _print(schedule: Schedule, name: str, found: Figures, share: float) -> None:
    keep, layers = (", ".join(f"{x:g}" for x in values) for values in (schedule.keep, schedule.layers))
    print(f"| {keep} | {layers} | {name} | {found.kld:.5f} | {found.worst:.4f} | {found.same:.1%} | {share:.0%} |",
          flush=True)


def with_passages(stream: list[int], vocab: int, args: argparse.Namespace) \
        -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield (kind of passage, ids with its first copy, ids without); both end with the passage."""
    rng, length = np.random.default_rng(0), args.after + CUE
    step = (len(stream) - args.prompt - 4 * length) // max(args.prompts, 1)
    for start in range(0, args.prompts * step, step):
        body = stream[start : start + args.prompt - length - CUE]
        behind = stream[start + args.prompt :]
        passages = {"text": (behind[:length], behind[2 * length : 3 * length]),
                    "random": tuple(rng.integers(vocab // 2, vocab, length).tolist() for _ in range(2))}
        for kind, (passage, other) in passages.items():
            with_it, without = ([*body[:CUE], *first, *body[CUE:], *passage] for first in (passage, other))
            yield kind, with_it, without


def loss(session: Session, ids: list[int], n: int) -> float:
    """Mean loss of the last n of some tokens, behind the others."""
    found = _log_softmax(predictions(session, ids[:-1], len(ids) - n))
    return float(-found[np.arange(n), ids[-n:]].mean())


def retrieval(path: Path, text: str, args: argparse.Namespace) -> None:
    """Print what the first copy of a passage is worth to a model, and what pruning leaves of that."""
    stream, length = list(token_stream(Tokenizer.open(path), text).ids), args.prompt + args.after
    with opened(path, length, args.kv) as session:
        layers, asked = session.model.num_hidden_layers, list(with_passages(stream, session.model.vocab_size, args))
        losses = [(kind, loss(session, yes, args.after), loss(session, no, args.after)) for kind, yes, no in asked]
    for kind in ("text", "random"):
        with_it, without = np.mean([found[1:] for found in losses if found[0] == kind], axis=0)
        before = args.prompt - 2 * CUE - args.after
        print(f"{path.name}: a passage ({kind}) that ends {before} tokens before is worth "
              f"{without - with_it:.3f} nats: {with_it:.3f} with it, {without:.3f} without", flush=True)
        if without - with_it < LEAST_GAIN:
            continue
        for shares in SHARES:
            with opened(path, length, args.kv, Schedule(shares, (layers - 3, layers - 1))) as session:
                assert session.prefill_strategy
                for name, choose in WAYS.items():
                    session.prefill_strategy.choose = choose
                    found = np.mean([loss(session, yes, args.after) for each, yes, _ in asked if each == kind])
                    print(f"  keep {', '.join(map(str, shares))}, {name}: {found:.3f}", flush=True)


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of the processors that a call takes."""
    began, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - used


def speed(path: Path, args: argparse.Namespace) -> None:
    """Print the times of prompts in turns, and of tokens behind them."""
    ctx = args.prompt + DECODED + 1
    plans = [None, *(Schedule.parse(f"keep={text}") for text in args.keep)]
    times: dict[str, list[tuple[float, float, float]]] = {}
    shares: dict[str, float] = {}
    for _ in range(args.rounds):
        for schedule in plans:  # one at a time: two pools of a long context may not fit
            with opened(path, ctx, args.kv, schedule, args.threads) as session:
                ids = np.random.default_rng(0).integers(3, session.model.vocab_size, args.prompt).tolist()
                warm = session.new_sequence()
                session.prefill(warm, ids[:64])
                session.release(warm)
                session.settle()
                sequence, stages = session.new_sequence(), session.prefill_strategy
                name = str(stages.schedule if stages else "plain")
                clock, used = _timed(lambda: session.prefill(sequence, ids))  # noqa: B023
                token = min(_timed(lambda: session.decode([sequence], [5]))[0] for _ in range(DECODED))  # noqa: B023
                shares[name] = stages.last.share if stages and stages.last else 1.0
                times.setdefault(name, []).append((clock, used, token))
                print(f"# {name}: {clock:.2f} s, {used:.2f} s of processors, {1000 * token:.1f} ms a token", flush=True)
    print(f"\n{path.name}: prompts of {args.prompt} tokens, {args.rounds} rounds in turns")
    print("| prompt | tokens' layers | processor time, median | best | ratio of bests | clock, best | ratio | token |")
    print("|---|---|---|---|---|---|---|---|")
    plain = times["plain"]
    for name, found in times.items():
        clock, used, token = (min(each) for each in zip(*found, strict=True))
        middle = statistics.median(each[1] for each in found)
        ratios = (min(each[i] for each in plain) / best for i, best in ((1, used), (0, clock)))
        print(f"| {name} | {shares[name]:.1%} | {middle:.2f} s | {used:.2f} s | {next(ratios):.2f} | {clock:.2f} s | "
              f"{next(ratios):.2f} | {1000 * token:.1f} ms |")


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--after", type=int, default=96)
    parser.add_argument("--repeat", action="store_true", help="prompts that repeat a passage from their beginning")
    parser.add_argument("--anew", action="store_true", help="also the bound on revival, which takes long")
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--keep", nargs="+", default=["0.5,0.25,0.125", "0.7,0.49,0.343", "1,1,1"])
    args = parser.parse_args()
    for name in args.models:
        if args.speed:
            speed(resolve(name), args)
        elif args.text is None:
            parser.error("a table of quality needs --text")
        else:
            measure = retrieval if args.repeat else quality
            measure(resolve(name), args.text.read_text(encoding="utf-8"), args)


if __name__ == "__main__":
    main()
