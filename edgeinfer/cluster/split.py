"""Opens a model whose layers are on the nodes of a Ray cluster, the last of them here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .stages import NodeStage, Stored, facts_here

if TYPE_CHECKING:
    from ..bundle import Bundle
    from ..config import RuntimeConfig
    from ..pipeline import Split
    from ..runner import Runner
    from .actor import Node

RESERVE_BYTES = 150_000_000
"""Memory of a process beside weights and KV cache, assumed until its layers are planned."""


class NodeSplit:
    """Opens the stages of models.

    Parameters
    ----------
    ray : the package, connected
    nodes : callable
        Returns the nodes that are there, and the id of this machine's.
    split : str
        ``auto``, a stage on each node, or the layers of each stage, on the nodes in turns.
    stored : Stored
    say : callable
        Called with a sentence about the stages.
    """

    def __init__(self, ray: Any, nodes: Callable[[], tuple[list[Node], str]], split: str, stored: Stored,
                 say: Callable[[str], object]):
        self._ray, self._nodes, self._split, self._stored, self._say = ray, nodes, split, stored, say

    def __call__(self, bundle: Bundle, config: RuntimeConfig, progress: Any) -> Runner:
        """Open a bundle; see `pipeline.open_stages`."""
        from ..memory_planner import fills, serving_share
        from ..pipeline import AUTO, Place, open_stages, parse_split, whole_graph
        from ..runtime import check_stage_config

        check_stage_config(replace(config, fill_budget=False))
        split = None if self._split == AUTO else parse_split(self._split, whole_graph(bundle))
        nodes = self._places(None if split is None else len(split))
        with ExitStack() as opened:
            stages = []
            for node in nodes[:-1]:
                stages.append(NodeStage(self._ray, node))
                opened.callback(stages[-1].close)
            facts = [*(stage.facts(self._stored, config.ctx, config.kv) for stage in stages),
                     facts_here(self._stored, config.ctx, config.kv)]
            share = serving_share if fills(config) else int
            places = [Place(config.budget_bytes or share(one.room), config.threads or one.threads, node.id)
                      for node, one in zip(nodes, facts, strict=True)]
            parts = split or self._placed(bundle, config, [one.speed for one in facts],
                                          [place.budget for place in places])

            def start(number: int, config: RuntimeConfig, nbytes: int) -> NodeStage:
                stages[number].open(self._stored, config, *parts[number], nbytes)
                return stages[number]

            runner = open_stages(bundle, config, parts, places, start)
            opened.pop_all()
        return runner

    def _places(self, stages: int | None) -> list[Node]:
        """Return the node of each stage, the last of which is here; None is a stage on each."""
        found, own = self._nodes()
        here = [node for node in found if node.id == own]
        others = [node for node in found if node.id != own]
        if not here or (stages is None and not others):
            raise UsageError("The cluster has no other node, and --split auto puts a stage on each; join others with "
                             "'edgeinfer cluster join', or list the layers of each stage.")
        n = len(others) if stages is None else stages - 1
        return [*((others or here)[i % len(others or here)] for i in range(n)), *here]

    def _placed(self, bundle: Bundle, config: RuntimeConfig, speeds: list[float], rooms: list[int]) -> Split:
        """Return stages that take equal time, of which each machine has room for its own."""
        from ..memory_planner import default_ctx
        from ..pipeline import auto_split, layer_sizes, whole_graph

        graph = whole_graph(bundle)
        if not all(speeds):
            self._say("Not all nodes were probed ('edgeinfer devices --probe'), so the layers are placed as if all "
                      "were equally fast.")
            speeds = [1.0] * len(speeds)
        sizes = layer_sizes(graph, config.kv, config.ctx or default_ctx(bundle.config))
        return auto_split(graph, speeds, sizes, [room - RESERVE_BYTES for room in rooms])
