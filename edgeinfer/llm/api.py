"""The class `LLM`: a model that is open, its requests, and its end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.progress import OnProgress
from ..base.validation import shown
from ..config import Recipe
from ..errors import RequestError
from .embeddings import Embeddings
from .settings import OTHERS, asked_of
from .texts import Texts

if TYPE_CHECKING:
    from ..engine import Stream
    from ..memory_planner import MemoryPlan
    from ..runner import Cancellation
    from .open import OpenStages
    from .options import Device, GroupSize, KvLayout, KvType, TechniqueOptions, Unpack, WeightType


class LLM(Texts, Embeddings):
    """An open model. A context manager; closing it gives all memory back.

    It may be used from several threads: requests wait for each other, and `cancel` and `close` reach the running one.

    Parameters
    ----------
    model : str or Path
        A bundle or checkpoint directory, a GGUF file (also ``ollama:NAME`` or ``hf:OWNER/REPO:TYPE``), a known name
        (``demo``), or an id on the hub. A checkpoint or GGUF file is converted once into the user's cache.
    ctx : int, optional
        Context size: maximum number of prompt and generated tokens together; by default min(the model's, 4096).
    budget : int or str, optional
        Maximum memory of the process, in bytes or as ``"4GiB"``; by default the memory available now.
    kv : {'int8', 'f16', 'f32'}, optional
        Type of the KV cache; by default int8.
    threads : int, optional
        Number of worker threads; by default the physical cores available to the process, or one for small models.
    prefill_chunk : int, optional
        Maximum number of prompt tokens processed in one forward pass; by default 256.
    max_sequences : int, optional
        Maximum number of sequences that run together: requests of several threads, and the completions of one prompt
        (the option `n` of requests). Each may fill the context. By default 4 sequences share the memory of one context,
        and others wait; on onnxruntime the default is 1.
    own_tokens : int, optional
        Tokens that each of several sequences may add to the prompt that all share; the KV cache then has room for one
        such prompt. By default each sequence may fill the context; with `beams` it is 256.
    kv_tokens : int, optional
        Tokens that the KV pool holds of all sequences together; by default as many as these may have.
    kv_memory : int or str, optional
        Memory of the KV pool, in bytes or as ``"1GiB"``, instead of its tokens.
    state_memory : int or str, optional
        Memory for checkpoints of recurrent layers' state, from which later prompts continue; 0 for none. By default
        there is room for four.
    fill_budget : bool, optional
        Give the KV pool the rest of the budget, from one context to one for each of `max_sequences`.
    max_queue : int, optional
        Maximum number of requests that wait; by default 1024. Further ones raise `QueueFullError`.
    prefix_file : str or Path, optional
        File to take the prefix cache from, if it exists, and to write it to when the model is closed, so that prompts
        that begin alike need not be computed again.
    split : str, optional
        Layers of each of several processes of this machine, such as ``"0-15,16-31"``, or ``"auto"`` for two that take
        equal time; the last is this one. `budget` is the memory of all, `threads` are those of each. The text does not
        change. A callable opens the stages elsewhere.
    beams : int, optional
        Maximum number of beams of a search (the option `beams` of requests); by default 1.
    mlock : bool, optional
        Lock the weights in memory so that the system cannot evict them.
    mmap : bool, optional
        Map the weights from their file, the default; False copies them into memory of the process.
    recipe : str or Recipe, optional
        Graph passes to apply.
    max_kld : float, optional
        Use an approximation automatically only if its measured KL divergence is at most this, in nats; by default 0.02.
        0 uses none, and neither does a given `recipe`.
    speculate : {"auto", "off", "lookup", "draft", "self", "mtp"}, optional
        Speculative decoding: draft model, prompt lookup, self-draft or off. By default the draft model if given,
        otherwise prompt lookup. The output never changes.
    draft_tokens : int, optional
        Maximum number of draft tokens verified in one forward pass; by default 7.
    draft : str, Path or Recipe, optional
        Draft model: a smaller model with the same tokenizer, given as `model`. It is opened within the same budget if
        `speculate` is auto or draft. If it is self, the recipe with which the model drafts for itself, such as
        ``fuse_input+early_exit:layers=8``; by default with its predictor, if it has one, otherwise with a third of its
        layers.
    device : {"cpu", "cuda", "auto", "onnx-cpu", "webgpu", "openvino", "coreml", "qnn", "dml"}, optional
        Executor: edgeinfer's kernels, the default, or a provider of onnxruntime; auto uses CUDA if it works and
        supports the model, and says which it uses. onnxruntime runs models exactly, with the KV type of the model:
        approximations, weights in storage and prompt caches are refused by name.
    kv_layout : {"slots", "pages"}, optional
        KV cache of onnxruntime devices: one slot per sequence, the default for one sequence and on the CPU provider, or
        pages shared by all sequences, on CUDA.
    weights : {"q4", "int8", "f16", "f32"}, optional
        Type of the weights that a checkpoint or GGUF file is converted to; by default q4, but a GGUF file keeps its
        types. A bundle stored otherwise is refused.
    group_size : {32, 64, 128}, optional
        Number of weights that share a scale in a conversion; by default 32.
    sparse : {"off", "exact", "predict"}, optional
        How sparse FFNs run: dense (off), skip inactive neurons (exact, the default), or skip neurons that the bundle's
        predictor finds inactive (predict, an approximation).
    head : {"exact", "screened"}, optional
        Output head of decoded tokens: compute all rows, or only rows that the bundle's screen does not rule out; greedy
        text is unchanged.
    attention : str, optional
        Attention of decoded tokens: read all rows of V (``"exact"``, the default), only blocks with a weight of at
        least X times the head's maximum (``"eps:X"``), or only blocks with one of the head's N largest weights
        (``"top:N"``); the mean of V replaces the rest.
    lazy : str or Schedule, optional
        Fraction of prompt tokens kept at each pruning stage, ranked by attention from the end of the prompt, such as
        ``"keep=0.7,0.5,0.35"``: an approximation that shortens the time to first token. By default, and with
        ``"off"``, prompts are not pruned.
    lazy_layers : str, optional
        Layers after which prompt tokens are pruned, such as ``"9,18,27"``; by default, for three stages, 30, 60 and
        90 % of the layers.
    progress : callable, optional
        Called with (stage, done, total, item) while a model is downloaded or converted, kernels compile, or weights of
        1 GB or more are loaded or lowered.

    Attributes
    ----------
    name : str
        The model as it was requested.
    path : Path
        Its bundle.
    runner : Runner
        The runner of the model; not to be used while a request runs.
    session : Session
        The runner, where our own kernels run the model.
    draft : Runner or None
        The drafter, if that is a draft model or a part of this model.
    tokenizer : Tokenizer
    chat_template : ChatTemplate or None
    choice : Choice or None
        The strategy of a bundle with predictor or screen, and its alternatives.
    approximated : bool
        Whether approximations are used that were not requested, see `max_kld`.

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
        kv_tokens: int | None = None,
        kv_memory: int | str | None = None,
        state_memory: int | str | None = None,
        fill_budget: bool | None = None,
        max_queue: int | None = None,
        prefix_file: str | Path | None = None,
        split: str | OpenStages | None = None,
        beams: int | None = None,
        mlock: bool | None = None,
        mmap: bool | None = None,
        recipe: str | Recipe | None = None,
        max_kld: float | None = None,
        device: Device | None = None,
        kv_layout: KvLayout | None = None,
        weights: WeightType | None = None,
        group_size: GroupSize | None = None,
        progress: OnProgress | None = None,
        **techniques: Unpack[TechniqueOptions],
    ):
        asked = asked_of({name: value for name, value in locals().items() if name not in OTHERS} | techniques)
        from .open import open_model, provider

        executor = provider(asked.others["device"])
        self.name, self._drafting = asked.others["model"], asked.drafting
        self.path = asked.resolved()
        from ..engine import MAX_QUEUE, Engine, Times

        opened = open_model(self.path, asked, executor)
        self._bundle, self._tokenizer, self.chat_template = opened.bundle, opened.tokenizer, opened.chat_template
        self.runner, self.draft = opened.runner, opened.draft
        self.choice, self.approximated = opened.choice, opened.approximated
        self._kept: list[Any] = []  # of the draft, for a request that continues with the last one's text
        self._engine = Engine(self.runner, max_queue=asked.others["max_queue"] or MAX_QUEUE)
        self._prefix_file, self._closed = asked.others["prefix_file"], False
        self._times = Times()
        self._preparing: set[Cancellation] = set()
        self._eos_ids = frozenset(self.runner.model.eos_token_ids)
        if self._tokenizer:
            self._eos_ids |= self._tokenizer.eos_ids
        if self._prefix_file and Path(self._prefix_file).exists():
            self._load_prefixes()

    def _load_prefixes(self) -> None:
        """Take the prefix cache from its file; if that is refused, close the model and leave the file as it is."""
        try:
            self.runner.load_prefixes(self._prefix_file)
        except BaseException:
            self._prefix_file = None
            self.close()
            raise

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan: `regions` with their bytes, `total_bytes`."""
        return self.runner.plan

    def cancel(self, request: Stream | None = None) -> None:
        """End the running request, if there is one, within 100 ms; from any thread or a signal handler.

        One whose prompt is still being rendered or tokenised raises `CancelledError`.

        Parameters
        ----------
        request : a stream of this model, which alone is ended, whether it runs, waits for its turn or is not read;
            others continue

        Raises
        ------
        RequestError
            `request` is not a stream of this model.
        """
        if request is not None:
            from ..engine import Stream

            if not isinstance(request, Stream) or not request.belongs_to(self._engine):
                raise RequestError(f"cancel was given {shown(request)}, which is not a stream of this model; pass the "
                                   "result of stream() or chat_stream().")
            request.cancel()
            return
        for wish in tuple(self._preparing):
            wish.cancel()
        self._engine.cancel()

    def close(self) -> None:
        """End the running request and give all memory back; requests that wait raise `ClosedError`."""
        for wish in tuple(self._preparing):
            wish.cancel()
        try:
            if self._engine.stop() and self._prefix_file and not self._closed:
                self._closed = True
                self.runner.save_prefixes(self._prefix_file)
        finally:
            self._engine.close()
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
