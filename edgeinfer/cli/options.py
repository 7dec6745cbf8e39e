"""Arguments and flags that mean the same in every command, each with its environment variable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Optional

import typer

from .. import technique
from ..config import (
    CPU,
    DEFAULT_DRAFT_TOKENS,
    DEVICES,
    GROUP_SIZES,
    KV_LAYOUTS,
    KV_TYPES,
    SAMPLING,
    SPECULATIONS,
    WEIGHT_TYPES,
    Recipe,
    RuntimeConfig,
)
from ..errors import UsageError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Bundle, checkpoint directory or GGUF file (these are converted once into the cache), ollama:NAME, known "
        "name, or hub id.",
        show_default=False,
    ),
]
Converted = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Bundle directory, or what was converted into the cache before: checkpoint directory, known name, or hub "
             "id. Nothing is converted here.",
        show_default=False,
    ),
]


def option(*flags: str, metavar: str | None = None, help: str) -> Any:
    """Declare an option that has the same meaning, and the environment variable of its long flag, in every command."""
    variable = "EDGEINFER_" + flags[-1].lstrip("-").replace("-", "_").upper()
    return typer.Option(*flags, envvar=variable, metavar=metavar, help=help)


Json = Annotated[bool, option("--json", help="Print one JSON object on standard output, and nothing else.")]
Ctx = Annotated[int | None, option(
    "-c", "--ctx", metavar="TOKENS",
    help="Most tokens of prompt and answer together.  [default: the model's, at most 4096]")]
Threads = Annotated[int | None, option(
    "-t", "--threads", metavar="N",
    help="Worker threads.  [default: physical cores that this process may use, or one in small models]")]
Kv = Annotated[str, option("--kv", metavar="|".join(KV_TYPES), help="Type of the KV cache.")]
Budget = Annotated[str | None, option(
    "--budget", metavar="SIZE",
    help="Most memory of the whole process, such as 4GiB, 500MB or a number of bytes.  [default: what the system can "
         "give now]")]
Device = Annotated[str | None, option(
    "--device", metavar="NAME",
    help="Known device, or a profile's TOML file; 'edgeinfer devices' lists them.  [default: this machine, probed]")]
PlanOn = Annotated[str | None, option(
    "--device", metavar="NAME",
    help="Known device, or a profile's TOML file; 'edgeinfer devices' lists them. Of this machine cuda, onnx-cpu "
         "and auto, as for run.  [default: this machine, probed]")]
RunOn = Annotated[str, typer.Option(
    "--device", metavar="|".join(DEVICES), show_default=False,
    help="Who runs the model: our own kernels, or onnxruntime's CUDA or CPU provider; auto takes cuda where it "
         "works.  [default: cpu]")]
KvLayout = Annotated[str | None, typer.Option(
    "--kv-layout", metavar="|".join(KV_LAYOUTS), show_default=False,
    help="How onnxruntime's devices keep KV: a slot for each sequence, or pages that sequences share (cuda).  "
         "[default: slots]")]
Mlock = Annotated[bool, option("--mlock", help="Lock the weights into memory, so that the system cannot drop them.")]
NoMmap = Annotated[bool, option("--no-mmap", help="Copy the weights into memory instead of mapping them.")]
DEFAULT_RECIPE = str(Recipe())
Passes = Annotated[str, option(
    "--recipe", metavar="PASSES",
    help="Passes over the model's graph, as name:key=value,... joined by +; none applies none.")]
MaxKld = Annotated[float, option(
    "--max-kld", metavar="NATS",
    help="What of --sparse and --head is not given is approximated where exactly that was measured to diverge by so "
         "much at most; 0 leaves the model exact.")]
Draft = Annotated[str | None, option(
    "--draft", metavar="MODEL",
    help="Smaller model with the same tokenizer, which guesses tokens that the model checks.")]
Speculate = Annotated[str, option(
    "--speculate", metavar="|".join(SPECULATIONS),
    help="Who guesses tokens that are checked together where that is faster, with the same text; auto is the draft "
         "model, else what followed the last tokens where they stood before.")]
DraftTokens = Annotated[int, option("--draft-tokens", metavar="N", help="Most guesses that are checked together.")]
DRAFT_TOKENS = DEFAULT_DRAFT_TOKENS
MaxTokens = Annotated[int, option("-n", "--max-tokens", metavar="N", help="Most tokens to generate.")]
Temperature = Annotated[float, option("--temp", metavar="T", help="Temperature; 0 is greedy.")]
TopK = Annotated[int, option("--top-k", metavar="K", help="Keep the K likeliest; 0 keeps all.")]
TopP = Annotated[float, option(
    "--top-p", metavar="P", help="Keep the likeliest that reach P together; 1 keeps all.")]
MinP = Annotated[float, option(
    "--min-p", metavar="P", help="Drop tokens less likely than P times the likeliest; 0 keeps all.")]
Seed = Annotated[int | None, option(
    "--seed", metavar="N", help="Seed of the random choices.  [default: drawn, and reported]")]
Stop = Annotated[list[str] | None, typer.Option(
    "--stop", metavar="TEXT", show_default=False,
    help="End before this text; may be repeated.  [env var: EDGEINFER_STOP, one text]")]
Beams = Annotated[int, option(
    "--beams", metavar="K",
    help="Beam search with K beams, 2 to 16, instead of sampling, and --samples N gives the N best; 1 is none.")]
LengthPenalty = Annotated[float, option(
    "--length-penalty", metavar="X",
    help="Of beams: log-probabilities are divided by the number of tokens to this power; more favours longer texts.")]
Samples = Annotated[int, typer.Option(metavar="N", help="Independent answers to one prompt.")]
PrefillChunk = Annotated[int, typer.Option(metavar="TOKENS", help="Most prompt tokens processed at a time.")]
WEIGHTS, GROUPS = "|".join(WEIGHT_TYPES), "|".join(map(str, GROUP_SIZES))
Weights = Annotated[str | None, typer.Option(
    metavar=WEIGHTS, help="Type of the weights.  [default: the bundle's, else q4]")]
GroupSize = Annotated[int | None, typer.Option(
    metavar=GROUPS, help="Weights per scale.  [default: the bundle's, else 32]")]

ConvertTo = Annotated[str | None, typer.Option(
    "--weights", metavar=WEIGHTS,
    help="Type of weights that a checkpoint or GGUF file is converted to.  [default: q4; of GGUF each as it is]")]
ConvertGroups = Annotated[int | None, typer.Option(
    "--group-size", metavar=GROUPS, help="Weights per scale, where it is converted.  [default: 32]")]


Command = Callable[..., Any]
Techniques = dict[str, Any]
"""Values of the options of all techniques; see `takes_techniques`."""
NO_TECHNIQUES: Techniques = {}
"""Default of such a parameter."""


def of_technique(one: technique.Option) -> Any:
    """Return the annotation of a parameter for an option of a technique."""
    kind = one.kind if one.default is not None else Optional[one.kind]  # noqa: UP045
    return Annotated[kind, option(one.flag, metavar=one.metavar, help=one.help)]


def takes_techniques(name: str) -> Callable[[Command], Command]:
    """Give a command, by its name, the options of all techniques where its parameter `techniques` stands.

    The command is called with their values by name in that parameter.
    """
    known = tuple(technique.options(name))

    def with_options(function: Command) -> Command:
        signature = inspect.signature(function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for one in signature.parameters.values():
            parameters += [one] if one.name != "techniques" else [
                inspect.Parameter(each.name, one.kind, default=each.default, annotation=of_technique(each))
                for each in known]

        @wraps(function)
        def command(**given: Any) -> Any:
            values = {each.name: given.pop(each.name) for each in known}
            context = next((one for one in given.values() if isinstance(one, typer.Context)), None)
            for each in known:
                if each.of and values[each.of] in (None, "off") and context and from_environment(context, each.name):
                    values[each.name] = None
            return function(**given, techniques=values)

        del command.__wrapped__  # typer would ask it for its parameters
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return with_options


def from_environment(command: typer.Context, name: str) -> bool:
    """Return whether a value came from its variable: what is set for all commands contradicts no flag of one."""
    return _source(command, name) == "ENVIRONMENT"


def agreeing(command: typer.Context, asked: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Return the options of a request without those that stand in variables, or are defaults, and contradict flags.

    Beams and settings of sampling exclude each other, and a chat shows its text as it grows.
    """
    flags = {"temperature": "temp", "repetition_penalty": "repeat_penalty"}
    given = {name for name in asked if _source(command, flags.get(name, name)) == "COMMANDLINE"}
    sampled = [name for name in SAMPLING if name in given and (name, asked[name]) != ("temperature", 0)]
    if "beams" not in given and (chat or sampled):
        asked = {**asked, "beams": 1}
    if asked["beams"] == 1:
        return {name: value for name, value in asked.items() if name != "length_penalty" or name in given}
    if sampled:
        flag = "--" + flags.get(sampled[0], sampled[0]).replace("_", "-")
        raise UsageError(f"{flag} {asked[sampled[0]]} is about sampling, and --beams takes the likeliest texts "
                         "instead; leave one of them out.")
    return {name: value for name, value in asked.items() if name not in SAMPLING}


