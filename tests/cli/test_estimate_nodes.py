"""`edgeinfer estimate --nodes`: one machine alone, the layers split, the prompt on one and tokens on another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.command_line import edgeinfer

UNLIKE = ("llama-3.1-8b", "--nodes", "m4 16gb,rpi5 16gb", "--link", "2.5GbE", "-p", 2000, "-n", 500)


def compared(*asked: object) -> dict[str, Any]:
    done = edgeinfer("estimate", *asked, "--json")
    assert done.code == 0, done.err
    return done.json


def way(out: dict[str, Any], kind: str, *nodes: str) -> dict[str, Any]:
    return next(one for one in out["ways"] if one["kind"] == kind and nodes in ((), tuple(one["nodes"])))


def test_alone_is_what_estimate_says_of_one_machine() -> None:
    out = compared(*UNLIKE)
    one = edgeinfer("estimate", "llama-3.1-8b", "--machine", "m4 16gb", "-p", 2000, "--json").json
    alone = way(out, "alone", "m4")
    assert alone["decode_tok_per_s"] == pytest.approx(one["decode_tok_per_s"])
    assert alone["ttft_ms"] == pytest.approx(one["ttft_ms"]) and alone["low"] == pytest.approx(one["low"])
    assert alone["total_ms"] == pytest.approx(alone["ttft_ms"] + 499 * 1000 / alone["decode_tok_per_s"])


def test_split_is_what_plan_says_of_the_nodes() -> None:
    out = compared(*UNLIKE)
    planned = edgeinfer("plan", "llama-3.1-8b", "--nodes", "m4 16gb,rpi5 16gb", "--link", "2.5GbE", "--ctx", 4096,
                        "--json").json
    split = way(out, "split")
    assert split["decode_tok_per_s"] == pytest.approx(planned["decode_tok_per_s"])
    assert split["layers"] == [node["layers"] for node in planned["nodes"]]
    assert split["link_bytes"] == 4 * 4096 and split["prompt_link_bytes"] == 2000 * 4 * 4096
    three = compared("llama-2-7b", "--nodes", "rpi5 8gb,rpi5 8gb,rpi5 8gb")
    assert way(three, "split")["link_bytes"] == 3 * 4 * 4096  # ids and rows to the first, rows both ways in the middle


def test_a_prompt_here_and_tokens_there() -> None:
    out = compared(*UNLIKE)
    fast, slow, apart = way(out, "alone", "m4"), way(out, "alone", "rpi5"), way(out, "apart", "m4", "rpi5")
    assert apart["decode_tok_per_s"] == slow["decode_tok_per_s"]
    kv = apart["prompt_link_bytes"]
    assert kv == pytest.approx(2 * 32 * 8 * (128 + 2) * 2000)  # int8 with scales, all layers and heads
    link = out["link"]
    assert apart["ttft_ms"] == pytest.approx(fast["ttft_ms"] + link["latency_ms"] + 1000 * kv / link["bytes_per_s"])
    assert fast["total_ms"] < apart["total_ms"] < slow["total_ms"]
    slower = way(compared(*UNLIKE[:4], "100Mbit", *UNLIKE[5:]), "apart", "m4", "rpi5")
    assert slower["ttft_ms"] > 1.5 * apart["ttft_ms"] > 0


@pytest.mark.slow
def test_when_two_are_worse_than_one() -> None:
    shown = edgeinfer("estimate", *UNLIKE).out.splitlines()
    assert shown[0].startswith("m4 alone is the fastest: first word after ") and max(map(len, shown)) <= 80
    assert "Splitting the layers gives" in " ".join(shown[:3]) and "x m4 alone." in " ".join(shown[:3])
    four = edgeinfer("estimate", "llama-3.1-70b", "--nodes", ",".join(4 * ["rpi5 16gb"])).out
    assert four.startswith("rpi5+rpi5+rpi5+rpi5 is the fastest") and "No node has memory for the whole" in four
    none = edgeinfer("estimate", "llama-3.1-70b", "--nodes", "rpi5,rpi5").out
    assert none.startswith("It does not fit, neither on one node nor split; add a node, or choose a smaller")


@pytest.mark.parametrize(("more", "sentence"), [
    (["--link", "1GbE"], "--link 1GbE requires --nodes NAME."),
    (["--nodes", "rpi5"], "--nodes is 'rpi5'; name two machines or more, as in rpi5,rpi5."),
    (["--nodes", "rpi5,"], "--nodes is 'rpi5,'; name two machines or more"),
    (["--nodes", "rpi5,m4", "--link", "0MB/s"], "--link is '0MB/s'; the rate must be above 0"),
    (["--nodes", "rpi5,m4", "--link", "string"], "--link is 'string'; give 100Mbit, 1GbE, 2.5GbE, 10GbE, wifi6, tb4"),
    (["--nodes", "rpi5,m4", "--machine", "m4"], "--machine m4 has no effect with --nodes"),
    (["--nodes", "rpi5,m4", "--users", "2"], "--users 2 has no effect with --nodes"),
    (["--nodes", "rpi5,m4", "--all-devices"], "--all-devices has no effect with --nodes"),
    (["--nodes", "rpi5,rpi55"], "There is no device 'rpi55'"),
    (["--nodes", "rpi5,rtx 4090"], "processors, and GeForce RTX 4090 is a card; several cards"),
])
def test_what_cannot_be_is_refused(more: list[str], sentence: str) -> None:
    done = edgeinfer("estimate", "llama-3.1-8b", *more)
    assert done.code == 2 and sentence in done.sentence and not done.out


def test_long_names_fit_the_terminal() -> None:
    shown = edgeinfer("estimate", "falcon3-1b", "--nodes", "xeon-e5-2680-v4,dimensity-8400,ryzen-ai-hx-370").out
    assert max(map(len, shown.splitlines())) <= 80 and "'a > b' has the prompt on a" in " ".join(shown.split())
    assert any(line.startswith("xeon-e5-26 > dimensity-") for line in shown.splitlines())
