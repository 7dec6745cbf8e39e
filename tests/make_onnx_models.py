"""The table of what is lowered to ONNX: ``python -m tests.make_onnx_models`` writes docs/reference/onnx-models.md from
the lowering itself, which refuses what the page says is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.backends import Flavour
from edgeinfer.backends.onnx.codes import code_bits
from edgeinfer.backends.onnx.lower_graph import lower_graph
from edgeinfer.backends.onnx.lowering import Lowering
from edgeinfer.config import Recipe
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.graph import Graph, build_graph, read_config, requested_types, supported_architectures
from edgeinfer.quant import TYPES, WeightType
from tests.helpers.onnx_families import models

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "onnx-models.md"
FLAVOURS = {"slots": Flavour(top_k=64), "pages": Flavour(attention="paged", top_k=64),
            "genai": Flavour(target="genai")}
INTRODUCTION = """# Models in ONNX

This page is made from the lowering itself: `python -m tests.make_onnx_models`. [How it works](../explanation/onnx.md)
and [how exact each architecture is in each type](../measurements/onnx.md) are other pages.

## Architectures

`slots` is `edgeinfer export` and a run with `--device cuda` or `onnx-cpu`, `pages` a run with `--kv-layout pages`
(cuda), `genai` is `edgeinfer export --for genai`. An architecture has a yes if all its tiny models of `tests/golden`
are lowered. Those in `slots` run on onnxruntime's CPU provider with logits within 1e-5 of the NumPy reference (f32;
Gemma 4's mixture 3e-5, OLMo Hybrid and Qwen3-Next 2e-5) and choose the 40 greedy tokens of edgeinfer's kernels:
`python -m pytest --all tests/models/test_onnx_families.py`. `pages` run in ONNX's evaluator with a PagedAttention in
NumPy: `tests/models/test_onnx_paged.py`.

| model_type | slots | pages | genai | operators of a layer | if not |
|---|---|---|---|---|---|
"""
TYPES_OF_WEIGHTS = """
## Types of weights

Every type keeps its levels and scales. An f32 model has scales exactly, an f16 model rounds those that are products of
two numbers, as it rounds norms. Where blocks have minima, a small matmul of the sums of blocks adds them. Bits are
those of a weight, scales and minima included; `export` and `plan` say by how many bytes a model grows.

| type | group | codes in ONNX | minima | bits in a bundle | bits in an f16 model |
|---|---|---|---|---|---|
"""
OPERATORS = """
## Operators

All operators that a model may have, and the types of their kernels on the CUDA provider (onnxruntime's
OperatorKernels.md). None is left to the CPU in `slots` and `pages`; of `genai` the shape of the mask is read there.

| operator | CUDA kernels |
|---|---|
"""
FLOATS, ANY = "f16, f32", "f16, f32, i64"
CUDA = {
    **dict.fromkeys(("Clip", "Gelu", "LayerNormalization", "MatMul", "Pad", "RMSNormalization", "Relu", "Sigmoid",
                     "Softmax", "Tanh", "com.microsoft.MatMulNBits", "com.microsoft.QuickGelu",
                     "com.microsoft.RotaryEmbedding", "com.microsoft.SkipSimplifiedLayerNormalization"), FLOATS),
    **dict.fromkeys(("Add", "Cast", "Concat", "CumSum", "Div", "Gather", "GatherElements", "Greater", "GreaterOrEqual",
                     "Identity", "Max", "Mul", "ReduceSum", "Reshape", "ScatterElements", "Slice", "Split", "Squeeze",
                     "Sub", "TopK", "Transpose", "Unsqueeze", "Where"), ANY),
    "Shape": "its result is in the memory of the process; genai alone",
    "com.microsoft.GatherBlockQuantized": FLOATS,
    "com.microsoft.GroupQueryAttention": "f16; f32 on the CPU provider alone",
    "com.microsoft.PagedAttention": "f16; no kernel on the CPU provider",
    **dict.fromkeys(("com.microsoft.GatedDeltaNet", "com.microsoft.VarlenCausalConvWithState"),
                    "f16, f32; on the CPU provider from 1.32 on"),
    "Softplus": FLOATS}


def graphs(model_type: str, weights: str = "q4") -> Iterator[Graph]:
    """Graphs of an architecture's tiny models, as they are exported."""
    for config in models(model_type).values():
        yield build_graph(read_config(config), requested_types(weights), Recipe(()))


def lowered(graph: Graph, flavour: Flavour) -> Lowering | str:
    """The model, or the reason why there is none."""
    try:
        return lower_graph(graph, flavour.checked(graph.config))
    except UnsupportedModelError as error:
        sentence = re.sub(r"^The operation [^,]*? (keeps|has|leaves)", r"It \1", str(error))
        return sentence.partition(", so the model")[0].rstrip(".")


def row(model_type: str) -> str:
    """The row of an architecture."""
    reasons: dict[str, None] = {}
    answers, sizes = [], list[int]()
    for flavour in FLAVOURS.values():
        found = [lowered(graph, flavour) for graph in graphs(model_type)]
        refused = [one for one in found if isinstance(one, str)]
        answers.append("no" if len(refused) == len(found) else "in part" if refused else "yes")
        reasons |= dict.fromkeys(refused)
        if flavour is FLAVOURS["slots"]:
            sizes = [round(len(one.nodes) / one.graph.config.num_hidden_layers) for one in found
                     if isinstance(one, Lowering)]
    size = "" if not sizes else str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
    return f"| {model_type} | {' | '.join(answers)} | {size} | {'; '.join(f'{reason}.' for reason in reasons)} |"


def types() -> Iterator[str]:
    """Rows of the types of weights."""
    for name, storage in TYPES.items():
        if not storage.quantised:
            continue
        for group in storage.groups:
            stored, bits = WeightType.of(name, group), code_bits(WeightType.of(name, group))
            now = bits + 16 * storage.factors / group
            kept = f"{bits} bits" if bits == storage.bits else f"{bits} bits, of {storage.bits}"
            yield (f"| {name} | {group} | {kept} | {'added' if storage.minimum else ''} | "
                   f"{stored.bits_per_weight:.4g} | {now:.4g} |")


def operators() -> set[str]:
    """Names of all operators that tiny models have, in each flavour, stored as q4 and as f32."""
    found = set()
    for model_type in supported_architectures():
        for graph in (*graphs(model_type), *graphs(model_type, "f32")):
            for flavour in FLAVOURS.values():
                if isinstance(one := lowered(graph, flavour), Lowering):
                    found |= {f"{node.domain}.{node.kind}".lstrip(".") for node in one.nodes}
    return found


def page() -> str:
    """The page."""
    rows = [row(model_type) for model_type in supported_architectures()]
    names = sorted(operators(), key=lambda name: name.rpartition(".")[::-1])
    return (INTRODUCTION + "\n".join(rows) + "\n" + TYPES_OF_WEIGHTS + "\n".join(types()) + "\n" + OPERATORS
            + "\n".join(f"| {name} | {CUDA[name]} |" for name in names) + "\n")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
