"""Tokens per second before anything is loaded: bytes over bandwidth, operations over peak, and a fixed time a token.

A token takes ``token + t0 * layers/32 + weights/(f_w*BW) + KV/(f_kv*BW) + attention_ms * attention [+ storage]`` where
token and attention_ms are known for machines that were probed, and layers that are streamed add the time that their
reading takes longer than all that; a prompt takes the longer of its operations at ``mfu`` of the peak and of one
reading of the weights, plus attention, which grows with the square of its length. The constants are this machine's
where runs have calibrated it, else the device's own, else those of its class (classes.toml has the data of each fit). A
roofline in the sense of Williams, Waterman and Patterson, CACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from edgeinfer.base.dataclass import dataclass
from edgeinfer.errors import UsageError

from .device_classes import Constants, constants_of
from .names import unit_in_words, unit_of
from .neurons import relative_time
from .profile import DeviceProfile
from .random_reads import memory_efficiency, storage_gbs
from .several_rows import OVERLAP, activations_ms, peak_of, together_ms, weights_ms
from .storage import slow_and_fast
from .traffic import Traffic
from .type_costs import costs_of

LAYERS = 32
"""Layers that t0_ms is stated for."""


KEYS_ALONE, VALUES_APART = 0.05, 0.6
"""Additional time of reading K alone, and of reading selected blocks of V, over reading both planes in sequence.

Shares, fitted like `SCORES` to ratios of benchmarks/topn_speed.py (docs/explanation/long-context.md). The number of
blocks is an assumption of its own (edgeinfer.graph.topn_cost). The arithmetic of attention is counted as if nothing
were omitted: the products with V are the cheaper ones.
"""
SCORES, SCORES_OF_TOP = 0.3, 0.5
"""Cost of scores, most of which stay in a cache, as a share of the memory time: for a share of the largest weight, and
for a number of rows, which takes repeated searches.
"""
TOPN_MS = 0.01
"""Time of a layer that selects rows of V, beside its reading and writing."""
PROMPT_CHUNK = 256
"""Tokens of a forward pass over a prompt; each pass reads the weights in storage again."""
DRAFT_SHARE = 0.1
"""Assumed time of drafting a token, as a share of a token of the model, unless given."""


@dataclass(frozen=True)
class Estimate:
    """Predicted speed on a device. Times are milliseconds; low and high hold 80 % of measurements."""

    decode_tok_per_s: float
    low: float
    high: float
    ceiling_tok_per_s: float | None
    """Pure bandwidth: the bits of the weights' type and of the KV cache's without scales, with no other time; None if
    the traffic does not say how many there are."""
    peak_tok_per_s: float | None
    """The same at the vendor's peak of the memory, or of its fastest version: no speed and no band is above."""
    prefill_tok_per_s: float | None
    """Tokens per second of a prompt; None if the device's peak is not known."""
    prefill_low: float | None
    prefill_high: float | None
    ttft_ms: float | None
    """Time of the prompt; loading is not in it."""
    bytes_per_token: float
    """Weights, keys and values read from memory for one token."""
    terms: Mapping[str, float]
    """Milliseconds of one pass: overhead, weights, sparse_ffn, kv, flash, streaming, draft; of the prompt:
    prefill_overhead, prefill_matrices, prefill_activations, prefill_attention, prefill_streaming."""
    basis: str
    """'this machine, calibrated', 'class NAME' or 'unknown'."""
    error: float
    """Half-width of the decode band as a share."""
    error_source: str
    """Origin of the band."""
    depth: int
    prompt: int
    sequences: int
    """Number of sequences that decode together; tokens per second are those of all."""
    program: str
    """Program whose speed it is."""
    unit: str
    """Unit that the program runs on: cpu, gpu or npu; `unit_words` for people."""
    unit_words: str
    others: Mapping[str, float]
    """Tokens per second with other programs, and on other versions of the device, by their difference; the band
    reaches to them."""


