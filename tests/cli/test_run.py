"""The commands: their streams, exit codes, JSON objects, and one sentence for each wrong use."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.cli.commands import cache, eval, info, run, verify, warmup
from edgeinfer.cli.commands import convert as convert_command
from edgeinfer.converters import convert
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer

pytestmark = pytest.mark.usefixtures("no_variables")
PROMPT = "Once upon a time"
GREEDY = ("--temp", 0, "-n", 16, "-t", 1)
TEXT = ", there was a little girl named"
FIELDS = {
    name: fields
    for module in (run, convert_command, info, verify, eval, warmup, cache)
    for name, fields in module.JSON_FIELDS.items()
}
OPTIONAL = {"logprobs", "choices", "program"}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone, with the kernels of the real one."""
    from edgeinfer.kernels import cache_directory

    root = tmp_path / "cache"
    root.mkdir()
    (root / "kernels").symlink_to(cache_directory(), target_is_directory=True)
    monkeypatch.setenv("EDGEINFER_CACHE", str(root))
    return root


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_prints_the_text_and_its_figures_apart() -> None:
    done = edgeinfer("run", "demo", PROMPT, *GREEDY)
    assert done.code == 0 and done.out.startswith(TEXT) and done.out.endswith("\n")
    for part in ("TTFT ", " ms/token", " tok/s", "5 prompt + 16 new tokens", "length", "memory ", " planned", "seed "):
        assert part in done.err
    quiet = edgeinfer("run", "demo", PROMPT, *GREEDY, "--no-stats")
    assert quiet.out == done.out and quiet.err == ""


def test_run_reports_as_json() -> None:
    done = edgeinfer("run", "demo", PROMPT, *GREEDY, "--json")
    report = done.json
    assert done.code == 0 and done.err == "" and done.out.count("\n") == 1
    assert set(report) == set(FIELDS["run"]) - OPTIONAL
    assert report["text"].startswith(TEXT) and len(report["token_ids"]) == report["completion_tokens"] == 16
    assert report["prompt_tokens"] == 5 and report["finish_reason"] == "length" and report["kv"] == "int8"
    assert all(isinstance(report[key], int) for key in ("planned_bytes", "seed", "ctx", "threads"))
    assert report["ttft_ms"] > 0 and report["tpot_ms"] > 0 and report["tok_per_s"] > 0
    if Path("/proc/self/status").exists():
        assert report["peak_rss_bytes"] > 10_000_000


def test_run_gives_samples_and_log_probabilities() -> None:
    done = edgeinfer("run", "demo", PROMPT, "--samples", 3, "--seed", 5, "-n", 8, "--logprobs", 2, "--json", "-t", 1)
    report = done.json
    assert set(report) == set(FIELDS["run"]) - {"program"} and report["ttft_process_ms"] is None
    assert [choice["index"] for choice in report["choices"]] == [0, 1, 2]
    assert report["choices"][0]["text"] == report["text"] and report["seed"] == 5
    assert len(report["logprobs"]) == 8 and len(report["logprobs"][0]["top"]) == 2
    assert set(report["logprobs"][0]) == {"token_id", "text", "logprob", "top"}
    assert "logprobs" in report["choices"][2]
    shown = edgeinfer("run", "demo", PROMPT, "--samples", 2, "--seed", 5, "-n", 8, "-t", 1)
    assert shown.out.startswith("--- 1 of 2\n" + report["choices"][0]["text"]) and "\n--- 2 of 2\n" in shown.out


@pytest.mark.parametrize("arguments", [("run", "demo"), ("run", "demo", "-"), ("run",)])
def test_run_reads_a_pipe(arguments: tuple[str, ...]) -> None:
    piped = edgeinfer(*arguments, *GREEDY, "--json", stdin=PROMPT.encode() + b"\r\n\n")
    assert piped.json["text"] == edgeinfer("run", "demo", PROMPT, *GREEDY, "--json").json["text"]


def test_run_leaves_a_pipe_alone_where_there_is_a_prompt() -> None:
    assert edgeinfer("run", "demo", PROMPT, *GREEDY, stdin=b"\xff").code == 0


