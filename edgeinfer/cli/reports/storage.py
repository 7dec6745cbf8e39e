"""Weights that a device reads from its storage, and whether it pays there to leave out neurons that are zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ...base.units import format_size
from ...quant import WeightType
from ..output import folded, print_table, speed

if TYPE_CHECKING:
    from edgeinfer.devices import DeviceProfile, Traffic
    from edgeinfer.memory_planner import MemoryPlan

    from ...models.description import ModelDescription

FIELD = ("storage of the device: `kind`, `sequential_gbs`, `random_gbs` (pairs of bytes and GB/s), `spread` (half the "
         "width of its band), `source`, `load_ms` of all weights, and of a run's reads while it decodes "
         "`read_bytes` a token, `read_ms`, `streamed_layers` of `layers`, `experts` (`kept` of `total`, and by "
         "routing `hit_rate`, `read_bytes`, `decode_tok_per_s`); null where nothing is known of it")
SKIPPING_FIELD = ("with --sparsity: `sparsity`, `row_bytes`, `efficiency` of scattered rows beside reading in order "
                  "(`efficiency_low`, `efficiency_high`), `source`, `dense_tok_per_s`, `decode_tok_per_s` with `low` "
                  "and `high` from the band of the reads alone, `pays_from` (share of zeros, `pays_from_low`, "
                  "`pays_from_high`; null with weights from storage) and `verdict` (pays, may pay, does not pay); "
                  "else null")
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
"""Shares of zero rows whose time is compared with the dense network's."""
PAYS, MAY_PAY, LOSES = "pays", "may pay", "does not pay"


def storage_object(model: ModelDescription, profile: DeviceProfile, traffic: Traffic, plan: MemoryPlan | None,
                   ctx: int, kind: str | None = None) -> dict[str, Any] | None:
    """Return the known figures of a device's storage, and a run's reads from it; None if nothing is known.

    Parameters
    ----------
    model : ModelDescription
    profile : DeviceProfile
    traffic : Traffic
        Of the run.
    plan : MemoryPlan or None
        Of the run; None where none fits.
    ctx : int
    kind : str, optional
        Of the storage, where one was named.
    """
    gbs = profile.storage_sequential_gbs
    if not gbs:
        return None
    read, layers = traffic.streamed_bytes or traffic.flash_bytes, model.layers
    found = {**devices.storage_report(profile, kind), "load_ms": model.weight_bytes / gbs / 1e6, "layers": layers,
             "streamed_layers": len(plan.parts) if plan else 0, "read_bytes": round(read),
             "read_ms": _read_ms(profile, traffic), "experts": None}
    if plan and plan.experts:
        found["experts"] = {"kept": plan.experts.slots, "total": plan.experts.total,
                            **_routings(profile, traffic, plan, ctx)}
    return found


def _read_ms(profile: DeviceProfile, traffic: Traffic) -> float:
    """Return the milliseconds of storage for a token, whether computing hides them or not."""
    gbs = float(profile.storage_sequential_gbs or 0)
    chunk = traffic.flash_chunk_bytes
    scattered = profile.storage_random.at(max(1, round(chunk))) if profile.storage_random and chunk else gbs
    return (traffic.streamed_bytes / gbs + traffic.flash_bytes / scattered) / 1e6


def _routings(profile: DeviceProfile, traffic: Traffic, plan: MemoryPlan, ctx: int) -> dict[str, Any]:
    """Return hit rates and speeds where all experts are chosen alike, and where some are chosen more."""
    from edgeinfer.offload import ALIKE, SKEWED, from_flash

    found = {}
    for name, half in (("alike", ALIKE), ("skewed", SKEWED)):
        expected = from_flash(plan.experts, half)  # type: ignore[arg-type]
        one = replace(traffic, flash_bytes=expected.nbytes,
                      flash_chunk_bytes=expected.read_bytes if profile.storage_random else 0)
        found[name] = {"hit_rate": expected.hit_rate, "read_bytes": round(expected.nbytes),
                       "decode_tok_per_s": devices.estimate(profile, one, ctx).decode_tok_per_s}
    return found


