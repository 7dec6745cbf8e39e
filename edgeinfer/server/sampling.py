"""Fields that several APIs have in common, checked and turned into options of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..base.text_form import TextForm, text_form
from ..config import GenerationConfig
from ..errors import UsageError
from .errors import ApiError

if TYPE_CHECKING:
    from .models import Served
    from .settings import ServerConfig

RESERVED = ("messages", "tools", "stopped")
"""Names that a chat template has for other things than its settings."""
SPACE = 16
"""Tokens that several samples of a prompt may waste in blocks that they do not share."""


def options_of(config: ServerConfig, *, stop: str | list[str] | None = None, n: int | None = None,
               logit_bias: Mapping[str, float] | None = None, seed: int | None = None, **fields: Any
               ) -> dict[str, Any]:
    """Return the options of a request; those that were not given are left out.

    Raises
    ------
    ApiError
        One is out of its range; the message names it.
    """
    asked = {name: value for name, value in fields.items() if value is not None}
    if seed is not None:
        asked["seed"] = seed % (1 << 63)  # clients send -1 and other negative ones
    if stop is not None:
        asked["stop"] = _stops(config, [stop] if isinstance(stop, str) else stop)
    if n is not None:
        if not 1 <= n <= config.max_samples:
            raise ApiError(400, f"n is {n}; it must be from 1 to {config.max_samples} (--max-samples).", param="n")
        asked["n"] = n
    if logit_bias is not None:
        asked["logit_bias"] = _biases(logit_bias)
    for name, value in asked.items():
        try:
            GenerationConfig(**{name: value})
        except UsageError as error:
            raise ApiError(400, str(error), param=name) from None
    return asked


def renamed(error: ApiError, name: str) -> ApiError:
    """Return the error of an option that the API of the request calls by another name."""
    return ApiError(error.status, name + error.message.removeprefix(error.param or ""), param=name)


def _stops(config: ServerConfig, stops: list[str]) -> tuple[str, ...]:
    if len(stops) > config.max_stops:
        raise ApiError(400, f"stop has {len(stops)} strings; at most {config.max_stops} are taken.", param="stop")
    for one in stops:
        if not one or len(one) > config.max_stop_chars:
            raise ApiError(400, f"stop has a string of {len(one)} characters; it must have from 1 to "
                                f"{config.max_stop_chars}.", param="stop")
    return tuple(stops)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError:
        raise ApiError(400, "logit_bias has keys that are not token ids; /tokenize gives the ids of a text.",
                       param="logit_bias") from None


def form_of(response_format: Mapping[str, Any] | None, regex: str | None = None, grammar: str | None = None,
            name: str = "response_format") -> TextForm | None:
    """Return the form that a text is to have; raises `ApiError` where several are given, or one is wrong."""
    text = None if response_format == {"type": "text"} else response_format
    given = [field for field, value in ((name, text), ("regex", regex), ("grammar", grammar)) if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise ApiError(400, f"{' and '.join(given)} exclude each other; give one of them.", param=given[1])
    try:
        if regex is not None:
            return text_form({"type": "regex", "pattern": regex})
        if grammar is not None:
            return text_form({"type": "grammar", "grammar": grammar})
        assert response_format is not None
        if response_format.get("type") not in ("json_object", "json_schema", "regex", "grammar"):
            raise UsageError(f"its type is {str(response_format.get('type'))[:40]!r}; choose text, json_object or "
                             "json_schema")
        return text_form(dict(response_format))
    except UsageError as error:
        raise ApiError(400, f"{given[0]}: {error}", param=given[0]) from None


def form_field(regex: str | None, grammar: str | None) -> str:
    """Return the field of a request that says which form its text is to have."""
    return "regex" if regex is not None else "grammar" if grammar is not None else "response_format"


def prompts_of(given: str | list[Any], name: str, most: int) -> list[str | list[int]]:
    """Return the texts of a request, or the tokens of each; raises `ApiError` for none, too many, or a mixture."""
    kinds = {type(one) for one in given} if isinstance(given, list) else {str}
    if len(kinds) > 1:
        raise ApiError(400, f"{name} mixes texts and token ids; give either.", param=name)
    found = list(given) if isinstance(given, list) and kinds != {int} else [given]
    if not all(found) or not found:
        raise ApiError(400, f"{name} is empty, or has an empty text; give some text or token ids.", param=name)
    if len(found) > most:
        raise ApiError(400, f"{name} has {len(found)} texts; at most {most} are taken.", param=name)
    return found


def check_ids(ids: list[int], served: Served, name: str) -> None:
    """Raise `ApiError` for an id that is no token of the model."""
    size = served.model.runner.model.vocab_size
    if wrong := [one for one in ids if not 0 <= one < size]:
        raise ApiError(400, f"{name} has the id {wrong[0]}; ids are from 0 to {size - 1}.", param=name)


def fitted(options: dict[str, Any], served: Served, n_prompt: int, most: int | None) -> dict[str, Any]:
    """Return options with the number of tokens that an answer may have: all that there is room for, and `most`."""
    left = served.room - n_prompt
    if (n := options.get("n", 1)) > 1:
        left = min(left, (served.pool - n_prompt) // n - SPACE)
    return {**options, "max_tokens": max(left, 1) if most is None else min(most, max(left, 1))}


def at_least_one(name: str, value: int | None) -> None:
    """Raise `ApiError` for a number below 1."""
    if value is not None and value < 1:
        raise ApiError(400, f"{name} is {value}; it must be 1 or more.", param=name)


def template_of(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return settings of the chat template; raises `ApiError` for one that is no setting of it."""
    if wrong := [name for name in given or () if name in RESERVED]:
        raise ApiError(400, f"chat_template_kwargs.{wrong[0]} is not a setting of a chat template; omit it.",
                       param=f"chat_template_kwargs.{wrong[0]}")
    return {**({} if effort is None else {"reasoning_effort": effort}), **(given or {})}


def refuse(fields: Mapping[str, Any], remedies: Mapping[str, str]) -> None:
    """Raise `ApiError` for a field that the API has and this server lacks, with a remedy."""
    for name, value in fields.items():
        if value is not None:
            raise ApiError(400, f"{name} is not supported here; {remedies.get(name, 'leave it out')}.", param=name,
                           code="unsupported_parameter")


def only(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise `ApiError` for a value that this server cannot serve."""
    if value is not None and value not in (listed := list(allowed)):
        served = ", ".join(dict.fromkeys(map(str, listed)))
        raise ApiError(400, f"{name} is {str(value)[:60]!r}; this server serves {served} alone.", param=name,
                       code="unsupported_value")
