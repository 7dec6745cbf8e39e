"""`edgeinfer estimate --html` and the plan page: one file, plots, texts that cannot become markup."""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from edgeinfer.cli.reports.page import estimate_body, save_page
from edgeinfer.cli.reports.plan_page import plan_page
from edgeinfer.cli.reports.svg import HEIGHT, WIDTH, Bar, bars, curve, short
from edgeinfer.errors import DestinationError
from tests.helpers.command_line import edgeinfer

ASKED = ("estimate", "qwen3-8b", "--machine", "m4 16gb")
OUTSIDE = re.compile(r"""(?:src|href|action)\s*=\s*(?!["']?(?:data:|/plan))|url\(|@import|<link(?! rel="icon")|https?://""")


def figures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_one_file_with_everything(tmp_path: Path) -> None:
    path = tmp_path / "speed.html"
    done = edgeinfer(*ASKED, "-p", 2000, "-n", 500, "--html", path)
    assert done.code == 0, done.err
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "<script" not in page and " style=" not in page
    assert not OUTSIDE.search(page)
    drawn = figures(page)
    assert [one.get("aria-label") for one in drawn] == [
        "Tokens per second by context", "Memory", "Time of a token", "Memory and speed by type of weights",
        "Tokens per second by type of weights"]
    out = edgeinfer(*ASKED, "-p", 2000, "-n", 500, "--json").json
    assert f"{out['decode_tok_per_s']:.1f} tokens/s" in page and "first word after" in page
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"sha256-{digest}" in page  # or browsers would refuse the style that the policy does not name
    assert list(tmp_path.iterdir()) == [path]


def test_points_are_where_their_values_are() -> None:
    drawn = ElementTree.fromstring(re.findall(r"<svg.*</svg>", curve(
        "t", [0, 256, 512], [4.0, 3.0, 2.0], [3.0, 2.0, 1.0], [5.0, 4.0, 3.0], "x", "y"))[0])
    (line,), (band,) = drawn.findall("polyline"), drawn.findall("polygon")
    points = [tuple(map(float, point.split(","))) for point in str(line.get("points")).split()]
    assert [x for x, _ in points] == sorted(x for x, _ in points) and points[0][0] == 52.0
    assert [y for _, y in points] == sorted(y for _, y in points)  # slower is lower
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0])  # a factor of two each
    assert len(str(band.get("points")).split()) == 6 and all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    shown = bars("t", [Bar("a", 2.0, "2"), Bar("b", 4.0, "4", 3.0, 5.0, True)], (10.0, "limit"))
    widths = [float(one.get("width", 0)) for one in figures(shown)[0].findall("rect")]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01) and 'class="bar pale"' in shown and "limit" in shown


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.375, "0.375"), (40.26, "40.3"), (999.6, "1000"),
                                             (2893.1, "2893")])
def test_numbers_have_no_exponents(value: float, text: str) -> None:
    assert short(value) == text


def test_names_are_text() -> None:
    name = '<img src=x onerror="alert(1)">&'
    out = edgeinfer(*ASKED, "--json").json
    body = estimate_body({**out, "model": name, "device_title": name, "basis": name}, None)
    assert "<img" not in body and body.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;") == 3
    drawn = bars(name, [Bar(name, 1.0, name)], (1.0, name)), curve(name, [1, 2], [1, 1], [1, 1], [1, 1], name, name)
    for one in drawn:
        assert "<img" not in one


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert "--html '' has no known ending; use .html." in edgeinfer(*ASKED, "--html", "").sentence
    assert "--html 'a.txt' has no known ending; use .html." in edgeinfer(*ASKED, "--html", "a.txt").sentence
    wrong = edgeinfer("estimate", "demo", "--all-devices", "--html", "a.html")
    assert wrong.sentence.startswith("--html a.html has no effect with --all-devices, ")
    done = edgeinfer(*ASKED, "--html", tmp_path / "none" / "a.html")
    assert "cannot be written" in done.sentence and not done.out
    (tmp_path / "a.html").mkdir()
    with pytest.raises(DestinationError, match="cannot be written"):
        save_page(edgeinfer(*ASKED, "--json").json, None, tmp_path / "a.html")


def test_a_model_that_does_not_fit_says_so(tmp_path: Path) -> None:
    assert edgeinfer("estimate", "llama-3.1-8b", "--machine", "rtx3050", "--weights", "f16", "--html",
                     tmp_path / "a.html").code == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert re.search('<p class="answer no">It does not fit: [0-9.]+ GB where [0-9.]+ GB are free; ', page)


