"""benchmarks/answers_here.py with commands that only pretend: its questions, the section, the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import answers_here
from benchmarks.estimator_here import NoPredictionError
from edgeinfer.devices import DeviceProfile, load_profile

LOCAL = DeviceProfile("local", "This machine", "local", 8 << 30, 40.0, 36.0, 2, "avx2", constants={"f_w": 0.9})
PROFILE = {"bandwidth_gbs": 40.0, "storage_sequential_gbs": 1.5}
SERVED = {"output_throughput": 50.0, "ttft_ms": {"median": 500.0}, "tpot_ms": {"median": 20.0}, "e2el_ms": None}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Record the calls of the command line; answers are 10 % too fast, with the bandwidth of the moment 10 % slow."""
    calls: list[tuple[str, ...]] = []

    def pretend(*arguments: str) -> dict[str, Any]:
        calls.append(arguments)
        if arguments[0] == "devices":
            return PROFILE
        if arguments[0] == "plan":
            return {"regions": [{"bytes": 1_000_000}], "unstreamed_bytes": 3_000_000}
        if arguments[0] == "bench":
            rows = [{"test": "pp256", "t_per_s": 100.0}, {"test": "tg16", "t_per_s": 10.0}]
            return {"serving": [SERVED], "rows": rows, "bandwidth_gbs": 30.0}
        if "now.toml" in arguments[-1]:
            profile = load_profile(arguments[-1])
            assert profile.bandwidth_gbs == 30 and profile.constants == LOCAL.constants
            return {"users": {"output_throughput": 45.0, "ttft_ms": 550.0, "tpot_ms": 22.0},
                    "decode_empty_tok_per_s": 9.0, "prefill_tok_per_s": 110.0}
        return {"users": {"output_throughput": 55.0, "ttft_ms": 450.0, "tpot_ms": 18.0, "e2el_ms": 1.0}, "fits": True,
                "storage": {"read_bytes": 5, "streamed_layers": 3, "layers": 6}, "decode_empty_tok_per_s": 11.0,
                "prefill_tok_per_s": 90.0}

    monkeypatch.setattr(answers_here, "command", pretend)
    monkeypatch.setattr(answers_here, "bandwidth", lambda: 30.0)
    monkeypatch.setattr(answers_here, "load_profile", lambda name: LOCAL)
    return calls


def test_each_answer_is_beside_its_measurement(asked: list[tuple[str, ...]], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n", encoding="utf-8")
    assert answers_here.main(["--shape", "demo", "--output", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Title") and "<!-- answers: begin -->" in text and "1.50 GB/s of storage" in text
    assert "| 8 users | tokens/s of all | 50 | 55 | +10% | 45 | -10% |" in text
    assert "| 1 users | TTFT, ms | 500 | 450 | -10% | 550 | +10% |" in text
    assert "| olmoe-1b-7b in 2GB | tg16 | 10 | 11 | +10% | 9 | -10% |" in text
    assert "in memory | pp256 | 100 | 90 | -10% | 110 | +10% |" in text
    assert text.count("3 of 6 layers streamed | tg16 | 10 | 11 | +10% | 9 | -10% |") == 2 and "E2EL" not in text
    assert asked[0] == ("devices", "--probe")
    budgets = [call[call.index("--budget") + 1] for call in asked if "--budget" in call]
    assert budgets == [one for one in ("2600000", "2300000", "2GB") for _ in range(3)]  # of estimate and bench the same


def test_answers_of_several_calls_make_one_table(asked: list[tuple[str, ...]], tmp_path: Path) -> None:
    page, keep = tmp_path / "page.md", tmp_path / "answers.json"
    for users in ("1", "4"):
        answers_here.main(["--parts", "users", "--no-probe", "--users", users, "--keep", str(keep),
                           "--output", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "| 1 users | TTFT, ms |" in text and "| 4 users | TTFT, ms |" in text and "8 users" not in text
    assert [call[call.index("--concurrency") + 1] for call in asked if call[0] == "bench"] == ["1,1,1", "4,4,4"]


def test_the_bound_and_the_parts(asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_here, "BOUND", 0.05)
    assert answers_here.main(["--parts", "storage", "--no-probe"]) == 1
    assert not any("--users" in call or "--probe" in call for call in asked)
    with pytest.raises(SystemExit):
        answers_here.main(["--parts", "speed"])


def test_a_model_that_streams_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"devices": PROFILE, "plan": {"regions": [{"bytes": 9}], "unstreamed_bytes": 10},
               "estimate": {"fits": False, "storage": {"read_bytes": 0}}}
    monkeypatch.setattr(answers_here, "command", lambda *words: answers[words[0]])
    with pytest.raises(NoPredictionError, match="has no layers to stream within 6 bytes; take a larger shape"):
        list(answers_here.storage("demo"))
    assert answers_here.main(["--parts", "storage", "--no-probe"]) == 2
