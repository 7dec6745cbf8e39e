"""Sessions: refusals, and defaults of open settings; long contexts, large vocabularies by an oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.converters import convert
from edgeinfer.errors import BundleError, RequestError
from edgeinfer.graph import build_graph, read_config, requested_types
from edgeinfer.memory_planner import default_threads
from edgeinfer.runtime import Session
from tests.helpers.checkpoints import make_checkpoint, random_tensors, tiny_config
from tests.helpers.reference import forward
from tests.helpers.sessions import SPLIT, free_blocks, logits_of, scored, session, tokens, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


# -- the oracle --------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 270}),
        ("mistral", {"sliding_window": 33}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}),
        ("qwen3", {"head_dim": 34}),
    ],
)
def test_contexts_of_several_splits(model_type: str, overrides: dict[str, object], tmp_path: Path) -> None:
    """Logits of the last tokens of three attention splits: decoded one by one, four at a time, and as a block."""
    options = {"max_position_embeddings": 1024, **overrides}
    config = read_config(tiny_config(model_type, **options))
    convert(make_checkpoint(tmp_path / "checkpoint", model_type, **options), tmp_path / "bundle", weights="f32")
    ids = tokens(2 * SPLIT + 90, vocab_size=config.vocab_size)
    expected = forward(build_graph(config, requested_types("f32")), random_tensors(config), ids)[-9:]
    with session(tmp_path / "bundle", kv="f32", threads=2, prefill_chunk=200, outputs=9) as opened:
        decoded = logits_of(opened, ids, n_decoded=8)
        sequence = opened.new_sequence()
        opened.prefill(sequence, ids[:-9])
        block = scored(opened, ids[-9:], sequence)
        opened.truncate(sequence, len(ids) - 5)
        fours = opened.prefill(sequence, ids[-5:-1]).copy(), opened.prefill(sequence, ids[-1:])
        for logits in (decoded, block):
            assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
        assert np.array_equal(np.stack(fours), decoded[-2:])


def test_a_vocabulary_above_65536(tmp_path: Path) -> None:
    options = {"vocab_size": 70001, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    config = read_config(tiny_config(**options))
    checkpoint = make_checkpoint(tmp_path / "checkpoint", tokenizer=False, **options)
    ids = [0, 65535, 65536, 70000, 69999, 1]
    expected = forward(build_graph(config, requested_types("f32")), random_tensors(config), ids)
    convert(checkpoint, tmp_path / "bundle", weights="f32")
    with session(tmp_path / "bundle", kv="f32", threads=3, outputs=4) as opened:
        logits = scored(opened, ids)
        assert logits.shape == (6, 70001)
        assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_prompts_that_cannot_be_run(models: Path) -> None:
    with session(write_model(models), ctx=50, max_sequences=2, outputs=8) as opened:
        sequence = opened.new_sequence()
        opened.prefill(sequence, tokens(20))
        for ids, match in [
            ([], r"^The prompt is empty; give at least one token\.$"),
            ([1, 99], r"^Token id 99 is outside the vocabulary \(0 to 98\)\.$"),
            ([-1], r"^Token id -1 is outside the vocabulary \(0 to 98\)\.$"),
            (tokens(31), r"^31 tokens after 20 tokens do not fit the context of 50; shorten the prompt or raise --ctx "
                         r"\(the model allows 1024\)\.$"),
        ]:  # fmt: skip
            with pytest.raises(RequestError, match=match):
                opened.prefill(sequence, ids)
            with pytest.raises(RequestError, match=match):
                list(opened.score(sequence, ids))
        with pytest.raises(RequestError, match=r"^51 tokens do not fit the context of 50; shorten the prompt or raise"):
            opened.prefill(opened.new_sequence(), tokens(51))
        assert len(sequence) == 20 and opened.plan.kv_blocks - free_blocks(opened) == 2


def test_passes_that_cannot_be_decoded(models: Path) -> None:
    """`outputs` makes room for logits, not for sequences."""
    with session(write_model(models), ctx=50, max_sequences=2, outputs=8) as opened:
        first, second, third = (opened.new_sequence() for _ in range(3))
        for sequences, ids in ([], []), ([first, second, third], [1, 2, 3]):
            with pytest.raises(RequestError) as caught:
                opened.decode(sequences, ids)
            assert str(caught.value) == (
                f"{len(ids)} sequences with {len(ids)} tokens and {len(ids)} rows of logits do not fit one forward "
                "pass, which "
                "takes 1 to 2 sequences (max_sequences), 50 tokens (prefill_chunk) and 8 rows (outputs)."
            )
        with pytest.raises(RequestError, match=r"^1 sequences cannot continue with 2 tokens; give one for each\.$"):
            opened.decode([first], [1, 2])
        with pytest.raises(RequestError, match=r"^A sequence occurs twice in one forward pass; fork it\.$"):
            opened.decode([first, first], [1, 2])
        with pytest.raises(RequestError, match=r"^Token id 99"):
            opened.decode([first, second], [1, 99])
        assert len(first) == len(second) == 0


def test_a_context_longer_than_the_models(models: Path) -> None:
    match = r"^The context of 1025 tokens is longer than the model's 1024; lower --ctx\.$"
    with pytest.raises(RequestError, match=match):
        Session(Bundle.open(write_model(models)), RuntimeConfig(ctx=1025))


def test_a_closed_bundle(models: Path) -> None:
    bundle = Bundle.open(write_model(models))
    bundle.close()
    with pytest.raises(BundleError, match="was closed"):
        Session(bundle, RuntimeConfig(threads=1))


# -- what was left open ------------------------------------------------------------------------------------------------


def test_defaults(models: Path) -> None:
    opened = Session(Bundle.open(write_model(models)))
    try:
        assert (opened.config.ctx, opened.config.threads, opened.config.kv) == (1024, default_threads(), "int8")
        assert opened.budget_bytes >= opened.plan.total_bytes
    finally:
        opened.close()
    with session(write_model(models), ctx=20, prefill_chunk=512, max_sequences=3) as opened:
        assert opened.config.prefill_chunk == 20 and opened.config.outputs == 3
        opened.prefill(opened.new_sequence(), tokens(20))
