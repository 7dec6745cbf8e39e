"""Conversions that round weights by the statistics of a text: the run of the model, and its cached results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

from edgeinfer import converters

from ..base.cache_dir import cache_errors, cache_root, directory_size, make_directories
from ..base.dataclass import dataclass
from ..base.files import working_directory
from ..base.progress import OnProgress
from ..bundle import is_bundle
from ..errors import BundleError, RequestError, UsageError
from ..quality.corpus import Stream, Text, token_stream
from .resolve import stamped_name
from .tokenizer import tokenizer_of

if TYPE_CHECKING:
    from edgeinfer.converters import Calibration, Checkpoint

    from ..calibration.kept import KeptStatistics, StatisticsWriter
    from ..graph import Weight
    from ..quant import InputStatistics
    from ..runtime import Session
    from ..text import Tokenizer

GPTQ, IMPORTANCE = "gptq", "importance"
"""Methods: by covariances, and by mean squares alone."""
TOKENS = {GPTQ: 16384, IMPORTANCE: 4096}
"""Most tokens of a text that are run, in windows spread over it, by method: a mean of squares needs fewer than a
covariance."""
MIN_TOKENS = 2048
"""Below which a text says too little of any matrix."""
WINDOW = 512
READ_BYTES = 4 << 20
"""Bytes of a long text that are read."""
MIN_KINDS = 32
"""Different tokens below which a text repeats itself, and says nothing of other inputs."""
MAX_LOST = 0.2
"""Largest share of a text's characters that its tokens may fail to reproduce."""
LOGITS_BYTES = 64 << 20
"""Most that the logits of a forward pass take, whose tokens are as many as this permits."""
KEPT_BYTES = 4 << 30
"""Most statistics that stay in the cache after a conversion."""
BUILT_IN = Path(__file__).parents[1] / "calibration" / "text.txt"
"""The text that is run where none is given."""


@dataclass(frozen=True)
class CalibrationText:
    """A text as a model's tokens."""

    stream: Stream
    changed: str = ""
    """Changes that were made in reading it."""


def calibration_text(source: Path, path: Path, tokens: int = TOKENS[GPTQ]) -> CalibrationText:
    """Read a text for a checkpoint: of a long one windows that are spread over it.

    Raises
    ------
    UsageError
        The checkpoint has no tokenizer.
    RequestError
        The text is too short, or of characters that the model does not know.
    EdgeInferError
        It cannot be read, or is not UTF-8.
    """
    if tokens < MIN_TOKENS:
        raise UsageError(f"--calibrate-tokens is {tokens}; it must be {MIN_TOKENS} or more.")
    if is_bundle(source):
        raise UsageError(f"{source} is a bundle, whose weights are rounded already; give the checkpoint or GGUF file "
                         "that it was made of.")
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise UsageError(f"{source} has no tokenizer, so no text can be run; give an importance matrix (--imatrix).")
    with ExitStack() as stack:
        file = Text(stack, path)
        text = "".join(file.pieces(READ_BYTES))
    return CalibrationText(checked_stream(tokenizer, text, path.name, tokens), file.changed)


def checked_stream(tokenizer: Tokenizer, text: str, name: str, tokens: int) -> Stream:
    """Return the tokens of a text that are run; raises `RequestError` for one that says too little."""
    if "\0" in text:
        raise RequestError(f"{name} is not a text: it has null bytes.")
    stream = token_stream(tokenizer, text, name=name)
    if len(stream.ids) < MIN_TOKENS:
        raise RequestError(f"The text {name} has {len(stream.ids)} tokens, too few to calibrate with; give "
                           f"{MIN_TOKENS} at least, and better {TOKENS[GPTQ]}.")
    sample = text[:READ_BYTES >> 6]
    missing = Counter(sample) - Counter(tokenizer.decode(tokenizer.encode(sample)))
    lost = {char: n for char, n in missing.items() if not char.isspace()}
    share = sum(lost.values()) / max(len(sample), 1)
    if share > MAX_LOST:
        raise RequestError(f"The model's tokenizer does not know {share:.0%} of the characters of {name}, such as "
                           f"{max(lost, key=lambda char: lost[char])!r}; give a text in a language of the model.")
    ids = _spread(stream.ids, tokens)
    if (kinds := len(set(ids))) < MIN_KINDS:
        raise RequestError(f"The text {name} repeats {kinds} tokens, and says nothing of others; give a text of "
                           f"{MIN_KINDS} different ones at least.")
    return Stream(tuple(ids), (True,) * len(ids), stream.text_bytes, name)


