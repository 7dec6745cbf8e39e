"""Everything that can be wrong with a device, on small models, in a minute."""

from __future__ import annotations

import subprocess
import time
from itertools import pairwise
from typing import Any

import numpy as np

from edgeinfer import LLM
from edgeinfer.backends import OnnxRunner, gpu_free_bytes
from edgeinfer.backends.onnx.devices import shared_out
from edgeinfer.config import PAGES, SLOTS
from edgeinfer.devices import gpu_profile
from edgeinfer.errors import CancelledError
from edgeinfer.runner import Cancellation, Runner, Sequence

from .models import PROMPT, Golden, bundle_of, difference, golden, prompt_of
from .numerics import bound, compare
from .rows import Check

RAGGED = (5, 17, 9)
"""Tokens of sequences that decode together."""
CTX = 512
OWN = 8
"""Tokens of each copy of a sequence, half of them in its next page."""
HOLD_SECONDS = 60.0
"""Time after which a pass runs on unless it was cancelled."""
CLOSED_BYTES = 256 << 20
"""Memory of the GPU that may be missing after models were closed, beside the remains of the first one: onnxruntime
keeps that of the largest KV cache for the next model."""


def smoke(check: Check, names: list[str]) -> None:
    """Check one model after the other, in each layout of the KV cache."""
    check.case("environment", lambda: environment(check))
    free: list[int] = []
    for name in names:
        for layout in (PAGES, SLOTS) if check.provider.page_positions else (SLOTS,):
            check.case(f"{name}, {layout}", lambda name=name, layout=layout: model(check, name, layout))  # type: ignore
            if check.cuda:
                free.append(gpu_free_bytes())
    if check.cuda:
        check.case("device auto", lambda: automatic(check))
        least = free[0] - min(free)
        check.add("memory of the GPU after models were closed", f"{least / 1e6:.0f} MB less than after the first",
                  f"{CLOSED_BYTES / 1e6:.0f} MB", least <= CLOSED_BYTES)


def environment(check: Check) -> None:
    """Add versions, driver, GPU."""
    import onnxruntime

    check.add("onnxruntime", f"{onnxruntime.__version__}, {', '.join(onnxruntime.get_available_providers())}")
    if check.cuda:
        smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
                             capture_output=True, text=True, check=False)
        check.add("GPU", " ".join(smi.stdout.split()))
        check.profile = check.profile or gpu_profile(smi.stdout.split(",")[0])
    check.add("profile for estimates", check.profile.title if check.profile else "none of this name; see --profile")


def automatic(check: Check) -> None:
    """Check the choice of ``--device auto``."""
    from edgeinfer.backends import provider_of

    found = provider_of("auto")
    check.add("device auto", found.device if found else "cpu", "cuda", found is not None and found.device == "cuda")


def model(check: Check, name: str, layout: str) -> None:
    """Open a model once and check all that it answers."""
    path, what = bundle_of(name), f"{name}, {layout}"
    answer = golden(name, path)
    with LLM(path, device=check.provider.device, kv_layout=layout, ctx=CTX, max_sequences=4,  # type: ignore[arg-type]
             prefill_chunk=CTX, speculate="off") as llm:
        runner = llm.runner
        assert isinstance(runner, OnnxRunner)
        if check.provider.partial:
            check.add(f"{what}: operations on {check.provider.name}", shared_out(runner.sessions.model, check.provider))
        else:
            check.add(f"{what}: all operations on {check.provider.name}", "yes", "yes", True)  # else it does not open
        compare(check, what, runner, answer)
        chunks(check, what, runner, answer)
        ragged(check, what, runner, bound(check, answer))
        forked(check, what, runner, bound(check, answer))
        reused(check, what, runner, answer)
        sampling(check, what, llm)
        stream(check, what, llm)
        if not check.provider.graphs:  # where a pass is recorded it is not ended
            cancelled_pass(check, what, runner)


def chunks(check: Check, what: str, runner: Runner, answer: Golden) -> None:
    """Check a prompt that is read in two chunks, the second after a past."""
    ids, sequence = answer.ids[:PROMPT].tolist(), runner.new_sequence()
    runner.prefill(sequence, ids[:7])
    worst = difference(runner.prefill(sequence, ids[7:]), answer.logits[0])
    runner.release(sequence)
    most = bound(check, answer)
    check.add(f"{what}: second chunk after a past", f"{worst:.1e}", f"{most:.1e}", worst <= most)


def ragged(check: Check, what: str, runner: Runner, most: float) -> None:
    """Check a step of sequences of unlike lengths beside steps of each alone."""
    ids = prompt_of(runner, sum(RAGGED))
    ends = np.cumsum((0, *RAGGED)).tolist()
    prompts = [ids[start:end] for start, end in pairwise(ends)]

    def read() -> list[Sequence]:
        held = [runner.new_sequence() for _ in prompts]
        for sequence, prompt in zip(held, prompts, strict=True):
            runner.prefill(sequence, prompt)
        return held

    held = read()
    together = runner.decode(held, [3] * len(held)).copy()
    for sequence in held:
        runner.release(sequence)
    held = read()
    alone = np.stack([runner.decode([sequence], [3])[0].copy() for sequence in held])
    for sequence in held:
        runner.release(sequence)
    worst = difference(together, alone)
    check.add(f"{what}: {len(prompts)} sequences of unlike lengths in one step", f"{worst:.1e}", f"{most:.1e}",
              worst <= most)


