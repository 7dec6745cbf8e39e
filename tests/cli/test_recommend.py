"""`edgeinfer recommend`: its models fit and are fast enough, and its table of sizes agrees with the plans."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from edgeinfer.config import WEIGHT_TYPES
from edgeinfer.graph import builtin_shapes
from edgeinfer.models import sizes
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer
from tests.helpers.gguf_files import sizes_for, write_gguf
from tests.make_sizes import TABLE, row

SAMPLE = ("smollm2-135m", *random.Random(4).sample([name for name in builtin_shapes() if "deepseek-v3" not in name], 2))


@pytest.mark.parametrize("name", SAMPLE)
def test_the_table_of_sizes_is_up_to_date(name: str) -> None:
    kept = json.loads(TABLE.read_text(encoding="utf-8"))
    assert list(kept) == list(builtin_shapes()), "run: python -m tests.make_sizes"
    assert json.loads(json.dumps(row(name))) == kept[name], "run: python -m tests.make_sizes"


def test_the_table_has_every_type_that_is_compared() -> None:
    kept = json.loads(TABLE.read_text(encoding="utf-8"))
    assert all(list(kept[name]["types"]) == list(sizes.types_of(name, sizes.COMPARED)) for name in kept)


def test_a_recommended_model_is_one_that_plan_lets_run_as_fast() -> None:
    out = edgeinfer("recommend", "--machine", "M4 Pro 24GB", "--ctx", 8192, "--min-speed", 20, "--json").json
    assert len(out["models"]) > 5
    for found in out["models"][:2] + out["models"][-1:]:
        asked = ("--machine", "M4 Pro 24GB", "--ctx", 8192, "--json")
        planned = edgeinfer("plan", f"{found['model']} {found['weights']}", *asked).json
        assert planned["fits"] and planned["mode"] == "resident"
        assert planned["total_bytes"] == pytest.approx(found["total_bytes"], rel=0.02)
        half = edgeinfer("estimate", f"{found['model']} {found['weights']}", *asked, "-c", 4096).json
        assert half["decode_tok_per_s"] == pytest.approx(found["decode_tok_per_s"]) and found["decode_tok_per_s"] >= 20
    sized = [found["parameters"] for found in out["models"]]
    assert sized == sorted(sized, reverse=True)


def test_the_answer_is_in_the_first_lines_of_80_columns() -> None:
    for asked in (["--machine", "rpi5 8gb"], ["--machine", "m4 pro 48gb", "--for", "code"], ["--machine", "rtx 4090"],
                  ["llama 3.1 8b", "--all-devices", "--min-speed", 20], ["--all-devices", "--for", "rag"],
                  ["--bandwidth", 120, "--cores", 8, "--class", "laptop", "--memory", "32GiB"]):
        shown = edgeinfer("recommend", *asked)
        first = " ".join(shown.out.splitlines()[:3])
        assert shown.code == 0 and "tokens/s" in first
        assert max(map(len, shown.out.splitlines())) <= 80


def test_the_least_memory_comes_first_and_no_smaller_version_would_do() -> None:
    out = edgeinfer("recommend", "llama-3.1-8b", "--all-devices", "--min-speed", 20, "--json").json
    memory = [found["memory_bytes"] for found in out["devices"]]
    assert memory == sorted(memory) and len(memory) > 100
    assert all(found["decode_tok_per_s"] >= 20 and found["total_bytes"] <= found["memory_bytes"]
               for found in out["devices"])


def test_all_types_are_compared_in_one_table() -> None:
    asked = ("plan", "qwen3 8b", "--machine", "m4 16gb", "--compare")
    shown, out = edgeinfer(*asked), edgeinfer(*asked, "--json").json
    assert shown.code == 0 and shown.out.startswith("int8 is the most exact that fits Apple M4, 16 GB")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert [found["weights"] for found in out["types"]] == list(sizes.COMPARED)
    assert set(WEIGHT_TYPES) - {"f32", "q2"} == set(sizes.MADE)  # q2 holds models that were trained with three values
    rows = {found["weights"]: found for found in out["types"]}
    for found in (rows[kind] for kind in ("int8", "Q6_K", "Q4_K_M", "tableq", "tableq3", "q5m")):
        how = ("qwen3-8b", "--weights", found["weights"]) if found["made"] else (f"qwen3-8b {found['weights']}",)
        planned = edgeinfer("plan", *how, "--machine", "m4 16gb", "--json").json
        assert planned["total_bytes"] == pytest.approx(found["total_bytes"], rel=0.02)
        assert planned["fits"] == found["fits"]
    assert edgeinfer("plan", "llama-3.1-70b", "--machine", "rpi5", "--compare").code == 3
    for more, sentence in ((["--weights", "q4"], "--weights q4 has no effect with --compare, which compares all types"),
                           (["--budget", "0"], "--budget")):
        assert sentence in edgeinfer(*asked, *more).err
    assert "'nosuch-9z'" in edgeinfer("plan", "nosuch-9z", "--compare", "--machine", "m4").sentence


def test_a_model_of_three_values_is_compared_in_types_that_hold_them() -> None:
    asked = ("plan", "bitnet-2b", "--machine", "rpi5", "--compare")
    out = edgeinfer(*asked, "--json").json
    assert [found["weights"] for found in out["types"]] == list(sizes.TERNARY)
    assert all(found["kld"] is None and found["from"] == "convert" for found in out["types"])
    planned = edgeinfer("plan", "bitnet-2b", "--machine", "rpi5", "--json").json
    assert out["types"][0]["total_bytes"] == pytest.approx(planned["total_bytes"], rel=0.02)
    assert edgeinfer(*asked).out.startswith("q2 holds the model's three values exactly")
    found = edgeinfer("recommend", "bitnet-2b", "--all-devices", "--json").json["devices"]
    assert len(found) > 100
    for one in found:  # cards have no operator for codes of 2 bits and hold them in 8
        assert one["weights"] == ("q4" if one["program"] == "edgeinfer with onnxruntime" else "q2")


def test_models_on_disk_are_compared(tmp_path: Path) -> None:
    """A bundle and a checkpoint with all types that can be made; a quantised file as it is and with smaller ones."""
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(dict(builtin_shapes()["tinyllama-1.1b"].config)))
    out = edgeinfer("plan", checkpoint, "--compare", "--machine", "rpi5", "--json").json
    shape = edgeinfer("plan", "tinyllama-1.1b", "--compare", "--machine", "rpi5", "--json").json
    same = {kind["weights"]: kind for kind in shape["types"]}
    assert [kind["weights"] for kind in out["types"]] == list(sizes.MADE) and out["shape"] is None
    for found in out["types"]:
        wanted = same[found["weights"]]
        assert found["file_bytes"] == wanted["file_bytes"]
        assert found["total_bytes"] == pytest.approx(wanted["total_bytes"], rel=0.02)
        assert found["decode_tok_per_s"] == pytest.approx(wanted["decode_tok_per_s"], rel=0.02)
    shown = edgeinfer("plan", "demo", "--compare", "--machine", "rpi5").out
    assert "as it is" in shown and "made from its checkpoint" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    path = tmp_path / "model-q4_0.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "small", "llama", **sizes_for("Q4_0")), "Q4_0")
    assert edgeinfer("plan", path, "--compare", "--machine", "rpi5").out.startswith("The file as it is fits")
    rows = edgeinfer("plan", path, "--compare", "--machine", "rpi5", "--json").json["types"]
    assert rows[0]["weights"] == "as it is" and all(one["file_bytes"] < rows[0]["file_bytes"] for one in rows[1:])


def test_code_and_documents_have_other_models() -> None:
    asked = ("recommend", "--machine", "m4 pro 48gb", "--json", "--for")
    names = {use: {found["called"] for found in edgeinfer(*asked, use).json["models"]}
             for use in ("chat", "code", "rag")}
    assert "Qwen3-Coder 30B-A3B" in names["code"] and not names["code"] & names["chat"]
    assert names["rag"] < names["chat"]
    assert all(sizes.sized(name, "q4").longest >= 16384 for name in names["rag"])


@pytest.mark.parametrize(("asked", "sentence"), [
    (["--machine", "rpi5", "--for", "music"], "--for is 'music'; choose one of chat, code, rag."),
    (["--machine", "rpi5", "--min-speed", "0"], "--min-speed is 0.0; it must be a finite number above 0."),
    (["--machine", "rpi5", "--ctx", "0"], "--ctx"),
    (["--machine", "rpi5", "--all-devices"], "--machine rpi5 has no effect with --all-devices"),
    (["llama-3.1-8b", "--machine", "rpi5"], "'edgeinfer plan llama-3.1-8b' plans one"),
    (["--all-devices", "--runtime", "foo"], "No speed of 'foo' is known on any device; known programs are"),
    (["--all-devices", "--runtime", "MLC", "--unit", "npu"], "No speed of 'MLC' is known on any NPU; known programs"),
    (["llama-3.1-8b", "--all-devices", "--for", "code"], "--for code has no effect with --all-devices and MODEL"),
    (["nosuch-9z", "--all-devices"], "'nosuch-9z' is not a built-in shape; similar names are"),
    (["--bandwidth", "0", "--cores", "8", "--class", "laptop"], "--bandwidth is '0"),
    (["--bandwidth", "120", "--cores", "8"], "--bandwidth describes a device together with --class; add it."),
    (["--bandwidth", "120", "--cores", "8", "--class", "boat"], "--class is 'boat'; choose one of desktop, laptop"),
    (["--memory", "8GiB"], "--memory belongs to --bandwidth, --cores and --class"),
    (["--machine", "m4", "--runtime", "mlx"], "No speed of 'mlx' is known on Apple M4; known are llama.cpp, edge"),
    (["--machine", "rpi5", "--unit", "gpu"], "Nothing is known of a GPU of Raspberry Pi 5; known is its CPU."),
    (["--unit", "gpu"], "--unit selects among the facts about a device; add --machine NAME."),
])
def test_what_is_refused(asked: list[str], sentence: str) -> None:
    done = edgeinfer("recommend", *asked)
    assert done.code == 2 and done.out == "" and sentence.split("'0")[0] in done.err