def searching(command: typer.Context, beams: int) -> int:
    """Return the beams; where a variable asks for them, they give way to flags that say who guesses."""
    guessed = any(_source(command, name) == "COMMANDLINE" and command.params[name] not in (None, "auto", "off")
                  for name in ("speculate", "draft"))
    return 1 if guessed and _source(command, "beams") != "COMMANDLINE" else beams


def guessing(command: typer.Context, speculate: str, draft: str | None, beams: int) -> tuple[str, str | None]:
    """Return who guesses and the draft model; of what excludes each other flags are refused, and variables give way."""
    chosen, drafted = (_source(command, name) == "COMMANDLINE" for name in ("speculate", "draft"))
    if beams > 1:
        if drafted and draft is not None:  # and --beams is a flag, see `searching`
            raise UsageError("--draft is given, and beam search checks no guesses; leave one of them out.")
        return speculate if chosen and speculate != "auto" else "off", None
    if draft is None or speculate in ("auto", "draft") or speculate not in SPECULATIONS:
        return speculate, draft
    if chosen and drafted:
        raise UsageError(f"--speculate {speculate} needs no draft model, and --draft is given; leave one of them out.")
    return ("auto", draft) if drafted else (speculate, None)


def kv_on(command: typer.Context, device: str, kv: str) -> str | None:
    """Return the type of the KV cache that was asked for; None for what a device other than cpu takes by itself, where
    nobody asked: the default of cpu, also where it stands in the variable, is none that others have.
    """
    asked = device == CPU or kv != RuntimeConfig.kv or _source(command, "kv") == "COMMANDLINE"
    return kv if asked else None


def _source(command: typer.Context, name: str) -> str:
    source = command.get_parameter_source(name)
    return source.name if source else ""