def test_flags_reach_the_request() -> None:
    words = ("--stop", "zebra", "--stop", "girl", "--logit-bias", "5=0.5", "--repeat-penalty", 1.0)
    stopped = edgeinfer("run", "demo", PROMPT, *GREEDY, "--json", *words).json
    assert stopped["text"] == ", there was a little " and stopped["finish_reason"] == "stop"
    assert edgeinfer("run", "demo", PROMPT, *GREEDY, "--logit-bias", "4046=-inf").out.startswith(" there")
    repeated = edgeinfer("run", "demo", PROMPT, *GREEDY, "--repeat-penalty", 9, "--json").json["token_ids"]
    assert len(set(repeated)) == len(repeated)
    for flag in ("--presence-penalty", "--frequency-penalty"):
        many = edgeinfer("run", "demo", PROMPT, "--temp", 0, "-n", 60, flag, 90, "--json").json["token_ids"]
        assert len(set(many)) == len(many)
    small = edgeinfer("run", "demo", PROMPT, *GREEDY, "-c", 12, "--kv", "f32", "--prefill-chunk", 3, "--json").json
    assert small["ctx"] == 12 and small["kv"] == "f32" and small["prompt_tokens"] + small["completion_tokens"] == 12


def test_variables_stand_for_flags_and_flags_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_TOKENS": "3", "TEMP": "0", "CTX": "64", "STOP": "was a", "JSON": "1", "SEED": "9",
                        "THREADS": "1", "KV": "f16", "BUDGET": "4GiB"}.items():
        monkeypatch.setenv(f"EDGEINFER_{name}", value)
    report = edgeinfer("run", "demo", PROMPT, "-n", 6).json
    assert report["text"] == ", there " and report["seed"] == 9 and report["kv"] == "f16" and report["ctx"] == 64
    assert edgeinfer("run", "nothing-like-it", "x").json["error"]["code"] == "model_not_found"
    monkeypatch.setenv("EDGEINFER_BUDGET", "1MB")
    assert edgeinfer("run", "demo", "x").code == 3


def test_a_prompt_cache_is_kept_between_runs(tmp_path: Path) -> None:
    arguments = ("run", "demo", PROMPT, *GREEDY, "--prompt-cache", tmp_path / "cache.kv", "--json")
    first, second = edgeinfer(*arguments).json, edgeinfer(*arguments).json
    assert first["text"] == second["text"] and (first["cached_tokens"], second["cached_tokens"]) == (0, 4)
    other = edgeinfer(*arguments, "--kv", "f32")
    assert other.code == 1 and "by another model or version of edgeinfer, or with" in other.json["error"]["message"]


@pytest.mark.parametrize("path", ["", "x" * 300])
def test_a_prompt_cache_without_a_usable_name_is_refused_first(path: str) -> None:
    done = edgeinfer("run", "nothing-like-it", PROMPT, "--prompt-cache", path)
    assert done.code == 2 and done.err.startswith("edgeinfer: --prompt-cache is '")
    assert done.err.endswith("it must be the path of a file or directory.\n") and len(done.err) < 200


def test_a_checkpoint_runs_after_one_conversion(tmp_path: Path, own_cache: Path) -> None:
    source = make_checkpoint(tmp_path / "tiny")
    for _ in range(2):
        assert edgeinfer("run", source, "hello", "-n", 2, "--json", "-t", 1).json["model"] == str(source)
    assert len(list((own_cache / "bundles").iterdir())) == 1
    assert edgeinfer("info", source, "--json").json["source"] == str(source)


def test_a_chat_template_is_used_unless_raw(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "checkpoint")
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    convert(source, tmp_path / "bundle")
    lengths = [
        edgeinfer("run", tmp_path / "bundle", "hello", "-n", 1, "-t", 1, "--json", *more).json["prompt_tokens"]
        for more in [(), ("--raw",), ("--system", "be brief")]
    ]
    assert lengths[1] < lengths[0] < lengths[2]
    refused = edgeinfer("run", tmp_path / "bundle", "hello", "--raw", "--system", "be brief")
    assert refused.code == 2 and refused.sentence.startswith("--system cannot be used: --raw leaves the chat template")


