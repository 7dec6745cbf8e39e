"""`edgeinfer sparsify`: a model becomes a bundle that leaves out neurons."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import MAX_KLD
from ...errors import UsageError, printable
from ..options import Json, Threads
from ..output import print_json, print_table, say
from ..progress import ProgressLine

if TYPE_CHECKING:
    from edgeinfer.sparse import Screened, Sparsified

    from ...bundle import Bundle

PREDICTORS = ("sign", "lowrank", "threshold")
JSON_FIELDS = {
    "sparsify": {
        "destination": "the bundle",
        "predictor": "its kind",
        "rank": "of a lowrank predictor, else 0",
        "predictor_bytes": "bytes of it that a token reads",
        "layers": "per layer `density` (share of neurons that fire), `recall` (share of these that are computed), "
                  "`read_share` (share of all neurons that are computed)",
        "read_share": "bytes of all FFNs that a token reads, predictor included, over those of the dense ones",
        "kld_mean": "mean KL(dense, sparse) in nats, of the bundle without and with its predictor",
        "kld_p99": "its 99th percentile",
        "perplexity": "with the predictor",
        "perplexity_dense": "without",
        "tokens": "tokens that these were measured on",
        "source_kld": "mean KL(source, bundle without predictor): other orders of sums, down matrices rounded again",
        "down_error": "squared error that rounding the down matrices again has added / their squared norm; 0 where not",
        "max_kld": "the bound",
        "held_out": "per text of --held-out its name, `kld_mean`, `kld_p99`, `perplexity`, `tokens`",
        "warning": "facts about the predictor that are unknown without --held-out, else null",
        "enabled": "whether `run` may use the predictor automatically",
        "reason": "why, or by how much the bound was missed",
        "relative_time": "predicted time of a decoded token's FFNs in memory over that of the model in tiles, dense",
        "dense_layers": "numbers of the layers that stay in tiles, because there dense is faster",
        "screen": "with --head, and then with `destination`, `max_kld` and the two below alone: `rank`, `share` of the "
                  "head that is computed, `bytes`",
        "read_share (--head)": "bytes that a token reads of head and screen over those of the head",
        "measured": "per setting its names and values, `kld_mean`, `kld_p99`, `same_top`, `tokens`, `enabled`",
    },
}
"""Fields of the JSON object, by command."""


def sparsify(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Bundle, checkpoint directory, GGUF file, known name, or hub id.",
                            show_default=False)
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="New directory for the bundle.", show_default=False)
    ],
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", help="Text to fit and measure on (UTF-8).",
                           show_default=False)
    ],
    held_out: Annotated[
        list[Path] | None,
        typer.Option("--held-out", metavar="FILE", show_default=False,
                     help="Further text to measure on; may be repeated. The worst measurement decides."),
    ] = None,
    predictor: Annotated[
        str | None,
        typer.Option(metavar="|".join(PREDICTORS), help="Kind of predictor of active neurons.  [default: lowrank, "
                                                       "or threshold where activations are never exactly 0]"),
    ] = None,
    max_kld: Annotated[
        float, typer.Option("--max-kld", metavar="NATS", help="Maximum KL divergence from the dense bundle.")
    ] = MAX_KLD,
    rank: Annotated[
        int | None, typer.Option(metavar="R", help="Rank of a lowrank predictor.  [default: the cheapest]")
    ] = None,
    epochs: Annotated[
        int, typer.Option(metavar="N", help="Training epochs of a lowrank predictor, for small ranks or varied text.")
    ] = 0,
    head: Annotated[
        bool, typer.Option("--head", help="Add a screen of the output head instead, and change nothing else.")
    ] = False,
    threads: Threads = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle.")] = False,
    json: Json = False,
) -> None:
    """Create a bundle whose FFNs skip inactive neurons.

    sparsify runs the text through the model, orders the neurons of each layer by how often they fire, fits a predictor
    of active neurons from a layer's input, and measures its cost on the end of the text, which is not used for fitting.
    A text by one author or on one subject says little about others: --held-out measures on further texts, whose
    beginnings help choose how many neurons to skip, and the worst measurement decides. Layers that run faster dense
    stay dense. A predictor above --max-kld is stored but not enabled. A checkpoint or GGUF file is converted to 4 bits
    first; to use other types, convert it before.

    --head instead adds a screen that estimates all logits from few bytes, so that a token computes only the rows of the
    output head that can hold its largest logit. SRC may already be sparse.

    \b
    Examples:
      edgeinfer sparsify ./prosparse-7b ./prosparse-sparse --text some_books.txt
      edgeinfer sparsify ./my-bundle ./my-sparse-bundle --text some_books.txt --predictor sign --max-kld 0.01
    """
    if predictor is not None and predictor not in PREDICTORS:
        raise UsageError(f"--predictor is {predictor!r}; choose one of {', '.join(PREDICTORS)}.")
    if head and predictor is not None:
        raise UsageError(f"--head leaves FFNs as they are, and --predictor {predictor} is for them; give one of the "
                         "two.")
    if head and epochs:
        raise UsageError(f"--head leaves FFNs as they are, and --epochs {epochs} is for them; give one of the two.")
    if not 0 < max_kld < float("inf"):
        raise UsageError(f"--max-kld is {max_kld:g}; it must be above 0.")
    from edgeinfer.sparse import MAX_TOKENS, MEASURED_TOKENS, screen_head
    from edgeinfer.sparse import sparsify as make

    from ...quality.corpus import Text, read_stream
    from ...text import Tokenizer

    with ExitStack() as stack, ProgressLine() as progress:
        texts = [Text(stack, path) for path in (text, *(held_out or ()))]
        bundle, in_tiles = _open(stack, source, destination, "tile16" if head else "neuron", progress)
        tokenizer = Tokenizer.open(bundle.path, {"bos_token_id": bundle.config.bos_token_id})
        stream, *others = (read_stream(stack, tokenizer, one, max_tokens=MAX_TOKENS if one is texts[0] else
                                       2 * MEASURED_TOKENS) for one in texts)
        for one in texts:
            if one.changed:
                say(f"{one.path.name}: {one.changed}.")
        asked: dict[str, Any] = {"held_out": others, "max_kld": max_kld, "rank": rank, "threads": threads,
                                 "overwrite": overwrite, "on_progress": progress}
        if head:
            _report_screen(screen_head(bundle, destination, stream, **asked), json)
            return
        made = make(bundle, destination, stream, kind=predictor, epochs=epochs, in_tiles=in_tiles, **asked)
    if made.warning:
        say(made.warning)
    if json:
        print_json(report_object(made))
    else:
        _print(made)


def _report_screen(made: Screened, json: bool) -> None:
    """Describe a screen and its cost."""
    measured = [{"setting": dict(setting.values), "enabled": result.divergence.kld_mean <= made.max_kld,
                 "kld_mean": result.divergence.kld_mean, "kld_p99": result.divergence.kld_p99,
                 "same_top": result.divergence.same_top, "tokens": result.tokens}
                for setting, result in made.results if result.divergence]
    if json:
        print_json({"destination": str(made.destination), "screen": {"rank": made.screen.rank,
                    "share": made.screen.share, "bytes": made.screen.nbytes}, "read_share": made.read_share,
                    "max_kld": made.max_kld, "measured": measured})
        return
    print(f"{printable(str(made.destination))}: screen of rank {made.screen.rank}; a token computes "
          f"{made.screen.share:.1%} of the head and reads {made.read_share:.1%} of its bytes, screen included.")
    for reason, one in zip(made.reasons, measured, strict=True):
        print(f"{reason}; the largest logit is the same for {one['same_top']:.2%} of {one['tokens']} tokens.")


def _open(stack: ExitStack, source: str, destination: Path, layout: str,
          progress: ProgressLine) -> tuple[Bundle, Callable[[], Bundle] | None]:
    """Open a bundle, or the conversion of a checkpoint, with its FFNs in a layout, until the stack is closed.

    For a checkpoint, also return the function that converts it with its FFNs in tiles.
    """
    from edgeinfer.converters import convert

    from ...bundle import Bundle, is_bundle
    from ...models import DEMO, WEIGHTS, checkpoint_path, demo_path

    if source == DEMO and not Path(source).exists():
        return stack.enter_context(Bundle.open(demo_path())), None
    if is_bundle(source):
        return stack.enter_context(Bundle.open(source)), None
    checkpoint = checkpoint_path(source, progress)
    beside = Path(destination).absolute().parent
    room = tempfile.TemporaryDirectory(prefix=".sparsify.", dir=beside if beside.is_dir() else None)
    folder = Path(stack.enter_context(room))

    def converted(layout: str) -> Bundle:
        report = convert(checkpoint, folder / layout, weights=WEIGHTS, ffn_layout=layout,
                         progress=partial(progress, "convert"))
        for remark in filter(None, (*report.remarks, report.requantised)):
            say(remark)
        return stack.enter_context(Bundle.open(folder / layout))

    return converted(layout), partial(converted, "tile16")


def report_object(made: Sparsified) -> dict[str, Any]:
    """Return the JSON object of the result."""
    divergence, before = made.result.divergence, made.against_source.divergence
    assert divergence is not None and before is not None
    return {
        "destination": str(made.destination), "predictor": made.predictor.kind, "rank": made.predictor.rank,
        "predictor_bytes": made.predictor.nbytes,
        "layers": [{"density": layer.density, "recall": layer.recall, "read_share": layer.read_share}
                   for layer in made.layers],
        "read_share": made.read_share, "kld_mean": divergence.kld_mean, "kld_p99": divergence.kld_p99,
        "perplexity": made.result.perplexity, "perplexity_dense": divergence.reference_perplexity,
        "tokens": made.result.tokens, "source_kld": before.kld_mean, "down_error": made.down_error,
        "max_kld": made.max_kld, "enabled": made.enabled, "reason": made.reason, "dense_layers": list(made.dense),
        "relative_time": made.time[0], "warning": made.warning or None,
        "held_out": [{"text": name, "kld_mean": one.divergence.kld_mean, "kld_p99": one.divergence.kld_p99,
                      "perplexity": one.perplexity, "tokens": one.tokens}
                     for name, one in made.held_out if one.divergence],
    }


def _print(made: Sparsified) -> None:
    rows = [("layer", "fires", "recall", "computed")]
    rows += [(str(i), f"{layer.density:.1%}", f"{layer.recall:.1%}", f"{layer.read_share:.1%}")
             for i, layer in enumerate(made.layers)]
    print_table(rows, right=[1, 2, 3])
    report = report_object(made)
    rank = f" of rank {made.predictor.rank}" if made.predictor.rank else ""
    print(f"{printable(str(made.destination))}: {made.predictor.kind} predictor{rank}; a token reads "
          f"{made.read_share:.1%} of the FFNs' bytes, predictor included.")
    print(f"By {made.time[1]} its FFNs, in memory, take {made.time[0]:.2f} times as long as dense ones in tiles"
          f"{'; a dense bundle is faster' if made.time[0] > 1 else ''}.")
    if made.dense:
        print(f"In tiles, because dense is faster there: layer{'s' * (len(made.dense) > 1)} "
              f"{', '.join(map(str, made.dense))}.")
    print(f"KLD {report['kld_mean']:.5f}, perplexity {report['perplexity']:.3f}, dense "
          f"{report['perplexity_dense']:.3f}, over {made.result.tokens} tokens.")
    for one in report["held_out"]:
        print(f"On {printable(one['text'])}: KLD {one['kld_mean']:.5f} over {one['tokens']} tokens.")
    again = f"; rounding the down matrices again added an error of {made.down_error:.2e}" if made.down_error else ""
    print(f"Without the predictor the bundle is KLD {report['source_kld']:.6f} from its source{again}.")
    print(f"{'Enabled' if made.enabled else 'Not enabled'}: {made.reason}.")
