"""`edgeinfer info`: contents of a bundle, and its program."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ... import registry
from ...base.strict_json import parse_json
from ...base.units import format_size
from ...config import DEFAULT_DRAFT_TOKENS, RuntimeConfig
from ...errors import BundleError, EdgeInferError, UsageError, printable
from ...quant import WeightType
from ..options import NOTHING, Given, MaybeConverted, takes
from ..output import print_json, print_table
from ..progress import ProgressLine
from ..reports import environment as installation
from ..reports import info_gguf
from ..reports.decision import FIELD

if TYPE_CHECKING:
    from ...bundle import Bundle

JSON_FIELDS = {
    "info": {
        "path": "the bundle",
        "format_version": "of the bundle",
        "made_by": "program and version that wrote it",
        "source": "source of the weights",
        "parameters": "number of weights",
        "config": "architecture and its sizes",
        "quantisation": "requested storage types",
        "ffn_layout": "tile16 (matrices) or neuron (neuron by neuron; `sparse` has the layers that are in tiles)",
        **registry.fields("info"),
        "decision": FIELD + "; `sparse` and `program` are of that way",
        "weights_bytes": "length of weights.bin",
        "rounding": "content of the bundle's calibration.json: how weights were rounded and types were chosen; "
        "null without one",
        "files": "per file `name`, `bytes`",
        "tensors": "per tensor `name`, `type`, `group_size`, `layout`, `shape`, `offset`, `bytes`",
        "header": info_gguf.FIELD,
        "environment": installation.FIELD,
        "program": "with --program: per instruction `record`, `kernel`, `operation`, `bytes_read`",
    },
}
"""Fields of the JSON object, by command."""


@takes("info")
def info(
    model: MaybeConverted = None,
    environment: Annotated[
        bool, typer.Option("--environment", help="Print versions, machine, cache and variables, for a report of a "
                                                 "fault; without MODEL.")
    ] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    program: Annotated[
        bool, typer.Option("--program", help="Print the program: instruction, kernel, operation, bytes read per token.")
    ] = False,
    given: Given = NOTHING,
) -> None:
    """Describe a bundle or a GGUF file.

    For a GGUF file that was converted before, info describes its bundle; otherwise the header, and whether it runs.

    \b
    Examples:
      edgeinfer info demo
      edgeinfer info ./my-bundle --program
      edgeinfer info model-Q8_0.gguf
      edgeinfer info --environment
    """
    from ...bundle import Bundle
    from ...llm.strategy import strategy_report
    from ...models import gguf_file, resolve

    if environment and model is not None:
        raise UsageError(f"--environment takes no MODEL; omit {model!r}.")
    if environment:
        installation.show(given.json)
        return
    if model is None:
        raise UsageError("Name a model, or give --environment.")
    file = gguf_file(model)
    try:
        path = resolve(model, convert=False)
    except EdgeInferError:
        if file is None:
            raise
        info_gguf.show(model, file, tensors, program, given.json)
        return
    with Bundle.open(path) as bundle:
        config = given.runtime(draft_tokens=DEFAULT_DRAFT_TOKENS)
        choice, decision = strategy_report(bundle, config, given.max_kld)
        config = choice.strategy.config if choice else config
        report = {**describe(path, bundle, config), "decision": decision}
        if program:
            report["program"] = instructions(bundle, config)
    if given.json:
        print_json(report)
        return
    print_table(_rows(report))
    if tensors:
        _print_tensors(report)
    if program:
        _print_program(report)


def describe(path: Path, bundle: Bundle, config: RuntimeConfig) -> dict[str, Any]:
    """Return the JSON object of a bundle."""
    from dataclasses import asdict

    from ...graph import build_graph, expected_types
    from ...runtime import decide

    recipe = decide(config.recipe, bundle)[0]
    parameters = build_graph(bundle.config, expected_types(bundle.types), recipe).weight_count
    return {
        "path": str(path), "format_version": bundle.header.version, "made_by": bundle.header.made_by,
        "source": bundle.header.source, "parameters": parameters, "config": asdict(bundle.config),
        "quantisation": asdict(bundle.quantisation),
        "ffn_layout": "neuron" if any(t.layout == "neuron" for t in bundle.types.values()) else "tile16",
        **registry.reports(registry.Reported("info", config, model=bundle)),
        "weights_bytes": bundle.weights_bytes,
        "rounding": _rounding(bundle),
        "files": [{"name": entry.name, "bytes": entry.nbytes} for entry in bundle.files.values()],
        "tensors": [
            {
                "name": entry.name, "type": entry.type.dtype, "group_size": entry.type.group_size,
                "layout": entry.type.layout,
                "shape": entry.shape, "offset": entry.offset, "bytes": entry.nbytes,
                "pieces": entry.pieces, "stride": entry.stride,
            }
            for entry in bundle.tensors.values()
        ],
    }


def _rounding(bundle: Bundle) -> dict[str, Any] | None:
    """Return a bundle's record of the rounding of its weights, for display only."""
    from ...converters import CALIBRATION_FILE

    path = bundle.file(CALIBRATION_FILE)
    try:
        found = parse_json(path.read_bytes()) if path else None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read ({error}); convert the model again.") from None
    if found is not None and not isinstance(found, dict):
        raise BundleError(f"{path} is not a JSON object; convert the model again.")
    return found


