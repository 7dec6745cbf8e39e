"""Check in minutes whether a GPU runs models as it should, and how fast: run it first on a new card or driver.

    python benchmarks/gpu_check.py [--stage smoke|numerics|speed|soak ...] [--models NAME ...] [--out FILE.jsonl]
    python benchmarks/gpu_check.py --prepare        # on a machine without a GPU: write models and golden answers

smoke takes a minute with small models: placement of every operation, logits beside the CPU provider, greedy tokens,
ragged steps, chunks after a past, both layouts of KV, sampling, cancellation, memory that is freed. numerics
compares the logits of larger models, and of two layers of every family. speed measures decoding, prompts, arrivals
and memory beside the plan and the estimate. soak watches memory for three minutes.

The table has the found and the wanted values; rows are printed and appended to --out as they come. A case that
cannot run says why. Prepared files are in edgeinfer's cache (EDGEINFER_CACHE), which can be copied to the GPU's
machine. `--device onnx-cpu --models demo --quick` runs the same code on onnxruntime's CPU provider, where speeds mean
nothing. Models are bundles, or shapes with random weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.models import bundle_of, golden
from benchmarks.gpu.numerics import numerics
from benchmarks.gpu.rows import Check
from benchmarks.gpu.sizes import QUICK, Sizes
from benchmarks.gpu.smoke import environment, smoke
from benchmarks.gpu.soak import soak
from benchmarks.gpu.speed import speed
from edgeinfer.backends import PROVIDERS, provider_of
from edgeinfer.devices import gpu_profile, load_profile
from edgeinfer.errors import EdgeInferError

FAMILIES = ("qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "phi-3-mini", "gemma-2-2b", "gemma-3-1b", "gemma-4-e2b",
            "deepseek-v2-lite", "smallthinker-4b-a0.6b", "olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "lfm2-350m",
            "qwen3.5-0.8b", "granite-4-h-350m", "falcon-h1-0.5b", "codestral-mamba-7b")
MODELS = {"smoke": ["demo", "smollm2-135m", "qwen3.5-0.8b:small"],
          "numerics": ["tinyllama-1.1b", *(f"{name}:small" for name in FAMILIES)],
          "speed": ["tinyllama-1.1b", "llama-2-7b"], "soak": ["tinyllama-1.1b"]}
"""Models of each stage."""
MINUTES = {"smoke": 1.0, "numerics": 4.0, "speed": 5.0, "soak": 5.0}
"""After which a stage begins no new case."""


def run_stage(check: Check, stage: str, names: list[str], sizes: Sizes, genai: str | None) -> None:
    """Run one stage."""
    if stage == "smoke":
        smoke(check, names)
    else:
        if check.profile is None:
            check.case("environment", lambda: environment(check))
        {"numerics": lambda: numerics(check, names), "speed": lambda: speed(check, names, sizes, genai),
         "soak": lambda: soak(check, names, sizes.soak_seconds)}[stage]()


def prepare(stages: list[str], models: list[str] | None) -> None:
    """Write the bundles of all stages, and the golden answers of those that compare logits."""
    for stage in stages:
        for name in models or MODELS[stage]:
            try:
                path = bundle_of(name)
                if stage in ("smoke", "numerics"):
                    golden(name, path)
                print(f"{stage}: {name}: {path}", flush=True)
            except EdgeInferError as error:
                print(f"{stage}: {name}: {error}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Check whether a GPU runs models as it should, and how fast.")
    parser.add_argument("--device", choices=list(PROVIDERS), default="cuda")
    parser.add_argument("--stage", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--models", nargs="+", help="instead of those of each stage")
    parser.add_argument("--minutes", type=float, help="of each stage, after which it begins no new case")
    parser.add_argument("--profile", help="known device whose estimates are compared; by default the GPU's name")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--prepare", action="store_true", help="write models and golden answers, and run nothing")
    parser.add_argument("--genai", metavar="PYTHON", help="interpreter of an environment with onnxruntime-genai, which "
                        "the stage speed measures with the same models")
    parser.add_argument("--out", type=Path, help="append each row as a line of JSON")
    given = parser.parse_args(arguments)
    if given.prepare:
        prepare(given.stage, given.models)
        return 0
    print("| what | found | wanted | verdict |\n|---|---|---|---|")
    try:
        provider = provider_of(given.device)
        assert provider
    except EdgeInferError as error:
        nothing = Check(PROVIDERS[given.device], 0, given.out)
        for stage in given.stage:
            nothing.not_run(stage, str(error))
        return 0
    profile = given.profile and (gpu_profile(given.profile) or load_profile(given.profile))
    sizes = QUICK if given.quick else Sizes()
    check = Check(provider, 0, given.out, profile)
    for stage in given.stage:
        check.begin(60 * (MINUTES[stage] if given.minutes is None else given.minutes))
        run_stage(check, stage, given.models or MODELS[stage], sizes, given.genai)
    missed = sum(row.verdict == "missed" for row in check.rows)
    print(f"\n{len(check.rows)} rows, {missed} missed.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
