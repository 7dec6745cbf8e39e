"""`edgeinfer eval`: perplexity of a model on a text, and its distance from a reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...base.process import peak_rss_bytes
from ...base.validation import checked
from ...config import AUTO, CPU, DEVICES, KV_TYPES, RuntimeConfig
from ...errors import UsageError
from ...registry import RULES, Reported, Settings, Technique, each, fields, in_use, reports
from ...registry import techniques as all_techniques
from ..options import NOTHING, Given, Model, option, takes
from ..output import print_json, print_table, say
from ..progress import ProgressLine

if TYPE_CHECKING:
    from ...backends import Provider
    from ...models import Storage
    from ...quality.evaluate import Evaluation
    from ...runner import Runner

WINDOW = 512
"""Tokens of a window, where neither it nor the context is given."""
JSON_FIELDS = {
    "eval": {
        "perplexity": "exp of `nll_per_token`",
        "nll_per_token": "mean negative log-likelihood in nats",
        "bits_per_byte": "bits needed for a byte of the text",
        "kld_mean": "mean KL(reference, model) in nats; null without a reference, as the next three",
        "kld_p99": "its 99th percentile",
        "same_top": "share of tokens for which both rank the same token first",
        "reference_perplexity": "of the reference",
        "tokens": "tokens counted",
        "text_bytes": "UTF-8 bytes of their text",
        "setting": "with --decode: the approximations, and the run that they are added to",
        "protocol": "with --decode: how the text was fed",
        "text_changed": "changes made in reading the text, such as line ends; null for none",
        "planned_bytes": "the memory plan's total, both models together",
        "peak_rss_bytes": "as for run",
        **fields("eval"),
    },
}
"""Fields of the JSON object, by command."""


@takes("eval")
def evaluate(
    model: Model,
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", help="Text to evaluate (UTF-8).", show_default=False)
    ],
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="More exact version of the model to compare with.")
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", metavar="TOKENS", show_default=False,
                                 help="Length of the windows that the text is cut into.  [default: --ctx, else 512]")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Maximum number of tokens to count.  [default: all]")
    ] = None,
    max_tokens: Annotated[
        int | None, option("-n", "--max-tokens", metavar="N", help="Former name of --tokens.", hidden=True)
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help=r"Separator of documents, such as \n\n.  [default: form feed]"),
    ] = None,
    decode: Annotated[
        int | None,
        typer.Option("--decode", metavar="P", help="Feed each window as run does: P tokens as the prompt, the rest one "
                                                   "by one; only the rest counts."),
    ] = None,
    reference_kv: Annotated[
        str | None, typer.Option("--reference-kv", metavar="|".join(KV_TYPES), show_default=False,
                                 help="Type of the reference's KV cache.  [default: f32; on cuda f16]")
    ] = None,
    reference_device: Annotated[
        str, typer.Option("--reference-device", metavar="|".join(DEVICES), help="Executor of the reference.")
    ] = CPU,
    given: Given = NOTHING,
) -> None:
    """Measure perplexity on a text, and divergence from a reference.

    Documents, each preceded by the beginning-of-text token if the model has one, form one stream of tokens, which is
    cut into windows that do not overlap; within a window the model predicts each token from those before it. With
    --reference, eval also reports the mean and the 99th percentile of the Kullback-Leibler divergence from the
    reference (in nats), and how often both find the same token most likely. Both models are open at once, within one
    budget; --recipe applies to the model alone.

    Approximations apply to decoded tokens, or to prompts (--lazy); --decode measures them. Without --reference, such a
    run is compared with the same bundle without its approximations, and the result is kept in the cache for --max-kld.

    \b
    Examples:
      edgeinfer eval ./my-bundle --text held_out.txt
      edgeinfer eval ./my-bundle --text held_out.txt --reference ./my-f32-bundle --json
    """
    from ...graph import without_approximations
    from ...models import Storage
    from ...quality.corpus import SEPARATOR, Text, read_stream
    from ...quality.evaluate import evaluate as measure
    from ...quality.measurements import Setting, measured_identity, measurement, remember
    from ...runtime import everywhere

    window, tokens = window_of(given, window), tokens_of(tokens, max_tokens)
    weights, asked = given.stored(model), given.kv_on(given.device or CPU)
    provider = _provider(given.device or CPU, model, Storage(*weights), asked)
    compared = _compared(reference, reference_device, reference_kv)
    own = _measurable(given, window, asked or (provider.kv[0] if provider else given.kv), decode)
    searched = _searched(given.techniques)
    stored, setting = Storage(*weights, given.budget), None if decode is None else Setting.of_run(own)
    kept = setting is not None and compared is None and (searched is not None or not setting.exact)
    if kept:
        compared = Compared(model, None, stored, {"kv": own.kv, "recipe": without_approximations(own.recipe)})
    with ExitStack() as stack, ProgressLine() as progress:
        source = Text(stack, text)
        every = replace(own, recipe=everywhere(own.recipe))  # a layer that falls back would flatter the setting
        session, tokenizer = open_runner(stack, model, every, progress, provider, stored)
        other, planned = compared.open(stack, session, own, progress) if compared else (None, session.plan.total_bytes)
        between = SEPARATOR if separator is None else separator.replace("\\n", "\n").replace("\\f", "\f")
        stream = read_stream(stack, tokenizer, source, between, tokens)
        techniques, result = _search(searched, session, given.techniques, partial(
            measure, session, stream, reference=other, window=window, prompt=decode,
            progress=partial(progress, "evaluate")))
        if setting or searched:
            setting = Setting.of_run(replace(own, techniques=techniques))  # settled for the model
        protocol = None if decode is None else f"windows of {window}, prompts of {decode}, the others one by one"
        if kept and setting and protocol:
            remember(session.bundle, measurement(setting, result, measured_identity(session.bundle),
                                                 protocol=protocol, stream=stream, isa=session.isa))
    report = {**report_object(result, planned), "setting": None if setting is None else dict(setting.values),
              "protocol": protocol, "text_changed": source.changed or None, **reports(Reported("eval", own))}
    if source.changed:
        say(f"{text.name}: {source.changed}.")
    if given.json:
        return print_json(report)
    print_table(_rows(result) + ([("setting", str(setting)), ("protocol", str(protocol))] if setting else []))


def window_of(given: Given, window: int | None) -> int:
    """Return the length of a window: it fills the context where nothing else is said."""
    window = checked("--window", window or given.ctx or WINDOW, RULES["ctx"])
    if given.ctx is not None and window > given.ctx:
        raise UsageError(f"--window {window} does not fit --ctx {given.ctx}; lower it, or raise --ctx.")
    return window


def _measurable(given: Given, window: int, kv: str, decode: int | None) -> RuntimeConfig:
    """Return the settings of the run; refuses techniques that cannot be measured so."""
    from ...quality.evaluate import OUTPUT_ROWS

    own = given.runtime(kv=kv, ctx=window, outputs=OUTPUT_ROWS)
    for one, settings in each(in_use(own)):
        one.measurable(settings, decode)
    return own


def tokens_of(tokens: int | None, max_tokens: int | None) -> int | None:
    """Return how many tokens count at most, also by the option's former name, with a notice."""
    if max_tokens is None:
        return tokens
    if tokens is not None:
        raise UsageError("-n is the former name of --tokens, and both are given; leave -n out.")
    say(f"-n sets the number of generated tokens in other commands; write --tokens {max_tokens} here.")
    return max_tokens


