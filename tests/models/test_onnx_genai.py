"""Exports in onnxruntime-genai, which is not a dependency: ``pip install onnxruntime-genai`` into an environment with
the extra `onnx` (never `gpu`, for it brings the other wheel) and these tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.backends import Flavour, export
from edgeinfer.bundle import Bundle
from edgeinfer.converters import convert
from edgeinfer.text import Tokenizer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.onnx_models import expected

genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7, "hidden_act": "gelu"},
    "qwen2": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen3": {},
}


def greedy(model: Any, ids: list[int], n: int) -> list[int]:
    """The tokens that genai chooses."""
    settings = genai.GeneratorParams(model)
    settings.set_search_options(do_sample=False, max_length=len(ids) + n)
    generator = genai.Generator(model, settings)
    generator.append_tokens(ids)
    found = []
    while len(found) < n and not generator.is_done():
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    return found


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("name", MODELS)
def test_it_continues_greedily_as_the_oracle_does(name: str, dtype: str, tmp_path: Path) -> None:
    """Teacher-forced with its own tokens: each is the oracle's wherever the two best logits differ enough."""
    convert(make_checkpoint(tmp_path / "c", name, **MODELS[name]), tmp_path / "b")
    bundle = Bundle.open(tmp_path / "b")
    export(bundle, tmp_path / "g", Flavour(target="genai", dtype=dtype))
    model = genai.Model(str(tmp_path / "g"))
    prompt = [1, 70, 71, 72, 90, 110, 75, 12, 200, 31]
    found = greedy(model, prompt, 16)
    assert len(found) == 16 or found[-1] in bundle.config.eos_token_ids
    logits = expected(bundle, prompt + found[:-1])[len(prompt) - 1 :]
    second, first = np.partition(logits, -2)[:, -2:].T
    clear = first - second > {"f32": 1e-4, "f16": 1e-2}[dtype] * np.abs(logits).max()
    assert np.array_equal(logits.argmax(-1)[clear], np.array(found)[clear])
    assert clear.sum() > 0.7 * len(found)


def test_it_reads_the_tokenizer(tmp_path: Path) -> None:
    """It adds no token that begins a text: who encodes puts bos before the ids."""
    convert(make_checkpoint(tmp_path / "c"), tmp_path / "b")
    export(Bundle.open(tmp_path / "b"), tmp_path / "g", Flavour(target="genai"))
    tokenizer, ours = genai.Tokenizer(genai.Model(str(tmp_path / "g"))), Tokenizer.open(tmp_path / "b")
    text = "The old king had three daughters."
    ids = tokenizer.encode(text).tolist()
    assert ids == [token for token in ours.encode(text) if token != ours.bos_id]
    assert tokenizer.decode(ids) == text
