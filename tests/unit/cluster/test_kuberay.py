"""The manifest for Kubernetes, of which only the syntax is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
MANIFEST = Path(__file__).parents[3] / "docs" / "how-to" / "kuberay.yaml"


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
