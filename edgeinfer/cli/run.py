"""`edgeinfer run`: continue a prompt, or chat on a terminal."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..checks import PATH, checked
from ..config import CPU, MAX_KLD, GenerationConfig, RuntimeConfig
from ..errors import RequestError, UsageError
from ..process import peak_rss_bytes, process_age_ms
from ..technique import Reported, reports
from . import options, streaming
from .decision import announce, approximation
from .output import figures, print_json, say
from .prediction import LEAST_TOKENS, Disturbances, learn_from_run, make_predictor, run_estimate, sentence
from .progress import ProgressLine
from .report import JSON_FIELDS, run_object, speculation_object

if TYPE_CHECKING:
    from ..engine import Completion
    from ..llm import LLM

__all__ = ["JSON_FIELDS", "run"]
_BEGINNING = 32_768
"""Bytes of standard input that are read before the model is open."""
LONG_PROMPT = 1_000_000_000
"""Tokens times bytes of weights from which on a prompt may take seconds, on the slowest boards."""
_GENERATION, _RUNTIME = GenerationConfig(), RuntimeConfig()


@options.takes_techniques("run")
def run(
    command: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Bundle, checkpoint directory or GGUF file (converted once into the cache), ollama:NAME, known name, "
            "or hub id.",
        ),
    ] = "demo",
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", show_default=False,
            help="Text to continue, or message to answer where the model has a chat template. - is standard input, as "
            "is no PROMPT in a pipe; no PROMPT on a terminal chats.",
        ),
    ] = None,
    max_tokens: options.MaxTokens = _GENERATION.max_tokens,
    ctx: options.Ctx = None,
    threads: options.Threads = None,
    temp: options.Temperature = _GENERATION.temperature,
    top_k: options.TopK = _GENERATION.top_k,
    top_p: options.TopP = _GENERATION.top_p,
    min_p: options.MinP = _GENERATION.min_p,
    seed: options.Seed = None,
    stop: options.Stop = None,
    kv: options.Kv = _RUNTIME.kv,
    budget: options.Budget = None,
    weights: options.ConvertTo = None,
    group_size: options.ConvertGroups = None,
    mlock: options.Mlock = False,
    no_mmap: options.NoMmap = False,
    recipe: options.Passes = options.DEFAULT_RECIPE,
    techniques: options.Techniques = options.NO_TECHNIQUES,
    max_kld: options.MaxKld = MAX_KLD,
    speculate: options.Speculate = "auto",
    draft_tokens: options.DraftTokens = options.DRAFT_TOKENS,
    draft: options.Draft = None,
    device: options.RunOn = CPU,
    kv_layout: options.KvLayout = None,
    repeat_penalty: Annotated[
        float, typer.Option(metavar="X", help="Makes tokens seen before less likely; 1 is off.")
    ] = _GENERATION.repetition_penalty,
    presence_penalty: Annotated[
        float, typer.Option(metavar="X", help="Subtracted once from the logit of each generated token.")
    ] = _GENERATION.presence_penalty,
    frequency_penalty: Annotated[
        float, typer.Option(metavar="X", help="Subtracted from a token's logit for each time it was generated.")
    ] = _GENERATION.frequency_penalty,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", show_default=False, help="Added to a token's logit; may be repeated."),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="K", help="With --json: log-probabilities of each token and of the K likeliest."),
    ] = None,
    samples: options.Samples = _GENERATION.n,
    beams: options.Beams = _GENERATION.beams,
    length_penalty: options.LengthPenalty = _GENERATION.length_penalty,
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT as it stands, without chat template.")] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message, for models with a chat template.")
    ] = None,
    prompt_cache: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Start from the prompt saved in FILE as far as both agree; save this one."),
    ] = None,
    prefill_chunk: options.PrefillChunk = _RUNTIME.prefill_chunk,
    no_stats: Annotated[bool, typer.Option("--no-stats", help="Do not print the line of statistics.")] = False,
    json: options.Json = False,
) -> int:
    """Continue a text, answer a message, or chat.

    On a terminal without PROMPT this is a chat: /help lists its commands, Ctrl-C stops an answer, Ctrl-D leaves. In all
    other cases the text goes to standard output and one line of statistics to standard error; Ctrl-C stops within
    100 ms, what there is counts (finish reason cancelled), and the exit code is 1.

    \b
    Examples:
      edgeinfer run demo "Once upon a time" -n 64 --temp 0
      edgeinfer run ./my-bundle < question.txt
      edgeinfer run ./my-bundle "Name three rivers." --json --samples 2
      edgeinfer run ./my-bundle "Translate: Guten Morgen!" --beams 4
    """
    text, beams = read_prompt(prompt), options.searching(command, beams)
    asked: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temp, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed,
        "stop": stop_strings(stop), "repetition_penalty": repeat_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "logit_bias": parse_bias(logit_bias or []), "logprobs": logprobs,
        "n": samples, "speculate": speculate, "draft_tokens": draft_tokens, "beams": beams,
        "length_penalty": length_penalty,
    }
    asked = options.agreeing(command, asked, chat=text is None)
    beams = asked["beams"]
    speculate, draft = options.guessing(command, speculate, draft, beams)
    asked["speculate"] = speculate
    check_request(text, asked, json)
    if prompt_cache is not None:
        checked("prompt_cache", prompt_cache, PATH)
    with ProgressLine() as progress:
        from ..llm import LLM

        began = time.perf_counter()
        opened: dict[str, Any] = dict(  # the command line's choices are checked when they are used
            ctx=ctx, budget=budget, kv=options.kv_on(command, device, kv), threads=threads,
            prefill_chunk=prefill_chunk, max_sequences=samples, beams=beams,
            own_tokens=max(max_tokens, 1) if beams > 1 else None, mlock=mlock, mmap=not no_mmap,
            recipe=recipe, **techniques, max_kld=max_kld, speculate=speculate,
            draft_tokens=draft_tokens, draft=draft, device=device,
            kv_layout=kv_layout, weights=weights, group_size=group_size, progress=progress,
        )
        llm = LLM(model, **opened)
        load_ms = 1000 * (time.perf_counter() - began)
    with llm:
        announce(llm.runner, llm.choice, approximation(llm.runner, llm.approximated), max_kld, quiet=json)
        if text is None:
            from .chat import chat

            return chat(llm, system, raw, {**asked, "prompt_cache": prompt_cache})
        text = text.whole(llm.most_prompt_bytes) if isinstance(text, LongInput) else text
        prompt_ids = encode(llm, text, system, raw)
        return answer(llm, prompt_ids, {**asked, "prompt_cache": prompt_cache}, json, not no_stats, load_ms)


def check_request(text: str | LongInput | None, options: dict[str, Any], json: bool) -> None:
    """Refuse what is wrong whatever the model; nothing is loaded before."""
    GenerationConfig(**options)
    if text is None and json:
        raise UsageError("--json needs a PROMPT, or a pipe as standard input.")
    for name, flag in (("n", "--samples"), ("beams", "--beams")):
        if text is None and options[name] > 1:
            raise UsageError(f"{flag} needs a PROMPT, or a pipe as standard input.")
    if options["logprobs"] is not None and not json:
        raise UsageError("--logprobs is part of the JSON report; add --json.")
    if text == "":
        raise RequestError("The prompt is empty; give some text.")


class LongInput:
    """Standard input of which the beginning was read; how much more may follow is known once the model is open."""

    def __init__(self, beginning: bytes):
        self._beginning = beginning

    def whole(self, most_bytes: int) -> str:
        """Return the text; raises `RequestError` where it is longer than any prompt can be, and reads no further."""
        parts, left = [self._beginning], most_bytes + 1 - len(self._beginning)
        while left > 0 and (part := sys.stdin.buffer.read(min(left, _BEGINNING))):
            parts.append(part)
            left -= len(part)
        if left <= 0:
            raise RequestError(f"Standard input has more than {most_bytes} bytes, which no context of this size holds; "
                               "shorten it, or raise --ctx.")
        return _decoded(b"".join(parts))


def read_prompt(prompt: str | None) -> str | LongInput | None:
    """Return the prompt's text, from standard input where it comes from there; None chats."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read(_BEGINNING) if sys.stdin is not None else b""
    return _decoded(data) if len(data) < _BEGINNING else LongInput(data)


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8").rstrip("\r\n")  # as a shell does when it substitutes a command
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input is not UTF-8 text (byte {error.start}).") from None


