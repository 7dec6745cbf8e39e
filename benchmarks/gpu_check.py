"""All that is to be run on a GPU, in one command: placement, kernels, numerics, speed, arrivals, memory, endurance.

    python benchmarks/gpu_check.py [--device cuda] [--models NAME ...] [--minutes 25] [--out FILE.json]

Prints a table with what was found beside what is wanted; what could not be run says why. Without a GPU all of it is
"not run". `--device onnx-cpu --models demo --quick` runs the same code on onnxruntime's CPU provider, where speeds mean
nothing. Models are shapes with random weights, which are written into the cache once, or bundles.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from edgeinfer.backends import PROVIDERS, OnnxRunner, Provider, gpu_free_bytes, provider_of
from edgeinfer.base.process import peak_rss_bytes
from edgeinfer.bench import token_ids
from edgeinfer.bundle import Bundle
from edgeinfer.config import KV_LAYOUTS, RuntimeConfig
from edgeinfer.devices import DeviceProfile, estimate, load_profile
from edgeinfer.errors import BudgetError, EdgeInferError
from edgeinfer.models.describe import describe
from edgeinfer.runner import DECODE, Segment, Sequence

MODELS = ["tinyllama-1.1b", "llama-2-7b"]
F16, MEMORY_SHARE, MEMORY_BYTES = 5e-3, 0.03, 200_000_000
"""Wanted: of the largest logit; planned beside measured memory, whichever of the two allows more."""
DRAFT_TOKENS = 4
"""Tokens of each sequence in forward passes that verify draft tokens."""
DEBUG = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1", "ORT_FPA_INTB_DEBUG": "1"}
ESTIMATE_SHARE = 0.15
"""Wanted: how far the estimate of one sequence may be from what is measured."""
H200_SPEEDS = {("llama-2-7b", 1): 400.0, ("llama-2-7b", 32): 3000.0}
"""Tokens a second at depth 0 that are wanted on an H200, by model and sequences."""


@dataclass
class Row:
    """One line of the table."""

    what: str
    found: str
    wanted: str = ""
    verdict: str = ""
    """ok, missed, not run, or empty if nothing is wanted."""


@dataclass(frozen=True)
class Sizes:
    """Extent of the measurements."""

    sequences: tuple[int, ...] = (1, 8, 32)
    depths: tuple[int, ...] = (0, 4096)
    prompts: tuple[int, ...] = (512, 4096)
    arrivals: tuple[int, ...] = (1, 8, 32, 64)
    steps: int = 64
    prompt: int = 256
    """Of those who arrive."""
    load_seconds: float = 180


QUICK = Sizes((1, 2), (0, 32), (16, 64), (1, 3), 4, 16, 1)


class Check:
    """The rows so far, and the time that is left."""

    def __init__(self, provider: Provider, sizes: Sizes, minutes: float):
        self.provider, self.sizes, self.rows = provider, sizes, list[Row]()
        self.profile: DeviceProfile | None = None
        """Profile whose bandwidth and estimates are shown beside the results."""
        self._until = time.monotonic() + 60 * minutes

    def add(self, what: str, found: str, wanted: str = "", good: bool | None = None) -> None:
        """Add a line and print it."""
        self.rows.append(Row(what, found, wanted, "" if good is None else "ok" if good else "missed"))
        print_row(self.rows[-1])

    def section(self, what: str, run: Callable[[], None]) -> None:
        """Run a part of the check; whatever goes wrong in it is a line, and the next part follows."""
        if time.monotonic() > self._until:
            self.failed(what, "out of time", "not run")
            return
        try:
            run()
        except BudgetError as error:
            self.failed(what, str(error), "not run")
        except Exception as error:  # onnxruntime's own classes, too
            traceback.print_exc()
            self.failed(what, f"{type(error).__name__}: {error}")
        gc.collect()  # memory of a runner that failed

    def failed(self, what: str, why: str, verdict: str = "missed") -> None:
        """Add a line for what did not come to its end."""
        self.rows.append(Row(what, " ".join(why.split()), verdict=verdict))
        print_row(self.rows[-1])


def print_row(row: Row) -> None:
    """One line of a Markdown table."""
    print("| " + " | ".join(value.replace("|", "/") for value in asdict(row).values()) + " |", flush=True)


def bundle_of(name: str) -> Path:
    """A bundle, or one with random weights of a shape."""
    from edgeinfer.cli.commands.bench_run import find_bundle
    from edgeinfer.cli.progress import ProgressLine
    from edgeinfer.converters import SHAPES

    with ProgressLine() as progress:
        shape = name if name in SHAPES else None
        return find_bundle(None if shape else name, shape, "q4", 32, progress)


@contextmanager
def opened(path: Path, provider: Provider, **options: Any) -> Iterator[OnnxRunner]:
    """A runner with KV of its device's first type."""
    config = RuntimeConfig(**{"kv": provider.kv[0], "prefill_chunk": 512, **options})
    runner = OnnxRunner(Bundle.open(path), config, provider)
    try:
        yield runner
    finally:
        runner.close()