@pytest.mark.slow(keep=24)
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["run", "dmeo", "x"], 1, "Unknown model 'dmeo'; did you mean 'demo'?"),
        (["run", "demo", ""], 1, "The prompt is empty; give some text."),
        (["run", "demo"], 1, "The prompt is empty; give some text."),
        (["run", "demo", "x" * 4000], 1, "more than the context of 1024; the model takes 1024 at most, so shorten it."),
        (["run", "demo", "x x x x", "-c", "3"], 1, "more than the context of 3; open the model with a larger context"),
        (["run", "demo", "x", "-c", "5000"], 1, "The context of 5000 tokens is longer than the model's 1024"),
        (["run", "demo", "x", "-c", "0"], 2, "--ctx is 0; it must be 1 or more."),
        (["run", "demo", "x", "--tempp", "1"], 2, "There is no option --tempp; did you mean --temp? See"),
        (["run", "demo", "x", "--zzz"], 2, "There is no option --zzz. See 'edgeinfer run --help'."),
        (["run", "demo", "x", "more"], 2, "See 'edgeinfer run --help'."),
        (["run", "demo", "x", "-n"], 2, "Option '-n' requires an argument."),
        (["run", "demo", "x", "-n", "many"], 2, "--max-tokens is 'many'; it must be a whole number."),
        (["run", "demo", "x", "--temp", "hot"], 2, "--temp is 'hot'; it must be a number."),
        (["run", "demo", "x", "-n", "-1"], 2, "--max-tokens is -1; it must be 0 or more."),
        (["run", "demo", "x", "--temp", "-1"], 2, "--temp is -1.0; it must be 0 or more."),
        (["run", "demo", "x", "--temp", "nan"], 2, "--temp is nan; it must be 0 or more."),
        (["run", "demo", "x", "--top-p", "1.5"], 2, "--top-p is 1.5; it must be above 0 and at most 1."),
        (["run", "demo", "x", "--top-k", "-1"], 2, "--top-k is -1; it must be 0 (off) or more."),
        (["run", "demo", "x", "--min-p", "2"], 2, "--min-p is 2.0; it must be from 0 to 1."),
        (["run", "demo", "x", "--seed", "-1"], 2, "--seed is -1; it must be from 0 to 2^63 - 1."),
        (["run", "demo", "x", "--stop", ""], 2, "stop is ('',); it must be text, or at most"),
        (["run", "demo", "x", "--samples", "0"], 2, "--samples is 0; it must be from 1 to 64."),
        (["run", "demo", "x", "--repeat-penalty", "0"], 2, "--repeat-penalty is 0.0; it must be above 0."),
        (["run", "demo", "x", "--presence-penalty", "inf"], 2,
         "--presence-penalty is inf; it must be a finite number."),
        (["run", "demo", "x", "-t", "0"], 2, "--threads is 0; it must be from 1 to 256."),
        (["run", "demo", "x", "--kv", "int4"], 2, "--kv is 'int4'; choose one of int8, f16, f32."),
        (["run", "demo", "x", "--prefill-chunk", "0"], 2, "--prefill-chunk is 0; it must be from 1 to 4096."),
        (["run", "demo", "x", "--budget", "4"], 2, "Size '4' cannot be read; did you mean 4GiB or 4MB?"),
        (["run", "demo", "x", "--budget", "4 bananas"], 2, "has the unknown unit 'bananas'"),
        (["run", "demo", "x", "--logit-bias", "3"], 2, "--logit-bias '3' is not of the form ID=BIAS, as in"),
        (["run", "demo", "x", "--logit-bias", "4096=1"], 1, "logit_bias names token 4096; ids are from 0 to 4095."),
        (["run", "demo", "x", "--logprobs", "1"], 2, "--logprobs requires --json."),
        (["run", "demo", "x", "--system", "s"], 2, "--system cannot be used: demo has no chat template"),
        (["rnu"], 2, "There is no command 'rnu'; did you mean run? See 'edgeinfer --help'."),
        (["zzzz"], 2, "There is no command 'zzzz'; commands are batch, bench, cache, chat,"),
        (["cache", "lst"], 2, "There is no command 'lst'; did you mean list? See 'edgeinfer cache --help'."),
        (["convert", "demo"], 2, "See 'edgeinfer convert --help'."),
        (["convert", "no-such-checkpoint", "dst"], 1, "Unknown model 'no-such-checkpoint'"),
        (["info", "/no/such/bundle"], 1, "There is no file or directory '/no/such/bundle'."),
        (["verify", "/no/such/bundle"], 1, "There is no file or directory '/no/such/bundle'."),
        (["eval", "demo"], 2, "See 'edgeinfer eval --help'."),
        (["eval", "demo", "--text", "/no/such/file"], 1, "The text /no/such/file cannot be read: No such file"),
        (["warmup", "--isa", "mmx"], 2, "Instruction set 'mmx' is not available here; choose one of"),
        (["cache", "clear", "models"], 2, "There is no part 'models' of the cache; choose one of bundles, kernels, "),
    ],
)
def test_a_wrong_use_gets_one_sentence(arguments: list[str], code: int, sentence: str) -> None:
    done = edgeinfer(*arguments)
    assert done.out == "" and sentence in done.sentence
    assert done.code == code
    machine = edgeinfer(*arguments, "--json")
    if "--logprobs" not in arguments and arguments[-1] not in ("-n", "cache"):  # --json changes what these mean
        assert machine.code == code and set(machine.json) == {"error"}
        assert set(machine.json["error"]) == {"code", "message"} and sentence in machine.json["error"]["message"]


