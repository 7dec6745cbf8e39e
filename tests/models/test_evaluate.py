"""Evaluation: the token stream, and its figures against plain formulas on all logits at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.errors import EdgeInferError, RequestError, UsageError
from edgeinfer.models import demo_path
from edgeinfer.quality.corpus import Text, read_stream
from edgeinfer.quality.evaluate import Evaluation, Stream, evaluate, token_stream
from edgeinfer.runtime import Session
from edgeinfer.text import Tokenizer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.command_line import edgeinfer

TEXT = "Once upon a time there was a king.\fThe king had three daughters, and the youngest was the wisest.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(demo_path())


@pytest.fixture(scope="module")
def sessions() -> Iterator[tuple[Session, Session]]:
    opened = [
        Session(Bundle.open(demo_path()), RuntimeConfig(ctx=64, kv=kv, threads=1, outputs=7)) for kv in ("int8", "f32")
    ]
    yield opened[0], opened[1]
    for session in opened:
        session.close()


def test_documents_make_one_stream(tokenizer: Tokenizer) -> None:
    stream = token_stream(tokenizer, TEXT)
    first, second = (tokenizer.encode(part.strip(), add_bos=False, leading_space=True) for part in TEXT.split("\f"))
    assert list(stream.ids) == [1, *first, 1, *second]
    assert list(stream.counted) == [False, *[True] * len(first), False, *[True] * len(second)]
    assert stream.text_bytes == len(TEXT) - 2  # the form feed and the last line break
    assert token_stream(tokenizer, TEXT.replace("\f", "\n\n\n"), "\n\n\n") == stream
    some = token_stream(tokenizer, TEXT, max_tokens=len(first) + 2)
    assert some.ids == stream.ids[: len(first) + 4] and sum(some.counted) == len(first) + 2
    assert token_stream(tokenizer, "\f\f\n\f").ids == ()


def test_without_a_beginning_token_the_first_token_is_not_counted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "bos_id", None)
    stream = token_stream(tokenizer, TEXT)
    assert stream.counted == (False, *[True] * (len(stream.ids) - 1))
    assert sum(token_stream(tokenizer, TEXT, max_tokens=3).counted) == 3


@pytest.mark.parametrize("window", [5, 16, 64])
def test_figures_equal_plain_formulas(tokenizer: Tokenizer, sessions: tuple[Session, Session], window: int) -> None:
    stream = token_stream(tokenizer, TEXT)
    told: list[tuple[int, int, str]] = []
    tell = lambda *step: told.append(step)  # noqa: E731
    result = evaluate(sessions[0], stream, reference=sessions[1], window=window, progress=tell)
    model, reference = (all_logprobs(session, stream, window) for session in sessions)
    targets, counted = np.array(stream.ids[1:]), np.array(stream.counted[1:])
    nll = -model[np.arange(len(targets)), targets][counted]
    klds = (np.exp(reference) * (reference - model)).sum(axis=1)[counted]
    assert result.tokens == counted.sum() == told[-1][0] == told[-1][1]
    assert result.nll_per_token == pytest.approx(nll.mean(), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(nll.sum() / math.log(2) / stream.text_bytes, rel=1e-6)
    divergence = result.divergence
    assert divergence is not None
    assert divergence.kld_mean == pytest.approx(klds.mean(), rel=1e-3)
    assert divergence.kld_p99 == pytest.approx(np.percentile(klds, 99), rel=1e-3)
    same = (model.argmax(axis=1) == reference.argmax(axis=1))[counted].mean()
    assert divergence.same_top == pytest.approx(same)
    assert evaluate(sessions[0], stream, window=window).divergence is None
    for session in sessions:
        assert session.kv.pool.n_free == session.kv.pool.n_blocks


def all_logprobs(session: Session, stream: Stream, window: int) -> np.ndarray:
    """Log-probabilities of everything that follows a token, by prefilling ever longer beginnings of each window."""
    rows = []
    for i in range(len(stream.ids) - 1):
        sequence = session.new_sequence()
        logits = session.prefill(sequence, list(stream.ids[i - i % window : i + 1])).astype(np.float64)
        session.release(sequence)
        rows.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    return np.array(rows)


def test_a_model_is_no_distance_from_itself(tokenizer: Tokenizer, sessions: tuple[Session, Session]) -> None:
    result = evaluate(sessions[0], token_stream(tokenizer, TEXT), reference=sessions[0], window=16)
    divergence = result.divergence
    assert divergence is not None and divergence.kld_mean == divergence.kld_p99 == 0 and divergence.same_top == 1
    assert divergence.reference_perplexity == result.perplexity


def test_large_vocabularies_are_handled_in_parts(
    tokenizer: Tokenizer, sessions: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = token_stream(tokenizer, TEXT)
    whole = evaluate(sessions[0], stream, reference=sessions[1], window=16)
    monkeypatch.setattr("edgeinfer.quality.evaluate.BLOCK_LOGITS", 9000)
    parts = evaluate(sessions[0], stream, reference=sessions[1], window=16)
    assert parts.nll_per_token == pytest.approx(whole.nll_per_token, rel=1e-12)


def test_what_cannot_be_evaluated(tokenizer: Tokenizer, sessions: tuple[Session, Session], tmp_path: Path) -> None:
    session = sessions[0]
    stream = token_stream(tokenizer, TEXT)
    with pytest.raises(UsageError, match="max_tokens is 0; it must be 1 or more"):
        token_stream(tokenizer, TEXT, max_tokens=0)
    with pytest.raises(UsageError, match="separator is ''; it must be text that is not empty"):
        token_stream(tokenizer, TEXT, "")
    with pytest.raises(RequestError, match="The text is too short: it has no token to predict"):
        evaluate(session, token_stream(tokenizer, ""), window=16)
    with pytest.raises(UsageError, match="window is 0; it must be 1 or more"):
        evaluate(session, stream, window=0)
    with pytest.raises(RequestError, match="The window of 65 tokens is longer than the context of 64; lower it"):
        evaluate(session, stream, window=65)
    convert(make_checkpoint(tmp_path / "tiny"), tmp_path / "bundle")
    with Bundle.open(tmp_path / "bundle") as bundle:
        other = Session(bundle, RuntimeConfig(ctx=64, threads=1, outputs=7))
        with pytest.raises(RequestError, match="The model predicts 4096 tokens and the reference 300; only"):
            evaluate(session, stream, reference=other, window=16)
        other.close()
    with Bundle.open(demo_path()) as bundle:
        other = Session(bundle, RuntimeConfig(ctx=64, threads=1, outputs=3))
        with pytest.raises(RequestError, match="must be opened with the same outputs and prefill_chunk"):
            evaluate(session, stream, reference=other, window=16)
        other.close()


def test_figures_of_an_evaluation() -> None:
    result = Evaluation(tokens=8, text_bytes=16, nll_per_token=math.log(2))
    assert result.perplexity == pytest.approx(2) and result.bits_per_byte == pytest.approx(0.5)


@pytest.mark.slow
def test_perplexity_on_held_out_text_is_that_of_the_models_card(
    shared_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """The card of fables-5m-relu: 18.21 on the TinyStories part, windows of 512, computed in f32 with transformers."""
    text = shared_data("text/held_out/heldout_tinystories.txt").read_text(encoding="utf-8")
    convert(shared_data("models/fables-5m-relu"), tmp_path / "bundle", weights="f32")
    with Bundle.open(tmp_path / "bundle") as bundle:
        session = Session(bundle, RuntimeConfig(ctx=512, kv="f32", outputs=64))
        result = evaluate(session, token_stream(Tokenizer.open(tmp_path / "bundle"), text, "\n\n\n"))
        session.close()
    assert result.tokens == 59292 and result.perplexity == pytest.approx(18.21, abs=0.006)


@pytest.mark.slow
def test_no_more_of_a_text_is_read_than_is_needed(tmp_path: Path) -> None:
    """A pipe without end has a beginning, which is enough for so many tokens."""
    (tmp_path / "short.txt").write_bytes(b"Once upon a time there was a hen. " * 40)
    (tmp_path / "long.txt").write_bytes(b"Once upon a time there was a hen. " * 2_000_000)
    asked = ("--tokens", 20, "--json")
    short, long = (edgeinfer("eval", "demo", "--text", tmp_path / f"{name}.txt", *asked) for name in ("short", "long"))
    assert short.json["tokens"] == 20 and long.json["perplexity"] == short.json["perplexity"]
    refused = edgeinfer("eval", "demo", "--text", tmp_path / "long.txt")
    assert refused.code == 1 and "is longer than 64 MiB" in refused.err.splitlines()[-1]
    if Path("/dev/zero").exists():
        assert edgeinfer("eval", "demo", "--text", "/dev/zero", *asked).code == 0


@pytest.mark.parametrize("separator", ["\f", "\n\n", "king"])
def test_a_text_file_gives_the_tokens_of_its_text(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    """However it is cut into pieces, and whatever its line ends."""
    text = "\n\n" + f"A king said: hé!\nHe had 3 daughters.\n\n\n{separator}{separator}\n\nThe youngest was wise." * 20
    want = token_stream(tokenizer, text, separator)
    monkeypatch.setattr("edgeinfer.text.long_texts.PART", 37)
    monkeypatch.setattr("edgeinfer.text.fast.PART", 37)
    for ends, changed in (("\n", ""), ("\r\n", "CR LF line endings were read as LF"),
                          ("\r", "CR line endings were read as LF")):
        (tmp_path / "text.txt").write_bytes(text.replace("\n", ends).encode())
        for size in (1, 7, 1 << 16):
            monkeypatch.setattr("edgeinfer.quality.corpus.READ_BYTES", size)
            with ExitStack() as stack:
                source = Text(stack, tmp_path / "text.txt")
                found = read_stream(stack, tokenizer, source, separator)
                assert (tuple(found.ids), tuple(found.counted)) == (want.ids, want.counted)
                assert found.text_bytes == want.text_bytes and found.sha256() == want.sha256()
                assert source.changed == changed and found.ids[3:5] == list(want.ids[3:5]) and found.name == "text.txt"
    with ExitStack() as stack:
        some = read_stream(stack, tokenizer, Text(stack, tmp_path / "text.txt"), separator, 30)
        assert tuple(some.ids) == token_stream(tokenizer, text, separator, 30).ids


def test_texts_that_cannot_be_read(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"hen " * 9 + b"\xff")
    monkeypatch.setattr("edgeinfer.quality.corpus.READ_BYTES", 5)
    with ExitStack() as stack, pytest.raises(EdgeInferError, match=r"is not UTF-8 \(byte 36\)"):
        read_stream(stack, tokenizer, Text(stack, path))
    with ExitStack() as stack, pytest.raises(EdgeInferError, match=r"none\.txt cannot be read: No such file"):
        Text(stack, tmp_path / "none.txt")
    path.write_bytes(b"hen " * 9)

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgeinfer.quality.corpus.tempfile.TemporaryFile", full)
    with ExitStack() as stack, pytest.raises(EdgeInferError, match=r"temporary file \(No space left on device\); set"):
        read_stream(stack, tokenizer, Text(stack, path))


def test_eval_says_that_it_changed_line_ends(tmp_path: Path) -> None:
    (tmp_path / "lf.txt").write_bytes(TEXT.encode() * 4)
    (tmp_path / "crlf.txt").write_bytes((TEXT * 4).replace("\n", "\r\n").encode())
    unix, windows = (edgeinfer("eval", "demo", "--text", tmp_path / name, "--json") for name in ("lf.txt", "crlf.txt"))
    assert unix.json["perplexity"] == windows.json["perplexity"]
    assert unix.json["text_changed"] is None and "CR LF" in windows.json["text_changed"]
    assert "crlf.txt: CR LF line endings were read as LF." in windows.err and "LF" not in unix.err
    assert windows.json["peak_rss_bytes"] > 0


def test_the_context_is_a_window_and_former_names_are_kept_with_a_notice(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king who had three daughters.")
    asked = ("eval", "demo", "--text", text, "--json")
    new, old = edgeinfer(*asked, "--window", 8, "--tokens", 8), edgeinfer(*asked, "-c", 8, "-n", 8)
    assert new.json["perplexity"] == old.json["perplexity"] and new.json["tokens"] == old.json["tokens"] == 8
    assert "write --tokens 8 here" in old.err and "--tokens" not in new.err
    assert edgeinfer(*asked, "-c", 8, "--window", 16).sentence.startswith("--window 16 does not fit --ctx 8")
    assert "both are given" in edgeinfer(*asked, "-n", 8, "--tokens", 8).sentence