def plain(provider: Provider) -> Provider:
    """The provider without graphs."""
    return provider._replace(graphs=False, options={k: v for k, v in provider.options.items() if "graph" not in k})


def filled(runner: OnnxRunner, n: int, depth: int) -> list[Sequence]:
    """Sequences of this depth, the first of which is read and the others forked."""
    first, ids = runner.new_sequence(), token_ids(runner.model.vocab_size)
    runner.prefill(first, [next(ids) for _ in range(max(depth, 1))])
    return [first, *(runner.fork(first) for _ in range(n - 1))]


# -- parts of the check ------------------------------------------------------------------------------------------------


def environment(check: Check) -> None:
    """Versions, driver, GPU."""
    import onnxruntime

    check.add("onnxruntime", f"{onnxruntime.__version__}, {', '.join(onnxruntime.get_available_providers())}")
    if check.provider.memory == "cuda":
        smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                             capture_output=True, text=True, check=False)
        check.add("GPU", " ".join(smi.stdout.split()))
        check.profile = check.profile or known(smi.stdout.split(",")[0])
    check.add("profile for estimates", check.profile.title if check.profile else "none of this name; see --profile")


def known(name: str) -> DeviceProfile | None:
    """The profile of a GPU, by the name that its driver gives it."""
    try:
        return load_profile(name)
    except EdgeInferError:
        return None


def kernels(check: Check, path: Path) -> None:
    """List the kernels that onnxruntime names while one prompt and some steps run in a process of their own."""
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks import gpu_check as g; "
            f"g.some_steps({str(path)!r}, {check.provider.device!r})")
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, **DEBUG}, capture_output=True, text=True,
                         check=False, cwd=ROOT)
    check.add("all nodes on the provider, checked on opening", "yes" if ran.returncode == 0 else ran.stderr[-200:],
              "yes", ran.returncode == 0)
    said = Counter(re.findall(r"SdpaKernel=(\w+)|(XQA|fpA_intB\w*)", ran.stdout + ran.stderr))
    names = ", ".join(f"{''.join(name)} x {count}" for name, count in said.most_common())
    wanted = "fpA_intB, XQA or FLASH" if check.provider.memory == "cuda" else ""
    check.add("kernels that it names", names or "none", wanted, ("fpA" in names) if wanted else None)


def some_steps(path: str, device: str) -> None:
    """A prompt and three steps, for `kernels`."""
    provider = provider_of(device)
    assert provider
    with opened(Path(path), provider, ctx=64) as runner:
        (sequence,) = filled(runner, 1, 16)
        for token in range(3):
            runner.decode([sequence], [token])


def numerics(check: Check, path: Path) -> None:
    """Logits in f16 of the device beside those of onnxruntime's CPU provider, prompt and steps."""
    found = []
    for provider in (check.provider, PROVIDERS["onnx-cpu"]):
        with opened(path, provider, ctx=64, kv="f16", threads=os.cpu_count()) as runner:
            ids = token_ids(runner.model.vocab_size)
            sequence = runner.new_sequence()
            rows = [runner.prefill(sequence, [next(ids) for _ in range(32)]).copy()]
            rows += [runner.decode([sequence], [next(ids)])[0].copy() for _ in range(4)]
            found.append(np.stack(rows))
    worst = float(np.abs(found[0] - found[1]).max() / np.abs(found[1]).max())
    check.add(f"f16 beside the CPU provider, {path.name}", f"{worst:.1e}", f"{F16:.0e}", worst <= F16)