class Compared(NamedTuple):
    """A model that another one is compared with."""

    model: str
    provider: Provider | None
    """Executor; None for our own kernels."""
    storage: Storage
    settings: dict[str, Any]
    """Fields of its run that are not those of the other one."""

    def open(self, stack: ExitStack, beside: Runner, like: RuntimeConfig, progress: ProgressLine) -> tuple[Runner, int]:
        """Open it within the budget that the other one leaves; returns it with the bytes of both."""
        more = beside.plan.total_bytes - beside.plan.region("python").bytes  # the interpreter is there only once
        left = None if like.budget_bytes is None else max(like.budget_bytes - more, 1)
        config = RuntimeConfig(ctx=like.ctx, threads=like.threads, outputs=like.outputs, budget_bytes=left,
                               **self.settings)
        runner = open_runner(stack, self.model, config, progress, self.provider, self.storage)[0]
        return runner, more + runner.plan.total_bytes


def _compared(model: str | None, device: str, kv: str | None) -> Compared | None:
    """Return the model that ``--reference`` names."""
    from ...models import AS_IT_IS

    if not model:
        if device != CPU:
            raise UsageError(f"--reference-device {device} requires --reference MODEL.")
        return None
    provider = _provider(device, model, AS_IT_IS, kv)
    return Compared(model, provider, AS_IT_IS, {"kv": kv or (provider.kv[0] if provider else "f32")})


