"""`edgeinfer cluster`: a Ray cluster of several machines, and the role of each."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

import typer

from ...errors import EdgeInferError, UsageError
from ..options import Json
from ..output import print_json, print_table, say
from ..reports.node import node_object, node_row

JSON_FIELDS = {
    "cluster up": {"address": "of the head", "pid": "of the process that holds Ray's others"},
    "cluster join": {"address": "of the head", "pid": "of the process that holds Ray's others"},
    "cluster status": {
        "address": "of the head",
        "nodes": "per node `address`, `error` (why it cannot be asked, or null), and where it can: `machine`, "
                 "`version` of edgeinfer, `isa`, `threads`, `free_bytes`, `probed`, and with MODEL `decode_tok_per_s` "
                 "and `prefill_tok_per_s` as predicted, null before 'edgeinfer devices --probe' there",
    },
    "cluster down": {"address": "of the cluster that this machine was a node of; null if of none"},
}
"""Fields of the JSON object, by command."""
app = typer.Typer(
    help="Join machines to a Ray cluster, for batch --ray and serve --ray.", rich_markup_mode=None,
    no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]},
)
Cpus = Annotated[int | None, typer.Option("--cpus", metavar="N", help="Processors that Ray may use here.  "
                                          "[default: all]", show_default=False)]
Port = Annotated[int | None, typer.Option("--port", metavar="N", help="First of the hundred ports that Ray uses here.  "
                                          "[default: 6379]", show_default=False)]
MAX_CPUS, MAX_PORT = 4096, 65436


@app.command("up")
def up(
    address: Annotated[str | None, typer.Option(
        "--address", metavar="IP", help="Private address of this machine under which others reach it.  [default: that "
        "of the default route]", show_default=False)] = None,
    port: Port = None, cpus: Cpus = None, json: Json = False,
) -> None:
    """Start the head of a cluster on this machine.

    A token is required from all who connect; it is made in ~/.ray/auth_token unless there is one. Ray's dashboard is
    off.

    \b
    Examples:
      edgeinfer cluster up
      edgeinfer cluster up --address 192.168.1.10
    """
    from ...cluster import PORT, own_address, start_head

    _check(port, cpus)
    node = start_head(address or own_address(), port or PORT, cpus)
    if json:
        print_json({"address": node.address, "pid": node.pid})
        return
    say(f"The head of the cluster runs at {node.address}.")
    say("Copy ~/.ray/auth_token to the other machines, and join them there with: edgeinfer cluster join "
        f"{node.address}")
    say("Ray listens on all addresses of this machine; keep it in a private network.")


@app.command("join")
def join(
    head: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT of the head.", show_default=False)],
    address: Annotated[str | None, typer.Option(
        "--address", metavar="IP", help="Private address of this machine under which the head reaches it.  [default: "
        "that of the route to it]", show_default=False)] = None,
    port: Port = None, cpus: Cpus = None, json: Json = False,
) -> None:
    """Make this machine a node of a cluster.

    \b
    Examples:
      edgeinfer cluster join 192.168.1.10:6379
    """
    from ...cluster import PORT, start_worker

    _check(port, cpus)
    node = start_worker(head, cpus, address, port or PORT)
    if json:
        print_json({"address": node.address, "pid": node.pid})
    else:
        say(f"This machine is a node of {node.address}.")


@app.command("status")
def status(
    model: Annotated[str | None, typer.Argument(
        metavar="MODEL", help="Predict the speed of a model on each node.", show_default=False)] = None,
    ray: Annotated[str | None, typer.Option(
        "--ray", metavar="ADDRESS", help="HOST:PORT of the head.  [default: the cluster of which this machine is a "
        "node]", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the nodes of a cluster.

    \b
    Examples:
      edgeinfer cluster status
      edgeinfer cluster status llama-3.2-1b
    """
    from ...cluster import connected, current

    if ray is None:
        if (node := current()) is None:
            raise UsageError("This machine is not a node of a cluster; name its head with --ray, or start one with "
                             "'edgeinfer cluster up'.")
        ray = node.address
    if ray == "local":
        raise UsageError("--ray is 'local'; write it as HOST:PORT, such as 192.168.1.10:6379.")
    where = os.path.abspath(model) if model is not None and os.path.exists(model) else model
    with connected(ray) as cluster:
        nodes = asyncio.run(_asked(cluster, where))
    if json:
        print_json({"address": ray, "nodes": nodes})
        return
    print_table([("node", "machine", "instructions", "free", "predicted" if model else ""),
                 *(node_row(one, model) for one in nodes)], right=[3])
    if len(versions := sorted({one["version"] for one in nodes if one["error"] is None})) > 1:
        say(f"The nodes have the versions {', '.join(versions)} of edgeinfer; install the same on all.")


async def _asked(cluster: Any, model: str | None) -> list[dict[str, Any]]:
    """Ask all nodes at once."""
    async def one(node: Any) -> dict[str, Any]:
        try:
            return {"address": node.name, "error": None, **await cluster.ask(node, node_object, model)}
        except EdgeInferError as error:
            return {"address": node.name, "error": str(error).rstrip(".")}

    return await asyncio.gather(*(one(node) for node in cluster.nodes))


@app.command("down")
def down(json: Json = False) -> None:
    """End the node of this machine, and the cluster if it is the head."""
    from ...cluster import stop

    node = stop()
    if json:
        print_json({"address": node and node.address})
    elif node is None:
        say("This machine is not a node of a cluster.")
    else:
        say(f"This machine is no longer {'the head' if node.head else 'a node'} of {node.address}.")


def _check(port: int | None, cpus: int | None) -> None:
    for name, value, most in (("--port", port, MAX_PORT), ("--cpus", cpus, MAX_CPUS)):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{name} is {value}; it is from 1 to {most}.")
