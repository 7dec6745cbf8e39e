"""Decode steps, prompts, arrivals, draft tokens and memory of models at full size, beside plan and estimate."""

from __future__ import annotations

import statistics
import time

from edgeinfer.backends import OnnxRunner, gpu_free_bytes
from edgeinfer.base.process import peak_rss_bytes
from edgeinfer.config import PAGES, SLOTS, Recipe
from edgeinfer.devices import estimate
from edgeinfer.errors import BudgetError
from edgeinfer.llm.executors import executor_on
from edgeinfer.models.describe import describe
from edgeinfer.runner import DECODE, Segment, Sequence

from .models import bundle_of, filled, median_step, opened, prompt_of
from .peers import genai
from .rows import Check
from .sizes import Sizes

H200_SPEEDS = {("llama-2-7b", 1): 400.0, ("llama-2-7b", 32): 3000.0}
"""Tokens a second at depth 0 that are wanted on an H200, by model and sequences."""
ESTIMATE_SHARE = 0.15
"""Wanted: largest deviation of the estimate of one sequence from its measurement."""
DRAFT_TOKENS = 4
"""Tokens of each sequence in forward passes that verify draft tokens."""


def speed(check: Check, names: list[str], sizes: Sizes, python: str | None = None) -> None:
    """Measure every model, the small ones first: one runner of a single sequence, one of many for each layout, and
    onnxruntime-genai where an interpreter that has it is given."""
    for name in names:
        check.case(f"{name}: one sequence", lambda name=name: single(check, name, sizes))  # type: ignore[misc]
        for layout in (PAGES, SLOTS) if check.provider.page_positions else (SLOTS,):
            check.case(f"{name}: sequences in {layout}",
                       lambda name=name, layout=layout: many(check, name, layout, sizes))  # type: ignore[misc]
        if python:
            check.case(f"{name}: onnxruntime-genai",
                       lambda name=name: genai(check, name, python, sizes))  # type: ignore[misc]


def single(check: Check, name: str, sizes: Sizes) -> None:
    """Measure prompts and decode steps of a model that is opened for one sequence."""
    path, before = bundle_of(name), free(check)
    with opened(path, check.provider, ctx=max(*sizes.prompts, *sizes.depths) + 2 * sizes.steps + 8,
                max_sequences=1) as runner:
        for length in sizes.prompts:
            check.add(f"{name}: prompt of {length}", f"{length / prompt_seconds(runner, length):.0f} tokens/s")
        for depth in sizes.depths:
            decoded(check, name, runner, 1, depth, sizes.steps)
        used(check, f"{name}: memory with one sequence", runner, before)


def many(check: Check, name: str, layout: str, sizes: Sizes) -> None:
    """Measure a model that is opened for the largest number of sequences, at every depth that fits."""
    path, before, most = bundle_of(name), free(check), max(sizes.sequences)
    for depth in sorted(sizes.depths, reverse=True):
        try:
            with opened(path, check.provider, ctx=max(depth, sizes.prompt) + 8 * sizes.steps + 32, max_sequences=most,
                        kv_layout=layout, outputs=DRAFT_TOKENS * most) as runner:
                for n in sizes.sequences:
                    for shallower in sorted(d for d in sizes.depths if d <= depth):
                        decoded(check, f"{name}, {layout}", runner, n, shallower, sizes.steps, drafts=True)
                arriving(check, f"{name}, {layout}", runner, sizes)
                used(check, f"{name}, {layout}: memory with {most} sequences", runner, before)
            return
        except BudgetError as error:
            check.not_run(f"{name}, {layout}: {most} sequences at depth {depth}", str(error))


