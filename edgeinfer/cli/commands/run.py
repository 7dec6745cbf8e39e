"""`edgeinfer run`: continue a prompt, or chat on a terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...base.files import open_plain, os_errors
from ...base.process import peak_rss_bytes, process_age_ms
from ...base.strict_json import parse_json
from ...base.text_form import GRAMMAR, JSON_OBJECT, MAX_SOURCE_BYTES, TextForm, schema_form
from ...config import CPU, GenerationConfig
from ...errors import RequestError, UsageError
from ...registry import Reported, agreed, reports
from .. import options
from ..generating import cancelling, reading
from ..output import figures, folded_for_terminal, print_json, say
from ..progress import ProgressLine
from ..reports import streaming
from ..reports.decision import announce, approximation
from ..reports.prediction import MIN_TOKENS, Disturbances, learn_from_run, make_predictor, run_estimate, sentence
from ..reports.run import JSON_FIELDS, run_object, speculation_object

if TYPE_CHECKING:
    from ...engine import Completion
    from ...llm import LLM

__all__ = ["JSON_FIELDS", "run"]
_BEGINNING = 32_768
"""Bytes of standard input that are read before the model is open."""
OPENING = ("ctx", "budget", "threads", "prefill_chunk", "mlock", "recipe", "max_kld", "device", "kv_layout",
           "kv_memory", "state_memory", "split")
"""Options that `LLM` takes as they are given."""


@options.takes("run")
def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="GGUF file or checkpoint directory (converted once into the cache), bundle, ollama:NAME, known name, "
            "or id on the hub.",
        ),
    ] = "demo",
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", show_default=False,
            help="Text to continue, or a message to answer if the model has a chat template. With -, or without PROMPT "
            "in a pipe, standard input is read; without PROMPT on a terminal, a chat starts.",
        ),
    ] = None,
    given: options.Given = options.NOTHING,
) -> int:
    """Continue a text, answer a message, or chat.

    Without PROMPT on a terminal, run starts a chat: /help lists its commands, Ctrl-C stops the answer, Ctrl-D leaves.
    Otherwise the text goes to standard output and one line of statistics to standard error; Ctrl-C stops generation
    within 100 ms, keeps the generated text (finish reason cancelled), and the exit code is 1.

    \b
    Examples:
      edgeinfer run demo "Once upon a time" -n 64 --temp 0
      edgeinfer run model-Q4_K_M.gguf "Name three rivers."
      edgeinfer run ollama:llama3.2
      edgeinfer run ./my-bundle --json --samples 2 < question.txt
      edgeinfer run ./my-bundle "Translate: Guten Morgen!" --beams 4
    """
    text, asked = read_prompt(prompt), request(given)
    asked = options.agreeing(given, {**asked, "beams": options.searching(given)}, chat=text is None)
    beams, samples = asked["beams"], asked["n"]
    techniques = agreed(given.techniques, given.flags, beams)
    check_request(text, asked, given.json)
    weights, group_size = given.stored(model)
    with ProgressLine() as progress:
        from ...llm import LLM

        began = time.perf_counter()
        opened: dict[str, Any] = {name: getattr(given, name) for name in OPENING}
        opened |= dict(
            kv=given.kv_on(given.device or CPU), max_sequences=samples, beams=beams,
            own_tokens=max(given.max_tokens, 1) if beams > 1 else None, mmap=not given.no_mmap,
            weights=weights, group_size=group_size, progress=progress, prefix_file=given.prefix_file,
        )
        llm = LLM(model, **opened, **techniques)
        load_ms = 1000 * (time.perf_counter() - began)
    asked |= {"prompt_cache": given.prompt_cache, "reuse": given.prefix_file is not None}
    with llm:
        announce(llm.runner, llm.choice, approximation(llm.runner, llm.approximated), given.max_kld,
                 quiet=given.json)
        if text is None:
            from ..chat.loop import chat

            return chat(llm, given.system, given.raw, asked)
        text = text.whole(llm.most_prompt_bytes) if isinstance(text, LongInput) else text
        prompt_ids = encode(llm, text, given.system, given.raw)
        return answer(llm, prompt_ids, asked, given.json, not given.no_stats, load_ms)


def request(given: options.Given) -> dict[str, Any]:
    """Return the options of the request."""
    asked = {one.name: getattr(given, one.name) for one in fields(GenerationConfig)
             if hasattr(given, one.name) and one.name not in given.techniques}
    return {**asked, "stop": tuple(given.stop), "logit_bias": parse_bias(given.logit_bias),
            "response_format": read_form(given.json_schema, given.grammar)}


def read_form(schema: str | None, grammar: str | None) -> TextForm | None:
    """Return the form of the answer that a file has; raises `UsageError` for one that cannot be read."""
    if schema is not None and grammar is not None:
        raise UsageError("--json-schema and --grammar exclude each other; use one of them.")
    if schema == "-":
        return TextForm(JSON_OBJECT)
    if (name := schema or grammar) is None:
        return None
    with os_errors(UsageError, f"Cannot read {name}"), open_plain(Path(name)) as file:
        data = file.read(MAX_SOURCE_BYTES + 1)
    if len(data) > MAX_SOURCE_BYTES:
        raise UsageError(f"{name} has more than {MAX_SOURCE_BYTES} bytes, too many for a schema or grammar.")
    try:
        return TextForm(GRAMMAR, data.decode("utf-8")) if schema is None else schema_form(parse_json(data))
    except ValueError as error:
        raise UsageError(f"{name} is not {'UTF-8 text' if schema is None else 'a JSON schema'}: {error}.") from None


def check_request(text: str | LongInput | None, options: dict[str, Any], json: bool) -> None:
    """Refuse values that are wrong for any model; nothing is loaded before."""
    GenerationConfig(**options)
    if text is None and json:
        raise UsageError("--json needs a PROMPT, or a pipe as standard input.")
    for name, flag in (("n", "--samples"), ("beams", "--beams")):
        if text is None and options[name] > 1:
            raise UsageError(f"{flag} needs a PROMPT, or a pipe as standard input.")
    if options["logprobs"] is not None and not json:
        raise UsageError("--logprobs requires --json.")
    if text == "":
        raise RequestError("The prompt is empty; give some text.")


class LongInput:
    """Standard input of which the beginning was read; how much more may follow is known once the model is open."""

    def __init__(self, beginning: bytes):
        self._beginning = beginning

    def whole(self, most_bytes: int) -> str:
        """Return the text; raises `RequestError` if it is longer than any prompt can be, and reads no further."""
        parts, left = [self._beginning], most_bytes + 1 - len(self._beginning)
        while left > 0 and (part := sys.stdin.buffer.read(min(left, _BEGINNING))):
            parts.append(part)
            left -= len(part)
        if left <= 0:
            raise RequestError(f"Standard input has more than {most_bytes} bytes, which no context of this size holds; "
                               "shorten it, or raise --ctx.")
        return _decoded(b"".join(parts))


def read_prompt(prompt: str | None) -> str | LongInput | None:
    """Return the prompt's text, from standard input if it is piped; None starts a chat."""
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
            raise UsageError(f"--logit-bias {pair!r} is not of the form ID=BIAS, as in 15043=-1.5.") from None
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