def test_what_does_not_fit_is_refused_with_its_plan() -> None:
    done = edgeinfer("run", "demo", "x", "--budget", "1MB")
    assert done.code == 3 and done.out == ""
    lines = done.err.splitlines()
    assert {"weights", "kv", "total"} <= {line.split()[0] for line in lines[:-1]}
    assert lines[-1].startswith("edgeinfer: The run needs")
    report = edgeinfer("run", "demo", "x", "--budget", "1MB", "--json").json
    assert report["error"]["code"] == "does_not_fit" and report["fits"] is False
    assert report["total_bytes"] == sum(region["bytes"] for region in report["regions"])


def test_input_that_is_no_text() -> None:
    done = edgeinfer("run", "demo", stdin=b"abc\xff")
    assert done.code == 2 and done.sentence == "Standard input is not UTF-8 text (byte 3)."


def test_chat_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.cli.commands.run.read_prompt", lambda prompt: None)
    for flag, sentence in [("--json", "--json needs a PROMPT"), ("--samples=2", "--samples needs a PROMPT")]:
        done = edgeinfer("run", "demo", flag)
        assert done.code == 2 and sentence in done.err


# -- the other commands ------------------------------------------------------------------------------------------------


def test_convert_reports_the_errors_of_quantisation(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "tiny")
    done = edgeinfer("convert", source, tmp_path / "bundle", "--weights", "int8", "--group-size", 64, "--json")
    report = done.json
    assert done.code == 0 and set(report) == set(FIELDS["convert"])
    assert 0 < report["error_mean"] <= report["error_worst"] < 0.01 and report["error_worst_tensor"]
    assert set(report["tensors"][0]) == {"name", "type", "bytes", "bits", "error", "gain", "file_types", "exact",
                                         "output_error", "output_error_plain"}
    assert not any(tensor["file_types"] for tensor in report["tensors"])  # of a GGUF file alone
    assert all(tensor["exact"] == (tensor["type"] == "f32") for tensor in report["tensors"])
    again = edgeinfer("convert", source, tmp_path / "bundle")
    assert again.code == 1 and "bundle" in again.sentence
    shown = edgeinfer("convert", source, tmp_path / "bundle", "--overwrite", "--tensors")
    assert shown.code == 0 and "layers.0" in shown.out and " mean, " in shown.out.splitlines()[-1]
    assert "edgeinfer: --bits " in shown.err.splitlines()[-1] and "--calibrate" not in done.err
    exact = edgeinfer("convert", source, tmp_path / "exact", "--weights", "f32")
    assert exact.code == 0 and exact.out.rstrip().endswith("no weight was rounded.") and "--bits" not in exact.err
    wrong = edgeinfer("convert", source, tmp_path / "other", "--weights", "q1")
    assert wrong.code == 2 and "q1" in wrong.sentence and not (tmp_path / "other").exists()
    bare = make_checkpoint(tmp_path / "bare", tokenizer=False)
    assert "has no tokenizer" in edgeinfer("convert", bare, tmp_path / "third").err


def test_info_describes_a_bundle() -> None:
    report = edgeinfer("info", "demo", "--json").json
    assert set(report) == set(FIELDS["info"]) - {"program", "header", "environment"}
    assert report["config"]["model_type"] == "llama" and report["parameters"] == 4_983_552
    shown = edgeinfer("info", "demo", "--tensors")
    assert shown.code == 0 and "llama: 5 layers, hidden 256" in shown.out
    assert all(tensor["name"] in shown.out for tensor in report["tensors"])


@pytest.mark.parametrize("option", [("--recipe", "no_such_pass"), ("--recipe", "a b"), ("--ctx", "0"), ("--kv", "q9")])
def test_info_refuses_options_also_where_it_needs_none(option: tuple[str, str]) -> None:
    assert edgeinfer("info", "demo", *option).code == 2


