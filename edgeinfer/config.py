"""Frozen request types, which hold a user's settings. Types derived from them (a plan, a program) are elsewhere."""

from __future__ import annotations

import math
from dataclasses import field, fields, replace
from typing import Any

from . import quant
from .base.dataclass import dataclass
from .base.text_form import TextForm, text_form
from .base.units import number_of
from .base.validation import (
    BIASES,
    FLAG,
    TEXTS,
    Rule,
    check_fields,
    check_known,
    checked,
    choice,
    instance,
    integer,
    number,
    option,
)
from .errors import UsageError
from .quant import FFN_LAYOUTS as FFN_LAYOUTS
from .quant import GROUP_SIZES as GROUP_SIZES

KV_TYPES = tuple(quant.KV_TYPES)
WEIGHT_TYPES = quant.requestable()
MIXED_TYPES = ("q4_k_m", "q5_k_m")
"""Files of several types that `convert --weights` makes types like those of, and `bench --shape` random weights."""
SPECULATIONS = ("auto", "off", "lookup", "draft", "self", "mtp")
"""Sources of draft tokens that one pass verifies: automatic (the draft model if given, otherwise prompt lookup), none,
prompt lookup, the draft model, or a part of the model itself.
"""
DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS = 7, 64
"""Draft tokens that a forward pass verifies for a text at most: where nothing else is said, and of all that may be
said.
"""
DEVICES = CPU, CUDA, AUTO, ONNX_CPU, WEBGPU, OPENVINO, COREML, QNN, DML = (
    "cpu", "cuda", "auto", "onnx-cpu", "webgpu", "openvino", "coreml", "qnn", "dml")
"""Executors of a model: our own kernels; onnxruntime's CUDA provider; that one if it works, otherwise our kernels;
onnxruntime's CPU provider; its providers that come with packages of their own."""
KV_LAYOUTS = SLOTS, PAGES = "slots", "pages"
"""Layouts of K and V on a device: a slot for each sequence with room for a whole context, or pages that sequences take
as they grow and that they can share.
"""
MAX_KLD = 0.02
"""Mean divergence in nats up to which an approximation may be enabled automatically."""
_INF = float("inf")
BEAMS = integer(1, 16, "from 2 to 16, or 1 for no beam search")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "seed")
"""Options of a request that beam search has no use for."""


def _end(value: Any) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise ValueError
    return value


_ENDS = Rule("True, False or 'never'", _end)


