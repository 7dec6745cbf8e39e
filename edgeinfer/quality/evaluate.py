"""Quality of a model's predictions of a text, and their distance from those of a reference.

The protocol: documents are tokenised one by one, each begins with the beginning-of-text token if the model has one, and
all of them form one stream. The stream is cut into windows that do not overlap, and each is fed to the model without
memory of the one before; its tokens predict the one that follows each of them, so that every token except the
beginnings of documents is counted exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..base.dataclass import dataclass
from ..base.progress import OnStageProgress
from ..base.validation import checked, integer
from ..errors import RequestError
from .corpus import SEPARATOR as SEPARATOR
from .corpus import Stream as Stream
from .corpus import token_stream as token_stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..runner import Runner

    Floats = NDArray[np.float32]

OUTPUT_ROWS = 64
"""Rows of logits that an evaluation keeps at a time (`RuntimeConfig.outputs`)."""
BLOCK_LOGITS = 1 << 16
"""Logits handled at a time, one row at least; each of the arrays made of them takes half a megabyte."""
_SOME = integer(1, math.inf, "1 or more")
_NOT_NEGATIVE = integer(0, math.inf, "0 or more")


@dataclass(frozen=True)
class Divergence:
    """Distance of a model's predictions from a reference's, over all counted tokens."""

    kld_mean: float
    """Mean of KL(reference || model), in nats."""
    kld_p99: float
    """99th percentile of the divergence, which the worst percent of the tokens exceeds."""
    same_top: float
    """Share of tokens where both find the same token likeliest."""
    reference_perplexity: float


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    tokens: int
    """Predicted tokens."""
    text_bytes: int
    """UTF-8 bytes of these tokens' text."""
    nll_per_token: float
    """Mean negative log-likelihood, in nats."""
    divergence: Divergence | None = None
    """Against the reference, if one was given."""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll_per_token)

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for a byte of the text; unlike perplexity comparable between tokenizers."""
        return self.nll_per_token * self.tokens / math.log(2) / self.text_bytes


def evaluate(
    session: Runner,
    stream: Stream,
    *,
    reference: Runner | None = None,
    window: int | None = None,
    prompt: int | None = None,
    decoded: bool = False,
    progress: OnStageProgress | None = None,
) -> Evaluation:
    """Measure perplexity and, with a reference, divergence; logits are compared block by block and never kept.

    Parameters
    ----------
    session : the model, opened with ``outputs=OUTPUT_ROWS`` to be fast
    stream : of `token_stream`, by the tokenizer of both models
    reference : the same model with more exact weights or KV cache
    window : tokens fed at a time without a break, by default 512
    prompt : feed each window as `run` would: this many tokens as a prompt, the others one by one in decode role. Only
        predictions after the latter count, and the text's bytes are taken to be spread evenly. By default all
        tokens are fed in blocks and count.
    decoded : without `prompt`, feed the blocks in decode role, as tokens that are verified together: bits are the same
    progress : called with (done, total, item) in tokens

    Raises
    ------
    RequestError
        The text has no token to count, the window is longer than a context, the prompt as long as a window, or the
        vocabularies differ.
    """
    window = 512 if window is None else checked("window", window, _SOME)
    prompt = None if prompt is None else checked("prompt", prompt, _NOT_NEGATIVE)
    _check(session, reference, window, prompt or 0)
    total = sum(counted for i, counted in enumerate(stream.counted) if i and (i - 1) % window >= (prompt or 0))
    if not total:
        raise RequestError("The text is too short: it has no token to predict.")
    sums = _Sums(total)
    tell = progress or (lambda *_: None)
    tell(0, total, "tokens")
    for start in range(0, len(stream.ids) - 1, window):
        stop = min(start + window, len(stream.ids) - 1)
        some = stream.ids[start : stop + 1]
        fed, targets = some[:-1], some[1:]
        counted = stream.counted[start + 1 : stop + 1]
        for first, logits, others in _blocks(session, reference, list(fed), prompt, decoded):
            last = first + len(logits)
            sums.add(targets[first:last], counted[first:last], logits, others)
            tell(sums.tokens, total, "tokens")
    return sums.result(max(round(stream.text_bytes * total / sum(stream.counted)), 1))


def _check(session: Runner, reference: Runner | None, window: int, prompt: int) -> None:
    if prompt >= window:
        raise RequestError(f"A prompt of {prompt} tokens leaves nothing of a window of {window} to decode; lower it.")
    for model in (session, reference):
        if model is not None and window > int(model.config.ctx or 0):
            ctx = model.config.ctx
            raise RequestError(f"The window of {window} tokens is longer than the context of {ctx}; lower it.")
    if reference is not None and reference.model.vocab_size != session.model.vocab_size:
        sizes = f"{session.model.vocab_size} tokens and the reference {reference.model.vocab_size}"
        raise RequestError(
            f"The model predicts {sizes}; only models with one vocabulary can be compared."
        )


def _scores(model: Runner, sequence: Any, fed: list[int], prompt: int | None,
            decoded: bool) -> Iterator[tuple[int, Any]]:
    """Yield the index of a block's first token and the logits after its tokens, valid until the next block.

    Tokens in decode role have a sample spec, as in a run, so that approximations for samples are in effect.
    """
    import numpy as np

    from edgeinfer.kernels import abi

    if prompt is None and not decoded:
        yield from model.score(sequence, fed)
        return
    spec = np.zeros(abi.SAMPLE_BYTES >> 3, np.int64)  # the best token
    spec[abi.SAMPLE_SCREEN >> 3] = 1
    if prompt is None:
        yield from model.score(sequence, fed, abi.ROLE_DECODE, spec.ctypes.data)
        return
    if prompt and prompt < len(fed):
        model.prefill(sequence, fed[:prompt])
    for i in range(prompt, len(fed)):
        yield i, model.decode([sequence], [fed[i]], None, [spec.ctypes.data])


def _blocks(
    session: Runner, reference: Runner | None, fed: list[int], prompt: int | None, decoded: bool
) -> Iterator[tuple[int, Any, Any]]:
    """Yield the index of a block's first token, the model's logits, and the reference's or None."""
    models = [session] if reference is None else [session, reference]
    sequences = [model.new_sequence() for model in models]
    try:
        scores = [_scores(model, sequence, fed, prompt, decoded)
                  for model, sequence in zip(models, sequences, strict=True)]
        if reference is None:
            for first, logits in scores[0]:
                yield first, logits, None
            return
        for (first, logits), (first_other, others) in zip(*scores, strict=True):
            if first != first_other or len(logits) != len(others):
                raise RequestError("Model and reference must be opened with the same outputs and prefill_chunk.")
            yield first, logits, others
    finally:
        for model, sequence in zip(models, sequences, strict=True):
            model.release(sequence)