def test_info_prints_the_program() -> None:
    report = edgeinfer("info", "demo", "--program", "--json", "-t", 1, "-c", 64, "--budget", "4GiB").json
    instructions = report["program"]
    assert [instruction["record"] for instruction in instructions] == list(range(len(instructions)))
    assert set(instructions[0]) == {"record", "kernel", "operation", "bytes_read"}
    assert 0.5 * report["weights_bytes"] < sum(instruction["bytes_read"] for instruction in instructions)
    shown = edgeinfer("info", "demo", "--program", "-t", 1).out
    assert "bytes read" in shown and instructions[1]["kernel"] in shown


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    good = edgeinfer("verify", "demo", "--json").json
    assert set(good) == set(FIELDS["verify"]) and good["ok"] is True
    assert ": OK, " in edgeinfer("verify", "demo").out
    convert(make_checkpoint(tmp_path / "checkpoint"), tmp_path / "bundle")
    weights = tmp_path / "bundle" / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[1000] ^= 1
    weights.write_bytes(data)
    bad = edgeinfer("verify", tmp_path / "bundle")
    assert bad.code == 1 and bad.out == "" and "is damaged" in bad.err.splitlines()[-1]


def test_eval_measures_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king.\fThe king had three daughters.\n")
    arguments = ("eval", "demo", "--text", text, "-c", 16, "-t", 1)
    report = edgeinfer(*arguments, "--reference", "demo", "--json").json
    assert set(report) == set(FIELDS["eval"])
    assert 1 < report["perplexity"] < 500 and 0 <= report["kld_mean"] <= report["kld_p99"] < 0.1
    assert report["same_top"] > 0.8 and report["text_bytes"] == 63
    alone = edgeinfer(*arguments, "--json").json
    assert alone["perplexity"] == report["perplexity"] and alone["kld_mean"] is None
    shown = edgeinfer(*arguments, "--reference", "demo", "--separator", r"\f", "-n", 5, "--budget", "8GiB").out
    assert [line.split("  ")[0] for line in shown.splitlines()] == [
        "perplexity", "nats per token", "bits per byte", "tokens", "reference perplexity", "KLD mean", "KLD 99 %",
        "same top token",
    ]
    assert edgeinfer(*arguments, "--budget", "1MB").code == 3
    assert edgeinfer(*arguments, "--budget", f"{alone['planned_bytes'] + 1000}B").code == 0
    assert edgeinfer(*arguments, "--budget", f"{alone['planned_bytes'] + 1000}B", "--reference", "demo").code == 3
    text.write_bytes(b"caf\xe9")
    assert edgeinfer(*arguments).sentence.endswith("is not UTF-8 (byte 3).")


def test_warmup_names_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["quantize", "rms_norm_q8"]  # all of them would be most of what a first run compiles
    monkeypatch.setattr("edgeinfer.kernels.toolchain.objects.KernelSet.names", few)
    edgeinfer("warmup")
    report = edgeinfer("warmup", "--json").json
    assert set(report) == set(FIELDS["warmup"]) and report["compiled"] == 0 and Path(report["directory"]).is_dir()
    assert report["isa"] in edgeinfer("warmup").out


def test_the_cache_is_listed_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_CACHE", str(tmp_path))
    for kind, name in [("bundles", "tiny"), ("kernels", "set")]:
        (tmp_path / kind / name).mkdir(parents=True)
        (tmp_path / kind / name / "data").write_bytes(b"12345")
    report = edgeinfer("cache", "list", "--json").json
    assert set(report) == set(FIELDS["cache list"]) and report["total_bytes"] == 10
    assert report["bundles"] == [{"name": "tiny", "path": str(tmp_path / "bundles" / "tiny"), "bytes": 5,
                                  "source": ""}]
    assert "tiny" in edgeinfer("cache", "list").out
    asked = edgeinfer("cache", "clear")
    assert asked.code == 2 and asked.sentence.endswith("Add --yes, because there is no terminal to confirm on.")
    report = edgeinfer("cache", "clear", "bundles", "--yes", "--json").json
    assert set(report) == set(FIELDS["cache clear"]) and report["freed_bytes"] == 5 and report["kernels"] == []
    assert edgeinfer("cache", "clear", "-y").out == "1 entry deleted, 5 B.\n"
    assert edgeinfer("cache", "clear").code == 0  # nothing there: nothing to ask
