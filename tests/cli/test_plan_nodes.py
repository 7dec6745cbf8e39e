"""`edgeinfer plan --nodes`: who holds which layers, whether that fits, its speed, one machine alone, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.cli.reports.nodes import nodes_object
from edgeinfer.config import RuntimeConfig, Step
from edgeinfer.devices import chosen, estimate, load_profile
from edgeinfer.errors import UsageError
from edgeinfer.models import demo_path
from edgeinfer.models.describe import describe
from edgeinfer.pipeline import LINKS
from edgeinfer.runtime import StageSession
from tests.helpers.command_line import edgeinfer


def planned(*arguments: object, code: int = 0) -> dict[str, Any]:
    done = edgeinfer("plan", *arguments, "--json")
    assert done.code == code, done
    return done.json


def test_layers_are_given_out_by_speed_and_every_one_once() -> None:
    report = planned("llama-2-7b", "--nodes", "rpi5-8gb,rpi4,rk3588")
    nodes = report["nodes"]
    layers = [layer for node in nodes for layer in range(node["layers"][0], node["layers"][1] + 1)]
    assert layers == list(range(32)) and [node["name"] for node in nodes] == ["rpi5", "rpi4", "rk3588"]
    counts = [node["layers"][1] - node["layers"][0] for node in nodes]
    assert counts[2] > counts[0] > counts[1]
    times = [node["token_ms"] for node in nodes]
    assert max(times) < 1.5 * min(times) and report["fits"] and report["unlike"]
    whole = planned("llama-2-7b", "--machine", "rpi5-8gb")
    assert sum(node["kv_bytes"] - 64 for node in nodes) == whole["regions"][1]["bytes"] - 64
    weights = sum(node["weight_bytes"] for node in nodes)
    assert weights == pytest.approx(whole["regions"][0]["bytes"], rel=1e-3)


def test_the_speed_is_the_sum_of_the_stages_and_of_messages() -> None:
    report = planned("llama-2-7b", "--nodes", "rpi5-8gb,rpi5-8gb,rpi5-8gb", "--link", "10MB/s", "--ctx", "2048")
    rows = 4096 * 4 / 10e6
    latency = report["link"]["latency_ms"]
    assert [node["link_ms"] for node in report["nodes"]] == pytest.approx(
        [2 * latency + 1000 * rows, 2 * latency + 2000 * rows, 0])
    stages, profile = [], chosen(load_profile("rpi5"), "cpu")
    for node in report["nodes"]:
        step = Step("layer_range", (("first", node["layers"][0]), ("last", node["layers"][1])))
        part = describe("llama-2-7b", recipe=RuntimeConfig().recipe.replacing("layer_range", step))
        stages.append(1000 / estimate(profile, part.traffic("int8"), 2048).decode_tok_per_s)
    assert [node["token_ms"] for node in report["nodes"]] == pytest.approx(stages)
    assert report["decode_tok_per_s"] == pytest.approx(1000 / (sum(stages) + 4 * latency + 3000 * rows))
    slower, faster = (planned("llama-2-7b", "--nodes", "rpi5-8gb,rpi5-8gb,rpi5-8gb", "--link", link)
                      for link in ("100Mbit", "10GbE"))
    assert slower["decode_tok_per_s"] < faster["decode_tok_per_s"] and slower["ttft_ms"] > faster["ttft_ms"]


def test_a_prompt_gains_from_several_nodes_and_one_sequence_does_not() -> None:
    report = planned("llama-2-7b", "--nodes", "rpi5-8gb,rpi5-8gb", "--link", "10GbE")
    alone = planned("llama-2-7b", "--machine", "rpi5-8gb")["estimate"]
    assert 0.5 * alone["ttft_ms"] < report["ttft_ms"] < 0.75 * alone["ttft_ms"]
    assert report["decode_tok_per_s"] < alone["decode_tok_per_s"]
    assert report["alone"] == {"node": "rpi5", "decode_tok_per_s": alone["decode_tok_per_s"], "faster": True}
    said = edgeinfer("plan", "llama-2-7b", "--nodes", "rpi5-8gb,rpi5-8gb").out
    assert "rpi5 alone holds the model and is faster" in said and "One sequence gains memory, not speed" in said


def test_a_node_with_less_memory_has_fewer_layers() -> None:
    wide, tight = (planned("llama-2-7b", "--nodes", f"{node},rpi5-8gb")["nodes"] for node in ("rpi5-8gb", "rpi5-2gb"))
    assert wide[0]["layers"][1] > tight[0]["layers"][1] and all(node["fits"] for node in tight)
    assert 0.9 * tight[0]["budget_bytes"] < tight[0]["total_bytes"] <= tight[0]["budget_bytes"]


def test_what_fits_nowhere_is_reported_with_what_lacks() -> None:
    report = planned("llama-2-7b", "--nodes", "rpi4-1gb,rpi4-1gb", code=3)
    assert not report["fits"] and report["alone"] is None
    done = edgeinfer("plan", "llama-2-7b", "--nodes", "rpi4-1gb,rpi4-1gb")
    assert done.code == 3 and done.out.startswith("It does not fit on 2 nodes")
    assert "No node has memory for the whole model." in done.out and "rpi4 lacks" in done.out
    assert planned("llama-2-7b", "--nodes", "rpi4,rpi4", "--budget", "4GiB")["nodes"][0]["budget_bytes"] == 4 << 30


def test_the_bytes_are_those_that_the_stages_take() -> None:
    report = planned("demo", "--nodes", "rpi5,rpi5", "--ctx", "512")
    for node in report["nodes"]:
        config = RuntimeConfig(ctx=512, threads=load_profile("rpi5").cores, draft_tokens=7)
        stage = StageSession(Bundle.open(demo_path()), config, *node["layers"])
        assert node["total_bytes"] == stage.plan.total_bytes
        stage.close()


@pytest.mark.parametrize("arguments, message", [
    (["--nodes", "rpi5,nix"], "There is no device 'nix'"),
    (["--nodes", "rpi5"], "name two machines or more"),
    (["--nodes", "rpi5,,rpi5"], "name two machines or more"),
    (["--nodes", ""], "name two machines or more"),
    (["--nodes", "rpi5,rtx4090"], "processors, and GeForce RTX 4090 is a card; several cards"),
    (["--nodes", ",".join(["rpi5"] * 33)], "33 stages are more than the model's 32 layers; use fewer"),
    (["--link", "1GbE"], "--link 1GbE requires --nodes NAME."),
    (["--nodes", "rpi5,rpi5", "--link", "0MB/s"], "the rate must be above 0"),
    (["--nodes", "rpi5,rpi5", "--link", "-1MB/s"], "give 100Mbit, 1GbE, 2.5GbE, 10GbE, wifi6, tb4, or a rate"),
    (["--nodes", "rpi5,rpi5", "--link", ""], "--link is ''; give 100Mbit"),
    (["--nodes", "rpi5,rpi5", "--link", "fast"], "or a rate such as 50MB/s"),
    (["--nodes", "rpi5,rpi5", "--link", "0.0000000001MB/s"], "or a rate such as 50MB/s"),
    (["--nodes", "rpi5,rpi5", "--machine", "rpi5"], "--machine rpi5 has no effect with --nodes"),
    (["--nodes", "rpi5,rpi5", "--device", "cuda"], "--device cuda has no effect with --nodes"),
    (["--nodes", "rpi5,rpi5", "--serve"], "--serve has no effect with --nodes"),
    (["--nodes", "rpi5,rpi5", "--lazy", "keep=0.5"], "cannot run with lazy"),
    (["--nodes", "rpi5,rpi5", "--draft", "tinyllama-1.1b", "-c", "2048"], "cannot run with a drafter; leave it out."),
    (["--nodes", "rpi5,rpi5", "--recipe", "none"], "--recipe none has no effect with --nodes"),
    (["--nodes", "rpi5,rpi5", "--ctx", "100000"], "longer than the model's 4096"),
])  # fmt: skip
def test_refusals_are_one_sentence(arguments: list[str], message: str) -> None:
    done = edgeinfer("plan", "llama-2-7b", *arguments)
    assert done.code in (1, 2) and message in done.err and done.err.count("\n") == 1, done


def test_a_machine_with_a_gpu_has_layers_on_its_processor() -> None:
    nodes = planned("llama-2-7b", "--nodes", "m3,m3")["nodes"]
    assert [node["title"] for node in nodes] == [load_profile("m3").titled] * 2
    with pytest.raises(UsageError, match="--nodes names rtx4090, whose profile is of cuda"):
        nodes_object(describe("llama-2-7b"), RuntimeConfig(), [load_profile("rtx4090")] * 2, LINKS["1GbE"])


def test_a_model_that_shares_k_and_v_is_refused() -> None:
    done = edgeinfer("plan", "gemma-4-e4b", "--nodes", "rpi5,rpi5")
    assert done.code == 1 and "cannot be split before layer" in done.err and done.err.count("\n") == 1
