"""Write the small models that unchanged.py reads: checkpoints of every family, GGUF files of every family and type,
quantised checkpoints of every packing, models whose layers and experts are streamed, and a text.

    python benchmarks/unchanged_inputs.py DIRECTORY

They are written once and then read by the version before a change and by the one after it, so that the writer may
change, too. The makers are those of the tests of this checkout.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from edgeinfer.converters.gguf.types import BY_NAME
from edgeinfer.graph import read_config
from tests.helpers import golden_cases
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.gguf_files import OF_256, sizes_for, write_gguf
from tests.helpers.packers import FORMS, make_packed
from tests.models import test_gguf_families, test_latent, test_smallthinker

LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
          "num_key_value_heads": 4, "max_position_embeddings": 1024, "torch_dtype": "float16"}
"""Layers and experts of which a budget can hold some and not all."""
STREAMED: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", **LARGER, "hidden_size": 384, "intermediate_size": 1536},
    "experts": {"model_type": "qwen3_moe", **LARGER, "head_dim": 32, "num_experts": 24, "num_experts_per_tok": 4,
                "moe_intermediate_size": 256, "norm_topk_prob": True},
}
GPT_OSS = {"gpt-oss.rope.scaling.type": "yarn", "gpt-oss.rope.scaling.factor": 4.0,
           "gpt-oss.rope.scaling.original_context_length": 16}
MIXED = {"attn_v": "Q6_K", "attn_": "Q4_K", "ffn_": "Q4_K"}
"""Types of a Q4_K_M file, with q, k and v of two."""


def write_checkpoints(folder: Path) -> None:
    """Write the golden cases, with their token ids beside them."""
    for case in golden_cases.cases():
        golden_cases.write_checkpoint(case, folder / case.name)
        (folder / case.name / "ids.json").write_text(json.dumps(case.ids))
    test_smallthinker.make(folder / "smallthinker")
    (folder / "smallthinker" / "ids.json").write_text(json.dumps(test_smallthinker.IDS))


def write_gguf_files(folder: Path, work: Path) -> list[str]:
    """Write a file of each golden case that GGUF knows, and of each type; returns the names of those left out."""
    folder.mkdir()
    families, left_out = test_gguf_families, []
    known = {golden_cases.load(name).config["model_type"]: arch for name, arch in families.ARCHITECTURES.items()}

    def tried(name: str, write: Callable[..., Any], *how: Any) -> None:
        try:
            write(folder / f"{name}.gguf", *how)
        except Exception:  # whatever stops a writer that is made for other families and types
            (folder / f"{name}.gguf").unlink(missing_ok=True)
            left_out.append(name)

    def write_known(path: Path, case: golden_cases.GoldenCase, kinds: dict[str, str] | None = None) -> None:
        case = case._replace(config={**case.config, **families.SAID.get(case.name, {})})
        c, arch = read_config(case.config), known[case.config["model_type"]]
        families.write(path, families.metadata(case, c, arch), families.tensors_of(case, c, arch), arch, kinds)

    for case in golden_cases.cases():
        if (kind := case.config["model_type"]) in known:
            tried(case.name, write_known, case)
        else:
            tried(case.name, write_gguf, golden_cases.write_checkpoint(case, work / case.name), "F32",
                  GPT_OSS if kind == "gpt_oss" else None)
    for name in test_latent.FILES:
        for split in (True, False):
            tried(f"{name}-{'two' if split else 'one'}",
                  lambda path, case, split: test_latent.file_of(case, path, split), name, split)
    tried("smallthinker", write_gguf, work.parent / "checkpoints" / "smallthinker")
    for name in ("stablelm", "phi", "olmo2", "exaone4", "cohere2", "ministral3", "glm4"):
        tried(f"{name}-Q4_K_M", write_known, families.of_256(name), MIXED)
    for kind in BY_NAME:
        sizes = OF_256 if kind == "NVFP4" else sizes_for(kind)
        tried(f"type-{kind}", write_gguf, make_checkpoint(work / kind, **sizes), kind)
    return left_out


def write_packed(folder: Path) -> None:
    """Write a small Llama in each packing."""
    for form in FORMS:
        make_packed(folder / form.replace(" ", "-"), form)


def write_inputs(directory: Path) -> None:
    """Write everything; the directory appears when it is complete."""
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_checkpoints(unfinished / "checkpoints")
    left_out = write_gguf_files(unfinished / "gguf", unfinished / "work")
    write_packed(unfinished / "packed")
    for name, fields in STREAMED.items():
        make_checkpoint(unfinished / "streamed" / name, dtype="F16", **fields)
    shutil.copy(ROOT / "tests" / "data" / "box_of_robbers.txt", unfinished / "text.txt")
    shutil.rmtree(unfinished / "work")
    unfinished.rename(directory)
    print(f"inputs in {directory}; without a GGUF file: {', '.join(left_out) or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]).resolve())
