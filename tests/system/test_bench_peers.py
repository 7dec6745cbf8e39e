"""benchmarks/against_peers.py with a peer that only pretends: the protocol, the pairs, the report, the command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import against_peers
from benchmarks.harness import Others, describe, wait_for_calm
from benchmarks.peers import pairs as pairs_module
from benchmarks.peers import sides
from benchmarks.peers.pairs import Bench, Comparison, Pair
from benchmarks.peers.report import markdown
from benchmarks.peers.worker import Worker, WorkerError
from edgeinfer.converters import SHAPES, write_random_bundle

PEERS = Path(against_peers.__file__).parent / "peers"
SMALL = replace(SHAPES["tinyllama-1.1b"], hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=320,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16)
FAKE = """
import sys, time
sys.path.insert(0, {peers!r})
from serving import serve
log = []
def run(kind, tokens, depth):
    log.append((kind, tokens, depth))
    return {{"seconds": tokens / 100.0, "bytes_per_token": 1e6, "operations_per_token": 2e6}}
def load(path, threads, properties=None):
    print("a library prints", flush=True)
    return {{"version": "1.2.3"}}
serve({{
    "load": load, "run": run, "context": lambda **settings: settings, "log": lambda: {{"log": log}},
    "memory": lambda: {{"peak_rss_bytes": 3000000, "base_rss_bytes": 1000000}},
    "first_token": lambda path, threads, ctx: {{"ms": 7.0}},
    "probe": lambda threads, read_bytes: {{"read_gbs": 2.0, "int8_gops": 4.0}},
    "fail": lambda: {{}}["absent"], "die": lambda: sys.exit("it died"), "sleep": lambda: time.sleep(60) or {{}},
}})
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    path = tmp_path / "fake.py"
    path.write_text(FAKE.format(peers=str(PEERS)))
    return [sys.executable, str(path)]


# -- protocol --------------------------------------------------------------------------------------------------------


def test_a_worker_answers_and_what_libraries_print_is_no_answer(fake: list[str]) -> None:
    with Worker("fake", fake) as worker:
        assert worker.ask("load", path="x", threads=2) == {"version": "1.2.3"}
        assert worker.ask("run", kind="pp", tokens=50, depth=3)["seconds"] == 0.5
        assert worker.ask("log") == {"log": [["pp", 50, 3]]}
        with pytest.raises(WorkerError, match="fake cannot fail: KeyError: 'absent'"):
            worker.ask("fail")
        assert worker.ask("context", ctx=3) == {"ctx": 3}, "an error ended the worker"


def test_a_worker_that_fails_is_reported(fake: list[str], tmp_path: Path) -> None:
    with Worker("fake", fake) as worker, pytest.raises(WorkerError, match="fake ended during 'die': it died"):
        worker.ask("die")
    with Worker("fake", fake) as worker, pytest.raises(WorkerError, match=r"fake has not answered 'sleep' in 0\.2 s"):
        worker.ask("sleep", timeout=0.2)
    with pytest.raises(WorkerError, match=r"fake cannot be started \(.*absent: No such file or directory\)"):
        Worker("fake", [str(tmp_path / "absent")])
    chatter = [sys.executable, "-c", "input(); print('hello'); input()"]
    with Worker("fake", chatter) as worker, pytest.raises(WorkerError, match="'load' without valid JSON: 'hello'"):
        worker.ask("load")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state of a process is read from /proc")
def test_a_worker_is_stopped_while_it_waits(fake: list[str]) -> None:
    with Worker("fake", fake) as worker:
        worker.ask("log")
        for _ in range(60_000):
            state = Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "T":
                break
            time.sleep(0.01)
        assert state == "T"
    assert not Path(f"/proc/{worker.pid}").exists()


# -- pairs -----------------------------------------------------------------------------------------------------------


def comparison(ratios: list[float], others: float = 0.0, setting: str = "s", test: str = "tg4") -> Comparison:
    pairs = [Pair(100 * ratio, 100, 50, 1000, others) for ratio in ratios]
    return Comparison("small", test, "llama.cpp", setting, 1e8, 2e9, pairs)


def test_sides_take_turns(fake: list[str]) -> None:
    with Worker("a", fake) as ours, Worker("b", fake) as peer, Worker("c", fake) as probe:
        result = Bench(ours, peer, probe, {"threads": 1, "read_bytes": 1}, 2, 0).compare("s", "tg", 40, 9, "p", "x")
        assert result.test == "tg40 @ d9" and len(result.pairs) == 2
        assert ours.ask("log")["log"][:3] == [["tg", 16, 9], ["tg", 40, 9], ["tg", 40, 9]]
    pair = result.pairs[0]
    assert (pair.ours, pair.peer, pair.read_gbs, pair.int8_gops) == (100, 100, 2, 4)
    assert result.bandwidth_share == pytest.approx(1e6 * 100 / 2e9)
    assert result.int8_share == pytest.approx(2e6 * 100 / 4e9)


