"""`edgeinfer bench`: tokens per second beside what the machine could give."""

from __future__ import annotations

import difflib
import re
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checks import NATS, checked
from ..config import CPU, DEFAULT_DRAFT_TOKENS, GROUP_SIZES, MAX_KLD, WEIGHT_TYPES, Recipe, RuntimeConfig
from ..errors import BudgetError, EdgeInferError, RequestError, UsageError
from ..process import peak_rss_bytes
from ..quant import WeightType
from ..sizes import parse_size
from .bench_report import bench_object, print_report, speculation_object
from .decision import FIELD, announce, approximation
from .options import (
    DEFAULT_RECIPE,
    GROUPS,
    WEIGHTS,
    Attention,
    Budget,
    Head,
    Json,
    Kv,
    KvLayout,
    Lazy,
    LazyLayers,
    MaxKld,
    Passes,
    PrefillChunk,
    RunOn,
    Sparse,
    Threads,
    kv_on,
    pruned,
)
from .output import print_json, say
from .prediction import bench_estimate, learn_from_bench, make_predictor
from .progress import ProgressLine
from .streaming import Usage

if TYPE_CHECKING:
    from ..backends import Provider
    from ..bench import Case, Measurement
    from ..bundle import Bundle
    from ..runner import Ahead, Runner
    from ..runtime import Session

SHAPE_CTX = 1 << 17
"""Context that bundles of random weights allow: no training limits them."""
READ_BYTES, SMALL_READ_BYTES = 1 << 30, 256 << 20
"""Memory to read for the bandwidth: many times any cache; the second where less than four times the first is free."""

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
        "peak_rss_bytes": "most memory that the process held, without the probe's; null where the system does not say",
        "streamed_bytes": "weights that are read from storage for each token; 0 where all are in memory",
        "cold_bytes": "neurons that are read from storage when a token wants them; 0 where all are in memory",
        "expert_bytes": "experts that are read from storage when a token wants them; 0 where all are in memory",
        "offload": "what the tests read from storage, as in `run`; null where all weights are in memory",
        "decision": FIELD + "; bench measures that way",
        "quality": "where that approximates: `setting`, `kld_mean` as measured or null, `said`, `by_itself`; else null",
        "probe_bytes": "memory read to measure the bandwidth",
        "weights_bytes": "length of weights.bin; with `weights` and `group_size` of the quantisation",
        "device": "who ran the model, and `device_bytes` of its own memory that the plan has",
        "isa": "instruction set, or the provider; with `threads`, `kv`, `ctx`",
        "estimate": "after a probe: `rows` with `test`, `t_per_s`, `low`, `high` as predicted, `measured`, `miss`, "
        "`at_the_moment` (with the bandwidth or peak beside the test; null on a GPU); `basis`, `error`, "
        "`error_source`; else null",
        "speculation": "with --speculate: `walks`, milliseconds of a walk over 1, 2, ... tokens, and `ratios` to one; "
        "`draft_ms` and `self_ms` of a guessed token; `pays_from`, per drafter the least acceptance with which guesses "
        "pay, null where none does; with --accept `stated`: `accept`, `plain_t_per_s`, `t_per_s`, `gain`, `predicted`, "
        "`tokens_per_walk`",
        "profile": "with --profile: per test `test`, `ms`, `operations`, `records`",
    },
}
"""Fields of the JSON object, by command."""


