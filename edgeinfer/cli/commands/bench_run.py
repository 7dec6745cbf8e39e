"""Execution of `edgeinfer bench`: its bundle, found or made of random weights, and the tests over it."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.process import peak_rss_bytes
from ...config import CPU, DEFAULT_DRAFT_TOKENS, MIXED_TYPES, RuntimeConfig
from ...errors import BudgetError, EdgeInferError, RequestError, UsageError
from ...quant import WeightType
from ..output import say
from ..progress import ProgressLine
from ..reports.bench import speculation_object
from ..reports.decision import announce, approximation
from ..reports.streaming import Usage

if TYPE_CHECKING:
    from ...backends import Provider
    from ...bench import Case, Measurement
    from ...bundle import Bundle
    from ...graph import ModelConfig
    from ...runner import DraftRunner, Runner
    from ...runtime import Session

SHAPE_CTX = 1 << 17
"""Context that bundles of random weights allow: no training limits them."""
READ_BYTES, SMALL_READ_BYTES = 1 << 30, 256 << 20
"""Memory to read for the bandwidth: many times any cache; the second where less than four times the first is free."""


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers of a list like ``0,4096``."""
    if not re.fullmatch(r"-?\d{1,12}(,-?\d{1,12})*", text, re.ASCII):
        raise UsageError(f"{option} {text!r} is not a number of tokens; write one, or several as in 128,512.")
    return [int(number) for number in text.split(",")]


def speculated(path: Path, draft: Path | None, config: RuntimeConfig, depth: int, repetitions: int,
               accept: float | None, progress: ProgressLine) -> dict[str, Any]:
    """Return the JSON object of forward passes over several tokens after the longest context of the tests."""
    from ...bench import COUNTS, REPLAYED_TOKENS, measure_speculation
    from ...bundle import Bundle
    from ...runtime import Session

    ctx = max(depth, 1) + REPLAYED_TOKENS + max(COUNTS)
    config = replace(config, ctx=ctx, outputs=max(COUNTS), draft_tokens=DEFAULT_DRAFT_TOKENS)
    with ExitStack() as opened:
        bundle = opened.enter_context(Bundle.open(path))
        session, ahead = _with_self(bundle, config, opened)
        drafter = None
        if draft is not None:
            small = opened.enter_context(Bundle.open(draft))
            drafter = opened.enter_context(closing(Session(small, RuntimeConfig(ctx=ctx, kv=config.kv), host=session)))
        progress("measure", 0, 1, "forward passes over several tokens")
        return speculation_object(measure_speculation(session, drafter, depth, repetitions, accept, ahead))


def _with_self(bundle: Bundle, config: RuntimeConfig, opened: ExitStack) -> tuple[Session, DraftRunner | None]:
    """Open a model, and its head or the part of it that can draft for it, if there is one and the budget holds both."""
    from ...registry import placer
    from ...runtime import DraftHeadPlan, SelfDraftPlan, Session

    try:
        self_draft: DraftHeadPlan | SelfDraftPlan = DraftHeadPlan.of_bundle(bundle) if "draft_head" in bundle.parts \
            else SelfDraftPlan.of_bundle(bundle, config.recipe)
        session = opened.enter_context(closing(Session(bundle, config, placer=placer(bundle.config, bundle),
                                                       draft_memory=self_draft.draft_memory)))
        if self_draft.planned(session.plan):
            return session, opened.enter_context(closing(self_draft.open(session)))
    except (RequestError, BudgetError):  # one layer; or too little memory for both
        session = opened.enter_context(closing(Session(bundle, config, placer=placer(bundle.config, bundle))))
    return session, None


