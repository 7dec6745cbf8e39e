"""Record edgeinfer's results, and compare them after a change that must change nothing.

    python benchmarks/unchanged.py --record before.json --inputs DIRECTORY [--data shared/data] [--isa generic]
    python benchmarks/unchanged.py --compare before.json --inputs DIRECTORY [--data shared/data]

Logits of every family, storage type and KV type, the files of converted bundles, texts with every technique, and the
JSON of the commands. Bits are compared, so that a record holds for one instruction set and one kind of machine. The
edgeinfer that this Python imports is the one under test. --inputs has the models; unchanged_inputs.py writes them where
the directory does not exist. A comparison names each difference and ends with 1 if there is one; sentences in JSON that
only read otherwise are counted apart. two_versions.py compares speed and start-up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unchanged_cases import COMMANDS, DATA_TEXTS, MADE, REQUESTS, STORED, TEXTS, TYPED_CASES

VOLATILE = re.compile(r"(_ms|_s|seconds|_per_s|_rss_bytes|io_wait|^budget_bytes|^relative_time|^seed|^direct)$")
"""Names of JSON fields that differ from run to run."""
PROSE = "(prose) "
"""Stands before sentences, which may be reworded."""


def digest(data: bytes) -> str:
    """Shorten bytes to 16 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]


def bundle_hashes(bundle: Path) -> dict[str, str]:
    """Hash every file of a bundle."""
    return {file.name: digest(file.read_bytes()) for file in sorted(bundle.iterdir())}


def logits(bundle: Path, ids: list[int], kv: str, ctx: int | None) -> str:
    """Hash float32 logits: of all tokens by `score`, then of a prompt in chunks and of tokens decoded one by one."""
    from edgeinfer.bundle import Bundle
    from edgeinfer.config import RuntimeConfig
    from edgeinfer.runtime import Session

    session = Session(Bundle.open(bundle), RuntimeConfig(kv=kv, ctx=ctx, threads=1, prefill_chunk=13, outputs=16))
    try:
        sequence, half = session.new_sequence(), len(ids) // 2
        rows = [rows.tobytes() for _, rows in session.score(sequence, ids)]
        session.release(sequence)
        sequence = session.new_sequence()
        rows.append(session.prefill(sequence, ids[:half]).tobytes())
        rows += [session.decode([sequence], [token])[0].tobytes() for token in ids[half:]]
    finally:
        session.close()
    return digest(b"".join(rows))


def models(inputs: Path, work: Path, data: Path | None) -> Iterator[tuple[str, Any]]:
    """Convert every model of the inputs; yields hashes of bundles, and of logits where there are token ids."""
    from edgeinfer.converters import convert
    from edgeinfer.errors import EdgeInferError

    def converted(name: str, source: Path, **options: Any) -> Path:
        path = work / "bundles" / re.sub(r"\W", "-", name)
        convert(source, path, **options)
        return path

    def of_checkpoint(source: Path) -> Iterator[tuple[str, Any]]:
        ids = json.loads((source / "ids.json").read_text())
        kinds = STORED if source.name in TYPED_CASES else STORED[:2]
        for weights, group, kv, layout in kinds:
            name = f"{source.name} {weights} {group} {layout}"
            options = {"weights": weights, "group_size": group, "ffn_layout": layout}
            path = work / "bundles" / re.sub(r"\W", "-", name)
            if not path.exists():
                converted(name, source, **options)
                yield f"bundles/{name}", bundle_hashes(path)
            yield f"logits/{name} kv {kv}", logits(path, ids, kv, len(ids) if "dynamic" in name else None)
    def refusal(error: EdgeInferError) -> dict[str, str]:
        return {"refused": type(error).__name__, "message": f"{PROSE}{error}"}

    for source in sorted((inputs / "checkpoints").iterdir()):
        try:
            yield from of_checkpoint(source)
        except EdgeInferError as error:  # of a family that one of the versions does not have
            yield f"bundles/{source.name}", refusal(error)
    files = [*(inputs / "gguf").iterdir(), *(inputs / "packed").iterdir(), *(data.glob("gguf/*.gguf") if data else ())]
    for source in sorted(files):
        try:
            yield f"bundles/{source.name}", bundle_hashes(converted(f"{source.parent.name} {source.name}", source))
        except EdgeInferError as error:  # refused by name, which must not change either
            yield f"bundles/{source.name}", refusal(error)


def opened_texts(name: str, model: Path | str, opening: dict[str, Any], prompt: str) -> Iterator[tuple[str, Any]]:
    """Yield text, and a hash of tokens and log-probabilities, of each request to a model opened one way."""
    from edgeinfer.llm.api import LLM

    opening = {"ctx": 512, "speculate": "off", **opening}
    if "budget" in opening:
        with LLM(model, **{**opening, "budget": None}) as llm:
            opening["budget"] = llm.plan.total_bytes - opening["budget"]
    with LLM(model, **opening) as llm:
        for request, options in REQUESTS.items():
            if (request == "beams") != ("beams" in opening):
                continue
            done = llm.complete(prompt, **options)
            found = [[one.text, one.token_ids, one.finish_reason, one.score,
                      [[token.token_id, token.text, token.logprob, token.top] for token in one.logprobs or ()]]
                     for one in done.choices]
            yield f"texts/{name} {request}", {"text": done.text[:60], "all": digest(json.dumps(found).encode())}


