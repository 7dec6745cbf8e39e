"""`edgeinfer convert`: a checkpoint becomes a bundle."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...base.validation import checked, choice
from ...config import FFN_LAYOUTS, MIXED_TYPES
from ...errors import UsageError, printable
from ...quant import TYPES
from ...registry import RULES
from ..options import GroupSize, Json, Weights
from ..output import print_json, say
from ..progress import ProgressLine
from ..reports.conversion import JSON_FIELDS as JSON_FIELDS
from ..reports.conversion import better, compared_object, print_compared, print_tensors, report_object, summary

if TYPE_CHECKING:
    from ...base.progress import OnStageProgress
    from ...models.comparison import Compared

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
                     help="Choose a type for each matrix, N bits per weight on average, to minimise the error."),
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
        int | None,
        typer.Option("--calibrate-tokens", metavar="N", show_default=False,
                     help="Maximum number of tokens of this text to run.  [default: 16384; importance: 4096]"),
    ] = None,
    rounding: Annotated[
        str | None,
        typer.Option("--rounding", metavar="gptq|importance", show_default=False,
                     help="With --calibrate: round by the covariances of inputs, or in less time by their mean squares."
                     "  [default: gptq]"),
    ] = None,
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
    compare_types: Annotated[
        str | None,
        typer.Option("--compare-types", metavar="TYPE,...", show_default=False,
                     help="With --compare: measure these types, too, rounded as the bundle is."),
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

    --calibrate runs the model in f16 over a text, in the cache, and rounds each matrix so that its outputs change least
    (GPTQ); the statistics stay in the cache for the next conversion. The bundle records method and text in
    calibration.json. --rounding importance weights errors by mean squares of inputs alone, which takes less time, and
    --imatrix by those of a file. --outliers multiplies columns of inputs that are far larger than others as floats:
    auto finds them, up to 2%, and a percentage takes so many of each matrix; --bits and --size count them. --compare
    prints perplexity and the KL divergence from f16 of the bundle and of plain rounding to the same types; KV is f32 in
    all of them. --compare-types q5k,tableq adds bundles in these types.

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

    types = _types_to_compare(compare, compare_types)
    given = {"--weights": weights, "--group-size": group_size, "--embedding": embedding, "--head": head,
             "--ffn-layout": None if ffn_layout == "tile16" else ffn_layout}
    with ProgressLine() as progress:
        chooser = _chooser(bits, size, given, partial(progress, "measure"))
        effects, weights = bits is not None or size is not None, None if chooser else weights
        path = checkpoint_path(source, progress, Storage(weights, group_size))
        make = partial(convert_checkpoint, path, weights=weights, group_size=group_size, embedding=embedding, head=head,
                       ffn_layout=ffn_layout, progress=partial(progress, "convert"),
                       chooser=chooser)
        ways = _calibrations(path, calibrate, calibrate_tokens, rounding, imatrix, progress, effects=effects)
        method, calibration = ways.popitem()
        if outliers is not None:
            calibration = with_outliers(calibration, outliers)
        report = make(destination, overwrite=overwrite, announce=say, calibration=calibration)
        same = report.chosen and (lambda *_: report.chosen)  # types that another rounding would not have chosen
        others = {other: partial(make, calibration=way, chooser=same) for other, way in ways.items()}
        for each in types:
            way = calibration if TYPES[each].quantised else None
            others[f"{each}, {method}" if way else each] = partial(
                make, weights=each, group_size=None, chooser=None, calibration=way)
        rows = _compared(path, compare, (method, destination), others, progress)
    if json:
        print_json({**report_object(report), "compared": [compared_object(row) for row in rows] if compare else None})
        return
    if tensors:
        print_tensors(report)
    for remark in report.sentences:
        say(remark)
    if rows:
        from ...models.comparison import too_few

        print_compared(rows)
        if remark := too_few(rows, Path(compare or "")):
            say(remark)
    print(printable(summary(report)))
    if hint := better(report):
        say(hint)


def _types_to_compare(text: Path | None, types: str | None) -> list[str]:
    """Return the types that are measured beside the bundle; refuses a text or types that cannot be measured."""
    if types is not None and text is None:
        raise UsageError(f"--compare-types {types:.40} needs a text to measure on; also give --compare TEXT.")
    listed = [] if types is None else types.split(",")
    found = [checked("--compare-types", each.strip(), RULES["weights"]) for each in listed]
    if text is not None:
        from ...models.comparison import check_text

        check_text(text)
    return found


def _chooser(bits: float | None, size: str | None, types: dict[str, Any], progress: OnStageProgress) -> Any:
    """Return the function that chooses a type for each matrix, if requested; options that fix one type are refused
    then."""
    from ...models.file_types import mixed_types

    mixed = str(types["--weights"]).lower()
    if bits is not None and size is not None:
        raise UsageError(f"--bits {bits:g} and --size {size} both set the size of the bundle; give one of them.")
    if bits is not None or size is not None:
        from edgeinfer.converters import BitBudget

        given = f"--bits {bits:g}" if bits is not None else f"--size {size}"
        chooser: Any = BitBudget(bits, None if size is None else checked("--size", size, RULES["budget"]), progress)
    elif mixed in MIXED_TYPES:
        given, chooser = f"--weights {mixed}", lambda reading, *_, **__: mixed_types(mixed, reading.checkpoint)
        types = {flag: value for flag, value in types.items() if flag != "--weights"}
    else:
        return None
    for flag, value in types.items():
        if value is not None:
            raise UsageError(f"{given} chooses the type of each matrix, and {flag} {value} sets one; omit one of them.")
    return chooser


def _calibrations(path: Path, text: str | None, tokens: int | None, rounding: str | None, imatrix: Path | None,
                  progress: ProgressLine, effects: bool) -> dict[str, Any]:
    """Return the source of the statistics of inputs, by method: the one that was requested last."""
    ways: dict[str, Any] = {"plain": None}
    if imatrix is not None and (text is not None or rounding is not None):
        flag = "--calibrate" if text is not None else f"--rounding {rounding}"
        raise UsageError(f"{flag} and --imatrix {imatrix} both determine the rounding; give one of them.")
    if text is None:
        for flag, value in ("--rounding", rounding), ("--calibrate-tokens", tokens):
            if value is not None:
                raise UsageError(f"{flag} {value} needs the model's activations over a text; also give --calibrate.")
        if imatrix is None:
            return ways
        from edgeinfer.converters import by_imatrix

        return {**ways, "importance": by_imatrix(imatrix)}
    from ...models import calibrated

    method = calibrated.GPTQ if rounding is None else checked("--rounding", rounding, choice(tuple(calibrated.TOKENS)))
    read = calibrated.calibration_text(path, Path(text) if text else calibrated.BUILT_IN,
                                       calibrated.TOKENS[method] if tokens is None else tokens)
    if read.changed:
        say(f"{read.stream.name}: {read.changed}.")
    by_text = partial(calibrated.by_text, path, read.stream, progress, effects=effects)
    return {**ways, calibrated.IMPORTANCE: by_text(calibrated.IMPORTANCE),
            method: by_text(method)}


def _compared(path: Path, text: Path | None, own: tuple[str, Path], others: dict[str, Any], progress: ProgressLine
              ) -> list[Compared]:
    """Compare the bundle with others of the same types, if requested."""
    if text is None:
        return []
    from ...models.comparison import compare

    return compare(path, text, own, list(others.items()), progress)
