"""Frozen request types: what a user asks for. What follows from a request (a plan, a program) is another type."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from . import quant
from .errors import UsageError
from .quant import FFN_LAYOUTS as FFN_LAYOUTS
from .quant import GROUP_SIZES as GROUP_SIZES

KV_TYPES = tuple(quant.KV_TYPES)
WEIGHT_TYPES = tuple(quant.TYPES)


@dataclass(frozen=True)
class GenerationConfig:
    """How to continue a prompt. Sampling defaults are llama.cpp's family: temperature, top-k, top-p, min-p."""

    max_tokens: int = 256
    """Most tokens to generate; the run also ends at an end-of-text token, a stop string or a full context."""
    temperature: float = 0.7
    """Divides the logits; 0 is greedy."""
    top_k: int = 40
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the smallest set of tokens whose probability reaches p (nucleus sampling); 1 keeps all."""
    min_p: float = 0.05
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already seen (CTRL, section 4.1); 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per earlier occurrence in the generated text."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; -inf forbids a token."""
    seed: int | None = None
    """Seed of the random choices; None draws one and reports it. Same seed, same text, on one machine."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; they are not part of the text."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many most likely alternatives (0 = the token only)."""
    n: int = 1
    """Independent samples of one prompt; they share the prompt's KV blocks."""
    ignore_eos: bool = False
    """Go on after an end-of-text token (for measurements)."""

    def __post_init__(self) -> None:
        checks = [
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("n", 1 <= self.n <= 64, "from 1 to 64"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "from 0 to 100"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2^63 - 1"),
            ("stop", all(self.stop), "non-empty strings"),
        ]
        for name, good, want in checks:
            if not good:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {want}.")


def from_options(kind: type, options: dict[str, Any]) -> Any:
    """Build a frozen request type from keyword options, refusing unknown names with the nearest known one."""
    import difflib

    known = [f.name for f in fields(kind)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(known)}."
            raise UsageError(f"Unknown option {name!r}{hint}")
    if "stop" in options:
        stop = options["stop"]
        options = {**options, "stop": (stop,) if isinstance(stop, str) else tuple(stop or ())}
    return kind(**options)


@dataclass(frozen=True)
class Step:
    """One pass over a model's graph."""

    name: str
    """Of the pass (edgeinfer/graph/passes.py), behind the name of its module where that is not imported anyway."""
    settings: tuple[tuple[str, str | float], ...] = ()
    """Its settings by name."""

    def __str__(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.name}:{settings}" if settings else self.name


@dataclass(frozen=True)
class Recipe:
    """Which passes make a model's graph, in their order, and with which settings."""

    steps: tuple[Step, ...] = (Step("fuse_input"),)
    """The passes; none gives the graph as its architecture writes it."""

    def __str__(self) -> str:
        return "+".join(map(str, self.steps)) or "none"

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Return the recipe that a text such as ``fuse_input+name:key=value,key=value`` (or ``none``) stands for.

        A pass of a module that nobody imports is ``module.name``, such as ``my_package.passes.prune:share=0.5``.

        Raises
        ------
        UsageError
            The text is no recipe.
        """
        steps = []
        for part in [] if text == "none" else text.split("+"):
            name, _, rest = part.partition(":")
            pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
            names = [*name.split("."), *(key for key, _, _ in pairs)]
            if not all(map(str.isidentifier, names)) or not all(value for _, _, value in pairs):
                raise UsageError(f"The recipe is {text!r:.80}; write passes as name:key=value,key=value, joined by +, "
                                 "or none.")
            steps.append(Step(name, tuple((key, _number(value)) for key, _, value in pairs)))
        return cls(tuple(steps))


def _number(text: str) -> str | float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class RuntimeConfig:
    """How to set up a model: context, memory, threads. Fixed when the model is opened."""

    ctx: int | None = None
    """Most tokens in the context of one sequence; None is min(the model's, 4096)."""
    kv: str = "int8"
    """Type of the KV cache: int8 (scale per token and head), f16 or f32."""
    threads: int | None = None
    """Worker threads; None is the physical cores that affinity and container quota allow."""
    budget_bytes: int | None = None
    """Most memory of the whole process; None is what the system can give now."""
    prefill_chunk: int = 256
    """Most prompt tokens processed in one walk of the program."""
    max_sequences: int = 1
    """Sequences that may be alive at once (parallel samples); sizes the KV pool and the token batch."""
    outputs: int = 1
    """Rows of logits kept per walk; evaluation asks for more than one."""
    mlock: bool = False
    """Lock the weights into memory, so that the system cannot drop them."""
    mmap: bool = True
    """Map the weights from their file; False copies them into memory of the process."""
    recipe: Recipe = field(default_factory=Recipe)
    """The passes that make the model's graph."""

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe) or not all(isinstance(step, Step) for step in self.recipe.steps):
            raise UsageError(f"recipe is {self.recipe!r:.80}; give a Recipe of Steps, such as Recipe.parse makes.")
        if self.ctx is not None and self.ctx < 1:
            raise UsageError(f"ctx is {self.ctx}; a context holds at least 1 token.")
        if self.kv not in KV_TYPES:
            raise UsageError(f"kv is {self.kv!r}; choose one of {', '.join(KV_TYPES)}.")
        if self.threads is not None and not 1 <= self.threads <= 256:
            raise UsageError(f"threads is {self.threads}; it must be from 1 to 256.")
        if not 1 <= self.prefill_chunk <= 4096:
            raise UsageError(f"prefill_chunk is {self.prefill_chunk}; it must be from 1 to 4096.")
        if not 1 <= self.max_sequences <= 64:
            raise UsageError(f"max_sequences is {self.max_sequences}; it must be from 1 to 64.")
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise UsageError(f"budget is {self.budget_bytes} bytes; it must be positive.")