def test_all_types_of_weights_are_a_page_with_a_plot(tmp_path: Path) -> None:
    asked = ("plan", "llama-3.1-8b", "--machine", "m4 16gb", "--compare")
    done = edgeinfer(*asked, "--html", tmp_path / "a.html", "--json")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert done.code == 0 and done.json == edgeinfer(*asked, "--json").json and not OUTSIDE.search(page)
    (drawn,) = figures(page)
    assert len(drawn.findall(".//{*}circle")) == len(done.json["types"]) and page.count("<tr>") == 1 + len(
        done.json["types"])
    assert "int8 is the most exact that fits Apple M4, 16 GB" in page and "GB of memory" in page
    none = edgeinfer("plan", "llama-3.1-70b", "--machine", "rpi5", "--compare", "--html", tmp_path / "b.html")
    assert none.code == 3 and '<p class="answer no">No type fits' in (tmp_path / "b.html").read_text(encoding="utf-8")
    assert edgeinfer(*asked, "--html", "a.txt").sentence == "--html 'a.txt' has no known ending; use .html."
    assert edgeinfer(*asked[:-1], "--html", "a.html").sentence == "--html a.html requires --compare."


def test_users_and_drafts_are_plotted(tmp_path: Path) -> None:
    asked = ("estimate", "llama-3.1-8b", "--machine", "m4 16gb", "--users", 4, "--draft", "llama-3.2-1b")
    done = edgeinfer(*asked, "--html", tmp_path / "a.html", "--json").json
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    rows, drafts = done["users"]["by_users"], done["speculation"]["by_acceptance"]
    assert [row["users"] for row in rows] == [1, 2, 4, 8]
    assert rows[2]["output_throughput"] == done["users"]["output_throughput"]
    assert drafts[7]["decode_tok_per_s"] == done["speculation"]["decode_tok_per_s"] and len(drafts) == 11
    for title in ("Tokens per second of all users", "First token of a user", "Tokens per second with llama-3.2-1b"):
        assert f"<figcaption>{title}</figcaption>" in page
    plain = edgeinfer(*asked, "--json").json
    assert plain["users"]["by_users"] is plain["speculation"]["by_acceptance"] is None
    edgeinfer("estimate", "llama-3.1-8b", "--machine", "m4", "--speculate", "lookup", "--html", tmp_path / "b.html")
    assert "Tokens per second with prompt lookup" in (tmp_path / "b.html").read_text(encoding="utf-8")


def test_the_page_of_plans() -> None:
    data, policy, status = plan_page({"model": "llama-3.2-3b", "machine": "rpi5", "memory": "8", "ctx": "2048"})
    page = data.decode()
    assert status == 200 and "llama-3.2-3b on Raspberry Pi 5" in page and len(figures(page)) == 5
    assert '<option value="llama-3.2-3b" selected>' in page and '<option value="8" selected>8 GB</option>' in page
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy and not OUTSIDE.search(page)
    one = edgeinfer("estimate", "llama-3.2-3b", "--machine", "rpi5 8gb", "--ctx", 2048, "--json").json
    assert f"{one['decode_tok_per_s']:.1f} tokens/s" in page
    assert plan_page({})[2] == 200
    served = plan_page({"machine": "rtx4090", "users": "4"})[0].decode()
    assert len(figures(served)) == 8 and "4 users" in served and 'name="users" type="number" min="1" max="64"' in served
    assert '<option value="" selected>4 GB</option>' in plan_page({"machine": "rpi5"})[0].decode()
    other, _, status = plan_page({"machine": "rpi-zero2", "memory": "8"})
    assert status == 200 and "selected>8 GB" not in other.decode()


@pytest.mark.parametrize(("query", "sentence"), [
    ({"model": "../../etc/passwd"}, "There is no model &#x27;../../etc/passwd&#x27; in the list"),
    ({"model": "owner/name"}, "There is no model"), ({"machine": "<script>"}, "There is no machine &#x27;&lt;script"),
    ({"ctx": "1e9"}, "The ctx is &#x27;1e9&#x27;; it must be an integer, from 1 to"), ({"ctx": "-1"}, "The ctx is"),
    ({"prompt": "9999", "ctx": "512"}, "A prompt of 9999 does not fit a context of 512 tokens"),
    ({"memory": "7.5"}, "There is no memory"),
    ({"machina": "m4"}, "There is no field &#x27;machina&#x27;; did you mean machine?"),
    ({"users": "65"}, "The users is 65; it must be from 1 to 64."),
    ({"zzz": "1"}, "There is no field &#x27;zzz&#x27;; there are model, machine, memory"),
    ({"weights": "q99"}, "There is no weights"), ({"storage": "tape"}, "There is no storage"),
])
def test_the_page_of_plans_refuses_what_is_not_in_its_lists(query: dict[str, str], sentence: str) -> None:
    data, _, status = plan_page(query)
    assert status == 400 and sentence in data.decode() and "<form" in data.decode()


def test_the_terminal_plots_without_a_special_font() -> None:
    shown = edgeinfer(*ASKED).out
    assert max(map(len, shown.splitlines())) <= 80
    plotted = [line for line in shown.splitlines() if re.search(r"\d to \d.*#", line)]
    assert all(line.isascii() for line in plotted)
    assert len(plotted) == 6 and plotted[0].rindex("#") > plotted[-1].rindex("#")  # slower with a longer context
