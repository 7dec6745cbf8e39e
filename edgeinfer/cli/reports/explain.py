"""`edgeinfer estimate --explain`: the formulas of an estimate with their numbers, its limits, and techniques."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from edgeinfer import devices

from ...base.dataclass import dataclass
from ..output import folded, speed

if TYPE_CHECKING:
    from edgeinfer.devices import Constants, DeviceProfile, Traffic

    from ...backends import OnCard
    from ...models.description import ModelDescription

FIELD = ("with --explain: per formula `group`, `name`, `formula` (written out with its numbers), `value` and `unit`; "
         "else null")
ACCEPTED, SPARSITY = 2.0, 0.8
"""Tokens per pass and share of zero rows for which techniques are shown."""
LAYERS = 32
Parts = Mapping[str, tuple[float, float]]
"""Bytes and operations of a token by part of the model."""
LIMITS = "Limits"


@dataclass(frozen=True)
class Line:
    """One formula with its numbers."""

    group: str
    name: str
    formula: str
    value: float
    unit: str


def explained(model: ModelDescription, profile: DeviceProfile, traffic: Traffic, kv: str, ctx: int, prompt: int,
              card: OnCard | None = None) -> list[dict[str, Any]]:
    """Return the lines as JSON objects.

    Parameters
    ----------
    model : ModelDescription
    profile : DeviceProfile
        As the program uses the device.
    traffic : Traffic
        Of the run.
    kv : str
        Type of the KV cache.
    ctx, prompt : int
        Positions before the token, and tokens of the prompt.
    card : OnCard, optional
        The run, if it is on a card with memory of its own.
    """
    constants = devices.constants_for(profile, traffic)
    parts: Parts = dict(card.sizes.parts) if card else _parts(model)
    position = card.position_bytes if card else model.kv_bytes_per_position[kv]
    other = None if card else "f16" if kv == "int8" else "int8"  # onnxruntime has one type on a card
    found = [*_by_hand(model, profile, ctx), *_bytes(model, traffic, parts, position, kv, ctx, prompt),
             *_decode(profile, traffic, constants, ctx), *_prompt(profile, traffic, constants, prompt),
             *_limits(parts, profile, traffic, constants, prompt),
             *_techniques(model, profile, traffic, constants, other, ctx)]
    return [asdict(line) for line in found]


def print_explanation(lines: list[dict[str, Any]]) -> None:
    """Print the lines by group."""
    group = ""
    for line in lines:
        if line["group"] != group:
            group = line["group"]
            print(f"\n{group}")
        print("\n".join(folded(f"{line['formula']} = {_shown(line['value'])}{' ' * bool(line['unit'])}{line['unit']}",
                               f"  {line['name']:17} ")))


def limits_rows(out: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the row on which limit holds, memory, storage or arithmetic, and how much of each is used."""
    found = {line["name"]: line for line in out["explain"] or () if line["group"] == LIMITS}
    if not found:
        return
    ffn = found["FFN"]["formula"].partition("; ")[2] if "FFN" in found else ""
    token = {name: ms for name, ms in out["terms_ms"].items() if not name.startswith("prefill")}
    if token.get("streaming", 0.0) + token.get("flash", 0.0) > sum(token.values()) / 2:
        ffn = ffn.replace("memory is the limit in decoding", "storage is the limit in decoding")
    used = ", ".join(f"{name} {found[name]['value']:.0f} %" for name in ("MBU", "MFU") if name in found)
    yield "limits", f"{ffn}{'; ' if ffn else ''}{used}; the formulas are below"


