"""Tiny random models and the sessions that run them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgeinfer import registry
from edgeinfer.backends import OnnxRunner, provider_of
from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import write_random_bundle
from edgeinfer.graph import LatentConfig, ModelConfig, RecurrentConfig, RopeConfig
from edgeinfer.runner import Runner, Sequence
from edgeinfer.runner.prefix_cache import PrefixCache
from edgeinfer.runtime import Session

SPLIT = 256
"""Tokens of an attention split (kernels/abi/kv.py): contexts in tests go beyond two of them."""
TINY = ModelConfig(
    "llama", vocab_size=99, hidden_size=36, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=6, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=1024,
)
"""GQA with a group of 3; no dimension is a multiple of 16."""
WINDOWED = replace(TINY, model_type="mistral", num_hidden_layers=3, windows=(0, 300, 40))
"""Windows longer and shorter than a split beside full attention."""

HYBRID = ModelConfig(
    "qwen3_5_text", vocab_size=99, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, hidden_act="silu", rms_norm_eps=1e-6, max_position_embeddings=1024,
    rotary_dim=4, attention_gate=True,
    recurrent=RecurrentConfig("delta", (0, 2), conv_width=4, heads=4, key_heads=2, key_dim=12, value_dim=20))
"""Two delta rules around gated attention; no dimension is a multiple of 16."""
KIMI = replace(
    HYBRID, model_type="kimi_linear", num_key_value_heads=1, head_dim=22, rotary_dim=6, attention_gate=False,
    rope=RopeConfig(kind="none"), attention_scale=0.25, latent=LatentConfig(0, 10, 16, False),
    recurrent=RecurrentConfig("delta", (0, 2), conv_width=3, heads=4, key_heads=4, key_dim=12, value_dim=12,
                              by_row=True))
"""The same, but rows of a state decay by themselves, and attention is latent and turns nothing."""


def tokens(n: int, seed: int = 0, vocab_size: int = TINY.vocab_size) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab_size, n).tolist()


def write_model(directory: Path, config: ModelConfig = TINY, weights: str = "q4", group_size: int = 32) -> Path:
    """A bundle with random weights, written once per directory; gives its path."""
    path = directory / f"{config.model_type}-{weights}-{group_size}"
    if not path.exists():
        write_random_bundle(config, path, weights, group_size)
    return path


def config_of(**options: Any) -> RuntimeConfig:
    """Settings of a run from their fields and from options of techniques."""
    own = {one.name for one in registry.options()} - {one.name for one in dataclasses.fields(RuntimeConfig)}
    fields = {name: value for name, value in options.items() if name not in own}
    return registry.configured(RuntimeConfig(**fields), {name: options[name] for name in own & options.keys()})


@contextmanager
def session(path: Path, **options: Any) -> Iterator[Session]:
    """An open session; one thread and a small chunk unless asked otherwise."""
    config = config_of(**{"threads": 1, "prefill_chunk": 64, **options})
    opened = Session(Bundle.open(path), config)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def on_device(name: str) -> Iterator[dict[str, Any]]:
    """Options of `LLM` for a device, where ``pages`` is what stands in for one that has them, while the model opens."""
    if name != "pages":
        yield {"device": name}
        return
    pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    from tests.helpers.onnx_pages import PAGED

    with mock.patch.dict("edgeinfer.backends.onnx.devices.PROVIDERS", {PAGED.device: PAGED}):
        yield {"device": PAGED.device, "kv_layout": "pages"}


@contextmanager
def running(path: Path, device: str = "cpu", **options: Any) -> Iterator[Runner]:
    """As `session`, on any device: our own kernels, a provider of onnxruntime, or with ``pages`` what stands in for one
    that has them; KV blocks of a plan differ."""
    if device == "cpu":
        with session(path, **options) as ours:
            yield ours
        return
    pytest.importorskip("onnx", reason="onnx is not installed (extra 'onnx')")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra 'onnx')")
    if device == "pages":
        from tests.helpers.onnx_pages import PAGED

        provider, options = PAGED, {"kv_layout": device, **options}
    else:
        provider = provider_of(device)
        assert provider
    config = config_of(**{"threads": 1, "prefill_chunk": 64, "kv": provider.kv[0], **options})
    opened = OnnxRunner(Bundle.open(path), config, provider)
    try:
        yield opened
    finally:
        opened.close()


def logits_of(opened: Runner, ids: list[int], n_decoded: int = 0) -> np.ndarray:
    """Logits after the prompt and after each of the last n tokens, decoded one by one: (1 + n, vocab_size)."""
    sequence = opened.new_sequence()
    n = len(ids) - n_decoded
    rows = [opened.prefill(sequence, ids[:n]).copy()]
    rows += [opened.decode([sequence], [token])[0].copy() for token in ids[n:]]
    opened.release(sequence)
    return np.stack(rows)


def scored(opened: Runner, ids: list[int], sequence: Sequence | None = None) -> np.ndarray:
    """Logits after every token, of shape (T, vocab_size)."""
    own = sequence or opened.new_sequence()
    rows = np.concatenate([rows.copy() for _, rows in opened.score(own, ids)])
    if sequence is None:
        opened.release(own)
    return rows


def held_in(opened: Session, sequence: Sequence, layer: int) -> list[int]:
    """Blocks that a sequence holds in a layer; GONE for those that were given back."""
    if not opened.plan.windowed or layer not in opened.plan.windowed.layers:
        return sequence.blocks
    assert sequence.recent
    return sequence.recent.blocks


def own_threads() -> int:
    """Threads that sessions have started; those of engines, which linger for a second, are others."""
    return sum(thread.name.startswith("edgeinfer-") for thread in threading.enumerate())


def free_blocks(opened: Runner) -> int:
    """KV blocks that no sequence holds; the prefix cache may have some of them."""
    assert isinstance(opened, (Session, OnnxRunner))
    pool = opened.kv.pool
    return pool.n_available if isinstance(pool, PrefixCache) else pool.n_free
