"""Requests on several processes and machines, by Ray (extra ``cluster``), which is imported when it is used."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .job import WorkerLost
    from .node import PORT, current, own_address, start_head, start_worker, stop
    from .on_ray import PREFILL_SEQUENCES, Ray, connected
    from .pool import Pool
    from .remote_model import RemoteModel
    from .stages import Stored

__all__ = ["PORT", "PREFILL_SEQUENCES", "Pool", "Ray", "RemoteModel", "Stored", "WorkerLost", "connected", "current",
           "own_address", "start_head", "start_worker", "stop"]
__getattr__ = lazily(__name__, {
    "job": "WorkerLost", "node": "PORT current own_address start_head start_worker stop",
    "on_ray": "PREFILL_SEQUENCES Ray connected", "pool": "Pool", "remote_model": "RemoteModel", "stages": "Stored"})
