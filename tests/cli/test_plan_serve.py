"""`edgeinfer plan --serve` and `--kv-memory`: the pool, the sequences that fit, refusals, and the memory of `run`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.base.units import format_size
from edgeinfer.errors import BudgetError, RequestError, UsageError
from edgeinfer.llm.api import LLM
from tests.helpers.command_line import ROOT, edgeinfer
from tests.helpers.sessions import on_device, running, tokens, write_model

PAGES = ("plan", "llama-2-7b", "--weights", "q4", "--machine", "rtx4090", "--kv-layout", "pages")
BLOCK = 21_760
"""Bytes of 16 tokens of the demo."""


def planned(*arguments: object, code: int = 0) -> dict[str, Any]:
    done = edgeinfer(*arguments, "--json")
    assert done.code == code, done
    return done.json


# -- plan --serve ------------------------------------------------------------------------------------------------------


def test_the_pool_of_a_server_as_people_see_it(no_variables: None) -> None:
    done = edgeinfer("plan", "smollm2-135m", "--serve", "--max-sequences", 64, "--budget", "600MB", "-t", 2)
    assert done.code == 0 and done.out.startswith("It fits: 600 MB of 600 MB; ")
    lines = done.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("serving"))
    assert lines[start:start + 4] == [
        "serving  the KV pool of 354 MB holds 29776 tokens; these fit at once:",
        "         64  sequences of   256  tokens",
        "         29  sequences of  1024  tokens",
        "          7  sequences of  4096  tokens"]
    assert not [line for line in lines if len(line) > 80 and " private " not in line]
    out = edgeinfer("plan", "gemma-3-4b", "--serve", "--budget", "4GiB", "-c", 32768).out
    assert "tokens, 17296 in layers with a window; these fit at once:" in " ".join(out.split())
    assert not [line for line in out.splitlines() if len(line) > 80 and " private " not in line]
    assert "serving" not in edgeinfer("plan", "demo").out


@pytest.mark.parametrize("options", [("--budget", "4GiB"), ("--budget", "6GiB", "-c", 32768), ("--kv", "f16"),
                                     ("--max-sequences", 1), ("--budget", "4GiB", "--kv-memory", "700MB")])
def test_the_fields_of_the_pool(options: tuple[object, ...], no_variables: None) -> None:
    report = planned("plan", "gemma-3-4b", "--serve", "-t", 2, *options)
    pool, kv = report["serving"], next(r for r in report["regions"] if r["name"] == "kv")
    assert pool["kv_bytes"] == kv["bytes"] and report["total_bytes"] <= report["budget_bytes"]
    assert f"{pool['kv_tokens'] // 16} (" in kv["reason"] and pool["window_tokens"] < pool["kv_tokens"]
    assert pool["max_sequences"] == (1 if "--max-sequences" in options else 16)
    assert [row["tokens"] for row in pool["fits"]] == sorted({256, 1024, 4096, report["ctx"]})
    counts = [row["sequences"] for row in pool["fits"]]
    assert counts == sorted(counts, reverse=True) and 1 <= counts[-1] <= counts[0] <= pool["max_sequences"]
    assert all(row["tokens"] * row["sequences"] <= pool["kv_tokens"] for row in pool["fits"])
    assert planned("plan", "gemma-3-4b")["serving"] is None


def test_the_table_of_the_documentation(no_variables: None) -> None:
    page = (ROOT / "docs" / "explanation" / "planning.md").read_text(encoding="utf-8").partition("## Serving")[2]
    rows = re.findall(r"^\| (\S+), ([\d,]+), (\S+ \w+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for model, ctx, budget, cells in rows:
        pool = planned("plan", model, "--serve", "-t", 2, "-c", ctx.replace(",", ""), "--budget", budget)["serving"]
        tokens = [pool["kv_tokens"], *([pool["window_tokens"]] if pool["window_tokens"] else [])]
        counts = {row["tokens"]: row["sequences"] for row in pool["fits"]}
        size, said, *numbers = cells.split(" | ")
        assert size == format_size(pool["kv_bytes"]), model
        assert re.sub(r"(?<=\d),(?=\d)", "", said) == ", ".join(map(str, tokens)), model
        assert list(map(int, numbers)) == [counts[256], counts[1024], counts[4096], counts[pool["fits"][-1]["tokens"]]]


def test_what_is_served_is_what_a_config_opens(tmp_path: Path, no_variables: None) -> None:
    """The same bytes from the command and from a session whose pool fills its budget."""
    path = write_model(tmp_path)
    least = planned("plan", path, "--serve", "--budget", "1GB", "-c", 256, "-t", 1)["total_bytes"] - 500_000
    report = planned("plan", path, "--serve", "--budget", least, "-c", 256, "-t", 1, "--speculate", "off")
    with running(path, ctx=256, prefill_chunk=256, max_sequences=16, fill_budget=True, budget_bytes=least) as opened:
        assert opened.plan.total_bytes == report["total_bytes"] <= least
        assert opened.plan.kv_blocks * 16 == report["serving"]["kv_tokens"]
        row = report["serving"]["fits"][-1]
        held = [opened.new_sequence() for _ in range(row["sequences"])]
        for sequence in held:
            opened.prefill(sequence, tokens(row["tokens"] - 1))
        opened.decode(held, [1] * len(held))


def test_a_server_needs_one_context(tmp_path: Path, no_variables: None) -> None:
    """Else the plan has that, does not fit, and says with which context it would."""
    path = write_model(tmp_path)
    full = planned("plan", path, "--serve", "--budget", "1GB")
    block = (full["serving"]["kv_bytes"] - 64) // (full["serving"]["kv_tokens"] // 16)
    least = full["total_bytes"] - full["serving"]["kv_bytes"] + 64 + 64 * block
    one = planned("plan", path, "--serve", "--budget", least)
    assert one["total_bytes"] == least and one["serving"]["fits"][-1] == {"tokens": 1024, "sequences": 1}
    report = planned("plan", path, "--serve", "--budget", least - 1, code=3)
    assert report["fits"] is False and report["serving"] == one["serving"] and report["regions"] == one["regions"]
    assert ". It fits with --ctx 1008" in report["error"]["message"]
    smaller = report["alternatives"][0]["value"]
    again = planned("plan", path, "--serve", "--budget", least - 1, "--ctx", smaller)
    assert again["fits"] and again["max_ctx"] == smaller == report["max_ctx"]


def test_without_a_budget_a_tenth_stays_free(monkeypatch: pytest.MonkeyPatch, no_variables: None) -> None:
    monkeypatch.setattr("edgeinfer.memory_planner.budget.available_bytes", lambda: 300_000_000)
    whole, served = planned("plan", "demo"), planned("plan", "demo", "--serve", "--max-sequences", 64)
    assert served["budget_bytes"] == pytest.approx(0.9 * whole["budget_bytes"], rel=0.02)
    assert served["budget_source"] == "nine tenths of what is free on this machine now"


@pytest.mark.parametrize(("given", "said"), [
    (("--serve", "--samples", 2),
     "--samples 2 has no effect with --serve, which plans for the requests of many; leave one out."),
    (("--serve", "--beams", 2),
     "--beams 2 has no effect with --serve, which plans for the requests of many; leave one out."),
    (("--serve", "--max-sequences", 65), "--max-sequences is 65; it must be from 1 to 64."),
    (("--serve", "--max-sequences", 0), "--max-sequences is 0; it must be from 1 to 64."),
    (("--max-sequences", 4), "--max-sequences 4 requires --serve."),
    (("--kv-memory", "5"), "--kv-memory: Size '5' cannot be read; did you mean 5GiB or 5MB?"),
    (("--kv-memory", "1GiB", "--device", "onnx-cpu"),
     "--kv-memory is not offered with --kv-layout slots, where each sequence has a slot with room for a whole context; "
     "choose pages (on cuda), or lower --ctx."),
])
def test_what_a_plan_for_serving_refuses(given: tuple[object, ...], said: str, no_variables: None) -> None:
    done = edgeinfer("plan", "demo", *given)
    assert (done.code, done.sentence) == (2, said)


def test_a_draft_model_on_a_device_has_its_part(no_variables: None) -> None:
    """A server on a GPU that has a draft model takes the memory of all its contexts, not all that is free."""
    report = planned("plan", "llama-2-7b", "--serve", "--machine", "h100", "--draft", "tinyllama-1.1b", "-c", 1024)
    assert report["fits"] and report["serving"]["kv_tokens"] == 16 * 1024 + 16 * 256
    assert report["device_bytes"] < report["device_budget_bytes"] // 2


def test_beams_of_a_variable_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_BEAMS", "4")
    monkeypatch.setenv("EDGEINFER_SAMPLES", "3")
    assert planned("plan", "demo", "--serve")["serving"]["max_sequences"] == 16


# -- --kv-memory -------------------------------------------------------------------------------------------------------


def test_run_takes_the_pool_that_was_planned(monkeypatch: pytest.MonkeyPatch, no_variables: None) -> None:
    """By flag, by variable and in Python, in bytes or in tokens."""
    report = planned("plan", "demo", "--kv-memory", "500kB")
    assert report["max_ctx"] == 22 * 16 and report["total_bytes"] == planned("plan", "demo")["total_bytes"] - 42 * BLOCK
    run = planned("run", "demo", "Once", "-n", 4, "--kv-memory", "500kB")
    assert run["planned_bytes"] == report["total_bytes"] and run["completion_tokens"] == 4
    monkeypatch.setenv("EDGEINFER_KV_MEMORY", "500kB")
    assert planned("plan", "demo")["total_bytes"] == report["total_bytes"]
    for pool in ({"kv_memory": "500kB"}, {"kv_memory": 500_000}, {"kv_tokens": 340}):
        with LLM("demo", **pool) as llm:
            assert llm.plan.kv_blocks == 22 and llm.plan.total_bytes == report["total_bytes"]


def test_pools_that_do_not_fit(no_variables: None) -> None:
    """Not one block, and more than the budget: one sentence, exit code 3, and the plan."""
    for command in (("plan", "demo"), ("run", "demo", "Once", "-n", 2)):
        done = edgeinfer(*command, "--kv-memory", "5kB")
        assert done.code == 3
        assert done.err.endswith("The KV pool of 5.0 kB is too small for one block of 16 tokens, which takes "
                                 f"{BLOCK + 64:,} bytes; raise --kv-memory.\n")
        assert "1 blocks (16 tokens in all)" in done.out + done.err
        report = planned(*command, "--kv-memory", "300MB", "--budget", "200MB", code=3)
        assert report["fits"] is False and report["total_bytes"] > 400_000_000
        assert [one["change"] for one in report["alternatives"]] == ["kv_memory"]
        memory = report["alternatives"][0]["value"]
        assert f"It fits with --kv-memory {memory}B." in report["error"]["message"]
        again = planned(*command, "--kv-memory", f"{memory}B", "--budget", "200MB")
        assert again.get("total_bytes", again.get("planned_bytes")) == report["alternatives"][0]["total_bytes"]
    out = edgeinfer("plan", "demo", "--kv-memory", "5kB").out
    assert out.startswith("It does not fit: the KV pool is too small for one block;")
    with pytest.raises(UsageError, match=r"^kv_tokens 64 and kv_memory 90000000 size one KV pool; use one\.$"):
        LLM("demo", kv_tokens=64, kv_memory="90MB")
    with pytest.raises(BudgetError, match="too small for one block"):
        LLM("demo", kv_memory=100)


# -- devices of onnxruntime --------------------------------------------------------------------------------------------


def test_pages_of_a_card(no_variables: None) -> None:
    """As many as its memory has beside the model, or as were asked for."""
    served = planned(*PAGES, "--serve")
    pages = served["serving"]["kv_tokens"] // 256
    kv = next(region for region in served["regions"] if region["name"] == "kv")
    assert kv["kind"] == "device"
    assert kv["reason"].startswith(f"f16, {pages} pages ({256 * pages} tokens in all) of 256")
    assert served["device_bytes"] <= served["device_budget_bytes"] < served["device_bytes"] + kv["bytes"] // pages
    assert [row["sequences"] for row in served["serving"]["fits"]] == [16, 16, 256 * pages // 4096]
    given = planned(*PAGES, "--kv-memory", "3GiB")
    assert given["serving"] is None and given["max_sequences"] == 1
    assert next(r["bytes"] for r in given["regions"] if r["name"] == "kv") == 24 * 256 * 524288 == 3 << 30
    few = planned(*PAGES, "--kv-memory", "1MB", code=3)
    assert few["error"]["message"].startswith("The KV pool of 1.0 MB is too small for one block of 256 tokens, which ")
    assert edgeinfer(*PAGES, "--kv-memory", "1MB").out.startswith("It does not fit: the KV pool is too small for one ")
    many = planned(*PAGES, "--kv-memory", "300GiB", code=3)
    memory = many["alternatives"][0]["options"]["kv_memory"]
    assert planned(*PAGES, "--kv-memory", f"{memory}B")["fits"]
    planned(*PAGES, "--kv-memory", f"{memory + 134217728 + 4096}B", code=3)
    long = planned(*PAGES, "--serve", "-c", 65536, code=3)
    assert long["alternatives"][0]["change"] == "ctx" and long["serving"]["kv_tokens"] == 65536


def test_slots_are_as_many_as_fit(tmp_path: Path, no_variables: None) -> None:
    """A run that fills its budget has fewer sequences where slots for all do not fit, and says so itself."""
    path = write_model(tmp_path)
    ask: dict[str, Any] = {"ctx": 1024, "threads": 1, "max_sequences": 6, "fill_budget": True}
    with running(path, "onnx-cpu", **ask) as opened:
        most, slot = opened.plan.total_bytes, opened.plan.region("kv").nbytes // 6
        assert opened.config.max_sequences == opened.plan.kv_blocks == 6
    with running(path, "onnx-cpu", **ask, budget_bytes=most - slot) as opened:
        slots = opened.plan.kv_blocks
        assert opened.config.max_sequences == slots == 5 and opened.plan.total_bytes <= most - slot
        held = [opened.new_sequence() for _ in range(slots)]
        for sequence in held:
            opened.prefill(sequence, tokens(40))
        opened.decode(held, [1] * slots)
    for too_little in (most - 6 * slot, 1):
        with pytest.raises(BudgetError, match="It fits with --ctx" if too_little > 1 else "No smaller setting"), \
                running(path, "onnx-cpu", **ask, budget_bytes=too_little):
            pass
    with pytest.raises(UsageError, match="--kv-memory is not offered with --kv-layout slots"), \
            running(path, "onnx-cpu", kv_tokens=64):
        pass


def test_pages_of_an_open_model(tmp_path: Path) -> None:
    """In a pool of twenty pages three sequences of 96 tokens fit, and part of a fourth."""
    path = write_model(tmp_path)
    with running(path, "pages", ctx=96, max_sequences=8, kv_tokens=20 * 16) as opened:
        assert opened.plan.kv_blocks == 20 and opened.plan.sequences_of(96, opened.block_tokens) == 3
        held = [opened.new_sequence() for _ in range(4)]
        for number, sequence in enumerate(held[:3]):
            opened.prefill(sequence, tokens(95, number))
        assert opened.room(held[:3], 10) == 1 and opened.room(held[3:], 90) == 32
        with pytest.raises(RequestError, match="All 20 KV blocks of 16 tokens are in use"):
            opened.prefill(held[3], tokens(96))
    with on_device("pages") as device, LLM(path, ctx=64, threads=1, kv_memory=100_000, **device) as llm:
        assert 0 < llm.plan.region("kv").nbytes <= 100_000 and llm.plan.kv_blocks > 4
        assert llm.runner.config.max_sequences == 1
    with on_device("pages") as device, pytest.raises(BudgetError, match="too small for one block"):
        LLM(path, ctx=64, threads=1, kv_memory=100, **device)
