"""Chat templates: from messages to the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.process import ProcessLock
from ..base.validation import FLAG, Rule, checked, shown
from ..errors import RequestError, TokenizerError
from .files import REMEDY, read_optional_object, read_text, token_content

MAX_TEMPLATE_BYTES = 1_000_000
"""Templates in use have some ten thousand."""
MAX_TEMPLATES = 16
TEMPLATE_FILE, FOLDER = "chat_template.jinja", "additional_chat_templates"
MAX_DEPTH = 64
"""Nesting limit of messages, tools and variables."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _objects(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise TypeError
    return list(value)


_TOOLS = Rule("a list of JSON schemas, each a mapping", _objects)


class ChatTemplate:
    """Renders messages with a checkpoint's Jinja template; safe to share between threads.

    A template is a program from a stranger, so it runs in Jinja's sandbox with bounded work (see `sandbox`), sees
    plain data only, and can neither change its input nor import anything.

    Parameters
    ----------
    templates : source by name; ``tool_use`` serves calls with tools, ``default`` all others
    tokens : special tokens that templates refer to (``bos_token``, ...)
    source : the file, for messages
    files : the file of each template, where they have files of their own
    """

    def __init__(self, templates: Mapping[str, str], tokens: Mapping[str, Any], source: Path | str = "chat template",
                 files: Mapping[str, Path] | None = None):
        for name, text in templates.items():
            if len(text.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
                raise TokenizerError(
                    f"{source}: chat template {name!r} is over the limit of {MAX_TEMPLATE_BYTES} bytes."
                )
        self._templates = dict(templates)
        self._tokens = dict(tokens)
        self._source = source
        self._files = files or {}
        self._compiled: dict[str, Any] = {}
        self._lock = ProcessLock()

    @classmethod
    def open(cls, directory: Path | str) -> ChatTemplate | None:
        """Open the chat templates of a bundle or checkpoint directory; None without any.

        Files of their own (`template_files`) go before the ``chat_template`` of tokenizer_config.json, which is a
        string or a list of named ones.

        Raises
        ------
        TokenizerError
            A file is damaged.
        """
        directory = Path(directory)
        settings_path, files = directory / "tokenizer_config.json", template_files(directory)
        settings = read_optional_object(settings_path)
        older_settings = read_optional_object(directory / "special_tokens_map.json")
        tokens = _special_tokens(older_settings) | _special_tokens(settings)
        if len(files) > MAX_TEMPLATES:
            raise TokenizerError(f"{directory} has {len(files)} chat templates, but may have at most {MAX_TEMPLATES}; "
                                 "remove those that nothing needs.")
        if files:
            texts = {name: read_text(path, MAX_TEMPLATE_BYTES) for name, path in files.items()}
            return cls(texts, tokens, directory, files)
        value = settings.get("chat_template")
        if not value:
            return None
        templates = {"default": value} if isinstance(value, str) else _named_templates(value)
        if templates is None:
            raise TokenizerError(
                f"{settings_path}: chat_template is neither text nor a list of named templates; {REMEDY}."
            )
        return cls(templates, tokens, settings_path)

    @property
    def source_text(self) -> str:
        """Source of the template for conversations with tools, or of the only one."""
        return self._templates.get("tool_use", self._templates.get("default", ""))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stopped: Callable[[], bool] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text for these messages; it holds its special tokens, so encode it with ``parse_special=True``.

        Parameters
        ----------
        messages : each with ``role`` and ``content`` (text, or a list of parts)
        add_generation_prompt : end with the opening of the assistant's answer
        tools : JSON schemas of functions that the model may call
        stopped : asked all the while; True ends the rendering with a `CancelledError`
        variables : further settings that the template knows, such as ``enable_thinking``

        Raises
        ------
        RequestError
            The messages are not of this form.
        TokenizerError
            The template is damaged, refuses these messages, or does more work than the sandbox allows.
        """
        known: dict[str, Any] = {"documents": None, **self._tokens, **_plain(variables, "variables")}
        known["messages"] = _plain(_checked(messages), "messages")
        tools = None if tools is None else checked("tools", tools, _TOOLS, RequestError)
        known["tools"] = _plain(tools, "tools") if tools else None
        known["add_generation_prompt"] = checked("add_generation_prompt", add_generation_prompt, FLAG)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TokenizerError(
                f"{self._source} has no default chat template, only {', '.join(sorted(self._templates))}; {REMEDY}."
            )
        with self._lock:
            from .sandbox import render

            return render(self._template(name), known, self._where(name), stopped)

    def check(self) -> None:
        """Compile all templates; raises `TokenizerError` if one is damaged."""
        with self._lock:
            for name in self._templates:
                self._template(name)

    def _template(self, name: str) -> Any:
        from .sandbox import compile_template

        if name not in self._compiled:
            self._compiled[name] = compile_template(self._templates[name], self._where(name))
        return self._compiled[name]

    def _where(self, name: str) -> str:
        return str(self._files.get(name, self._source))


def template_files(directory: Path) -> dict[str, Path]:
    """Return the files of a directory that hold chat templates, by the template's name.

    A checkpoint has further ones in a folder, additional_chat_templates/NAME.jinja; a bundle, which has no folders,
    as chat_template.NAME.jinja.
    """
    found = {"default": directory / TEMPLATE_FILE} if (directory / TEMPLATE_FILE).exists() else {}
    for path in sorted(directory.glob("chat_template.*.jinja")):
        found[path.name.removeprefix("chat_template.").removesuffix(".jinja")] = path
    return found | {path.stem: path for path in sorted(directory.glob(f"{FOLDER}/*.jinja"))}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens by name, and the list of those without one, as templates of transformers see them."""
    extra = settings.get("extra_special_tokens")
    named = {**{key: settings.get(key) for key in _TOKENS}, **(extra if isinstance(extra, Mapping) else {})}
    found: dict[str, Any] = {key: text for key in named if (text := token_content(named, key)) is not None}
    unnamed = settings.get("additional_special_tokens", extra if isinstance(extra, list) else None)
    if isinstance(unnamed, list):
        texts = (token_content({"": token}, "") for token in unnamed)
        found["additional_special_tokens"] = [text for text in texts if text is not None]
    return found


def _named_templates(value: Any) -> dict[str, str] | None:
    """Return source by name for a list of ``{"name": ..., "template": ...}``, else None."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return None
    pairs = [(item.get("name"), item.get("template")) for item in value]
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        return None
    return {str(name): str(text) for name, text in pairs}


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages as a list; raises `RequestError` if one lacks its role or content."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is a {type(messages).__name__}; it must be a list of objects with role and content."
        )
    if not messages:
        raise RequestError("messages is empty; a chat needs at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"Message {i} is a {type(message).__name__}; it must be an object with role and content."
            )
        if not isinstance(message.get("role"), str) or not message["role"]:
            role = shown(message.get("role"))
            raise RequestError(f"Message {i} has the role {role}; it must be text, such as 'user'.")
        content = message.get("content")
        parts = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
        if not (isinstance(content, str) or parts or (content is None and message.get("tool_calls"))):
            raise RequestError(f"Message {i} has no content; it must be text or a list of parts.")
    return list(messages)


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """Return a copy made of plain types alone, so that a template meets no object with methods of its own."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{name} nests deeper than {MAX_DEPTH} levels.")
    if value is None or isinstance(value, bool) or type(value) in (str, int, float):
        return value
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, Mapping):
        return {_key(key, name): _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name, depth + 1) for item in value]
    raise RequestError(f"{name} holds a {type(value).__name__}; only text, numbers, lists and objects can be rendered.")


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{name} holds the key {shown(key)}; keys must be text.")
    return "".join(key)