def _spread(ids: Sequence[int], tokens: int) -> list[int]:
    """Return windows as far apart as they can be, up to this many tokens."""
    windows = [ids[first : first + WINDOW] for first in range(0, len(ids), WINDOW)]
    n = -(-tokens // WINDOW)
    some = [windows[i * len(windows) // n] for i in range(n)] if n < len(windows) else windows
    return [token for one in some for token in one][:tokens]


@contextmanager
def in_floats(source: Path, progress: OnProgress) -> Iterator[Path]:
    """Convert a checkpoint to a bundle of f16 in the cache, which is removed in the end."""
    directory = cache_root() / "calibration"
    with ExitStack() as stack:
        with cache_errors(directory):
            make_directories(directory)
            path = stack.enter_context(working_directory(directory, ".f16-")) / "f16"
        converters.convert(source, path, weights="f16", progress=partial(progress, "convert"))
        yield path


def by_text(source: Path, stream: Stream, progress: OnProgress, method: str = GPTQ, effects: bool = False
            ) -> Callable[[Checkpoint], Calibration]:
    """Return the function by which `convert` gets the statistics of a text's run: cached ones, or new ones.

    With `effects` it also has those of the errors of each matrix, by which bits are shared out.
    """
    def calibration(checkpoint: Checkpoint) -> converters.Calibration:
        whole = method == GPTQ
        kept = kept_statistics(source, stream, progress, effects, covariances=whole)
        tokens = len(stream.ids)
        found = converters.Calibration(method, stream.name, stream.sha256(), tokens,
                                       partial(_of_weight, kept, whole=whole), tuple(_remarks(kept, whole, tokens)))
        return replace(found, folder=kept.path, effects=kept.effects if effects else None)

    return calibration


def _of_weight(kept: KeptStatistics, weight: Weight, whole: bool) -> Sequence[InputStatistics] | None:
    """Return the statistics of a weight's input, without covariances unless `whole`; a part of a matrix has the input
    of the whole matrix.
    """
    found = kept.of(weight.name) or kept.of(weight.name.rpartition(".")[0])
    return found if whole or found is None else [replace(one, covariance=None) for one in found]


def _remarks(kept: KeptStatistics, whole: bool, total: int) -> Iterator[str]:
    """Say which matrices saw few tokens of so many, and how many are enough."""
    few, times, widest, seen = list[int](), 1.0, 0, 0
    for name in kept.names:
        if (pieces := kept.of(name)) is None:
            continue
        if len(pieces) > 1:
            few += [tokens for tokens in pieces.tokens if tokens < pieces.width]
            times = max(times, *(pieces.width / tokens for tokens in pieces.tokens if tokens))
        elif pieces.tokens[0] < pieces.width and whole:
            widest, seen = max(widest, pieces.width), pieces.tokens[0]
    if widest:
        yield (f"The text has {seen} tokens, fewer than the {widest} columns of the widest matrix; {widest} or more "
               "make its rounding better.")
    if few:
        yield (f"{len(few)} matrices of experts saw fewer tokens than they have columns, one of them {min(few)}, and "
               "are rounded by the inputs of all experts of their layer too; "
               f"{'about' if min(few) else 'more than'} {-(-total * times // 1000):.0f},000 tokens of such a text are "
               "enough for each (--calibrate-tokens).")


def kept_statistics(source: Path, stream: Stream, progress: OnProgress, effects: bool = False,
                    covariances: bool = True) -> KeptStatistics:
    """Return the statistics of a text's run from the cache; run it if they are not there, or `effects` are not.

    Those without covariances have a directory of their own, and are not taken again where there are some with.
    """
    from ..calibration.kept import KeptStatistics, StatisticsWriter

    path = cache_root() / "calibration" / f"{stamped_name(source)}-{stream.sha256()[:16]}"
    kept = _found(path)
    if kept is None and not covariances:
        path = path.with_name(f"{path.name}-squares")
        kept = _found(path)
    if kept and not (effects and kept.effects is None):
        return kept
    with in_floats(source, progress) as bundle, _opened(bundle, progress) as session:
        if kept is None:
            with StatisticsWriter(path) as writer:
                _capture(session, stream, writer, progress, covariances)
        kept = KeptStatistics(path)
        if effects:
            from ..calibration.effects import measure_effects

            kept.keep_effects(measure_effects(session, stream.ids, partial(progress, "effects")))
    _forget(path)
    return kept


def _found(path: Path) -> KeptStatistics | None:
    from ..calibration.kept import KeptStatistics

    try:
        return KeptStatistics(path)
    except BundleError:
        return None


def _forget(newest: Path) -> None:
    """Remove the oldest statistics beyond `KEPT_BYTES`, but not the newest."""
    kept = sorted((one for one in newest.parent.iterdir() if not one.name.startswith(".") and one != newest),
                  key=lambda one: one.stat().st_mtime)
    sizes = {one: directory_size(one) for one in [*kept, newest]}
    total = sum(sizes.values())
    for one in kept:
        if total <= KEPT_BYTES:
            break
        rmtree(one, ignore_errors=True)
        total -= sizes[one]


@contextmanager
def _opened(bundle: Path, progress: OnProgress) -> Iterator[Session]:
    """Open a bundle so that all activations, and the logits of all tokens, can be read."""
    from ..bundle import Bundle
    from ..calibration.hooks import open_plain

    with Bundle.open(bundle) as opened:
        vocab, longest = opened.config.vocab_size, opened.config.max_position_embeddings
    chunk = max(min(LOGITS_BYTES // (4 * vocab) // 16 * 16, 256), 16)
    session = open_plain(bundle, min(WINDOW, longest), kv="f32", outputs=chunk, chunk=chunk,
                         loading=partial(progress, "load"), progress=partial(progress, "compile"))
    try:
        yield session
    finally:
        session.close()


def _capture(session: Session, stream: Stream, writer: StatisticsWriter, progress: OnProgress, covariances: bool
             ) -> None:
    from ..calibration.inputs import capture_inputs, stored_bytes

    writer.reserve(stored_bytes(session.graph, covariances))
    capture_inputs(session, stream.ids, writer.add, covariances=covariances, progress=partial(progress, "capture"))
