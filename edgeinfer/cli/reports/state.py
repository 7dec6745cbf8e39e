"""Report lines on recurrent layers, whose state does not grow with the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...base.units import format_size

if TYPE_CHECKING:
    from edgeinfer.memory_planner import MemoryPlan

    from ...backends import DevicePlanner
    from ...graph import Graph

FIELD = ("of recurrent layers: `layers` of `of`, the bytes that they keep of a sequence (`slot_bytes`, of which "
         "`matrices_bytes`, `journal_bytes` and `convolution_bytes`), the number of `checkpoints`, `kv_bytes` of a "
         "token in the other layers and `all_attention_bytes` if all were such, and all that as it is `said`; null "
         "where no layer is recurrent")


def state_object(plan: MemoryPlan, graph: Graph, kv_bytes: int) -> dict[str, Any] | None:
    """Return the JSON object, or None if no layer is recurrent."""
    if plan.state is None:
        return None
    from ...graph import StateRule  # `--help` imports all commands, and has no use for graphs
    from ...kernels import abi

    stateful = [op for op in graph.ops if op.state_bytes]
    rules = [op for op in stateful if isinstance(op, StateRule)]
    matrices = sum(abi.rule_stamps(op.heads, op.key_dim, op.value_dim) for op in rules)
    journal = sum(op.state_bytes for op in rules) - matrices
    convolution = sum(op.state_bytes for op in stateful) - matrices - journal
    return _object(graph, kv_bytes, matrices, convolution, journal,
                   f"a journal of {abi.JOURNAL_TOKENS} tokens", plan.state.checkpoints)


def device_state(planner: DevicePlanner, graph: Graph, plan: MemoryPlan, kv_bytes: int) -> dict[str, Any] | None:
    """Return the same of a run on a device, which has neither journal nor checkpoints."""
    if not graph.config.recurrent:
        return None
    return _object(graph, kv_bytes, *planner.state_bytes(plan.request))


def _object(graph: Graph, kv_bytes: int, matrices: int, convolution: int, journal: int = 0, journaled: str = "",
            checkpoints: int = 0) -> dict[str, Any]:
    stateful, slot = [op for op in graph.ops if op.state_bytes], matrices + convolution + journal
    layers, attends = len({op.layer for op in stateful}), {op.kv.layer for op in graph.ops if op.kv and op.kv.stores}
    of = graph.config.num_hidden_layers
    parts = [f"{format_size(n)} of {name}" for n, name in ((matrices, "matrices"), (journal, journaled),
             (convolution, "the last inputs of convolutions")) if n]
    said = (f"{layers} of {of} layers are recurrent and keep {format_size(slot)} of a sequence, however long it is "
            f"({', '.join(parts)}); "
            + (f"{checkpoints} checkpoints let later prompts continue" if journaled else "there are no checkpoints"))
    whole = kv_bytes * of // len(attends) if attends else 0
    if attends:
        said += f". A token of context takes {kv_bytes} bytes, {whole} if all layers had attention"
    return {"layers": layers, "of": of, "slot_bytes": slot, "matrices_bytes": matrices,
            "journal_bytes": journal, "convolution_bytes": convolution, "checkpoints": checkpoints,
            "kv_bytes": kv_bytes, "all_attention_bytes": whole, "said": said}