def estimate(
    profile: DeviceProfile, traffic: Traffic, depth: int = 0, prompt: int = 512, accepted: float = 1.0,
    draft_cost: float | None = None, computed: float = 1.0, sequences: int = 1,
) -> Estimate:
    """Estimate the speed of a model on a device.

    Parameters
    ----------
    profile : DeviceProfile
    traffic : Traffic
    depth : int
        Positions of context before the token, or before the prompt.
    prompt : int
        Tokens of the prompt.
    accepted : float
        Mean tokens that one pass yields (speculative decoding); 1 without.
    draft_cost : float, optional
        Time of drafting for one pass, as a share of a token of the model; by default DRAFT_SHARE for each token beyond
        the first.
    computed : float
        Share of the prompt's tokens times layers that is computed, where prompts are pruned. A layer is assumed to take
        time as it has tokens, attention included, for blocks of keys are read whole; choosing tokens is left out.
    sequences : int
        That decode together, each after `depth` positions: weights are read once for all, keys and values of each.

    Raises
    ------
    UsageError
        A negative depth or cost, an empty prompt, fewer than one accepted token or sequence, or a sparse or offloaded
        model on a device whose random reads are not known.
    """
    drafting = DRAFT_SHARE * (accepted - 1) if draft_cost is None else draft_cost
    _check(depth, prompt, accepted, sequences, computed, drafting)

    of = partial(constants_for, traffic=traffic)

    def passing(profile: DeviceProfile) -> dict[str, float]:
        terms = decode_terms(profile, traffic, of(profile), depth, sequences)
        return {**terms, **({"draft": drafting * math.fsum(terms.values())} if drafting else {})}

    constants, terms = of(profile), passing(profile)
    yielded = 1000 * accepted * sequences
    speed = yielded / math.fsum(terms.values())
    others = {name: yielded / math.fsum(passing(other).values()) for name, other in _others(profile)}
    below = above = speed * constants.error
    if traffic.flash_bytes or traffic.streamed_bytes or traffic.active_share < 1:  # reads have a band of their own
        slow, fast = (yielded / math.fsum(passing(other).values()) for other in slow_and_fast(profile))
        below, above = min(math.hypot(below, speed - slow), 0.95 * speed), math.hypot(above, fast - speed)
    low, high = min([speed - below, *others.values()]), max([speed + above, *others.values()])
    peak = ceiling(profile, traffic, depth, sequences, max(profile.bandwidth_gbs, *profile.versions.values(), 0.0))
    if peak is not None and accepted == 1:
        high = max(speed, min(high, peak))
    prefill = prefill_terms(profile, traffic, constants, depth, prompt, computed)
    ttft = math.fsum(prefill.values()) if prefill else None
    prefill_speed = 1000 * prompt / ttft if ttft else None
    off = constants.prefill_error
    return Estimate(
        decode_tok_per_s=speed, low=low, high=high,
        ceiling_tok_per_s=ceiling(profile, traffic, depth, sequences), peak_tok_per_s=peak,
        prefill_tok_per_s=prefill_speed, prefill_low=prefill_speed * (1 - off) if prefill_speed else None,
        prefill_high=prefill_speed * (1 + off) if prefill_speed else None, ttft_ms=ttft,
        bytes_per_token=read_bytes(traffic, depth, sequences), terms={**terms, **prefill}, basis=constants.basis,
        error=constants.error, error_source=_reaching(constants, speed, others), depth=depth, prompt=prompt,
        sequences=sequences, program=constants.program, unit=unit_of(profile), unit_words=unit_in_words(profile),
        others=others,
    )


def _check(depth: int, prompt: int, accepted: float, sequences: int, computed: float, drafting: float) -> None:
    if depth < 0 or prompt < 1 or not (math.isfinite(accepted) and accepted >= 1):
        raise UsageError(f"Estimate of depth {depth}, prompt {prompt}, accepted {accepted}: the depth is 0 or more, "
                         "the prompt at least 1 token, and a pass yields at least 1 token.")
    if sequences < 1:
        raise UsageError(f"{sequences} sequences cannot decode; it must be 1 or more.")
    if not 0 < computed <= 1:
        raise UsageError(f"A share of {computed} of a prompt cannot be computed; it is above 0 and at most 1.")
    if not (math.isfinite(drafting) and drafting >= 0):
        raise UsageError(f"A draft cost of {drafting} is impossible; it is a share of a token's time, 0 or more.")


