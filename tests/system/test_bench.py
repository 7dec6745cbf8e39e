"""Measurements of `edgeinfer bench`: names, bytes, operations, profiles; and its refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from edgeinfer.bench import (
    Case,
    MachineProbe,
    Measurement,
    Row,
    bytes_per_token,
    make_cases,
    measure,
    needed_ctx,
    operation_name,
    operations_per_token,
    prompt_of,
    token_ids,
)
from edgeinfer.bundle import Bundle
from edgeinfer.cli.app import execute
from edgeinfer.config import Recipe, RuntimeConfig
from edgeinfer.converters import SHAPES, write_random_bundle
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.graph import KvAccess
from edgeinfer.models import demo_path
from edgeinfer.runtime import Session
from edgeinfer.text import Tokenizer

SMALL = replace(SHAPES["tinyllama-1.1b"], hidden_size=64, intermediate_size=96, num_hidden_layers=3, vocab_size=320,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, windows=(0, 20, 0))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    path = tmp_path_factory.mktemp("bench") / "small"
    write_random_bundle(SMALL, path)
    opened = Session(Bundle.open(path), RuntimeConfig(ctx=256, threads=2, prefill_chunk=32))
    yield opened
    opened.close()


# -- requests --------------------------------------------------------------------------------------------------------


def test_tests_are_named_as_llama_bench_names_them() -> None:
    names = [test.name for test in make_cases([512], [128, 0], [0, 4096])]
    assert names == ["pp512", "tg128", "pp512 @ d4096", "tg128 @ d4096"]
    assert [test.name for test in make_cases([8, 8], [0], [3])] == ["pp8 @ d3"]


def test_a_length_out_of_range_is_refused() -> None:
    with pytest.raises(UsageError, match=r"-n -1 is out of range; it must be from 0 to 16777215 tokens"):
        make_cases([1], [-1], [0])
    with pytest.raises(UsageError, match="-d 99999999 is out of range"):
        make_cases([1], [1], [99999999])
    with pytest.raises(UsageError, match="There is nothing to measure: -p and -n are 0"):
        make_cases([0], [0], [0])


def test_a_depth_beyond_the_model_is_refused() -> None:
    assert needed_ctx(make_cases([512], [128], [0, 100]), 612) == 612
    with pytest.raises(UsageError, match=r"pp512 @ d100 needs a context of 612 tokens, and the model allows 611"):
        needed_ctx(make_cases([512], [128], [0, 100]), 611)


# -- bytes and operations ----------------------------------------------------------------------------------------------


def matrix_bytes(rows: int, cols: int) -> int:
    """q4 in groups of 32: half a byte and a sixteenth for the scale, for whole pairs of groups."""
    return rows * (-(-cols // 64) * 64) * 9 // 16


def kv_read_bytes(kv: str, layer: int, length: int) -> int:
    """Return the bytes that a token reads of a layer of SMALL."""
    access = KvAccess(layer, SMALL.num_key_value_heads, SMALL.head_dim, SMALL.window(layer))
    return access.read_bytes(kv, length)


def test_bytes_of_a_token_are_weights_scales_and_kv(session: Session) -> None:
    layer = matrix_bytes(128, 64) + matrix_bytes(64, 64) + matrix_bytes(192, 64) + matrix_bytes(64, 96) + 2 * 4 * 64
    head = 320 * 64 * 34 // 32 + 4 * 64  # int8 in groups of 32, and the last norm
    assert session.program.bytes_read == 3 * layer + head
    token = 2 * (2 * 16 + 2 * 2)  # heads x (K and V of 16 values, a scale each)
    assert kv_read_bytes("int8", 0, 100) == 100 * token
    assert kv_read_bytes("int8", 1, 100) == 20 * token  # the window
    assert kv_read_bytes("f16", 0, 100) == 100 * 2 * 2 * 16 * 2
    assert bytes_per_token(session, Case("tg", 1)) == 3 * layer + head + 3 * token
    lengths = (101 + 102 + 103 + 104) / 4
    assert bytes_per_token(session, Case("tg", 4, 100)) == 3 * layer + head + (2 * lengths + 20) * token


def test_a_prompt_reads_the_weights_once_a_chunk(session: Session) -> None:
    head = 320 * 64 * 34 // 32 + 4 * 64  # and the last norm
    body = session.program.bytes_read - head
    kv = sum(kv_read_bytes("int8", layer, 10 + end) for layer in range(3) for end in (32, 64, 70))
    assert bytes_per_token(session, Case("pp", 70, 10)) == pytest.approx((3 * body + head + kv) / 70)


def test_operations_are_two_for_each_weight(session: Session) -> None:
    layers = 3 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96)
    assert operations_per_token(session, Case("tg", 4)) == 2 * (layers + 320 * 64)
    assert operations_per_token(session, Case("pp", 10)) == 2 * (layers + 320 * 64 / 10)


def test_token_ids_stay_in_the_vocabulary_and_do_not_repeat_soon() -> None:
    for size in (2, 40, 4096, 32000):
        ids = list(islice(token_ids(size), size))
        assert sorted(ids) == list(range(size))
    assert list(islice(token_ids(1), 3)) == [0, 0, 0]


def test_figures_of_a_row() -> None:
    row = Row(Case("pp", 8), (10.0, 20.0, 30.0), (1.0, 2.0, 2.0), (4.0, 4.0, 4.0), 1e7, 1e8)
    assert row.t_per_s == 20 and row.stddev == 10
    assert row.mbu_paired == pytest.approx(0.1)
    assert row.int8_share == pytest.approx(0.5)
    assert replace(row, samples=(5.0,)).stddev == 0
    assert replace(row, operations_per_token=0.0).int8_share is None
    measured = Measurement((row,), (1.0, 4.0, 2.0), (3.0,))
    assert measured.bandwidth_gbs == 2 and measured.mbu(row) == pytest.approx(0.1)


def test_the_operation_of_all_layers() -> None:
    with Bundle.open(demo_path()) as bundle:
        session = Session(bundle, RuntimeConfig(ctx=64, threads=1))
        names = {instruction.label: operation_name(instruction) for instruction in session.program.instructions}
        session.close()
    assert names["linear layers.3.qkv"] == "linear qkv"
    assert names["attention layer 4"] == "attention"
    assert names["  merge splits"] == "merge splits"
    assert names["linear embed"] == "linear embed"


# -- measuring ----------------------------------------------------------------------------------------------------


def test_measure_and_profile(session: Session) -> None:
    told: list[tuple[int, int, str]] = []
    tests = make_cases([40], [5], [0, 50])
    with MachineProbe(2, 4 << 20) as probe:
        result = measure(session, probe, tests, 2, profile=True, progress=lambda *call: told.append(call))
    assert [row.case for row in result.rows] == tests and all(len(row.samples) == 2 for row in result.rows)
    assert all(row.t_per_s > 0 and len(row.bandwidth) == 2 for row in result.rows)
    assert [len(row.int8_peak) for row in result.rows] == [2, 0, 2, 0]
    assert len(result.bandwidth) == 4 * 3 and result.bandwidth_gbs > 0 and result.int8_peak_gops > 0
    assert [call[:2] for call in told] == [(i, 16) for i in range(16)]
    for profile, row in zip(result.profiles, result.rows, strict=True):
        assert len(profile.instructions) == len(session.program.instructions)
        assert sum(item.instructions for item in profile.operations) == len(profile.instructions)
        assert sum(item.seconds for item in profile.operations) == pytest.approx(profile.seconds)
        per_run = row.case.tokens if row.case.kind == "pp" else 1
        assert sum(item.bytes_read for item in profile.instructions) == pytest.approx(row.bytes_per_token * per_run)
        assert sum(item.operations for item in profile.instructions) == pytest.approx(row.operations_per_token
                                                                                      * per_run)
    assert len(session.new_sequence()) == 0 and session.kv.pool.n_free == session.plan.kv_blocks


def test_without_prompts_the_peak_is_read_once(session: Session) -> None:
    with MachineProbe(1, 1) as probe:
        assert probe.read_bytes == 1 << 20
        assert len(measure(session, probe, make_cases([0], [2], [0]), 1).int8_peak) == 1


def test_the_probe_refuses_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CHECK", "1")
    with pytest.raises(UsageError,
                       match="EDGEINFER_CHECK=1 compares every instruction in Python, so timings mean nothing"):
        MachineProbe(1, 1 << 20)


def test_a_prompt_of_eight_tokens() -> None:
    tokenizer = Tokenizer.open(demo_path(), {"bos_token_id": 1})
    assert len(tokenizer.encode(prompt_of(tokenizer))) == 8


def test_a_process_without_its_first_token_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from edgeinfer.bench import first_token_ms, startup

    config = RuntimeConfig(threads=1, recipe=Recipe(()))
    tokenizer = Tokenizer.open(demo_path(), {"bos_token_id": 1})
    with pytest.raises(EdgeInferError, match="was to print its first token failed: edgeinfer: There is no file"):
        first_token_ms(tmp_path / "absent", tokenizer, (), config, 1)
    monkeypatch.setattr(startup, "TIMEOUT_SECONDS", 0.01)
    with pytest.raises(EdgeInferError, match=r"has not done so in 0\.01 s; use --no-startup"):
        first_token_ms(demo_path(), tokenizer, (), config, 1)


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.cli.commands.bench_run.READ_BYTES", 8 << 20)


@pytest.mark.slow
@pytest.mark.usefixtures("small_reads")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["-p", "16", "-n", "4", "-d", "0,32", "-r", "2", "-t", "1"]
    assert execute(["bench", "demo", *sizes, "--json", "--profile"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [row["test"] for row in out["rows"]] == ["pp16", "tg4", "pp16 @ d32", "tg4 @ d32"]
    for row in out["rows"]:
        assert row["t_per_s"] > 0 and row["stddev"] >= 0 and isinstance(row["bytes_per_token"], int)
        drawn_gbs = row["bytes_per_token"] * row["t_per_s"] / 1e9
        assert row["mbu"] == pytest.approx(drawn_gbs / out["bandwidth_gbs"], rel=1e-3)
        assert row["int8_share"] is None or row["test"].startswith("pp")
    for field in ("bandwidth_gbs", "int8_peak_gops", "load_ms", "ttft_process_ms", "peak_rss_bytes", "planned_bytes"):
        assert out[field] > 0, field
    assert out["isa"] and out["threads"] == 1 and out["model"] == "demo" and out["kv"] == "int8" and out["ctx"] == 48
    assert out["bandwidth_low_gbs"] <= out["bandwidth_gbs"] <= out["bandwidth_high_gbs"]
    assert [profile["test"] for profile in out["profile"]] == [row["test"] for row in out["rows"]]
    assert out["profile"][1]["operations"][0]["ms"] >= out["profile"][1]["operations"][1]["ms"]


@pytest.mark.usefixtures("small_reads")
def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "demo", "-p", "16", "-n", "2", "-r", "1", "--no-startup", "--profile"]) == 0
    text = capsys.readouterr().out
    for words in ("pp16", "tg2", "of int8 peak", "read bandwidth", "not measured", "gated gate_up", "per prompt"):
        assert words in text


def test_requests_to_a_divided_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "demo", "--split", "0-2,3-4", "--concurrency", "1,2", "-p", "8", "-n", "4", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [one["total_output_tokens"] for one in out["serving"]] == [16, 32]


@pytest.mark.usefixtures("small_reads")
def test_a_shape_is_written_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr("edgeinfer.base.cache_dir.cache_root", lambda: tmp_path)
    arguments = ["bench", "--shape", "small", "--weights", "int8", "-p", "8", "-n", "0", "-d", "3000", "-r", "1",
                 "--json", "--no-startup"]
    stamps = []
    for _ in range(2):
        assert execute(arguments) == 0
        out = json.loads(capsys.readouterr().out)
        assert out["rows"][0]["test"] == "pp8 @ d3000" and out["weights"] == "int8" and out["ttft_process_ms"] is None
        (path,) = (tmp_path / "bundles").iterdir()
        assert path.name.startswith("random-small-int8-g32-v")
        stamps.append((path / "weights.bin").stat().st_mtime_ns)
    assert stamps[0] == stamps[1]


@pytest.mark.usefixtures("small_reads")
def test_a_shape_in_the_types_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(SMALL, hidden_size=256, intermediate_size=512, num_hidden_layers=8, windows=(0,) * 8)
    monkeypatch.setitem(SHAPES, "small", config)
    monkeypatch.setattr("edgeinfer.base.cache_dir.cache_root", lambda: tmp_path)
    arguments = ["bench", "--shape", "small", "-p", "8", "-n", "2", "-r", "1", "--json", "--no-startup", "--weights"]
    for asked, stored in (("q4_k_m", "q4k"), ("q4", "q4")):
        assert execute([*arguments, asked]) == 0
        assert json.loads(capsys.readouterr().out)["weights"] == stored
    (mixed,) = (tmp_path / "bundles").glob("random-small-q4-k-m-v*")
    with Bundle.open(mixed) as bundle:
        assert {"q4k", "q6"} == {bundle.types[f"layers.{layer}.down"].dtype for layer in range(8)}
    assert execute([*arguments, "q4_k_m", "--group-size", "64"]) == 2
    assert "has a group size for each of its types; omit --group-size 64" in capsys.readouterr().err
    assert execute(["bench", str(mixed), "--weights", "q4_k_m"]) == 2
    assert "weights is 'q4_k_m'; choose one of q4, " in capsys.readouterr().err


@pytest.mark.usefixtures("small_reads")
def test_a_model_without_tokenizer_has_no_first_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_bundle(replace(SMALL, vocab_size=64), tmp_path / "m")
    assert execute(["bench", str(tmp_path / "m"), "-p", "4", "-n", "0", "-r", "1", "--json"]) == 0
    done = capsys.readouterr()
    assert json.loads(done.out)["ttft_process_ms"] is None
    assert "Time to the first token of a new process is not measured" in done.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shape", "tinylama"], "There is no shape 'tinylama'; did you mean 'tinyllama-1.1b'"),
        (["--shape", "xyz"], "There is no shape 'xyz'; shapes include "),
        (["demo", "-p", "-5"], "-p -5 is out of range"),
        (["demo", "-d", "1000"], "pp512 @ d1000 needs a context of 1512 tokens, and the model allows 1024"),
        (["demo", "-n", "12,"], "-n '12,' is not a number of tokens; write one, or several as in 128,512"),
        (["demo", "-r", "0"], "-r is 0; it must be from 1 to 1000 repetitions"),
        ([], "Give either MODEL or --shape"),
        (["demo", "--shape", "llama-2-7b"], "Give either MODEL or --shape"),
        (["demo", "--weights", "f16"], "is a bundle with weights in q4, groups of 32, and runs as it is stored"),
        (["--shape", "llama-2-7b", "--weights", "q1"], "--weights is 'q1'; choose one of q4, int8, f16, f32"),
        (["--shape", "llama-2-7b", "--group-size", "48"], "--group-size is 48; choose one of 32, 64, 128"),
        (["demo", "--prefill-chunk", "0"], "--prefill-chunk is 0; it must be from 1 to 4096"),
        (["demo", "--repeat"], "There is no option --repeat"),
        (["demo", "--split", "auto"], "--split requires --concurrency, such as --concurrency 1,4"),
        (["demo", "--split", "0-1,3-4", "--concurrency", "1"], "leaves out layers 2 to 2"),
    ],
)
def test_wrong_usage(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", *arguments, "--json"]) == 2
    out = json.loads(capsys.readouterr().out)
    assert out["error"]["code"] == "usage" and sentence in out["error"]["message"]


def test_a_full_disk_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgeinfer.base.cache_dir.cache_root", lambda: tmp_path)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert execute(["bench", "--shape", "smollm2-135m"]) == 1
    assert "free some space or choose another place" in capsys.readouterr().err
    assert not list((tmp_path / "bundles").glob("*"))


def test_a_model_that_is_refused_takes_no_memory_to_measure_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine's bandwidth is measured over 1 GiB, which a file of a few KB is not worth if it does not run."""
    def refuse(probe: MachineProbe, huge: bool) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(MachineProbe, "_take_memory", refuse)
    assert execute(["bench", "demo", "-p", "8", "-n", "0", "-r", "1", "--no-startup", "--recipe", "nonsense"]) == 2
    assert execute(["bench", "demo", "-p", "8", "-n", "0", "-r", "1", "--no-startup", "--budget", "10MB"]) == 3
    assert "the budget is 10 MB" in capsys.readouterr().err
