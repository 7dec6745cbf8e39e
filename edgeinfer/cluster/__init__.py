"""Requests on several processes and machines, by Ray (extra ``cluster``), which is imported when it is used."""

from typing import TYPE_CHECKING

from edgeinfer.base.lazy_import import lazily

if TYPE_CHECKING:
    from .connection import connected
    from .on_ray import Ray
    from .pool import Pool, Worker, WorkerLost

__all__ = ["Pool", "Ray", "Worker", "WorkerLost", "connected"]
__getattr__ = lazily(__name__, {"connection": "connected", "on_ray": "Ray", "pool": "Pool Worker WorkerLost"})
