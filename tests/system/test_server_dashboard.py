"""The dashboard for Grafana asks for metrics that the server has."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.helpers.command_line import ROOT

pytest.importorskip("starlette", reason="the server's packages are not installed (extra 'server')")
from tests.helpers.serving import serving

BOARD = ROOT / "docs" / "how-to" / "grafana-dashboard.json"
if not BOARD.is_file():
    pytest.skip("no checkout: the pages are not installed", allow_module_level=True)
QUERY = re.compile(r"(edgeinfer:\w+)(?:\{(\w+)=~)?")
PANELS = ("Time to first token", "Inter-token latency", "Queue time", "Throughput", "KV cache usage",
          "Prefix cache hits", "Requests running and waiting", "Preemptions", "Memory beside the plan")


def board() -> dict[str, Any]:
    return json.loads(BOARD.read_text("utf-8"))  # type: ignore[no-any-return]


def test_the_dashboard_has_its_panels_beside_each_other() -> None:
    panels = board()["panels"]
    assert set(PANELS) <= {one["title"] for one in panels}
    assert len({one["id"] for one in panels}) == len(panels) == len({str(one["gridPos"]) for one in panels})
    assert all(one["targets"] and one["datasource"]["uid"] == "${source}" for one in panels)


@pytest.mark.slow
def test_every_metric_of_the_dashboard_is_one_of_the_server() -> None:
    queries = [target["expr"] for panel in board()["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in board()["templating"]["list"] if one["type"] == "query"]
    with serving({"demo": "demo"}) as server:
        done = server.ask("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0})
        assert done.status == 200
        text = server.ask("/metrics").body.decode()
    found = {name: labels for name, labels in re.findall(r"^(edgeinfer:\w+)(?:\{(.*)\})? ", text, re.MULTILINE)}
    asked = {match for query in queries for match in QUERY.findall(query)}
    assert len(asked) >= 15
    for name, label in asked:
        assert name in found, f"the dashboard asks for {name}, which the server does not have"
        assert f'{label}="' in found[name] or not label, f"{name} has no label {label}"
    for name in re.findall(r"by \((?!le\b)(\w+)\)", " ".join(queries)):
        assert f'{name}="' in text