def skipping_object(model: ModelDescription, profile: DeviceProfile, traffic: Traffic, ctx: int, sparsity: float,
                    row_bytes: float) -> dict[str, Any] | None:
    """Return whether leaving out zero rows of the feed-forward networks pays; None if reads are not known.

    Rows come from where the weights are: from memory, or from storage where layers are streamed or experts are read.

    Parameters
    ----------
    model : ModelDescription
    profile : DeviceProfile
    traffic : Traffic
        Of the run, all rows read.
    ctx : int
    sparsity : float
        Share of rows that are zero.
    row_bytes : float
        Contiguous bytes of a row.
    """
    stored = bool(traffic.streamed_bytes or traffic.flash_bytes)
    if profile.memory_random is None or (stored and profile.storage_random is None) or not traffic.ffn_bytes:
        return None
    dense = devices.estimate(profile, traffic, ctx).decode_tok_per_s
    sparse = _skipping(model, traffic, sparsity, row_bytes)
    band = (profile, *devices.slow_and_fast(profile))
    value, low, high = (devices.estimate(one, sparse, ctx).decode_tok_per_s for one in band)
    points = [devices.break_even(one, row_bytes) for one in band]
    known = devices.spread_of(profile, devices.MEMORY_SPREAD)
    return {
        "sparsity": sparsity, "row_bytes": round(row_bytes), "efficiency": points[0].efficiency,
        "efficiency_low": points[1].efficiency, "efficiency_high": points[2].efficiency, "spread": known,
        "source": profile.sources.get("memory_random", "measured by the probe"), "from_storage": stored,
        "dense_tok_per_s": dense, "decode_tok_per_s": value, "low": low, "high": high,
        "pays_from": None if stored else points[0].sparsity,
        "pays_from_low": None if stored else points[2].sparsity,
        "pays_from_high": None if stored else points[1].sparsity,
        "verdict": PAYS if low > dense else LOSES if high < dense else MAY_PAY,
    }


def _skipping(model: ModelDescription, traffic: Traffic, sparsity: float, row_bytes: float) -> Traffic:
    """Return the traffic without the rows that are zero, in memory and in storage."""
    kept, head = 1 - sparsity, _head_bytes(model)
    share = min(1.0, traffic.ffn_bytes / max(traffic.weight_bytes - head, 1))  # of a layer that is its FFN
    streamed = traffic.streamed_bytes
    read = (streamed * share + traffic.flash_bytes) * kept
    return replace(traffic, active_share=max(kept, 1e-6), row_bytes=row_bytes, neuron_layers=(),
                   streamed_bytes=streamed * (1 - share), flash_bytes=read, flash_chunk_bytes=row_bytes)


def _head_bytes(model: ModelDescription) -> float:
    return sum(read.token for op in model.graph.ops if op.out.rows == "outputs" for read in op.reads(model.graph.types))


def storage_rows(out: dict[str, Any], always: bool) -> Iterator[tuple[str, str]]:
    """Yield the row of an estimate on its storage: if it was named, or if something is read from it."""
    found = out["storage"]
    if not found or not (always or found["read_bytes"]):
        return
    said = f"{found['kind']}, {found['sequential_gbs']:.3g} GB/s ±{found['spread']:.0%}"
    if not found["read_bytes"]:
        yield "storage", (f"{said}; all weights fit in memory, so nothing is read while it answers; to load "
                          f"{format_size(out['weight_bytes'])} takes {found['load_ms'] / 1000:.1f} s")
        return
    what = f"{found['streamed_layers']} of {found['layers']} layers are streamed"
    if experts := found["experts"]:
        alike, skewed = experts["alike"], experts["skewed"]
        what = (f"{experts['kept']} of {experts['total']} experts are in memory: {alike['hit_rate']:.0%} of the chosen "
                f"ones where all are chosen alike, {skewed['hit_rate']:.0%} ({speed(skewed['decode_tok_per_s'])} "
                "tokens/s) where half of them take 75 %")
    yield "storage", (f"{said}; {what}; {format_size(found['read_bytes'])} for each token takes "
                      f"{found['read_ms']:.0f} ms")


