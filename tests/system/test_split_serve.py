"""`--split`: a model in several processes of this machine has the texts of one, also when one of them is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import psutil
import pytest

pytest.importorskip("starlette")
from edgeinfer import LLM
from edgeinfer.errors import UsageError
from edgeinfer.pipeline import ProcessStage
from tests.helpers.command_line import PYTHON, ROOT, edgeinfer, environment, without_stages
from tests.helpers.serving import Running, chat_model, serving, until
from tests.system.test_replicas import COMPLETIONS, REQUESTS, outcome

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX here")
SPLIT = "0-1,2-4"
TEXTS = [request for request in REQUESTS if request[0] != "/v1/embeddings"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def right(model: str) -> list[Any]:
    """Return the answers of one process."""
    with serving({"chat": model}) as running:
        return all_of(running)


def all_of(running: Running) -> list[Any]:
    """Return the answers to all requests for texts, eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda one: outcome(running.ask(*one), bool(one[1].get("stream"))), TEXTS))


def opened(source: str, left: int | None) -> LLM:
    return LLM(source, budget=left, ctx=512, threads=1, max_sequences=8, max_queue=256, split=SPLIT, fill_budget=True)


def stage_of(running: Running) -> ProcessStage:
    stage = running.llm().runner.stages[0]
    assert isinstance(stage, ProcessStage)
    return stage


@pytest.mark.slow
def test_a_stage_that_is_killed_ends_requests_with_an_error_and_the_next_have_the_same_texts(
        model: str, right: list[Any]) -> None:
    wrong, errors, ended = [], [0], threading.Event()

    def ask(running: Running, i: int) -> None:
        while not ended.is_set():
            path, body = TEXTS[i]
            found = running.ask(path, body)
            if found.status == 200 and not any("error" in event for event in found.events):
                if outcome(found, bool(body.get("stream"))) != right[i]:
                    wrong.append(i)
            else:
                errors[0] += 1
                message = found.error if found.status != 200 else str(found.events)
                assert re.search("has ended|closed|reset", message), message

    with serving({"chat": model}, opened) as running:
        assert all_of(running) == right
        askers = [threading.Thread(target=ask, args=(running, i)) for i in range(8)]
        for one in askers:
            one.start()
        killed = set[int]()
        while len(killed) < 3:
            ended.wait(0.7)
            llm = running.server.models.first.llm
            if llm is not None and not llm.lost and (pid := llm.runner.stages[0]._process.pid) not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        ended.set()
        for one in askers:
            one.join(300)
        assert not any(one.is_alive() for one in askers) and not wrong and errors[0]
        assert all_of(running) == right
        refused = running.ask("/v1/embeddings", {"input": "A fox"})
        assert refused.status == 400 and "split between processes, which give no embeddings" in refused.error
        assert not any(psutil.pid_exists(pid) for pid in killed) and until(running.free)


