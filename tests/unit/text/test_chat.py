"""Chat templates: their files, their rendering, and the messages that they accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.errors import RequestError, TokenizerError
from edgeinfer.text import ChatTemplate

Shared = Callable[[str], Path]
HI = [{"role": "user", "content": "Hi <&> 日本"}]
CHATML = """{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role: ' ~ message.role) }}
    {%- endif %}
{{ '<|' ~ message['role'] ~ '|>' }}
{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> é", "parameters": {"type": "object"}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    HI,
    [{"role": "system", "content": "Be brief."}, *HI],
    [
        *HI,
        {"role": "assistant", "content": "<think>x</think>\n\nyes "},
        *HI,
        {"role": "assistant", "content": "b"},
        *HI,
    ],
    [*HI, *HI],
    [{"role": "assistant", "content": "first"}],
    [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
        *HI,
    ],
]


def template(text: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, tokens)


def test_literal_rendering() -> None:
    chat = template(CHATML, eos_token="</s>")
    messages = [{"role": "system", "content": "Be brief. "}, *HI]
    want = "<|system|>\nBe brief.</s>\n<|user|>\nHi <&> 日本</s>\n"
    assert chat.render(messages, add_generation_prompt=False) == want
    assert chat.render(messages) == want + "<|assistant|>\n"
    assert chat.render(HI, tools=[{"name": "é<"}]) == '<|user|>\nHi <&> 日本</s>\n[{"name": "é<"}]<|assistant|>\n'


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{{ bos_token }}{{ x }}{{ pad_token is defined }}", "<s>7False"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(9) %}{% if i < 6 %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}", "789"),
        ("{% for m in messages if m.role == 'x' %}{% else %}none{% endfor %}", "none"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(a, b='!') %}{{ a ~ b }}{% endmacro %}{{ f('x') }}{{ f(1, 2) }}", "x!12"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ {'b': [1, 'é'], 'a': none} | tojson }}", '{"b": [1, "é"], "a": null}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{{ {'a': 1} | tojson(separators=(',', ':')) }}", '{"a":1}'),
        ("{{ {'a': 'é'} | tojson(ensure_ascii=true) }}", '{"a": "\\u00e9"}'),
        ("{{ messages | map(attribute='role') | join('-') }}{{ [1, 2] | sum }}", "user3"),
        ("{{ '%s=%d' % ('a', 3) }}{{ '{}-{n}'.format(1, n=2) }}{{ 'ab' * 2 }}", "a=31-2abab"),
        ("{{ 'a,b'.split(',')[1].upper() }}{{ 'axb' | replace('x', 'y') }}{{ 'a' | center(3) }}", "Bayb a "),
        ("{% set t %}{{ 'in' }}side{% endset %}[{{ t }}]{{ 'a\\nb' | indent(2) }}", "[inside]a\n  b"),
        ("{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ (1, 2)[1:] | list }}", "x1[2]"),
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{{ 2 ** 10 }} {{ 7 % 4 }} {{ 1.5 * 2 }} {{ 'a' 'b' }}", "1024 3 3.0 ab"),
        ("{{ '7'.zfill(3) }}{{ ','.join(['a', 'b']) }}{{ 'é' | string }}{{ '<' | safe }}", "007a,bé<"),
    ],
)
def test_what_templates_may_use(text: str, want: str) -> None:
    assert template(text, bos_token="<s>").render(HI, x=7) == want


def test_content_in_parts_and_tool_calls_without_content() -> None:
    chat = template(
        "{% for m in messages %}{{ m.content[0].text if m.content else m.tool_calls | length }}{% endfor %}"
    )
    parts = [{"role": "user", "content": ({"type": "text", "text": "hello"},)}]
    assert chat.render([*parts, {"role": "assistant", "tool_calls": [CALL]}]) == "hello1"


def test_templates_cannot_change_the_callers_messages() -> None:
    messages = [{"role": "user", "content": "a", "tools": []}]
    with pytest.raises(TokenizerError, match="tries something unsafe"):
        template("{% set _ = messages[0].tools.append(1) %}").render(messages)
    assert messages == [{"role": "user", "content": "a", "tools": []}]


def test_where_templates_are_found(tmp_path: Path) -> None:
    settings = tmp_path / "tokenizer_config.json"
    assert ChatTemplate.open(tmp_path) is None
    settings.write_text(json.dumps({"chat_template": "{{ bos_token }}A", "bos_token": {"content": "<s>"}}))
    chat = ChatTemplate.open(tmp_path)
    assert chat is not None and chat.render(HI) == "<s>A"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    settings.write_text(json.dumps({"chat_template": named}))
    chat = ChatTemplate.open(tmp_path)
    assert chat is not None and (chat.render(HI), chat.render(HI, tools=TOOLS)) == ("plain", "with 1")
    settings.write_text(json.dumps({"chat_template": named[1:]}))
    chat = ChatTemplate.open(tmp_path)
    assert chat is not None
    with pytest.raises(TokenizerError, match="has no default chat template, only tool_use"):
        chat.render(HI)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text("jinja{{ eos_token }}", encoding="utf-8")
    chat = ChatTemplate.open(tmp_path)
    assert chat is not None and chat.render(HI) == "jinja</s>"


