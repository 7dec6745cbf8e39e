"""`/plan` of the server: the plan page, its guards and its policy."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")
from edgeinfer.cli.reports.plan_page import plan_page
from tests.helpers.serving import serving


def test_the_page_needs_no_key_and_keeps_the_guards() -> None:
    with serving({"demo": "demo"}, api_keys=("a-long-enough-key",)) as running:
        assert running.ask("/plan").status == 404 and "no plan page" in running.ask("/plan").error
        running.server.planner = plan_page
        found = running.ask("/plan?model=llama-3.2-1b&machine=rpi5&ctx=1024")
        assert found.status == 200 and found.headers["content-type"] == "text/html; charset=utf-8"
        assert b"llama-3.2-1b on Raspberry Pi 5" in found.body
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        assert running.ask("/plan?model=%3Cb%3E").status == 400
        assert running.ask("/plan", Host="evil.example.org").status == 403
        assert running.ask("/plan", Origin="https://evil.example.org").status == 403
        assert running.ask("/plan", {}).status == 405
        assert "/plan" in running.ask("/openapi.json", authorization="Bearer a-long-enough-key").json["paths"]
