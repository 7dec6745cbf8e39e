"""Reports of `edgeinfer convert`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...quant import TYPES
from ..output import print_table

if TYPE_CHECKING:
    from edgeinfer.converters import ConversionReport

    from ...models.comparison import Compared

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
        "remarks": "sentences about parts that were left out or missing",
        "output_gain": "with --calibrate or --imatrix: share of the squared error of the matrices' outputs that this "
        "removed, mean over the tensors; else null",
        "bits": "mean bits of a weight of all matrices, scales and padding included",
        "gap": "with --bits or --size: share by which other types of these bytes could lower the expected loss, at "
        "most; else null",
        "compared": "with --compare, per method `method`, `bits` of a weight of the layers, `bytes`, `perplexity`, "
        "`tokens` (that were predicted) and, "
        "against weights in f16, `kld_mean`, `kld_p99`, `same_top`; else null",
        "tensors": "per tensor `name`, `type`, `bytes`, `bits` (of a weight of a matrix; else null), `error`, `gain`, "
        "`file_types` (of a GGUF file or a quantised checkpoint, those that it is made of), `exact` (whether every "
        "value is that of the source), `output_error` and `output_error_plain` (squared error of the matrix's outputs "
        "over the calibration text, calibrated and with plain rounding; null without calibration)",
    },
}
"""Fields of the JSON object, by command."""


def compared_object(row: Compared) -> dict[str, Any]:
    """Return the JSON object of a row of the comparison."""
    kld = row.divergence
    return {"method": row.method, "bits": row.bits, "bytes": row.nbytes, "perplexity": row.perplexity,
            "tokens": row.tokens, "kld_mean": kld.kld_mean if kld else None, "kld_p99": kld.kld_p99 if kld else None,
            "same_top": kld.same_top if kld else None}


def print_compared(rows: list[Compared]) -> None:
    """Print the comparison with plain rounding."""
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
        "remarks": report.sentences,
        "tensors": [
            {"name": t.name, "type": t.dtype, "bytes": t.nbytes, "bits": t.bits or None, "error": t.relative_error,
             "gain": t.gain, "file_types": t.file_types, "exact": t.exact,
             "output_error": t.output_error if t.calibrated else None,
             "output_error_plain": t.output_error_plain if t.calibrated else None}
            for t in report.tensors
        ],
    }


def print_tensors(report: ConversionReport) -> None:
    """Print a table of the tensors."""
    rows: list[tuple[str, ...]] = [("tensor", "type", "bits", "size", "error", "gain", "output")]
    for t in report.tensors:
        output = f"{t.output_error / t.output_error_plain - 1:+.1%}" if t.calibrated and t.output_error_plain else ""
        bits = f"{t.bits:.2f}" if t.bits else ""
        rows.append((t.name, t.dtype, bits, format_size(t.nbytes), f"{t.relative_error:.2e}", f"{t.gain:.1%}", output))
    if not report.calibrated:
        rows = [row[:-1] for row in rows]
    print_table(rows, right=[2, 3, 4, 5, 6][: len(rows[0]) - 2])


def better(report: ConversionReport) -> str:
    """Name the option that loses less at the same bytes, if weights were rounded without a text; empty if there is
    none."""
    rounded = any(TYPES[one.dtype].quantised and TYPES[one.dtype].bits < 8 and not (one.exact or one.moved)
                  for one in report.tensors)
    if report.calibrated or report.chosen or not rounded:
        return ""
    return (f"--bits {report.bits:.3g} makes a bundle of this size that loses less, in a longer time, and least with "
            "--calibrate, which runs a text through the model first.")


def summary(report: ConversionReport) -> str:
    """Return the last line of the report: sizes, time and error."""
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
