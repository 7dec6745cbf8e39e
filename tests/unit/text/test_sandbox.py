"""Hostile chat templates are refused: no way to Python's internals, no endless work, no giant values."""

from __future__ import annotations

import pytest

from edgeinfer.errors import TokenizerError
from edgeinfer.text import ChatTemplate, sandbox

HI = [{"role": "user", "content": "a"}]


def render(text: str) -> str:
    return ChatTemplate({"default": text}, {}, "tokenizer_config.json").render(HI)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages | groupby('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ([1] | map('string')).gi_frame }}",
        "{{ 'aaaa'.translate({97: 'b' * 1000}) }}",
        "{{ '\t\t'.expandtabs(10**9) }}",
        "{{ 'a'.encode() }}",
        "{{ (1).to_bytes(9) }}",
        "{{ (1.5).hex() }}",
        "{{ {}.copy() }}",
        "{{ {}.fromkeys([1]) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ('a'|safe).__html__() }}",
        "{{ ('&lt;'|safe).unescape() }}",
        "{{ ('{a.__class__}'|safe).format_map({'a': 1}) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    ],
)
def test_no_way_to_pythons_internals(text: str) -> None:
    with pytest.raises(TokenizerError, match="the chat template tries something unsafe"):
        render(text)


@pytest.mark.parametrize("text", ["{% import 'os' as os %}", "{% include '/etc/passwd' %}", "{% extends 'base' %}"])
def test_no_other_files(text: str) -> None:
    with pytest.raises(TokenizerError, match=r"the chat template failed \(no loader"):
        render(text)


@pytest.mark.parametrize(("text", "wanted"), [
    ("{{ ('<a>'|safe) + '<b>' }}", "<a>&lt;b&gt;"), ("{{ '<b>' + ('<a>'|safe) }}", "&lt;b&gt;<a>"),
    ("{{ '<b>' ~ ('<a>'|safe) }}", "<b><a>"), ("{{ ('%s<a>'|safe) % '<b>' }}", "&lt;b&gt;<a>"),
    ("{{ ('<a>'|safe).join(['<b>', '<c>'|safe]) }}", "&lt;b&gt;<a><c>"),
    ("{{ ('<a>{}'|safe).format('<b>') }}", "<a>&lt;b&gt;"), ("{{ ('<a>'|safe).replace('a', '<') }}", "<&lt;>"),
    ("{{ ('<a>'|safe)[1:] + '<' }}", "a>&lt;"), ("{{ (('<a>'|safe)|string) + '\"' }}", "<a>&#34;"),
    ("{{ ['<b>', '<c>'|safe] | join('<d>') }}", "<b><d><c>"), ("{{ ['a'|safe] }}", "[Markup('a')]"),
])
def test_text_marked_as_safe_escapes_what_is_added_to_it(text: str, wanted: str) -> None:
    """functionary-v3.1's template marks some; transformers renders these so."""
    assert render(text) == wanted and type(render(text)) is str


def repeat(change: str, start: str = "'aa'", times: int = 60) -> str:
    """Apply an expression on ``ns.x`` again and again: it doubles each time."""
    setup = "{% set ns = namespace(x=" + start + ") %}{% for i in range(" + str(times) + ") %}"
    return setup + (change if "{%" in change else "{% set ns.x = " + change + " %}") + "{% endfor %}{{ ns.x }}"