def test_disturbed_pairs_are_measured_again(fake: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        seen = iter([0.9, 0.0, 0.1, 0.1, 0.0, 0.8, 0.1, 0.0])

        def __init__(self, pid: int) -> None: ...

        def cores(self) -> float:
            return next(self.seen)

    monkeypatch.setattr(pairs_module, "Others", Meter)
    with Worker("a", fake) as ours, Worker("b", fake) as peer, Worker("c", fake) as probe:
        bench = Bench(ours, peer, probe, {"threads": 1, "read_bytes": 1}, 2, 0)
        result = bench.compare("s", "pp", 4, 0, "p", "x")
        assert [pair.others for pair in result.pairs] == [0.1, 0.1] and result.disturbed == 2 and result.noisy == 0
        Meter.seen = iter([0.9, 0.8, 0.5, 0.4, 0.3, 0.3, 0.7, 0.7, 0.1, 0.1, 0.6, 0.6])
        result = bench.compare("s", "pp", 4, 0, "p", "x")
        assert [pair.others for pair in result.pairs] == [0.1, 0.3] and result.noisy == 1


def test_others_are_noticed() -> None:
    meter = Others(os.getpid())
    busy = subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"])
    assert busy.returncode == 0 and meter.cores() > 0.05  # 0.5 s of a processor, within 10 s on a busy machine
    assert wait_for_calm(0, 1000) is True
    assert wait_for_calm(0, -1) is False


# -- report ----------------------------------------------------------------------------------------------------------


def test_report() -> None:
    items = [comparison([1.0, 2.0, 3.0], setting="calm"), comparison([0.5], 0.9, "noisy"),
             comparison([1.5], setting="other", test="pp9")]
    run = {"machine": {"a": "a chip", "b": "2 cores"}, "versions": {"x": "1.0"}, "date": "2000-01-02", "threads": 2}
    extras = [{"shape": "small", "side": "edgeinfer", "first_token_ms": 12.3, "peak_rss_bytes": 5e6,
               "base_rss_bytes": None}]
    text = markdown(run, items, extras)
    assert "Measured 2000-01-02: a chip, 2 cores; 2 threads." in text and "Versions: x 1.0." in text
    figures = "200.0 | 100.0 | **2.00** (1.00 to 3.00) | 50.0 (50.0 to 50.0) | 40% |  |"
    assert f"| small | tg4 | llama.cpp calm | {figures}" in text
    assert "**0.50** (0.50 to 0.50) [1 of 1]" in text
    assert "| small | tg4 | llama.cpp | calm | 2.00 |" in text
    assert "| small | edgeinfer | 12 | 5 |  |" in text
    assert json.dumps([item.as_json() for item in items])
    assert set(describe()) == {"processor", "cores", "memory", "system", "python"}


# -- models of the peer ----------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("mixture", ["q4_0", "q4_k_m"])
def test_gguf(tmp_path: Path, mixture: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    shape = {**asdict(replace(SMALL, hidden_size=256, intermediate_size=512)), "rope_theta": 10000.0}
    command = [sys.executable, str(PEERS / "gguf_models.py"), "--shape", json.dumps(shape), "--format", mixture]
    done = subprocess.run([*command, "--output", str(tmp_path / "m.gguf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    names = {tensor.name: tensor for tensor in reader.tensors}
    assert len(names) == 3 + 2 * 9
    table = names.pop("token_embd.weight").n_bytes
    assert json.loads(done.stdout)["bytes_read"] == sum(int(tensor.n_bytes) for tensor in names.values())
    if mixture == "q4_0":
        assert table == 320 * 256 * 34 // 32
        assert all(t.tensor_type.name == "Q4_0" for n, t in names.items() if n.startswith("blk") and "norm" not in n)
    values = gguf.quants.dequantize(names["blk.0.ffn_gate.weight"].data, names["blk.0.ffn_gate.weight"].tensor_type)
    assert 0.3 < values.std() * math.sqrt(256) < 3


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_python(tmp_path: Path, fake: list[str]) -> str:
    if sys.platform == "win32":
        pytest.skip("a script that stands for an interpreter needs a shebang line")
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "if sys.argv[1].endswith('_models.py'):\n"
        "    if os.environ.get('FAIL_GGUF'): sys.exit('no gguf here')\n"
        "    open(sys.argv[-1], 'w').close()\n"
        f"else: os.execv({fake[0]!r}, {fake!r})\n"
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, fake_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(against_peers, "READ_BYTES", 4 << 20)
    out, raw = tmp_path / "out.md", tmp_path / "out.json"
    arguments = ["--llama-cpp-python", fake_python, "--shape", "small", "-p", "8", "-n", "4", "-d", "0,32", "-r", "1",
                 "--patience", "0", "--workdir", str(tmp_path / "models"), "--output", str(out), "--raw", str(raw)]
    assert against_peers.main(arguments) == 0
    rows = json.loads(raw.read_text())["rows"]
    assert [(row["test"], row["setting"]) for row in rows] == [
        *((test, f"q4_0, KV f16, flash attention {flash}") for flash in ("on", "off") for test in ("pp8", "tg4")),
        ("tg4 @ d32", "q4_0, KV f16, flash attention on"), ("tg4 @ d32", "q4_0, KV f16, flash attention off"),
        ("tg4 @ d32", "q4_0, KV q8_0, flash attention on"),
    ]
    assert all(row["peer"] == "llama.cpp" and row["ratio_median"] > 0 for row in rows)
    assert all(pair["peer"] == 100 for row in rows for pair in row["pairs"])
    text = out.read_text()
    assert "llama.cpp 1.2.3" in text and "| small | llama.cpp | 7 | 3 | 1 |" in text
    assert str(tmp_path) not in text
    assert (tmp_path / "models" / "small-q4_0.gguf").exists()


@pytest.mark.slow
def test_every_peer_is_met_with_the_same_groups(
    tmp_path: Path, fake_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(against_peers, "READ_BYTES", 4 << 20)
    monkeypatch.setattr(against_peers, "STARTS", 1)
    monkeypatch.setattr(sides, "convert", lambda source, destination: write_random_bundle(SMALL, destination))
    out, raw, models = tmp_path / "out.md", tmp_path / "out.json", tmp_path / "models"
    arguments = ["--llama-cpp-python", fake_python, "--openvino", fake_python, "--shape", "small", "--format", "q4_k_m",
                 "-p", "8", "-n", "4", "-d", "32", "-r", "1", "--patience", "0", "--pp-depth", "--workdir", str(models),
                 "--output", str(out), "--raw", str(raw)]
    assert against_peers.main(arguments) == 0
    names = {path.name for path in models.iterdir()}
    assert names == {"small-q4-g32", "small-q4-g128", "small-q4_k_m.gguf", "small-q4_k_m-imported",
                     "small-openvino-g128"}
    report = json.loads(raw.read_text())
    assert [(row["peer"], row["test"]) for row in report["rows"]] == [
        *([("llama.cpp", "pp8 @ d32"), ("llama.cpp", "tg4 @ d32")] * 3),
        *([("openvino-genai", "pp8 @ d32"), ("openvino-genai", "tg4 @ d32")] * 2),
    ]
    assert [extra["side"] for extra in report["extras"]] == ["edgeinfer", "llama.cpp", "openvino-genai"]
    monkeypatch.setitem(SHAPES, "other", SMALL)
    again = ["--openvino", fake_python, "--shape", "small", "--shape", "other", *arguments[8:], "--append"]
    assert against_peers.main(again) == 0
    rows = json.loads(raw.read_text())["rows"]
    assert [(row["shape"], row["peer"]) for row in rows] == [
        *([("small", "llama.cpp")] * 6), *([("small", "openvino-genai")] * 4), *([("other", "openvino-genai")] * 4),
    ]
    assert rows[:6] == report["rows"][:6]


def test_a_run_that_fails_says_why(
    tmp_path: Path, fake_python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setenv("FAIL_GGUF", "1")
    arguments = ["--llama-cpp-python", fake_python, "--shape", "small", "--output", str(tmp_path / "out.md")]
    assert against_peers.main(arguments) == 1
    assert "small-q4_0.gguf cannot be written: no gguf here" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "sentence"), [
    (["-p", "0"], "0 is out of range; it must be 1 or more"), (["-d", "0,-4"], "0,-4 has a negative number"),
    (["-n", "x"], "invalid natural value"), (["--shape", "tiny"], "invalid choice"),
])
def test_wrong_usage(option: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        against_peers.parse(["--llama-cpp-python", "x", "--output", "y", *option])
    assert sentence in capsys.readouterr().err


def test_a_peer_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        against_peers.parse(["--output", "y"])
    assert "there is nobody to compare with; name a peer by --llama-cpp-python or --openvino" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        against_peers.parse(["--output", "y", "--openvino", "x", "--append"])
    assert "--append needs --raw, the file that has the earlier figures" in capsys.readouterr().err
