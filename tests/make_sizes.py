"""The sizes of the built-in shapes: ``python -m tests.make_sizes`` writes edgeinfer/models/shape_sizes.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeinfer.config import RuntimeConfig
from edgeinfer.graph import builtin_shapes
from edgeinfer.memory_planner import Planner, to_request
from edgeinfer.models.describe import describe
from edgeinfer.models.sizes import COMPARED, CTX, KV, MADE, TERNARY, of_type, row_of

TABLE = Path(__file__).resolve().parents[1] / "edgeinfer" / "models" / "shape_sizes.json"


def row(name: str) -> dict[str, Any]:
    """Return what the table has of a shape."""
    kinds = TERNARY if describe(name).quantisation.weights == "q2" else COMPARED
    plain = describe(name, "q4")
    plan = Planner(plain.graph, plain.weight_bytes).plan(to_request(RuntimeConfig(ctx=CTX, kv=KV, threads=4)))
    found = {kind: of_type(plain if kind == "q4" else describe(name, kind) if kind in {*MADE, *TERNARY} else
                           describe(f"{name} {kind}")) for kind in kinds}
    return {**row_of(plain, plan.total_bytes), "types": found}


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(row(name))}" for name in builtin_shapes()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
