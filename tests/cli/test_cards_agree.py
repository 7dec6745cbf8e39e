"""Cards: `plan`, `estimate`, `plan --compare` and `recommend` say the same of memory, fits and speed."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import estimate, plan, recommend, registry
from edgeinfer.base.units import format_size
from edgeinfer.cli.commands.plan import planned_here
from edgeinfer.cli.reports import prediction
from edgeinfer.cli.reports.comparison import compared
from edgeinfer.cli.reports.estimate_object import estimate_object
from edgeinfer.cli.reports.on_gpu import Cards
from edgeinfer.cli.reports.plan_device import planned_on
from edgeinfer.cli.reports.recommendation import best
from edgeinfer.config import DEFAULT_DRAFT_TOKENS, MAX_KLD, Recipe, RuntimeConfig
from edgeinfer.devices import DeviceProfile, chosen, gpu_profile, load_profile
from edgeinfer.graph import builtin_shapes
from edgeinfer.models import sizes
from edgeinfer.models.describe import describe
from tests.helpers.command_line import edgeinfer, environment
from tests.helpers.sessions import write_model

CTX, MIB = 4096, 1 << 20
CARDS = ("rtx 4060", "rtx 4070", "rtx 4090", "a100 80gb", "h200", "rx 7900 xtx")
"""The last one is no NVIDIA card: its speed is llama.cpp's."""
BORDER = 0.02
"""Share by which the table's memory of runs on processors may be off."""
MODELS = ("llama-2-13b", "llama-3.1-8b", "bitnet-2b", "gpt-oss-20b", "qwen3-30b-a3b", "tinyllama-1.1b",
          "deepseek-v2-lite", "qwen3-next-80b-a3b")
"""Dense, of three values, mixtures of experts, latent attention, and a recurrent state."""
CASES = [(model, kind) for model in MODELS for kind in sizes.types_of(model, sizes.COMPARED)]


@cache
def profile(name: str) -> DeviceProfile:
    return chosen(load_profile(name))


def asked(model: str, kind: str) -> tuple[str, str | None]:
    """Name and --weights by which a type is asked for."""
    return (model, kind) if kind in {*sizes.MADE, *sizes.TERNARY} else (f"{model} {kind}", None)


@cache
def table(model: str, device: str) -> dict[str, dict[str, Any]]:
    return {row["weights"]: row for row in compared(model, model, profile(device), CTX)["types"]}


