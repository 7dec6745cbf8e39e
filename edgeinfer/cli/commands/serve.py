"""`edgeinfer serve`: models over HTTP, with the APIs of OpenAI, ollama and Anthropic."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ... import registry
from ...base.files import open_plain
from ...base.units import format_size
from ...base.validation import checked
from ...errors import UsageError
from ...registry import RULES
from .. import options
from ..help import REST
from ..output import say
from ..replicas import checked_prefill, open_replicas, replicas_asked
from ..served import open_served, short_name
from ..split import open_split
from .plan import SERVED_SEQUENCES

if TYPE_CHECKING:
    from ...server import Models, ServerConfig

SHARING = 4
"""Sequences of each of several models that run at once, unless --max-sequences says otherwise."""
MAX_KEY_FILE = 64 << 10
FLAGS = {"request_seconds": "--request-timeout", "read_seconds": "--read-timeout", "drain_seconds": "--drain",
         "keep_alive_seconds": "--keep-alive"}
"""Flags of settings that have another name."""
LIMITS, ACCESS, CLUSTER = "Limits", "Access", "Replicas"


def _limit(flag: str, metavar: str, help: str) -> Any:
    return options.option(flag, metavar=metavar, help=help, group=REST + LIMITS)


@options.takes("serve")
def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="GGUF file, checkpoint directory, bundle, ollama:NAME, known name, or id "
                       "on the hub; the model of requests that name none."),
    ] = "demo",
    host: Annotated[str, options.option("--host", metavar="ADDRESS", help="Address to listen on.", group=ACCESS,
                                        variable="EDGEINFER_HOST")] = "127.0.0.1",
    port: Annotated[int, options.option("--port", "-p", metavar="N", help="Port to listen on; 0 takes any free one.",
                                        group=ACCESS, variable="EDGEINFER_PORT")] = 8080,
    name: Annotated[str | None, options.option(
        "--name", metavar="NAME", help="Name of MODEL in requests.  [default: the end of MODEL]", group=ACCESS,
        show_default=False)] = None,
    others: Annotated[list[str] | None, options.option(
        "--model", metavar="NAME=MODEL", help="Serve another model, which is opened when a request names it and closed "
        "when its memory is needed; may be repeated.", group=ACCESS, show_default=False)] = None,
    api_key: Annotated[list[str] | None, options.option(
        "--api-key", metavar="KEY", help="Serve only requests with this key; may be repeated.  "
        "[env var: EDGEINFER_API_KEY, one key]", group=ACCESS, show_default=False)] = None,
    api_key_file: Annotated[str | None, options.option(
        "--api-key-file", metavar="FILE", help="Read keys from a file, one per line.", group=ACCESS,
        show_default=False)] = None,
    insecure: Annotated[bool, options.option(
        "--insecure", help="Allow requests from other machines without a key.", group=ACCESS)] = False,
    cors_origin: Annotated[list[str] | None, options.option(
        "--cors-origin", metavar="URL", help="Let web pages of this origin use the server; may be repeated.",
        group=ACCESS, show_default=False)] = None,
    max_sequences: Annotated[int | None, options.option(
        "--max-sequences", metavar="N", help="Maximum number of sequences that run at once, 1 to 64.  [default: "
        f"{SERVED_SEQUENCES}, or {SHARING} of each model with --model]", group=LIMITS, show_default=False)] = None,
    max_queue: Annotated[int, _limit("--max-queue", "N", "Maximum number of requests that wait for a model.")] = 256,
    max_requests: Annotated[int, _limit("--max-requests", "N", "Maximum number of concurrent requests per key.")] = 64,
    max_samples: Annotated[int, _limit("--max-samples", "N", "Maximum number of texts per request.")] = 16,
    max_stops: Annotated[int, _limit("--max-stops", "N", "Maximum number of stop strings per request.")] = 16,
    max_body: Annotated[str, _limit("--max-body", "SIZE", "Maximum size of a request.")] = "1MiB",
    max_file: Annotated[str, _limit("--max-file", "SIZE", "Maximum size of an uploaded file (/v1/files).")] = "16MiB",
    batch_dir: Annotated[str, options.option(
        "--batch-dir", metavar="DIR", help="Folder of files and batches (/v1/files, /v1/batches).  [default: one of "
        "the cache, by the name of MODEL]", group=REST + LIMITS, show_default=False)] = "",
    request_timeout: Annotated[float, _limit("--request-timeout", "SECONDS", "Time limit of a request, after which it "
                                             "returns the text so far.")] = 600.0,
    read_timeout: Annotated[float, _limit("--read-timeout", "SECONDS", "Time limit for receiving the headers of a "
                                          "request, and then its body.")] = 30.0,
    drain: Annotated[float, _limit("--drain", "SECONDS", "Time for running requests to finish when the server shuts "
                                   "down.")] = 30.0,
    keep_alive: Annotated[float, _limit("--keep-alive", "SECONDS", "Idle time after which a model of --model is "
                                        "closed.")] = 300.0,
    replicas: Annotated[str | None, options.option(
        "--replicas", metavar="N|auto", help="Run the model in N processes, on the nodes of --ray in turns; auto is "
        "one on each node.", group=REST + CLUSTER, show_default=False)] = None,
    ray: Annotated[str | None, options.option(
        "--ray", metavar="ADDRESS|local", help="Run the replicas, or the parts of --split, on the nodes of a Ray "
        "cluster; local starts one of this machine and ends it.  [default: local, with --replicas]",
        group=REST + CLUSTER,
        show_default=False)] = None,
    prefill: Annotated[int | None, options.option(
        "--prefill", metavar="N", help="With --decode: number of replicas that compute prompts when they are faster "
        "than those that decode.", group=REST + CLUSTER, show_default=False)] = None,
    decode: Annotated[int | None, options.option(
        "--decode", metavar="N", help="With --prefill: number of replicas that decode.", group=REST + CLUSTER,
        show_default=False)] = None,
    prefill_device: Annotated[str | None, options.option(
        "--prefill-device", metavar="DEVICE", help="With --prefill: a device of onnxruntime that its replicas run on, "
        "such as cuda or onnx-cpu. Texts then differ a little, and the header edgeinfer-arithmetic says so.  "
        "[default: cpu]", group=REST + CLUSTER, show_default=False)] = None,
    log_prompts: Annotated[bool, options.option("--log-prompts", help="Write prompts and answers to the log.",
                                                group=REST + LIMITS)] = False,
    given: options.Given = options.NOTHING,
) -> int:
    """Serve models over HTTP.

    Requests run together, as many as the KV pool has room for; without --kv-memory it gets the rest of the budget
    ('edgeinfer plan --serve' shows it). The server listens on this machine alone, and on other addresses only with a
    key. It answers on the paths of OpenAI's API (/v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings),
    of ollama's (/api/chat, /api/generate) and of Anthropic's (/v1/messages), and has a page to chat at /. Each request
    is one line of JSON on standard error. Ctrl-C and SIGTERM let running requests end; the second one ends at once.

    \b
    Examples:
      edgeinfer serve model-Q4_K_M.gguf
      edgeinfer serve ./my-bundle --model small=demo --budget 8GiB
      edgeinfer serve ./my-bundle --split auto --ray 192.168.1.10:6379
      edgeinfer serve ./my-bundle --host 0.0.0.0 --api-key-file keys.txt
    """
    registry.check_served(given.techniques)
    config = _config(
        host=host, port=port, api_keys=_keys(api_key, api_key_file), insecure=insecure,
        cors_origins=tuple(cors_origin or ()), max_queue=max_queue, max_requests=max_requests, max_samples=max_samples,
        max_stops=max_stops, max_body=checked("--max-body", max_body, RULES["budget"]), batch_dir=batch_dir,
        max_file=checked("--max-file", max_file, RULES["budget"]), request_seconds=request_timeout,
        read_seconds=read_timeout, drain_seconds=drain, keep_alive_seconds=keep_alive, log_prompts=log_prompts)
    sources = _sources(model, name, others or [])
    sequences = max_sequences
    if sequences is None:
        sequences = SERVED_SEQUENCES if len(sources) == 1 else SHARING
    asked = replicas_asked(replicas, ray, prefill, decode, prefill_device, given, len(sources))
    sequences = int(checked("--max-sequences", sequences, RULES["max_sequences"]))
    if asked and asked.device:
        checked_prefill(asked.device, model, given)
    if given.split is not None and ray is None:
        return _serve(config, sources, given, sequences, open_split)
    if asked is None and ray is None:
        return _serve(config, sources, given, sequences)
    from ...cluster import connected

    if asked is None:
        with connected(str(ray)) as cluster:
            return _serve(config, sources, given, sequences, partial(open_split, ray=cluster))
    with connected(asked.address, say=say) as cluster:
        return _serve(config, sources, given, sequences, partial(open_replicas, cluster, asked))


def check_packages() -> None:
    """Raise `UsageError` where the packages that a server needs are missing."""
    try:
        import msgspec  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f"The server needs the package {error.name}; install it with: "
                         "pip install 'edgeinfer[server]'") from None


def _config(**settings: Any) -> ServerConfig:
    """Return the settings of the server."""
    check_packages()
    from ...server import ServerConfig

    try:
        return ServerConfig(**settings)
    except UsageError as error:
        field, _, rest = str(error).partition(" ")
        raise UsageError(f"{FLAGS.get(field) or f'--{field.replace(chr(95), chr(45))}'} {rest}"
                         if field in settings else str(error)) from None


def _keys(given: list[str] | None, file: str | None) -> tuple[str, ...]:
    """Return the keys of flags, the environment and a file, which may have empty lines and comments."""
    keys = list(given or [])
    if variable := os.environ.get("EDGEINFER_API_KEY"):
        keys.append(variable)
    if file is not None:
        try:
            with open_plain(Path(file)) as opened:
                data = opened.read(MAX_KEY_FILE + 1)
            lines = data.decode("utf-8").splitlines() if len(data) <= MAX_KEY_FILE else None
        except OSError as error:
            raise UsageError(f"Cannot read the keys in {file}: {error.strerror or error}.") from None
        except UnicodeDecodeError:
            raise UsageError(f"The keys in {file} are not text; write one key on each line.") from None
        found = [line.strip() for line in lines or () if line.strip() and not line.startswith("#")]
        if not found:
            raise UsageError(f"{file} has no keys, or more than {format_size(MAX_KEY_FILE)}; write one on each line.")
        keys += found
    return tuple(dict.fromkeys(keys))


def _sources(model: str, name: str | None, others: list[str]) -> dict[str, str]:
    """Return the models by the names that requests use."""
    sources = {name or short_name(model): model}
    for one in others:
        other, separator, source = one.partition("=")
        if not separator or not other or not source:
            raise UsageError(f"--model is {one!r}; write it as NAME=MODEL.")
        if other in sources:
            raise UsageError(f"There are two models named {other!r}; give each a name of its own (--name, --model).")
        sources[other] = source
    return sources


def _serve(config: ServerConfig, sources: dict[str, str], given: options.Given, sequences: int,
           opening: Callable[..., Any] | None = None) -> int:
    from ...server import Models, Server, bound, serve
    from ..reports.plan_page import plan_page

    techniques = registry.agreed(given.techniques, given.flags, 1)
    with bound(config.host, config.port) as listener:
        opener = partial(opening or open_served, given=given, techniques=techniques, sequences=sequences,
                         queue=config.max_queue, alone=len(sources) == 1)
        models = Models(sources, opener, given.budget, config.keep_alive_seconds)
        host, port = listener.getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        server = Server(config, models, planner=plan_page)
        serve(server, listener, lambda: _announce(where, models, config))
    return 0


def _announce(where: str, models: Models, config: ServerConfig) -> None:
    """Describe the server in five lines."""
    one = models.first
    llm, runner = one.model, one.model.runner
    plan, others = llm.plan, [name for name in models.all if name != one.name]
    tokens = plan.kv_blocks * runner.block_tokens
    kv = format_size(plan.region("kv").nbytes) if any(each.name == "kv" for each in plan.regions) else "on the device"
    say(f"Serving {one.name}{f' and, on demand, {chr(44).join(others)}' if others else ''} at {where}")
    say(f"Memory: {format_size(models.planned_bytes)} planned, with a KV pool of {tokens} tokens ({kv}).")
    say(f"Prefix cache: {'in the KV pool' if runner.caches_prefixes else 'none, this model cannot share beginnings'}.")
    say(f"Limits: {runner.config.max_sequences} sequences at once, {one.room} tokens each, {config.max_queue} requests "
        f"waiting, {format_size(config.max_body)} a request.")
    say(f"Keys: {len(config.api_keys) or 'none'}; " + ("only programs of this machine can connect."
                                                       if config.on_loopback else "other machines can connect."))