def forked(check: Check, what: str, runner: OnnxRunner, most: float) -> None:
    """Check copies of a sequence that go on by themselves from the middle of a page, beside prompts of equal tokens."""
    length, several = min(runner.block_tokens, CTX // 2) - OWN // 2, len(RAGGED)
    ids = prompt_of(runner, length + several * OWN)
    prompt, own = ids[:length], np.reshape(ids[length:], (several, OWN)).tolist()
    first = runner.new_sequence()
    runner.prefill(first, prompt)
    held = [first, *(runner.fork(first) for _ in own[1:])]
    for tokens in zip(*own, strict=True):
        together = runner.decode(held, tokens).copy()
    for sequence in held:
        runner.release(sequence)
    alone = []
    for tokens in own:
        sequence = runner.new_sequence()
        alone.append(runner.prefill(sequence, prompt + tokens).copy())
        runner.release(sequence)
    worst = difference(together, np.stack(alone))
    check.add(f"{what}: {several} copies of a sequence, each with {OWN} tokens of its own", f"{worst:.1e}",
              f"{most:.1e}", worst <= most)


def reused(check: Check, what: str, runner: Runner, answer: Golden) -> None:
    """Check a short prompt where a long one was: nothing of it may be seen."""
    long = runner.new_sequence()
    runner.prefill(long, prompt_of(runner, PROMPT + 40)[40:] * 4)
    runner.truncate(long, runner.can_truncate(long, 3))
    runner.truncate(long, 0)
    worst = difference(runner.prefill(long, answer.ids[:PROMPT].tolist()), answer.logits[0])
    runner.release(long)
    most = bound(check, answer)
    check.add(f"{what}: a prompt where another was", f"{worst:.1e}", f"{most:.1e}", worst <= most)


def sampling(check: Check, what: str, llm: LLM) -> None:
    """Check that the best logits of the device give the tokens that whole rows give."""
    ids, options = prompt_of(llm.runner, 16), {"max_tokens": 16, "seed": 7, "ignore_eos": True}
    for label, chosen in (("greedy", {"temperature": 0.0}), ("top-k 40", {"temperature": 0.9, "top_k": 40})):
        few = llm.complete(ids, **options, **chosen).token_ids  # type: ignore[arg-type]
        all_of_them = llm.complete(ids, **options, **chosen, logprobs=1).token_ids  # type: ignore[arg-type]
        check.add(f"{what}: {label} from the best logits and from all", f"{len(few)} tokens", "the same 16 tokens",
                  few == all_of_them and len(few) == 16)


def stream(check: Check, what: str, llm: LLM) -> None:
    """Check that a request can be cancelled, and that the next one is not disturbed."""
    ids = prompt_of(llm.runner, 16)
    before = llm.complete(ids, max_tokens=8, temperature=0.0, ignore_eos=True).token_ids
    request = llm.request(ids, {"max_tokens": CTX - 20, "temperature": 0.0, "ignore_eos": True})
    request.every_step, request.on_event = True, request.cancel  # by the thread of the engine, which no other can delay
    ended = request.finish()
    after = llm.complete(ids, max_tokens=8, temperature=0.0, ignore_eos=True).token_ids
    good = ended.finish_reason == "cancelled" and ended.completion_tokens < CTX // 2 and before == after
    check.add(f"{what}: a request that is cancelled", f"{ended.completion_tokens} of {CTX - 20} tokens, "
              f"{ended.finish_reason}; the next request {'agrees' if before == after else 'differs'}",
              "cancelled; agrees", good)


class Held:
    """A session whose next run is cancelled when it is in the hands of the device's thread, before the model begins.

    It waits there until it is asked to end: how fast model, machine and cancelling thread are makes no difference.
    """

    def __init__(self, session: Any, wish: Cancellation):
        self._session, self._wish = session, wish

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        """Run the model once its options say that it is to end, or after HOLD_SECONDS in any case."""
        self._wish.cancel()
        until = time.monotonic() + HOLD_SECONDS
        while not options.terminate and time.monotonic() < until:
            time.sleep(0.001)
        self._session.run_with_iobinding(binding, options)


def cancelled_pass(check: Check, what: str, runner: OnnxRunner) -> None:
    """Check that a forward pass over a prompt can be ended, which leaves the sequence as it was."""
    sequence, wish, model = runner.new_sequence(), Cancellation(), runner.sessions.model
    runner.sessions.model = Held(model, wish)
    try:
        runner.prefill(sequence, prompt_of(runner, CTX - 8), cancel=wish)
        found = "ran to its end"
    except CancelledError:
        found = "ended"
    finally:
        runner.sessions.model = model
    kept = len(sequence)
    runner.release(sequence)
    check.add(f"{what}: a forward pass that is cancelled", f"{found}, {kept} tokens kept", "ended, 0 tokens kept",
              found == "ended" and kept == 0)