def _others(profile: DeviceProfile) -> Iterator[tuple[str, DeviceProfile]]:
    """Yield the device with other programs, and its other versions, by their difference."""
    for name, gbs in profile.programs.items():
        if gbs != profile.effective_gbs:
            yield name, replace(profile, effective_gbs=gbs)
    for name, gbs in profile.versions.items():
        drawn = profile.effective_gbs
        yield name, replace(profile, bandwidth_gbs=gbs, effective_gbs=drawn and drawn * gbs / profile.bandwidth_gbs)


def _reaching(constants: Constants, speed: float, others: Mapping[str, float]) -> str:
    """Describe the origin of the band, and the speeds that it was widened for."""
    beyond = [name for name, other in others.items() if abs(other / speed - 1) > constants.error]
    said = [name if name.startswith(("with ", "on ")) else f"with {name}" for name in beyond]
    return constants.error_source + (f"; it reaches to the speed {' and '.join(said)}" if said else "")


def constants_for(profile: DeviceProfile, traffic: Traffic) -> Constants:
    """Return a device's constants for the types of a model's weights, and for its experts and recurrent layers."""
    found = constants_of(profile, bits=traffic.pure_bits, experts=traffic.experts, recurrent=traffic.state_bytes > 0)
    reading, arithmetic = costs_of(profile.figures, profile.bandwidth_gbs, traffic.types)
    return replace(found, f_w=found.f_w / reading, mfu=found.mfu / arithmetic, few_rows=found.few_rows / arithmetic)


