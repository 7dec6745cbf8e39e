"""Loss of quality of a conversion: its bundle beside other roundings of the same bytes, against weights in f16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ..base.progress import OnProgress
from ..bundle import Bundle
from ..calibration.hooks import open_plain
from ..errors import RequestError
from ..quality.corpus import Stream, Text, read_stream
from ..quality.evaluate import OUTPUT_ROWS, Divergence, evaluate
from ..text import Tokenizer
from .calibrated import WINDOW, in_floats

TOKENS = 32768
"""Most tokens of a text that are measured on."""
MIN_TOKENS = 4096
"""Below which a comparison says little: on 4,096 tokens a mean divergence is 4 % off that on 48,000."""
READ_BYTES = 1 << 20
"""Bytes of a text that are checked before a conversion."""


class Compared(NamedTuple):
    """A way of rounding and its cost."""

    method: str
    bits: float
    """Bits of a weight, scales included."""
    nbytes: int
    """Bytes of the weights."""
    perplexity: float
    divergence: Divergence | None
    """Divergence from the reference; None for the reference itself."""
    tokens: int
    """Tokens that were predicted."""


def compare(source: Path, text: Path, own: tuple[str, Path], others: Sequence[tuple[str, Callable[[Path], object]]],
            progress: OnProgress) -> list[Compared]:
    """Measure a bundle and others of the same checkpoint on a text, against a run with weights in f16; KV is f32.

    Parameters
    ----------
    source : the checkpoint
    text : on which all are measured
    own : method and path of the bundle
    others : method of each, and the function that writes its bundle to a path; it is removed when it is measured
    progress : called with (stage, done, total, item)

    Returns
    -------
    list of Compared
        The reference first, the bundle last.

    Raises
    ------
    EdgeInferError
        The text cannot be read, or has no token to predict.
    """
    with ExitStack() as stack:
        file = Text(stack, text)
        floats = stack.enter_context(in_floats(source, progress))
        with Bundle.open(floats) as bundle:
            tokenizer = Tokenizer.open(floats, {"bos_token_id": bundle.config.bos_token_id})
            window = min(WINDOW, bundle.config.max_position_embeddings)
        stream = read_stream(stack, tokenizer, file, max_tokens=TOKENS)
        room = Path(stack.enter_context(TemporaryDirectory(dir=floats.parent)))
        reference = open_plain(floats, window, kv="f32", outputs=OUTPUT_ROWS)
        stack.callback(reference.close)
        measured = partial(_measured, reference=reference, stream=stream, window=window, progress=progress)
        rows = []
        for number, (method, make) in enumerate(others):
            make(room / str(number))
            rows.append(measured(method, room / str(number)))
        rows.append(measured(own[0], own[1]))
        first = rows[-1].divergence
        assert first
        return [Compared("f16", *_size(floats), first.reference_perplexity, None, rows[-1].tokens), *rows]


def too_few(rows: Sequence[Compared], text: Path) -> str:
    """Return a sentence if a comparison is of too few tokens to say anything; else nothing."""
    if not rows or rows[0].tokens >= MIN_TOKENS:
        return ""
    return (f"{text.name} has {rows[0].tokens} tokens to predict, too few to tell bundles apart; compare on "
            f"{MIN_TOKENS} at least.")


def check_text(path: Path) -> None:
    """Refuse a text that cannot be read, or is empty, before anything is converted; raises `EdgeInferError`."""
    with ExitStack() as stack:
        if not "".join(Text(stack, path).pieces(READ_BYTES)).strip():
            raise RequestError(f"The text {path} is empty; give one that the bundle can be measured on.")


def _measured(method: str, path: Path, *, reference: object, stream: Stream, window: int,
              progress: OnProgress) -> Compared:
    session = open_plain(path, window, kv="f32", outputs=OUTPUT_ROWS, progress=partial(progress, "compile"))
    try:
        result = evaluate(session, stream, reference=reference, window=window, progress=partial(progress, "evaluate"))  # type: ignore[arg-type]
    finally:
        session.close()
    return Compared(method, *_size(path), result.perplexity, result.divergence, result.tokens)


def _size(path: Path) -> tuple[float, int]:
    """Return the bits of a weight of the layers' matrices, and the bytes of all weights."""
    with Bundle.open(path) as bundle:
        layers = [one for one in bundle.header.tensors if one.type.layout != "plain" and one.name.startswith("layers.")]
        bits = 8 * sum(one.nbytes for one in layers) / sum(prod(one.shape) for one in layers)
        return bits, bundle.header.weights_bytes
