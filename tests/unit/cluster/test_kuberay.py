"""The manifest for Kubernetes: the requirements of the operator and of edgeinfer, checked without either."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import typer

from edgeinfer.cli.app import make_app
from edgeinfer.cluster.connection import ALWAYS, LOCAL, ON_NETWORK, environment

yaml = pytest.importorskip("yaml")
MANIFEST = Path(__file__).parents[3] / "docs" / "how-to" / "kuberay.yaml"
METRICS, AGENT = 8080, 52365
"""Ports that the operator gives to Ray in each pod, and adds to the head's service."""


def test_the_manifest_is_yaml_with_a_token_and_no_dashboard() -> None:
    found = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    spec = found["spec"]
    assert found["kind"] == "RayCluster" and spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {one["name"] for one in pod["containers"][0]["volumeMounts"]}
        assert mounted == {one["name"] for one in pod["volumes"]}
        assert all(isinstance(one, str) for one in group["rayStartParams"].values())


def test_ray_is_set_as_edgeinfer_sets_it() -> None:
    """The operator itself sets how tokens are asked for."""
    spec = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]
    wanted = {name: value for name, value in ALWAYS.items() if name != "RAY_AUTH_MODE"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        found = {one["name"]: one["value"] for one in group["template"]["spec"]["containers"][0]["env"]}
        assert found.items() >= wanted.items()
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert {one["name"]: one["value"] for one in head}.items() >= ON_NETWORK.items()


def test_a_cluster_over_a_network_notices_a_silent_node_within_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    period, limit, failures = (int(ON_NETWORK[f"RAY_health_check_{name}"])
                               for name in ("period_ms", "timeout_ms", "failure_threshold"))
    assert (period + limit) * failures < 10_000
    for name in ON_NETWORK:
        monkeypatch.delenv(name, raising=False)
    with environment("192.168.1.10:6379"):
        assert os.environ.items() >= ON_NETWORK.items()
    with environment(LOCAL):
        assert not os.environ.keys() & ON_NETWORK.keys()


def test_the_command_of_its_page_is_one_of_edgeinfers_on_a_port_of_the_head() -> None:
    page = MANIFEST.with_name("several-machines.md").read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in page.splitlines() if line.startswith("kubectl exec"))
    name, *arguments = shlex.split(line.partition(" -- edgeinfer ")[2])
    group = typer.main.get_command(make_app())
    command = group.get_command(typer.Context(group), name)  # type: ignore[attr-defined]
    context = command.make_context(name, list(arguments))
    spec = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]
    ports = {one["name"]: one["containerPort"] for one in spec["headGroupSpec"]["template"]["spec"]["containers"][0][
        "ports"]}
    assert context.params["port"] == ports["http"] and context.params["ray"] == f"HEAD_IP:{ports['gcs']}"
    assert not {METRICS, AGENT} & set(ports.values()) and len(set(ports.values())) == len(ports)
