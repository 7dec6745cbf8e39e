"""Three nodes of Ray on this machine."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NODE: dict[str, Any] = dict(num_cpus=1, object_store_memory=80_000_000)


@contextmanager
def three_nodes() -> Iterator[Any]:
    """Start a cluster of three nodes, and end all of them."""
    from ray.cluster_utils import Cluster

    one = Cluster(initialize_head=True, head_node_args={**NODE, "node_ip_address": "127.0.0.1"})
    for _ in range(2):
        one.add_node(**NODE)
    one.wait_for_nodes()
    yield one
    for node in [*one.worker_nodes, one.head_node]:
        one.remove_node(node, allow_graceful=False)
    with warnings.catch_warnings():  # of the processes that Ray has started, which it does not wait for
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