@dataclass(frozen=True)
class GenerationConfig:
    """Settings for continuing a prompt.

    Sampling defaults are those of llama.cpp's family: temperature, top-k, top-p, min-p.
    """

    max_tokens: int = option(256, integer(0, _INF, "0 or more"))
    """Most tokens to generate; the run also ends at an end-of-text token, a stop string or a full context."""
    temperature: float = option(0.7, number(lambda t: 0 <= t < _INF, "0 or more"))
    """Divides the logits; 0 is greedy."""
    top_k: int = option(40, integer(0, _INF, "0 (off) or more"))
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = option(0.95, number(lambda p: 0 < p <= 1, "above 0 and at most 1"))
    """Keep the smallest set of tokens whose probability reaches p (nucleus sampling); 1 keeps all."""
    min_p: float = option(0.05, number(lambda p: 0 <= p <= 1, "from 0 to 1"))
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    repetition_penalty: float = option(1.0, number(lambda x: 0 < x < _INF, "above 0"))
    """Divides positive and multiplies negative logits of tokens already seen (CTRL, section 4.1); 1 is off."""
    presence_penalty: float = option(0.0, number(math.isfinite, "a finite number"))
    """Subtracted once from the logit of each token already generated."""
    frequency_penalty: float = option(0.0, number(math.isfinite, "a finite number"))
    """Subtracted from a token's logit once per earlier occurrence in the generated text."""
    logit_bias: dict[int, float] = field(default_factory=dict, metadata={"rule": BIASES})
    """Added to the logits of these token ids; -inf forbids a token."""
    seed: int | None = option(None, integer(0, 2**63 - 1, "from 0 to 2^63 - 1"))
    """Seed of the random choices; None picks one at random and reports it. Same seed, same text, on one machine."""
    stop: tuple[str, ...] = option((), TEXTS)
    """Generation ends before the first of these strings; they are not part of the text."""
    response_format: TextForm | None = option(None, Rule("a JSON schema, a pydantic model, or OpenAI's object",
                                                         text_form))
    """Form that the text must have: ``{"type": "json_object"}``, a JSON schema, a pydantic model, ``{"type": "regex",
    "pattern": ...}`` or ``{"type": "grammar", "grammar": ...}`` (Lark or GBNF). Tokens that would break it are not
    sampled; max_tokens and stop strings may still end it early."""
    logprobs: int | None = option(None, integer(0, 100, "from 0 to 100"))
    """Report the log-probability of each token and of this many most likely alternatives (0 = the token only)."""
    n: int = option(1, integer(1, 64, "from 1 to 64"))
    """Independent samples of one prompt, or best results of beam search; they share the prompt's KV blocks."""
    beams: int = option(1, BEAMS)
    """Continuations that beam search carries on side by side, 2 to 16; nothing is sampled then. 1 is no such search."""
    length_penalty: float = option(1.0, number(lambda x: -10 <= x <= 10, "from -10 to 10"))
    """Length penalty of beams: the sum of log-probabilities is divided by the number of tokens to this power, so that
    above 0 longer
    texts gain; 0 compares the sums."""
    early_stopping: bool | str = option(False, _ENDS)
    """When a beam search ends before its beams do: True as soon as there are as many results as beams; False when the
    best beam, at its length now, is no better than the worst of them; "never" when it cannot become better either."""
    speculate: str | None = option(None, choice(SPECULATIONS))
    """Speculative decoding: auto, off, lookup, draft or self. The text is the same; None is as the model was opened."""
    draft_tokens: int | None = option(None, integer(1, MAX_DRAFT_TOKENS, f"from 1 to {MAX_DRAFT_TOKENS}"))
    """Most draft tokens verified by one forward pass; None is as the model was opened."""
    ignore_eos: bool = option(False, FLAG)
    """Continue after an end-of-text token (for measurements)."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check_beams(self)


def _check_beams(config: GenerationConfig) -> None:
    """Refuse settings that contradict each other: a beam search samples nothing, and all else has no beams."""
    default = {one.name: one.default for one in fields(config)}
    if config.beams > 1 and config.response_format is not None:
        raise UsageError("response_format and beams exclude each other; use one of them.")
    if config.beams == 1:
        for name in ("length_penalty", "early_stopping"):
            if (value := getattr(config, name)) != default[name]:
                raise UsageError(f"{name} is {value}, and it applies to beam search alone; give beams, 2 to 16.")
        return
    for name in SAMPLING:
        value = getattr(config, name)
        if value != default[name] and not (name == "temperature" and value == 0):
            raise UsageError(f"{name} is {value}, and beam search does not sample; omit {name} or beams.")
    if config.speculate not in (None, "auto", "off"):
        raise UsageError(f"speculate is {config.speculate}, and beam search verifies no draft tokens; use one or "
                         "the other.")
    if config.n > config.beams:
        raise UsageError(f"n is {config.n}, and a search with {config.beams} beams has as many results; lower n or "
                         "raise beams.")


def generation_config(options: dict[str, Any]) -> GenerationConfig:
    """Return the settings of a request: its ``config``, if there is one, with the options given by name in it.

    Raises
    ------
    UsageError
        An option is unknown, of a wrong type or out of its range.
    """
    given = {name: value for name, value in options.items() if name != "config" and value is not None}
    check_known([one.name for one in fields(GenerationConfig)], given)
    if (config := options.get("config")) is None:
        return GenerationConfig(**given)
    return replace(checked("config", config, instance(GenerationConfig, "a GenerationConfig")), **given)


@dataclass(frozen=True)
class Step:
    """One pass over a model's graph."""

    name: str
    """Name of the pass (edgeinfer/graph/passes.py), after the name of its module if that is not imported anyway."""
    settings: tuple[tuple[str, str | float], ...] = ()
    """Settings by name."""

    def __str__(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.name}:{settings}" if settings else self.name


