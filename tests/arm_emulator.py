"""The kernels of ARM boards on an emulator: `prepare` where this runs natively, `run` on each emulated core.

.ci/arm calls both, with names of cores. `prepare` cross-compiles the kernels of their levels into EDGEINFER_CACHE and
writes tiny random models with the tokens that this machine's own kernels choose. `run` sees that the core gets the
level made for it, that every instruction agrees with its reference, that neither chunks nor threads change a bit, that
greedy decoding gives those tokens and that the paths of a tree are chains; then it runs those kernel tests whose
kernels were compiled. One core has all of it (`WHOLE`); the others have what an instruction set does in its own way: a
model of the usual types, and the products of integers of every type.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from edgeinfer.base.cache_dir import make_directories
from edgeinfer.errors import KernelError
from edgeinfer.kernels import ISA_LEVELS, Isa, cache_directory, choose
from edgeinfer.kernels.catalogue import FOREIGN
from edgeinfer.kernels.toolchain import build, objects
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runtime import Session
from tests import kernel_selection
from tests.helpers.offloaded import MIXED, OPTIONS, made, offloaded
from tests.helpers.sessions import logits_of, session, tokens, write_model
from tests.models.test_trees import chain_logits, path_to

LEVELS = {"cortex-a72": "neon", "cortex-a76": "neon_dotprod", "neoverse-n2": "neon_i8mm"}
"""ISA level that each emulated core must choose: Raspberry Pi 4, Raspberry Pi 5, a core with i8mm."""
WHOLE = "cortex-a76"
"""The core that all is tried on. EDGEINFER_TEST_ALL=1 tries all on each."""
MODELS = (("q4", "int8"), ("int8", "f16"))
"""Weights (in groups of 32) and KV; cores but `WHOLE` have the first."""
PASSES = ((1, 64), (2, 64), (1, 1), (1, 2), (2, 3), (1, 7))
"""Threads and tokens of a prompt's chunks; the tokens of register blocks are 4, 2 and 1."""
PROMPT, N_NEW = tokens(262), 12
"""Longer than a split of attention."""
PARENTS = [-1, 0, 0, 1, 2, 2, -1, 6]
"""A tree after it."""
TESTS = ("tests/kernels/test_matmul.py", "tests/kernels/test_rows.py", "tests/kernels/test_neuron.py",
         "tests/kernels/test_neuron_mask.py",
         "tests/kernels/test_screen.py", "tests/kernels/test_norms.py", "tests/kernels/test_experts.py",
         "tests/kernels/test_latent.py", "tests/kernels/test_attention.py", "tests/kernels/test_sample.py",
         "tests/kernels/test_recurrent.py", "tests/kernels/test_causal_conv.py", "tests/kernels/test_gated_norm.py")
_TAKEN = " or ".join(kind.replace("_g", "-") for kind in FOREIGN)
"""Types that only files of other formats have, as the tests call them."""
SELECTION = ("((q4-32 or int8-32) and not iq4 and (exact or same_bits or values_apart)) or "
             f"(({_TAKEN}) and (exact or (agrees and 33))) or neuron_mask or "
             "(test_screen.py and not q4-64 and not int8-128) or (test_norms.py and (33 or cap)) or "
             "(test_experts.py and (routing or chosen or numbers or sorted or shared_expert or "
             "(slots_give and not f32) or (matmuls_of_experts and q2-128 and 33-8))) or "
             "(test_rows.py and 33 and (outliers or order or gather)) or "
             "norm_of_f or (test_neuron.py and q2-128 and (same_bits or mask_computes)) or "
             "(test_latent.py and int8 and not size1 and not size2) or "
             "(test_attention.py and distance and not f32) or "
             "(test_sample.py and (33 or 1023 or damage or share)) or "
             "(test_recurrent.py and (33-1 or 48-16 or (drafts and 9x40) or (blocks and 7x5) or positions)) or "
             "(test_causal_conv.py and (19 or rejected or zeros)) or (test_gated_norm.py and (33 or zeros))")
MATMULS = ("tests/kernels/test_matmul.py", "tests/kernels/test_neuron.py")
"""Tests that run on cores other than `WHOLE`, by the same selection."""
MATMUL_KERNELS = ("neuron_gated_q4", "neuron_down_q4", "neuron_gated_int8", "neuron_down_int8", "neuron_gated_q2",
                  "neuron_down_q2", "linear_int8_g32", "gated_int8_g32")
"""Kernels of these that the first of `MODELS` does not need."""
OTHERS = ("gather_outputs", "neuron_mask_scores", "neuron_mask_signs", "neuron_resolve", "reader",
          "screen_maxima", "screen_least_int8_g32", "head_int8_g32", "norm_f32", "norm_q8", "activate",
          "add_positions", "route", "sort_routes", "sigmoid_gate", "experts_input_q8", "experts_input_f32",
          "experts_resolve", "experts_gated_q4_g32", "experts_down_q4_g32", "experts_gated_int8_g32",
          "experts_down_int8_g32", "experts_gated_q2_g128", "experts_down_q2_g128", "store_latent_int8",
          "causal_conv", "delta_rule", "delta_rule_rows", "selective_scan", "state_journal", "gated_norm")
"""Kernels of `TESTS` that no model of `MODELS` needs."""


