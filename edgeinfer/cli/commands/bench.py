"""`edgeinfer bench`: tokens per second beside the machine's limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ... import registry
from ...base.validation import similar
from ...config import CPU
from ...errors import UsageError
from ..options import NOTHING, Given, takes
from ..output import show
from ..progress import ProgressLine
from ..reports.bench import bench_object, print_report
from ..reports.bench_prediction import bench_estimate, learn_from_bench
from ..reports.decision import FIELD
from ..reports.prediction import make_predictor
from .bench_run import find_bundle, first_token, numbers, run_tests, speculated
from .bench_together import Together, bench_served, bench_together

JSON_FIELDS = {
    "bench": {
        "model": "model or shape, as given",
        "rows": "per test `test` (pp512, tg128, tg128 @ d4096), `t_per_s`, `stddev`, `samples`, `bytes_per_token`, "
        "`mbu` (share of the bandwidth), `mbu_paired` (of the readings beside the test), `bandwidth_gbs` (their "
        "median), `operations_per_token`, `int8_share` (of the int8 peak)",
        "bandwidth_gbs": "read bandwidth of all threads, GB = 1e9; with `bandwidth_low_gbs`, `bandwidth_high_gbs`, "
        "`bandwidth_readings`",
        "int8_peak_gops": "int8 operations from registers, 1e9 a second",
        "load_ms": "opening the model",
        "ttft_process_ms": "from the start of a process to its first token; null with --no-startup",
        "planned_bytes": "the memory plan's total",
        "peak_rss_bytes": "peak memory of the process without the probe's; null if the system does not report it",
        "streamed_bytes": "weights that are read from storage for each token; 0 if all are in memory",
        "cold_bytes": "neurons that are read from storage on demand; 0 if all are in memory",
        "expert_bytes": "experts that are read from storage on demand; 0 if all are in memory",
        "offload": "reads of the tests from storage, as in `run`; null where all weights are in memory",
        "decision": FIELD + "; bench measures that way",
        "quality": "where that approximates: `setting`, `kld_mean` as measured or null, `said`, `by_itself`; else null",
        "probe_bytes": "memory read to measure the bandwidth",
        "weights_bytes": "length of weights.bin; with `weights` and `group_size` of the quantisation",
        "device": "executor of the model, and `device_bytes` of its own memory in the plan",
        "isa": "instruction set, or the provider; with `threads`, `kv`, `ctx`",
        "estimate": "after a probe: `rows` with `test`, `t_per_s`, `low`, `high` as predicted, `measured`, `miss`, "
        "`at_the_moment` (with the bandwidth or peak beside the test; null on a GPU); `basis`, `error`, "
        "`error_source`; else null",
        "speculation": "with --speculate: `walks`, milliseconds of a forward pass over 1, 2, ... tokens, and `ratios` "
                       "to one; `draft_ms`, `self_ms` and `mtp_ms` of a draft token; `pays_from`, per drafter the "
                       "least acceptance with which draft tokens pay, null where none does; with --accept `stated`: "
                       "`accept`, `plain_t_per_s`, `t_per_s`, `gain`, `predicted`, `tokens_per_walk`",
        "profile": "with --profile: per test `test`, `ms`, `operations`, `records`",
        "serving": "with --concurrency, instead of `rows`: per load `concurrency`, `requests`, `rate`, `duration_s`, "
        "`total_input_tokens`, `total_output_tokens`, `request_throughput`, `output_throughput`, "
        "`total_token_throughput`, `request_goodput`, `preemptions`, `forward_passes`, and of `ttft_ms`, `tpot_ms`, "
        "`itl_ms`, `e2el_ms` the `mean`, `median`, `p95`, `p99`",
        **registry.fields("bench"),
    },
}
"""Fields of the JSON object, by command."""


@takes("bench")
def bench(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model to measure, as for run; or use --shape.", show_default=False),
    ] = None,
    prompt: Annotated[str, typer.Option("-p", metavar="TOKENS,...", help="Prompt lengths; 0 for none.")] = "512",
    generate: Annotated[
        str, typer.Option("-n", metavar="TOKENS,...", help="Number of tokens to generate in each test; 0 for none.")
    ] = "128",
    depth: Annotated[
        str, typer.Option("-d", metavar="TOKENS,...", help="Context depths: number of tokens before each test.")
    ] = "0",
    repetitions: Annotated[int, typer.Option("-r", metavar="N", help="Number of repetitions of each test.")] = 5,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Measure random weights of a built-in shape, also --weights q4_k_m "
                     "or q5_k_m; they are cached."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also profile every instruction: time, GB/s and utilisation.")
    ] = False,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Also time forward passes over several tokens, as for speculation.")
    ] = False,
    draft: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="With --speculate: draft model; with --shape the name of a shape."),
    ] = None,
    accept: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="With --speculate: report the speed at this acceptance rate."),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N,...", show_default=False,
                     help="Measure requests that run together instead: at most N of them at a time."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(metavar="N", show_default=False, help="With --concurrency: number of requests (default: 4 times "
                     "the concurrency)."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", show_default=False, help="With --concurrency: requests that arrive per second on "
                     "average (default: a new one whenever one is answered)."),
    ] = None,
    range_ratio: Annotated[
        float, typer.Option(metavar="SHARE", help="With --concurrency: spread of the lengths around -p and -n.")
    ] = 0.0,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="FILE", show_default=False, help="With --concurrency: lengths of the requests, one JSON "
                     'object per line: {"prompt": 256, "output": 128}.'),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(metavar="METRIC:MS,...", show_default=False, help="With --concurrency: count requests within "
                     "these bounds, such as ttft:500,tpot:100."),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="With --concurrency: send the requests to a server with "
                     "OpenAI's API, of edgeinfer or another program; MODEL is its name there."),
    ] = None,
    no_startup: Annotated[
        bool, typer.Option("--no-startup", help="Do not measure the time to first token of a new process.")
    ] = False,
    given: Given = NOTHING,
) -> None:
    """Measure the speed of a model.

    Tests are named as in llama-bench: pp512 processes a prompt of 512 tokens, tg128 generates 128 tokens, tg128 @ d4096
    does so after 4096 tokens of context. Between repetitions bench measures the machine's read bandwidth (all threads
    read 1 GiB) and, beside prompts, its peak of int8 operations; utilisation refers to these. bench runs the model as
    run would with the same options, and reports which strategy a bundle with a predictor or a screen uses (--sparse,
    --head, --max-kld).

    \b
    Examples:
      edgeinfer bench demo -p 256 -n 64
      edgeinfer bench ./my-bundle -d 0,4096 --profile
      edgeinfer bench --shape llama-2-7b -r 3 --json
      edgeinfer bench ./my-bundle --concurrency 1,4,8 -p 256 -n 128 --goodput ttft:2000,tpot:200
      edgeinfer bench ./my-bundle --split auto --concurrency 1,4 -p 256 -n 64
      edgeinfer bench --serve http://localhost:8080 --concurrency 1,4,8 -p 256 -n 128
    """
    from ...bench import make_cases
    from ...llm import open as opening

    asked = Together(concurrency, requests, rate, range_ratio, lengths, goodput)
    if serve is not None:
        return bench_served(serve, model or "", asked, (numbers("-p", prompt), numbers("-n", generate)), given.json)
    tests = make_cases(numbers("-p", prompt), numbers("-n", generate), numbers("-d", depth))
    check_request(model, shape, repetitions)
    if concurrency is not None:
        return bench_together(model, shape, asked, (numbers("-p", prompt), numbers("-n", generate)), given)
    asked.check_unused()
    if given.split is not None:
        raise UsageError("--split requires --concurrency, such as --concurrency 1,4.")
    check_speculation(speculate, draft, accept)
    device, (weights, group_size), config = given.device or CPU, given.stored(model), given.runtime()
    provider = opening.provider(device)
    check_device(device, profile, speculate)
    with ProgressLine() as progress:
        path = find_bundle(model, shape, weights, group_size, progress, given.budget)
        provider, config = opening.taken(device, provider, path, config, given.kv_on(device))
        config, report, measured = run_tests(path, config, given.max_kld, tests, repetitions, profile, progress,
                                             provider)
        report["model"] = model or shape
        report["ttft_process_ms"] = None if no_startup or provider else first_token(path, config, report["threads"])
        if speculate:
            drafter = None if draft is None else find_bundle(
                None if shape else draft, draft if shape else None, None, None, progress)
            report["speculation"] = speculated(path, drafter, replace(config, threads=report["threads"]),
                                               max(case.depth for case in tests), repetitions, accept, progress)
    stored = report["streamed_bytes"] + report["cold_bytes"] + report["expert_bytes"]
    predictor = make_predictor(path, config, report["threads"], report["isa"], stored,
                               provider.device if provider else CPU)
    out = {**bench_object(report, measured), "estimate": bench_estimate(predictor, measured),
           **registry.reports(registry.Reported("bench", config))}
    show(out, given.json, lambda out: print_report(out, measured))
    learn_from_bench(predictor, measured)


def check_request(model: str | None, shape: str | None, repetitions: int) -> None:
    """Refuse wrong values before anything is loaded or written."""
    if not 1 <= repetitions <= 1000:
        raise UsageError(f"-r is {repetitions}; it must be from 1 to 1000 repetitions.")
    if (model is None) == (shape is None):
        raise UsageError("Give either MODEL or --shape, as in: edgeinfer bench --shape llama-2-7b.")
    from edgeinfer.converters import SHAPES

    from ...models import LISTING, SHOWN_NAMES

    if shape is not None and shape not in SHAPES:
        near = similar(shape.lower(), SHAPES, n=2, cutoff=0.4)
        names = " or ".join(repr(name) for name in near)
        few = ", ".join(sorted(SHAPES)[:SHOWN_NAMES])
        hint = f"did you mean {names}?" if near else f"shapes include {few}; '{LISTING}' lists all."
        raise UsageError(f"There is no shape {shape!r}; {hint}")


def check_speculation(speculate: bool, draft: str | None, accept: float | None) -> None:
    """Refuse options without effect, and an acceptance that is not a share."""
    for option, value in (("--draft", draft), ("--accept", accept)):
        if value is not None and not speculate:
            raise UsageError(f"{option} requires --speculate.")
    if accept is not None and not 0 <= accept <= 1:
        raise UsageError(f"--accept {accept} is out of range; it is a share, from 0 to 1.")


def check_device(device: str, profile: bool, speculate: bool) -> None:
    """Refuse options that only our own kernels have."""
    for option, asked in (("--profile", profile), ("--speculate", speculate)):
        if asked and device != CPU:
            raise UsageError(f"{option} measures edgeinfer's own kernels, and --device is {device}; use one or the "
                             "other.")