@pytest.mark.parametrize("further", ["additional_chat_templates/{}.jinja", "chat_template.{}.jinja"])
def test_further_templates_in_files_of_their_own(tmp_path: Path, further: str) -> None:
    """As transformers reads them: any file goes before all of tokenizer_config.json."""
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of the settings"}')
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / further.format("tool_use")).write_text("with {{ tools | length }}")
    chat = ChatTemplate.open(tmp_path)
    assert chat is not None and chat.render(HI, tools=TOOLS) == "with 1"
    with pytest.raises(TokenizerError, match="has no default chat template, only tool_use"):
        chat.render(HI)
    (tmp_path / "chat_template.jinja").write_text("plain")
    chat = ChatTemplate.open(tmp_path)
    assert chat is not None and (chat.render(HI), chat.render(HI, tools=TOOLS)) == ("plain", "with 1")
    for number in range(16):
        (tmp_path / further.format(number)).write_text("x")
    with pytest.raises(TokenizerError, match="has 18 chat templates, but may have at most 16"):
        ChatTemplate.open(tmp_path)


@pytest.mark.parametrize("value", [7, ["x"], [{"name": "default"}]])
def test_damaged_settings(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(TokenizerError, match="chat_template is neither text nor a list of named templates"):
        ChatTemplate.open(tmp_path)


def test_oversized_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="chat template 'default' is over the limit of 1000000 bytes"):
        template("x" * 1_000_001)
    (tmp_path / "chat_template.jinja").write_text("x" * 1_000_001)
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is larger than the limit of 1000000 bytes"):
        ChatTemplate.open(tmp_path)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hi", "messages is a str; it must be a list of objects with role and content"),
        ({"role": "user"}, "messages is a dict; it must be a list"),
        ([], "messages is empty; a chat needs at least one message"),
        (["hi"], "Message 0 is a str; it must be an object with role and content"),
        ([{"content": "a"}], "Message 0 has the role None; it must be text, such as 'user'"),
        ([*HI, {"role": "user"}], "Message 1 has no content; it must be text or a list of parts"),
        ([{"role": "user", "content": 3}], "Message 0 has no content"),
        ([{"role": "user", "content": ["a"]}], "Message 0 has no content"),
        ([{"role": "user", "content": "a", "x": object()}], "messages holds a object; only text, numbers, lists"),
        ([{"role": "user", "content": "a", "x": {1: 2}}], "messages holds the key 1; keys must be text"),
    ],
)
def test_wrong_messages(messages: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        template("x").render(messages)


def test_messages_that_nest_too_deep() -> None:
    nested: list[Any] = []
    for _ in range(70):
        nested = [nested]
    with pytest.raises(RequestError, match="variables nests deeper than 64 levels"):
        template("x").render(HI, extra=nested)


@pytest.mark.reference
def test_known_templates_as_transformers_renders_them(shared_data: Shared) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    n_equal = n_refused = 0
    for path in sorted(shared_data("chat_templates").glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        chat = ChatTemplate({"default": text}, tokens, path)
        for messages in CONVERSATIONS:
            for tools in (None, TOOLS):
                for prompt in (True, False):
                    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
                    try:
                        want = utils.render_jinja_template([messages], chat_template=text, **options, **tokens)[0][0]
                    except Exception as error:  # the template refuses; so must ours, and for the same reason
                        with pytest.raises(TokenizerError) as caught:
                            chat.render(messages, **options)
                        assert str(error).splitlines()[0][:60].rstrip(".") in str(caught.value)
                        n_refused += 1
                        continue
                    assert chat.render(messages, **options) == want, path.name
                    n_equal += 1
    assert n_equal > 150 and n_refused > 10


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"additional_special_tokens": ["<a>", {"content": "<b>"}, 7]}, "<a><b>"),
     ({"extra_special_tokens": ["<a>"]}, "<a>"), ({"extra_special_tokens": {"image_token": "<i>"}}, "<i>"),
     ({"additional_special_tokens": 3}, "")],
)
def test_templates_see_all_special_tokens(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for t in additional_special_tokens or [] %}{{ t }}{% endfor %}{{ image_token }}")
    template = ChatTemplate.open(tmp_path)
    assert template is not None and template.render([{"role": "user", "content": "x"}]) == text


def test_a_template_may_have_settings_of_any_name() -> None:
    template = ChatTemplate({"default": "{{ self }}{{ messages[0].content }}{{ tone }}"}, {})
    assert template.render([{"role": "user", "content": "a"}], **{"self": 1, "tone": "b"}).endswith("ab")