def speeds(check: Check, name: str, path: Path, provider: Provider, how: str) -> None:
    """Decode steps of several sequences behind each depth, and prompts; what does not fit stops no other."""
    for depth, n in product(check.sizes.depths, check.sizes.sequences):
        check.section(f"{name}: {n} sequences at depth {depth}{how}",
                      lambda depth=depth, n=n: decoded(check, name, path, provider, how, n, depth))  # type: ignore
    for length in check.sizes.prompts:
        check.section(f"{name}: prompt of {length}{how}",
                      lambda length=length: prompted(check, name, path, provider, how, length))  # type: ignore[misc]


def decoded(check: Check, name: str, path: Path, provider: Provider, how: str, n: int, depth: int) -> None:
    """Decode steps of n sequences behind a depth."""
    sizes = check.sizes
    with opened(path, provider, ctx=max(depth, 1) + sizes.steps + 8, max_sequences=n) as runner:
        step = statistics.median(steps(runner, filled(runner, n, depth), sizes.steps))
        read = (weights_of(runner) + kv_of(runner, depth)) / step / 1e9
    wanted = H200_SPEEDS.get((name, n)) if depth == 0 and provider.graphs else None
    check.add(f"{name}: {n} sequences at depth {depth}{how}",
              f"{n / step:.0f} tokens/s, {read:.0f} GB/s of weights and KV{share(check, read)}",
              f"{wanted:.0f} tokens/s on an H200" if wanted else "", None if wanted is None else n / step >= wanted)
    if n == 1 and check.profile and provider is check.provider:
        predicted = estimate(check.profile, describe(path).traffic(provider.kv[0]), depth).decode_tok_per_s
        off, judged = predicted * step - 1, provider.memory == "cuda"
        check.add(f"{name}: estimate of 1 sequence at depth {depth}", f"{predicted:.0f} tokens/s, {off:+.0%}",
                  f"within {ESTIMATE_SHARE:.0%}" if judged else "", abs(off) <= ESTIMATE_SHARE if judged else None)


def share(check: Check, gbs: float) -> str:
    """Of the device's bandwidth, in words that follow a figure."""
    peak = check.profile.bandwidth_gbs if check.profile else None
    return f", {gbs / peak:.0%} of {peak:.0f} GB/s" if peak else ""


def prompted(check: Check, name: str, path: Path, provider: Provider, how: str, length: int) -> None:
    """The best of three prompts of this length."""
    with opened(path, provider, ctx=length + 8) as runner:
        ids, times = token_ids(runner.model.vocab_size), list[float]()
        for _ in range(3):
            sequence, prompt = runner.new_sequence(), [next(ids) for _ in range(length)]
            began = time.perf_counter()
            runner.prefill(sequence, prompt)
            times.append(time.perf_counter() - began)
            runner.release(sequence)
    check.add(f"{name}: prompt of {length}{how}", f"{length / min(times):.0f} tokens/s")


def weights_of(runner: OnnxRunner) -> int:
    """Bytes that a step reads of weights."""
    return runner.plan.region("weights").nbytes


def kv_of(runner: OnnxRunner, depth: int) -> float:
    """Bytes that a step of all sequences reads of KV."""
    position = runner.plan.region("kv").nbytes / (runner.plan.kv_blocks * runner.block_tokens)
    return runner.plan.request.sequences * position * depth


def steps(runner: OnnxRunner, held: list[Sequence], n: int) -> Iterator[float]:
    """Yield the seconds of decode steps, the first of which are not counted."""
    ids = token_ids(runner.model.vocab_size)
    for step in range(n):
        began = time.perf_counter()
        runner.decode(held, [next(ids) for _ in held])
        if step >= min(3, n - 1):
            yield time.perf_counter() - began