@dataclass(frozen=True)
class Recipe:
    """Passes over a model's graph, in order, with their settings."""

    steps: tuple[Step, ...] = (Step("fuse_input"),)
    """The passes; none gives the graph as its architecture writes it."""

    def __str__(self) -> str:
        return "+".join(map(str, self.steps)) or "none"

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Parse a recipe such as ``fuse_input+name:key=value,key=value``, or ``none``.

        A pass of a module that is not imported yet is ``module.name``, such as ``my_package.passes.prune:share=0.5``.

        Raises
        ------
        UsageError
            The text is not a recipe.
        """
        steps = []
        for part in [] if text == "none" else text.split("+"):
            name, _, rest = part.partition(":")
            pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
            names = [*name.split("."), *(key for key, _, _ in pairs)]
            if not all(map(str.isidentifier, names)) or not all(value for _, _, value in pairs):
                raise UsageError(f"The recipe is {text!r:.80}; write passes as name:key=value,key=value, joined by +, "
                                 "or none.")
            keys = [key for key, _, _ in pairs]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise UsageError(f"The recipe is {text!r:.80}, whose pass {name} has {twice:.40} twice; give it once.")
            steps.append(Step(name, tuple((key, number_of(value)) for key, _, value in pairs)))
        return cls(tuple(steps))

    def replacing(self, name: str, step: Step | None) -> Recipe:
        """Return the recipe with a step after the others, instead of those of this name; with None, without them."""
        others = (one for one in self.steps if one.name != name)
        return Recipe((*others, *([] if step is None else [step])))


def _recipe(value: Any) -> Recipe:
    if not isinstance(value, Recipe) or not all(isinstance(step, Step) for step in value.steps):
        raise ValueError
    return value


def _techniques(value: Any) -> tuple[tuple[str, Any], ...]:
    pairs = tuple(map(tuple, value))
    if not all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError
    return pairs


_TECHNIQUES = Rule("pairs of a technique's name and its settings, such as registry.configured makes", _techniques,
                   lead="give")
_RECIPE = Rule("a Recipe of Steps, such as Recipe.parse makes", _recipe, lead="give")


@dataclass(frozen=True)
class RuntimeConfig:
    """Settings for opening a model: context, memory, threads. They are fixed while it is open."""

    ctx: int | None = option(None, integer(1, _INF, "1 or more"))
    """Most tokens in the context of one sequence; None is min(the model's, 4096)."""
    kv: str = option("int8", choice(KV_TYPES))
    """Type of the KV cache: int8 (scale per token and head), f16 or f32."""
    threads: int | None = option(None, integer(1, 256, "from 1 to 256"))
    """Worker threads; None is the physical cores that affinity and container quota allow, and in forward passes under a
    millisecond one of them where that is faster."""
    budget_bytes: int | None = option(None, integer(1, _INF, "1 or more"))
    """Most memory of the whole process; None is the available memory."""
    prefill_chunk: int = option(256, integer(1, 4096, "from 1 to 4096"))
    """Most prompt tokens processed in one forward pass of the program."""
    max_sequences: int = option(1, integer(1, 64, "from 1 to 64"))
    """Sequences that may be alive at once (parallel samples, beams); sizes the KV pool and the token batch."""
    own_tokens: int | None = option(None, integer(1, _INF, "1 or more"))
    """Tokens that each of several sequences may have of its own after the prompt that all share, of which the KV pool
    then has room for one; None is a whole context for each."""
    kv_tokens: int | None = option(None, integer(1, _INF, "1 or more"))
    """Tokens that the KV pool holds of all sequences together; None is as many as these may have."""
    kv_memory: int | None = option(None, integer(1, _INF, "1 or more"))
    """Bytes of the KV pool, instead of its tokens."""
    state_memory: int | None = option(None, integer(0, _INF, "0 or more"))
    """Bytes for checkpoints of recurrent layers' state, from which later requests continue; None is a few."""
    kv_windows: int | None = option(None, integer(1, 64, "from 1 to 64"))
    """Sequences whose windows a pool of this many tokens keeps in layers with a window; None follows from its
    tokens."""
    fill_budget: bool = option(False, FLAG)
    """Give a KV pool without a size the rest of the budget: from one context to one for each sequence."""
    outputs: int = option(1, integer(1, 4096, "from 1 to 4096"))
    """Rows of logits kept per forward pass; evaluation asks for more than one."""
    draft_tokens: int = option(0, integer(0, MAX_DRAFT_TOKENS, f"from 0 to {MAX_DRAFT_TOKENS}"))
    """Draft tokens that a forward pass may verify for a sequence; sizes rows of logits."""
    verified_sequences: int | None = option(None, integer(1, 64, "from 1 to 64"))
    """Sequences for whose draft tokens a forward pass has rows of logits; None is `max_sequences`."""
    mlock: bool = option(False, FLAG)
    """Lock the weights into memory, so that the system cannot drop them."""
    mmap: bool = option(True, FLAG)
    """Map the weights from their file; False copies them into memory of the process."""
    recipe: Recipe = field(default_factory=Recipe, metadata={"rule": _RECIPE})
    """The passes that make the model's graph."""
    techniques: tuple[tuple[str, Any], ...] = option((), _TECHNIQUES)
    """Names and settings of the techniques that are not passes (`edgeinfer.registry`)."""
    kv_layout: str | None = option(None, choice(KV_LAYOUTS))
    """Slots or pages on devices of onnxruntime; None is slots there, and pages of 16 tokens on cpu, which has no other.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if None not in (self.kv_tokens, self.kv_memory):
            raise UsageError(f"kv_tokens {self.kv_tokens} and kv_memory {self.kv_memory} size one KV pool; use one.")


def check_own_layout(config: RuntimeConfig) -> None:
    """Raise `UsageError` for a layout of KV that our own kernels have not."""
    if config.kv_layout == SLOTS:
        raise UsageError("--kv-layout slots is not available on device cpu, whose KV cache has pages of 16 tokens; "
                         "leave it out, or run with --device cuda.")