@pytest.mark.slow(keep=12)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 300000 steps"),
        (
            "{% for i in range(99999) %}{% for j in [1]|map('string') %}" * 2 + "{% endfor %}" * 4,
            "more than 300000 steps",
        ),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "it makes more"),
        ("{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}", "bytes of text and lists"),
        ("{% for i in range(999) %}{% set y %}" + "x" * 10_000 + "{% endset %}{% endfor %}", "bytes of text and lists"),
        ("{{ 'a' * 10**10 }}", "bytes of text and lists"),
        ("{{ 10**10 * ['a'] }}", "bytes of text and lists"),
        ("{{ (9**999)**999 }}", "computes a number of more than 4096 bits"),
        (repeat("ns.x * ns.x", "99"), "computes a number of more than 4096 bits"),
        (repeat("ns.x + ns.x"), "bytes of text and lists"),
        (repeat("ns.x ~ ns.x"), "bytes of text and lists"),
        (repeat("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"), "bytes of text and lists"),
        (repeat("[ns.x, ns.x]"), "bytes of text and lists"),
        (repeat("(ns.x, ns.x)"), "bytes of text and lists"),
        (repeat("{'a': ns.x, 'b': ns.x}"), "bytes of text and lists"),
        (repeat("dict(a=ns.x, b=ns.x)"), "bytes of text and lists"),
        (repeat("[ns.x]", times=200), "bytes of text and lists"),
        (repeat("[ns.x, ns.x] | sum(start=[])", "[1]"), "bytes of text and lists"),
        (repeat("ns.x.replace('a', 'aa')"), "bytes of text and lists"),
        (repeat("ns.x | replace('a', 'aa')"), "bytes of text and lists"),
        (repeat("[ns.x, ns.x] | join"), "bytes of text and lists"),
        (repeat("'b'.join([ns.x, ns.x])"), "bytes of text and lists"),
        (repeat("ns.x + '&' * 100000", "'<'|safe"), "bytes of text and lists"),
        (repeat("(ns.x + '&').replace('&', ns.x)", "'&'|safe"), "bytes of text and lists"),
        (repeat("('{0}{0}'|safe).format(ns.x)", "'&'"), "bytes of text and lists"),
        ("{{ ('{0.__class__}'|safe).format(messages) }}", "bytes of text and lists"),
        ("{{ ('%*d'|safe) % (10**10, 1) }}", "bytes of text and lists"),
        ("{{ 'a' | center(10000000000) }}", "bytes of text and lists"),
        ("{{ 'a'.ljust(10**10) }}", "bytes of text and lists"),
        ("{{ 'a'.zfill(10**10) }}", "bytes of text and lists"),
        ("{{ '{:>9999999999}'.format(1) }}", "bytes of text and lists"),
        ("{{ '{0.__class__}'.format(messages) }}", "bytes of text and lists"),
        ("{{ '{:{w}}'.format(1, w=10**10) }}", "bytes of text and lists"),
        ("{{ '%9999999999d' % 1 }}", "bytes of text and lists"),
        ("{{ '%*d' % (10**10, 1) }}", "bytes of text and lists"),
        ("{{ '%*d' | format(10**10, 1) }}", "bytes of text and lists"),
        ("{{ 'a\nb' | indent(10**10) }}", "bytes of text and lists"),
        ("{{ range(99999) | map('string') | map('center', 99999) | list }}", "bytes of text and lists"),
        (f"{{{{ dict(range(0, 50000*{2**61 - 1}, {2**61 - 1}) | groupby(none)) }}}}", "256 keys with the same hash"),
        (f"{{% set n = namespace(range(0, 50000*{2**61 - 1}, {2**61 - 1}) | groupby(none)) %}}", "with the same hash"),
        (f"{{{{ range(0, 5000*{2**61 - 1}, {2**61 - 1}) | list | unique | list }}}}", "256 keys with the same hash"),
        ("{{ [1] | tojson(indent=10**10) }}", "tojson may indent by 16 at most"),
        ("{{ [1] | tojson(separators=('a' * 100, 'b')) }}", "tojson takes separators of at most 16 characters"),
    ],
)
def test_work_is_bounded(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 600.0)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 300_000)
    with pytest.raises(TokenizerError, match="the chat template was stopped because") as caught:
        render(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{% if %}", r"tokenizer_config\.json: the chat template is damaged \(line 1: Expected an expression"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "the chat template cannot be compiled"),
        ("{{ foo.bar }}", r"the chat template failed \('foo' is undefined\)\.$"),
        ("{{ dict.mro() }}", "the chat template failed"),
        ("{{ " + "1" * 990_000 + " }}", r"is damaged \(line 1: it has a number of more than 1233 digits"),
        ("{{ 0x" + "f" * 990_000 + " }}", "it has a number of more than 1233 digits"),
        ("{{ '" + "a" * 99_000 + "' }}", "it has a text in quotes of more than 65536 characters"),
        ("{{ '" + "\\\\" * 99_000 + "' }}", "it has more than 20000 backslashes"),
        ("{{ 1 // 0 }}", r"the chat template failed \(integer division or modulo by zero\)"),
        ("{{ lipsum(10) }}", "'lipsum' is undefined"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ raise_exception('Roles alternate.') }}", r"^The chat template refuses these messages: Roles alternate\.$"),
        ("{{ raise_exception() }}", "refuses these messages: no reason given"),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(TokenizerError, match=sentence) as caught:
        render(text)
    assert "\n" not in str(caught.value)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(TokenizerError, match="was stopped because it takes longer than -1 seconds"):
        render("{{ 'a' | upper }}")


def test_long_chats_render() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 1000
    text = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.strip() | replace('w', 'v') }}{% endfor %}"
    assert len(ChatTemplate({"default": text}, {}).render(messages)) == 1000 * (8 + 999)
