"""Models that the Python API opens, refuses and closes."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.errors import (
    BudgetError,
    BundleError,
    ClosedError,
    ModelNotFoundError,
    RequestError,
    UsageError,
)
from edgeinfer.llm.api import LLM
from tests.helpers.checkpoints import make_checkpoint


def test_models_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="Unknown model"):
        LLM("no-such-model")
    with pytest.raises(BudgetError, match=r"The run needs .* MB, and the budget is 1\.0 MB") as caught:
        LLM("demo", budget="1MB")
    assert caught.value.plan is not None
    with pytest.raises(UsageError, match="Size '4' cannot be read"):
        LLM("demo", budget="4")
    with pytest.raises(UsageError, match="kv is 'int4'; choose one of int8, f16, f32"):
        LLM("demo", kv="int4")
    with pytest.raises(RequestError, match="The context of 4096 tokens is longer than the model's 1024"):
        LLM("demo", ctx=4096)


def test_a_bundle_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    from edgeinfer.converters import convert

    convert(make_checkpoint(tmp_path / "checkpoint", tokenizer=False), tmp_path / "bundle")
    with LLM(tmp_path / "bundle") as llm:
        done = llm.complete([1, 5, 9], max_tokens=4, ignore_eos=True, logprobs=0)
        assert len(done.token_ids) == 4 and done.text == "" and done.logprobs and done.logprobs[0].text == ""
        with pytest.raises(RequestError, match="has no tokenizer; give token ids instead of text"):
            llm.generate("text")
        with pytest.raises(RequestError, match="Stop strings need a tokenizer, and this bundle has none"):
            llm.generate([1, 5], stop="x")


def test_a_damaged_tokenizer_is_found_when_the_model_is_opened(tmp_path: Path) -> None:
    from edgeinfer.converters import convert

    convert(make_checkpoint(tmp_path / "checkpoint"), tmp_path / "bundle")
    file = tmp_path / "bundle" / "tokenizer.json"
    file.write_text("{" * file.stat().st_size)
    with pytest.raises(BundleError, match=r"the file 'tokenizer.json' is damaged: its checksum does not match"):
        LLM(tmp_path / "bundle")


# -- closing ----------------------------------------------------------------------------------------------------------


def test_a_closed_model_refuses_requests_and_may_be_closed_again() -> None:
    llm = LLM("demo", ctx=64)
    stream = llm.stream("Once upon a time")
    llm.close()
    llm.close()
    for request in (lambda: llm.generate("Once upon a time"), lambda: next(stream)):
        with pytest.raises(ClosedError, match="The model was closed; open it again"):
            request()
