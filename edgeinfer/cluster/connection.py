"""A connection to a Ray cluster, or one of this machine alone, and sentences for Ray's errors."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

from ..base.files import os_errors
from ..errors import EdgeInferError, UsageError

LOCAL, LOOPBACK = "local", "127.0.0.1"
OBJECT_BYTES = 80_000_000
"""Memory of Ray's store of objects, through which bundles and prompts go in pieces; Ray takes no less than 75 MB."""
REACH_SECONDS = 5.0
"""Time in which the head of a cluster has to answer."""
ALWAYS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_timeout_ms_task_wait_for_death_info": "20",
          "RAY_core_worker_internal_heartbeat_ms": "50", "RAY_worker_niceness": "0",
          "RAY_worker_register_timeout_seconds": "600"}
"""Variables of Ray, whatever the shell has. The third and fourth say how long a call to a lost process waits for the
reason, and how often Ray looks whether that time is over: by default a second each, in which its request could continue
elsewhere. The fifth gives replicas the priority of other programs: by default Ray's workers yield to all of them. The
last one is for heavily loaded machines: by default Ray gives up workers that have not started within a minute, and
`ray.init` then never returns.
"""
ON_NETWORK = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000",
              "RAY_health_check_failure_threshold": "3"}
"""Variables of a cluster's head: a machine that falls silent is lost within 9 s, and its requests continue elsewhere.
By default that takes Ray a minute. A Ray of this machine alone keeps the default, because it may be busy, but not lost.
"""
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for clusters of several machines: at 0 its processes listen on 127.0.0.1 alone."""


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error of Ray, which may have the log of a process below."""
    text = str(getattr(error, "cause", None) or error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join(lines) if text.startswith("Version mismatch") else lines[0] if lines else type(error).__name__
    return said.rstrip(".:")[:300]


@contextlib.contextmanager
def initialised(address: str, cpus: int | None = None) -> Iterator[Any]:
    """Connect Ray to a cluster, or start one of this machine alone that ends with the context; gives the package.

    Ray must not have been imported before: it reads once, then, whether tokens are required, as here they always are,
    and where it listens.

    Parameters
    ----------
    address : HOST:PORT of a cluster's head, or ``local``
    cpus : processors that a local one has; None is all

    Raises
    ------
    UsageError
        Ray is not installed.
    EdgeInferError
        The cluster cannot be reached or started.
    """
    with environment(address):
        ray = imported()
        own: dict[str, Any] = {}
        if address == LOCAL:
            own = dict(num_cpus=cpus, object_store_memory=OBJECT_BYTES, include_dashboard=False,
                       _node_ip_address=LOOPBACK)
        else:
            check_head(address)
        _leave_output_alone()
        handlers = _signal_handlers()
        try:
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, **own)
        except Exception as error:  # Ray has no class of its own for most of them
            ray.shutdown()
            what = "start Ray here" if own else f"connect to Ray at {address}"
            raise EdgeInferError(f"Cannot {what}: {first_sentence(error)}.") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        try:
            yield ray
        finally:
            ray.shutdown()


@contextlib.contextmanager
def environment(address: str) -> Iterator[None]:
    """Set the variables that Ray reads, for this process and those that it starts."""
    variables = {**ALWAYS, ON_LOOPBACK: "0" if address.startswith("127.") else "1"}
    if address == LOCAL:
        variables |= {ON_LOOPBACK: "0", "RAY_AUTH_TOKEN": own_token()}
    else:
        variables |= ON_NETWORK
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_address(address: str, name: str = "--ray", other: str = ", or local") -> tuple[str, int]:
    """Return host and port of HOST:PORT; raises `UsageError` for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:9]) < 1 << 16:
        raise UsageError(f"{name} is {address!r}; write it as HOST:PORT, such as 192.168.1.10:6379{other}.")
    return host.strip("[]"), int(port)


def check_head(address: str) -> None:
    """Raise an error unless the head of a cluster is at HOST:PORT and takes our token: Ray itself tries for minutes."""
    with os_errors(EdgeInferError, f"Cannot connect to Ray at {address}",
                   "; start it there with 'edgeinfer cluster up'."):
        socket.create_connection(split_address(address), REACH_SECONDS).close()
    ray = imported()
    from ray._raylet import GcsClient

    try:
        with _silent():
            GcsClient(address=address).internal_kv_get(b"edgeinfer", namespace=None, timeout=REACH_SECONDS)
    except ray.exceptions.AuthenticationError:
        raise EdgeInferError(f"Ray at {address} does not take this token; copy ~/.ray/auth_token of its head here, or "
                             "set RAY_AUTH_TOKEN.") from None
    except Exception as error:
        raise EdgeInferError(f"Cannot connect to Ray at {address}: {first_sentence(error)}.") from None


def answers(host: str, port: int) -> bool:
    """Return whether something listens at an address."""
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop messages of Ray's C++ code on standard error; errors get our own sentences."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


@cache
def own_token() -> str:
    """Return the token of local clusters: one for this process, as Ray reads it once."""
    return secrets.token_hex(32)


def imported() -> Any:
    """Return the package; raises `UsageError` with the command that installs it."""
    try:
        import ray
    except ImportError:
        raise UsageError("A cluster needs the package ray; install it with: pip install 'edgeinfer[cluster]'") from None
    return ray


def _leave_output_alone() -> None:
    """Keep Ray's messages about ended processes off standard output, which may be JSON; they get our own sentences."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


def _signal_handlers() -> dict[int, Any]:
    """Return the handlers of this program, which Ray replaces by its own."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