class Answers:
    """Plans and estimates of a model with one type, for one device after the other."""

    def __init__(self, model: str, kind: str):
        self.name, self.weights = asked(model, kind)
        self.model = describe(self.name, self.weights)
        self.config = registry.configured(RuntimeConfig(ctx=CTX, draft_tokens=DEFAULT_DRAFT_TOKENS),
                                          {one.name: one.default for one in registry.options("estimate")})
        self.cards = Cards(partial(describe, self.name, self.weights, None, Recipe(())), self.config, None)

    def estimated(self, device: str) -> dict[str, Any]:
        return estimate_object(self.model, profile(device), CTX, 512, "int8", (1.0, None), self.config, 1, self.cards)

    def planned(self, device: str) -> dict[str, Any]:
        model, found = self.cards.on(profile(device)) or (None, None)
        if model and found and found.planner:
            return planned_on(found, model)
        drafting = registry.drafting({one.name: one.default for one in registry.options("plan")})
        return planned_here(self.name, (self.weights, None), self.config, MAX_KLD, profile(device), drafting,
                            found.refused if found else "")


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize(("model", "kind"), CASES)
def test_all_commands_say_the_same_of_a_card(model: str, kind: str) -> None:
    answers = Answers(model, kind)
    for device in CARDS:
        planned, told, row = answers.planned(device), answers.estimated(device), table(model, device)[kind]
        where, card = (model, kind, device), planned.get("device_bytes")
        taken = card or planned["total_bytes"]
        assert (told["device_bytes"], told["total_bytes"]) == (card, planned["total_bytes"]), where
        assert told["fits"] == planned["fits"], where
        resident = told["fits"] and told["mode"] == "resident"
        if card:
            assert row["total_bytes"] == pytest.approx(card, abs=MIB), where
            assert row["fits"] == resident, where
        elif abs(told["unstreamed_bytes"] / told["budget_bytes"] - 1) > BORDER:
            assert row["total_bytes"] == pytest.approx(told["unstreamed_bytes"], rel=BORDER), where
            assert row["fits"] == resident, where
        assert planned["estimate"]["decode_tok_per_s"] == pytest.approx(told["decode_tok_per_s"]), where
        assert row["program"] == told["program"] == planned["estimate"]["program"], where
        (half,) = [at for at in told["contexts"] if at["depth"] == CTX // 2]
        if row["fits"] or card:
            assert row["decode_tok_per_s"] == pytest.approx(half["decode_tok_per_s"], rel=1e-3), where
        assert taken > 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", CARDS)
def test_the_recommended_type_is_the_first_that_fits(model: str, device: str) -> None:
    rows = table(model, device)
    known = sizes.types_of(model, sizes.TYPES)
    kinds = [kind for kind in (known if "q2" not in known else rows) if kind != "f16" and rows[kind]["fits"]]
    found = best(profile(device), model, CTX, 0.01)
    assert (found and found["weights"]) == (kinds[0] if kinds else None)
    if found:
        wanted = rows[found["weights"]]
        assert {key: found[key] for key in ("total_bytes", "decode_tok_per_s", "program")} == {
            key: wanted[key] for key in ("total_bytes", "decode_tok_per_s", "program")}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("model", MODELS)
def test_memory_that_a_gpu_shares_is_that_of_the_processor(model: str) -> None:
    """A Jetson's memory is one: edgeinfer runs on its processor, and nothing is lowered."""
    for kind in ("int8", "q4"):
        answers = Answers(model, kind)
        planned, told = answers.planned("agx-orin"), answers.estimated("agx-orin")
        row = table(model, "agx-orin")[kind]
        assert told["device_bytes"] is None and told["program"] == row["program"] == "edgeinfer"
        assert (told["fits"], told["total_bytes"]) == (planned["fits"], planned["total_bytes"])
        assert row["total_bytes"] == pytest.approx(told["unstreamed_bytes"], rel=BORDER)
        if told["mode"] == "resident":
            (half,) = [at for at in told["contexts"] if at["depth"] == CTX // 2]
            assert row["decode_tok_per_s"] == pytest.approx(half["decode_tok_per_s"], rel=BORDER)


def test_codes_of_8_bits_are_counted_as_such() -> None:
    """Types without an operator of their own take the bytes of int8, and as long."""
    rows = table("llama-2-13b", "rtx 4090")
    for kind in ("q5", "iq4", "tableq", "tableq3", "mxfp4"):
        assert rows[kind]["decode_tok_per_s"] == pytest.approx(rows["int8"]["decode_tok_per_s"], rel=0.01)
        assert rows[kind]["total_bytes"] == pytest.approx(rows["int8"]["total_bytes"], rel=0.01)
    assert rows["q4"]["decode_tok_per_s"] > 1.4 * rows["int8"]["decode_tok_per_s"]
    ternary = table("bitnet-2b", "rtx 4090")
    assert ternary["q2"]["total_bytes"] == ternary["int8"]["total_bytes"] > 1.2 * ternary["q4"]["total_bytes"]


def test_a_token_reads_all_experts() -> None:
    out = Answers("gpt-oss-20b", "q4").estimated("rtx 4090")
    assert out["weight_bytes"] > out["weight_bytes_read"] > 0.9 * out["weight_bytes"]
    assert "Each token is multiplied by the matrices of all 32 experts" in out["remark"]
    assert out["break_even"] is None  # onnxruntime skips no neurons
    shown = edgeinfer("estimate", "tinyllama-1.1b", "--machine", "rtx4090").out
    assert "sparse FFN" not in shown and "skipping" not in shown


@pytest.mark.parametrize(("model", "kind"), [("llama-2-13b", "q6"), ("gpt-oss-20b", "q4"), ("deepseek-v2-lite", "q4k")])
def test_the_parts_of_an_explanation_are_the_traffic(model: str, kind: str) -> None:
    name, weights = asked(model, kind)
    out = edgeinfer("estimate", name, "--weights", weights, "--machine", "rtx4090", "--explain", "--json").json
    found = {(line["group"], line["name"]): line for line in out["explain"]}
    assert found["Bytes of a token", "weights"]["value"] == pytest.approx(out["weight_bytes_read"] / 1e9)
    assert found["Bytes of a token", "KV read"]["value"] * 1e6 + out["weight_bytes_read"] == pytest.approx(
        out["bytes_per_token"])
    assert found["Time of a token", "tokens/s"]["value"] == pytest.approx(out["decode_tok_per_s"])
    assert not any(name.startswith("--kv") for _, name in found)  # cards have one type


@pytest.mark.parametrize("sequences", [1, 8])
def test_users_and_samples_take_the_memory_of_the_plan(sequences: int) -> None:
    given = ("llama-3.1-8b", "--machine", "rtx4070", "--json")
    users = edgeinfer("estimate", *given, "--users", sequences).json["users"]
    planned = edgeinfer("plan", *given, "-c", 640, "--samples", sequences).json
    assert users["memory_bytes"] == planned["device_bytes"]


@pytest.mark.parametrize(("card", "fits"), [("rtx4090", True), ("rtx4060", False)])
def test_a_draft_takes_the_memory_of_the_plan(card: str, fits: bool) -> None:
    given = ("llama-2-13b", "--machine", card, "-c", 2048, "--draft", "tinyllama-1.1b", "--json")
    told, done = edgeinfer("estimate", *given).json["speculation"], edgeinfer("plan", *given)
    assert told["total_bytes"] == done.json["device_bytes"]
    assert told["fits"] == done.json["fits"] == fits


def test_a_budget_limits_the_process_beside_a_card() -> None:
    given = ("llama-2-7b", "--machine", "rtx4090", "--budget")
    for budget, fits in (("1GiB", False), ("2GiB", True)):
        planned, told, rows = (edgeinfer(*command, *given, budget, "--json").json for command in (
            ("plan",), ("estimate",), ("plan", "--compare")))
        assert planned["fits"] == told["fits"] == any(row["fits"] for row in rows["types"]) == fits
        assert told["budget_bytes"] == rows["budget_bytes"] == planned["device_budget_bytes"] == 24 << 30
        assert told["process_budget_bytes"] == rows["process_budget_bytes"] == planned["budget_bytes"]
    needs = format_size(planned["total_bytes"])
    short = f"the process beside the card takes {needs}, and --budget allows 1.07 GB"
    assert short in " ".join(edgeinfer("estimate", *given, "1GiB").out.split())
    assert edgeinfer("plan", *given, "1GiB").out.startswith(f"It does not fit: {needs} of this process's 1.07 GB;")
    assert "25.77 GB and 1.07 GB for the process beside it" in " ".join(
        edgeinfer("plan", "--compare", *given, "1GiB").out.split())


def test_models_on_disk_are_compared_as_they_are_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(builtin_shapes()["tinyllama-1.1b"].config)))
    shape = {row["weights"]: row for row in compared("", "tinyllama-1.1b", profile("rtx 4070"), 2048)["types"]}
    for model, kinds in (("demo", ("as it is", "q6")), (tmp_path, ("q6", "q4k", "mxfp4"))):
        out = edgeinfer("plan", model, "--machine", "rtx4070", "--compare", "--json").json
        rows = {row["weights"]: row for row in out["types"]}
        for kind in kinds:
            more = ("-c", out["ctx"], *(() if kind == "as it is" else ("--weights", kind)), "--json")
            planned, told = (edgeinfer(command, model, "--machine", "rtx4070", *more).json
                             for command in ("plan", "estimate"))
            (half,) = [at for at in told["contexts"] if at["depth"] == out["ctx"] // 2]
            assert rows[kind]["total_bytes"] == planned["device_bytes"] == told["device_bytes"]
            assert rows[kind]["decode_tok_per_s"] == pytest.approx(half["decode_tok_per_s"])
            if model != "demo":
                assert shape[kind]["total_bytes"] == pytest.approx(rows[kind]["total_bytes"], abs=MIB)


def test_programs_get_the_same_answers() -> None:
    planned, told = plan("llama-2-13b", "rtx4070", weights="q6"), estimate("llama-2-13b", "rtx4070", weights="q6")
    assert planned.device_bytes == told.total_bytes and planned.fits == told.fits is False
    assert planned.decode_tok_per_s == pytest.approx(told.decode_tok_per_s)
    for found in recommend("rtx4070", min_speed=30)[:3]:
        name, weights = asked(found.model, found.weights)
        assert plan(name, "rtx4070", weights=weights).device_bytes == pytest.approx(found.total_bytes, abs=MIB)


def test_a_run_is_predicted_as_it_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "gpu_here", lambda: gpu_profile("NVIDIA H200"))
    path = write_model(tmp_path / "model", weights="q6")
    predictor = prediction.make_predictor(path, RuntimeConfig(kv="f16", ctx=64, recipe=Recipe(())), 1, "", 0, "cuda")
    planned = edgeinfer("plan", path, "--machine", "h200", "-c", 64, "--json").json
    assert predictor and predictor.decode(64)["t_per_s"] == pytest.approx(planned["estimate"]["decode_tok_per_s"])
    assert predictor.traffic.weight_bytes > 1.2 * describe(path).bytes_per_token


def test_a_comparison_lowers_nothing_and_imports_no_numba() -> None:
    code = ("import sys\nfrom edgeinfer.cli import main\n"
            "try:\n    main(['plan', 'llama-2-13b', '--machine', 'rtx4070', '--compare'])\n"
            "except SystemExit as end:\n    assert end.code == 0\n"
            "assert not {'numba', 'edgeinfer.backends.onnx.lower_graph'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), capture_output=True)
