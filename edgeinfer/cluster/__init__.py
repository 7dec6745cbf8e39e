"""Requests on several processes and machines, by Ray (extra ``cluster``), which is imported when it is used."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .job import WorkerLost
    from .node import PORT, current, own_address, start_head, start_worker, stop
    from .on_ray import PREFILL_SEQUENCES, Ray, connected
    from .pool import Pool, Worker
    from .remote_model import RemoteModel
    from .split import NodeSplit
    from .stages import Stored

__all__ = ["PORT", "PREFILL_SEQUENCES", "NodeSplit", "Pool", "Ray", "RemoteModel", "Stored", "Worker", "WorkerLost",
           "connected", "current", "own_address", "start_head", "start_worker", "stop"]
__getattr__ = lazily(__name__, {
    "job": "WorkerLost", "node": "PORT current own_address start_head start_worker stop",
    "on_ray": "PREFILL_SEQUENCES Ray connected", "pool": "Pool Worker", "remote_model": "RemoteModel",
    "split": "NodeSplit", "stages": "Stored"})
