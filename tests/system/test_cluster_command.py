"""`edgeinfer cluster`: a head and a node of this machine, refusals, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from edgeinfer.cluster.node import check_private, own_address
from edgeinfer.errors import UsageError
from tests.helpers.command_line import PYTHON, ROOT, edgeinfer, environment

needs_ray = pytest.mark.skipif(find_spec("ray") is None or sys.platform != "linux", reason="extra 'cluster', and Linux")
Machine = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Give two machines: this one with two caches, and one home with the token."""
    kernels = Path(os.environ["EDGEINFER_CACHE"]) / "kernels"
    (home := tmp_path / "home").mkdir()

    def machine(name: str) -> Machine:
        (cache := tmp_path / name).mkdir()
        (cache / "kernels").symlink_to(kernels.resolve(), target_is_directory=True)

        def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*PYTHON, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                                  timeout=180, env=environment(HOME=str(home), EDGEINFER_CACHE=str(cache),
                                                           **variables))

        return run

    made = [machine("one"), machine("two")]
    yield made
    for one in reversed(made):
        one("cluster", "down")


@needs_ray
@pytest.mark.slow
def test_a_cluster_from_its_start_to_its_end(machines: list[Machine], tmp_path: Path) -> None:
    first, second = machines
    port = free_ports()
    address = f"{own_address()}:{port}"
    done = first("cluster", "up", "--port", port, "--cpus", 1)
    assert done.returncode == 0 and f"The head of the cluster runs at {address}." in done.stderr, done.stderr
    token = tmp_path / "home" / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
    for done, sentence in (
            (first("cluster", "up"), f"This machine is a node of {address} already; 'edgeinfer cluster down' ends it."),
            (second("cluster", "up", "--port", port), f"port {port} (Address already in use); choose another --port"),
            (second("cluster", "join", address, "--port", port + 200, RAY_AUTH_TOKEN="f" * 64),
             f"Ray at {address} does not take this token; copy"),
            (second("cluster", "join", f"{own_address()}:1", "--port", port + 200), "Connection refused; start it there"
             " with 'edgeinfer cluster up'"),
            (second("cluster", "status"), "This machine is not a node of a cluster; name its head with --ray")):
        assert done.returncode and sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = second("cluster", "join", address, "--port", port + 200, "--cpus", 1)
    assert done.returncode == 0, done.stderr
    found = json.loads(first("cluster", "status", "demo", "--json").stdout)
    assert found["address"] == address and len(found["nodes"]) == 2
    assert all(one["error"] is None and one["isa"] and one["free_bytes"] > 0 for one in found["nodes"])
    (given := tmp_path / "in.jsonl").write_text("".join(json.dumps({
        "custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"Fox {i}", "seed": i}})
        + "\n" for i in range(20)))
    done = first("batch", given, tmp_path / "out.jsonl", "--ray", address, "--ctx", 512)
    assert done.returncode == 0 and (tmp_path / "out.jsonl").read_text().count("\n") == 20, done.stderr
    leaders = [json.loads((tmp_path / name / "cluster" / "node.json").read_text())["pid"] for name in ("one", "two")]
    processes = [each for one in map(psutil.Process, leaders) for each in (one, *one.children(recursive=True))]
    assert len(processes) > 6
    for one, what in ((second, "a node"), (first, "the head")):
        assert f"This machine is no longer {what} of {address}." in one("cluster", "down").stderr
    assert not psutil.wait_procs(processes, 10)[1]
    assert first("cluster", "down").stderr == "edgeinfer: This machine is not a node of a cluster.\n"


def free_ports() -> int:
    """Return the first of ports that are free."""
    with socket.socket() as one:
        one.bind(("", 0))
        return 20000 + one.getsockname()[1] % 10000


@pytest.mark.parametrize("address", ["8.8.8.8", "0.0.0.0", "here"])
def test_addresses_that_are_open_or_none(address: str) -> None:
    with pytest.raises(UsageError, match=r"is not a private address; name one|give an IP address of this machine"):
        check_private(address)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    for arguments, sentence in ((("up", "--port", "65437"), "--port is 65437; it is from 1 to 65436."),
                                (("join", "a:1", "--cpus", "0"), "--cpus is 0; it is from 1 to 4096."),
                                (("join", "board"), "ADDRESS is 'board'; write it as HOST:PORT"),
                                (("status", "--ray", "local"), "--ray is 'local'; write it as HOST:PORT")):
        done = edgeinfer("cluster", *arguments)
        assert done.code == 2 and sentence in done.sentence
    monkeypatch.setitem(sys.modules, "ray", None)
    for arguments in (("up",), ("join", "192.168.1.10:6379"), ("status", "--ray", "192.168.1.10:6379")):
        done = edgeinfer("cluster", *arguments)
        assert done.code == 2 and "needs the package ray; install it with: pip install 'edgeinfer[clu" in done.err