class _Sums:
    """Running sums over all counted tokens."""

    def __init__(self, total: int) -> None:
        self.tokens = 0
        self._nll = self._reference_nll = self._kld = 0.0
        self._same = 0
        self._at = 0.99 * (total - 1)
        """Rank of the 99th percentile among all divergences in order, between two of them."""
        self._most = total - math.floor(self._at)
        """Number of largest values that are kept: the percentile is between the first two of these."""
        self._largest: list[float] = []

    def add(self, targets: Sequence[int], counted: Sequence[bool], logits: Floats, others: Floats | None) -> None:
        """Count a block of float32 logits of shape (rows, vocab_size); `others` are the reference's."""
        import numpy as np

        rows, ids = np.flatnonzero(counted), np.asarray(targets)
        step = max(1, BLOCK_LOGITS // logits.shape[1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            self._add(ids[part], logits[part], None if others is None else others[part])

    def _add(self, ids: Any, logits: Floats, others: Floats | None) -> None:
        import numpy as np

        rows = np.arange(len(ids))
        logprobs = _log_softmax(logits)
        self.tokens += len(ids)
        self._nll -= float(logprobs[rows, ids].sum())
        if others is None:
            return
        reference = _log_softmax(others)
        self._reference_nll -= float(reference[rows, ids].sum())
        self._same += int(np.count_nonzero(logits.argmax(axis=1) == others.argmax(axis=1)))
        logprobs -= reference
        np.exp(reference, out=reference)
        reference *= logprobs
        klds = np.maximum(-reference.sum(axis=1), 0).astype(np.float32)  # rounding may give -1e-16
        self._kld += float(klds.sum(dtype=np.float64))
        self._largest += klds.tolist()
        if len(self._largest) > 2 * self._most + len(klds):
            self._keep()

    def _keep(self) -> None:
        self._largest = sorted(self._largest, reverse=True)[: self._most]

    def result(self, text_bytes: int) -> Evaluation:
        """Return the means."""
        nll = self._nll / self.tokens
        if not self._largest:
            return Evaluation(self.tokens, text_bytes, nll)
        self._keep()
        below = self._largest[-1]
        above = self._largest[-2] if self._most > 1 else below
        p99 = below + (above - below) * (self._at - math.floor(self._at))
        divergence = Divergence(self._kld / self.tokens, p99, self._same / self.tokens,
                                math.exp(self._reference_nll / self.tokens))
        return Evaluation(self.tokens, text_bytes, nll, divergence)


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Log-probabilities of rows of logits."""
    import numpy as np

    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
