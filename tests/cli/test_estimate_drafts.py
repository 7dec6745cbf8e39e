"""`edgeinfer estimate --draft` and `--speculate lookup`: the predicted gain of speculative decoding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgeinfer.devices import Traffic, chosen, constants_of, estimate, load_profile, pass_ms, tokens_per_pass
from edgeinfer.errors import UsageError
from edgeinfer.models.describe import describe
from tests.helpers.command_line import edgeinfer

ASKED = ("estimate", "llama-3.1-8b", "--machine", "m4 16gb")
DRAFT = (*ASKED, "--draft", "llama-3.2-1b")


def speculation(*asked: object) -> tuple[dict, dict]:
    done = edgeinfer(*asked, "--json")
    assert done.code == 0, done.err
    return done.json, done.json["speculation"]


def test_a_pass_yields_what_independent_acceptances_do() -> None:
    assert tokens_per_pass(0.5, 2) == pytest.approx(1 + 0.5 + 0.25) and tokens_per_pass(0, 5) == 1
    assert tokens_per_pass(1, 4) == 5
    with pytest.raises(UsageError, match=r"An acceptance of 1\.5 is impossible; it is the share"):
        tokens_per_pass(1.5, 2)


def test_a_draft_model_costs_its_own_time() -> None:
    out, found = speculation(*DRAFT, "--acceptance", 0.7)
    plain = edgeinfer(*ASKED, "--json").json
    draft = edgeinfer("estimate", "llama-3.2-1b", "--machine", "m4 16gb", "--json").json
    assert found["plain_tok_per_s"] == pytest.approx(plain["decode_tok_per_s"])
    assert found["draft_ms"] == pytest.approx(found["draft_tokens"] * 1000 / draft["decode_tok_per_s"])
    assert found["verify_ms"] >= 1000 / plain["decode_tok_per_s"]
    passes = found["draft_ms"] + found["verify_ms"]
    assert out["decode_tok_per_s"] == pytest.approx(1000 * found["tokens_per_pass"] / passes)
    assert found["gain"] == pytest.approx(out["decode_tok_per_s"] / plain["decode_tok_per_s"])
    assert found["total_bytes"] > plain["unstreamed_bytes"] + draft["weight_bytes"] and found["fits"]
    shown = edgeinfer(*DRAFT, "--acceptance", 0.7).out.splitlines()
    assert shown[2].startswith("draft      pays: ") and max(map(len, shown)) <= 80


def test_it_pays_from_an_acceptance_on() -> None:
    _, found = speculation(*DRAFT, "--acceptance", 0.7)
    point = found["pays_from"]
    assert 0 < point < 0.7
    assert speculation(*DRAFT, "--acceptance", point - 0.02)[1]["gain"] < 1
    assert speculation(*DRAFT, "--acceptance", point + 0.02)[1]["gain"] > 1
    many = [speculation(*DRAFT, "--acceptance", share)[1]["draft_tokens"] for share in (0.3, 0.7, 1.0)]
    assert many == sorted(many) and many[-1] == 7  # the surer, the more tokens a pass
    assert speculation(*DRAFT, "--acceptance", 1, "--draft-tokens", 3)[1]["draft_tokens"] == 3
    itself = edgeinfer("estimate", "smollm2-135m", "--machine", "rpi5", "--draft", "smollm2-360m", "--json")
    assert itself.json["speculation"]["gain"] < 1  # a draft that is larger than the model


def test_of_a_mixture_of_experts_each_token_adds_experts() -> None:
    """So that verifying costs more there than of a dense model."""
    device = chosen(load_profile("m4"))
    dense = Traffic(weight_bytes=2e9, layers=32, ffn_bytes=1.5e9)
    mixture = Traffic(weight_bytes=2e9, layers=32, ffn_bytes=1.5e9, prefill_weight_bytes=12.5e9)
    assert pass_ms(device, dense, 0, 4) == pass_ms(device, dense, 0, 1)  # no operations, no arithmetic
    grown = pass_ms(device, mixture, 0, 4) - pass_ms(device, mixture, 0, 1)
    read = 12e9 * ((1 - (1 - 1 / 8) ** 4) - 1 / 8)
    assert grown == pytest.approx(read / 1e6 / device.bandwidth_gbs / constants_of(device).f_w)
    stored = Traffic(weight_bytes=2e9, layers=32, streamed_bytes=1e9)
    board = chosen(load_profile("rpi5"))
    assert pass_ms(board, stored, 0, 4) == pytest.approx(1e9 / 0.837e9 * 1000)  # layers are read once for all


@pytest.mark.parametrize(("model", "machine"), [
    ("qwen3-30b-a3b", ("rtx 4090", "--runtime", "llama.cpp")),  # experts on a GPU
    ("Llama 3.2 1B Q8_0", ("dimensity-8300", "--runtime", "llama.cpp")),  # codes of 8 bits on cores
])
def test_one_report_has_one_speed_without_drafts(model: str, machine: tuple[str, ...]) -> None:
    asked = ("estimate", model, "--machine", *machine)
    plain = edgeinfer(*asked, "--json").json["decode_tok_per_s"]
    assert speculation(*asked, "--speculate", "lookup")[1]["plain_tok_per_s"] == pytest.approx(plain)


def test_few_rows_reach_less_of_the_peak_than_prompts() -> None:
    """8 tokens of 1.1B beside one as measured on two cores of a Zen 3 and of a Xeon (docs/measurements/speculation.md):
    3.47 and 1.56 of its time; prompts reached 0.74 of the peak there.
    """
    model = describe("tinyllama-1.1b").traffic()
    for isa, peak, gbs, ratio in (("avx2", 422.0, 23.7, 3.47), ("avx512vnni", 1792.0, 24.3, 1.56)):
        device = replace(load_profile("ryzen-5800x"), device_class="local", isa=isa, int8_peak_gops=peak,
                         bandwidth_gbs=gbs, effective_gbs=None, processor={}, measured="2026-11-23T12:00:00",
                         constants={"f_w": 1.0, "t0_ms": 0.0, "mfu": 0.74})
        one, eight = (pass_ms(device, model, 16, n) for n in (1, 8))
        assert eight / one == pytest.approx(ratio, rel=0.2), isa


def test_sequences_together_cost_what_draft_tokens_do() -> None:
    """Both are rows of the same matmuls. Speeds of n sequences over one of 1.1B: docs/measurements/batching.md."""
    model = describe("tinyllama-1.1b").traffic()
    device = replace(load_profile("ryzen-5800x"), device_class="local", isa="avx512vnni", int8_peak_gops=1792.0,
                     bandwidth_gbs=22.4, effective_gbs=None, processor={}, measured="2026-11-23T12:00:00",
                     constants={"f_w": 1.0, "t0_ms": 0.0, "mfu": 0.74})
    one = estimate(device, model).decode_tok_per_s
    for n, measured in ((4, 3.48), (8, 5.63), (16, 6.62)):
        together = estimate(device, model, sequences=n).decode_tok_per_s
        assert together / one == pytest.approx(measured, rel=0.12), n
        assert 1000 * n / together == pytest.approx(pass_ms(device, model, 0, n)), n
    passes = [pass_ms(device, model, 0, n) for n in (16, 17, 64, 128)]
    assert passes == sorted(passes) and passes[0] == passes[1]  # more rows never take less time
    prompt = 128 * model.operations / 0.74 / 1792e6  # many rows reach what prompts do
    assert passes[3] == pytest.approx(math.hypot(1000 / one, prompt))


def test_lookup_by_kind_of_text() -> None:
    out, found = speculation(*ASKED, "--speculate", "lookup")
    gains = {each["text"]: each["gain"] for each in found["texts"]}
    assert gains["edited code"] > gains["worked examples"] > gains["prose"] >= 1
    assert out["decode_tok_per_s"] == pytest.approx(found["plain_tok_per_s"])  # the kind of text is not given
    shown = edgeinfer(*ASKED, "--speculate", "lookup").out.splitlines()
    assert shown[2].startswith("lookup     ") and max(map(len, shown)) <= 80
    assert speculation(*ASKED, "--speculate", "off")[1] is None


@pytest.mark.parametrize(("more", "sentence"), [
    (["--draft", "llama-3.2-1b", "--acceptance", "1.4"], "--acceptance is 1.4; it is the share of draft tokens that"),
    (["--draft", "llama-3.2-1b", "--acceptance", "-0.1"], "--acceptance is -0.1; it is the share"),
    (["--acceptance", "0.7"], "--acceptance 0.7 requires --draft MODEL."),
    (["--draft-tokens", "4"], "--draft-tokens 4 requires --draft MODEL."),
    (["--draft", "llama-3.2-1b", "--draft-tokens", "0"], "--draft-tokens is 0; it must be from 1 to 64."),
    (["--speculate", "self"], "--speculate is 'self'; give lookup or off, or --draft MODEL for a draft model."),
    (["--draft", "llama-3.2-1b", "--speculate", "off"], "--speculate off drafts nothing, and --draft llama-3.2-1b is"),
    (["--draft", "llama-3.2-1b", "--draft-cost", "0.2", "--accepted", "1"], "--draft-cost 0.2 exclude each other: the"),
    (["--draft", "llama-3.2-1b", "--samples", "2"], "--samples 2 exclude each other: drafts are predicted for one"),
    (["--explain", "--samples", "2"], "--explain and --samples 2 exclude each other: the formulas are of one token"),
    (["--users", "2", "--samples", "2"], "--users 2 and --samples 2 exclude each other: each user asks for one answer"),
    (["--users", "2", "--speculate", "lookup"], "--users 2 and --speculate lookup exclude each other: the speed for"),
    (["--draft-cost", "0.2"], "--draft-cost 0.2 requires --accepted N."),
    (["--draft", "llama-3.2-1b", "--accepted", "2"], "--accepted 2 exclude each other: both set the tokens of a pass"),
    (["--draft", "qwen3-0.6b"], "give a model of the same family, which has the same tokenizer."),
    (["--draft", "llama-3.2-2b"], "llama-3.2-1b"),
    (["--draft", "tinyllama-1.1b"], "has a context of 2048 tokens, and the run one of 4096; run with --ctx 2048"),
])
def test_what_cannot_be_is_refused(more: list[str], sentence: str) -> None:
    done = edgeinfer(*ASKED, *more)
    assert done.code in (1, 2) and sentence in done.sentence and not done.out


def test_all_devices_have_no_draft() -> None:
    done = edgeinfer("estimate", "llama-3.1-8b", "--all-devices", "--draft", "llama-3.2-1b")
    assert done.sentence.startswith("--draft llama-3.2-1b has no effect with --all-devices, ")
