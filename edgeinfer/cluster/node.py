"""The node of a cluster on this machine: Ray's processes, started and ended by `edgeinfer cluster`."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ..base.cache_dir import cache_root, make_directories
from ..base.files import os_errors
from ..errors import EdgeInferError, UsageError
from .connection import OBJECT_BYTES, answers, check_head, environment, imported, split_address

PORT = 6379
PORTS = ("node-manager", "object-manager", "metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc",
         "runtime-env-agent")
"""Ports of a node, in the order in which they follow the head's port."""
LAST = 1, 4, 6
"""Ports of these, after the head's, are there when the node is one of the cluster."""
WORKERS = 20, 99
"""First and last port of workers, after the head's."""
START_SECONDS, END_SECONDS = 120.0, 30.0


class Node(NamedTuple):
    """A node that was started here."""

    pid: int
    started: float
    """When its process was, by the system, which tells it from later ones of the same number."""
    address: str
    """Address of the cluster's head."""
    head: bool


def own_address(toward: str = "192.0.2.1") -> str:
    """Return the address under which others reach this machine; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect((toward, 9))
        except OSError:
            return "127.0.0.1"
        return str(one.getsockname()[0])


def check_private(address: str) -> None:
    """Raise `UsageError` for an address that is no private one of this machine."""
    try:
        private = ipaddress.ip_address(address).is_private
    except ValueError:
        raise UsageError(f"--address is {address!r}; give an IP address of this machine.") from None
    if not private or address in ("0.0.0.0", "::"):
        raise UsageError(f"{address} is not a private address; name one of this machine's with --address, such as "
                         "192.168.1.10, so that the cluster is not open to everybody.")


def current() -> Node | None:
    """Return the node that runs here."""
    import psutil

    try:
        node = Node(**json.loads(_file("node.json").read_text(encoding="utf-8")))
        if psutil.Process(node.pid).create_time() == node.started:
            return node
    except (OSError, ValueError, TypeError, psutil.Error):
        pass
    return None


def start_head(address: str, port: int, cpus: int | None) -> Node:
    """Start the head of a new cluster here.

    Raises
    ------
    UsageError, EdgeInferError
        The address is not private, or is not this machine's; the port is in use; a node runs here; Ray does not start.
    """
    with environment(f"{address}:{port}"):
        imported()
        check_private(address)
        _refuse_second()
        _check_ports(address, port)
        _token()
        return _start(f"{address}:{port}", address, port, True, cpus)


def start_worker(head: str, cpus: int | None, address: str | None = None, port: int = PORT) -> Node:
    """Start a node here that joins a cluster; raises as `start_head`, or if the head refuses this token."""
    address = address or own_address(split_address(head, "ADDRESS", "")[0])
    with environment(head):
        imported()
        check_private(address)
        _refuse_second()
        _check_ports(address, port)
        check_head(head)
        return _start(head, address, port, False, cpus)


def stop() -> Node | None:
    """End the node that runs here, with all processes that it has started; returns it."""
    import psutil

    if (node := current()) is None:
        return None
    leader = psutil.Process(node.pid)
    processes = [leader, *leader.children(recursive=True)]
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for one in (leader,) if ask is psutil.Process.terminate else processes:
            try:
                ask(one)
            except psutil.NoSuchProcess:
                continue
        processes = psutil.wait_procs(processes, END_SECONDS)[1]
    _file("node.json").unlink(missing_ok=True)
    if processes:
        raise EdgeInferError(f"Ray's processes {', '.join(str(one.pid) for one in processes)} do not end; end them by "
                             "hand.")
    return node


def _refuse_second() -> None:
    if node := current():
        raise EdgeInferError(f"This machine is a node of {node.address} already; 'edgeinfer cluster down' ends it.")


def _check_ports(address: str, first: int) -> None:
    for port in range(first, first + len(PORTS) + 1):
        with os_errors(EdgeInferError, f"Cannot listen on {address} port {port}",
                       "; choose another --port or --address."), \
                socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((address, port))


def _token() -> None:
    """Make the token of clusters, unless there is one."""
    path = Path.home() / ".ray" / "auth_token"
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or path.exists():
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))


def _start(head: str, address: str, port: int, is_head: bool, cpus: int | None) -> Node:
    """Start Ray's processes and wait until the node is one of the cluster."""
    import psutil

    arguments = ["start", "--block", "--disable-usage-stats", "--node-ip-address", address,
                 "--object-store-memory", str(OBJECT_BYTES)]
    arguments += ["--head", "--port", str(port), "--include-dashboard", "false"] if is_head else ["--address", head]
    for offset, name in enumerate(PORTS, 1):
        arguments += [f"--{name}-port", str(port + offset)]
    for name, offset in zip(("min", "max"), WORKERS, strict=True):
        arguments += [f"--{name}-worker-port", str(port + offset)]
    if cpus is not None:
        arguments += ["--num-cpus", str(cpus)]
    log = _file("node.log")
    with open(log, "wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", *arguments], stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=output, start_new_session=True, cwd=Path.home())
    node = Node(process.pid, psutil.Process(process.pid).create_time(), head, is_head)
    _file("node.json").write_text(json.dumps(node._asdict()), encoding="utf-8")
    try:
        _wait(process, head, address, port, log)
    except BaseException:
        stop()
        raise
    return node


def _wait(process: subprocess.Popen[bytes], head: str, address: str, port: int, log: Path) -> None:
    """Wait until a node is there; raises `EdgeInferError` if it ends before."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            raise EdgeInferError(f"Ray did not start: {lines[-1].strip() if lines else 'it said nothing'} ({log}).")
        if all(answers(address, port + offset) for offset in LAST):
            return check_head(head)
        time.sleep(0.3)
    raise EdgeInferError(f"Ray did not start within {START_SECONDS:.0f} s; {log} says more.")


def _file(name: str) -> Path:
    make_directories(folder := cache_root() / "cluster")
    return folder / name
