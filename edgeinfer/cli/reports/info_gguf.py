"""Report of `edgeinfer info` on a GGUF file that was not converted: its header, and whether it runs."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...errors import UsageError, printable
from ..output import folded, print_json, print_table

if TYPE_CHECKING:
    from edgeinfer.converters import GgufHeader

    from ...models.list import LocalModel

FIELD = ("of a GGUF file that was not converted, and then the only field beside `path`: `version` of GGUF, `name`, "
         "`architecture`, `parameters`, `bytes`, `parts`, `types` (per type `type`, `tensors`, `bytes`), `fields` "
         "(sizes of the architecture, by GGUF's names), `tokenizer` (`model`, `pre`, `tokens`, `chat_template`), "
         "`runs`, `reason` (why not), `remedy`, `fits`, `planned_bytes`; with --tensors `tensors` (per tensor `name`, "
         "`type`, `shape`, `bytes`)")
TOKENS = "tokenizer.ggml.tokens"


def show(model: str, path: Path, tensors: bool, program: bool, json: bool) -> None:
    """Print the header of a file; raises `CheckpointError` if it cannot be read."""
    from edgeinfer.converters import PassedOver, read_headers

    from ...models.list import look_at_gguf

    if program:
        raise UsageError(f"--program needs a bundle, and {model} has not been converted yet: edgeinfer convert {model} "
                         "DST, and info DST --program.")
    headers = read_headers(path, PassedOver())
    header = header_object(headers, look_at_gguf(model, path))
    if tensors:
        header["tensors"] = [{"name": name, "type": one.kind.name, "shape": one.shape, "bytes": one.nbytes}
                             for part in headers for name, one in part.tensors.items()]
    if json:
        print_json({"path": str(path), "header": header})
        return
    print_table(_rows(path, header))
    if tensors:
        print()
        print_table([("tensor", "type", "shape", "size"),
                     *((printable(one["name"]), one["type"], "x".join(map(str, one["shape"])),
                        format_size(one["bytes"])) for one in header["tensors"])], right=[2, 3])
    for line in folded(_verdict(header), "runs       "):
        print(line)


def header_object(headers: list[GgufHeader], found: LocalModel) -> dict[str, Any]:
    """Return the JSON object of a file's header."""
    fields = headers[0].fields
    architecture = fields.get("general.architecture")
    types: dict[str, list[int]] = {}
    for header in headers:
        for tensor in header.tensors.values():
            counted = types.setdefault(tensor.kind.name, [0, 0])
            counted[0] += 1
            counted[1] += tensor.nbytes
    tokens = fields.get(TOKENS)
    return {
        "version": headers[0].version, "name": fields.get("general.name"), "architecture": architecture,
        "parameters": sum(prod(tensor.shape) for header in headers for tensor in header.tensors.values()),
        "bytes": found.nbytes, "parts": len(headers),
        "types": [{"type": kind, "tensors": n, "bytes": nbytes}
                  for kind, (n, nbytes) in sorted(types.items(), key=lambda item: -item[1][1])],
        "fields": {key.removeprefix(f"{architecture}."): value for key, value in fields.items()
                   if key.startswith(f"{architecture}.") and isinstance(value, (bool, int, float, str))},
        "tokenizer": {"model": fields.get("tokenizer.ggml.model"), "pre": fields.get("tokenizer.ggml.pre"),
                      "tokens": len(tokens) if isinstance(tokens, range) else None,
                      "chat_template": "tokenizer.chat_template" in fields},
        "runs": found.runs, "reason": found.reason, "remedy": found.remedy, "fits": found.fits,
        "planned_bytes": found.planned_bytes,
    }


def _rows(path: Path, header: dict[str, Any]) -> list[tuple[str, str]]:
    tokenizer = header["tokenizer"]
    parts = f" in {header['parts']} files" if header["parts"] > 1 else ""
    rows = [("path", str(path)), ("format", f"GGUF {header['version']}, {format_size(header['bytes'])}{parts}"),
            ("name", header["name"]), ("model", f"{header['architecture']}, {header['parameters']:,} parameters")]
    rows += [("types" if not i else "", f"{one['type']}: {one['tensors']} tensor{'s' * (one['tensors'] != 1)}, "
              f"{format_size(one['bytes'])}") for i, one in enumerate(header["types"])]
    rows += [("sizes" if not i else "", f"{name} {value}") for i, (name, value) in enumerate(header["fields"].items())]
    said = ", ".join(str(value) for value in (tokenizer["model"], tokenizer["pre"]) if value)
    rows.append(("tokenizer", f"{said or 'none'}, {tokenizer['tokens'] or 0:,} tokens"
                 f"{', with a chat template' if tokenizer['chat_template'] else ''}"))
    return [(label, printable(str(value))[:400]) for label, value in rows if value is not None]


def _verdict(header: dict[str, Any]) -> str:
    if not header["runs"]:
        return f"no: {header['reason']}"
    fits = "which fits" if header["fits"] else "more than is free now"
    return (f"yes, in {format_size(header['planned_bytes'])} of memory, {fits}; not converted yet, which its first run "
            "does")