def decoded(check: Check, name: str, runner: OnnxRunner, n: int, depth: int, count: int, drafts: bool = False) -> None:
    """Add a row for decode steps of n sequences at a depth, and of draft tokens of each."""
    held = filled(runner, n, depth)
    step = median_step(runner, held, count)
    read = (runner.plan.region("weights").nbytes + n * depth * position_bytes(runner)) / step / 1e9
    wanted = H200_SPEEDS.get((name.split(",")[0], n)) if depth == 0 else None
    share = f", {read / check.profile.bandwidth_gbs:.0%} of the bandwidth" if check.profile else ""
    check.add(f"{name}: {n} sequences at depth {depth}",
              f"{n / step:.0f} tokens/s, {1000 * step:.2f} ms, {read:.0f} GB/s of weights and KV{share}",
              f"{wanted:.0f} tokens/s on an H200" if wanted else "", None if wanted is None else n / step >= wanted)
    if drafts:
        times = sorted(verified(runner, held) for _ in range(max(count // 8, 3)))
        check.add(f"{name}: {n} sequences at depth {depth}, {DRAFT_TOKENS} tokens of each in one pass",
                  f"{1000 * times[len(times) // 2]:.2f} ms, {times[len(times) // 2] / step:.2f} steps")
    if n == 1 and not drafts:
        estimated(check, name, runner, depth, step)
    for sequence in held:
        runner.release(sequence)


def verified(runner: OnnxRunner, held: list[Sequence]) -> float:
    """Return the seconds of a forward pass over draft tokens of each sequence, with logits after all of them."""
    segments = [Segment(sequence, [2] * DRAFT_TOKENS, range(DRAFT_TOKENS), DECODE) for sequence in held]
    began = time.perf_counter()
    runner.forward(segments)
    return time.perf_counter() - began


def estimated(check: Check, name: str, runner: OnnxRunner, depth: int, step: float) -> None:
    """Add a row for the estimate of one sequence beside its measurement."""
    if not check.profile:
        return
    model = describe(runner.bundle.path, recipe=Recipe(()))
    found = executor_on(check.provider, model.graph, runner.config)._replace(profile=check.profile)
    run = found.on_card(model, runner.config.ctx or 1)
    assert run
    predicted = estimate(check.profile, run.traffic, depth).decode_tok_per_s
    off = predicted * step - 1
    check.add(f"{name}: estimate of 1 sequence at depth {depth}", f"{predicted:.0f} tokens/s, {off:+.0%}",
              f"within {ESTIMATE_SHARE:.0%}" if check.cuda else "", abs(off) <= ESTIMATE_SHARE if check.cuda else None)


def prompt_seconds(runner: OnnxRunner, length: int) -> float:
    """Return the seconds of the best of three prompts of this length."""
    ids, times = prompt_of(runner, length), list[float]()
    for _ in range(3):
        sequence, began = runner.new_sequence(), time.perf_counter()
        runner.prefill(sequence, ids)
        times.append(time.perf_counter() - began)
        runner.release(sequence)
    return min(times)


def arriving(check: Check, name: str, runner: OnnxRunner, sizes: Sizes) -> None:
    """Add a row for requests that come one after the other: one prompt between two steps of all others."""
    live, first, gaps, tokens = list[Sequence](), list[float](), list[float](), 0
    ids, most, began = prompt_of(runner, sizes.prompt), max(sizes.sequences), time.perf_counter()
    while len(live) < most or len(gaps) < most + sizes.steps:
        if len(live) < most:
            sequence, came = runner.new_sequence(), time.perf_counter()
            runner.prefill(sequence, ids)
            live.append(sequence)
            first.append(time.perf_counter() - came)
        step = time.perf_counter()
        runner.decode(live, ids[: len(live)])
        gaps.append(time.perf_counter() - step)
        tokens += len(live)
    seconds = time.perf_counter() - began
    for sequence in live:
        runner.release(sequence)
    check.add(f"{name}: {most} arriving one after the other, prompts of {sizes.prompt}",
              f"TTFT {1000 * statistics.median(first):.1f} ms, TPOT {1000 * statistics.median(gaps):.2f} ms, longest "
              f"{1000 * max(gaps):.0f}, {tokens / seconds:.0f} tokens/s")


def position_bytes(runner: OnnxRunner) -> float:
    """Return the bytes of one position of KV in all layers."""
    blocks = runner.slabs.blocks
    return runner.plan.region("kv").nbytes / (blocks * runner.block_tokens)


def free(check: Check) -> int:
    """Return the free memory of the GPU, 0 without one."""
    return gpu_free_bytes() if check.cuda else 0


def used(check: Check, what: str, runner: OnnxRunner, before: int) -> None:
    """Add rows for memory of the GPU and of the process beside the plan, of the first model of a process alone.

    Later ones find CUDA's context, and the memory that onnxruntime keeps, already there.
    """
    host, planned = peak_rss_bytes() or 0, runner.plan.total_bytes
    if not check.cuda or any("memory" in row.what for row in check.rows):
        return
    taken, most = before - gpu_free_bytes(), runner.plan.device_bytes
    check.add(f"{what}, GPU", f"{taken / 1e6:.0f} MB, planned {most / 1e6:.0f} MB", "not above the plan",
              taken <= most)
    check.add(f"{what}, process", f"{host / 1e6:.0f} MB at most, planned {planned / 1e6:.0f} MB")