def instructions(bundle: Bundle, config: RuntimeConfig) -> list[dict[str, Any]]:
    """Return the program's instructions as JSON objects; opens the model to know them."""
    from ...runtime import Session

    with ProgressLine() as progress:
        session = Session(bundle, config, progress=partial(progress, "compile"),
                          placer=registry.placer(bundle.config, bundle))
    try:
        return [
            {"record": index, "kernel": kernel, "operation": operation, "bytes_read": nbytes}
            for index, kernel, operation, nbytes in session.program.describe()
        ]
    finally:
        session.close()


def _rounding_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the types by their bytes where there are several, and how weights were rounded."""
    nbytes: Counter[str] = Counter()
    for one in report["tensors"]:
        if one["layout"] != "plain":
            nbytes[WeightType.of(one["type"], one["group_size"] or None, one["layout"]).suffix] += one["bytes"]
    rows = [("types", ", ".join(f"{name} {format_size(size)}" for name, size in nbytes.most_common()))]
    found, said = report["rounding"] or {}, []
    if "request" in found:
        said.append(f"types by {found['request']}, {found['bits']:.3g} bits per weight")
    if "text" in found:
        said.append(f"rounded by {found['text']} ({found['method']}, {found['tokens']} tokens)")
    return [*(rows if len(nbytes) > 1 else []), *([("rounding", printable("; ".join(map(str, said))))] if said else [])]


def _part_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if found := report["predictor"]:
        rank = f" of rank {found['rank']}" if found["rank"] else ""
        rows.append(("predictor", f"{found['kind']}{rank}, {format_size(found['bytes'])}; run with --sparse predict"))
    if found := report["screen"]:
        rows.append(("screen", f"of rank {found['rank']}, {format_size(found['bytes'])}; with --head screened "
                               f"{found['share']:.0%} of the head is computed"))
    return rows


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    c, q = report["config"], report["quantisation"]
    stored = WeightType.of(q["weights"], q["group_size"]).words
    heads = f"{c['num_attention_heads']} heads of {c['head_dim']} over {c['num_key_value_heads']} key-value heads"
    widths = f"hidden {c['hidden_size']}, feed-forward {c['intermediate_size']} ({c['hidden_act']})"
    size = format_size(report["weights_bytes"])
    return [
        ("bundle", f"{report['path']} (format {report['format_version']}, made by {printable(report['made_by'])})"),
        ("source", printable(report["source"])),
        ("architecture", f"{c['model_type']}: {c['num_hidden_layers']} layers, {widths}, {heads}"),
        ("vocabulary", f"{c['vocab_size']} tokens{', embedding tied to the head' if c['tie_word_embeddings'] else ''}"),
        ("context", f"{c['max_position_embeddings']} tokens"),
        ("parameters", f"{report['parameters']:,}"),
        ("weights", f"{size}: {stored}, embedding {q['embedding']}, head {q['head']}, "
                    f"FFN {report['ffn_layout']}"),
        *_rounding_rows(report),
        *_part_rows(report),
        *([("run", report["decision"]["said"])] if report["decision"] else []),
        *registry.said("info", report),
        ("files", ", ".join(f"{file['name']} ({format_size(file['bytes'])})" for file in report["files"]) or "none"),
    ]


def _print_tensors(report: dict[str, Any]) -> None:
    rows = [("tensor", "type", "layout", "shape", "bytes")]
    for entry in report["tensors"]:
        kind = entry["type"] + (f"/{entry['group_size']}" if entry["group_size"] else "")
        shape = " x ".join(map(str, entry["shape"]))
        rows.append((entry["name"], kind, entry["layout"], shape, f"{entry['bytes']}"))
    print()
    print_table(rows, right=[4])


def _print_program(report: dict[str, Any]) -> None:
    rows = [("instruction", "kernel", "operation", "bytes read")]
    for entry in report["program"]:
        rows.append((f"{entry['record']}", entry["kernel"], entry["operation"], f"{entry['bytes_read']}"))
    rows.append(("", "", "total", f"{sum(entry['bytes_read'] for entry in report['program'])}"))
    print()
    print_table(rows, right=[0, 3])
