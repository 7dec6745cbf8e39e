"""llama.cpp's tests of its own server, run against `edgeinfer serve`.

    python benchmarks/llama_server_tests.py --llama-cpp ~/llama.cpp --model ~/stories260K-hf --python ENV/bin/python

`--llama-cpp` is a checkout of llama.cpp, `--model` a checkpoint of stories260K (karpathy/tinyllamas), and `--python` an
environment with tools/server/tests/requirements.txt and edgeinfer's extra `server` where it is not this one. The tests
are copied. A wrapper translates the flags of llama-server, `benchmarks/peers/llama_server_plugin.py` the paths, and
`EDITS` says which assertions are changed, and why. Every test that does not apply is listed with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import row, table

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{\"name\": {{ call.function.name | tojson }}, \"arguments\": "
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if tools %}{{ '<tools>' + tools | tojson + '</tools>' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template that llama.cpp takes where a model has none, with tools as Hermes writes them; llama.cpp adds the
beginning-of-text token itself."""
POSITIONS = 8192
"""Context length written to the test model's configuration: some tests need more than it was trained with."""
EDITS: tuple[tuple[str, str, str], ...] = (
    (r"assert [^\n]*system_fingerprint[^\n]*", "pass", "system_fingerprint is the number of llama.cpp's build"),
    (r"assert len\(choice\['delta'\]\['content'\]\) > 0[^\n]*", "pass",
     "the first delta has an empty text, as OpenAI's has"),
    (r"(assert choice(?:\.delta\.content|\[\"delta\"\]\[\"content\"\])) is None", r"\1 in (None, '')",
     "the first delta has an empty text, as OpenAI's has"),
    (r"(model\"?[=:] ?)\"(?:gpt|davinci|text-embedding|test)[^\"]*\"|(\()\"codellama70b\"(?=, )", r'\1\2""',
     "models that do not exist are refused"),
    (r"\"id_slot\": 0,", "", "there are no slots"),
    (r"(base_url=f\"http://\{server.server_host\}:\{server.server_port\})\"", r'\1/v1"', "paths begin with /v1"),
    (r"assert [^\n]*(exceed_context_size_error|error\"\]\[\"n_|too large)[^\n]*", "pass",
     "the error of a prompt that is too long is OpenAI's, context_length_exceeded"),
)
"""Pattern, replacement and reason of each change of a test."""
FLAGS = {"--port": "--port", "--host": "--host", "--alias": "--name", "--api-key": "--api-key",
         "--cors-origins": "--cors-origin", "--threads": "--threads"}
"""Flags of llama-server with the same meaning here; others are left out."""


def wrapper_line(words: list[str]) -> list[str]:
    """Return the command line of `edgeinfer serve` for one of llama-server."""
    given = {words[i]: words[i + 1] if i + 1 < len(words) else "" for i in range(len(words)) if words[i][:1] == "-"}
    line = ["serve", os.environ["EDGEINFER_TESTED_MODEL"], "--budget", "2GiB", "--drain", "1", "--max-body", "4MiB"]
    for flag, ours in FLAGS.items():
        if flag in given:
            line += [ours, given[flag]]
    slots = int(given.get("--parallel", 1))
    return [*line, "--max-sequences", str(max(4, slots)), "--ctx", str(int(given.get("--ctx-size", 512)) // slots)]


def prepare(options: argparse.Namespace, work: Path) -> tuple[Path, Path]:
    """Copy and change the tests, and convert the model; returns the folder of the tests and the bundle."""
    source = options.llama_cpp.expanduser() / "tools" / "server" / "tests"
    tests, checkpoint, bundle = work / "tests", work / "checkpoint", work / "bundle"
    shutil.copytree(source, tests, ignore=shutil.ignore_patterns("tmp", "__pycache__"))
    for file in (tests / "utils.py", *(tests / "unit").glob("*.py")):
        text = file.read_text("utf-8")
        for pattern, replacement, _ in EDITS:
            text = re.sub(pattern, replacement, text)
        file.write_text(text, "utf-8")
    shutil.copytree(options.model.expanduser(), checkpoint, copy_function=shutil.copyfile)
    checkpoint.chmod(0o755)
    for name, field, value in (("tokenizer_config.json", "chat_template", CHATML),
                               ("config.json", "max_position_embeddings", POSITIONS)):
        file = checkpoint / name
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    convert = [sys.executable, "-m", "edgeinfer", "convert", checkpoint, bundle, "--weights", "f16"]
    subprocess.run(convert, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return tests, bundle


def run(options: argparse.Namespace, work: Path) -> Path:
    """Run the tests; returns pytest's report."""
    tests, bundle = prepare(options, work)
    wrapper, report = work / "llama-server", work / "report.xml"
    wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} --serve \"$@\"\n")
    wrapper.chmod(0o755)
    environment = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(wrapper), "EDGEINFER_TESTED_MODEL": str(bundle),
                   "PYTHONPATH": str(ROOT), "PORT": str(options.port)}
    words = [options.python, "-m", "pytest", "-q", "-p", "benchmarks.peers.llama_server_plugin", "-m", "not slow",
             "--junitxml", report, "-rf", *options.tests]
    with open(options.log, "wb") as log:
        subprocess.run([str(word) for word in words], cwd=tests, env=environment, stdout=log, stderr=log, check=False)
    return report


def outcomes(report: Path) -> list[tuple[str, str, str, str]]:
    """Return file, test, outcome and reason of each case."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, reason = "failed", (child.get("message") or "").splitlines()[0][:150]
            elif child.tag == "skipped":
                outcome, reason = "not applicable", child.get("message") or ""
        found.append(((case.get("classname") or "").split(".")[-1], case.get("name") or "", outcome, reason))
    return found


def tables(found: list[tuple[str, str, str, str]]) -> str:
    """Return the tables of a document."""
    counts, reasons = defaultdict[str, Counter[str]](Counter), Counter[str]()
    for file, _, outcome, reason in found:
        for which in (file, "all"):
            counts[which][outcome] += 1
        if outcome == "not applicable":
            reasons[reason] += 1
    names = ("passed", "failed", "not applicable")
    rows = [row(file, *(counts[file][name] for name in names))
            for file in sorted(counts, key=lambda one: (one == "all", one))]
    failed = [row(f"`{file}::{name}`".replace("|", "/"), reason.replace("|", "/"))
              for file, name, outcome, reason in found if outcome == "failed"]
    return "\n\n".join((
        table("file | passed | failed | not applicable", rows, right=True),
        table("not applicable because of | cases", [row(reason, n) for reason, n in reasons.most_common()], right=True),
        table("changed in the tests", [row(reason) for reason in dict.fromkeys(reason for *_, reason in EDITS)]),
        *([table("failed | message", failed)] if failed else [])))


def main() -> int:
    """Run the tests and print the tables; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="a checkout of llama.cpp")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of stories260K")
    parser.add_argument("--python", default=sys.executable, help="a Python with the packages of the tests")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--log", default=os.devnull, help="file for pytest's output")
    parser.add_argument("tests", nargs="*", help="files, such as unit/test_tokenize.py")
    options = parser.parse_args()
    with closing(socket.socket()) as one:
        if one.connect_ex(("127.0.0.1", options.port)) == 0:
            parser.error(f"something listens on port {options.port}; choose another --port")
    with tempfile.TemporaryDirectory(prefix="llama-server-tests-") as work:
        found = outcomes(run(options, Path(work)))
    print(tables(found))
    return int(any(outcome == "failed" for _, _, outcome, _ in found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "edgeinfer", *wrapper_line(sys.argv[2:])])
    sys.exit(main())
