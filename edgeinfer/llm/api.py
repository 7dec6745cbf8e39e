"""The class `LLM`: a model that is open, its requests, and its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import shown
from ..config import GenerationConfig, Recipe, RuntimeConfig, rows_for_guesses
from ..errors import RequestError
from ..models import Storage, resolve
from ..progress import Progress
from ..rules import plain
from ..technique import settled
from .prompts import template_options
from .requests import Requests
from .settings import draft_of, runtime_config, with_beams, with_techniques

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from typing import Unpack
    else:
        from typing_extensions import Unpack

    from ..backends import Provider
    from ..choice import Choice
    from ..engine import Completion, Stream
    from ..memory_planner import MemoryPlan
    from ..runner import Cancellation, Runner
    from ..text import ChatTemplate
    from .options import (
        ChatOptions,
        Device,
        GroupSize,
        KvLayout,
        KvType,
        Messages,
        Prompt,
        RequestOptions,
        Speculation,
        TechniqueOptions,
        WeightType,
    )


class LLM(Requests):
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
    device : {"cpu", "cuda", "auto", "onnx-cpu"}, optional
        Who runs the model: our own kernels, as by default, or onnxruntime's CUDA or CPU provider; auto takes cuda where
        it works and runs the model, and says what it took. Devices other than cpu run models exactly, with KV of the
        model's type: what approximates, streams or keeps prompts in files is refused by its name (docs/onnx.md).
    kv_layout : {"slots", "pages"}, optional
        How devices of onnxruntime keep KV: a slot for each sequence, as by default, or pages that sequences take as
        they grow and share, which cuda has.
    weights : {"q4", "int8", "f16", "f32"}, optional
        Type of weights that a checkpoint or GGUF file is converted to; by default q4, but of a GGUF file each as it is.
        A bundle that is stored otherwise is refused.
    group_size : {32, 64, 128}, optional
        Weights per scale, where it is converted; by default 32.
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
    lazy : str or Schedule, optional
        Which shares of a prompt's tokens, those that its end attends to most, go on at boundaries between layers,
        such as ``"keep=0.7,0.5,0.35"``: an approximation that shortens the time to the first token. By default, or
        where it is ``"off"``, all tokens go through all layers.
    lazy_layers : str, optional
        After which layers these boundaries are, such as ``"9,18,27"``; three are by default behind 30, 60 and 90 % of
        the layers.
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
        kv: KvType | None = None,
        threads: int | None = None,
        prefill_chunk: int | None = None,
        max_sequences: int | None = None,
        own_tokens: int | None = None,
        beams: int | None = None,
        mlock: bool | None = None,
        mmap: bool | None = None,
        recipe: str | Recipe | None = None,
        max_kld: float | None = None,
        speculate: Speculation | None = None,
        draft_tokens: int | None = None,
        draft: str | Path | Recipe | None = None,
        device: Device | None = None,
        kv_layout: KvLayout | None = None,
        weights: WeightType | None = None,
        group_size: GroupSize | None = None,
        progress: Progress | None = None,
        **techniques: Unpack[TechniqueOptions],
    ):
        self._speculate = GenerationConfig(speculate=speculate, draft_tokens=draft_tokens).speculate or "auto"
        config = runtime_config(
            budget, ctx=ctx, kv=kv, threads=threads, prefill_chunk=prefill_chunk, max_sequences=max_sequences,
            own_tokens=own_tokens, mlock=mlock, mmap=mmap, recipe=plain({"recipe": recipe})["recipe"],
            draft_tokens=rows_for_guesses(self._speculate, draft_tokens), kv_layout=kv_layout)
        asked = plain({"model": model, "max_kld": max_kld, "device": device, "progress": progress})
        bound, storage = asked["max_kld"], Storage(weights, group_size, config.budget_bytes)
        config = with_techniques(with_beams(config, beams), techniques, LLM.__init__.__kwdefaults__ or ())
        from .. import opening

        device, provider = asked["device"], opening.provider(asked["device"])
        draft = draft_of(draft, self._speculate)
        self.name = asked["model"]
        self.path = resolve(self.name, progress, storage=storage)
        from ..engine import RequestQueue, Times

        self._open(config, (device, provider, None if kv is None else config.kv), draft, bound, progress)
        self._kept: list[Any] = []  # of the draft, for a request that goes on with the last one's text
        self._queue = RequestQueue(self.runner)
        self._times = Times()
        self._preparing: set[Cancellation] = set()
        self._eos_ids = frozenset(self._queue.runner.model.eos_token_ids)
        if self._tokenizer:
            self._eos_ids |= self._tokenizer.eos_ids

    def _open(self, config: RuntimeConfig, on: tuple[str | None, Provider | None, str | None],
              draft: str | Path | Recipe | None, bound: float | None, progress: Progress | None) -> None:
        """Open the bundle, what its texts need, who runs it and who guesses for it.

        `on` has the device and the type of the KV cache as they were asked for, and between them who may run models
        there.
        """
        from .. import opening
        from ..bundle import Bundle
        from ..text import ChatTemplate, Tokenizer

        self._bundle = Bundle.open(self.path)
        with ExitStack() as opened:  # whatever fails below, nothing stays open
            opened.callback(self._bundle.close)
            device, provider, kv = on
            provider, config = opening.settled(device, provider, self._bundle, config, kv)
            if config.techniques:
                config = replace(config, techniques=settled(config.techniques, self._bundle.config.num_hidden_layers))
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

    @property
    def plan(self) -> MemoryPlan:
        """Where the memory goes: `regions` with their bytes, `total_bytes`."""
        return self._queue.runner.plan

    # -- requests ----------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> str:
        """Return the continuation of a text as it stands; for a model trained on conversations see `chat`.

        Parameters
        ----------
        prompt : str, or token ids
        options : fields of `GenerationConfig` (``max_tokens``, ``temperature``, ``stop``, ...), and those of `stream`;
            or ``config``, a `GenerationConfig`, in which options given by name replace its fields

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

    def complete(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """As `generate`, with tokens, times, seed, finish reason, log-probabilities and all samples.

        A request that `cancel` ends returns what there is, with finish_reason ``cancelled``.
        """
        return self._request(self._ids(prompt), options).finish()

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """As `generate`, piece by piece.

        Parameters
        ----------
        prompt : str, or token ids
        options : fields of `GenerationConfig`, of which `n` must be 1, and

            * ``reuse`` (bool): start from the common beginning with the last request that had this option, instead of
              computing it again; the text is the same, unless a predictor has decoded a part of that beginning or it
              was pruned;
            * ``prompt_cache`` (path): start from the prompt saved there, and save this one;
            * ``progress`` (callable): called with ("prompt", done, total, "") in tokens while the prompt is processed.

        Returns
        -------
        Stream
            Iterator of str; closing it ends the request, and `Stream.completion` then has the outcome.
        """
        return self._stream(self._ids(prompt), options)

    def chat(self, messages: Messages, *, tools: Messages | None = None, **options: Unpack[ChatOptions]) -> str:
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
        settings, rest = template_options(options)
        return self._request(self.chat_ids(messages, tools, **settings), _reusing(rest)).finish().text

    def chat_stream(self, messages: Messages, *, tools: Messages | None = None,
                    **options: Unpack[ChatOptions]) -> Stream:
        """As `chat`, piece by piece."""
        settings, rest = template_options(options)
        return self._stream(self.chat_ids(messages, tools, **settings), _reusing(rest))

    def cancel(self, request: Stream | None = None) -> None:
        """End the running request, if there is one, within 100 ms; from any thread or a signal handler.

        One whose prompt is still being rendered or tokenised raises `CancelledError`.

        Parameters
        ----------
        request : a stream of this model, which alone is ended, whether it runs, waits for its turn or is not read;
            others go on

        Raises
        ------
        RequestError
            `request` is no stream of this model.
        """
        if request is not None:
            from ..engine import Stream

            if not isinstance(request, Stream) or not request.belongs_to(self._queue):
                raise RequestError(f"cancel was given {shown(request)}, which is no stream of this model; give what "
                                   "stream() or chat_stream() returned.")
            request.cancel()
            return
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


def _reusing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a chat, of which `reuse` is True unless it is given."""
    return {**options, "reuse": True if options.get("reuse") is None else options["reuse"]}