def skipping_rows(out: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows on leaving out neurons."""
    found = out["skipping"]
    if not found:
        return
    where = " read from storage" if found["from_storage"] else ""
    from_on = "" if found["pays_from"] is None else (
        f"; it pays from {found['pays_from']:.0%} zeros on ({found['pays_from_low']:.0%} to "
        f"{found['pays_from_high']:.0%})")
    yield "skipping", (f"{found['verdict']}: {speed(found['decode_tok_per_s'])} tokens/s with {found['sparsity']:.0%} "
                       f"zeros in rows of {format_size(found['row_bytes'])}{where} ({speed(found['low'])} to "
                       f"{speed(found['high'])}) instead of {speed(found['dense_tok_per_s'])}{from_on}")
    uncounted = "the time of predicting which rows are zero is not counted"
    if found["from_storage"]:
        yield "", f"{out['storage']['source']}; {uncounted}"
        return
    yield "", (f"scattered rows are read at {found['efficiency']:.0%} of the bandwidth "
               f"({found['efficiency_low']:.0%} to {found['efficiency_high']:.0%}); {found['source']}; {uncounted}")


def print_skipping(out: dict[str, Any]) -> None:
    """Print a line per device, the answer first."""
    found = [(item, item["skipping"]) for item in out["devices"] if item["fits"] and item["skipping"]]
    if not found:
        print("The model fits no device, or has no feed-forward network whose rows could be left out.")
        return
    one, counts = found[0][1], {verdict: 0 for verdict in (PAYS, MAY_PAY, LOSES)}
    for _, each in found:
        counts[each["verdict"]] += 1
    print(f"{one['sparsity']:.0%} zeros in rows of {format_size(one['row_bytes'])}: pays on {counts[PAYS]} devices, "
          f"may pay on {counts[MAY_PAY]},\ndoes not on {counts[LOSES]}. Tokens per second, and the zeros from which it "
          "pays.\n")
    rows = [("device", "dense", "skipping", "band", "pays from", "band", "verdict")]
    for item, each in found:
        point = ("storage", "") if each["pays_from"] is None else (
            f"{each['pays_from']:.0%}", f"{each['pays_from_low']:.0%}-{each['pays_from_high']:.0%}")
        rows.append((item["device"][:16], speed(each["dense_tok_per_s"]), speed(each["decode_tok_per_s"]),
                     f"{speed(each['low'])}-{speed(each['high'])}", *point, each["verdict"]))
    print_table(rows, right=[1, 2, 4])
    for line in out["notes"]:
        print("\n" + "\n".join(folded(line)))


def break_even_object(model: ModelDescription, profile: DeviceProfile) -> dict[str, Any] | None:
    """Return where skipping neurons of the feed-forward networks pays; None if scattered reads are not known."""
    if profile.memory_random is None:
        return None
    row = neuron_bytes(model)
    point, low, high = (devices.break_even(one, row) for one in (profile, *devices.slow_and_fast(profile)))
    return {
        "row_bytes": row, "efficiency": point.efficiency, "sparsity": point.sparsity,
        "sparsity_low": high.sparsity, "sparsity_high": low.sparsity,
        "measured": devices.MEMORY_SPREAD not in profile.figures,
        "relative_time": {str(share): point.relative_time(share) for share in SPARSITIES},
        "smallest_row_bytes": {str(share): devices.smallest_row(profile, share) for share in SPARSITIES},
    }


def neuron_bytes(model: ModelDescription) -> int:
    """Return the bytes of a row of one neuron: `hidden_size` weights as they are stored, with their scales."""
    quantisation, width = model.quantisation, model.config.hidden_size
    return WeightType.of(quantisation.weights, quantisation.group_size).bytes_of(width)
