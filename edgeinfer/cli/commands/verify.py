"""`edgeinfer verify`: compare every checksum of a bundle, or of an export."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ...base.units import format_size
from ...errors import printable
from ..options import Converted, Json
from ..output import print_json
from ..progress import ProgressLine

JSON_FIELDS = {
    "verify": {
        "path": "the bundle, or the ONNX file",
        "ok": "true; damage is an error",
        "tensors": "tensors compared",
        "files": "files compared",
        "bytes": "bytes read",
    },
}
"""Fields of the JSON object, by command."""


def verify(model: Converted, json: Json = False) -> None:
    """Verify all checksums of a bundle.

    The tensors must also be those of the architecture, with the right shapes. For an export (DST.onnx, or a folder for
    onnxruntime-genai), verify checks the graph and its data, which requires the package onnx.

    \b
    Example:
      edgeinfer verify ./my-bundle
    """
    from ...backends import is_export

    path, counts, nbytes = (_verify_export if is_export(model) else _verify_bundle)(model)
    if json:
        print_json({"path": str(path), "ok": True, **counts, "bytes": nbytes})
    else:
        print(f"{printable(str(path))}: OK, {counts['tensors']} tensors and {counts['files']} files, "
              f"{format_size(nbytes)}.")


def _verify_export(model: str) -> tuple[Path, dict[str, Any], int]:
    from ...backends import verify_export

    with ProgressLine() as progress:
        found = verify_export(model, partial(progress, "verify"))
    return found.model, {"tensors": found.tensors, "files": found.files}, found.nbytes


def _verify_bundle(model: str) -> tuple[Path, dict[str, Any], int]:
    from ...bundle import Bundle
    from ...graph import build_graph, expected_types
    from ...models import resolve

    path = resolve(model, convert=False)
    with Bundle.open(path) as bundle, ProgressLine() as progress:
        graph = build_graph(bundle.config, expected_types(bundle.types))
        bundle.check_graph(graph)
        bundle.verify(partial(progress, "verify"))
        nbytes = bundle.weights_bytes + sum(entry.nbytes for entry in bundle.files.values())
        counts = {"tensors": len(bundle.tensors), "files": len(bundle.files)}
    return path, counts, nbytes
