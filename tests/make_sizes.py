"""The sizes of the built-in shapes: ``python -m tests.make_sizes`` writes edgeinfer/models/shape_sizes.json."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from edgeinfer.config import RuntimeConfig
from edgeinfer.graph import builtin_shapes
from edgeinfer.memory_planner import Planner, to_request
from edgeinfer.models.describe import describe
from edgeinfer.models.sizes import COMPARED, CTX, KV, MADE, TERNARY, lowered_of, of_type, row_of

TABLE = Path(__file__).resolve().parents[1] / "edgeinfer" / "models" / "shape_sizes.json"


def row(name: str) -> dict[str, Any]:
    """Return what the table has of a shape."""
    kinds = TERNARY if describe(name).quantisation.weights == "q2" else COMPARED
    plain = describe(name, "q4")
    plan = Planner(plain.graph, plain.weight_bytes).plan(to_request(RuntimeConfig(ctx=CTX, kv=KV, threads=4)))
    models = {kind: plain if kind == "q4" else describe(name, kind) if kind in {*MADE, *TERNARY} else
              describe(f"{name} {kind}") for kind in kinds}
    return {**row_of(plain, plan.total_bytes), "types": {kind: of_type(one) for kind, one in models.items()},
            **lowered_of(models)}


if __name__ == "__main__":
    with ProcessPoolExecutor() as pool:  # minutes: each type of each shape is lowered to ONNX
        rows = zip(builtin_shapes(), pool.map(row, builtin_shapes()), strict=True)
        lines = [f" {json.dumps(name)}: {json.dumps(found)}" for name, found in rows]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
