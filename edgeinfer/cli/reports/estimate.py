"""Report of `edgeinfer estimate` for people, and the curve over the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...base.units import format_size
from ...errors import printable
from ...quant import TYPES, WeightType
from ...registry import said
from ..output import by, folded, print_table, seconds, speed, whose
from .drafting import drafting_rows
from .energy import energy_rows
from .explain import limits_rows, print_explanation
from .neurons import neurons_line
from .storage import skipping_rows, storage_rows
from .users import users_rows

if TYPE_CHECKING:
    from .plot import Chart

BAR = 40
"""Characters of the fastest speed of a plot on the terminal."""


def print_estimate(out: dict[str, Any]) -> None:
    """Print one device's estimate for people."""
    stored = WeightType.of(out["weights"], out["group_size"]).words
    bandwidth = f"{out['bandwidth_gbs']:.4g} GB/s"
    title = out["device_title"] if bandwidth in out["device_title"] else f"{out['device_title']} ({bandwidth})"
    print("\n".join(folded(f"{out['model']}, {stored}, on {title}")) + "\n")
    for label, text in rows_of(out):
        print("\n".join(folded(text, f"{label:11}")))
    print()
    steps, top = [("context", "tokens/s", "80 % band", "")], max(item["high"] for item in out["contexts"])
    for item in out["contexts"]:
        steps.append((str(item["depth"]), speed(item["decode_tok_per_s"]), _band(item["low"], item["high"]),
                      _bar(item, top)))
    print_table(steps, right=[0, 1])
    if out["explain"]:
        print_explanation(out["explain"])
    for line in remarks_of(out):
        print("\n" + "\n".join(folded(line)))