def _searched(options: dict[str, Any]) -> Technique | None:
    """Return the technique whose settings are to be searched."""
    return next((one for one in all_techniques() if one.target and options.get(one.target) is not None), None)


def _search(one: Technique | None, session: Runner, options: dict[str, Any],
            measured: Callable[[], Evaluation]) -> tuple[Settings, Evaluation]:
    """Evaluate, with the settings of a technique found for the divergence that its option asks for.

    Returns the settings of all techniques, with the evaluation.
    """
    if one is None:
        return session.config.techniques, measured()
    found: list[tuple[Any, Evaluation]] = []
    techniques = dict(session.config.techniques)

    def divergence(settings: Any) -> float:
        one.attach(session, settings)
        result = measured()
        assert result.divergence
        found.append((settings, result))
        return result.divergence.kld_mean

    best = one.search(techniques[one.name], divergence, options[one.target])
    return tuple({**techniques, one.name: best}.items()), next(result for own, result in found if own == best)


def _provider(device: str, model: str, storage: Storage, kv: str | None) -> Provider | None:
    """Return the executor of a model, None for our own kernels; the choice of device auto depends on the model."""
    from ...llm import open as opening
    from ...models import resolve

    if (provider := opening.provider(device)) is None or device != AUTO:
        return provider
    with ProgressLine() as progress:
        path = resolve(model, progress, storage=storage)
    return opening.taken(device, provider, path, RuntimeConfig(), kv)[0]


def open_runner(stack: ExitStack, model: str, config: RuntimeConfig, progress: ProgressLine,
                provider: Provider | None, storage: Storage) -> tuple[Runner, Any]:
    """Open a model for scoring, to be closed by the stack; returns it with its tokenizer."""
    from ...bundle import Bundle
    from ...llm import open as opening
    from ...models import resolve
    from ...text import Tokenizer

    path = resolve(model, progress, storage=storage)
    bundle = stack.enter_context(Bundle.open(path))
    runner: Runner
    if provider:
        runner = opening.opened_on(provider, bundle, config, None, progress, stack)[0]
    else:
        runner = opening.session(bundle, config, progress, None)
        stack.callback(runner.close)
    return runner, Tokenizer.open(path, {"bos_token_id": runner.model.bos_token_id})


def report_object(result: Evaluation, planned_bytes: int) -> dict[str, Any]:
    """Return the JSON object of an evaluation."""
    divergence = result.divergence
    return {
        "perplexity": result.perplexity, "nll_per_token": result.nll_per_token, "bits_per_byte": result.bits_per_byte,
        "kld_mean": divergence.kld_mean if divergence else None, "kld_p99": divergence.kld_p99 if divergence else None,
        "same_top": divergence.same_top if divergence else None,
        "reference_perplexity": divergence.reference_perplexity if divergence else None,
        "tokens": result.tokens, "text_bytes": result.text_bytes, "planned_bytes": planned_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _rows(result: Evaluation) -> list[tuple[str, str]]:
    rows = [
        ("perplexity", f"{result.perplexity:.4f}"),
        ("nats per token", f"{result.nll_per_token:.5f}"),
        ("bits per byte", f"{result.bits_per_byte:.5f}"),
        ("tokens", f"{result.tokens}"),
    ]
    if result.divergence:
        rows += [
            ("reference perplexity", f"{result.divergence.reference_perplexity:.4f}"),
            ("KLD mean", f"{result.divergence.kld_mean:.6f}"),
            ("KLD 99 %", f"{result.divergence.kld_p99:.6f}"),
            ("same top token", f"{result.divergence.same_top:.2%}"),
        ]
    return rows
