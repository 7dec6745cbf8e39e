"""Replicas of a served model: their options, and their opening on a cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import CPU, Recipe, RuntimeConfig
from ..errors import UnsupportedModelError, UsageError
from .output import say
from .served import opening, short_name

if TYPE_CHECKING:
    from ..cluster import Ray, RemoteModel
    from .options import Given

MAX_REPLICAS = 1024
LOCAL = "local"


class Asked(NamedTuple):
    """Replicas that were asked for; None is one on each node."""

    address: str
    n: int | None
    prefill: int = 0
    """Number of those that compute prompts for the others."""
    device: str | None = None
    """Device of these replicas; None for the CPU."""


def replicas_asked(replicas: str | None, ray: str | None, prefill: int | None, decode: int | None, device: str | None,
                   given: Given, models: int) -> Asked | None:
    """Return the request of --replicas, --ray, --prefill, --decode and --prefill-device; None without them.

    Raises `UsageError` for options that contradict them.
    """
    if device is not None and prefill is None:
        raise UsageError(f"--prefill-device {device} is for replicas that compute prompts; add --prefill and --decode.")
    if prefill is not None or decode is not None:
        if replicas is not None or prefill is None or decode is None or min(prefill, decode) < 1 \
                or prefill + decode > MAX_REPLICAS:
            raise UsageError("--prefill and --decode go together and without --replicas, each from 1 on and both up to "
                             f"{MAX_REPLICAS}.")
        replicas = str(prefill + decode)
    if given.split is not None and (replicas is None or given.by_flag("split")):
        _check_split(replicas, given, models)
        return None
    given.split = None
    if replicas is None and ray is None:
        return None
    n = None if replicas in (None, "auto") else int(replicas[:9]) if replicas.isdecimal() else 0
    if n is not None and not 1 <= n <= MAX_REPLICAS:
        raise UsageError(f"--replicas is {replicas}; it is from 1 to {MAX_REPLICAS}, or auto for one on each node.")
    for flag, wrong, remedy in (
            ("--model", models > 1, "serve each model by a server of its own"),
            ("--prefix-file", given.prefix_file is not None, "leave it out"),
            (f"--device {given.device}", given.device not in (None, CPU), "replicas run edgeinfer's own kernels")):
        if wrong:
            raise UsageError(f"--replicas and --ray do not go with {flag}; {remedy}.")
    return Asked(ray or LOCAL, n, prefill or 0, device)


def checked_prefill(device: str, source: str, given: Given) -> RuntimeConfig:
    """Return the settings of a replica that computes prompts on a device.

    Raises `UsageError` where the device cannot compute prompts of the model for edgeinfer's own kernels; whether it
    works on the node that is to have it is known there alone.
    """
    from edgeinfer.memory_planner import default_ctx

    from ..backends import PROVIDERS
    from ..cluster import PREFILL_SEQUENCES
    from ..llm.executors import executor_on
    from ..models.describe import describe
    from ..runner import why_not_elsewhere

    if device not in PROVIDERS:
        raise UsageError(f"--prefill-device is {device!r}; choose one of {', '.join(PROVIDERS)}, or leave it out.")
    graph = describe(source, *given.stored(source), Recipe(())).graph
    config = given.runtime(max_sequences=PREFILL_SEQUENCES, kv_memory=None, draft_tokens=0)
    try:
        executor_on(PROVIDERS[device], graph, config)
        why = why_not_elsewhere(graph.config, given.ctx or default_ctx(graph.config))
    except (UsageError, UnsupportedModelError) as error:
        why = str(error).removesuffix(".").replace("run with --device cpu", "leave --prefill-device out")
    if why:
        raise UsageError(f"--prefill-device {device} computes no prompts of {source}: {why}.")
    return config


def _check_split(replicas: str | None, given: Given, models: int) -> None:
    """Refuse options that contradict --split, whose stages are no replicas."""
    for flag, wrong in (("--replicas", replicas is not None), ("--model", models > 1),
                        ("--prefix-file", given.prefix_file is not None),
                        (f"--device {given.device}", given.device not in (None, CPU))):
        if wrong:
            raise UsageError(f"--split does not go with {flag}; use one or the other.")


def open_replicas(ray: Ray, asked: Asked, source: str, left: int | None, *, given: Given, **settings: Any
                  ) -> RemoteModel:
    """Open the replicas of a model; `left` is the memory of all replicas of a node together."""
    import asyncio

    from ..cluster import RemoteModel

    where = os.path.abspath(source) if os.path.exists(source) else source
    options = opening(source, left, given=given, **settings)
    found = asyncio.run(ray.replicas(asked.n, short_name(source), where, options, asked.prefill, asked.device))
    for i, one in enumerate(found):
        speeds, plan = one.facts.speeds, one.facts.plan
        link = f", {1e-6 / speeds.link:.0f} MB/s from {found[0].name}" if speeds.link else ""
        say(f"{one.name}{' (prefill)' if i < asked.prefill else ''}: {one.facts.isa}, "
            f"{plan.total_bytes / 1e6:.0f} MB planned, {1 / speeds.prompt:.0f} prompt tok/s, "
            f"{1 / speeds.decode:.0f} tok/s{link}.")
    return RemoteModel(where, list(found), settings["queue"], say, lambda: ray.end(found), options["weights"],
                       options["group_size"], asked.prefill)
