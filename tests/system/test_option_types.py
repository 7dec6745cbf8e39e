"""Values of wrong types, for every option of every entry point: taken, or refused by name in one sentence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.base.validation import shown
from edgeinfer.converters import convert
from edgeinfer.errors import CheckpointError, EdgeInferError, ModelNotFoundError, RequestError, UsageError
from edgeinfer.llm.api import LLM
from edgeinfer.llm.options import ChatOptions, RequestOptions, TechniqueOptions
from edgeinfer.quality.evaluate import token_stream
from edgeinfer.sparse import screen_head, sparsify
from tests.system.test_options import GENERATION, HELLO, PROMPT, RUNTIME, Unprintable, decimal, whole


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", ctx=64, max_sequences=2, threads=1) as model:
        yield model


WRONG: list[Any] = [True, "", "x", -1, 0, 1.5, math.nan, math.inf, 10**30, [], {}, {"a": 1}, b"x", object(),
                    Unprintable(), np.zeros((2, 2))]
"""Values that no option, or few, may have."""


def flag(value: Any) -> bool:
    return type(value) is bool


def name_of(value: Any) -> bool:
    return isinstance(value, (str, Path)) and value not in ("", "\ud800")


def one_of(*names: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(name) and value == name for name in names)


TYPES = one_of("q4", "int8", "f16", "f32")
CONVERT = {
    "source": name_of, "destination": name_of, "weights": TYPES, "group_size": one_of(32, 64, 128), "embedding": TYPES,
    "head": TYPES, "ffn_layout": one_of("tile16", "neuron"), "overwrite": flag,
    "origin": lambda value: isinstance(value, str), "announce": callable, "progress": callable,
    "calibration": callable,
    "chooser": callable,
}
SPARSIFY = {
    "source": lambda value: False, "destination": name_of, "stream": lambda value: False,
    "kind": one_of("sign", "lowrank", "threshold"), "max_kld": decimal(lambda x: x > 0), "rank": whole(1),
    "epochs": whole(0, 100), "threads": whole(1, 256), "overwrite": flag, "on_progress": callable, "in_tiles": callable,
    "held_out": lambda value: isinstance(value, list) and not value,
}
MODEL = {
    **RUNTIME, "model": name_of, "recipe": name_of, "sparse": one_of("off", "exact", "predict"),
    "head": one_of("exact", "screened"), "attention": one_of("exact"), "max_kld": decimal(lambda x: x >= 0),
    "draft": name_of, "device": one_of("cpu"), "weights": TYPES, "group_size": one_of(32, 64, 128),
    "draft_tokens": whole(1, 64), "lazy_layers": lambda value: False, "prefix_file": name_of,
    "max_queue": whole(1), "fill_budget": flag, "split": lambda value: isinstance(value, str) and name_of(value),
}
REQUEST = {**GENERATION, "config": lambda value: False, "reuse": flag, "prompt_cache": name_of, "progress": callable,
           "generated": lambda value: isinstance(value, list) and not value}
CHAT = {**REQUEST, "messages": lambda value: False, "tools": lambda value: isinstance(value, list) and not value,
        "template_options": lambda value: isinstance(value, dict)}


def refused_or_allowed(call: Callable[..., Any], name: str, value: Any, good: bool,
                       further: type[EdgeInferError]) -> None:
    """A wrong value is refused by its name; with a good one the call goes on to what else is wrong with it."""
    try:
        call(**{name: value})
    except UsageError as error:
        assert not good and name in str(error) and (shown(value) in str(error) or not value), error
    except EdgeInferError as error:
        assert isinstance(error, further) and (good or name in str(error)), f"{name}={value!r:.60}: {error}"
    except Exception as error:
        pytest.fail(f"{name}={value!r:.60}: a bare {type(error).__name__}: {error}")
    else:
        assert good, f"{name} took {value!r:.60} without a word"


def parameters_of(function: Callable[..., Any]) -> set[str]:
    return {one.name for one in inspect.signature(function).parameters.values()
            if one.name != "self" and one.kind is not one.VAR_KEYWORD}


@pytest.mark.parametrize("value", WRONG, ids=lambda value: f"{type(value).__name__}-{value!r:.9}" if not isinstance(
    value, (Unprintable, np.ndarray)) else type(value).__name__)
def test_wrong_values_of_every_option_of_every_entry_point(llm: LLM, value: Any, monkeypatch: pytest.MonkeyPatch,
                                                           tmp_path: Path) -> None:
    from edgeinfer.text import ChatTemplate

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llm, "chat_template", ChatTemplate({"default": "{{ messages[0].content }}"}, {}))
    stream = token_stream(llm.tokenizer, "A cat.")
    destination = str(tmp_path / "bundle")

    def searching(given: dict[str, Any]) -> dict[str, Any]:
        return {"beams": 2} if set(given) & {"length_penalty", "early_stopping"} else {}

    def model(**given: Any) -> None:
        LLM(**{"model": "no-such-model", **given})

    def generated(**given: Any) -> None:
        llm.generate(PROMPT, **{"max_tokens": 0, **searching(given), **given})

    def chatted(**given: Any) -> None:
        llm.chat(**{"messages": [HELLO], "max_tokens": 0, **searching(given), **given})

    def converted(**given: Any) -> None:
        convert(**{"source": "no-such-checkpoint", "destination": destination, **given})

    def sparsified(**given: Any) -> None:
        sparsify(**{"source": llm._bundle, "destination": destination, "stream": stream, **given})

    def screened(**given: Any) -> None:
        screen_head(**{"source": llm._bundle, "destination": destination, "stream": stream, **given})

    for call, table, further in [
        (model, MODEL, ModelNotFoundError), (generated, REQUEST, RequestError), (chatted, CHAT, RequestError),
        (converted, CONVERT, CheckpointError), (sparsified, SPARSIFY, EdgeInferError),
        (screened, {name: SPARSIFY[name] for name in parameters_of(screen_head)}, RequestError),
    ]:
        for name, good in table.items():
            refused_or_allowed(call, name, value, good(value), further)


def test_the_tables_name_every_option_of_every_entry_point() -> None:
    assert set(MODEL) == parameters_of(LLM.__init__) | TechniqueOptions.__optional_keys__
    assert set(CONVERT) == parameters_of(convert)
    assert set(SPARSIFY) == parameters_of(sparsify)
    assert set(SPARSIFY) >= parameters_of(screen_head)
    assert set(REQUEST) == RequestOptions.__optional_keys__
    assert set(CHAT) == ChatOptions.__optional_keys__ | parameters_of(LLM.chat)
