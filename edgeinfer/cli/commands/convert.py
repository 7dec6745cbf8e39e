"""`edgeinfer convert`: a checkpoint becomes a bundle."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...base.units import format_size
from ...base.validation import checked
from ...config import FFN_LAYOUTS
from ...errors import UsageError, printable
from ...quant import TYPES
from ...rules import RULES
from ..options import GroupSize, Json, Weights
from ..output import print_json, print_table, say
from ..progress import ProgressLine

if TYPE_CHECKING:
    from edgeinfer.converters import ConversionReport

    from ...models.comparison import Compared

TOKENS = 16384
"""Most tokens of a text that calibrates, by default."""
JSON_FIELDS = {
    "convert": {
        "destination": "the bundle",
        "source_bytes": "bytes of the tensors read",
        "bundle_bytes": "bytes of the weights written",
        "seconds": "duration",
        "error_mean": "squared error of a tensor / its squared norm, mean over the tensors that were rounded",
        "error_worst": "the largest of them",
        "error_worst_tensor": "its tensor; null if nothing was rounded",
        "gain": "share of the squared error of scales by the largest weight that searching removed",
        "remarks": "sentences about what was left out or missing",
        "output_gain": "with --calibrate or --imatrix: share of the squared error of what matrices give that this "
        "removed, mean over the tensors; else null",
        "bits": "mean bits of a weight of all matrices, scales and padding included",
        "gap": "with --bits or --size: share by which other types of these bytes could lower the expected loss, at "
        "most; else null",
        "compared": "with --compare, per method `method`, `bits` of a weight of the layers, `bytes`, `perplexity` and, "
        "against weights in f16, `kld_mean`, `kld_p99`, `same_top`; else null",
        "tensors": "per tensor `name`, `type`, `bytes`, `bits` (of a weight of a matrix; else null), `error`, `gain`, "
        "`file_types` (of a GGUF file or a quantised checkpoint, those that it is made of), `exact` (whether every "
        "value is that of the source), `output_error` and `output_error_plain` (squared error of what the matrix gives "
        "over the calibration text, calibrated and with plain rounding; null without calibration)",
    },
}
"""Fields of the JSON object, by command."""


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Checkpoint directory, GGUF file, known name, or hub id.",
                            show_default=False)
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="New directory for the bundle.", show_default=False)
    ],
    weights: Weights = None,
    group_size: GroupSize = None,
    embedding: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Type of the embedding.  [default: int8; f16 or f32 if the weights are]"),
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of the output head.  [default: as the embedding's]")
    ] = None,
    ffn_layout: Annotated[
        str,
        typer.Option(metavar="|".join(FFN_LAYOUTS),
                     help="Layout of FFN weights: matrix tiles, or neuron by neuron to skip inactive neurons."),
    ] = "tile16",
    bits: Annotated[
        float | None,
        typer.Option("--bits", metavar="N", show_default=False,
                     help="Choose a type for each matrix, N bits per weight on average, by what changes least."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", show_default=False,
                     help="Choose types likewise, for weights of SIZE, such as 2.5GB."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option("--calibrate", metavar="[FILE]", show_default=False,
                     help="Round weights by the model's activations over a text.  [without FILE: a built-in text]"),
    ] = None,
    calibrate_tokens: Annotated[
        int, typer.Option("--calibrate-tokens", metavar="N", help="Maximum number of tokens of this text to run.")
    ] = TOKENS,
    imatrix: Annotated[
        Path | None,
        typer.Option("--imatrix", metavar="FILE", show_default=False,
                     help="Weight rounding errors by an importance matrix of llama.cpp's (GGUF or older form)."),
    ] = None,
    outliers: Annotated[
        str | None,
        typer.Option("--outliers", metavar="auto|PERCENT", show_default=False,
                     help="With --calibrate or --imatrix: store input columns with outliers apart, in f16."),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="TEXT", show_default=False,
                     help="Measure the bundle on a text, beside plain rounding to the same types."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print the quantisation error of every tensor.")] = False,
    json: Json = False,
) -> None:
    """Convert a checkpoint or GGUF file to a bundle.

    SRC is a directory with config.json, safetensors and tokenizer files, or a GGUF file (the first part of a split
    one); ollama:NAME[:TAG] takes a file from ollama's store, hf:OWNER/REPO:TYPE one from the hub. Weights of GGUF files
    and of quantised checkpoints (GPTQ, AWQ, compressed-tensors, FP8, MLX) keep their codes and scales; --weights
    requantises those stored in other types and reports the error of both steps. A conversion that fails or is
    interrupted leaves nothing at DST. A tensor's error is the squared error of its stored weights divided by their
    squared norm.

    --calibrate runs the model in f16 over a text, in the cache, and rounds each matrix so that what it gives for its
    inputs changes least (GPTQ); the statistics stay in the cache for the next conversion. The bundle records method and
    text in calibration.json. --imatrix weights errors by mean squares alone. --outliers multiplies columns of inputs
    that are far larger than others as floats: auto finds them, up to 2%, and a percentage takes so many of each matrix;
    --bits and --size count them. --compare prints perplexity and the KL divergence from f16 of the bundle and of plain
    rounding to the same types; KV is f32 in all of them.

    --weights q4_k_m and q5_k_m give each matrix the type that it has in llama.cpp's files of these names.

    --bits N and --size SIZE choose a type of 3.25 to 8.5 bits for each matrix, embedding and head included, so that
    predictions change least at this size; with --calibrate the effect of each matrix's errors is measured.

    \b
    Examples:
      edgeinfer convert ./TinyLlama-1.1B-Chat ./tinyllama
      edgeinfer convert HuggingFaceTB/SmolLM2-135M-Instruct ./smollm2 --weights int8
      edgeinfer convert model-Q8_0.gguf ./model
      edgeinfer convert ./TinyLlama-1.1B-Chat ./calibrated --calibrate --compare held_out.txt
      edgeinfer convert ./TinyLlama-1.1B-Chat ./smaller --calibrate --bits 5
    """
    from edgeinfer.converters import convert as convert_checkpoint
    from edgeinfer.converters import with_outliers

    from ...models import Storage, checkpoint_path

    if compare is not None:
        from ...models.comparison import check_text

        check_text(compare)
    others = {"--weights": weights, "--group-size": group_size, "--embedding": embedding, "--head": head,
              "--ffn-layout": None if ffn_layout == "tile16" else ffn_layout}
    chooser, effects = _chooser(bits, size, others), bits is not None or size is not None
    weights = None if chooser else weights
    with ProgressLine() as progress:
        path = checkpoint_path(source, progress, Storage(weights, group_size))
        make = partial(convert_checkpoint, path, weights=weights, group_size=group_size, embedding=embedding, head=head,
                       ffn_layout=ffn_layout, progress=partial(progress, "convert"),
                       chooser=chooser and partial(chooser, progress=partial(progress, "measure")))
        ways = _calibrations(path, calibrate, calibrate_tokens, imatrix, progress, effects=effects)
        method, calibration = ways.popitem()
        if outliers is not None:
            calibration = with_outliers(calibration, outliers)
        report = make(destination, overwrite=overwrite, announce=say, calibration=calibration)
        rows = _compared(path, compare, (method, destination), {other: partial(make, calibration=way) for other, way in
                                                                ways.items()}, progress)
    if json:
        print_json({**report_object(report), "compared": [_object(row) for row in rows] if compare else None})
        return
    if tensors:
        _print_tensors(report)
    for remark in filter(None, (*report.remarks, report.anew, report.nearly)):
        say(remark)
    if rows:
        _print_compared(rows)
    print(printable(_summary(report)))
    if hint := _better(report):
        say(hint)


def _chooser(bits: float | None, size: str | None, types: dict[str, Any]) -> Any:
    """Return what chooses a type for each matrix, if that is wanted; options that say one type are refused then."""
    from ...models.file_types import MIXED, mixed_types

    mixed = str(types["--weights"]).lower()
    if bits is not None and size is not None:
        raise UsageError(f"--bits {bits:g} and --size {size} both say how large the bundle becomes; give one of them.")
    if bits is not None or size is not None:
        from edgeinfer.converters import BitBudget

        given = f"--bits {bits:g}" if bits is not None else f"--size {size}"
        chooser: Any = BitBudget(bits, None if size is None else checked("--size", size, RULES["budget"]))
    elif mixed in MIXED:
        given, chooser = f"--weights {mixed}", lambda reading, *_, **__: mixed_types(mixed, reading.checkpoint)
        types = {flag: value for flag, value in types.items() if flag != "--weights"}
    else:
        return None
    for flag, value in types.items():
        if value is not None:
            raise UsageError(f"{given} chooses the type of each matrix, and {flag} {value} says one; leave one out.")
    return chooser


def _calibrations(path: Path, text: str | None, tokens: int, imatrix: Path | None, progress: ProgressLine,
                  effects: bool) -> dict[str, Any]:
    """Return what gives a conversion the statistics of inputs, by method: the one that was requested last."""
    ways: dict[str, Any] = {"plain": None}
    if imatrix is not None:
        if text is not None:
            raise UsageError(f"--calibrate and --imatrix {imatrix} both say how weights are rounded; give one of them.")
        from edgeinfer.converters import by_imatrix

        return {**ways, "importance": by_imatrix(imatrix)}
    if text is None:
        return ways
    from ...models import calibrated

    read = calibrated.calibration_text(path, Path(text) if text else calibrated.BUILT_IN, tokens)
    if read.changed:
        say(f"{read.stream.name}: {read.changed}.")
    return {**ways, **{method: calibrated.by_text(path, read.stream, progress, method, effects)
                       for method in (calibrated.IMPORTANCE, calibrated.GPTQ)}}


def _compared(path: Path, text: Path | None, own: tuple[str, Path], others: dict[str, Any], progress: ProgressLine
              ) -> list[Compared]:
    """Measure the bundle beside others of the same types, if that is wanted."""
    if text is None:
        return []
    from ...models.comparison import compare

    return compare(path, text, own, list(others.items()), progress)


def _object(row: Compared) -> dict[str, Any]:
    """Return the JSON object of a row of the comparison."""
    kld = row.divergence
    return {"method": row.method, "bits": row.bits, "bytes": row.nbytes, "perplexity": row.perplexity,
            "kld_mean": kld.kld_mean if kld else None, "kld_p99": kld.kld_p99 if kld else None,
            "same_top": kld.same_top if kld else None}


def _print_compared(rows: list[Compared]) -> None:
    shown = [("method", "bits", "weights", "perplexity", "KLD mean", "KLD 99 %", "same top token")]
    for row in rows:
        kld = row.divergence
        shown.append((row.method, f"{row.bits:.2f}", format_size(row.nbytes), f"{row.perplexity:.4f}",
                      *((f"{kld.kld_mean:.6f}", f"{kld.kld_p99:.6f}", f"{kld.same_top:.2%}") if kld else ("", "", ""))))
    print_table(shown, right=[1, 2, 3, 4, 5, 6])


def report_object(report: ConversionReport) -> dict[str, Any]:
    """Return the JSON object of a conversion."""
    worst = report.worst
    return {
        "destination": str(report.destination), "source_bytes": report.source_bytes,
        "bundle_bytes": report.bundle_bytes, "seconds": report.seconds, "error_mean": report.mean_relative_error,
        "error_worst": worst.relative_error if worst else 0.0, "error_worst_tensor": worst.name if worst else None,
        "gain": report.gain, "output_gain": report.output_gain if report.calibrated else None,
        "bits": report.bits, "gap": report.chosen.gap if report.chosen else None,
        "remarks": [*report.remarks, *filter(None, [report.anew, report.nearly])],
        "tensors": [
            {"name": t.name, "type": t.dtype, "bytes": t.nbytes, "bits": t.bits or None, "error": t.relative_error,
             "gain": t.gain, "file_types": t.file_types, "exact": t.exact,
             "output_error": t.output_error if t.calibrated else None,
             "output_error_plain": t.output_error_plain if t.calibrated else None}
            for t in report.tensors
        ],
    }


def _print_tensors(report: ConversionReport) -> None:
    rows: list[tuple[str, ...]] = [("tensor", "type", "bits", "size", "error", "gain", "output")]
    for t in report.tensors:
        output = f"{t.output_error / t.output_error_plain - 1:+.1%}" if t.calibrated and t.output_error_plain else ""
        bits = f"{t.bits:.2f}" if t.bits else ""
        rows.append((t.name, t.dtype, bits, format_size(t.nbytes), f"{t.relative_error:.2e}", f"{t.gain:.1%}", output))
    if not report.calibrated:
        rows = [row[:-1] for row in rows]
    print_table(rows, right=[2, 3, 4, 5, 6][: len(rows[0]) - 2])


def _better(report: ConversionReport) -> str:
    """Name what loses less at the same bytes, where weights were rounded without a text; empty if nothing does."""
    rounded = any(TYPES[one.dtype].quantised and TYPES[one.dtype].bits < 8 and not (one.exact or one.moved)
                  for one in report.tensors)
    if report.calibrated or report.chosen or not rounded:
        return ""
    return (f"--calibrate --bits {report.bits:.3g} makes a bundle of this size that loses less; it runs a text through "
            "the model first.")


def _summary(report: ConversionReport) -> str:
    sizes = f"{format_size(report.source_bytes)} to {format_size(report.bundle_bytes)} in {report.seconds:.1f} s"
    if report.chosen:
        sizes += f", {report.bits:.3g} bits per weight"
        sizes += "" if report.chosen.gap is None else f" (at most {report.chosen.gap:.1%} above the least loss)"
    worst = report.worst
    if worst is None:
        return f"{report.destination}: {sizes}; no weight was rounded."
    if report.calibrated:
        return (f"{report.destination}: {sizes}; calibrated: the squared error of {len(report.calibrated)} matrices' "
                f"outputs is {report.output_gain:.0%} lower than with plain rounding.")
    errors = f"error {report.mean_relative_error:.2e} mean, {worst.relative_error:.2e} worst ({worst.name})"
    return f"{report.destination}: {sizes}; {errors}; {report.gain:.1%} lower than with absmax scales."
