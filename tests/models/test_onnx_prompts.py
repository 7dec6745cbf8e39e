"""Prompts that onnxruntime computes for our own kernels: KV blocks, what continues from them, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends.onnx import pages, slots
from edgeinfer.backends.onnx.devices import PROVIDERS
from edgeinfer.backends.onnx.flavour import Heads
from edgeinfer.backends.onnx.runner import OnnxRunner
from edgeinfer.backends.onnx.sessions import Sessions
from edgeinfer.backends.onnx.slabs import Layout, Slabs
from edgeinfer.errors import BundleError, ClosedError, RequestError
from edgeinfer.graph import RopeConfig
from edgeinfer.runner import Runner, Sequence, prompt_parts
from edgeinfer.runtime import Session
from tests.helpers.sessions import HYBRID, KIMI, TINY, WINDOWED, running, session, tokens, write_model

pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
WHOLE = replace(TINY, model_type="qwen3", head_dim=32, rotary_dim=16)
"""Heads that need no padding, of which a part turns."""
LIMITS = {"f32": 1e-5, "f16": 1e-2, "int8": 5e-2}
"""Of the largest logit: by type of the KV cache, a value that is rounded to its other side."""


def handed(other: Runner, own: Session, ids: list[int], chunk: int = 24) -> Sequence:
    """Return a sequence of our own kernels whose prompt another runner has computed in chunks."""
    sequence, target, sent = other.new_sequence(), own.new_sequence(), 0
    for start in range(0, len(ids), chunk):
        other.prefill(sequence, ids[start : start + chunk])
        for part in other.read_blocks(sequence, sent, start + chunk >= len(ids), own.block_form):
            assert not target.tokens
            list(own.write_blocks(target, part, ids))
        sent = len(sequence) // 16
    other.release(sequence)
    return target


def worst(own: Session, sequence: Sequence, ids: list[int]) -> float:
    """Return the largest difference of three decoded tokens to those of one runner, as a share of the largest logit."""
    right, found = own.new_sequence(), 0.0
    own.prefill(right, ids)
    assert len(sequence) == len(right)
    for token in (5, 6, 7):
        want = own.decode([right], [token])[0].copy()
        found = max(found, float(np.abs(own.decode([sequence], [token])[0] - want).max() / np.abs(want).max()))
    own.release(right)
    own.release(sequence)
    return found


@pytest.mark.parametrize("device", ["onnx-cpu", "pages"])
@pytest.mark.parametrize("kv", list(LIMITS))
@pytest.mark.parametrize("config", [TINY, WHOLE], ids=["padded heads", "whole heads"])
def test_decoding_goes_on_where_onnxruntime_ended(config: Any, kv: str, device: str, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_parts, "PART_BYTES", 2000)
    path = write_model(tmp_path, config, "f32")
    with session(path, ctx=96, kv=kv, max_sequences=2) as own, \
            running(path, device, ctx=96, kv="f32", prefill_chunk=24) as other:
        for n in (70, 80, 1):
            ids = tokens(n, n)
            assert worst(own, handed(other, own, ids), ids) < LIMITS[kv]
        assert own.free_blocks == own.n_blocks


@pytest.mark.parametrize("kv", list(LIMITS))
def test_the_first_layers_blocks_are_those_of_the_kernels(kv: str, tmp_path: Path) -> None:
    """Later layers differ: attention of our own kernels reads K and V as they are stored."""
    path, ids = write_model(tmp_path, TINY, "f32"), tokens(60)
    with session(path, ctx=96, kv=kv) as own, running(path, "onnx-cpu", ctx=96, prefill_chunk=60) as other:
        found = []
        for runner, form in ((own, None), (other, own.block_form)):
            runner.prefill(sequence := runner.new_sequence(), ids)
            part, = runner.read_blocks(sequence, 0, True, form)
            found.append(np.frombuffer(part[part.index(b"}") + 1 :], np.uint8))
        assert found[0].size == found[1].size == own.plan.sequence_bytes(60)
        first, second = (one[: one.size // 2] for one in found)
        if kv == "f32":
            assert np.allclose(first.view(np.float32), second.view(np.float32), rtol=1e-4, atol=1e-6)
        else:
            assert (first == second).mean() > 0.999


@pytest.mark.parametrize("device", ["onnx-cpu", "pages"])
def test_layers_with_a_window_get_what_the_next_token_sees(device: str, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    asked, read = set[tuple[int, ...]](), Sessions.read

    def reading(*given: Any) -> Any:
        asked.add(tuple(given[-1]))
        return read(*given)

    monkeypatch.setattr(Sessions, "read", reading)
    path, ids = write_model(tmp_path, replace(WINDOWED, windows=(0, 40, 40)), "f32"), tokens(300)
    with session(path, ctx=640, kv="f32", max_sequences=2) as own, \
            running(path, device, ctx=640, kv="f32", prefill_chunk=64) as other:
        assert own.block_form and own.block_form.windows
        sequence = handed(other, own, ids, 64)
        assert sequence.recent is not None and sequence.recent.gone == 261 // 16
        assert worst(own, sequence, ids) < LIMITS["f32"]
    assert asked == {(0, 1), (2, 3, 4, 5)}  # a part reads its own layers alone


class Copies:
    """A binding that counts the elements of each slab that would be copied."""

    def __init__(self) -> None:
        self.elements = Counter[str]()

    def bind_input(self, *given: Any) -> None:
        self.elements[given[0].removeprefix("from.")] += int(np.prod(given[4]))

    def bind_output(self, *given: Any) -> None:
        assert self.elements[given[0].removeprefix("to.")] >= int(np.prod(given[4]))


@pytest.mark.parametrize("layout", [pages.LAYOUT, slots.LAYOUT], ids=["pages", "slots"])
def test_each_head_of_the_slabs_that_are_read_is_copied_once(layout: Layout) -> None:
    heads = {layer: Heads(4, kv, 16) for layer, kv in enumerate((1, 3, 4))}
    slabs, binding = Slabs(layout, heads, 2, 32, "f32", PROVIDERS["onnx-cpu"]), Copies()
    for head in range(slabs.heads_apart((0, 1, 2, 3))):
        slabs.bind_read(binding, 1, 2, 7, head, (0, 1, 2, 3))
    per_head = 5 * 16
    copied = [per_head, per_head, 3 * per_head, 3 * per_head, 0, 0]
    assert [binding.elements[slab.past] for slab in slabs.slabs] == copied


@pytest.mark.parametrize(("kv", "value", "why"), [
    ("f16", 1e5, r"A value of 1e\+05 .* exceeds 6.55e\+04, the largest of KV type f16; choose --kv f32\."),
    ("int8", 1e7, r"exceeds 8.32e\+06, the largest of KV type int8; choose --kv f32\."),
    ("f32", np.inf, r"A value of inf .*; compute it without --prefill-device\."),
    ("int8", np.nan, r"A value of nan .*; compute it without --prefill-device\.")], ids=["f16", "int8", "inf", "nan"])
def test_values_that_the_kv_type_does_not_hold_are_refused(kv: str, value: float, why: str, tmp_path: Path) -> None:
    path, ids = write_model(tmp_path, TINY, "f32"), tokens(20)
    with session(path, ctx=96, kv=kv) as own, running(path, "onnx-cpu", ctx=96) as other:
        assert isinstance(other, OnnxRunner)
        other.prefill(sequence := other.new_sequence(), ids)
        list(other.read_blocks(sequence, 0, True, own.block_form))
        other.slabs._kept[1][sequence.blocks[0], -1, 19, 2] = value
        with pytest.raises(RequestError, match=why):
            list(other.read_blocks(sequence, 0, True, own.block_form))


def test_parts_of_two_executors_are_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_parts, "PART_BYTES", 2000)
    path, ids = write_model(tmp_path), tokens(64)
    with session(path, ctx=96) as own, running(path, "onnx-cpu", ctx=96) as other:
        parts = []
        for runner, form in ((own, None), (other, own.block_form)):
            runner.prefill(sequence := runner.new_sequence(), ids)
            parts.append(list(runner.read_blocks(sequence, 0, True, form)))
            runner.release(sequence)
        for first, last in (parts, reversed(parts)):
            sequence = own.new_sequence()
            list(own.write_blocks(sequence, first[0], ids))
            before = sequence.unlike
            with pytest.raises(BundleError, match="came from two executors; ask again"):
                list(own.write_blocks(sequence, last[1], ids))
            assert sequence.unlike == before and not sequence.tokens
            own.release(sequence)


def test_others_run_between_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_parts, "PART_BYTES", 2000)
    path, ids = write_model(tmp_path), tokens(64)
    with session(path, ctx=96) as own, \
            running(path, "onnx-cpu", ctx=96, max_sequences=2) as other:
        other.prefill(sequence := other.new_sequence(), ids)
        parts = other.read_blocks(sequence, 0, True, own.block_form)
        assert next(parts)
        thread = Thread(target=other.prefill, args=(other.new_sequence(), ids), daemon=True)
        thread.start()
        thread.join(120)
        assert not thread.is_alive()
        assert next(parts)
        other.release(sequence)
        with pytest.raises(RequestError, match="was cut while its K and V were read"):
            next(parts)
        form = own.block_form
        other.close()
        with pytest.raises(ClosedError):
            other.read_blocks(sequence, 0, True, form)


def test_its_blocks_are_neither_cached_nor_saved(tmp_path: Path) -> None:
    path, ids = write_model(tmp_path), tokens(64)
    with session(path, ctx=96, max_sequences=2) as own, running(path, "onnx-cpu", ctx=96, prefill_chunk=24) as other:
        sequence = handed(other, own, ids)
        copy = own.fork(sequence)
        for one in (sequence, copy):
            assert one.unlike
            own.cache_prefix(one)
            with pytest.raises(RequestError, match="Another executor computed the prompt"):
                own.save(one, tmp_path / "prompt")
        assert not own.prefix_blocks and not (tmp_path / "prompt").exists()
        own.prefill(own_one := own.new_sequence(), ids[:32])
        own.cache_prefix(own_one)
        assert own.prefix_blocks == 2


def test_what_does_not_go_over_is_refused(tmp_path: Path) -> None:
    path, ids = write_model(tmp_path / "a"), tokens(20)
    for config in (HYBRID, KIMI):
        with session(write_model(tmp_path / config.model_type, config)) as own:
            assert own.block_form is None
    stretched = replace(TINY, rope=RopeConfig(300.0, "dynamic", 4.0, 64))
    for ctx in (64, 65):
        with session(write_model(tmp_path / "dynamic", stretched), ctx=ctx) as own:
            assert (own.block_form is None) == (ctx > 64)
    with session(path, ctx=96) as own, running(path, "onnx-cpu", ctx=96, prefill_chunk=24) as other, \
            session(write_model(tmp_path / "b", TINY, "f16"), ctx=96) as unlike:
        sequence = other.new_sequence()
        other.prefill(sequence, ids)
        for form in (None, unlike.block_form):
            with pytest.raises(RequestError, match="for our own kernels with the same bundle alone"):
                other.read_blocks(sequence, 0, True, form)
        with pytest.raises(RequestError, match="those of the same arithmetic alone"):
            own.read_blocks(own.new_sequence(), 0, True, own.block_form)
        assert own.block_form
        parts = list(other.read_blocks(sequence, 0, True, own.block_form))
        with pytest.raises(BundleError, match="another model or version"):
            list(unlike.write_blocks(unlike.new_sequence(), parts[0], ids))