def find_bundle(model: str | None, shape: str | None, weights: str | None, group_size: int | None,
                progress: ProgressLine, budget: int | None = None) -> Path:
    """Return the model's bundle, or one with random weights of the shape, which is made unless the cache has it."""
    from ...models import Storage, cached_bundle, resolve

    if shape is None:
        return resolve(model or "", progress, storage=Storage(weights, group_size, budget))
    from edgeinfer.converters import SHAPES, write_random_bundle

    config = replace(SHAPES[shape], max_position_embeddings=SHAPE_CTX)
    types, stored = _types_of_shape(config, weights, group_size)
    return cached_bundle(f"the random model {shape}", f"random-{shape}-{stored.replace('_', '-')}",
                         lambda target: write_random_bundle(config, target, **types, overwrite=True,
                                                            progress=partial(progress, "write")), progress=progress)


def _types_of_shape(config: ModelConfig, weights: str | None, group_size: int | None) -> tuple[dict[str, Any], str]:
    """Return the types of random weights as `write_random_bundle` takes them, and their name."""
    from ...models import Storage
    from ...models.file_types import types_of_file

    if weights not in MIXED_TYPES:
        weights, group_size = Storage(weights, group_size).of_checkpoint
        return {"weights": weights, "group_size": group_size}, WeightType.of(weights, group_size).suffix
    if group_size is not None:
        raise UsageError(f"--weights {weights} has a group size for each of its types; omit --group-size {group_size}.")
    layers, tied = config.num_hidden_layers, config.tie_word_embeddings
    return {"types": types_of_file(weights.upper(), layers, tied, values=True)}, weights


def run_tests(
    path: Path, config: RuntimeConfig, max_kld: float, tests: list[Case], repetitions: int, profile: bool,
    progress: ProgressLine, provider: Provider | None = None
) -> tuple[RuntimeConfig, dict[str, Any], Measurement]:
    """Open the bundle as `run` would and run the tests; returns the outcome, and facts beside the figures."""
    from edgeinfer.memory_planner import available_bytes, default_threads

    from ...bench import MachineProbe, measure, needed_ctx
    from ...bundle import Bundle

    threads = config.threads or default_threads()
    with Bundle.open(path) as bundle:
        asked = replace(config, ctx=needed_ctx(tests, bundle.config.max_position_embeddings))
        choice = None
        if bundle.approximates and not provider:
            from ...llm.strategy import choose

            choice = choose(bundle, asked, max_kld)
        config = choice.strategy.config if choice else asked
        bundle.check_contents(threads, partial(progress, "load"))  # once, and no part of load_ms
    session, bundle, load_ms = open_runner(path, config, progress, provider)
    with closing(session):  # a model that is refused takes no memory to measure the machine with
        read_bytes = READ_BYTES if available_bytes() >= 4 * READ_BYTES else SMALL_READ_BYTES
        with MachineProbe(threads, read_bytes, partial(progress, "compile")) as probe:
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


def open_runner(path: Path, config: RuntimeConfig, progress: ProgressLine,
                provider: Provider | None, split: str | None = None) -> tuple[Runner, Bundle, float]:
    """Open a bundle, in several processes if its layers are split; returns the milliseconds that it took, too."""
    from ...bundle import Bundle
    from ...llm import open as opening

    began = time.perf_counter()
    with ExitStack() as opened:
        bundle = opened.enter_context(Bundle.open(path))
        if split is not None:
            runner = opening.in_stages(bundle, config, split, provider and provider.device, None, progress)
        else:
            runner = (opening.opened_on(provider, bundle, config, None, progress, opened)[0] if provider
                      else opening.session(bundle, config, progress, None))
        opened.pop_all()
    return runner, bundle, 1000 * (time.perf_counter() - began)


def first_token(path: Path, config: RuntimeConfig, threads: int) -> float | None:
    """Return the milliseconds from a process's start to its first token; None, with a remark, if there are none."""
    from ...bench import first_token_ms
    from ...bundle import Bundle
    from ...text import Tokenizer

    try:
        with Bundle.open(path) as bundle:
            eos = bundle.config.eos_token_ids
            tokenizer = Tokenizer.open(path, {"bos_token_id": bundle.config.bos_token_id})
        return first_token_ms(path, tokenizer, eos, replace(config, threads=threads))
    except EdgeInferError as error:
        say(f"Time to the first token of a new process is not measured: {error}")
        return None