def _shown(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _g(operations: float) -> str:
    return f"{_shown(operations / 1e9)} G operations"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _by_hand(model: ModelDescription, profile: DeviceProfile, ctx: int) -> Iterator[Line]:
    """Yield the calculation that people do in their heads: no scales, one bandwidth."""
    drawn = profile.effective_gbs or profile.bandwidth_gbs
    weights, keys = model.pure_weight_bytes(), model.kv_values_per_position * ctx
    yield Line("By hand, without scales", "weights", f"{model.parameters / 1e9:.4g} G weights x 4 bits / 8",
               weights / 1e9, "GB")
    yield Line("By hand, without scales", "KV", f"{model.kv_values_per_position} values a position x {ctx} x 1 byte",
               keys / 2**30, "GiB")
    active = model.active_parameters / 2 + keys
    yield Line("By hand, without scales", "tokens/s",
               f"{drawn:.4g} GB/s / ({_gb(model.active_parameters / 2)} + {_gb(keys)})", drawn * 1e9 / active, "")


def _bytes(model: ModelDescription, traffic: Traffic, parts: Parts, position: int, kv: str, ctx: int,
           prompt: int) -> Iterator[Line]:
    group = "Bytes of a token"
    said = " + ".join(f"{name} {_gb(nbytes)}" for name, (nbytes, _) in parts.items())
    yield Line(group, "weights", said, sum(nbytes for nbytes, _ in parts.values()) / 1e9, "GB")
    layers = max(1, sum(bool(op.kv and op.kv.stores) for op in model.graph.ops))
    yield Line(group, "KV of a position", f"{position} bytes in {layers} layers, {kv}", position / layers,
               "bytes a layer")
    yield Line(group, "KV read", f"{traffic.kv_bytes + traffic.window_kv_bytes:.0f} bytes x {ctx} positions, windows "
               "and chosen rows as they are", traffic.kv_bytes_at(ctx) / 1e6, "MB")
    if traffic.state_bytes:
        yield Line(group, "state", "recurrent layers, read and written", traffic.state_bytes / 1e6, "MB")
    heads = model.config.num_attention_heads
    yield Line(group, "prompt scores", f"{prompt} x {prompt} x {heads} heads x 2 bytes, one layer, if they were "
               "kept (edgeinfer keeps none)", prompt * prompt * heads * 2 / 2**20, "MiB")
    yield Line(group, "averaged", f"{prompt} x {prompt} x 2 bytes, the heads averaged", prompt * prompt * 2 / 2**20,
               "MiB")


def _parts(model: ModelDescription) -> Parts:
    """Return bytes and operations of a token by attention, FFN and head."""
    from ...graph import PARTS

    found = {name: [0.0, 0.0] for name in PARTS}
    for op in model.graph.ops:
        part = found[op.part]
        part[0] += sum(read.token for read in op.reads(model.graph.types))
        part[1] += op.operations()
    return {name: (nbytes, operations) for name, (nbytes, operations) in found.items()}


def _decode(profile: DeviceProfile, traffic: Traffic, constants: Constants, ctx: int) -> Iterator[Line]:
    group, gbs = "Time of a token", profile.bandwidth_gbs
    terms = devices.decode_terms(profile, traffic, constants, ctx)
    yield Line(group, "fixed", f"{constants.token_ms:.3g} ms + {constants.t0_ms:.3g} ms x {traffic.layers}/{LAYERS}",
               terms["overhead"], "ms")
    yield Line(group, "weights", f"{_gb(traffic.weight_bytes - traffic.skipped_bytes)} / ({constants.f_w:.3g} x "
               f"{gbs:.4g} GB/s)", terms["weights"] + terms.get("sparse_ffn", 0.0), "ms")
    yield Line(group, "KV and state", f"{_gb(traffic.sequence_bytes_at(ctx))} / ({constants.f_kv:.3g} x {gbs:.4g} GB/s)"
               + (f" + {constants.attention_ms:.3g} ms x {_g(traffic.attention_operations_of(1, ctx))}"
                  if constants.attention_ms else ""), terms.get("kv", 0.0), "ms")
    whole = sum(terms.values())
    yield Line(group, "token", " + ".join(f"{_shown(value)}" for value in terms.values()), whole, "ms")
    yield Line(group, "tokens/s", f"1000 / {whole:.3g} ms", 1000 / whole, "")


def _prompt(profile: DeviceProfile, traffic: Traffic, constants: Constants, prompt: int) -> Iterator[Line]:
    group, peak = "Time of a prompt", devices.peak_of(profile, constants)
    terms = devices.prefill_terms(profile, traffic, constants, 0, prompt)
    if not terms or not peak:
        return
    operations = (traffic.operations - traffic.head_operations) * prompt + traffic.head_operations
    multiplied = f"{_g(operations)} / ({constants.mfu:.3g} x {peak:.4g} G/s)"
    said = f"{multiplied} + {constants.unhidden:.2g} of each reading of the weights" if constants.few_rows else \
        f"max({multiplied}, one reading of the weights)"
    yield Line(group, "matrices", said, terms["prefill_matrices"], "ms")
    attention = traffic.attention_operations_of(prompt, 0)
    yield Line(group, "attention", f"{_g(attention)} / ({constants.mfu_attention:.3g} x "
               f"{peak:.4g} G/s)", terms["prefill_attention"], "ms")
    whole = sum(terms.values())
    yield Line(group, "first word", " + ".join(f"{_shown(value)}" for value in terms.values()), whole, "ms")


def _limits(parts: Parts, profile: DeviceProfile, traffic: Traffic, constants: Constants,
            prompt: int) -> Iterator[Line]:
    """Yield arithmetic intensities, the ridge point, and how much of bandwidth and peak is used."""
    group, gbs, peak = LIMITS, profile.bandwidth_gbs, devices.peak_of(profile, constants)
    ridge = constants.mfu * peak / (constants.f_w * gbs) if peak else None
    if ridge and peak:
        yield Line(group, "ridge point", f"{constants.mfu:.3g} x {peak:.4g} G/s / ({constants.f_w:.3g} x {gbs:.4g} "
                   "GB/s)", ridge, "operations a byte")
    for name, (nbytes, operations) in parts.items():
        once = operations / nbytes if nbytes else 0.0
        bound = "" if ridge is None else f"; {_bound(once, ridge)} in decoding"
        if name != "head":
            bound += "" if ridge is None else f", {_bound(once * prompt, ridge)} in a prompt of {prompt}"
        yield Line(group, name, f"{_g(operations)} / {_gb(nbytes)}{bound}", once,
                   "operations a byte")
    if traffic.kv_bytes:
        yield Line(group, "KV", f"{traffic.attention_operations:.0f} operations / {traffic.kv_bytes:.0f} bytes a "
                   "position", traffic.attention_operations / traffic.kv_bytes, "operations a byte")
    token = sum(devices.decode_terms(profile, traffic, constants, 0).values())
    yield Line(group, "MBU", f"{_gb(traffic.weight_bytes - traffic.skipped_bytes)} / {token:.3g} ms / {gbs:.4g} GB/s",
               100 * (traffic.weight_bytes - traffic.skipped_bytes) / token / gbs / 1e6, "%")
    terms = devices.prefill_terms(profile, traffic, constants, 0, prompt)
    if peak and terms:
        whole, operations = sum(terms.values()), traffic.operations * prompt
        yield Line(group, "MFU", f"{_g(operations)} / {_shown(whole)} ms / {peak:.4g} G/s",
                   100 * operations / whole / peak / 1e6, "%")


def _bound(intensity: float, ridge: float) -> str:
    return "memory is the limit" if intensity < ridge else "arithmetic is"


def _techniques(model: ModelDescription, profile: DeviceProfile, traffic: Traffic, constants: Constants,
                other: str | None, ctx: int) -> Iterator[Line]:
    """Yield the effects of techniques, each with the condition under which it does not pay; `other` is another type of
    the KV cache."""
    group = "Techniques, tokens/s"

    def tok_per_s(changed: Traffic) -> float:
        return 1000 / sum(devices.decode_terms(profile, changed, constants, ctx).values())

    now = tok_per_s(traffic)
    if other:
        yield Line(group, f"--kv {other}", f"KV of {_gb(model.traffic(other).kv_bytes_at(ctx))} instead of "
                   f"{_gb(traffic.kv_bytes_at(ctx))}; without a context it changes nothing",
                   tok_per_s(replace(traffic, kv_bytes=model.traffic(other).kv_bytes,
                                     window_kv_bytes=model.traffic(other).window_kv_bytes)), "")
    cost = 1 + devices.DRAFT_SHARE * (ACCEPTED - 1)
    yield Line(group, "--speculate", f"{ACCEPTED:g} tokens a pass: {speed(now)} x {ACCEPTED:g} / {cost:g}; it loses "
               f"below {cost:.3g} tokens a pass", now * ACCEPTED / cost, "")
    ffn, gbs = traffic.ffn_bytes, constants.f_w * profile.bandwidth_gbs
    if ffn and not traffic.neuron_layers and traffic.active_share == 1:
        kept = 1 - SPARSITY
        rest = traffic.weight_bytes - ffn
        yield Line(group, "sparse FFN", f"with {SPARSITY:.0%} zeros {_gb(rest)} / {gbs:.3g} GB/s + {_gb(kept * ffn)} / "
                   f"({gbs:.3g} GB/s x e); it loses where scattered rows are read at e below {kept:.2g}; with e = 1",
                   1000 / (1000 / now - SPARSITY * ffn / gbs / 1e6), "")