def bench(
    command: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="What to measure, as for run; or --shape.", show_default=False),
    ] = None,
    prompt: Annotated[str, typer.Option("-p", metavar="TOKENS,...", help="Prompt lengths; 0 for none.")] = "512",
    generate: Annotated[
        str, typer.Option("-n", metavar="TOKENS,...", help="Numbers of tokens to generate; 0 for none.")
    ] = "128",
    depth: Annotated[
        str, typer.Option("-d", metavar="TOKENS,...", help="Tokens of context before each test.")
    ] = "0",
    repetitions: Annotated[int, typer.Option("-r", metavar="N", help="Repetitions of each test.")] = 5,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Random weights of a known shape, written once into the cache."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar=WEIGHTS, help="Type of the weights of a shape, or that a checkpoint or GGUF "
                                                       "file is converted to.  [default: q4; of GGUF each as it is]")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(metavar=GROUPS, help="Weights per scale of these.  [default: 32]")
    ] = None,
    threads: Threads = None,
    kv: Kv = "int8",
    budget: Budget = None,
    recipe: Passes = DEFAULT_RECIPE,
    sparse: Sparse = None,
    head: Head = None,
    attention: Attention = None,
    max_kld: MaxKld = MAX_KLD,
    lazy: Lazy = None,
    lazy_layers: LazyLayers = None,
    prefill_chunk: PrefillChunk = RuntimeConfig.prefill_chunk,
    device: RunOn = CPU,
    kv_layout: KvLayout = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also time every record of the program: time, GB/s, shares.")
    ] = False,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Also time walks over several tokens: from where guessing pays.")
    ] = False,
    draft: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="With --speculate: who guesses; with --shape the name of a shape."),
    ] = None,
    accept: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="With --speculate: speed where this share of guesses is right."),
    ] = None,
    no_startup: Annotated[
        bool, typer.Option("--no-startup", help="Do not start processes to time their first token.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure speed, beside the limits of this machine.

    Tests are named as in llama-bench: pp512 processes a prompt of 512 tokens, tg128 generates 128 tokens, tg128 @ d4096
    does so after 4096 tokens of context. Between repetitions the machine's read bandwidth is measured (1 GiB read by
    all threads) and, beside prompts, the int8 operations that its units do from registers; shares refer to
    these. What is measured is what run would do with the same options; of a bundle that leaves a choice (--sparse,
    --head, --max-kld) it is said which way that is.

    \b
    Examples:
      edgeinfer bench demo -p 256 -n 64
      edgeinfer bench ./my-bundle -d 0,4096 --profile
      edgeinfer bench --shape llama-2-7b -r 3 --json
    """
    from .. import opening
    from ..bench import make_cases

    tests = make_cases(numbers("-p", prompt), numbers("-n", generate), numbers("-d", depth))
    check_request(model, shape, weights, group_size, repetitions)
    check_speculation(speculate, draft, accept)
    limit, bound = None if budget is None else parse_size(budget), checked("max_kld", max_kld, NATS)
    provider = opening.provider(device)
    check_device(device, profile, speculate)
    kv = kv_on(command, device, kv) or (provider.kv[0] if provider else kv)
    no_startup = no_startup or provider is not None
    config = RuntimeConfig(kv=kv, threads=threads, budget_bytes=limit, prefill_chunk=prefill_chunk,
                           recipe=Recipe.parse(recipe).sparse(sparse).head(head).attention(attention),
                           lazy=pruned(command, lazy, lazy_layers), kv_layout=kv_layout)
    with ProgressLine() as progress:
        path = find_bundle(model, shape, weights, group_size, progress, limit)
        config, report, measured = run_tests(path, config, bound, tests, repetitions, profile, progress, provider)
        report["model"] = model or shape
        report["ttft_process_ms"] = None if no_startup else first_token(path, config, report["threads"])
        if speculate:
            guesser = None if draft is None else find_bundle(
                None if shape else draft, draft if shape else None, None, None, progress)
            report["speculation"] = speculated(path, guesser, replace(config, threads=report["threads"]),
                                               max(case.depth for case in tests), repetitions, accept, progress)
    stored = report["streamed_bytes"] + report["cold_bytes"] + report["expert_bytes"]
    predictor = make_predictor(path, config, report["threads"], report["isa"], stored)
    out = {**bench_object(report, measured), "estimate": bench_estimate(predictor, measured)}
    if json:
        print_json(out)
    else:
        print_report(out, measured)
    learn_from_bench(predictor, measured)


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a list like ``0,4096``."""
    if not re.fullmatch(r"-?\d{1,12}(,-?\d{1,12})*", text, re.ASCII):
        raise UsageError(f"{option} {text!r} cannot be read; write a number of tokens, or several as in 128,512.")
    return [int(number) for number in text.split(",")]


def check_request(
    model: str | None, shape: str | None, weights: str | None, group_size: int | None, repetitions: int
) -> None:
    """Refuse what is wrong before anything is loaded or written."""
    if not 1 <= repetitions <= 1000:
        raise UsageError(f"-r {repetitions} is out of range; it must be from 1 to 1000 repetitions.")
    if (model is None) == (shape is None):
        raise UsageError("Give either MODEL or --shape, as in: edgeinfer bench --shape llama-2-7b.")
    if weights is not None and weights not in WEIGHT_TYPES:
        raise UsageError(f"--weights {weights!r} is no type; choose one of {', '.join(WEIGHT_TYPES)}.")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise UsageError(f"--group-size {group_size} is not offered; choose one of {', '.join(map(str, GROUP_SIZES))}.")
    from ..converters import SHAPES
    from ..models import LISTING, SHOWN_NAMES

    if shape is not None and shape not in SHAPES:
        near = difflib.get_close_matches(shape.lower(), SHAPES, n=2, cutoff=0.4)
        names = " or ".join(repr(name) for name in near)
        few = ", ".join(sorted(SHAPES)[:SHOWN_NAMES])
        hint = f"did you mean {names}?" if near else f"shapes are {few} and others, which '{LISTING}' lists."
        raise UsageError(f"There is no shape {shape!r}; {hint}")


def check_speculation(speculate: bool, draft: str | None, accept: float | None) -> None:
    """Refuse what means nothing, and an acceptance that is no share."""
    for option, value in (("--draft", draft), ("--accept", accept)):
        if value is not None and not speculate:
            raise UsageError(f"{option} belongs to --speculate; add it.")
    if accept is not None and not 0 <= accept <= 1:
        raise UsageError(f"--accept {accept} is out of range; it is a share, from 0 to 1.")


def check_device(device: str, profile: bool, speculate: bool) -> None:
    """Refuse what is measured of our own kernels alone."""
    for option, asked in (("--profile", profile), ("--speculate", speculate)):
        if asked and device != CPU:
            raise UsageError(f"{option} is about our own kernels, and --device is {device}; leave one of them out.")


def speculated(path: Path, draft: Path | None, config: RuntimeConfig, depth: int, repetitions: int,
               accept: float | None, progress: ProgressLine) -> dict[str, Any]:
    """Return the JSON object of walks over several tokens behind the longest context of the tests."""
    from ..bench import COUNTS, REPLAYED_TOKENS, measure_speculation
    from ..bundle import Bundle
    from ..runtime import Session

    ctx = max(depth, 1) + REPLAYED_TOKENS + max(COUNTS)
    config = replace(config, ctx=ctx, outputs=max(COUNTS), draft_tokens=DEFAULT_DRAFT_TOKENS)
    with ExitStack() as opened:
        bundle = opened.enter_context(Bundle.open(path))
        session, ahead = _with_self(bundle, config, opened)
        guesser = None
        if draft is not None:
            small = opened.enter_context(Bundle.open(draft))
            guesser = opened.enter_context(closing(Session(small, RuntimeConfig(ctx=ctx, kv=config.kv), host=session)))
        progress("measure", 0, 1, "walks over several tokens")
        return speculation_object(measure_speculation(session, guesser, depth, repetitions, accept, ahead))


def _with_self(bundle: Bundle, config: RuntimeConfig, opened: ExitStack) -> tuple[Session, Ahead | None]:
    """Open a model, and the part of it that can guess for it, where there is one and the budget holds both."""
    from ..offload import placer
    from ..runtime import Lighter, Session

    try:
        lighter = Lighter.of_bundle(bundle, config.recipe)
        session = opened.enter_context(closing(Session(bundle, config, place=placer(bundle), beside=lighter.beside)))
        if lighter.planned(session.plan):
            return session, opened.enter_context(closing(lighter.open(session)))
    except (RequestError, BudgetError):  # one layer; or too little memory for both
        session = opened.enter_context(closing(Session(bundle, config, place=placer(bundle))))
    return session, None


def find_bundle(model: str | None, shape: str | None, weights: str | None, group_size: int | None,
                progress: ProgressLine, budget: int | None = None) -> Path:
    """Return the model's bundle, or one with random weights of the shape, which is made unless the cache has it."""
    from ..models import Storage, cached_bundle, resolve

    storage = Storage(weights, group_size, budget)
    if shape is None:
        return resolve(model or "", progress, storage=storage)
    weights, group_size = storage.of_checkpoint
    from ..converters import SHAPES, write_random_bundle

    config, told = replace(SHAPES[shape], max_position_embeddings=SHAPE_CTX), partial(progress, "write")
    stored = WeightType.of(weights, group_size).suffix.replace("_", "-")
    return cached_bundle(f"the random model {shape}", f"random-{shape}-{stored}", lambda target: write_random_bundle(
        config, target, weights, group_size, overwrite=True, progress=told), progress=progress)


def run_tests(
    path: Path, config: RuntimeConfig, max_kld: float, tests: list[Case], repetitions: int, profile: bool,
    progress: ProgressLine, provider: Provider | None = None
) -> tuple[RuntimeConfig, dict[str, Any], Measurement]:
    """Open the bundle as `run` would and run the tests; returns how, and what is known beside the figures."""
    from ..bench import MachineProbe, measure, needed_ctx
    from ..bundle import Bundle
    from ..memory_planner import available_bytes, default_threads

    threads = config.threads or default_threads()
    with Bundle.open(path) as bundle:
        asked = replace(config, ctx=needed_ctx(tests, bundle.config.max_position_embeddings))
        choice = None
        if bundle.approximates and not provider:
            from ..choice import choose

            choice = choose(bundle, asked, max_kld)
        config = choice.way.config if choice else asked
        bundle.check_contents(threads, partial(progress, "load"))  # once, and no part of load_ms
    read_bytes = READ_BYTES if available_bytes() >= 4 * READ_BYTES else SMALL_READ_BYTES
    with MachineProbe(threads, read_bytes, partial(progress, "compile")) as probe:
        session, bundle, load_ms = open_runner(path, config, progress, provider)
        try:
            cost = approximation(session, config != asked)
            announce(session, choice, cost, max_kld)
            usage = Usage(session)
            measured = measure(session, probe, tests, repetitions, profile, partial(progress, "measure"))
            peak = peak_rss_bytes()
            return config, {
                "load_ms": load_ms, "planned_bytes": session.plan.total_bytes,
                "streamed_bytes": session.plan.streamed_bytes,
                "cold_bytes": session.plan.cold.cold_bytes if session.plan.cold else 0,
                "expert_bytes": session.plan.experts.stored_bytes if session.plan.experts else 0,
                "offload": usage.report(),
                "decision": choice and choice.report(), "quality": cost,
                "peak_rss_bytes": None if peak is None else peak - probe.read_bytes, "probe_bytes": probe.read_bytes,
                "device": provider.device if provider else CPU, "device_bytes": session.plan.device_bytes,
                "isa": session.isa, "threads": threads, "kv": config.kv, "ctx": config.ctx,
                "weights_bytes": bundle.weights_bytes, "weights": bundle.quantisation.weights,
                "group_size": bundle.quantisation.group_size,
            }, measured
        finally:
            session.close()


def open_runner(path: Path, config: RuntimeConfig, progress: ProgressLine,
                provider: Provider | None) -> tuple[Runner, Bundle, float]:
    """Open a bundle; returns the milliseconds that it took, too."""
    from .. import opening
    from ..bundle import Bundle

    began = time.perf_counter()
    with ExitStack() as opened:
        bundle = opened.enter_context(Bundle.open(path))
        runner = (opening.opened_on(provider, bundle, config, None, progress, opened)[0] if provider
                  else opening.session(bundle, config, progress, None))
        opened.pop_all()
    return runner, bundle, 1000 * (time.perf_counter() - began)


def first_token(path: Path, config: RuntimeConfig, threads: int) -> float | None:
    """Return the milliseconds from a process's start to its first token; None, with a remark, where there are none."""
    from ..bench import first_token_ms
    from ..bundle import Bundle
    from ..text import Tokenizer

    try:
        with Bundle.open(path) as bundle:
            eos = bundle.config.eos_token_ids
            tokenizer = Tokenizer.open(path, {"bos_token_id": bundle.config.bos_token_id})
        return first_token_ms(path, tokenizer, eos, replace(config, threads=threads))
    except EdgeInferError as error:
        say(f"Time to the first token of a new process is not measured: {error}")
        return None