def layouts(check: Check, name: str, path: Path) -> None:
    """KV in pages beside KV in slots: logits, decode steps, and draft tokens of all sequences, which are one call."""
    if not check.provider.page_positions:
        check.failed(f"{name}: pages beside slots", "PagedAttention has no CPU kernel", "not run")
        return
    for depth, n in product(check.sizes.depths, check.sizes.sequences):
        check.section(f"{name}: {n} sequences at depth {depth}, pages beside slots",
                      lambda depth=depth, n=n: pages_beside_slots(check, name, path, n, depth))  # type: ignore[misc]


def pages_beside_slots(check: Check, name: str, path: Path, n: int, depth: int) -> None:
    """The rows of `layouts` for so many sequences behind a depth; one layout after the other, for memory's sake."""
    rounds, where = check.sizes.steps // 4, f"{n} sequences at depth {depth}"
    options = {"ctx": max(depth, 1) + 8 * check.sizes.steps, "max_sequences": n, "outputs": DRAFT_TOKENS * n}
    logits, times = list[Any](), list[list[float]]()
    for layout in KV_LAYOUTS:
        with opened(path, check.provider, **options, kv_layout=layout) as runner:
            held = filled(runner, n, depth)
            logits.append(runner.decode(held, [1] * n).copy())
            times.append([statistics.median([run_pass(runner, held, new) for _ in range(rounds)][rounds // 4 :])
                          for new in (1, DRAFT_TOKENS)])
    worst = float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max())
    check.add(f"{name}: logits, {where}, pages beside slots", f"{worst:.1e}", f"{F16:.0e}", worst <= F16)
    for what, slots, pages in zip(("steps", f"{DRAFT_TOKENS} tokens of each"), *times, strict=True):
        check.add(f"{name}: {what}, {where}, pages beside slots",
                  f"{slots / pages:.2f} times as fast, {1000 * pages:.2f} ms")


def run_pass(runner: OnnxRunner, held: list[Sequence], new: int) -> float:
    """Seconds of a forward pass over so many tokens of each sequence, with logits after all of them."""
    segments = [Segment(sequence, [2] * new, range(new), DECODE) for sequence in held]
    began = time.perf_counter()
    runner.forward(segments)
    return time.perf_counter() - began


def arrivals(check: Check, name: str, path: Path) -> None:
    """Requests that come one after the other: one prompt between two steps of all others."""
    for n in check.sizes.arrivals:
        check.section(f"{name}: {n} arriving one after the other",
                      lambda n=n: arriving(check, name, path, n))  # type: ignore[misc]


def arriving(check: Check, name: str, path: Path, n: int) -> None:
    """The rows of `arrivals` for so many."""
    sizes, before = check.sizes, gpu_free_bytes() if check.provider.memory == "cuda" else 0
    with opened(path, check.provider, ctx=sizes.prompt + 2 * sizes.steps + n + 8, max_sequences=n) as runner:
        ids, live, first, gaps = token_ids(runner.model.vocab_size), list[Sequence](), list[float](), list[float]()
        tokens, began = 0, time.perf_counter()
        while len(live) < n or len(gaps) < sizes.steps:
            if len(live) < n:
                sequence, came = runner.new_sequence(), time.perf_counter()
                runner.prefill(sequence, [next(ids) for _ in range(sizes.prompt)])
                live.append(sequence)
                first.append(time.perf_counter() - came)
            step = time.perf_counter()
            runner.decode(live, [next(ids) for _ in live])
            gaps.append(time.perf_counter() - step)
            tokens += len(live)
        seconds = time.perf_counter() - began
        beside_plan(check, f"{name}: {n} arriving, memory of the GPU", before, runner)
    check.add(f"{name}: {n} arriving one after the other",
              f"TTFT {1000 * statistics.median(first):.1f} ms, TPOT {1000 * statistics.median(gaps):.2f} ms, "
              f"{tokens / seconds:.0f} tokens/s")


def memory(check: Check, name: str, path: Path) -> None:
    """Planned beside measured memory of the device, of long contexts."""
    if check.provider.memory != "cuda":
        return
    before = gpu_free_bytes()
    with opened(path, check.provider, ctx=2048, max_sequences=8) as runner:
        list(steps(runner, filled(runner, 8, 1024), 8))
        beside_plan(check, f"{name}: memory of the GPU", before, runner)


def beside_plan(check: Check, what: str, before: int, runner: OnnxRunner) -> None:
    """Add the row of what was taken of the device's memory since so many bytes were free."""
    if check.provider.memory != "cuda":
        return
    used, planned = before - gpu_free_bytes(), runner.plan.device_bytes
    most = max(MEMORY_BYTES, MEMORY_SHARE * planned)
    check.add(what, f"{used / 1e6:.0f} MB, planned {planned / 1e6:.0f} MB", f"within {most / 1e6:.0f} MB",
              abs(used - planned) <= most)


def endurance(check: Check, name: str, path: Path) -> None:
    """Minutes of prompts, forks and steps: no memory grows."""
    cuda = check.provider.memory == "cuda"
    with opened(path, check.provider, ctx=128, max_sequences=4) as runner:
        marks, until = list[tuple[int, int]](), time.monotonic() + check.sizes.load_seconds
        while time.monotonic() < until or len(marks) < 3:
            held = filled(runner, 4, 48)
            list(steps(runner, held, 32))
            for sequence in held:
                runner.release(sequence)
            marks.append((gpu_free_bytes() if cuda else 0, peak_rss_bytes() or 0))
    start = marks[len(marks) // 3]
    device, host = start[0] - marks[-1][0], marks[-1][1] - start[1]
    check.add(f"{name}: growth in {check.sizes.load_seconds:.0f} s of load",
              f"{device / 1e6:.1f} MB of the GPU's memory, {host / 1e6:.1f} MB of the process's", "none",
              device <= 2 << 20 and host <= 8 << 20)


# -- all together ------------------------------------------------------------------------------------------------------


def run(check: Check, names: list[str]) -> None:
    """Every part, the small models first."""
    check.section("environment", lambda: environment(check))
    for name in names:
        path = bundle_of(name)
        check.section(f"{name}: kernels", lambda path=path: kernels(check, path))  # type: ignore[misc]
        check.section(f"{name}: numerics", lambda path=path: numerics(check, path))  # type: ignore[misc]
        ways = [(check.provider, ", graphs"), (plain(check.provider), "")] if check.provider.graphs \
            else [(check.provider, "")]
        for provider, how in ways:
            check.section(f"{name}: speed{how}", lambda name=name, path=path, provider=provider, how=how:  # type: ignore
                          speeds(check, name, path, provider, how))
        for part in (layouts, arrivals, memory, endurance):
            check.section(f"{name}: {part.__name__}", lambda part=part, name=name, path=path:  # type: ignore[misc]
                          part(check, name, path))


PARTS = ("placement of all nodes", "kernels that are chosen", "f16 beside the CPU provider",
         "decode at 1, 8 and 32 sequences, depth 0 and 4096, with and without graphs", "prompts of 512 and 4096",
         "KV in pages beside slots: logits, steps, draft tokens",
         "share of memory bandwidth, and the estimate beside measured decode",
         "1, 8, 32 and 64 sequences arriving one after the other", "planned beside measured memory",
         "three minutes of load without growth")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run on a GPU what is to be run there.")
    parser.add_argument("--device", choices=list(PROVIDERS), default="cuda")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--profile", help="known device whose estimates are compared; by default the GPU's name")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    given = parser.parse_args(arguments)
    print("| what | found | wanted | verdict |\n|---|---|---|---|")
    try:
        provider = provider_of(given.device)
        assert provider
        check = Check(provider, QUICK if given.quick else Sizes(), given.minutes)
        check.profile = load_profile(given.profile) if given.profile else None
        run(check, given.models)
        rows = check.rows
    except EdgeInferError as error:
        rows = [Row(part, str(error), verdict="not run") for part in PARTS]
        for row in rows:
            print_row(row)
    if given.out:
        given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.verdict == "missed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