def rows_of(out: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield label and text of each row, the answers to explicit questions first."""
    pure = out["pure"]
    together = f" of {out['sequences']} sequences" if out["sequences"] > 1 else ""
    yield from _answers(out)
    yield ("decode", f"{speed(out['decode_tok_per_s'])} tokens/s{together} at {out['ctx']} tokens of context "
                     f"({_band(out['low'], out['high'])}), {whose(out)}")
    for item in out["others"]:
        yield "", f"{speed(item['decode_tok_per_s'])} tokens/s {by(item['name'])}"
    yield from storage_rows(out, out["storage_named"])
    if out["ttft_ms"] is None:
        yield "prompt", "unknown, because no peak is published for this device"
    else:
        yield ("prompt", f"{speed(out['prefill_tok_per_s'])} tokens/s, {out['prompt']} tokens in "
                         f"{seconds(out['ttft_ms'])} ({_band(out['prefill_low'], out['prefill_high'])})")
    yield from said("estimate", out)
    if out["ceiling_tok_per_s"] is not None:
        sampled = out["effective_gbs"] or out["bandwidth_gbs"]
        nbytes = round(sampled * 1e9 / out["ceiling_tok_per_s"])  # active experts, sliding windows
        bits = TYPES[out["weights"]].bits
        yield ("ceiling", f"{speed(out['ceiling_tok_per_s'])} tokens/s: {sampled:.4g} GB/s over the "
                          f"{format_size(nbytes)} of a token, pure {bits} bits and {out['kv']} KV")
    other = out["bundle_bytes"] if abs(out["bundle_bytes"] / out["weight_bytes"] - 1) > 0.01 else None
    yield ("weights", f"{format_size(out['weight_bytes'])} with scales, {out['bits_per_weight']:.2f} bits each"
                      f"{f' ({format_size(other)} in the bundle)' if other else ''}; "
                      f"{format_size(out['weight_bytes_read'])} read for a token; pure 4 bits: "
                      f"{format_size(pure['weight_bytes'])}")
    yield ("KV", f"{format_size(out['kv_bytes'])} {out['kv']} with scales; pure int8: {format_size(pure['kv_bytes'])} "
                 f"({pure['kv_bytes'] / 2**30:.2f} GiB)")
    if out["windows"]:
        yield "windows", out["windows"]["said"]
    read, end = out["kv_read"], out["ctx"]
    yield "KV read", f"K {format_size(read['key_bytes'])}, V {format_size(read['value_bytes'])} for a token at {end}"
    if read["chosen"]:
        pays = read["crossover_depth"]
        where = f"pays from {pays} positions on" if pays else f"does not pay within {read['longest_depth']} positions"
        yield "", f"choosing rows of V {where}; {read['assumed']}"
    token = {key: value for key, value in out["terms_ms"].items() if not key.startswith("prefill")}
    parts = ", ".join(f"{key.replace('_', ' ')} {value:.1f} ms" for key, value in token.items())
    yield "one step" if together else "one token", parts
    yield "basis", f"{out['basis']}, ±{out['error']:.0%}: {out['error_source']}"


def _answers(out: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the questions that were asked, which come first."""
    if out["energy_asked"]:
        yield from energy_rows(out, True)
    if (answer := out["answer"]) and answer["ttft_ms"] is not None:
        yield ("answer", f"first word after {seconds(answer['ttft_ms'])}, then {answer['tpot_ms']:.0f} ms a token; "
                         f"{answer['tokens']} tokens after {out['prompt']} in {seconds(answer['total_ms'])}")
    if not out["energy_asked"]:
        yield from energy_rows(out, False)
    if out["users"]:
        yield from users_rows(out["users"])
    yield from limits_rows(out)
    yield from skipping_rows(out)
    yield from drafting_rows(out["speculation"])


def remarks_of(out: dict[str, Any]) -> Iterator[str]:
    """Yield the sentences below the rows."""
    if out.get("decision"):
        yield f"run: {out['decision']['said']}"
    if out["remark"]:
        yield out["remark"]
    if out["accepted"] > 1 and not out["speculation"]:
        assumed = "drafting is assumed to take" if out["draft_cost_assumed"] else "drafting takes"
        yield (f"A forward pass yields {out['accepted']:g} tokens; {assumed} {out['draft_cost']:.0%} of a token's time "
               f"per pass{' (--draft-cost sets it)' if out['draft_cost_assumed'] else ''}.")
    if not out["fits"]:
        yield f"It does not fit: {short_of(out)[2]}; 'edgeinfer plan' lists settings that fit."
    if out["reading"] is not None:
        speeds = "the speeds include that" if out["reading"] else \
            "the speeds assume all of them in memory, because storage was not measured"
        yield (f"Not all weights fit in memory ({out['mode']}): some are read from storage, and {speeds}; 'edgeinfer "
               "plan' says how many.")
    yield from out["notes"]
    if out["file_note"]:
        yield out["file_note"]
    if out["neurons"]:
        if said := out["neurons"]["said"]:
            yield said[0].upper() + said[1:]
        yield neurons_line(out["neurons"])
        return
    if out["device_bytes"]:  # onnxruntime skips no neurons
        return
    point = out["break_even"]
    if point is None:
        yield ("Whether skipping neurons pays off here is not known, because scattered reads were not measured "
               "(edgeinfer devices --probe).")
        return
    times = ", ".join(f"{value:.2f} x at {float(share):.0%}" for share, value in point["relative_time"].items())
    yield (f"A sparse FFN with rows of {point['row_bytes']} bytes reads at {point['efficiency']:.0%} of the bandwidth, "
           f"so it is faster than the dense one from {point['sparsity']:.0%} zeros on{_band_of(point)}; its time by "
           f"share of zeros: {times}.")
    small = ", ".join(f"{float(share):.0%} from {nbytes} bytes" if nbytes else f"{float(share):.0%} never"
                      for share, nbytes in point["smallest_row_bytes"].items())
    yield f"Smallest rows that pay, by share of zeros: {small}."


def print_all_devices(out: dict[str, Any]) -> None:
    """Print a line per device."""
    stored = WeightType.of(out["weights"], out["group_size"]).words
    needed = format_size(out["unstreamed_bytes"])
    print(f"{printable(out['model'])}, {stored}, {out['ctx']} tokens of context: {needed}\n"
          "Tokens per second by device; blank where no peak is published.\n")
    rows = [("device", "empty", f"at {out['ctx']}", "80 % band", "ceiling", f"pp{out['prompt']}", "basis")]
    for item in out["devices"]:
        prefill, top = item["prefill_tok_per_s"], item["ceiling_tok_per_s"]
        basis = item["basis"].removeprefix("class ")
        rows.append((
            item["device"], speed(item["decode_empty_tok_per_s"]), speed(item["decode_tok_per_s"]),
            _band(item["low"], item["high"]), "" if top is None else speed(top),
            "" if prefill is None else speed(prefill),
            basis if item["fits"] and item["mode"] == "resident" else f"{basis}; {item['mode']}" if item["fits"]
            else f"{basis}; does not fit {format_size(item['memory_bytes'])}",
        ))
    print_table(rows, right=[1, 2, 4, 5])
    for line in out["notes"]:
        print("\n" + "\n".join(folded(line)))


def chart(out: dict[str, Any]) -> Chart:
    """Return tokens per second over the context."""
    from .plot import Chart, Line

    found = out["contexts"]
    columns = {key: [item[key] for item in found] for key in ("depth", "decode_tok_per_s", "low", "high")}
    line = Line("estimate, 80 % band", columns["depth"], columns["decode_tok_per_s"], columns["low"], columns["high"])
    return Chart(f"{out['model']} on {out['device_title']}", "tokens of context", "tokens/s", [line])


def _bar(item: dict[str, Any], top: float) -> str:
    """Return a speed and its band to scale: - from the low end to the high one, with # up to the estimate."""
    low, middle, high = (round(BAR * item[key] / top) for key in ("low", "decode_tok_per_s", "high"))
    return "".join("-" if low <= i < high and i != middle - 1 else "#" if i < middle else " " for i in range(high))


def short_of(out: dict[str, Any]) -> tuple[int, int, str]:
    """Return the bytes that a run takes of the memory that limits it, those that there are, and both in words."""
    taken, limit = out["total_bytes"], out["process_budget_bytes"]
    card = out["device_bytes"]
    if limit is not None and taken > limit and card <= out["memory_bytes"]:
        return taken, limit, (f"the process beside the card takes {format_size(taken)}, and --budget allows "
                              f"{format_size(limit)}")
    taken, limit = card or out["unstreamed_bytes"], out["budget_bytes"]
    limited = f", of which the run may take {format_size(limit)}" if out["limited"] and not card else ""
    return taken, limit, (f"a run takes {format_size(card or out['total_bytes'])}, and the device has "
                          f"{format_size(out['memory_bytes'])}{limited}")


def _band_of(point: dict[str, Any]) -> str:
    """Return the band of a break-even that was not measured on the device."""
    low, high = point["sparsity_low"], point["sparsity_high"]
    return "" if point["measured"] else f" ({low:.0%} to {high:.0%})"


def _band(low: float, high: float) -> str:
    return f"{speed(low)} to {speed(high)}"
