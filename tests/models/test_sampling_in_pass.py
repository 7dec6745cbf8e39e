"""Tokens chosen within a forward pass: the text of a seed is that of the sampler in NumPy, whatever shares the pass."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.config import GenerationConfig
from edgeinfer.engine import Generation, Sampler, run_alone
from edgeinfer.errors import RequestError
from edgeinfer.kernels import abi
from edgeinfer.runner import DECODE, Segment
from edgeinfer.runtime import Session
from tests.helpers.sessions import TINY, session, tokens, write_model

VOCABULARY = 3000
SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.0}, {"top_k": 0, "min_p": 0.0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_k": 200},
    {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {5: 2.0, 7: -100.0}},
    {"temperature": 0.0, "repetition_penalty": 1.8}, {"logprobs": 2, "temperature": 5.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    path = write_model(tmp_path_factory.mktemp("samples"), replace(TINY, vocab_size=VOCABULARY))
    with session(path, max_sequences=8, threads=2) as running:
        yield running


def texts(opened: Session, **options: Any) -> list[tuple[int, ...]]:
    request = Generation(opened, None, tokens(9), GenerationConfig(max_tokens=12, **options))
    return [choice.token_ids for choice in run_alone(request, opened).choices]


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("n", [1, 3])
def test_same_text_as_the_sampler_in_numpy(
    opened: Session, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], n: int
) -> None:
    options = {"seed": 11, "n": n, **options}
    within = texts(opened, **options)
    monkeypatch.setattr(opened.executor.tuner, "further", lambda tokens, stop: 0)
    forward = opened.forward
    monkeypatch.setattr(opened, "forward", lambda segments, cancel=None: forward(
        [segment._replace(sample_specs=()) for segment in segments], cancel))
    assert texts(opened, **options) == within
    if options.get("temperature") != 0.0:
        assert len(set(within)) == n


def test_default_settings_choose_within_the_pass(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy looks at no row but the first one of further samples."""
    looked: list[int] = []
    sample = Sampler._sample
    monkeypatch.setattr(Sampler, "_sample", lambda self, logits: looked.append(1) or sample(self, logits))
    for options in ({}, {"temperature": 0.0}, SETTINGS[5]):
        texts(opened, seed=1, **options)
        assert not looked
    texts(opened, seed=1, n=3)
    assert len(looked) == 2


def test_samples_of_several_settings_in_one_pass_are_those_of_each_alone(opened: Session) -> None:
    chains = [Sampler(GenerationConfig(**options), VOCABULARY, seed, room=20) for seed, options in enumerate(SETTINGS)]
    sequences = [opened.new_sequence() for _ in chains]
    for i, (chain, sequence) in enumerate(zip(chains, sequences, strict=True)):
        chain.prompt(tokens(3 + i, seed=i))
        opened.prefill(sequence, tokens(3 + i, seed=i)[:-1])
    last = [tokens(3 + i, seed=i)[-1] for i in range(len(chains))]
    rows = opened.decode(sequences, last, None, [chain.address for chain in chains]).copy()
    together = [chain.sample(row).token_id for chain, row in zip(chains, rows, strict=True)]
    for i, (chain, sequence) in enumerate(zip(chains, sequences, strict=True)):
        opened.truncate(sequence, len(sequence) - 1)
        row = opened.forward([Segment(sequence, [last[i]], (0,), DECODE, None, (chain.address,))])[0]
        assert row.tobytes() == rows[i].tobytes()  # edits of a sample are undone
        assert chain.sample(row).token_id == together[i] == chain.sample(row).token_id
        opened.release(sequence)


def test_a_token_is_taken_once(opened: Session) -> None:
    chain, sequence = Sampler(GenerationConfig(temperature=0.0), VOCABULARY, 1), opened.new_sequence()
    row = opened.prefill(sequence, [1, 2, 3], None, chain.address)
    assert chain.sample(row).token_id == row.argmax()
    other = np.zeros(VOCABULARY, np.float32)
    other[17] = 1
    assert chain.sample(other).token_id == 17
    opened.release(sequence)


def test_samples_and_outputs_go_in_pairs(opened: Session) -> None:
    sequence = opened.new_sequence()
    with pytest.raises(RequestError,
                       match="2 sample specs are given for 1 rows of logits; give one for each, 0 where none"):
        opened.forward([Segment(sequence, [1, 2], (1,), DECODE, None, (0, 0))])


def test_passes_without_samples_skip_their_instructions(opened: Session) -> None:
    sequence, sample_specs = opened.new_sequence(), [r.kernel.startswith("sample_")
                                                     for r in opened.program.instructions]
    assert sum(sample_specs) == 3 and opened.program.instructions[-1].predicates == (abi.COUNT_OUTPUTS,
                                                                                     abi.COUNT_SAMPLES)
    opened.prefill(sequence, [1, 2, 3])
    opened.executor.start_profile()
    opened.decode([sequence], [4])
    assert not opened.executor.stop_profile()[sample_specs].any()
    opened.release(sequence)


@pytest.mark.slow
def test_every_instruction_agrees_with_its_reference_in_a_real_run(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dataclasses import replace\n"
        "from tests.models import test_sampling_in_pass as t\n"
        "path = t.write_model(Path(sys.argv[1]), replace(t.TINY, vocab_size=t.VOCABULARY))\n"
        "with t.session(path, max_sequences=8) as s: print([t.texts(s, seed=3, n=2, **o) for o in t.SETTINGS[:6]])\n"
    )
    root = Path(__file__).parents[2]
    runs = [subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True,
                           env={**os.environ, "EDGEINFER_CHECK": check}) for check in ("0", "1")]
    assert [run.returncode for run in runs] == [0, 0], runs[1].stderr[-500:]
    assert runs[0].stdout == runs[1].stdout