def stop_strings(given: list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of the flags, else the one of the environment."""
    variable = os.environ.get("EDGEINFER_STOP")
    return tuple(given or ([variable] if variable else []))


def parse_bias(pairs: list[str]) -> dict[int, float]:
    """Return logit biases by token id from texts like ``15043=-1.5``."""
    biases = {}
    for pair in pairs:
        token_id, equals, value = pair.partition("=")
        try:
            if not equals:
                raise ValueError
            biases[int(token_id)] = float(value)
        except ValueError:
            raise UsageError(f"--logit-bias {pair!r} cannot be read; write ID=BIAS, as in 15043=-1.5.") from None
    return biases


def encode(llm: LLM, text: str, system: str | None, raw: bool) -> list[int]:
    """Return the tokens of a prompt, through the chat template if there is one and --raw is not given."""
    if raw or llm.chat_template is None:
        if system is not None:
            why = "--raw leaves the chat template out" if raw else f"{llm.name} has no chat template"
            raise UsageError(f"--system cannot be used: {why}; put the instruction into PROMPT.")
        return llm.prompt_ids(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_ids([*messages, {"role": "user", "content": text}])


@contextmanager
def cancelling(llm: LLM) -> Iterator[threading.Event]:
    """Let Ctrl-C end the running request; the event says whether it did. A second Ctrl-C ends the program."""
    cancelled = threading.Event()
    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as after nohup: it stays so
    if deaf or threading.current_thread() is not threading.main_thread():  # only that one receives signals
        yield cancelled
        return

    def cancel(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cancelled.set()
        llm.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield cancelled
    finally:
        signal.signal(signal.SIGINT, before)


def answer(llm: LLM, ids: list[int], options: dict[str, Any], json: bool, stats: bool, load_ms: float) -> int:
    """Run one request, print its outcome, and return the exit code."""
    first_ms: list[float] = []
    others, reading, began = Disturbances(), streaming.Usage(llm.runner), time.perf_counter()
    whole = options["n"] > 1 or options["beams"] > 1
    completion = several(llm, ids, options) if whole else streamed(llm, ids, options, not json, first_ms)
    config = llm.runner.config
    disturbed = others.disturbed(time.perf_counter() - began, config.threads or 1)
    fields = reports(Reported("run", llm.runner.config, runner=llm.runner))
    predictor = make_predictor(llm.path, config, config.threads, llm.runner.isa, llm.plan.stored_bytes,
                               llm.runner.device)
    predicted = run_estimate(predictor, completion)
    if json or stats:
        llm.settle()  # a short run may end before the last page of a large KV pool is there
    if json:
        report = run_object(llm, completion, load_ms, first_ms[0] if first_ms else None)
        print_json({**report, "estimate": predicted, "offload": reading.report(),
                    "quality": approximation(llm.runner, llm.approximated),
                    "decision": llm.choice and llm.choice.report(),
                    "speculation": speculation_object(completion.speculation),
                    **fields})
    elif whole and options["n"] == 1:
        print(completion.text, flush=True)
    elif whole:
        for choice in completion.choices:
            print(f"--- {choice.index + 1} of {len(completion.choices)}\n{choice.text}", flush=True)
    if stats and not json:
        print(figures(completion, llm.plan, peak_rss_bytes(), llm.runner.device_used_bytes), file=sys.stderr)
        techniques = (field["said"] for field in fields.values() if field)
        for line in filter(None, (*techniques, sentence(predicted), streaming.line(reading.report()))):
            print(line, file=sys.stderr)
    learn_from_run(predictor, completion, disturbed)
    alone = len(completion.choices) == 1 and completion.score is None and completion.completion_tokens >= LEAST_TOKENS
    if llm.choice and not disturbed and completion.plain_tpot_ms and alone:
        from ..choice import learn

        depth = completion.prompt_tokens + completion.completion_tokens // 2
        if off := learn(llm.runner.bundle, llm.choice, 1000 / completion.plain_tpot_ms, depth):
            say(off)
    return 1 if completion.finish_reason == "cancelled" else 0


def reading(llm: LLM, ids: list[int], progress: ProgressLine) -> ProgressLine | None:
    """Return what is told of the prompt; None for one that no machine reads for seconds, not to delay its answer."""
    return progress if len(ids) * llm.runner.bundle.weights_bytes >= LONG_PROMPT else None


def several(llm: LLM, ids: list[int], options: dict[str, Any]) -> Completion:
    """Run a request of which no text is there before the end: several samples, beams."""
    with cancelling(llm), ProgressLine() as progress:
        return llm.complete(ids, **options, progress=reading(llm, ids, progress))


def streamed(llm: LLM, ids: list[int], options: dict[str, Any], show: bool, first_ms: list[float]) -> Completion:
    """Run a request for one sample; `first_ms` receives the age of the process when the first text was there."""
    with cancelling(llm) as cancelled, ProgressLine() as progress:
        stream = llm.stream(ids, **options, progress=reading(llm, ids, progress))
        for piece in stream:
            if not first_ms:
                first_ms.append(process_age_ms())
            if show:
                print(piece, end="", flush=True)
            if cancelled.is_set():
                stream.close()
    if show:
        print(flush=True)
    return stream.completion
