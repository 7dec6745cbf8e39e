"""The Python API: open a model, generate, stream, chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checks import FLAG, FUNCTION, NATS, OBJECT, PATH, Rule, checked, shown, whole
from .config import BEAMS, GenerationConfig, Recipe, RuntimeConfig, from_options, rows_for_guesses
from .errors import RequestError, UsageError
from .models import Progress, Storage, resolve
from .sizes import parse_size

if TYPE_CHECKING:
    from .choice import Choice
    from .engine import Completion, Drafter, Request, Speculation, Stream
    from .memory_planner import MemoryPlan
    from .pruning import Schedule
    from .runner import Cancellation, Runner
    from .runtime import Session
    from .text import ChatTemplate, Tokenizer

Prompt = str | Iterable[int]
Messages = Sequence[Mapping[str, Any]]
_SURELY_READ = 32_768
"""Characters of a prompt that are tokenised whatever the context."""
_BUDGET = Rule("a size such as 4GiB, or a number of bytes", lambda size: parse_size(
    size if isinstance(size, str) else whole(size)))


class LLM:
    """An open model. A context manager; closing it gives all memory back.

    It may be used from several threads: requests wait for each other, and `cancel` and `close` reach the running one.

    Parameters
    ----------
    model : str or Path
        A bundle or checkpoint directory, a GGUF file (also ``ollama:NAME`` or ``hf:OWNER/REPO:TYPE``), a known name
        (``demo``), or an id on the hub. A checkpoint or GGUF file is converted once
        into the user's cache.
    ctx : int, optional
        Most tokens of a prompt and its continuation; by default min(the model's, 4096).
    budget : int or str, optional
        Most memory of the whole process, in bytes or as ``"4GiB"``; by default what the system can give now.
    kv : {'int8', 'f16', 'f32'}, optional
        Type of the KV cache; by default int8.
    threads : int, optional
        Worker threads; by default the physical cores that this process may use, or one in small models.
    prefill_chunk : int, optional
        Most prompt tokens processed at a time; by default 256.
    max_sequences : int, optional
        Samples of one prompt that may be generated together (the option `n` of requests); by default 1.
    own_tokens : int, optional
        Tokens that each of several sequences may have of its own behind the prompt that all share: the KV pool has room
        for one such prompt. By default each may fill the context; with `beams` it is 256.
    beams : int, optional
        Beams of a search (the option `beams` of requests): as many sequences; by default 1.
    mlock : bool, optional
        Lock the weights into memory, so that the system cannot drop them when others need memory.
    mmap : bool, optional
        Map the weights from their file, as by default; False copies them into memory of the process.
    recipe : str or Recipe, optional
        The passes over the model's graph.
    sparse : {"off", "exact", "predict"}, optional
        What FFNs stored neuron by neuron read: all neurons, or (as by default) of dead ones the gates alone, with the
        same text; or for decoded tokens what the bundle's predictor names, an approximation.
    head : {"exact", "screened"}, optional
        What decoded tokens compute of the output head: all rows, or those that the bundle's screen says can matter,
        with the same text where nothing is sampled.
    attention : str, optional
        What decoded tokens read of V: all rows (``"exact"``, as by default), blocks with a row that weighs at least X
        times its head's largest (``"eps:X"``), or blocks with one of a head's N largest (``"top:N"``); a mean of V
        stands for the rest.
    max_kld : float, optional
        What of `sparse` and `head` is not given, and no recipe either, is approximated by itself where exactly that was
        measured to diverge by so many nats at most, by default 0.02; 0 leaves the model exact.
    speculate : {"auto", "off", "lookup", "draft", "self"}, optional
        Who guesses tokens that a walk checks together where that is faster, with the same text: by default the draft
        model where there is one, else what followed the last tokens where they stood before.
    draft_tokens : int, optional
        Most guesses of a walk; by default 7.
    draft : str, Path or Recipe, optional
        A smaller model with the same tokenizer, as `model` is given. It is opened, within the same budget, where
        `speculate` is auto or draft. Where that is self, the recipe by which the model guesses for itself, such as
        ``fuse_input+early_exit:layers=8``; by default with its predictor, if it has one, else with a part of its
        layers.
    lazy : str or Schedule, optional
        Which shares of a prompt's tokens, those that its end attends to most, go on at boundaries between layers,
        such as ``"keep=0.7,0.5,0.35"``: an approximation that shortens the time to the first token. By default, or
        where it is ``"off"``, all tokens go through all layers.
    device : {"cpu", "cuda", "auto", "onnx-cpu"}, optional
        Who runs the model: our own kernels, as by default, or onnxruntime's CUDA or CPU provider; auto takes cuda where
        it works, and says what it took. Devices other than cpu run models exactly, with KV of the model's type: what
        approximates, streams or keeps prompts in files is refused by its name (docs/onnx.md).
    kv_layout : {"slots", "pages"}, optional
        How devices of onnxruntime keep KV: a slot for each sequence, as by default, or pages that sequences take as
        they grow and share, which cuda has.
    weights : {"q4", "int8", "f16", "f32"}, optional
        Type of weights that a checkpoint or GGUF file is converted to; by default q4, but of a GGUF file each as it is.
        A bundle that is stored otherwise is refused.
    group_size : {32, 64, 128}, optional
        Weights per scale, where it is converted; by default 32.
    progress : callable, optional
        Called with (stage, done, total, item) while a model is downloaded or converted, kernels compile, or weights of
        1 GB or more are loaded or lowered.

    Attributes
    ----------
    name : str
        The model as it was asked for.
    path : Path
        Its bundle.
    runner : Runner
        What runs the model below; it is not to be used while a request runs.
    session : Session
        The runner, where our own kernels run the model.
    draft : Runner or None
        Who guesses for it, where that is a model or a part of this one.
    tokenizer : Tokenizer
    chat_template : ChatTemplate or None
    choice : Choice or None
        How a bundle with predictor or screen runs, and what else could.
    approximated : bool
        Whether approximations are used that were not asked for, see `max_kld`.

    Raises
    ------
    ModelNotFoundError, CheckpointError, BundleError, TokenizerError
        The model cannot be found, converted or read.
    BudgetError
        It does not fit the budget; the message has alternatives that would.
    UsageError
        A parameter is of a wrong type or out of its range.

    Examples
    --------
    >>> with LLM("demo") as llm:
    ...     text = llm.generate("Once upon a time", max_tokens=64, temperature=0)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        ctx: int | None = None,
        budget: int | str | None = None,
        kv: str | None = None,
        threads: int | None = None,
        prefill_chunk: int | None = None,
        max_sequences: int | None = None,
        own_tokens: int | None = None,
        beams: int | None = None,
        mlock: bool | None = None,
        mmap: bool | None = None,
        recipe: str | Recipe | None = None,
        sparse: str | None = None,
        head: str | None = None,
        attention: str | None = None,
        max_kld: float | None = None,
        speculate: str | None = None,
        draft_tokens: int | None = None,
        draft: str | Path | Recipe | None = None,
        lazy: str | Schedule | None = None,
        device: str | None = None,
        kv_layout: str | None = None,
        weights: str | None = None,
        group_size: int | None = None,
        progress: Progress | None = None,
    ):
        passes = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
        if sparse is not None or head is not None or attention is not None:
            passes = (passes or Recipe()).sparse(sparse).head(head).attention(attention)
        self._speculate = GenerationConfig(speculate=speculate, draft_tokens=draft_tokens).speculate or "auto"
        settings: dict[str, Any] = {  # of which each may be None, whatever its type
            "ctx": ctx, "kv": kv, "threads": threads, "prefill_chunk": prefill_chunk, "max_sequences": max_sequences,
            "own_tokens": own_tokens, "mlock": mlock, "mmap": mmap, "recipe": passes,
            "draft_tokens": rows_for_guesses(self._speculate, draft_tokens),
            "lazy": lazy, "kv_layout": kv_layout,
            "budget_bytes": None if budget is None else checked("budget", budget, _BUDGET),
        }
        config, bound = RuntimeConfig(**settings), None if max_kld is None else checked("max_kld", max_kld, NATS)
        if beams is not None and (beams := checked("beams", beams, BEAMS)) > 1:
            config = replace(config, max_sequences=max(config.max_sequences, beams),
                             own_tokens=config.own_tokens or GenerationConfig.max_tokens)
        from . import opening

        provider = opening.provider(device)
        if provider and kv is None:
            config = replace(config, kv=provider.kv[0])
        draft = draft if draft is None or isinstance(draft, Recipe) else checked("draft", draft, PATH)
        if isinstance(draft, Recipe) and self._speculate != "self":
            raise UsageError(f"draft is the recipe {draft}, by which a model guesses for itself; give "
                             "speculate='self', or a draft model.")
        if self._speculate == "draft" and draft is None:
            raise UsageError("speculate is 'draft', and no draft model is given; give one with draft (--draft MODEL).")
        self.name = checked("model", model, PATH)
        if progress is not None:
            checked("progress", progress, FUNCTION)
        self.path = resolve(self.name, progress, storage=Storage(weights, group_size, config.budget_bytes))
        from .bundle import Bundle
        from .engine import RequestQueue, Times
        from .text import ChatTemplate, Tokenizer

        self._bundle = Bundle.open(self.path)
        with ExitStack() as opened:  # whatever fails below, nothing stays open
            opened.callback(self._bundle.close)
            if config.lazy:
                config = replace(config, lazy=config.lazy.placed(self._bundle.config.num_hidden_layers))
            asked = config
            self._tokenizer = Tokenizer.of_model(self.path, self._bundle.files, self._bundle.config)
            self.chat_template: ChatTemplate | None = ChatTemplate.open(self.path)
            self.choice: Choice | None = None
            self.runner: Runner
            self.draft: Runner | None
            guesser = opening.guesser(self._speculate, draft, self._bundle, self._tokenizer, config, progress, opened)
            if provider:
                self.runner, self.draft = opening.opened_on(provider, self._bundle, config, guesser, progress, opened)
            else:
                beside = guesser.beside if guesser else None
                self.choice = opening.choice(self._bundle, config, bound, beside)
                config = self.choice.way.config if self.choice else config
                session = opening.session(self._bundle, config, progress, beside)
                opened.callback(session.close)
                self.runner, self.draft = session, guesser.open(session) if guesser else None
            self.approximated = not provider and self.runner.config.recipe != asked.recipe
            opened.pop_all()
        self._kept: list[Any] = []  # of the draft, for a request that goes on with the last one's text
        self._queue = RequestQueue(self.runner)
        self._times = Times()
        self._preparing: set[Cancellation] = set()
        self._eos_ids = frozenset(self._queue.runner.model.eos_token_ids)
        if self._tokenizer:
            self._eos_ids |= self._tokenizer.eos_ids

    @property
    def session(self) -> Session:
        """The runner, where our own kernels run the model; raises `RequestError` where a device of others does."""
        from .runtime import Session

        if not isinstance(self.runner, Session):
            raise RequestError(f"The model is run by {self.runner.isa}, not by our own kernels; use runner instead.")
        return self.runner

    @property
    def plan(self) -> MemoryPlan:
        """Where the memory goes: `regions` with their bytes, `total_bytes`."""
        return self._queue.runner.plan

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `RequestError` for a bundle without one."""
        if self._tokenizer is None:
            raise RequestError(f"The bundle {self.path} has no tokenizer; give token ids instead of text.")
        return self._tokenizer

    # -- requests ----------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> str:
        """Return the continuation of a text as it stands; for a model trained on conversations see `chat`.

        Parameters
        ----------
        prompt : str, or token ids
        options : fields of `GenerationConfig` (``max_tokens``, ``temperature``, ``stop``, ...), and those of `stream`

        Raises
        ------
        RequestError
            The prompt is empty, longer than the context, or holds a token id outside the vocabulary.
        UsageError
            An option is unknown, of a wrong type or out of its range. None stands for the default.
        ClosedError
            The model was closed.
        """
        return self.complete(prompt, **options).text

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """As `generate`, with tokens, times, seed, finish reason, log-probabilities and all samples.

        A request that `cancel` ends returns what there is, with finish_reason ``cancelled``.
        """
        return self._request(self._ids(prompt), options).finish()

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """As `generate`, piece by piece.

        Parameters
        ----------
        prompt : str, or token ids
        options : fields of `GenerationConfig`, of which `n` must be 1, and

            * ``reuse`` (bool): start from the common beginning with the last request that had this option, instead of
              computing it again; the text is the same, unless a predictor has decoded a part of that beginning or it
              was pruned;
            * ``prompt_cache`` (path): start from the prompt saved there, and save this one.

        Returns
        -------
        Stream
            Iterator of str; closing it ends the request, and `Stream.completion` then has the outcome.
        """
        return self._stream(self._ids(prompt), options)

    def chat(self, messages: Messages, *, tools: Messages | None = None, **options: Any) -> str:
        """Return the answer to a conversation, rendered with the model's chat template.

        Parameters
        ----------
        messages : each with ``role`` and ``content``
        tools : JSON schemas of functions that the model may call, for templates that know them
        options : as for `stream`, and ``template_options``: a mapping of settings that the template knows; `reuse` is
            on, so that a turn computes only what is new

        Raises
        ------
        RequestError
            The model has no chat template, or the messages are not of this form.
        TokenizerError
            The template refuses these messages.
        """
        ids = self.chat_ids(messages, tools, **_template_options(options))
        return self._request(ids, _reusing(options)).finish().text

    def chat_stream(self, messages: Messages, *, tools: Messages | None = None, **options: Any) -> Stream:
        """As `chat`, piece by piece."""
        ids = self.chat_ids(messages, tools, **_template_options(options))
        return self._stream(ids, _reusing(options))

    def chat_ids(self, messages: Messages, /, tools: Messages | None = None, **template_options: Any) -> list[int]:
        """Return the tokens of a conversation up to the beginning of the answer; raises as `chat`."""
        if self.chat_template is None:
            raise RequestError(f"The model {self.name} has no chat template; generate continues a text instead.")
        with self._preparation() as stopped:
            text = self.chat_template.render(messages, tools=tools, **template_options, stopped=stopped)
            return self._encoded(text, stopped, add_bos=False, parse_special=True)

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a text to continue; raises `RequestError` where it is longer than the context."""
        with self._preparation() as stopped:
            return self._encoded(text, stopped)

    @property
    def most_prompt_bytes(self) -> int:
        """Bytes of text beyond which no prompt fits the context, whatever they are."""
        return max(_SURELY_READ, self.tokenizer.bytes_per_token() * int(self._queue.runner.config.ctx or 0))

    def cancel(self) -> None:
        """End the running request, if there is one, within 100 ms; from any thread or a signal handler.

        One whose prompt is still being rendered or tokenised raises `CancelledError`.
        """
        for wish in tuple(self._preparing):
            wish.cancel()
        self._queue.cancel()

    def close(self) -> None:
        """End the running request and give all memory back; requests that wait raise `ClosedError`."""
        for wish in tuple(self._preparing):
            wish.cancel()
        self._queue.close()
        if self.draft:
            self.draft.close()
        self._bundle.close()

    def settle(self) -> None:
        """Return when all memory is there that was planned; measured peaks mean nothing before."""
        self.runner.settle()
        if self.draft:
            self.draft.settle()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _request(self, ids: Iterable[int], options: Mapping[str, Any]) -> Request:
        """Check a request; nothing runs before its first step."""
        from .engine import BeamSearch, Generation, Request

        options = dict(options)
        reuse, cache = options.pop("reuse", None), options.pop("prompt_cache", None)
        config = from_options(GenerationConfig, options)
        reuse = reuse is not None and checked("reuse", reuse, FLAG)
        cache = None if cache is None else Path(checked("prompt_cache", cache, PATH))
        self._queue.check_open()
        request = self._queue.runner, self._tokenizer, ids, config, self._eos_ids
        generation = BeamSearch(*request) if config.beams > 1 else Generation(*request, self._speculation(config))
        return Request(self._queue, generation, reuse, cache)

    def _speculation(self, config: GenerationConfig) -> Speculation | None:
        """Make what guesses tokens of a request."""
        kind, rows = config.speculate or self._speculate, self.runner.config
        if kind == "off":
            return None
        if not rows.draft_tokens:
            raise RequestError(f"speculate is {kind!r}, and the model was opened with speculate='off'; open it "
                               "without.")
        if (config.draft_tokens or 0) > rows.draft_tokens:
            raise RequestError(f"{config.draft_tokens} guesses were asked for, but the model is open for "
                               f"{rows.draft_tokens}; open it with draft_tokens={config.draft_tokens}.")
        from .engine import Speculation

        return Speculation(self._drafter(kind), self._times, config.draft_tokens or rows.draft_tokens, rows.outputs)

    def _drafter(self, kind: str) -> Drafter:
        """Make who guesses; raises `RequestError` where that was not opened."""
        from .engine import DraftModel, PromptLookup, SelfDraft
        from .runtime import LighterSession

        if isinstance(self.draft, LighterSession):
            if kind == "self":
                return SelfDraft(self.session, self.draft)
        elif self.draft and kind in ("auto", "draft"):
            return DraftModel(self.draft, self.runner.model.vocab_size, self._kept)
        if kind in ("draft", "self"):
            how = "with draft=MODEL" if kind == "draft" else "with speculate='self'"
            raise RequestError(f"speculate is {kind!r}, and the model was not opened for that; open it {how}.")
        return PromptLookup()

    def _stream(self, ids: Iterable[int], options: Mapping[str, Any]) -> Stream:
        from .engine import Stream

        asked = from_options(GenerationConfig, {name: options.get(name) for name in ("n", "beams")})
        if asked.beams != 1:
            raise RequestError(f"A stream gives text as it grows, and which of {asked.beams} beams is the best is "
                               "known at the end; use complete.")
        if asked.n != 1:
            raise RequestError(f"A stream gives one sample, and n is {options['n']!r}; use complete.")
        return Stream(self._request(ids, options))

    @contextmanager
    def _preparation(self) -> Iterator[Callable[[], bool]]:
        """Give what a prompt's preparation asks all the while: whether `cancel` or `close` has come since it began."""
        from .runner import Cancellation

        wish = Cancellation()
        self._preparing.add(wish)
        try:
            yield lambda: wish.asked
        finally:
            self._preparing.discard(wish)

    def _ids(self, prompt: Prompt) -> Iterable[int]:
        if not isinstance(prompt, str):
            if isinstance(prompt, (bytes, bytearray, memoryview, Mapping, Set)) or not hasattr(prompt, "__iter__") \
                    or getattr(prompt, "shape", None) == ():
                raise RequestError(f"The prompt is a {type(prompt).__name__}; it must be text or token ids.")
            return prompt
        if not prompt:
            raise RequestError("The prompt is empty; give some text or at least one token id.")
        return self.prompt_ids(prompt)

    def _encoded(self, text: str, stopped: Callable[[], bool], **how: bool) -> list[int]:
        """Tokenise a prompt, but no more of it than tells that it is too long."""
        from .engine import too_long

        runner = self._queue.runner
        ctx = int(runner.config.ctx or 0)
        if len(text) > _SURELY_READ and len(text) > self.most_prompt_bytes:
            least = len(text) // self.tokenizer.bytes_per_token()
            raise too_long(f"has {len(text)} characters, at least {least} tokens", least, runner)
        ids = self.tokenizer.encode(text, **how, most=4 * ctx, stopped=stopped)
        if len(ids) > 4 * ctx:
            raise too_long(f"has more than {4 * ctx} tokens", 4 * ctx + 1, runner)
        return ids


def _reusing(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a chat, of which `reuse` is True unless it is given."""
    return {**options, "reuse": True} if options.get("reuse") is None else options


def _template_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the settings of the template out of the options of a chat."""
    given = options.pop("template_options", None)
    named = {} if given is None else checked("template_options", given, OBJECT)
    for name in named:
        if not isinstance(name, str) or name in ("messages", "tools", "stopped"):
            raise UsageError(f"template_options names {shown(name)}; its names must be text, and none of messages, "
                             "tools and stopped, which have their own meaning.")
    return dict(named)
