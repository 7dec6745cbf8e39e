"""`edgeinfer export`: a model becomes an ONNX file, or a folder for onnxruntime-genai."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...base.units import format_size
from ...errors import printable
from ..options import Json, Model
from ..output import print_json, say
from ..progress import ProgressLine

if TYPE_CHECKING:
    from ...backends import ExportReport

JSON_FIELDS = {
    "export": {
        "destination": "the file or folder that was asked for",
        "model": "the ONNX file",
        "data": "its external data",
        "data_bytes": "their bytes",
        "bundle_bytes": "bytes of the weights that they were made from",
        "nodes": "operators in the model",
        "tensors": "tensors in the data",
        "seconds": "duration",
        "remarks": "sentences about parts that were changed or left out",
    },
}
"""Fields of the JSON object, by command."""


def export(
    model: Model,
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="New file DST.onnx; with --for genai a new folder.",
                             show_default=False)
    ],
    target: Annotated[
        str, typer.Option("--for", metavar="session|genai",
                          help="Target runtime: onnxruntime or onnxruntime-genai.")
    ] = "session",
    dtype: Annotated[
        str, typer.Option(metavar="f16|f32", help="Type of activations, KV cache, scales and unquantised weights.")
    ] = "f16",
    attention: Annotated[
        str, typer.Option("--attention", metavar="gqa|paged",
                          help="Attention operator: one KV slot per sequence, or paged KV (CUDA only).")
    ] = "gqa",
    qk_norm: Annotated[
        str | None, typer.Option(metavar="apart|fused",
                                 help="Norms of q and k heads: separate operators, or fused into attention (CUDA, "
                                      "WebGPU).  [default: apart; fused with paged]")
    ] = None,
    ctx: Annotated[
        int | None, typer.Option("--ctx", metavar="TOKENS", help="Maximum context size.  [default: the model's]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    json: Json = False,
) -> None:
    """Export a model to ONNX.

    The model uses onnxruntime's operators; export requires the package onnx. Weights keep their codes and scales. The
    external data is written beside DST.onnx, and both files are complete when DST.onnx appears. edgeinfer verify
    DST.onnx checks their checksums.

    \b
    Examples:
      edgeinfer export demo ./demo.onnx
      edgeinfer export ./my-bundle ./my-model --for genai --dtype f32
    """
    from ...backends import Flavour
    from ...backends import export as export_bundle
    from ...bundle import Bundle
    from ...models import resolve

    flavour = Flavour(target, dtype, attention, ctx, qk_norm or "")
    with ProgressLine() as progress, Bundle.open(resolve(model, progress)) as bundle:
        report = export_bundle(bundle, destination, flavour, overwrite=overwrite, progress=partial(progress, "export"))
    if json:
        print_json(report_object(report))
        return
    for remark in report.remarks:
        say(remark)
    model, data = printable(str(report.model)), printable(report.data.name)
    print(f"{model}: {report.nodes} operators; {data}: {report.tensors} tensors, "
          f"{format_size(report.data_bytes)} from a bundle of {format_size(report.bundle_bytes)}; "
          f"{report.seconds:.1f} s.")


def report_object(report: ExportReport) -> dict[str, Any]:
    """Return the JSON object of an export."""
    return {"destination": str(report.destination), "model": str(report.model), "data": str(report.data),
            "data_bytes": report.data_bytes, "bundle_bytes": report.bundle_bytes, "nodes": report.nodes,
            "tensors": report.tensors, "seconds": report.seconds, "remarks": list(report.remarks)}
