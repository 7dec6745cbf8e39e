"""Identity of a prompt cache: the model that was open, and kernels that give the same bits."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.config import Recipe
from edgeinfer.converters import write_random_bundle
from edgeinfer.errors import BundleError, DestinationError
from edgeinfer.kernels import Kernels, available
from edgeinfer.llm.api import LLM
from edgeinfer.models import demo_path
from edgeinfer.registry import recipe_with
from edgeinfer.runtime import Session
from edgeinfer.runtime.kv.prompt_file import PromptFile
from tests import kernel_selection
from tests.helpers.sessions import TINY, session, tokens, write_model
from tests.models.test_offload import made

OTHER = (r"^The prompt cache \S+ was saved by another model or version of edgeinfer, or with another --kv, --recipe, "
         r"--ctx, --speculate or instruction set; give another file\.$")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Session]:
    with session(write_model(tmp_path), ctx=100) as one:
        yield one


def save(opened: Session, path: Path) -> bytes:
    """Save a prompt; returns the logits after it."""
    sequence = opened.new_sequence()
    logits = opened.prefill(sequence, tokens(40)).tobytes()
    opened.save(sequence, path)
    opened.release(sequence)
    return logits


def test_a_model_that_was_replaced_does_not_take_the_cache_of_the_old_one(opened: Session, tmp_path: Path) -> None:
    path = opened.bundle.path
    write_random_bundle(TINY, path, "q4", 32, seed=7, overwrite=True)
    save(opened, tmp_path / "cache")
    assert opened.load(tmp_path / "cache").tokens == tokens(40)
    with session(path, ctx=100) as new, pytest.raises(BundleError, match=OTHER):
        new.load(tmp_path / "cache")
    save(opened, tmp_path / "cache")


def test_a_model_whose_directory_is_gone_saves_and_loads(opened: Session, tmp_path: Path) -> None:
    shutil.rmtree(opened.bundle.path)
    save(opened, tmp_path / "cache")
    assert opened.load(tmp_path / "cache").tokens == tokens(40)


def test_a_copy_of_the_model_takes_its_cache(opened: Session, tmp_path: Path) -> None:
    save(opened, tmp_path / "cache")
    shutil.copytree(opened.bundle.path, tmp_path / "copy")
    with session(tmp_path / "copy", ctx=100, threads=2) as other:
        assert other.load(tmp_path / "cache").tokens == tokens(40)


@pytest.mark.parametrize("kv", ["int8", "f32"])
def test_instruction_sets_share_a_cache_where_they_share_all_bits(
    tmp_path: Path, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits: dict[str, set[bytes]] = {}
    path = write_model(tmp_path)
    levels = [isa for isa in available() if isa.name in kernel_selection.levels()]
    for isa in levels:
        monkeypatch.setenv("EDGEINFER_ISA", isa.name)
        with session(path, ctx=100, kv=kv) as one:
            found = save(one, tmp_path / isa.name)
            sequence = one.load(tmp_path / isa.name)
            held = PromptFile(one.kv).pieces(sequence, {"tokens": sequence.tokens})
            found += b"".join(plane[blocks].tobytes() for plane, blocks in held)
            bits.setdefault(one.executor.kernels.arithmetic, set()).add(found)
            for other in levels:
                if (tmp_path / other.name).exists() and Kernels(other).arithmetic != one.executor.kernels.arithmetic:
                    with pytest.raises(BundleError, match=OTHER):
                        one.load(tmp_path / other.name)
    assert all(len(found) == 1 for found in bits.values())
    assert len(set.union(*bits.values())) == len(bits)


@pytest.mark.parametrize("extra", ["sources", "recipe"])
def test_what_else_changes_bits_counts(opened: Session, tmp_path: Path, extra: str,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    save(opened, tmp_path / "cache")
    if extra == "sources":  # as after an upgrade that changed kernels
        sets = opened.executor.kernels._sets
        monkeypatch.setitem(sets, None, replace(sets[None], sources="another"))
    else:
        opened.recipe = Recipe.parse("fuse_input+other")
    with pytest.raises(BundleError, match=OTHER):
        opened.load(tmp_path / "cache")


# -- files that are none -----------------------------------------------------------------------------------------------


@pytest.fixture
def at_once() -> Iterator[None]:
    """Whatever waits for five seconds has failed."""
    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no fifos here")
def test_special_files_are_no_prompt_caches(opened: Session, tmp_path: Path, at_once: None) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, what in (("fifo", "a fifo"), ("device", "a device")):
        why = f"the prompt cache .*{name}: it is {what}, not a plain file"
        with pytest.raises(BundleError, match=f"^Cannot read {why}"):
            opened.load(tmp_path / name)
        with pytest.raises(DestinationError, match=f"^Cannot write {why}"):
            save(opened, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "fifo", opened.bundle.path.name]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no fifos here")
def test_a_request_with_a_fifo_is_refused_at_once(tmp_path: Path, at_once: None) -> None:
    os.mkfifo(tmp_path / "fifo")
    with LLM(demo_path(), threads=1, ctx=256) as llm:
        with pytest.raises(BundleError, match="it is a fifo, not a plain file"):
            next(llm.stream("Once", max_tokens=1, prompt_cache=tmp_path / "fifo"))
        assert llm.generate("Once", max_tokens=1)  # the turn was given back


@pytest.mark.slow
def test_what_leaves_prompts_as_they_are_shares_their_caches(tmp_path: Path) -> None:
    """Neurons are left out of decoded tokens only, so a prompt is that of the exact model, however it runs."""
    path, full = made(tmp_path / "m"), tmp_path / "cache"
    modes = [Recipe(), *(recipe_with(sparse=mode) for mode in ("off", "exact", "predict")),
             Recipe.parse("fuse_input+sparse:mode=predict,dense=0,exact=1"), Recipe.parse("fuse_input+sparse:mode=off")]
    for saves in modes[2:5]:
        with session(path, ctx=100, recipe=saves) as opened:
            logits = save(opened, full)
            sequence = opened.load(full)
            assert sequence.decoded is None
            opened.decode([sequence], [5])
            fork = opened.fork(sequence)
            opened.save(fork, tmp_path / "decoded")
            opened.truncate(fork, 40)
            opened.save(fork, tmp_path / "cut")
        assert (tmp_path / "cut").read_bytes()[:300] == full.read_bytes()[:300]
        for takes in modes:
            with session(path, ctx=100, recipe=takes) as other:
                sequence = other.load(full)
                other.truncate(sequence, 39)
                assert other.prefill(sequence, tokens(40)[39:]).tobytes() == logits, (saves, takes)
                if saves != takes and {"predict"} & {str(dict(step.settings).get("mode")) for step in saves.steps}:
                    with pytest.raises(BundleError, match=OTHER):
                        other.load(tmp_path / "decoded")
                elif saves == takes:
                    assert other.load(tmp_path / "decoded").decoded == (None if saves == modes[2] else 0)


def test_a_prompt_cache_outlives_a_choice_that_changes(tmp_path: Path) -> None:
    path, cache = made(tmp_path / "m"), tmp_path / "cache"
    prompt, options = tokens(60), {"temperature": 0, "max_tokens": 8}
    with LLM(path, ctx=128, threads=1, max_kld=0) as exact:
        list(exact.stream(prompt, prompt_cache=cache, **options))
    with LLM(path, ctx=128, threads=1, sparse="predict") as llm:
        want = llm.complete(prompt, **options).token_ids
        stream = llm.stream(prompt, prompt_cache=cache, **options)
        list(stream)
        assert stream.completion.token_ids == want and stream.completion.cached_tokens == 59
