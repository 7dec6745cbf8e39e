"""A family of hostile chat templates in a child process: its memory is read from outside, its time from its clock."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest

from benchmarks.outside import watch
from edgeinfer.errors import CancelledError, TokenizerError
from edgeinfer.text import ChatTemplate
from tests.helpers.command_line import environment

MB = 1_000_000
HI = [{"role": "user", "content": "a"}]
VALUES = [
    "'a' * {n}", "'\\U0001f389' * {n}", "'a b\\n' * {n}", "'9' * {n}", "[1] * {n}", "['ab' * 99] * {n}", "range({n})",
    "{n} ** 99", "-{n}", "1.5", "{{'a': 'b' * {n}}}", "['a' * {n}, ['b' * {n}]]", "true", "none",
]
USES = [  # everything of the list, and much that is not on it
    "x.{method}()", "x.{method}(10**9)", "x.{method}(x)", "x.{method}(1, x)", "x.{method}('', x)",
    "x.{method}('a', x)",
]
METHODS = (
    "capitalize casefold center count encode endswith expandtabs find format format_map index isalnum join ljust "
    "lower lstrip partition replace rfind rjust rpartition rsplit rstrip split splitlines strip swapcase title "
    "translate upper zfill to_bytes from_bytes bit_length hex as_integer_ratio append extend insert sort copy get "
    "items keys values pop update fromkeys setdefault decode").split()
FILTERS = (
    "abs batch(9) capitalize center(10**9) default('a') dictsort e escape filesizeformat first float forceescape "
    "format(x) format(x,x) groupby(0) indent(10**6) indent('a'*9999) int int(0,2) items join join(x) last length list "
    "lower map('upper')|list map('list')|list max min pprint reject|list replace('',x) replace('a',x) reverse|list "
    "round(10**9) round(-10**9) safe select|list slice(10**9)|list sort sort(reverse=true) string striptags sum "
    "sum(start=[]) title tojson tojson(indent=16) trim trim(x) truncate unique|list upper urlencode urlize wordcount "
    "wordwrap(1) xmlattr").split()
OPERATIONS = [
    "x + x", "x * 10**9", "x * x", "x ** x", "x % x", "x // x", "x - x", "x / 3", "x ~ x", "x == x", "x in x",
    "x[::-1]", "x[1:]", "[x, x, x, x] * 99", "'%s%s' % (x, x)", "'{}{}'.format(x, x)", "'%9999d' % 1",
    "'{:9999}'.format(1)", "-x", "10 ** (10 ** 8)", "(7 ** 9999) // 3", "(7 ** 1400) % x", "dict(a=x, b=[x])",
    "namespace(a=x)", "x is eq(x)", "x is in(x)", "strftime_now(x)", "raise_exception(x)", "range(x)", "cycler(x)",
    "lipsum(9)",
]
GROWTH = [
    "ns.x ~ ns.x", "[ns.x, ns.x]", "ns.x + ns.x", "(ns.x, [ns.x])", "{'a': ns.x, 'b': ns.x}", "ns.x | string",
    "[ns.x] | tojson", "ns.x | list", "ns.x | replace('a', 'aa')", "ns.x | title ~ ns.x", "[ns.x] * 2",
    "ns.x.split('a') + ns.x.split('b')", "ns.x | sort | join + ns.x", "ns.x | map('string') | list + [ns.x]",
    "ns.x[1:] ~ ns.x",
]


def templates() -> list[str]:
    """Every eighth of the combinations: all of them take a minute more."""
    made = []
    for value, n in product(VALUES, (7, 100_000, 10**8)):
        start = "{% set x = " + value.format(n=n) + " %}"
        made += [start + "{{ " + use.replace("{method}", method) + " }}"
                 for i, (use, method) in enumerate(product(USES, METHODS)) if (i + len(made)) % 11 == 0]
        made += [start + "{{ x | " + name + " }}" for name in FILTERS]
        made += [start + "{{ " + what + " }}" for what in OPERATIONS]
        made.append(start + "{% for i in x %}{{ i }}{{ x }}{% endfor %}")
        made.append(start + "{{ " + " ~ ".join(["x[1:]"] * 500) + " }}{{ " + " == ".join(["x"] * 99) + " }}")
    for growth, first in product(GROWTH, ("'aa'", "['a']", "['a' * 9999] * 99")):
        loop = "{% for i in range(300) %}{% set ns.x = " + growth + " %}{% endfor %}"
        made.append("{% set ns = namespace(x=" + first + ") %}" + loop + "{{ ns.x }}")
    return made[::8]


CHILD = """
import json, sys, time
from edgeinfer.errors import EdgeInferError
from edgeinfer.text import ChatTemplate
messages, slowest, made = [{"role": "user", "content": "a"}], (0, ""), 0
ChatTemplate({"default": "{{ 'a' | upper }}"}, {}).render(messages)
for text in json.load(sys.stdin):
    began = time.process_time()
    try:
        made += len(ChatTemplate({"default": text}, {}).render(messages)) > 0
    except EdgeInferError as error:
        assert len(str(error)) < 800 and "\\n" not in str(error), error
    slowest = max(slowest, (time.process_time() - began, text))
print(json.dumps([made, *slowest]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc says what a process holds")
def test_hostile_templates_stay_small_and_short() -> None:
    import json

    texts = templates()
    assert len(texts) > 300
    idle = watch([sys.executable, "-c", CHILD], environment(), stdin=b"[]")
    done = watch([sys.executable, "-c", CHILD], environment(), stdin=json.dumps(texts).encode())
    assert done.code == 0, done.err[-2000:]
    made, seconds, slowest = json.loads(done.out)
    assert 50 < made < len(texts)
    assert done.vm_hwm_bytes - idle.vm_hwm_bytes < 64 * MB, (done.vm_hwm_bytes, idle.vm_hwm_bytes)
    assert seconds < 12, slowest  # of the processor, and the limit is 10


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


def test_rendering_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate({"default": LOOP}, {})
    monkeypatch.setattr("edgeinfer.text.sandbox.MAX_STEPS", 1 << 50)
    monkeypatch.setattr("edgeinfer.text.sandbox.MADE_BYTES", 1 << 50)
    monkeypatch.setattr("edgeinfer.text.sandbox.MAX_SECONDS", 600.0)
    asked = threading.Event()
    threading.Timer(0.3, asked.set).start()
    with pytest.raises(CancelledError, match="was cancelled while its chat template was rendered"):
        chat.render(HI, stopped=asked.is_set)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("body", ["{% set x = ('ab' * 999) | title | sort | join %}", "{{ [1] * 9999 == [1] * 9999 }}"])
def test_ctrl_c_ends_rendering_at_once(body: str) -> None:
    text = LOOP.replace("BODY", body)
    code = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import edgeinfer.text.sandbox as sandbox\nfrom edgeinfer.text import ChatTemplate\n"
        "sandbox.MAX_SECONDS, sandbox.MADE_BYTES, sandbox.MAX_STEPS = 600.0, 1 << 50, 1 << 50\n"
        f"chat = ChatTemplate({{'default': {text!r}}}, {{}})\n"
        "try:\n    print('ready', flush=True)\n    chat.render([{'role': 'user', 'content': 'a'}])\n"
        "except KeyboardInterrupt:\n    print('ended')\n")
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "ended\n"  # otherwise it would render for minutes, and then say nothing


def test_a_template_of_too_many_words_is_refused() -> None:
    with pytest.raises(TokenizerError, match="it has more than 20000 words and signs"):
        ChatTemplate({"default": "{{ a }}" * 10_000}, {}).render(HI)