def crossover(profile: DeviceProfile, traffic: Traffic, most: int) -> int | None:
    """Return the context, up to `most`, from which on choosing rows of V makes a token faster; None if none does."""
    constants = constants_for(profile, traffic)
    plain = replace(traffic, value_bytes=0.0, score_bytes=0.0, topn=None)

    def pays(depth: int) -> bool:
        chosen, whole = (math.fsum(decode_terms(profile, each, constants, depth).values()) for each in (traffic, plain))
        return chosen < whole

    low, high = 0, next((depth for n in range(6, 25) if (depth := 2**n) >= most or pays(depth)), most)
    if not pays(high := min(high, most)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def read_bytes(traffic: Traffic, depth: int, sequences: int = 1) -> float:
    """Bytes of memory that one token reads after `depth` positions, of weights its share."""
    return (traffic.weight_bytes - traffic.skipped_bytes) / sequences + traffic.sequence_bytes_at(depth)


def decode_terms(profile: DeviceProfile, traffic: Traffic, constants: Constants, depth: int,
                 sequences: int = 1) -> dict[str, float]:
    """Milliseconds of one token of each sequence by cause; causes that do not occur are left out."""
    weights_gbs, kv_gbs = constants.f_w * profile.bandwidth_gbs, constants.f_kv * profile.bandwidth_gbs
    traffic = traffic.of_several(sequences)
    dense = traffic.weight_bytes
    fixed = constants.token_ms + constants.sequence_ms * sequences
    terms = {"overhead": fixed + constants.t0_ms * traffic.layers / LAYERS}
    if traffic.neuron_layers:
        dense -= traffic.ffn_bytes
        times = math.fsum(relative_time(profile, *layer, gates=traffic.gate_share) for layer in traffic.neuron_layers)
        terms["sparse_ffn"] = traffic.ffn_bytes * times / len(traffic.neuron_layers) / weights_gbs / 1e6
    elif traffic.active_share < 1:
        dense -= traffic.ffn_bytes
        efficiency = memory_efficiency(profile, traffic.row_bytes)
        terms["sparse_ffn"] = traffic.ffn_bytes * traffic.active_share / (weights_gbs * efficiency) / 1e6
    terms["weights"] = weights_ms(profile, constants, traffic.operations, dense / weights_gbs / 1e6, sequences)
    if sequences > 1 and (values := activations_ms(profile, constants, traffic.activation_values, sequences)):
        terms["activations"] = values
    if depth:
        attention = constants.attention_ms * traffic.attention_operations_of(1, depth) / 1e9
        terms["kv"] = sequences * (traffic.sequence_bytes_at(depth) / kv_gbs / 1e6 + attention)
        if traffic.value_bytes:
            keys = traffic.value_bytes * depth  # as many as of V
            read = keys - traffic.left_out_at(depth)
            scores = SCORES_OF_TOP if traffic.topn and traffic.topn.top else SCORES
            more = KEYS_ALONE * keys + VALUES_APART * read + scores * traffic.score_bytes * depth
            terms["choosing"] = sequences * (more / kv_gbs / 1e6 + TOPN_MS * traffic.layers)
    if traffic.flash_bytes:
        terms["flash"] = traffic.flash_bytes / storage_gbs(profile, traffic.flash_chunk_bytes) / 1e6
    if traffic.streamed_bytes:
        reading = traffic.streamed_bytes / storage_gbs(profile, 0) / 1e6
        terms["streaming"] = max(0.0, reading - math.fsum(terms.values()))
    return terms


def prefill_terms(
    profile: DeviceProfile, traffic: Traffic, constants: Constants, depth: int, prompt: int, computed: float = 1.0
) -> dict[str, float]:
    """Milliseconds of a prompt of which a share is computed, by cause; empty if the device's peak or the model's
    operations are not known."""
    peak = peak_of(profile, constants)
    if not peak or not traffic.operations:
        return {}
    operations = (traffic.operations - traffic.head_operations) * prompt * computed + traffic.head_operations
    matrices = operations / (constants.mfu * peak) / 1e6
    reading = (traffic.prefill_weight_bytes or traffic.weight_bytes) / (constants.f_w * profile.bandwidth_gbs) / 1e6
    passes = math.ceil(prompt / PROMPT_CHUNK)
    between = constants.activation_cost * traffic.activation_values * prompt * computed / peak / 1e6
    attention = computed * traffic.attention_operations_of(prompt, depth) / (constants.mfu_attention * peak) / 1e6
    terms = {
        "prefill_overhead": constants.token_ms + constants.t0_ms * traffic.layers / LAYERS,
        "prefill_matrices": together_ms(constants, reading * passes, matrices) if constants.few_rows else
        max(matrices, reading), "prefill_activations": between, "prefill_attention": attention,
    }
    if traffic.prompt_stored_bytes:
        stored = traffic.prompt_stored_bytes * passes / storage_gbs(profile, 0) / 1e6
        computing = math.fsum(terms.values())
        terms["prefill_streaming"] = (stored**OVERLAP + computing**OVERLAP) ** (1 / OVERLAP) - computing
    return terms


def ceiling(profile: DeviceProfile, traffic: Traffic, depth: int, sequences: int = 1,
            gbs: float | None = None) -> float | None:
    """Tokens per second of pure bandwidth: the bits of their types for weights, keys and values, no scales.

    The bandwidth is `gbs`; by default the measured bandwidth of decoding on the device, else its peak. Neurons that are
    left out count for nothing.
    """
    if not traffic.parameters:
        return None
    seen = traffic.kv_bytes_at(depth) / traffic.kv_bytes_at(1) if depth and traffic.kv_bytes_at(1) else 0.0
    weights = min(traffic.parameters * traffic.pure_bits / 8, traffic.weight_bytes)  # rows of an embedding stay unread
    weights *= 1 - traffic.skipped_bytes / traffic.weight_bytes
    nbytes = weights / sequences + traffic.kv_values * traffic.pure_kv_bits / 8 * seen
    return (gbs or profile.effective_gbs or profile.bandwidth_gbs) * 1e9 / nbytes
