"""Report of `edgeinfer plan`: a table of regions, a bar, the remaining memory, alternatives that fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ... import registry
from ...base.units import format_size
from ...errors import printable
from ...quant import WeightType
from ..output import by, folded, print_json, print_table, say, speed, table, whose
from . import decision, neurons, nodes, serving, state, windows

JSON_FIELDS = {
    "plan": {
        "model": "as given",
        "source": "where its description comes from",
        "fits": "whether a run fits the budget, with weights read from storage where `run` does so by "
        "itself; null with --device cuda where no GPU was found",
        "types": "with --compare, instead of the regions: per type `weights`, `made` and `from` (by converting, "
        "downloaded as GGUF, either, or the model as it is), `file_bytes`, `total_bytes`, `fits`, "
        "`decode_tok_per_s` with half the context filled, `low`, `high`, `ttft_ms` of a `prompt`, `kld` "
        "(least and largest that was measured; null if none was); `shape`, the built-in one, or null; "
        "`quantised`, whether the weights are stored in another type than floats; `bundle`",
        "mode": "where weights are during decoding: resident, streamed, sparse from flash, experts from flash; "
        "refused where it does not fit",
        "from_storage": "where weights are read from storage: that alternative, as in `alternatives`; else null",
        "parameters": "of the model; tied matrices count once",
        "weights": "type of the layers' matrices",
        "group_size": "weights that share a scale",
        "ctx": "context in tokens",
        "kv": "type of the KV cache",
        "threads": "worker threads",
        "device": "as given, or null; with cuda or onnx-cpu also `device_bytes` of regions of the kind device, "
        "`device_budget_bytes` (a GPU's free memory, or a card's memory, null without one), `device_budget_source` "
        "and `max_sequences` that fit",
        "regions": "per region `name`, `bytes`, `kind` (private, mapped, locked, reserve), `reason`",
        "total_bytes": "their sum: the most memory that the process will hold",
        "unstreamed_bytes": "the total with all weights in memory",
        "resident_bytes": "part of it that stays taken until the end",
        "mapped_bytes": "part of it that is the weights' file",
        "reclaimable_bytes": "part of that which the system may drop and read again; 0 with --mlock",
        "budget_bytes": "limit; null for the process next to a GPU without --budget",
        "budget_source": "where the limit comes from",
        "remaining_bytes": "limit less total; negative where it does not fit",
        "max_ctx": "largest context that fits with all weights in memory, at most the model's own; 0 where none does",
        "max_ctx_from_storage": "the same with layers or experts read from storage, where an alternative has them so; "
        "else null",
        "model_ctx": "the model's own limit",
        "pure_weight_bytes": "parameters at 4 bits each, without scales",
        "kv_bytes_per_position": "bytes of the KV cache for each token, where no window keeps fewer",
        "kv_bytes_unshared": "these bytes if each layer had its own K and V",
        "filed_bytes": "of tables that stay in the weights' file, of which a token reads a row: no part of the sum, "
        "which has the pages of a context's rows (region `rows`)",
        "alternatives": "where not all weights fit into memory: `change` (state_memory, ctx, kv, weights or several "
        "joined by +; on a device ctx or samples; draft or speculate for the run without), `value`, `options` (each by "
        "name), `total_bytes`; in the order in which to try them, each checked to fit. The last may be `cold_neurons` "
        "and `streamed_layers`, which `run` does automatically, with `streamed_bytes` read from storage for each token "
        "and `decode_tok_per_s`, null where storage was not measured; or `kept_experts`, likewise, with `experts` in "
        "all and `routing`: the prediction if choices are `alike` and `skewed`, each `busier_half` (the share "
        "that half of the experts takes), `hit_rate`, `streamed_bytes`, `decode_tok_per_s`",
        "estimate": "`decode_tok_per_s` with the context full, `low`, `high` (80 % band), `prefill_tok_per_s`, "
        "`decode_tok_per_s_empty`, `depth`, `sequences`, `prompt`, `ttft_ms`, `device`, `basis`, `error_source`, and "
        "as in `estimate` `program`, `unit`, `unit_words`, `others`; `reading`: where weights are read from storage "
        "whether the speed counts that, else null; null without a profile",
        "file_types": "of a GGUF file or a quantised checkpoint: bytes of its tensors by type; else null",
        "notes": "remarks",
        "neurons": neurons.FIELD,
        **registry.fields("plan"),
        "windows": windows.FIELD,
        "state": state.FIELD,
        "serving": serving.FIELD,
        "decision": decision.FIELD + "; the plan is of that way",
        "error": "where it does not fit: `code`, `message`",
        "models": "with --list, instead of the others: per name `name`, `source` (an id on the hub), `parameters`, "
        "`family` (its model_type)",
        **nodes.FIELDS,
    },
}
"""Fields of the JSON object, by command."""
BAR = 62
MARKS = {"weights": "W", "rows": "R", "kv": "K", "activations": "a", "logits": "l", "constants": "c", "scratch": "s",
         "state": "S", "tables": "t", "python": "P"}


def print_report(report: dict[str, Any]) -> None:
    """Print a plan for people; why it does not fit goes to standard error."""
    print("\n".join(folded(verdict(report))))
    told = f"{report['model']}: {_count(report['parameters'])} parameters, {report['source']}"
    print("\n".join(folded(printable(told))))
    print(f"weights {_storage(report)}, KV {report['kv']}, context {report['ctx']}, {report['threads']} threads\n")
    rows = list(_rows(report))
    lines = list(table((row[:-1] for row in rows), right=[2]))
    for line, (*_, reason) in zip(lines, rows, strict=True):
        print("\n".join(folded(reason, f"{line:{max(map(len, lines))}}  ")) if reason else line)
    print()
    if report["budget_bytes"] is not None:
        for line in bar_lines(report):
            print(line)
        print()
    for line in _figures(report):
        print(line)
    if kept := report["serving"]:
        print("\n".join(serving.serving_lines(kept)))
    for note in report["notes"]:
        print("\n".join(folded(note, "note     ")))
    if report["neurons"]:
        print("\n".join(folded(neurons.neurons_line(report["neurons"]), "neurons  ")))
    if report["decision"] and report["decision"]["name"] != "refused":  # which is said as an error, below
        print("\n".join(folded(report["decision"]["said"], "run      ")))
    if report["fits"] is not None:
        for option in report["alternatives"]:
            change = ", ".join(f"{name.replace('_', ' ')} {format_size(value) if name == 'kv_memory' else value}"
                               for name, value in option["options"].items())
            text = f"{change} ({format_size(option['total_bytes'])}){_streaming(option)}"
            print("\n".join(folded(text, "fits: ")))
    if report["fits"] is False:
        say(report["error"]["message"])


def print_names(as_json: bool) -> None:
    """Print the models that are known by name: shapes, which need no download, and short names of the hub."""
    from ...graph import builtin_shapes
    from ...models import KNOWN_NAMES

    models: list[dict[str, Any]] = [
        {"name": shape.name, "source": shape.source, "parameters": shape.parameters,
         "family": shape.family or shape.config["model_type"]} for shape in builtin_shapes().values()]
    if as_json:
        print_json({"models": models})
        return
    print_table([("name", "parameters", "on the hub"),
                 *((item["name"], _count(item["parameters"]), item["source"]) for item in models)],
                right=[1])
    runs = f"'edgeinfer run' takes demo, {', '.join(KNOWN_NAMES)}, and ids on the hub."
    print("\n" + "\n".join(folded(f"'edgeinfer plan' and 'estimate' take these names, without a download. {runs}")))


def verdict(report: dict[str, Any]) -> str:
    """Return the whole in one line: whether it fits, how fast it is, and how long a prompt takes."""
    fits, found = _fits(report), report["estimate"]
    if found is None or found.get("reading") is False:
        return f"{fits}; speed not measured here"
    wait = "" if found["ttft_ms"] is None else \
        f", {found['prompt']}-token prompt in {speed(found['ttft_ms'] / 1000)} s"
    whose = f"{found['program']}, {found['unit'].upper()}"
    return f"{fits}; {speed(found['decode_tok_per_s'])} tok/s{wait} ({whose})"


def _fits(report: dict[str, Any]) -> str:
    """Return whether it fits, and the limit."""
    total, budget = report["total_bytes"], report["budget_bytes"]
    own = format_size(total) if budget is None else f"{format_size(total)} of {format_size(budget)}"
    words = {None: "Whether it fits is not known", True: "It fits", False: "It does not fit"}[report["fits"]]
    if report["fits"] is False and (report["remaining_bytes"] or 0) >= 0 \
            and report.get("device_bytes", 0) <= (report.get("device_budget_bytes") or 0):
        pool = "the KV pool is too small for one block"
        if report["error"]["message"].startswith("The state memory"):
            pool = "the state memory is too small for one checkpoint"
        return f"{words}: {pool}"
    if taken := report.get("device_bytes"):
        has = report["device_budget_bytes"]
        gpu = f"{format_size(taken)} of a GPU, and none was found here" if has is None else \
            f"{format_size(taken)} of the GPU's {format_size(has)}"
        if report["fits"] is False and (report["remaining_bytes"] or 0) < 0 and (has is None or taken <= has):
            return f"{words}: {format_size(total)} of this process's {format_size(budget)}"
        return f"{words}: {gpu}; {own} in this process" if report["device_budget_source"] is None else f"{words}: {gpu}"
    if offer := report["from_storage"]:
        ((name, value),) = ((name, value) for name, value in offer["options"].items() if name in _READ)
        return f"{words}, {_READ[name].format(value)}: {own}"
    return f"{words}: {own}"


_READ = {"streamed_layers": "with {} layers read from storage", "kept_experts": "with {} experts in memory",
         "cold_neurons": "with {} neurons read from storage"}
"""Words of the first line for weights that are not in memory."""


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e8 else f"{parameters / 1e6:.3g} M"


def _storage(report: dict[str, Any]) -> str:
    return WeightType.of(report["weights"], report["group_size"]).words


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for region in report["regions"]:
        mark = MARKS.get(region["name"], region["name"][:1])
        yield mark, region["name"], format_size(region["bytes"]), region["kind"], region["reason"]
    split = f"{format_size(report['resident_bytes'])} resident"
    if report["reclaimable_bytes"]:
        split += f", {format_size(report['reclaimable_bytes'])} reclaimable"
    yield "", "total", format_size(report["total_bytes"]), "", split


def bar_lines(report: dict[str, Any]) -> list[str]:
    """Return the regions to scale, and below them the budget; the longer of both fills the line."""
    whole = max(report["total_bytes"], report["budget_bytes"])
    bar, end = "", 0
    for region in report["regions"]:
        if region["kind"] == "device":
            continue
        end += region["bytes"]
        bar += MARKS.get(region["name"], region["name"][:1]) * (round(BAR * end / whole) - len(bar))
    limit = max(1, round(BAR * report["budget_bytes"] / whole))
    return [f"[{bar.ljust(BAR, '.')}]", f" {'=' * limit} budget {format_size(report['budget_bytes'])}"]


def _streaming(option: dict[str, Any]) -> str:
    """Return the cost of streamed layers; empty for other alternatives."""
    if "streamed_bytes" not in option:
        return ""
    fast = option["decode_tok_per_s"]
    how = "speed not measured here" if fast is None else f"{speed(fast)} tok/s"
    skewed = ""
    if routing := option.get("routing"):
        other = routing["skewed"]
        skewed = (f" where all experts are chosen alike ({routing['alike']['hit_rate']:.0%} are there), "
                  f"{format_size(other['streamed_bytes'])} where half of them take {other['busier_half']:.0%} "
                  f"({other['hit_rate']:.0%})")
    return f", {format_size(option['streamed_bytes'])} from storage for each token{skewed}: {how}"


def _figures(report: dict[str, Any]) -> Iterator[str]:
    if (left := report["remaining_bytes"]) is not None:
        verdict = f"{format_size(left)} left" if left >= 0 else f"{format_size(-left)} short"
        yield f"budget   {format_size(report['budget_bytes'])} ({report['budget_source']}): {verdict}"
    if report.get("device_bytes"):
        has = report["device_budget_bytes"]
        of = "of a GPU, and none was found here" if has is None else \
            f"of {format_size(has)} ({report['device_budget_source']})"
        yield f"GPU      {format_size(report['device_bytes'])} {of}"
    if report.get("max_sequences") is not None:
        yield f"slots    at most {report['max_sequences']} sequences of this context fit (the limit is 64)"
    if (own := report["kv_bytes_per_position"]) < (whole := report.get("kv_bytes_unshared", own)):
        yield f"KV       {own} bytes per token, {whole} without shared K and V"
    where = "" if (stored := report.get("max_ctx_from_storage")) is None else \
        f" with all weights in memory, {stored} with weights read from storage as below"
    yield from folded(f"at most {report['max_ctx']} tokens fit{where} (the model's limit is {report['model_ctx']})",
                      "context  ")
    if kept := report["windows"]:
        yield from folded(kept["said"], "windows  ")
    if kept := report.get("state"):
        yield from folded(kept["said"], "state    ")
    for label, words in registry.said("plan", report):
        yield from folded(words, f"{label:9}")
    if found := report["estimate"]:
        prefill = found["prefill_tok_per_s"]
        yield from folded(f"{speed(found['decode_tok_per_s'])} tok/s after {found['depth']} tokens "
                          f"({speed(found['low'])} to {speed(found['high'])}), "
                          f"{speed(found['decode_tok_per_s_empty'])} at the start; {whose(found)}", "speed    ")
        for item in found["others"]:
            yield f"         {speed(item['decode_tok_per_s'])} tok/s {by(item['name'])}"
        if prefill is not None:
            yield f"prompts  {speed(prefill)} tok/s"
        fitting = "" if report["fits"] and found.get("reading") is not False else " if it had enough memory"
        yield from folded(f"{found['device']}{fitting}, {found['basis']}: {found['error_source']}", "basis    ")