def answer(llm: LLM, ids: list[int], options: dict[str, Any], json: bool, stats: bool, load_ms: float) -> int:
    """Run one request, print its outcome, and return the exit code."""
    first_ms: list[float] = []
    others, usage, began = Disturbances(), streaming.Usage(llm.runner), time.perf_counter()
    whole = options["n"] > 1 or options["beams"] > 1
    completion = several(llm, ids, options) if whole else streamed(llm, ids, options, not json, first_ms)
    config = llm.runner.config
    disturbed = others.disturbed(time.perf_counter() - began, config.threads or 1)
    fields = reports(Reported("run", llm.runner.config, runner=llm.runner))
    predictor = None if llm.runner.stages else make_predictor(
        llm.path, config, config.threads, llm.runner.isa, llm.plan.stored_bytes, llm.runner.device)
    predicted = run_estimate(predictor, completion)
    if json or stats:
        llm.settle()  # a short run may end before the last page of a large KV pool is there
    if json:
        report = run_object(llm, completion, load_ms, first_ms[0] if first_ms else None)
        print_json({**report, "estimate": predicted, "offload": usage.report(),
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
        statistics = figures(completion, llm.plan, peak_rss_bytes(), llm.runner.device_used_bytes)
        techniques = (field["said"] for field in fields.values() if field)
        for line in filter(None, (statistics, *techniques, sentence(predicted), streaming.line(usage.report()))):
            print(folded_for_terminal(line), file=sys.stderr)
    learn_from_run(predictor, completion, disturbed)
    alone = len(completion.choices) == 1 and completion.score is None and completion.completion_tokens >= MIN_TOKENS
    if llm.choice and not disturbed and completion.plain_tpot_ms and alone:
        from ...llm.strategy import learn

        depth = completion.prompt_tokens + completion.completion_tokens // 2
        if off := learn(llm.runner.bundle, llm.choice, 1000 / completion.plain_tpot_ms, depth):
            say(off)
    return 1 if completion.finish_reason == "cancelled" else 0


def several(llm: LLM, ids: list[int], options: dict[str, Any]) -> Completion:
    """Run a request of which no text is there before the end: several samples, beams."""
    with cancelling(llm.cancel), ProgressLine() as progress:
        return llm.complete(ids, **options, progress=reading(llm, ids, progress))


def streamed(llm: LLM, ids: list[int], options: dict[str, Any], show: bool, first_ms: list[float]) -> Completion:
    """Run a request for one sample; `first_ms` receives the age of the process when the first text was there."""
    with cancelling(llm.cancel) as cancelled, ProgressLine() as progress:
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