def texts(inputs: Path, work: Path, data: Path | None) -> Iterator[tuple[str, Any]]:
    """Yield greedy and sampled texts with every technique."""
    told = (inputs / "text.txt").read_text(encoding="utf-8")
    prompts = {"short": "Once upon a time", "long": told[:1500]}
    folders = {"demo": "demo", "WORK": str(work), "INPUTS": str(inputs), "DATA": str(data)}
    for name, model, opening, prompt in [*TEXTS, *(DATA_TEXTS if data else ())]:
        place = re.sub(r"^[A-Z]+", lambda found: folders[found[0]], model)
        options = {key: re.sub(r"^(DATA|WORK|INPUTS)\b", lambda found: folders[found[0]], value)
                   if isinstance(value, str) else value for key, value in opening.items()}
        try:
            yield from opened_texts(name, place, options, prompts[prompt])
        except Exception as error:  # a technique that is not there any more is a difference, not the end
            yield f"texts/{name}", f"{type(error).__name__}: {str(error)[:200]}"


def masked(value: Any, folders: dict[str, str], name: str = "") -> Any:
    """Replace values that differ from run to run, and mark sentences."""
    if isinstance(value, dict):
        return {key: masked(one, folders, key) for key, one in value.items()}
    if isinstance(value, list):
        return [masked(one, folders, name) for one in value]
    if VOLATILE.search(name) and not isinstance(value, str):
        return None if value is None else "(varies)"
    if isinstance(value, str):
        for folder, word in folders.items():
            value = value.replace(folder, word)
        return PROSE + value if " " in value and name != "text" else value
    return value


def command(arguments: list[str], folders: dict[str, str]) -> dict[str, Any]:
    """Run a command with --json; returns its exit code and its output, masked."""
    names = {word: folder for folder, word in folders.items()}
    filled = [re.sub(r"^(WORK|INPUTS)", lambda found: names[found[0]], word) for word in arguments]
    done = subprocess.run([sys.executable, "-m", "edgeinfer", *filled, "--json"], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    return {"code": done.returncode, "json": masked(lines, folders)}


def commands(inputs: Path, work: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON of the commands."""
    import edgeinfer

    folders = {str(inputs): "INPUTS", str(work): "WORK", str(Path(edgeinfer.__file__).parents[1]): "CHECKOUT"}
    for arguments in MADE + COMMANDS:
        yield "commands/" + " ".join(arguments), command(arguments, folders)


def prepare(work: Path, isa: str) -> None:
    """Point edgeinfer at a cache of its own, with the compiled kernels of this user's."""
    listed = subprocess.run([sys.executable, "-m", "edgeinfer", "cache", "list", "--json"], capture_output=True,
                            text=True, check=True)
    kernels = Path(json.loads(listed.stdout)["directory"]) / "kernels"
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        del os.environ[name]
    (work / "cache").mkdir()
    kernels.mkdir(parents=True, exist_ok=True)
    (work / "cache" / "kernels").symlink_to(kernels)
    os.environ |= {"EDGEINFER_CACHE": str(work / "cache"), "XDG_CONFIG_HOME": str(work / "config"),
                   "HF_HUB_OFFLINE": "1", **({"EDGEINFER_ISA": isa} if isa else {})}


def record(inputs: Path, data: Path | None, isa: str) -> dict[str, Any]:
    """Compute everything."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        prepare(work, isa)
        if not inputs.exists():
            subprocess.run([sys.executable, str(Path(__file__).with_name("unchanged_inputs.py")), inputs], check=True)
        listed = sorted(file for file in inputs.rglob("*") if file.is_file())
        found: dict[str, Any] = {"inputs": digest(b"".join(file.read_bytes() for file in listed))}
        for name, part in [("models", models(inputs, work, data)), ("commands", commands(inputs, work)),
                           ("texts", texts(inputs, work, data))]:
            began = time.perf_counter()
            for key, value in part:
                assert key not in found, key
                found[key] = value
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        shutil.rmtree(work / "bundles", ignore_errors=True)
    return found


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves in which two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key, "(absent)"), after.get(key, "(absent)"), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}/{i}")
    elif before != after:
        yield path.lstrip("/"), before, after


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print the differences; returns how many there are."""
    found = list(differences(before, after))
    worded = [one for one in found if all(isinstance(side, str) and side.startswith(PROSE) for side in one[1:])]
    more = [one for one in found if one[1] == "(absent)" and one[0] in after]
    changed = [one for one in found if one not in worded and one not in more]
    for name, one, other in changed:
        print(f"{name}: {str(one)[:100]!r} became {str(other)[:100]!r}")
    print(f"{len(before)} results, {len(changed)} differences; {len(worded)} sentences read otherwise, "
          f"{len(more)} results are new")
    return len(changed)


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--inputs", type=Path, required=True, metavar="DIRECTORY", help="models, written if not there")
    parser.add_argument("--data", type=Path, metavar="DIRECTORY", help="real small models; left out by default")
    parser.add_argument("--isa", default="", help="instruction set; default: the machine's best, or the record's")
    options = parser.parse_args()
    if (options.record is None) == (options.compare is None):
        parser.error("give one of --record FILE and --compare FILE.")
    data = options.data.resolve() if options.data else None
    before = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else None
    found = record(options.inputs.resolve(), data, options.isa or (before["isa"] if before else ""))
    found["isa"] = options.isa or found["commands/run demo hello -n 4 --temp 0"]["json"][0]["isa"]
    if options.record:
        options.record.write_text(json.dumps(found, indent=1), encoding="utf-8")
    sys.exit(bool(before and compare(before, found)))


if __name__ == "__main__":
    main()