@pytest.mark.slow
def test_a_server_opens_the_model_again_when_a_stage_has_ended(model: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    with serving({"chat": model}, opened) as running:
        first = outcome(running.ask(COMPLETIONS, body), False)
        before = stage_of(running)._process
        before.kill()
        before.wait()
        assert outcome(running.ask(COMPLETIONS, body), False) == first
        assert stage_of(running)._process is not before and until(running.free)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_says_who_holds_what_and_leaves_no_process_behind(number: int) -> None:
    process = subprocess.Popen([*PYTHON, "serve", "demo", "--port", "0", "-t", "1", "--ctx", "512", "--split", "auto"],
                               stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment())
    assert process.stderr is not None
    said = list(islice(filter(without_stages, process.stderr), 4))
    children = psutil.Process(process.pid).children(recursive=True)
    assert [one.pid for one in children] == [int(re.findall(r"Layers 0-\d are in process (\d+): ", said[0])[0])]
    assert re.search(r"Layers \d-4 are in this process: [0-9.]+ MB planned", said[1])
    assert "One sequence gains memory, not speed" in said[2] and "Serving demo at http://127.0.0.1" in said[3]
    process.send_signal(number)
    assert process.wait(300) == (0 if number == signal.SIGTERM else -number)
    process.stderr.close()
    assert not psutil.wait_procs(children, 120)[1]


@pytest.mark.slow
def test_run_has_the_tokens_and_log_probabilities_of_one_process() -> None:
    arguments = ("run", "demo", "Once upon a time", "-n", "24", "--seed", "5", "--logprobs", "2", "--json", "-t", "1")
    one, several = (edgeinfer(*arguments, *more).json for more in ((), ("--split", "0,1-2,3-4")))
    assert several["token_ids"] == one["token_ids"] and several["logprobs"] == one["logprobs"]
    assert several["estimate"] is None and several["planned_bytes"] < one["planned_bytes"]


@pytest.mark.slow
def test_the_stages_share_the_budget_as_they_need_it() -> None:
    with LLM("demo", ctx=512, threads=1, split="0-3,4", max_sequences=4, fill_budget=True, budget="400MB") as llm:
        planned = [stage.info.total_bytes for stage in llm.runner.stages]
        assert sum(planned) <= 400_000_000 and llm.runner.n_blocks == 4 * 33
        assert all(stage.info.kv_blocks == 4 * 33 for stage in llm.runner.stages)
    least = sum(planned) - 1_000_000
    with LLM("demo", ctx=512, threads=1, split="0-3,4", max_sequences=4, fill_budget=True, budget=least) as llm:
        tight = [stage.info.total_bytes for stage in llm.runner.stages]
        assert sum(tight) <= least and 32 <= llm.runner.n_blocks < 4 * 33


@pytest.mark.parametrize("arguments, sentence", [
    (("--split", "0-1,3-4"), "The split leaves out layers 2 to 2"),
    (("--split", "0-1,2-5"), "The split names layer 5; the model has layers 0 to 4."),
    (("--split", "half"), "The split is 'half'; list the layers of each stage, such as 0-15,16-31, or auto."),
    (("--split", ""), "--split"),
    (("--split", SPLIT, "--lazy", "keep=0.5"), "lazy"),
    (("--split", SPLIT, "--attention", "top:8"), "cannot run with"),
    (("--split", SPLIT, "--speculate", "self"), "cannot run with a drafter"),
    (("--split", SPLIT, "--device", "onnx-cpu"), "--split does not go with --device onnx-cpu"),
    (("--split", SPLIT, "--kv-memory", "10MB"), "leave out --kv-memory"),
    (("--split", SPLIT, "--replicas", "2"), "--split does not go with --replicas; use one or the other."),
    (("--split", SPLIT, "--model", "a=demo"), "--split does not go with --model; use one or the other."),
    (("--split", SPLIT, "--prefix-file", "x"), "--split does not go with --prefix-file; use one or the other."),
    (("--split", SPLIT, "--budget", "200MB"), "The run needs"),
])  # fmt: skip
def test_what_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    done = edgeinfer("serve", "demo", "--port", "0", *arguments)
    assert done.code in (1, 2, 3) and sentence in done.err and "Traceback" not in done.err, done
    assert done.code == 3 or done.sentence


def test_python_refuses_what_stages_cannot_do() -> None:
    with pytest.raises(UsageError, match="keeps no prefix file"):
        LLM("demo", split=SPLIT, prefix_file="x")
    with pytest.raises(UsageError, match=r"split is 3; it must be the layers of each process"):
        LLM("demo", split=3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_file_of_requests(tmp_path: Any) -> None:
    (given := tmp_path / "in.jsonl").write_text("".join(json.dumps({
        "custom_id": f"r{i}", "method": "POST", "url": "/v1/completions",
        "body": {"prompt": f"Fox {i}", "seed": i, "max_tokens": 9}}) + "\n" for i in range(12)))
    texts = []
    for more in ((), ("--split", SPLIT)):
        done = edgeinfer("batch", given, out := tmp_path / f"out{len(more)}.jsonl", "-t", "1", "--ctx", "512", *more)
        assert done.code == 0, done
        texts.append({one["custom_id"]: one["response"]["body"]["choices"]
                      for one in map(json.loads, out.read_text().splitlines())})
    assert texts[0] == texts[1] and len(texts[0]) == 12
    done = edgeinfer("batch", given, tmp_path / "x.jsonl", "--ray", "local", "--split", SPLIT)
    assert done.code == 2 and "--split cannot be combined with --ray" in done.sentence