def prepare(work: Path, cores: list[str]) -> None:
    """Compile for some cores, write the models and this machine's results."""
    expected = {}
    some = {"worker", "submit", "wait", "spin", *MATMUL_KERNELS, *(f"linear_{kind}" for kind in FOREIGN)}
    names = {*some, *OTHERS}
    for weights, kv in MODELS:
        with session(write_model(work, weights=weights), kv=kv, ctx=512) as opened:
            names.update(opened.program.kernels)
            if (weights, kv) == MODELS[0]:
                some.update(opened.program.kernels)
            expected[f"{weights}-{kv}"] = greedy(opened)
            print(f"arm: expected tokens of {weights}-{kv} by {opened.isa}")
    (work / "expected.json").write_text(json.dumps(expected))
    made(work / "cold")
    for core in cores:
        level = next(level for level in ISA_LEVELS if level.name == LEVELS[core])
        compile_level(level, sorted(names if is_whole(core) else some))


def is_whole(core: str) -> bool:
    """Return whether all is tried on a core."""
    return core == WHOLE or kernel_selection.everything()


def compile_level(level: Isa, names: list[str]) -> None:
    """Cross-compile some kernels of an ISA level, two at a time, unless they are there."""
    wanted, start = objects.KernelSet(level), time.perf_counter()
    out = wanted.directory(cache_directory())
    with contextlib.suppress(KernelError):
        wanted.read_all(out, names)
        return
    make_directories(out)
    build.build(wanted, names, keep=lambda name, code: wanted.write(out, name, code))
    print(f"arm: {len(names)} kernels of {level.name} compiled in {time.perf_counter() - start:.0f} s")


def greedy(opened: Session) -> list[int]:
    """The likeliest tokens after PROMPT, one by one."""
    sequence, chosen = opened.new_sequence(), []
    logits = opened.prefill(sequence, PROMPT)
    for _ in range(N_NEW):
        chosen.append(int(np.argmax(logits)))
        logits = opened.decode([sequence], chosen[-1:])[0]
    return chosen


def paths_are_chains(opened: Session) -> bool:
    """Return whether each node of a tree has the logits of the tokens on its path, run one after the other."""
    sequence, ids = opened.new_sequence(), PROMPT[: len(PARENTS)]
    opened.prefill(sequence, PROMPT)
    paths = [[ids[i] for i in path_to(PARENTS, node)] for node in range(len(PARENTS))]
    expected = [chain_logits(opened, sequence, path)[-1] for path in paths]
    rows = opened.forward([Segment(sequence, ids, tuple(range(len(ids))), DECODE, PARENTS)])
    return [row.tobytes() for row in rows] == expected


def cold_is_resident(work: Path) -> bool:
    """Return whether a model has the same logits with neurons on storage; instructions agree with their references
    there."""
    path = work / "cold"
    os.environ["EDGEINFER_CHECK"] = "1"
    with offloaded(path, MIXED, 0) as opened:
        logits_of(opened, PROMPT[:8], n_decoded=3)
    del os.environ["EDGEINFER_CHECK"]
    ids = PROMPT[:40]
    with session(path, **OPTIONS, threads=2) as opened:
        want = logits_of(opened, ids, n_decoded=8)
    with offloaded(path, MIXED, 0, threads=2) as opened:
        return bool((logits_of(opened, ids, n_decoded=8) == want).all())


def run(work: Path, core: str) -> None:
    """All checks on this (emulated) core."""
    level = choose().name
    require(level == LEVELS[core], f"{core} gets {level}, not {LEVELS[core]}")
    expected = json.loads((work / "expected.json").read_text())
    for weights, kv in MODELS if is_whole(core) else MODELS[:1]:
        path = write_model(work, weights=weights)
        os.environ["EDGEINFER_CHECK"] = "1"
        with session(path, kv=kv, ctx=512) as opened:  # raises where an instruction and its reference disagree
            logits_of(opened, PROMPT[:21], n_decoded=3)
        del os.environ["EDGEINFER_CHECK"]
        rows = []
        for threads, chunk in PASSES:
            with session(path, kv=kv, ctx=512, threads=threads, prefill_chunk=chunk) as opened:
                rows.append(logits_of(opened, PROMPT, n_decoded=3))
        same = all((row == rows[0]).all() for row in rows)
        require(same, f"{weights}-{kv} on {level}: chunks or threads change bits")
        with session(path, kv=kv, ctx=512, threads=2) as opened:
            require(greedy(opened) == expected[f"{weights}-{kv}"],
                    f"{weights}-{kv} on {level}: other tokens than x86's")
        with session(path, kv=kv, ctx=512, threads=2, max_sequences=2, outputs=len(PARENTS)) as opened:
            require(paths_are_chains(opened), f"{weights}-{kv} on {level}: a tree's paths are not chains")
        print(f"arm: {core}: {level}, {weights}-{kv}: references, bits, tokens and trees agree", flush=True)
    if is_whole(core):
        require(cold_is_resident(work), f"{level}: neurons that are read when they are wanted change bits")
        print(f"arm: {core}: {level}: hot and cold neurons: references and bits agree", flush=True)
    os.environ["EDGEINFER_ISA"] = level
    import pytest

    os.environ["EDGEINFER_TEST_EMULATED"] = "1"
    alone = ("-o", "addopts=--import-mode=importlib", "-o", "required_plugins=")  # an emulator has no other workers
    how = ("-q", "--all", "-p", "no:cacheprovider", "--no-header", "--durations=3")
    code = pytest.main([*alone, *how, "-k", SELECTION, *(TESTS if is_whole(core) else MATMULS)])
    require(code == 0, f"{core}: kernel tests fail on {level}")


def require(holds: bool, otherwise: str) -> None:
    """End with a sentence unless it holds."""
    if not holds:
        raise SystemExit(f"arm: {otherwise}")


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]), sys.argv[3:])
    else:
        run(Path(sys.argv[2]), sys.argv[3])
